"""Whether the fused kernels are used for a model, on a device, in a precision."""

import warnings
from functools import cache
from importlib import import_module
from subprocess import SubprocessError
from typing import TYPE_CHECKING, cast

import torch

from fedobp.models import Model
from fedobp.models.networks import cnn
from fedobp.options import Precision

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused
    from fedobp.engine.kernels.step import KernelPrecision


# The version that the kernels were tested with. Another one may compile them incorrectly: see
# tests/compile_kernels.py for a case.
_TRITON = "3.6"


def is_supported(model: Model, batch: int, precision: Precision) -> bool:
    """Return whether the kernels support a model, a batch size and a precision."""
    return (
        model.build is cnn
        and model.shape[0] <= 4
        and model.shape[1:] in ((28, 28), (32, 32))
        and 2 <= model.classes <= 128
        and 16 <= batch <= 64
        and precision != "fp64"
    )


def fused_for(model: Model, batch: int, precision: Precision, device: torch.device) -> "Fused | None":
    """Return the kernels for a model on a device, or None if the general path must be used."""
    if device.type != "cuda" or not is_supported(model, batch, precision):
        return None
    from fedobp.engine.kernels.tiles import tiles_for

    tiles = tiles_for(torch.cuda.get_device_capability(device), precision)
    if tiles is None:
        name = torch.cuda.get_device_name(device)
        _warn_once(
            f"no kernels are tuned for {precision} on {name}, so the general path trains: see docs/performance.md"
        )
        return None
    if missing := _triton_problem():
        _warn_once(f"the fused kernels need {missing}: until then the general path trains, several times slower")
        return None
    from fedobp.engine.kernels.fused import Fused

    return Fused(model, batch, cast("KernelPrecision", precision), tiles, device)


def _triton_problem() -> str | None:
    """Return why Triton cannot run, or None."""
    try:
        triton = import_module("triton")
        if triton.__version__.split(".")[:2] != _TRITON.split("."):
            return f"Triton {_TRITON}, and this is {triton.__version__} (pip install 'triton=={_TRITON}.*')"
        triton.runtime.driver.active.utils  # builds the launcher with the machine's C compiler  # noqa: B018
    except ImportError:
        return f"Triton, which is not installed (pip install 'triton=={_TRITON}.*')"
    except (RuntimeError, OSError, SubprocessError) as error:
        return f"a working Triton, and this one fails ({str(error).splitlines()[0]})"
    return None


@cache
def _warn_once(message: str) -> None:
    """Warn once per message."""
    warnings.warn(message, stacklevel=3)
