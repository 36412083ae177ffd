"""Models: ordinary modules that the rest of the library sees as one flat vector with a layout."""

from fedobp.models import residual, tokens  # noqa: F401  they register their networks
from fedobp.models.batch_norm import is_statistic
from fedobp.models.layout import Inside, Layout
from fedobp.models.model import Model
from fedobp.models.networks import NETS, register

__all__ = ["NETS", "Inside", "Layout", "Model", "is_statistic", "register"]
