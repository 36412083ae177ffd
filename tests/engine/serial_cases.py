"""Four clients on a serial engine, and SGD written out as a plain loop."""

import numpy as np
import torch
from torch.nn import functional

from fedobp.data import Dataset, FederatedData, Shard
from fedobp.engine import Budget, ClientPool, PoolJob, Serial
from fedobp.engine.batch_order import batches
from fedobp.keys import Purpose, fold
from fedobp.method import RoundContext
from fedobp.models import Model

SEED, BATCH = 5, 4
# Training samples: batches of 4, 4 and 3; 4 and 4 (a single one is left over); none; 4 and 2.
TRAIN, TEST = (11, 9, 1, 6), (3, 2, 1, 0)


def make_data():
    random = np.random.RandomState(0)
    total = sum(TRAIN) + sum(TEST)
    x, y = random.randn(total, 6).astype(np.float32), random.randint(0, 3, total)
    shards, start = [], 0
    for trained, tested in zip(TRAIN, TEST, strict=True):
        middle, end = start + trained, start + trained + tested
        shards.append(Shard(np.arange(start, middle), np.array([], np.int64), np.arange(middle, end)))
        start = end
    return FederatedData(Dataset("mine", x, y, (0, 1, 2), 0), shards, torch.device("cpu"), torch.float64)


DATA = make_data()
MODEL = Model("mlp", (6,), 3)
THETA = MODEL.initial(0).double()


class SerialRun:
    """One run on a serial engine: its clients, and their jobs."""

    def __init__(self, state=None):
        self.clients = ClientPool(DATA, state or {}, THETA, SEED, Budget())
        self.engine = Serial(MODEL, BATCH)

    def job(self, ctx, program=(), download=None, hparams=None):
        return PoolJob(ctx, program, hparams or numbers(), download or {}, clients=self.clients)

    def train(self, *given):
        [update] = self.engine.train([self.job(*given)])
        return update

    def personalize(self, *given):
        return self.engine.personalize(self.job(*given))

    def predict(self, ctx, theta, split):
        return self.engine.predict(self.job(ctx), theta, split)


def context(*clients, round=1):
    return RoundContext(MODEL, round=round, rounds=3, clients=4, epochs=1, cohort=torch.tensor(clients))


def numbers(lr=0.1, momentum=0.0, weight_decay=0.0):
    return {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}


def broadcast(theta, ctx):
    return {"theta": theta.expand(len(ctx.cohort), -1)}


def use_download(model, client):
    return client.set(theta=client.download["theta"])


def upload_theta(model, client):
    return client.send(theta=client.theta)


def remember_theta(model, client):
    return client.remember(theta=client.theta)


def use_state(model, client):
    return client.set(theta=client.state["theta"])


def plain_loop(client, phases, lr, momentum, weight_decay, *, round=1, purpose=Purpose.TRAIN, restart=True):
    """Train by SGD written out. `phases` are the program's Train phases as {position: epochs}."""
    module = MODEL.module(THETA)
    x, y = DATA.inputs(client, "train"), DATA.targets(client, "train")
    velocity, losses = None, []
    for position, epochs in phases.items():
        if restart:
            velocity = None
        for epoch in range(epochs):
            for picked in batches(fold(SEED, round, client, purpose, position, epoch), len(y), BATCH):
                loss = functional.cross_entropy(module(x[picked]), y[picked])
                gradients = torch.autograd.grad(loss, list(module.parameters()))
                with torch.no_grad():
                    weights = list(module.parameters())
                    slopes = [g + weight_decay * w for g, w in zip(gradients, weights, strict=True)]
                    if velocity is not None:
                        slopes = [momentum * v + s for v, s in zip(velocity, slopes, strict=True)]
                    velocity = slopes
                    for weight, slope in zip(weights, slopes, strict=True):
                        weight -= lr * slope
                losses.append(loss.item())
    vector = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    return vector, sum(losses) / len(losses) if losses else None


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
