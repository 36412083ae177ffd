"""Fused Triton kernels for the paper's CNN: what the lanes engine trains and tests with on a card that they know.

`forward` and `backward` hold the kernels, `rule` how parameters lie and move, `shapes` the network's sizes, `tiles` the
tile shapes that suit a card, `step` one step's buffers and launches, `fused` the phases made of them, `convolutions` a
function for losses of a method's own. Triton is imported only when it is needed.
"""

import warnings
from functools import cache
from importlib import import_module
from subprocess import SubprocessError
from typing import TYPE_CHECKING, cast

import torch

from fedobp.engine.arithmetic import Precision
from fedobp.models import NETS, Model
from fedobp.models.nets import cnn

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused
    from fedobp.engine.kernels.step import Arithmetic


# The version that the kernels were run with: what another makes of them nobody has looked at, and it matters
# (docs/performance.md, "A tile that was copied over").
_TRITON = "3.6"


def suits(model: Model, batch: int, precision: Precision) -> bool:
    """Say whether the kernels are made for a model, a batch size and a precision."""
    return (
        (model.name, NETS["cnn"]) == ("cnn", cnn)
        and model.shape[0] <= 4
        and model.shape[1:] in ((28, 28), (32, 32))
        and 2 <= model.classes <= 128
        and 16 <= batch <= 64
        and precision != "fp64"
    )


def fused_for(model: Model, batch: int, precision: Precision, device: torch.device) -> "Fused | None":
    """Return the kernels for a model on a device, or None where there are none, and the general path is taken."""
    if device.type != "cuda" or not suits(model, batch, precision):
        return None
    from fedobp.engine.kernels.tiles import tiles_for

    tiles = tiles_for(torch.cuda.get_device_capability(device), precision)
    if tiles is None:
        name = torch.cuda.get_device_name(device)
        _say(f"no kernels are tuned for {precision} on {name}, so the general path trains: see docs/performance.md")
        return None
    if missing := _missing():
        _say(f"the fused kernels need {missing}: until then the general path trains, several times slower")
        return None
    from fedobp.engine.kernels.fused import Fused

    return Fused(model, batch, cast("Arithmetic", precision), tiles, device)


def _missing() -> str | None:
    """Return what keeps Triton from running."""
    try:
        triton = import_module("triton")
        if triton.__version__.split(".")[:2] != _TRITON.split("."):
            return f"Triton {_TRITON}, and this is {triton.__version__} (pip install 'triton=={_TRITON}.*')"
        triton.runtime.driver.active.utils  # builds what launches kernels, with the machine's C compiler  # noqa: B018
    except ImportError:
        return f"Triton, which is not installed (pip install 'triton=={_TRITON}.*')"
    except (RuntimeError, OSError, SubprocessError) as error:
        return f"Triton to work, and it does not ({str(error).splitlines()[0]})"
    return None


@cache
def _say(what: str) -> None:
    """Say something once."""
    warnings.warn(what, stacklevel=3)
