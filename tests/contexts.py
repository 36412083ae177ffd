"""Round contexts of tests: made once, used with any model."""

from dataclasses import replace

from fedobp.method import RoundContext
from fedobp.models import Model


def with_model(model: Model, ctx: RoundContext) -> RoundContext:
    """Return a context with a model."""
    return replace(ctx, model=model)
