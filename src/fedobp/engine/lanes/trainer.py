"""Phases of one group together: `Train` by SGD on stacks of lanes, `Sweep` by a vectorised function.

Lanes are sorted by their number of steps. A step advances the lanes that still have one: the active lanes are a prefix
that shrinks, and finished lanes are not changed.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedobp.engine.batch_order import batches_of, orders, share_of
from fedobp.engine.cuda_graphs import Graphs
from fedobp.engine.failures import refuse_batch_norm
from fedobp.engine.lanes.phases import Lane, Phase, PhaseResult, rule_of, scaling_of
from fedobp.engine.lanes.vectorised import Vectorised, ids_of
from fedobp.engine.lanes.workers import Workers
from fedobp.engine.protocol import Counters
from fedobp.engine.sgd import run_steps, training
from fedobp.engine.stack import Forward
from fedobp.method import Train
from fedobp.models import Model
from fedobp.transfer import to_device

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused


class Trainer:
    """Runs phases."""

    def __init__(
        self,
        model: Model,
        batch: int,
        workers: Workers,
        forms: dict[str, Forward],
        graphs: Graphs,
        functions: Vectorised,
        kernels: "Callable[[torch.device], Fused | None]",
    ) -> None:
        self._model, self._batch, self._workers = model, batch, workers
        self._forms, self._graphs, self._functions, self._kernels = forms, graphs, functions, kernels

    def run(self, phases: Sequence[Phase]) -> tuple[list[PhaseResult], Counters]:
        """Run phases of one group."""
        return self._fit(phases) if isinstance(phases[0].item, Train) else self._sweep(phases)

    def lanes(self, phases: Sequence[Phase]) -> list[Lane]:
        """Return the clients of phases that have a step to take, sorted by the number of steps, largest first."""
        lanes = []
        for index, phase in enumerate(phases):
            data = phase.job.data
            for row, client in enumerate(phase.job.ctx.cohort.tolist()):
                n, item = data.size(client, "train"), phase.item
                if isinstance(item, Train):
                    steps = item.epochs * batches_of(n, self._batch)
                else:
                    n = share_of(n, item.fraction)
                    steps = batches_of(n, n if item.whole else self._batch, item.smallest) if n and item.epochs else 0
                lanes.append(Lane(phase, index, row, client, n, steps))
        return sorted((lane for lane in lanes if lane.steps), key=lambda lane: -lane.steps)

    def stacks(self, phases: Sequence[Phase], like: Tensor) -> list[list[Lane]]:
        """Return the stacks in which the lanes of training phases of one group train."""
        return self._workers.stacks(self.lanes(phases), like, self._batch, phases[0].item.loss is None)

    def _fit(self, phases: Sequence[Phase]) -> tuple[list[PhaseResult], Counters]:
        """Train the lanes of phases of one group."""
        vectors = [{name: p.client.scratch[name].clone() for name in p.item.learn} for p in phases]
        like = phases[0].client.scratch[phases[0].item.learn[0]]
        losses = [like.new_full((len(phase.keys),), math.nan) for phase in phases]
        plain, norms = phases[0].item.loss is None, self._model.layout.learned < self._model.layout.size
        fit = self._fit_plain if plain and not norms else self._fit_vectorised

        def train(some: Sequence[Lane]) -> int:
            rows = [[vectors[lane.index][name][lane.row] for name in lane.phase.item.learn] for lane in some]
            loss, slots = fit(some, rows)
            loss = loss / to_device([lane.steps for lane in some], like.device)
            torch._foreach_copy_([losses[lane.index][lane.row] for lane in some], list(loss.unbind()))
            return slots

        stacks = self.stacks(phases, like)
        slots = self._workers.map(train, stacks, like.device)
        processed, steps = [0] * len(phases), 0
        for lane in (lane for stack in stacks for lane in stack):
            processed[lane.index] += lane.phase.item.epochs * (lane.n - (lane.n % self._batch == 1))
            steps += lane.steps
        results = [
            PhaseResult(after, loss, None, seen) for after, loss, seen in zip(vectors, losses, processed, strict=True)
        ]
        return results, Counters(steps, sum(slots), sum(processed))

    def _sweep(self, phases: Sequence[Phase]) -> tuple[list[PhaseResult], Counters]:
        """Run the function of several phases, which is the same, on their lanes' batches."""
        refuse_batch_norm(self._model)
        item, lanes = phases[0].item, self.lanes(phases)
        scratch = [{name: value.clone() for name, value in phase.client.scratch.items()} for phase in phases]
        steps, processed = [[0] * len(phase.keys) for phase in phases], [0] * len(phases)
        like = phases[0].client.theta
        size = max((lane.n for lane in lanes), default=0) if item.whole else self._batch

        def sweep(some: Sequence[Lane]) -> tuple[list[int], int]:
            after, epochs, slots = self._functions.sweep(some, some[0].n if item.whole else size)
            for name, values in after.items():
                torch._foreach_copy_([scratch[lane.index][name][lane.row] for lane in some], list(values.unbind()))
            return epochs, slots

        each = size * self._model.layout.size * like.element_size() if item.per_sample else 0
        stacks = self._workers.stacks(lanes, like, size, plain=False, more=each)
        if item.whole:  # clients of similar size together: a stack is padded to its largest
            largest_first = iter(sorted(lanes, key=lambda lane: -lane.n))
            stacks = [list(islice(largest_first, len(stack))) for stack in stacks]
        done = self._workers.map(sweep, stacks, like.device)
        for some, (epochs, _) in zip(stacks, done, strict=True):
            for lane, times in zip(some, epochs, strict=True):
                steps[lane.index][lane.row] = times * lane.steps
                left_out = lane.n % size if lane.n % size < item.smallest else 0
                processed[lane.index] += item.passes * times * (lane.n - left_out)
        slots = item.passes * sum(slots for _, slots in done)
        nan = [like.new_full((len(phase.keys),), math.nan) for phase in phases]
        results = [
            PhaseResult(after, loss, to_device(taken, like.device), seen)
            for after, loss, taken, seen in zip(scratch, nan, steps, processed, strict=True)
        ]
        return results, Counters(sum(map(sum, steps)), slots, sum(processed))

    def _fit_plain(self, lanes: Sequence[Lane], rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, int]:
        """Train a stack with cross-entropy; `rows` change in place. Return sums of losses, and the number of slots."""
        ids, counts = self.data_order(lanes)
        data = [lane.phase.job.data for lane in lanes]
        item, layout = lanes[0].phase.item, self._model.layout
        fused, steps = self._kernels(ids.device), [lane.steps for lane in lanes]
        if fused:
            theta = torch.stack([row for [row] in rows])
            rule = rule_of(lanes, 0)  # the kernels have their own velocities
            loss, slots = fused.train(theta, rule, item.part, ids, counts, data, steps)
            torch._foreach_copy_([row for [row] in rows], list(theta.unbind()))
            return loss, slots
        learned = {name for name in layout.names if item.part == "all" or layout.in_head(name) == (item.part == "head")}
        models = [row for [row] in rows]
        # A single lane is trained in place, as `data`: autograd must not see the steps of other lanes as changes of it.
        theta = torch.stack(models) if len(models) > 1 else models[0].data[None]
        given = {"rule": rule_of(lanes, layout.size).used(), **scaling_of(lanes)}
        tensors = {name: tensor.contiguous() for name, tensor in layout.views(theta).items()}
        moving: dict[str, Any] = {"tensors": tensors, "loss": theta.new_zeros(len(lanes))}
        make = training(data[0], learned, layout, self._forms[theta.device.type])
        plan = {"ids": ids, "counts": counts}
        if theta.is_cuda:
            slots = self._graphs.run_steps(lanes[0].phase.options, given, moving, plan, steps, make)
        else:
            slots = run_steps(given, moving, plan, steps, make)
        if len(models) > 1 or theta.is_cuda:
            torch._foreach_copy_(models, list(layout.flatten(tensors).unbind()))
        return moving["loss"], slots

    def _fit_vectorised(self, lanes: Sequence[Lane], rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, int]:
        """Train a stack as `_fit_plain` does, by a vectorised function of one lane."""
        return self._functions.fit(lanes, rows, *self.data_order(lanes))

    def data_order(self, lanes: Sequence[Lane]) -> tuple[Tensor, Tensor]:
        """Return the samples of every step [steps, lanes, batch], and how many are real [steps, lanes]."""
        prepared = lanes[0].phase.prepared
        ready = prepared.orders.get(order_key(lanes)) if prepared and prepared.orders else None
        if prepared is not None and ready is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(prepared.stream)
            for tensor in ready:
                tensor.record_stream(here)
            return ready
        device = lanes[0].phase.job.data.x.device
        keys = to_device(torch.stack([lane.phase.keys[lane.row] for lane in lanes]), device)
        epochs = [lane.phase.item.epochs for lane in lanes]
        positions, counts = orders(keys, [lane.n for lane in lanes], epochs, self._batch)
        return ids_of(lanes, positions).transpose(0, 1).contiguous(), counts.t().contiguous()


def order_key(lanes: Sequence[Lane]) -> Hashable:
    """Return all that the batch order of lanes depends on."""
    return tuple((one.phase.job.clients, one.phase.item.epochs, int(one.phase.keys[one.row])) for one in lanes)
