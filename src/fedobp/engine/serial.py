"""The serial engine: one client after another, an ordinary module and `torch.optim.SGD`. Slow, obvious, the oracle."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedobp.algorithms import Batch, Client, Record, Sparse, Sweep, Tensors, Train
from fedobp.data import Split
from fedobp.engine.arithmetic import Precision, autocast, serial_threads, steady
from fedobp.engine.batch_order import batches, step_key, subset
from fedobp.engine.interface import Counters, Task, Trained, caught, without_failures
from fedobp.errors import FedobpError
from fedobp.keys import Purpose, fold
from fedobp.models import Model, is_statistic

_TEST_BATCH = 1024


class Serial:
    """Runs a cohort in its sampled order."""

    def __init__(self, model: Model, batch: int, precision: Precision = "fp32") -> None:
        self._model, self._batch, self._precision = model, batch, precision
        self._threads = serial_threads(model)
        self.counters = Counters()
        self._modules: dict[tuple[torch.device, torch.dtype], nn.Module] = {}

    def attempt(self, tasks: Sequence[Task]) -> list[Trained | BaseException]:
        """Run local programs, run after run and client after client, and keep what each client remembers."""
        return [caught(partial(self._train, task)) for task in tasks]

    def train(self, tasks: Sequence[Task]) -> list[Trained]:
        """Do the same, and raise the first exception."""
        return without_failures(self.attempt(tasks))

    def _train(self, task: Task) -> Trained:
        uploads: list[Record] = []
        losses: list[Tensor] = []
        finite: list[Tensor] = []
        people, cohort, before = task.people, task.now.cohort.tolist(), self.counters
        for position, client in enumerate(cohort):
            done, loss = self._run(task, client, position, Purpose.TRAIN)
            people.keep([client], {name: value[None] for name, value in done.own.items()}, done.theta[None])
            uploads.append(done.up)
            losses.append(loss)
            finite.append(done.theta.isfinite().all() & ~loss.isinf())
        n = torch.tensor([people.data.size(client, "train") for client in cohort], device=people.data.x.device)
        seen = (self.counters - before).samples
        return Trained(_stack(uploads), n, torch.stack(losses), torch.stack(finite), seen)

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Prepare nothing: everything happens when its turn comes."""

    def serve(self, task: Task) -> Tensors:
        """Run a serving program on every client of the cohort; what it remembers is dropped."""
        work = [
            self._run(task, client, position, Purpose.SERVE)[0].work
            for position, client in enumerate(task.now.cohort.tolist())
        ]
        nothing = torch.zeros_like(work[0]["theta"], dtype=torch.bool)
        rest = {name: torch.stack([one[name] for one in work]) for name in (work[0] if task.predict else ())}
        mine = torch.stack([one.get("mine", nothing) for one in work])
        return {**rest, "theta": torch.stack([one["theta"] for one in work]), "mine": mine}

    def last(self, task: Task, otherwise: Tensor) -> Tensor:
        """Return each client's last local model, and `otherwise` for a client that has never trained."""
        return last_models(task, otherwise)

    def predict(self, task: Task, theta: Tensor, split: Split, beside: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model gives to its samples, on the CPU."""
        found = []
        module = self._module(theta).eval()
        with torch.no_grad(), steady(self._precision, self._threads), autocast(self._precision, theta):
            for at, (client, vector) in enumerate(zip(task.now.cohort.tolist(), theta, strict=True)):
                self._model.load(module, vector)
                work = {name: values[at] for name, values in (beside or {}).items()}
                logits = partial(task.predict, self._model, work) if task.predict and beside else module
                parts = task.people.data.inputs(client, split).split(_TEST_BATCH)
                found.append(torch.cat([logits(part).argmax(dim=1) for part in parts]).cpu())
        return found

    def _run(self, task: Task, client: int, position: int, purpose: Purpose) -> tuple[Client, Tensor]:
        """Run one client's program: this is also all that a remote node does."""
        people, like = task.people, task.people.data.mean
        hp = {name: like.new_tensor(value) for name, value in task.hp.items()}
        counts = people.data.counts(client)
        about = {"n": counts.sum(), "counts": counts, "steps": torch.zeros_like(counts.sum())}
        state = Client(own=people.own[client], down=_at(task.down, position), work={}, up={}, hp=hp, data=about)
        key = fold(people.seed, task.now.round, client, purpose)
        loss = like.new_tensor(math.nan)
        for phase, item in enumerate(task.program):
            if isinstance(item, Train):
                x, y = people.data.inputs(client, "train"), people.data.targets(client, "train")
                data = self._batches(fold(key, phase), x, y, range(item.epochs), self._batch)
                with steady(self._precision, self._threads), autocast(self._precision, like):
                    state, losses = sgd(self._model, self._module(like), state, item, data)
                loss = torch.stack(losses).mean() if losses else loss
                state = replace(state, data={**about, "steps": torch.full_like(about["n"], len(losses))})
                seen = item.epochs * (len(y) - (len(y) % self._batch == 1))
                self.counters += Counters(len(losses), seen, seen)
            elif isinstance(item, Sweep):
                x, y = people.data.inputs(client, "train"), people.data.targets(client, "train")
                with steady(self._precision, self._threads), autocast(self._precision, like):
                    state = self._sweep(state, item, fold(key, phase), x, y)
            else:
                state = item(self._model, state)
        return state, loss

    def _batches(
        self, key: Tensor, x: Tensor, y: Tensor, epochs: Iterable[int], size: int, smallest: int = 2, begun: int = 0
    ) -> Iterator[Batch]:
        """Yield a client's batches, epoch by epoch."""
        step = count(begun)
        for epoch in epochs:
            for at, picked in enumerate(batches(fold(key, epoch), len(y), size, y.device, smallest)):
                when = y.new_tensor(next(step)), y.new_tensor(epoch)
                yield Batch(x[picked], y[picked], x.new_ones(len(picked)), step_key(key, epoch, at).to(y.device), *when)

    def _sweep(self, client: Client, phase: Sweep, key: Tensor, x: Tensor, y: Tensor) -> Client:
        """Take a client's own function through its batches."""
        if phase.fraction < 1:
            chosen = subset(key, len(y), phase.fraction).to(y.device)
            x, y = x[chosen], y[chosen]
        without_norms(self._model)
        size, steps, seen = len(y) if phase.whole else self._batch, 0, 0
        for epoch in range(phase.epochs if len(y) else 0):
            if phase.more is not None and not phase.more(self._model, client):
                break
            for batch in self._batches(key, x, y, [epoch], size, phase.smallest, steps):
                client = phase.step(self._model, client, batch)
                steps, seen = steps + 1, seen + phase.passes * len(batch.y)
        self.counters += Counters(steps, seen, seen)
        return replace(client, data={**client.data, "steps": torch.full_like(client.data["n"], steps)})

    def _module(self, like: Tensor) -> nn.Module:
        """Return the module that plays every client in turn, on the device and in the type of a tensor."""
        where = (like.device, like.dtype)
        if where not in self._modules:
            self._modules[where] = self._model.module().to(*where)
        return self._modules[where]


def sgd(
    model: Model, module: nn.Module, client: Client, phase: Train, data: Iterable[Batch]
) -> tuple[Client, list[Tensor]]:
    """Eq. 10 and its relatives: train in an ordinary module, or, with a loss of its own, the client's vectors.

    Returns the client with its trained vectors, and the loss of each batch.
    """
    work, hp, first = client.work, client.hp, phase.learn[0]
    model.load(module, work[first])
    module.train()
    vectors = {name: work[name].clone().requires_grad_() for name in phase.learn}
    learned = list(module.parameters()) if phase.loss is None else list(vectors.values())
    rates = float(hp[phase.lr]), float(hp["momentum"])
    optimizer = torch.optim.SGD(learned, *rates, weight_decay=float(hp["weight_decay"]))
    plain = phase.part == "all" and (phase.mask, phase.pull, phase.drift) == (None, None, None)
    if phase.loss is not None:
        without_norms(model)
    losses = []
    statistics = [buffer for name, buffer in module.named_buffers() if is_statistic(name)]
    for batch in data:
        optimizer.zero_grad()
        before = [one.clone() for one in statistics]
        if phase.loss is None:
            loss = functional.cross_entropy(module(batch.x), batch.y)
        else:
            loss = phase.loss(model, client.set(**vectors), batch)
        loss.backward()
        for one in learned:
            if one.grad is None:  # the loss does not use it: its gradient is 0, and weight decay is for all
                one.grad = torch.zeros_like(one)
        losses.append(loss.detach())
        if plain:
            optimizer.step()
        else:
            _special_step(model, client, phase, learned if phase.loss is None else learned[:1], optimizer)
            _put_back(statistics, before, _moving(model, client, phase, vectors[first])[model.layout.learned :])
    if phase.loss is None:
        return client.set(**{first: model.read(module)}), losses
    return client.set(**{name: vector.detach() for name, vector in vectors.items()}), losses


@torch.no_grad()
def _special_step(
    model: Model, client: Client, phase: Train, pieces: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Take a step with a pull or a drift, and put back what may not move. `pieces` make up the first vector."""
    before = torch.cat([piece.flatten() for piece in pieces])
    push = torch.zeros_like(before)
    if phase.pull is not None:
        anchor, mu = phase.pull
        push += client.hp[mu] * (before - client.work[anchor][: len(before)])
    if phase.drift is not None:
        push += client.work[phase.drift][: len(before)]
    sizes = [piece.numel() for piece in pieces]
    for piece, part in zip(pieces, push.split(sizes), strict=True):
        assert piece.grad is not None
        piece.grad += part.view_as(piece)
    optimizer.step()
    moving = _moving(model, client, phase, before)[: len(before)]
    _put_back(pieces, [old.view_as(piece) for old, piece in zip(before.split(sizes), pieces, strict=True)], moving)


def _moving(model: Model, client: Client, phase: Train, like: Tensor) -> Tensor:
    """Return which entries of the first vector may move."""
    size = len(client.work[phase.learn[0]])
    moving = torch.ones(size, dtype=torch.bool, device=like.device)
    if phase.part != "all":
        moving &= model.layout.is_head(like.device) == (phase.part == "head")
    if phase.mask is not None:
        moving &= client.work[phase.mask]
    return moving


@torch.no_grad()
def _put_back(pieces: Sequence[Tensor], before: Sequence[Tensor], moving: Tensor) -> None:
    """Give entries that may not move their old values."""
    parts = moving.split([piece.numel() for piece in pieces])
    for piece, old, free in zip(pieces, before, parts, strict=True):
        piece.copy_(torch.where(free.view_as(piece), piece, old))


def without_norms(model: Model) -> None:
    """Refuse a model with BatchNorm where a method looks at logits itself."""
    if model.layout.learned < model.layout.size:
        raise FedobpError(
            f"this method computes its own loss, which is not made for BatchNorm ('{model.name}'): use --model cnn"
        )


def last_models(task: Task, otherwise: Tensor) -> Tensor:
    """Return each client's last local model, and `otherwise` for a client that has never trained."""
    found = [task.people.last(client) for client in task.now.cohort.tolist()]
    return torch.stack([otherwise if theta is None else theta for theta in found])


def poisoned(value: Tensor | Sparse) -> Tensor | Sparse:
    """Return what arrives at the other end of a wire: NaN in what is not sent."""
    if isinstance(value, Sparse):
        return Sparse(torch.where(value.keep, value.values, value.values.new_full((), math.nan)), value.keep)
    return value


def _at(record: Record, position: int) -> Record:
    """Return one client's part of a cohort's record."""
    return {
        name: poisoned(Sparse(value.values[position], value.keep[position]))
        if isinstance(value, Sparse)
        else value[position]
        for name, value in record.items()
    }


def _stack(records: list[Record]) -> Record:
    """Return clients' records as the cohort's."""
    stacked: Record = {}
    for name, first in records[0].items():
        values = [poisoned(record[name]) for record in records]
        if isinstance(first, Sparse):
            pairs = [value for value in values if isinstance(value, Sparse)]
            stacked[name] = Sparse(torch.stack([p.values for p in pairs]), torch.stack([p.keep for p in pairs]))
        else:
            stacked[name] = torch.stack([value for value in values if isinstance(value, Tensor)])
    return stacked
