"""A check of the fused kernels on the device at hand, with the installed versions: a few steps on noise."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from fedobp.data import Dataset, FederatedData, Shard
from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.compilers import Compilers
from fedobp.engine.kernels.fused import Fused
from fedobp.engine.kernels.reference import change_errors, expected_steps, scaled_inputs
from fedobp.engine.kernels.specimens import specimens
from fedobp.engine.kernels.step import KernelPrecision
from fedobp.engine.sgd import Rule
from fedobp.method import Part
from fedobp.models import Model

# The error of a tensor's change that is allowed in half of the lanes, and in all. The reference rounds the operands of
# products, so the rest is the error of sums in float32. Sometimes this error reverses a rounding, a ReLU, or the order
# of two values in a pooling window, and the difference grows with each step and with the learning rate. Float32 on the
# CPU differs by up to 0.006 and 0.043 in the trainings below, for models with 2, 10 and 128 classes (in fp32 by 8e-5
# and 0.011), sound kernels on an H200 by up to 0.013 in half of the lanes.
BOUNDS: dict[KernelPrecision, tuple[float, float]] = {"bf16": (0.03, 0.3), "tf32": (0.03, 0.3), "fp32": (5e-4, 0.1)}
LABEL_BOUND = 0.02  # of logits: other labels are chosen only in near ties

_SAMPLES, _STEPS = 100, 2
_LANES = 20  # compared with the reference, in as many trainings as needed: of two lanes alone both may be unusual
_RATES = (0.02, 0.01, 0.015)  # learning rates of three lanes in turn
_SLOW = ("update", "conv2")  # to compile: these are begun first
# The reference runs without cuDNN, which the kernels do not need: loading it takes longer than the check.
_without_cudnn = partial(torch.backends.cudnn.flags, enabled=False)
_Training = tuple[Tensor, Rule, Part, Tensor, Tensor, list[FederatedData], list[int]]  # the arguments of `Fused.train`


def disagreement(fused: Fused, model: Model, lanes: Sequence[int] = (20, 2)) -> str | None:
    """Return what is wrong with the kernels, with numbers, or None.

    For each number of lanes, training and predictions are compared with a reference in float64; equal lanes must stay
    equal, and equal calls must have equal results. By default the last and the first entry of a table of tiles are
    used, with and without padding lanes; the last one first, because that compiles all variants at once. Nothing
    remains in `fused` but its compiled kernels: those of plain SGD, which most runs use.
    """
    data = noise(model, _SAMPLES, fused.device)
    try:
        with _without_cudnn():
            for number in lanes:
                if wrong := _wrong_steps(fused, model, data, number) or _wrong_labels(fused, model, data, number):
                    return f"with {number} lanes, {wrong}"
    finally:
        fused.forget(data)
    return None


def compile_ahead(fused: Fused, model: Model, card: Card) -> None:
    """Have other processes compile what the first use needs: the check's kernels, which runs need too, and specimens.

    Meanwhile this process loads what the check needs, and checks the kernels that are done for races. Whatever fails
    here is done again, or refused, where it is used.
    """
    data = noise(model, _SAMPLES, fused.device)
    kernels = fused.needed(_LANES, data)
    launches, checked = [*kernels, *specimens(card.capability).values()], {one.variant for one in kernels}
    launches.sort(key=lambda one: one.kernel.__name__ not in _SLOW)
    with Compilers(len(launches)) as compilers:
        done = compilers.compile([one.description(card.capability) for one in launches])
        with suppress(Exception), _without_cudnn():
            expected_steps(model, fused.precision, *_training(model, fused.batch, data, range(_LANES), [1] * _LANES))
        for one in (launches[at] for at in done):
            if one.variant in checked:
                with suppress(Exception):
                    fused.check(one)


def noise(model: Model, samples: int, device: torch.device) -> FederatedData:
    """Return images of noise for a model: one client, which trains on all of them."""
    channels, *sides = model.shape
    x = np.random.default_rng(0).integers(0, 256, (samples, *sides, channels), dtype=np.uint8)
    ids, none = np.arange(samples), np.arange(0)
    dataset = Dataset("noise", x, ids % model.classes, tuple(range(model.classes)), 0)
    return FederatedData(dataset, [Shard(ids, none, none)], device, torch.float32)


def _start(model: Model, seeds: Sequence[int], device: torch.device) -> Tensor:
    return torch.stack([_initial(model, seed) for seed in seeds]).to(device)


@lru_cache(maxsize=_LANES)
def _initial(model: Model, seed: int) -> Tensor:
    """Return an initial model; the check uses each several times, and making one takes longer than training it."""
    return model.initial(seed)


def _uneven(lanes: int, more: int, less: int) -> list[int]:
    """Return a number for each lane: `less` for the last two, but not for the first, and `more` for the others."""
    return [more if lane < max(1, lanes - 2) else less for lane in range(lanes)]


def _training(model: Model, batch: int, data: FederatedData, seeds: Sequence[int], steps: list[int]) -> _Training:
    """Return a training with partial batches; equal seeds make equal lanes."""
    device, draw = data.x.device, torch.Generator().manual_seed(0)
    ids = torch.randint(0, _SAMPLES, (_STEPS, max(seeds) + 1, batch), generator=draw)[:, seeds]
    sizes = [[batch - (seed + 3 * step) % (batch // 2) for seed in seeds] for step in range(_STEPS)]
    counts = torch.tensor(sizes) * (torch.arange(_STEPS)[:, None] < torch.tensor(steps))
    rule = Rule(torch.tensor([[_RATES[seed % 3]] for seed in seeds], device=device))
    return _start(model, seeds, device), rule, "all", ids.to(device), counts.to(device), [data] * len(seeds), steps


def _wrong_steps(fused: Fused, model: Model, data: FederatedData, lanes: int) -> str | None:
    """Return what is wrong with training, or None."""

    def training(seeds: Sequence[int], steps: list[int]) -> _Training:
        return _training(model, fused.batch, data, seeds, steps)

    def trained(seeds: Sequence[int], steps: list[int]) -> Tensor:
        given = training(seeds, steps)
        fused.train(*given)
        return given[0]

    layout, steps, every = model.layout, _uneven(lanes, _STEPS, 1), []
    for seeds in (range(first, first + lanes) for first in range(0, _LANES, lanes)):
        given, found = training(seeds, steps), trained(seeds, steps)
        right, _ = expected_steps(model, fused.precision, *given)
        every.append(change_errors(layout, given[0], found, right))
    errors, (usual, most) = torch.cat(every, dim=1).cpu(), BOUNDS[fused.precision]
    middle = errors.median(dim=1).values
    for values, bound, where in ((errors.amax(dim=1), most, ""), (middle, usual, " in half of the lanes")):
        worst, at = values.max(dim=0)
        if not worst < bound:  # it may be NaN
            name = layout.names[at] + where
            return f"a step differs from the reference by {worst:.2g} in {name} (at most {bound:g} is allowed)"
    if different := _different(found, trained(seeds, steps)):
        return f"a repeated launch differs in {different:,} of {layout.size:,} entries"
    equal = trained([0] * lanes, [_STEPS] * lanes)
    if different := _different(equal, equal[:1]):
        return f"two equal lanes differ in {different:,} of {layout.size:,} entries"
    return None


def _different(one: Tensor, other: Tensor) -> int:
    """Return the number of entries whose bits differ, in the lane with most of them."""
    return int((one.view(torch.int32) != other.view(torch.int32)).sum(dim=1).max())


def _wrong_labels(fused: Fused, model: Model, data: FederatedData, lanes: int) -> str | None:
    """Return what is wrong with predictions, or None. The last lanes are idle in the second batch."""
    theta, sizes = _start(model, range(lanes), fused.device), _uneven(lanes, 70, 10)
    ids = torch.randint(0, _SAMPLES, (lanes, 70), generator=torch.Generator().manual_seed(1)).to(fused.device)
    labels, classes, gaps = fused.labels(theta, ids, sizes, data), torch.arange(model.classes, device=fused.device), []
    for lane, size in enumerate(sizes):
        logits = model.logits(theta[lane].double(), scaled_inputs(data, ids[lane, :size], "fp32"))
        # By comparison, and not as an index: a wrong label may be no class.
        chosen = logits.where(labels[lane, :size, None] == classes, -torch.inf).amax(dim=1)
        gaps.append((logits.amax(dim=1) - chosen).amax())
    gap = float(torch.stack(gaps).amax())
    return None if gap < LABEL_BOUND else f"a label's logit is {gap:.2g} below the largest (at most {LABEL_BOUND:g})"
