"""Stacks of lanes with every rule, partial batches and unequal numbers of steps."""

from types import SimpleNamespace

import pytest
import torch

from fedobp.engine.sgd import training
from fedobp.engine.stack import Grouped, stacked
from fedobp.models import Model

MODEL = Model("mlp", (5,), 3)
FORWARD, LAYOUT = stacked(MODEL, Grouped), MODEL.layout
BATCH, SAMPLES = 4, 20
X = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
DATA = SimpleNamespace(x=X, y=torch.arange(SAMPLES) % 3, unit=2.0, vocabulary=0)
NUMBERS = {"lr": 0.1, "momentum": 0.8, "decay": 0.05, "pull": 0.3}
RULES = {
    "plain": ("lr",),
    "momentum": ("lr", "momentum"),
    "decay": ("lr", "decay"),
    "pull": ("lr", "pull"),
    "mask": ("lr", "moving"),
    "everything": ("lr", "momentum", "decay", "pull", "drift", "moving"),
}
ALL = pytest.mark.parametrize("used", RULES.values(), ids=RULES)
MAKE = training(DATA, LAYOUT.names, LAYOUT, FORWARD)


def stack_of(steps, used=("lr",), seed=0):
    """Return (given, moving, plan) of lanes with some numbers of steps, longest first, with partial batches."""
    generator = torch.Generator().manual_seed(seed)
    lanes, most = len(steps), max(steps)

    def vectors():
        return torch.randn(lanes, LAYOUT.size, generator=generator, dtype=torch.float64) / 3

    def number(name):
        return NUMBERS[name] * (1 + torch.arange(lanes, dtype=torch.float64)[:, None] / 10)

    rule = {name: number(name) for name in NUMBERS if name in used}
    if "pull" in used:
        rule["anchor"] = vectors()
    if "drift" in used:
        rule["drift"] = vectors()
    if "moving" in used:
        rule["moving"] = vectors() > -0.1
    if "momentum" in used:
        rule["velocity"] = torch.zeros(lanes, LAYOUT.size, dtype=torch.float64)
    scales = torch.linspace(0, 1, lanes, dtype=torch.float64)[:, None, None].expand(lanes, 1, 5)
    given = {"rule": rule, "mean": scales.clone(), "std": 1 + scales}
    tensors = {name: tensor.contiguous() for name, tensor in LAYOUT.views(vectors()).items()}
    real = torch.arange(most)[:, None] < torch.tensor(steps)
    plan = {
        "ids": torch.randint(SAMPLES, (most, lanes, BATCH), generator=generator),
        "counts": torch.randint(2, BATCH + 1, (most, lanes), generator=generator) * real,
    }
    return given, {"tensors": tensors, "loss": torch.zeros(lanes, dtype=torch.float64)}, plan


def flat(moving):
    return LAYOUT.flatten(moving["tensors"])
