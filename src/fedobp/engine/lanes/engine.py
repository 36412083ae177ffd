"""The lanes engine: all clients of a round, and of all runs of a launch, train at once.

A lane is one (run, client) pair with its own weights, batch order and state. The programs of several runs advance side
by side: plain functions are vectorised over a cohort, and where several runs have reached phases of one group, their
lanes train together. On CUDA the steps are replayed from graphs.
"""

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedobp.data import Split
from fedobp.engine.batch_order import batches_of
from fedobp.engine.client_pool import PoolJob
from fedobp.engine.cuda_graphs import CACHE_SIZE, Graphs
from fedobp.engine.failures import caught, without_failures
from fedobp.engine.kernels import fused_for
from fedobp.engine.lanes.phases import Phase, PhaseResult
from fedobp.engine.lanes.predictor import Predictor
from fedobp.engine.lanes.trainer import Trainer, order_key
from fedobp.engine.lanes.vectorised import Vectorised
from fedobp.engine.lanes.workers import Workers
from fedobp.engine.protocol import Counters, PersonalModels, Prepared
from fedobp.engine.stack import Columns, Grouped, stacked
from fedobp.keys import Purpose, fold
from fedobp.method import Client, CohortUpdate, Sweep, Train
from fedobp.models import Model
from fedobp.options import KernelMode, Precision
from fedobp.records import Record, Tensors, mask_unsent
from fedobp.transfer import to_device

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused

_STREAMS = 16


class Finished(NamedTuple):
    """A cohort at the end of its program."""

    client: Client  # with a leading axis
    loss: Tensor
    processed: int  # samples that went through models


Steps = Generator[Phase, PhaseResult, Finished]  # a program, which stops at every phase


