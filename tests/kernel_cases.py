"""Steps of the fused kernels against plain autograd in float64: shared by the tests with and without a GPU."""

from dataclasses import dataclass
from typing import Any

import torch

from fedobp.engine.kernels.fused import Fused
from fedobp.engine.kernels.reference import change_errors, expected_steps, scaled_inputs
from fedobp.engine.kernels.self_check import noise
from fedobp.engine.kernels.step import TAIL
from fedobp.engine.sgd import Rule
from fedobp.models import Model

SAMPLES = 60
LR = (0.05, 0.4, 0.1)
MOMENTUM = (0.9, 0.0, 0.5)
DECAY = (0.01, 0.1, 0.0)
PULL = (0.0, 0.3, 1.5)


@dataclass(frozen=True)
class Case:
    """Two lanes: one of two steps, the second with a partial batch, and one of one step with two samples."""

    side: int = 28
    channels: int = 1
    classes: int = 10
    batch: int = 16
    part: Any = "all"
    terms: tuple[str, ...] = ()
    steps: tuple[int, ...] = (2, 1)
    counts: tuple[tuple[int, ...], ...] = ((16, 5), (2, 0))


# All terms of the rule, none, and, together with the tests of idle lanes (momentum and decay), each term without each
# other; every part; both image sizes; padded batches and classes.
CASES = {
    "plain": Case(),
    "head": Case(part="head", terms=("momentum", "drift", "moving")),
    "base": Case(part="base", terms=("pull", "moving")),
    "everything, 32x32": Case(32, 3, 100, terms=("momentum", "decay", "pull", "drift", "moving")),
    "a batch that is no power of two, two classes": Case(
        classes=2, batch=20, terms=("decay", "pull", "drift"), counts=((20, 7), (3, 0))
    ),
}


class Problem:
    """Random models, data and rules of a case."""

    def __init__(self, case, device="cpu"):
        self.case, self.device = case, torch.device(device)
        draw = torch.Generator().manual_seed(0)
        lanes, most = len(case.steps), max(case.steps)
        self.model = Model("cnn", (case.channels, case.side, case.side), case.classes)
        size = self.model.layout.size
        self.data = noise(self.model, SAMPLES, self.device)
        self.theta = torch.stack([self.model.initial(seed) for seed in range(lanes)])
        self.ids = torch.randint(0, SAMPLES, (most, lanes, case.batch), generator=draw)
        self.counts = torch.tensor(case.counts).t().contiguous()
        column = lambda values: torch.tensor([values[lane % 3] for lane in range(lanes)])[:, None]  # noqa: E731
        near = lambda: self.theta + 0.05 * torch.randn(lanes, size, generator=draw)  # noqa: E731
        self.numbers = {"lr": column(LR), "momentum": column(MOMENTUM), "decay": column(DECAY), "pull": column(PULL)}
        self.vectors = {
            "anchor": near(),
            "drift": 0.01 * torch.randn(lanes, size, generator=draw),
            "moving": torch.rand(lanes, size, generator=draw) < 0.6,
        }

    def rule(self):
        """The case's rule, as the engine builds it."""
        terms = {"lr", *self.case.terms, *(["anchor"] if "pull" in self.case.terms else [])}
        given = {**self.numbers, **self.vectors}
        used = {name: given[name].to(self.device) for name in given if name in terms}
        if "momentum" in terms:
            used["velocity"] = torch.zeros_like(self.theta, device=self.device)
        return Rule(**used)

    def arguments(self):
        """The arguments of `Fused.train`; its vectors are a copy."""
        theta, ids, counts = (one.to(self.device, copy=True) for one in (self.theta, self.ids, self.counts))
        return theta, self.rule(), self.case.part, ids, counts, [self.data] * len(theta), self.case.steps

    def train(self, fused: Fused):
        """Train with the kernels, and return (vectors, losses) on the CPU."""
        theta, *rest = self.arguments()
        loss, _ = fused.train(theta, *rest)
        return theta.cpu(), loss.cpu()

    def inputs(self, ids):
        """Scaled inputs in float64, on the CPU."""
        return scaled_inputs(self.data, ids.to(self.device), "fp32").cpu()

    def expected(self, precision="fp32"):
        """The same from the reference: (vectors, losses) in float64 on the CPU."""
        right, losses = expected_steps(self.model, precision, *self.arguments())
        return right.cpu(), losses.cpu()

    def labels(self, fused, sizes):
        """Yield, lane by lane, the labels that the kernels predict for `sizes` samples, and the logits in float64."""
        ids = torch.randint(0, SAMPLES, (len(sizes), sizes[0]), generator=torch.Generator().manual_seed(1))
        found = fused.labels(self.theta.to(self.device), ids.to(self.device), sizes, self.data).cpu()
        for lane, size in enumerate(sizes):
            yield found[lane, :size], self.model.logits(self.theta[lane].double(), self.inputs(ids[lane, :size]))

    def errors(self, theta, expected):
        """The error of each tensor's change in each lane [tensors, lanes]."""
        return change_errors(self.model.layout, self.theta, theta, expected)


def fill_with_nan(buffers):
    """Fill the buffers with NaN, except for zeros that are never written: the border of d2 and the tail of x."""
    for name, buffer in vars(buffers).items():
        if isinstance(buffer, torch.Tensor) and buffer.is_floating_point() and name != "d2":
            (buffer[:-TAIL] if name == "x" else buffer).fill_(float("nan"))
