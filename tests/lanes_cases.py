"""Clients of unequal size, networks and programs on which all engines must agree: for tests on the CPU and on CUDA."""

import itertools
import json
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn import functional

from fedobp.algorithms import METHODS
from fedobp.data import Dataset, FederatedData, Shard
from fedobp.engine import Budget, ClientPool, Lanes, PoolJob, Serial
from fedobp.method import RoundContext, Sparse, Sweep, Train
from fedobp.models import Model

BATCH, CLASSES = 4, 3
# Training samples: a last batch of 3; of one, which is skipped; none; one sample; a last batch of 2; two full batches.
TRAIN, VAL, TEST = (11, 9, 0, 1, 6, 8), (2, 0, 1, 0, 3, 1), (3, 2, 1, 0, 9, 0)
CLIENTS = len(TRAIN)


# Networks.


class Residual(nn.Module):
    """Not a plain sequence: a skip connection, a norm, and a parameter outside the layers."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.again = nn.Conv2d(4, 4, 3, padding=1)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.classifier = nn.Linear(4, classes)

    def forward(self, x):
        x = functional.relu(self.norm(self.conv(x)))
        x = x + self.gain * self.again(x).tanh()
        return self.classifier(x.mean(dim=(2, 3)))


class Products(nn.Module):
    """A network without a matrix product."""

    def __init__(self, entries, classes):
        super().__init__()
        self.classifier = nn.ParameterDict({"weight": torch.linspace(-1, 1, classes * entries).view(classes, entries)})

    def forward(self, x):
        return (x.flatten(1)[:, None] * self.classifier["weight"]).sum(dim=2)


def strided(shape, classes):
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(shape[0], 4, 3, stride=2, padding=1),
            tanh=nn.Tanh(),
            pool=nn.AvgPool2d(2),
            flatten=nn.Flatten(),
            classifier=nn.Linear(4 * (shape[1] // 4) * (shape[2] // 4), classes),
        )
    )


def in_place(shape, classes):
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(shape[0], 4, 3),
            relu=nn.ReLU(inplace=True),
            flatten=nn.Flatten(),
            classifier=nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), classes),
        )
    )


def without_bias(shape, classes):
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(shape[0], 3, 5, padding=2, bias=False),
            pool=nn.MaxPool2d(2),
            conv2=nn.Conv2d(3, 5, 1, bias=False),
            leaky=nn.LeakyReLU(),
            flatten=nn.Flatten(),
            classifier=nn.Linear(5 * (shape[1] // 2) * (shape[2] // 2), classes, bias=False),
        )
    )


def one_relu_twice(shape, classes):
    relu = nn.ReLU()
    layers = [nn.Flatten(), nn.Linear(shape[0] * shape[1] * shape[2], 12), relu, nn.Linear(12, 12), relu]
    return nn.Sequential(OrderedDict(enumerate_names(layers), classifier=nn.Linear(12, classes)))


def enumerate_names(layers):
    return [(f"layer{at}", layer) for at, layer in enumerate(layers)]


def normed(shape, classes):
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(shape[0], 4, 3, stride=2),
            bn1=nn.BatchNorm2d(4),
            relu=nn.ReLU(),
            flatten=nn.Flatten(),
            fc=nn.Linear(4 * ((shape[1] - 1) // 2) * ((shape[2] - 1) // 2), 6),
            bn2=nn.BatchNorm1d(6, momentum=0.3, affine=False),
            classifier=nn.Linear(6, classes),
        )
    )


def pooled(shape, classes):
    """A perceptron on pooled pixels, none of which is the same in all digits.

    Weights of a constant pixel move alike: their scores tie, and rounding would decide which are above a threshold.
    """
    width = shape[0] * (shape[1] // 2) * (shape[2] // 2)
    layers = OrderedDict(pool=nn.AvgPool2d(2), flatten=nn.Flatten(), fc1=nn.Linear(width, 32), relu=nn.ReLU())
    return nn.Sequential(layers | OrderedDict(classifier=nn.Linear(32, classes)))


NETWORKS = {
    "normed": normed,
    "pooled": pooled,
    "strided": strided,
    "in-place": in_place,
    "without-bias": without_bias,
    "one-relu-twice": one_relu_twice,
    "residual": lambda shape, classes: Residual(shape[0], classes),
    "products": lambda shape, classes: Products(shape[0] * shape[1] * shape[2], classes),
}


# Clients.


def shards(seed=0):
    """Return shards of unequal size; another seed reverses the sizes and draws other samples."""
    generator = np.random.RandomState(seed)
    order, sizes = generator.permutation(sum(TRAIN + VAL + TEST)), list(zip(TRAIN, VAL, TEST, strict=True))
    assigned, start = [], 0
    for lengths in sizes if seed == 0 else sizes[::-1]:
        ends = np.cumsum((start, *lengths))
        assigned.append(Shard(*(order[a:b] for a, b in itertools.pairwise(ends))))
        start = ends[-1]
    return assigned


def dataset(shape=(8, 8)):
    """Return random images as bytes."""
    total, generator = sum(TRAIN + VAL + TEST), np.random.RandomState(1)
    x, y = generator.randint(0, 256, (total, *shape)).astype(np.uint8), generator.randint(0, CLASSES, total)
    return Dataset("mine", x, y, tuple(range(CLASSES)), 0)


def federated(device="cpu", dtype=torch.float64, seed=0):
    return FederatedData(dataset(), shards(seed), torch.device(device), dtype)


# Programs.


def set_up(model, client):
    """Start from the download and the state; masks, anchors and drifts differ between clients."""
    theta = client.download["theta"] + 0.1 * client.state["theta"]
    return client.set(
        theta=theta,
        mask=theta > -0.02,
        anchor=theta.flip(0) / 2,
        drift=theta.roll(1) / 10,
        other=theta / 2,
        scale=1 + theta[:CLASSES],
    )


def finish(model, client):
    """Keep and upload the model, and upload the entries that were not sent."""
    kept = client.download["part"].keep
    sent = {"theta": client.theta, "other": client.scratch["other"], "scale": client.scratch["scale"]}
    client = client.remember(theta=client.theta, trained=client.state["trained"] + 1)
    return client.send(**sent, part=Sparse(client.theta, ~kept), trained=client.state["trained"])


def halve(model, client):
    return client.set(theta=client.theta / 2, mask=~client.scratch["mask"])


def scaled_loss(model, client, batch):
    """A loss that reads state, download, scratch and hparams."""
    logits = model.logits(client.theta, batch.x) * client.scratch["scale"]
    near = client.download["part"].fill(client.state["theta"]) - client.theta
    return (
        batch.mean(functional.cross_entropy(logits, batch.y, reduction="none"))
        + client.hparams["mu"] * near.square().mean()
        + client.scratch["drift"].cos() @ client.theta / len(client.theta)
    )


def mixed_loss(model, client, batch):
    """The loss of a mixture of two models with a learned weight."""
    share = client.scratch["scale"].mean().sigmoid()
    mixed = share * client.theta + (1 - share) * client.scratch["other"]
    return batch.mean(functional.cross_entropy(model.logits(mixed, batch.x), batch.y, reduction="none"))


def fit_scale(model, client, batch):
    """Learn a scale of the logits with another update rule, which depends on the key, the step and the epoch."""

    def loss(scale):
        logits = model.logits(client.theta, batch.x) * scale
        return batch.mean(functional.cross_entropy(logits, batch.y, reduction="none"))

    noise = (batch.key % 1000).to(client.theta.dtype) / 1e5
    rate = client.hparams["slow"] / (1 + batch.step + batch.epoch)
    scale = client.scratch["scale"] - rate * (grad(loss)(client.scratch["scale"]) + noise)
    return client.set(scale=scale, other=client.scratch["other"] + batch.mean(batch.x.flatten(1).mean(dim=1)) * 1e-3)


def go_on(model, client):
    """Continue for a number of epochs that differs between clients."""
    return client.scratch["scale"].sum() * 1e4 % 3 > 1


def use_scale(model, client):
    """Make the model depend on the sweep, and on its number of batches."""
    return client.set(theta=client.theta * client.scratch["scale"].mean() + client.data["steps"] * 1e-3)


PULL = ("anchor", "mu")
PHASES: dict[str, list[Any]] = {
    "plain": [Train(2)],
    "head": [Train(2, part="head")],
    "base": [Train(2, part="base")],
    "mask": [Train(2, mask="mask")],
    "mask in the base": [Train(2, part="base", mask="mask")],
    "pull": [Train(2, pull=PULL)],
    "drift": [Train(2, drift="drift")],
    "rate": [Train(2, lr="slow")],
    "another vector": [Train(2, learn=("other",))],
    "all but a loss": [Train(2, part="head", mask="mask", pull=PULL, drift="drift", lr="slow")],
    "loss": [Train(2, loss=scaled_loss)],
    "three vectors": [Train(2, learn=("theta", "other", "scale"), loss=mixed_loss)],
    "everything": [Train(2, ("theta", "scale"), "base", "mask", PULL, "drift", scaled_loss, "slow")],
    "two phases": [Train(1), Train(2)],
    "head, then base": [Train(2, part="head"), halve, Train(1, part="base", mask="mask")],
    "plain, then loss": [Train(1), Train(1, learn=("theta", "scale"), loss=scaled_loss), Train(1, drift="drift")],
    "no epochs": [Train(0)],
    "no epochs with a loss": [Train(0, loss=scaled_loss)],
    "an end without epochs": [Train(2), Train(0)],
    "a sweep": [Sweep(fit_scale, 2), use_scale],
    "a sweep of a part": [Sweep(fit_scale, 3, fraction=0.6, smallest=2), use_scale, Train(1)],
    "a sweep of all at once": [Sweep(fit_scale, 2, whole=True), use_scale],
    "a sweep with a stopping rule": [Sweep(fit_scale, 9, go_on), use_scale],
    "a sweep of no epochs": [Sweep(fit_scale, 0), use_scale, Train(1)],
}


def uses_logits(items):
    """Whether a function of the method computes logits in a program."""
    return any(isinstance(item, Sweep) or (isinstance(item, Train) and item.loss) for item in items)


@dataclass(frozen=True)
class Plan:
    """One run: its program, numbers, cohort, seed and partition."""

    phases: str = "plain"
    hparams: dict[str, float] = field(default_factory=dict)
    cohort: tuple[int, ...] = tuple(range(CLIENTS))
    seed: int = 5
    partition: int = 0
    epochs: int | None = None  # of every phase; None: those of the program

    def program(self):
        def with_epochs(item):
            changed = isinstance(item, Train | Sweep) and self.epochs is not None
            return replace(item, epochs=self.epochs) if changed else item

        return [set_up, *map(with_epochs, PHASES[self.phases]), finish]

    def numbers(self):
        return {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "mu": 0.3, "slow": 0.04, **self.hparams}


FAST = {"momentum": 0.9, "weight_decay": 0.05}
CHANGES = (
    {"cohort": (1, 5), "epochs": 1},
    {"cohort": (0,), "epochs": 1},
    {"epochs": 4},
    {"cohort": (4, 0, 2), "epochs": 2},
    {"cohort": (3,), "epochs": 3},
    {"cohort": (5, 4, 3, 2, 1, 0), "epochs": 1},
)  # of a plan, round by round: more and fewer clients and steps


ONE_ROUND = ({},)
MIXED = [
    Plan(),
    Plan(hparams={"lr": 0.02}, seed=6),
    Plan(hparams=FAST, partition=1, cohort=(5, 0, 3)),
    Plan(cohort=(4,), epochs=3),
    Plan("mask", {"lr": 0.3}, cohort=(1,), epochs=3),
    Plan("everything", FAST),
    Plan("everything", {"mu": 0.9}, seed=8, cohort=(4, 1), partition=1, epochs=1),
    Plan("two phases", epochs=1),
    Plan("no epochs"),
    Plan("plain, then loss", {"momentum": 0.5}, partition=1),
    Plan("rate", {"slow": 0.2, "weight_decay": 0.2}),
    Plan("mask in the base", cohort=(3, 2)),
]  # runs side by side, some of which train together


def make_pool(model, device="cpu", dtype=torch.float64, seed=5, data=None):
    """Return clients whose state is a model and a count of rounds."""
    theta = model.initial(3).to(device, dtype)
    state = {"theta": theta.flip(0), "trained": torch.zeros((), dtype=torch.int64, device=device)}
    return ClientPool(data or federated(device, dtype), state, theta, seed, Budget())


def make_job(plan, clients, theta, round=1):
    """Return the job of one round: a scaled model for each client, and a part of the model."""
    ctx = RoundContext(None, round, 3, CLIENTS, 1, torch.tensor(plan.cohort))  # no program here needs its model
    steps = torch.arange(len(plan.cohort), device=theta.device)[:, None]
    keep = torch.arange(len(theta), device=theta.device) % (steps + 2) != 0
    download = {"theta": theta * (1 + steps / 10), "part": Sparse(theta.expand(len(steps), -1), keep)}
    return PoolJob(ctx, plan.program(), plan.numbers(), download, clients=clients)


def run_rounds(engine, model, plans, *, device="cpu", dtype=torch.float64, rounds=({}, {})):
    """Run rounds of all plans side by side, each with its changes; return updates and client state of each plan."""
    first = federated(device, dtype)
    data = [first, first.repartitioned(dataset(), shards(1))]
    theta = model.initial(3).to(device, dtype)
    pools = [make_pool(model, device, dtype, plan.seed, data[plan.partition]) for plan in plans]
    updates = []
    for round, change in enumerate(rounds, start=1):
        changed = [replace(plan, **change) for plan in plans]
        updates = engine.train([make_job(plan, pool, theta, round) for plan, pool in zip(changed, pools, strict=True)])
    return [
        {
            **{f"upload {name}": value for name, value in update.upload.items()},
            **{f"state {name}": value for name, value in pool.state.gather(range(CLIENTS)).items()},
            "last": pool.last_models(torch.arange(CLIENTS), torch.full_like(theta, 7.0)),
            "loss": update.loss,
            "n": update.n,
            "finite": update.finite,
            "processed": torch.tensor(update.processed),
        }
        for update, pool in zip(updates, pools, strict=True)
    ]


def agree(found, expected, atol=1e-9):
    """Compare the results of several runs, name by name; NaN equals NaN."""
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            mine = ours[name]
            if isinstance(value, Sparse):
                assert torch.equal(mine.keep.cpu(), value.keep.cpu()), name
                mine, value = mine.values, value.values
            torch.testing.assert_close(
                mine.cpu(),
                value.cpu(),
                rtol=0,
                atol=atol,
                equal_nan=True,
                check_dtype=True,
                msg=lambda m, n=name: f"{n}: {m}",
            )


def compare(model, plans, engine=None, device="cpu", **options):
    """Compare the lanes engine with the serial engine on the CPU, its oracle; return the lanes engine's results."""
    found = run_rounds(engine or Lanes(model, BATCH), model, plans, device=device, **options)
    agree(found, run_rounds(Serial(model, BATCH), model, plans, **options))
    return found


