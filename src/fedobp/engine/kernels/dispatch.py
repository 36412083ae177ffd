"""Whether the fused kernels are used for a model, on a device, in a precision; and why not."""

import os
import warnings
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

import torch

from fedobp.engine.kernels.cards import OLDEST, Card, card_of
from fedobp.engine.kernels.tiles import Table, shipped_table, table_from_json
from fedobp.errors import FedobpError, first_line
from fedobp.models import Model
from fedobp.models.networks import cnn
from fedobp.options import KernelMode, Precision

if TYPE_CHECKING:
    from fedobp.engine.kernels.checks import HazardCheck
    from fedobp.engine.kernels.fused import Fused
    from fedobp.engine.kernels.step import KernelPrecision

TRITON = ">=3.6,<3.8"  # tested; a newer one is used if its IR can be read
_OLDEST_TRITON = (3, 6)
FIRST_USE_SECONDS = 60.0
_PASSED = "passed"
_SUPPORTED = (
    "the paper's CNN (--model cnn) on 28x28 or 32x32 images of up to 4 channels and 128 classes, a --batch-size of 16 "
    "to 64, and a --precision other than fp64"
)


class Unusable(Exception):
    """Why the kernels cannot be used here: a phrase with what to do."""


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


def fused_for(model: Model, batch: int, precision: Precision, mode: KernelMode, device: torch.device) -> "Fused | None":
    """Return the kernels for a model on a device, or None if the general path must be used.

    Where the card or Triton is the reason, a warning says so. With `on` any reason is an error.
    """
    if mode == "off":
        return None
    if device.type != "cuda" or not is_supported(model, batch, precision):
        if mode == "on":
            needed = _SUPPORTED if device.type == "cuda" else "a CUDA device"
            raise FedobpError(f"--kernels on needs {needed}: use --kernels auto")
        return None
    try:
        return checked(model, batch, cast("KernelPrecision", precision), mode, device)
    except Unusable as reason:
        if mode == "on":
            raise FedobpError(f"--kernels on: {reason}") from None
        _warn_once(f"{reason}: the general path trains, several times slower (fedobp doctor says more)")
        return None


def checked(model: Model, batch: int, precision: "KernelPrecision", mode: KernelMode, device: torch.device) -> "Fused":
    """Return kernels that have passed all checks, or raise `Unusable`. What was passed before is not run again."""
    card = card_of(device)
    if problem := card_problem(card) or triton_problem():
        raise Unusable(problem)
    from fedobp.engine.kernels import cache as files
    from fedobp.engine.kernels.compilation import hashing
    from fedobp.engine.kernels.fused import Fused
    from fedobp.engine.kernels.self_check import compile_ahead, disagreement

    hashing()  # it begins here, because compiling needs it soon

    def kernels_of(table: Table) -> Fused:
        return Fused(model, batch, precision, table.entries, device, card, must_read)

    def key_of(table: Table) -> files.Key:
        shape = [*model.shape, model.classes, batch]
        return files.key_for(card, precision, table=table.hash, shape=shape, must_read=must_read)

    must_read, known = mode != "on", known_table(card, precision)
    if known and files.load("self-check", key_of(known)) is None:
        compile_ahead(kernels_of(known), model, card)
    check = race_check(card)
    if must_read and not check.readable:
        version = import_module("triton").__version__
        raise Unusable(
            f"the fused kernels cannot be checked for races with Triton {version} ({check.sentence}; they are tested "
            f"with Triton {TRITON}, and --kernels on uses them all the same)"
        )
    try:
        table = known or table_for(card, precision, device, must_read)
    except Exception as error:  # too little memory on the card, or a kernel does not compile
        raise Unusable(f"the fused kernels could not be tuned for {card.name} ({first_line(error)})") from error
    fused, key = kernels_of(table), key_of(table)
    verdict = files.load("self-check", key)
    if verdict is None:
        try:
            verdict = disagreement(fused, model) or _PASSED
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a kernel does not compile, or cannot be used: Triton's classes are unrelated
            verdict = first_line(error)
        (files.save if verdict == _PASSED else files.keep)("self-check", key, verdict)
    if verdict != _PASSED:
        raise Unusable(f"the fused kernels failed their self-check on {card.name} ({verdict})")
    return fused


def race_check(card: Card) -> "HazardCheck":
    """Return whether the check for races reads what this Triton compiles for a card: found out once, then kept."""
    from fedobp.engine.kernels import cache as files
    from fedobp.engine.kernels.checks import HazardCheck, hazard_check

    key = files.key_for(card, "any")
    match files.load("race-check", key):
        case [True, str(sentence)]:
            return HazardCheck(True, sentence)
    found = hazard_check(card)
    if found.readable:
        files.save("race-check", key, list(found))
    return found


def card_problem(card: Card) -> str | None:
    """Return why a card cannot run the kernels, or None."""
    if torch.version.hip:
        return "the fused kernels need an NVIDIA card"
    if card.capability >= OLDEST:
        return None
    return f"the fused kernels need compute capability 8.0 or newer, and {card.name} has {card.version}"


def triton_problem(*, launches: bool = True) -> str | None:
    """Return why Triton cannot compile or launch kernels, or None."""
    try:
        triton = import_module("triton")
        if tuple(map(int, triton.__version__.split(".")[:2])) < _OLDEST_TRITON:
            return f"the fused kernels need Triton 3.6 or newer, and this is {triton.__version__} (update torch)"
        if os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y"):
            return "the fused kernels cannot be compiled while TRITON_INTERPRET is set (unset it)"
        if launches:
            triton.runtime.driver.active.utils  # builds the launcher with the machine's C compiler  # noqa: B018
    except Exception as error:  # a damaged installation may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return (
                "the fused kernels need Triton, which CUDA builds of torch bring on Linux (pip install "
                f"'triton{TRITON}')"
            )
        return f"the fused kernels need a working Triton, and this one fails ({first_line(error)})"
    return None


def known_table(card: Card, precision: str) -> Table | None:
    """Return a card's table: the user's own if they have tuned, or the shipped one; None: there is neither."""
    from fedobp.engine.kernels import cache as files

    content = files.load("tiles", files.key_for(card, precision))
    try:
        return table_from_json(content) if content else shipped_table(card.capability, precision)
    except ValueError:
        return shipped_table(card.capability, precision)


def table_for(card: Card, precision: "KernelPrecision", device: torch.device, must_read: bool = True) -> Table:
    """Return a card's table; where there is none, the first use tunes for at most a minute."""
    if table := known_table(card, precision):
        return table
    from fedobp.engine.kernels.tuning import tune

    _warn_once(f"tuning the kernels for {card.name} in {precision}, once, for up to {FIRST_USE_SECONDS:.0f} s")
    tuned = tune(card, precision, device, FIRST_USE_SECONDS, must_read=must_read)
    place = f"kept in {tuned.path}" if tuned.path else "not kept"
    _warn_once(
        f"the kernels were tuned for {card.name} in {precision} in {tuned.seconds:.0f} s; the table is {place} (fedobp "
        "tune searches longer)"
    )
    return tuned.table


@cache
def _warn_once(message: str) -> None:
    """Warn once per message."""
    warnings.warn(message, stacklevel=3)
