"""The serial engine: one client after another, in an ordinary module with `torch.optim.SGD`.

It is slow and simple, and the oracle of the lanes engine.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedobp.data import Split
from fedobp.engine.batch_order import batches, step_key, subset
from fedobp.engine.client_pool import PoolJob
from fedobp.engine.failures import caught, refuse_batch_norm, without_failures
from fedobp.engine.precision import autocast, deterministic, dtype_of, serial_threads
from fedobp.engine.protocol import Counters, PersonalModels, Prepared
from fedobp.keys import Purpose, fold
from fedobp.method import Batch, Client, CohortUpdate, Sweep, Train
from fedobp.models import Model, is_statistic
from fedobp.options import Precision
from fedobp.records import Record, Tensors, mask_unsent, stack, take

_TEST_BATCH = 1024


class Serial:
    """Runs a cohort in its sampled order."""

    def __init__(self, model: Model, batch: int, precision: Precision = "fp32") -> None:
        self._model, self._batch, self._precision = model, batch, precision
        self._threads = serial_threads(model)
        self.counters = Counters()
        self._modules: dict[tuple[torch.device, torch.dtype], nn.Module] = {}

    def provenance(self, device: torch.device) -> str:
        """Return nothing: its results depend on configuration and versions alone."""
        return ""

    def try_train(
        self, jobs: Sequence[PoolJob], prepared: Prepared | None = None
    ) -> list[CohortUpdate | BaseException]:
        """Run the client programs one after another, and keep each client's new state."""
        return [caught(partial(self._train, job)) for job in jobs]

    def train(self, jobs: Sequence[PoolJob], prepared: Prepared | None = None) -> list[CohortUpdate]:
        """Do the same, and raise the first exception."""
        return without_failures(self.try_train(jobs, prepared))

    def _train(self, job: PoolJob) -> CohortUpdate:
        uploads: list[Record] = []
        losses: list[Tensor] = []
        finite: list[Tensor] = []
        clients, cohort, before = job.clients, job.ctx.cohort.tolist(), self.counters
        for position, client in enumerate(cohort):
            done, loss = self._run(job, client, position, Purpose.TRAIN)
            clients.keep([client], {name: value[None] for name, value in done.state.items()}, done.theta[None])
            uploads.append(mask_unsent(done.upload))
            losses.append(loss)
            finite.append(done.theta.isfinite().all() & ~loss.isinf())
        sizes = [job.data.size(client, "train") for client in cohort]
        n = torch.tensor(sizes, device=job.data.x.device)
        processed = (self.counters - before).samples
        return CohortUpdate(stack(uploads), n, sum(sizes), torch.stack(losses), torch.stack(finite), processed)

    def prepare(self, jobs: Sequence[PoolJob]) -> Prepared:
        """Compute nothing in advance."""
        return Prepared({})

    def personalize(self, job: PoolJob) -> PersonalModels:
        """Run a program on every client of the cohort; changes of client state are dropped."""
        before = self.counters
        scratch = [
            self._run(job, client, position, Purpose.PERSONALIZE)[0].scratch
            for position, client in enumerate(job.ctx.cohort.tolist())
        ]
        none = torch.zeros_like(scratch[0]["theta"], dtype=torch.bool)
        rest = {name: torch.stack([one[name] for one in scratch]) for name in (scratch[0] if job.predict else ())}
        mine = torch.stack([one.get("mine", none) for one in scratch])
        theta = torch.stack([one["theta"] for one in scratch])
        return PersonalModels(theta, mine, rest, (self.counters - before).samples)

    def predict(self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model predicts for its samples, on the CPU."""
        return self._test(job, theta, split, scratch, lambda logits: logits.argmax(dim=-1))

    def logits(self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the logits of each client's samples, on the CPU."""
        return self._test(job, theta, split, scratch, lambda logits: logits.to(theta.dtype))

    def _test(
        self,
        job: PoolJob,
        theta: Tensor,
        split: Split,
        scratch: Tensors | None,
        result_of: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Return what a function makes of the logits of each client's samples."""
        found = []
        module = self._module(theta).eval()
        with torch.no_grad(), deterministic(self._precision, self._threads), autocast(self._precision, theta):
            for at, (client, vector) in enumerate(zip(job.ctx.cohort.tolist(), theta, strict=True)):
                self._model.load(module, vector)
                logits = partial(job.predict, self._model, take(scratch, at)) if job.predict and scratch else module
                parts = job.data.inputs(client, split).split(_TEST_BATCH)
                found.append(torch.cat([result_of(logits(part)) for part in parts]).cpu())
        return found

    def _run(self, job: PoolJob, client: int, position: int, purpose: Purpose) -> tuple[Client, Tensor]:
        """Run one client's program. A remote node does no more than this."""
        clients, samples = job.clients, job.data
        like = samples.mean
        hparams = {name: like.new_tensor(value) for name, value in job.hparams.items()}
        counts = samples.counts(client)
        n = counts.new_tensor(samples.size(client, "train"))
        about = {"n": n, "counts": counts, "steps": torch.zeros_like(n)}
        download = mask_unsent(take(job.download, position))
        one = Client(clients.state[client], download, scratch={}, upload={}, hparams=hparams, data=about)
        key = fold(clients.seed, job.ctx.round, client, purpose)
        loss = like.new_tensor(math.nan)
        for phase, item in enumerate(job.program):
            if isinstance(item, Train):
                x, y = samples.inputs(client, "train"), samples.targets(client, "train")
                data = self._batches(fold(key, phase), x, y, range(item.epochs), self._batch)
                with deterministic(self._precision, self._threads), autocast(self._precision, like):
                    one, losses = sgd(self._model, self._module(like), one, item, data)
                loss = torch.stack(losses).mean() if losses else loss
                one = replace(one, data={**about, "steps": torch.full_like(about["n"], len(losses))})
                seen = item.epochs * (len(y) - (len(y) % self._batch == 1))
                self.counters += Counters(len(losses), seen, seen)
            elif isinstance(item, Sweep):
                x, y = samples.inputs(client, "train"), samples.targets(client, "train")
                with deterministic(self._precision, self._threads), autocast(self._precision, like):
                    one = self._sweep(one, item, fold(key, phase), x, y)
            else:
                one = item(self._model, one)
        return one, loss

    def _batches(
        self, key: Tensor, x: Tensor, y: Tensor, epochs: Iterable[int], size: int, smallest: int = 2, begun: int = 0
    ) -> Iterator[Batch]:
        """Yield a client's batches, epoch by epoch."""
        step, dtype = count(begun), x.dtype if x.is_floating_point() else dtype_of(self._precision)
        for epoch in epochs:
            for at, picked in enumerate(batches(fold(key, epoch), len(y), size, y.device, smallest)):
                when = y.new_tensor(next(step)), y.new_tensor(epoch)
                weight = torch.ones(len(picked), dtype=dtype, device=y.device)
                yield Batch(x[picked], y[picked], weight, step_key(key, epoch, at).to(y.device), *when)

    def _sweep(self, client: Client, phase: Sweep, key: Tensor, x: Tensor, y: Tensor) -> Client:
        """Run a method's function on a client's batches."""
        if phase.fraction < 1:
            chosen = subset(key, len(y), phase.fraction).to(y.device)
            x, y = x[chosen], y[chosen]
        refuse_batch_norm(self._model)
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
        """Return the module in which all clients train, with the device and type of a tensor."""
        where = (like.device, like.dtype)
        if where not in self._modules:
            self._modules[where] = self._model.module().to(*where)
        return self._modules[where]


def sgd(
    model: Model, module: nn.Module, client: Client, phase: Train, data: Iterable[Batch]
) -> tuple[Client, list[Tensor]]:
    """Run SGD (eq. 10): in an ordinary module or, if the phase has a loss, on the client's vectors.

    Return the client with its trained vectors, and the loss of each batch.
    """
    scratch, hparams, first = client.scratch, client.hparams, phase.learn[0]
    model.load(module, scratch[first])
    module.train()
    vectors = {name: scratch[name].clone().requires_grad_() for name in phase.learn}
    learned = list(module.parameters()) if phase.loss is None else list(vectors.values())
    rates = float(hparams[phase.lr]), float(hparams["momentum"])
    optimizer = torch.optim.SGD(learned, *rates, weight_decay=float(hparams["weight_decay"]))
    plain = phase.part == "all" and (phase.mask, phase.pull, phase.drift) == (None, None, None)
    if phase.loss is not None:
        refuse_batch_norm(model)
    losses = []
    statistics = [buffer for name, buffer in module.named_buffers() if is_statistic(name)]
    for batch in data:
        optimizer.zero_grad()
        before = [one.clone() for one in statistics]
        if phase.loss is None:
            loss = functional.cross_entropy(module(batch.x).flatten(0, -2), batch.y.flatten())
        else:
            loss = phase.loss(model, client.set(**vectors), batch)
        loss.backward()
        for one in learned:
            if one.grad is None:  # the loss does not use it: its gradient is 0, but weight decay applies
                one.grad = torch.zeros_like(one)
        losses.append(loss.detach())
        if plain:
            optimizer.step()
        else:
            _special_step(model, client, phase, learned if phase.loss is None else learned[:1], optimizer)
            _restore(statistics, before, _moving(model, client, phase, vectors[first])[model.layout.learned :])
    if phase.loss is None:
        return client.set(**{first: model.read(module)}), losses
    return client.set(**{name: vector.detach() for name, vector in vectors.items()}), losses


@torch.no_grad()
def _special_step(
    model: Model, client: Client, phase: Train, pieces: Sequence[Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Take a step with a pull or a drift, and restore fixed entries. `pieces` make up the first vector."""
    before = torch.cat([piece.flatten() for piece in pieces])
    push = torch.zeros_like(before)
    if phase.pull is not None:
        anchor, mu = phase.pull
        push += client.hparams[mu] * (before - client.scratch[anchor][: len(before)])
    if phase.drift is not None:
        push += client.scratch[phase.drift][: len(before)]
    sizes = [piece.numel() for piece in pieces]
    for piece, part in zip(pieces, push.split(sizes), strict=True):
        assert piece.grad is not None
        piece.grad += part.view_as(piece)
    optimizer.step()
    moving = _moving(model, client, phase, before)[: len(before)]
    _restore(pieces, [old.view_as(piece) for old, piece in zip(before.split(sizes), pieces, strict=True)], moving)


def _moving(model: Model, client: Client, phase: Train, like: Tensor) -> Tensor:
    """Return which entries of the first vector may move."""
    size = len(client.scratch[phase.learn[0]])
    moving = torch.ones(size, dtype=torch.bool, device=like.device)
    if phase.part != "all":
        moving &= model.layout.is_head(like.device) == (phase.part == "head")
    if phase.mask is not None:
        moving &= client.scratch[phase.mask]
    return moving


@torch.no_grad()
def _restore(pieces: Sequence[Tensor], before: Sequence[Tensor], moving: Tensor) -> None:
    """Give fixed entries their old values."""
    parts = moving.split([piece.numel() for piece in pieces])
    for piece, old, free in zip(pieces, before, parts, strict=True):
        piece.copy_(torch.where(free.view_as(piece), piece, old))