def make_model(name, shape=(1, 8, 8)):
    return Model(name, shape, CLASSES)


def vector(result, client=None):
    """A run's global model, or a client's, as a vector."""
    return torch.cat([tensor.reshape(-1).cpu() for tensor in result.state_dict(client).values()])


def vectors(result):
    """The global model and every client's."""
    return torch.stack([vector(result, client) for client in (None, *range(result.config.clients))])


def metrics(folder):
    """The lines of a run's log."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def settings_for(method, settings):
    """Return settings without those that the method has of its own: they are refused beside it."""
    own = METHODS[method].configure({}).hparams()
    return {name: value for name, value in settings.items() if name not in own}


def same(ours, theirs, atol=1e-9, fitted=1e-4):
    """Compare two results: models to a tolerance, and all counts exactly.

    `fitted` is that of entries that are fitted before use: b / a of a fit amplifies rounding where a is small.
    """
    one, other = vectors(ours), vectors(theirs)
    if atol and ours.config.method == "fedobp-auto":
        shared = (one == one[0]) & (other == other[0])
        torch.testing.assert_close(one.masked_fill(shared, 0), other.masked_fill(shared, 0), rtol=0, atol=fitted)
        one, other = one[0], other[0]
    torch.testing.assert_close(one, other, rtol=0, atol=atol)
    for name in ("accuracy", "last", "finetuned", "validation", "history", "personal", "bytes", "compute", "protocol"):
        assert getattr(ours, name) == getattr(theirs, name), name
    if ours.out and theirs.out:
        for line, other in zip(metrics(ours.out), metrics(theirs.out), strict=True):
            assert line.pop("loss") == pytest.approx(other.pop("loss"), abs=atol)
            assert line == other