class Lanes:
    """Runs cohorts side by side. `memory` is the limit, in bytes, of the lanes of one group that train at one time."""

    def __init__(
        self,
        model: Model,
        batch: int,
        precision: Precision = "fp32",
        memory: float = math.inf,
        kernels: KernelMode = "auto",
    ) -> None:
        self._model, self._batch, self._precision = model, batch, precision
        devices: dict[str, type[Grouped] | type[Columns]] = {"cpu": Grouped, "cuda": Columns}
        forms = {device: stacked(model, form, precision) for device, form in devices.items()}
        graphs = Graphs()
        # The fused kernels of a device; None: there are none for this model.
        self._kernels: Callable[[torch.device], Fused | None] = cache(
            partial(fused_for, model, batch, precision, kernels)
        )
        functions = Vectorised(model, batch, precision, graphs, self._kernels)
        measured = {device: stacked(model, form) for device, form in devices.items()}  # in the weights' type
        workers = Workers(model, batch, precision, memory, measured, self._kernels)
        self._trainer = Trainer(model, batch, workers, forms, graphs, functions, self._kernels)
        self._predictor = Predictor(model, precision, workers, forms, functions, self._kernels)
        self._free = cycle(torch.cuda.Stream() for _ in range(_STREAMS))
        self._streams: dict[Hashable, torch.cuda.Stream] = {}
        self.counters = Counters()

    @cached_property
    def _side_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def provenance(self, device: torch.device) -> str:
        """Return what the bytes of its results depend on beside the configuration: the kernels' tile shapes."""
        fused = self._kernels(device)
        return f"tile table {fused.table_hash}" if fused else ""

    def try_train(
        self, jobs: Sequence[PoolJob], prepared: Prepared | None = None
    ) -> list[CohortUpdate | BaseException]:
        """Run the client programs of several runs on their cohorts, and keep each client's new state."""
        results: list[Any] = self._run(jobs, Purpose.TRAIN, prepared)
        for at, (job, result) in enumerate(zip(jobs, results, strict=True)):
            if not isinstance(result, BaseException):
                results[at] = caught(partial(self._kept, job, *result))
        runs = [(job, one) for job, one in zip(jobs, results, strict=True) if not isinstance(one, BaseException)]
        if not runs:
            return results
        # Batched over runs: many small transfers and launches are slower than one.
        sizes = [[job.data.size(client, "train") for client in job.ctx.cohort.tolist()] for job, _ in runs]
        cohorts = list(map(len, sizes))
        finite = torch.cat([sums for _, (_, sums, _, _) in runs]).isfinite()
        finite &= ~torch.cat([loss for _, (_, _, loss, _) in runs]).isinf()
        counts = to_device([n for cohort in sizes for n in cohort], finite.device).split(cohorts)
        updates = (
            CohortUpdate(upload, n, sum(cohort), loss, fine, processed)
            for (_, (upload, _, loss, processed)), cohort, n, fine in zip(
                runs, sizes, counts, finite.split(cohorts), strict=True
            )
        )
        return [one if isinstance(one, BaseException) else next(updates) for one in results]

    def train(self, jobs: Sequence[PoolJob], prepared: Prepared | None = None) -> list[CohortUpdate]:
        """Do the same, and raise the first exception."""
        return without_failures(self.try_train(jobs, prepared))

    def _kept(self, job: PoolJob, done: Client, loss: Tensor, processed: int) -> tuple[Record, Tensor, Tensor, int]:
        """Keep clients' new state; return uploads, sums (not finite where a weight is not), losses and samples."""
        job.clients.keep(job.ctx.cohort.tolist(), done.state, done.theta)
        return mask_unsent(done.upload), done.theta.sum(dim=1), loss, processed

    def prepare(self, jobs: Sequence[PoolJob]) -> Prepared:
        """Compute the batch orders of the next jobs on a separate stream, while CUDA works on the last ones.

        On the CPU nothing is computed in advance: no core is idle.
        """
        data = [job.clients.data for job in jobs]
        if not data or not data[0].x.is_cuda:
            return Prepared({})
        groups: dict[Hashable, list[Phase]] = {}
        for job in jobs:
            items = ((at, item) for at, item in enumerate(job.program) if isinstance(item, Train))
            for at, item in islice(items, 1):
                phase = Phase(job, item, None, fold(_keys(job, Purpose.TRAIN), at))
                groups.setdefault((phase.options, item.loss), []).append(phase)
        with torch.cuda.stream(self._side_stream):
            stacks = [stack for phases in groups.values() for stack in self._trainer.stacks(phases, data[0].mean)]
            found = {order_key(lanes): self._trainer.data_order(lanes) for lanes in stacks}
        return Prepared(found, self._side_stream)

    def personalize(self, job: PoolJob) -> PersonalModels:
        """Run a program on a cohort for the models that it uses; changes of client state are dropped."""
        [result] = self._run([job], Purpose.PERSONALIZE)
        if isinstance(result, BaseException):
            raise result
        done = result.client
        none = torch.zeros_like(done.theta, dtype=torch.bool)
        scratch = done.scratch if job.predict else {}
        return PersonalModels(done.theta, done.scratch.get("mine", none), scratch, result.processed)

    def predict(self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model predicts for its samples, on the CPU."""
        return self._predictor.predict(job, theta, split, scratch)

    def logits(self, job: PoolJob, theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the logits of each client's samples, on the CPU."""
        return self._predictor.logits(job, theta, split, scratch)

    # Programs.

    def _run(
        self, jobs: Sequence[PoolJob], purpose: Purpose, prepared: Prepared | None = None
    ) -> list[Finished | BaseException]:
        """Run all programs side by side; those that have reached phases of one group train together.

        A program that fails ends with its exception; the others continue.
        """
        programs = [self._steps(job, purpose, prepared) for job in jobs]
        done: dict[int, Finished | BaseException] = {}
        waiting: dict[int, tuple[Hashable, Phase]] = {}

        def advance(at: int, result: PhaseResult | None) -> None:
            try:
                phase = next(programs[at]) if result is None else programs[at].send(result)
                group = phase.group
                hash(group)
                waiting[at] = group, phase
            except StopIteration as end:
                done[at] = end.value

        def resume(at: int, result: PhaseResult | BaseException | None) -> None:
            failure = result if isinstance(result, BaseException) else caught(partial(advance, at, result))
            if failure is not None:
                done[at] = failure

        for at in range(len(jobs)):
            resume(at, None)
        while waiting:
            groups: dict[Hashable, list[int]] = {}
            for at, (group, _) in waiting.items():
                groups.setdefault(group, []).append(at)
            results = self._side_by_side({group: [waiting[at][1] for at in runs] for group, runs in groups.items()})
            waiting.clear()
            for group, runs in groups.items():
                for at, result in zip(runs, results[group], strict=True):
                    resume(at, result)
        return [done[at] for at in range(len(jobs))]

    def _side_by_side(
        self, groups: Mapping[Hashable, Sequence[Phase]]
    ) -> dict[Hashable, list[PhaseResult | BaseException]]:
        """Run the phases of several groups.

        On CUDA each group has its stream, because few lanes leave most of a device idle. That is safe: meanwhile
        nothing runs on the calling stream, and every program keeps references to what its phase reads.
        """
        device = next(iter(groups.values()))[0].job.clients.data.x.device
        if device.type != "cuda":
            return {group: self._run_group(phases) for group, phases in groups.items()}
        self._kernels(device)  # built here: their tables are for all streams
        here, used, found = torch.cuda.current_stream(), [], {}
        # Sweeps with a stopping rule come last: they synchronise.
        for group, phases in sorted(groups.items(), key=lambda one: getattr(one[1][0].item, "more", None) is not None):
            stream = self._acquire_stream(group)
            used.append(stream)
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                found[group] = self._run_group(phases)
        for stream in used:
            here.wait_stream(stream)
        return found

    def _run_group(self, phases: Sequence[Phase]) -> list[PhaseResult | BaseException]:
        """Run phases of one group together; if that fails, without those that also fail alone."""
        results, counters = self._without_failing(phases)
        self.counters += counters
        return results

    def _without_failing(self, phases: Sequence[Phase]) -> tuple[list[PhaseResult | BaseException], Counters]:
        found = caught(partial(self._trainer.run, phases))
        if not isinstance(found, BaseException):
            return [*found[0]], found[1]
        if len(phases) == 1:
            return [found], Counters()
        del found  # the frames of its traceback hold memory
        alone, counters = zip(*(self._without_failing([phase]) for phase in phases), strict=True)
        results = [one for [one] in alone]
        right = [phase for phase, one in zip(phases, results, strict=True) if not isinstance(one, BaseException)]
        if len(right) in (0, len(phases)):
            return results, sum(counters, Counters())
        again, counter = self._without_failing(right)  # all steps are taken again, and counted once
        rest = iter(again)
        return [one if isinstance(one, BaseException) else next(rest) for one in results], counter

    def _acquire_stream(self, group: Hashable) -> torch.cuda.Stream:
        """Assign a stream to a group, always the same: its graphs share workspaces with all that runs there."""
        self._streams[group] = self._streams.pop(group) if group in self._streams else next(self._free)
        if len(self._streams) > 2 * CACHE_SIZE:
            del self._streams[next(iter(self._streams))]  # the least recently used: its graphs are no longer cached
        return self._streams[group]

    def _steps(self, job: PoolJob, purpose: Purpose, prepared: Prepared | None) -> Steps:
        """Run one program on its cohort; stop at every `Train` and `Sweep`, whose result is sent in."""
        clients, data, cohort = job.clients, job.data, job.ctx.cohort
        like = data.mean
        keys = _keys(job, purpose)
        loss, processed = like.new_full((len(cohort),), math.nan), 0
        numbers = to_device(list(job.hparams.values()), like.device, like.dtype).unbind()
        sizes = [data.size(client, "train") for client in cohort.tolist()]
        # One transfer to the device: sizes, ids, zeros, and the steps of every training phase.
        epochs = [item.epochs if isinstance(item, Train) else 0 for item in job.program]
        steps = [[times * batches_of(size, self._batch) for size in sizes] for times in (0, *epochs)]
        n, ids, none, *planned = to_device(torch.tensor([sizes, cohort.tolist(), *steps]), like.device)
        client = Client(
            state=clients.state.gather(cohort.tolist()),
            download=mask_unsent(job.download),
            scratch={},
            upload={},
            hparams={name: number.expand(len(cohort)) for name, number in zip(job.hparams, numbers, strict=True)},
            data={"n": n, "counts": data.counts_of(ids), "steps": none},
        )
        for at, item in enumerate(job.program):
            if isinstance(item, Train | Sweep):
                done = yield Phase(job, item, client, fold(keys, at), prepared)
                taken = planned[at] if done.steps is None else done.steps
                client = replace(client.set(**done.scratch), data={**client.data, "steps": taken})
                loss = done.loss if isinstance(item, Train) and item.epochs else loss
                processed += done.processed
            else:
                client = self._vectorised(item, client)
        if client.theta.shape != (len(cohort), self._model.layout.size):
            raise ValueError(
                f"scratch['theta'] has shape {tuple(client.theta.shape[1:])}, not that of the model's vector"
            )
        return Finished(client, loss, processed)

    def _vectorised(self, function: Callable[[Model, Client], Client], client: Client) -> Client:
        """Call a function of one client on all clients."""

        def one(
            state: Tensors, download: Record, scratch: Tensors, upload: Record, hparams: Tensors, data: Tensors
        ) -> Any:
            after = function(self._model, Client(state, download, scratch, upload, hparams, data))
            return after.state, after.download, after.scratch, after.upload

        given = client.state, client.download, client.scratch, client.upload, client.hparams, client.data
        state, download, scratch, upload = vmap(one)(*given)
        return replace(client, state=state, download=download, scratch=scratch, upload=upload)


def _keys(job: PoolJob, purpose: Purpose) -> Tensor:
    """Return every client's key in this round."""
    return fold(job.clients.seed, job.ctx.round, job.ctx.cohort, purpose)
