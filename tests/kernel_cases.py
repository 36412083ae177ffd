"""Steps of the fused kernels against plain autograd in float64: shared by the tests with and without a GPU."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from fedobp.data import Dataset, FederatedData, Shard
from fedobp.engine.kernels.fused import Fused
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


def rounded(value, precision):
    """The operand of a product: bf16 is rounded to the nearest; for tf32 the GPU drops the last 13 bits."""
    if precision == "bf16":
        return value.bfloat16().to(value.dtype)
    if precision == "tf32":
        return (value.float().view(torch.int32) & ~0x1FFF).view(torch.float32).to(value.dtype)
    return value


class _Rounded(torch.autograd.Function):
    """Round a value or its gradient, or both, as operands of a product."""

    @staticmethod
    def forward(ctx, value, precision, round_value, round_gradient):
        ctx.precision = precision if round_gradient else "fp32"
        return rounded(value, precision) if round_value else value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return rounded(gradient, ctx.precision), None, None, None


def _once(value, precision):
    return _Rounded.apply(value, precision, True, False)


def _twice(value, precision):
    return _Rounded.apply(value, precision, True, True)


def rounded_features(weights, x, precision):
    """The convolutions with operands rounded as in the kernels, forward and backward: [B, 64, P2, P2]."""
    w1, b1, w2, b2 = weights
    h = functional.max_pool2d(functional.conv2d(_once(x, precision), _once(w1, precision), b1).relu(), 2)
    return functional.max_pool2d(functional.conv2d(_twice(h, precision), _once(w2, precision), b2).relu(), 2)


def rounded_logits(weights, x, precision):
    """The CNN with operands rounded as in the kernels, forward and backward; `weights` are its tensors in order."""
    *convolutions, wf, bf, wc, bc = weights
    h = rounded_features(convolutions, x, precision)
    h = functional.linear(_twice(h.flatten(1), precision), _once(wf, precision), bf).relu()
    return _Rounded.apply(functional.linear(_twice(h, precision), _once(wc, precision), bc), precision, False, True)


class Problem:
    """Random models, data and rules of a case."""

    def __init__(self, case, device="cpu"):
        self.case, self.device = case, torch.device(device)
        draw = torch.Generator().manual_seed(0)
        lanes, most = len(case.steps), max(case.steps)
        self.model = Model("cnn", (case.channels, case.side, case.side), case.classes)
        size = self.model.layout.size
        x = np.random.default_rng(0).integers(0, 256, (SAMPLES, case.side, case.side, case.channels), dtype=np.uint8)
        y = np.arange(SAMPLES) % case.classes
        half = np.arange(SAMPLES // 2)
        shards = [Shard(half, half[:0], half + SAMPLES // 2), Shard(half + SAMPLES // 2, half[:0], half)]
        self.data = FederatedData(
            Dataset("noise", x, y, tuple(np.unique(y).tolist()), 0), shards, self.device, torch.float32
        )
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

    def train(self, fused: Fused):
        """Train with the kernels, and return (vectors, losses) on the CPU."""
        theta = self.theta.to(self.device, copy=True)
        lanes = len(theta)
        ids, counts = self.ids.to(self.device), self.counts.to(self.device)
        loss, _ = fused.train(theta, self.rule(), self.case.part, ids, counts, [self.data] * lanes, self.case.steps)
        return theta.cpu(), loss.cpu()

    def inputs(self, ids, precision="fp32"):
        """Scaled inputs in float64, computed in float32 if products round them: its last bit decides the rounding."""
        dtype = torch.float64 if precision == "fp32" else torch.float32
        x, unit, mean, std = self.data.x.cpu()[ids].to(dtype), self.data.unit, self.data.mean.cpu(), self.data.std.cpu()
        return ((x - (unit * mean.to(dtype))) * (1 / (unit * std.to(dtype)))).double()

    def expected(self, precision="fp32"):
        """The same in float64, lane by lane and term by term, apart from the rounding of operands."""
        case, head = self.case, self.model.layout.is_head()
        inside = {"all": torch.ones_like(head), "head": head, "base": ~head}[case.part]
        vectors, losses = [], []
        for lane, steps in enumerate(case.steps):
            one = {name: float(values[lane]) for name, values in self.numbers.items()}
            theta, velocity, total = self.theta[lane].double(), 0.0, 0.0
            moves = inside & self.vectors["moving"][lane] if "moving" in case.terms else inside
            for step in range(steps):
                ids = self.ids[step, lane, : self.counts[step, lane]]
                weights = theta.clone().requires_grad_()
                if precision == "fp32":
                    logits = self.model.logits(weights, self.inputs(ids))
                else:
                    tensors = self.model.layout.views(weights).values()
                    logits = rounded_logits(tensors, self.inputs(ids, precision), precision)
                loss = functional.cross_entropy(logits, self.data.y.cpu()[ids])
                [gradient] = torch.autograd.grad(loss, weights)
                if "pull" in case.terms:
                    gradient = gradient + one["pull"] * (theta - self.vectors["anchor"][lane].double())
                if "drift" in case.terms:
                    gradient = gradient + self.vectors["drift"][lane].double()
                if "decay" in case.terms:
                    gradient = gradient + one["decay"] * theta
                velocity = gradient + (one["momentum"] * velocity if "momentum" in case.terms else 0.0)
                theta = torch.where(moves, theta - one["lr"] * velocity, theta)
                total += float(loss.detach())
            vectors.append(theta)
            losses.append(total)
        return torch.stack(vectors), torch.tensor(losses)

    def labels(self, fused, sizes):
        """Yield, lane by lane, the labels that the kernels predict for `sizes` samples, and the logits in float64."""
        ids = torch.randint(0, SAMPLES, (len(sizes), sizes[0]), generator=torch.Generator().manual_seed(1))
        found = fused.labels(self.theta.to(self.device), ids.to(self.device), sizes, self.data).cpu()
        for lane, size in enumerate(sizes):
            yield found[lane, :size], self.model.logits(self.theta[lane].double(), self.inputs(ids[lane, :size]))

    def errors(self, theta, expected):
        """The error of each tensor's change in each lane [tensors, lanes]: relative, or absolute where nothing should
        change."""
        found = []
        for where in self.model.layout.slices.values():
            right, before = expected[:, where].double(), self.theta[:, where].double()
            change, wrong = (right - before).norm(dim=1), (theta[:, where].double() - right).norm(dim=1)
            found.append(torch.where(change > 0, wrong / change.clamp(min=1e-30), wrong))
        return torch.stack(found)


def fill_with_nan(buffers):
    """Fill the buffers with NaN, except for zeros that are never written: the border of d2 and the tail of x."""
    for name, buffer in vars(buffers).items():
        if isinstance(buffer, torch.Tensor) and buffer.is_floating_point() and name != "d2":
            (buffer[:-TAIL] if name == "x" else buffer).fill_(float("nan"))
