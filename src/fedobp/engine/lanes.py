"""The lanes engine: all clients of a round, and of all runs of a launch, train at once.

A lane is one (run, client) pair with its own weights, data order and state. Lanes are sorted by their number of steps;
a step advances those that still have one, so the active set is a prefix that shrinks and a finished lane is not
touched. Programs are walked side by side: plain functions are vectorised over a cohort, and wherever several runs
stand at a phase of one kind, their lanes train together.

On the CPU lanes are dealt out to stacks of a size that suits the model, and every core works on stacks of its own with
one thread: a large model's lane is a stack by itself, small ones go by the dozen. On CUDA all lanes that fit in memory
are one stack, and its steps are replayed from graphs.
"""

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from fedobp.algorithms import Client, Record, Sweep, Tensors, Train
from fedobp.data import Split
from fedobp.engine.arithmetic import Precision, autocast, steady
from fedobp.engine.batch_order import batches_of, orders, share_of
from fedobp.engine.cost import Cost, cost
from fedobp.engine.cuda_graphs import KINDS, Graphs
from fedobp.engine.fit import descend, training
from fedobp.engine.interface import Counters, Task, Trained, caught, without_failures
from fedobp.engine.kernels import fused_for
from fedobp.engine.phases import Done, Lane, Phase, rule_of, scaling_of
from fedobp.engine.serial import last_models, poisoned, without_norms
from fedobp.engine.stack import Columns, Forward, Grouped, stacked
from fedobp.engine.vectorised import Vectorised, ids_of
from fedobp.keys import Purpose, fold
from fedobp.models import Model
from fedobp.transfer import send

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused

_STACK_WORK = 5e8  # floating-point operations of a CPU stack's step: larger stacks gain nothing
_STACK_LANES = 32
_TEST_BATCH = 256
_STREAMS = 16

T = TypeVar("T")
Walked = tuple[Client, Tensor, int]  # a cohort after its program, its losses, and the samples that it saw
Walk = Generator["Phase", "Done", Walked]


class Lanes:
    """Runs cohorts side by side. `memory` bounds, in bytes, what lanes of one kind that train at one time may take."""

    def __init__(self, model: Model, batch: int, precision: Precision = "fp32", memory: float = math.inf) -> None:
        self._model, self._batch, self._precision, self._memory = model, batch, precision, memory
        self._low = precision == "bf16"
        self._forms: dict[str, Forward] = {"cpu": stacked(model, Grouped), "cuda": stacked(model, Columns)}
        self._graphs = Graphs()
        # The fused kernels, where there are any for this model on a device.
        self._kernels: Callable[[torch.device], Fused | None] = cache(partial(fused_for, model, batch, precision))
        self._functions = Vectorised(model, batch, precision, self._graphs, self._kernels)
        self._workers = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._workers, "fedobp-lanes")
        self._costs: dict[tuple[str, torch.dtype], Cost] = {}
        self._aside: torch.cuda.Stream | None = None
        self._free = cycle(torch.cuda.Stream() for _ in range(_STREAMS))
        self._streams: dict[Hashable, torch.cuda.Stream] = {}
        self._ready: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self.counters = Counters()

    def attempt(self, tasks: Sequence[Task]) -> list[Trained | BaseException]:
        """Run the local programs of several runs on their cohorts, and keep what each client remembers."""
        answers: list[Any] = self._run(tasks, Purpose.TRAIN)
        for at, (task, answer) in enumerate(zip(tasks, answers, strict=True)):
            if not isinstance(answer, BaseException):
                answers[at] = caught(partial(self._kept, task, *answer))
        runs = [(task, one) for task, one in zip(tasks, answers, strict=True) if not isinstance(one, BaseException)]
        if not runs:
            return answers
        # For all runs at once: many small transfers to a device are slower than one.
        cohorts = [len(task.now.cohort) for task, _ in runs]
        samples = [task.people.data.size(client, "train") for task, _ in runs for client in task.now.cohort.tolist()]
        finite = torch.cat([sums for _, (_, sums, _, _) in runs]).isfinite()
        finite &= ~torch.cat([loss for _, (_, _, loss, _) in runs]).isinf()
        each = zip(send(samples, finite.device).split(cohorts), finite.split(cohorts), strict=True)
        trained = (
            Trained(up, n, loss, fine, seen) for (_, (up, _, loss, seen)), (n, fine) in zip(runs, each, strict=True)
        )
        return [one if isinstance(one, BaseException) else next(trained) for one in answers]

    def train(self, tasks: Sequence[Task]) -> list[Trained]:
        """Do the same, and raise the first exception."""
        return without_failures(self.attempt(tasks))

    def _kept(self, task: Task, done: Client, loss: Tensor, seen: int) -> tuple[Record, Tensor, Tensor, int]:
        """Keep what clients remember; return their uploads, sums that show what is not finite, losses and samples."""
        task.people.keep(task.now.cohort.tolist(), done.own, done.theta)
        return {name: poisoned(value) for name, value in done.up.items()}, done.theta.sum(dim=1), loss, seen

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Order the samples of the tasks to come while CUDA is busy with those of now; their downloads are not used.

        On the CPU there is nobody else to do it.
        """
        data = [task.people.data for task in tasks]
        if not data or not data[0].x.is_cuda:
            return
        groups: dict[Hashable, list[Phase]] = {}
        for task in tasks:
            items = ((at, item) for at, item in enumerate(task.program) if isinstance(item, Train))
            for at, item in islice(items, 1):
                phase = Phase(task, item, None, fold(_keys(task, Purpose.TRAIN), at))
                groups.setdefault((phase.options, item.loss), []).append(phase)
        self._aside = self._aside or torch.cuda.Stream()
        self._ready.clear()
        with torch.cuda.stream(self._aside):
            for phases in groups.values():
                plain = phases[0].item.loss is None
                for lanes in self._dealt(self._lanes(phases), data[0].mean, self._batch, plain):
                    self._ready[_names(lanes)] = self._data_order(lanes)

    def serve(self, task: Task) -> Tensors:
        """Run a serving program on a cohort; what it remembers is dropped."""
        [answer] = self._run([task], Purpose.SERVE)
        if isinstance(answer, BaseException):
            raise answer
        done = answer[0]
        nothing = torch.zeros_like(done.theta, dtype=torch.bool)
        rest = done.work if task.predict else {}
        return {**rest, "theta": done.theta, "mine": done.work.get("mine", nothing)}

    def last(self, task: Task, otherwise: Tensor) -> Tensor:
        """Return each client's last local model, and `otherwise` for a client that has never trained."""
        return last_models(task, otherwise)

    def predict(self, task: Task, theta: Tensor, split: Split, beside: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model gives to its samples, on the CPU."""
        data, clients, device = task.people.data, task.now.cohort, theta.device
        special = partial(task.predict, self._functions.model_on(device)) if task.predict and beside else None
        sizes = [data.size(client, split) for client in clients.tolist()]
        found = torch.zeros(len(sizes), max(sizes), dtype=torch.int64, device=device)

        @torch.no_grad()
        def test(rows: Sequence[int]) -> None:
            chosen = torch.tensor(rows)
            fused, longest = self._kernels(device), sizes[rows[0]]
            if fused and longest and special is None:
                positions = torch.arange(longest, device=device).expand(len(rows), -1)
                ids = data.ids(clients[chosen], positions, split)
                there = send(chosen, device)
                found[there, :longest] = fused.labels(theta[there], ids, [sizes[row] for row in rows], data)
                return
            there = chosen.to(device)
            mine = {name: values[there] for name, values in (beside or {}).items()}
            tensors = self._model.layout.views(theta[there])
            for start in range(0, longest, _TEST_BATCH):
                width = min(_TEST_BATCH, longest - start)
                lanes = sum(sizes[row] > start for row in rows)
                positions = torch.arange(start, start + width, device=device).expand(lanes, -1)
                ids = data.ids(clients[chosen[:lanes]], positions, split)
                x = data.samples(ids.flatten()).unflatten(0, ids.shape)
                if special:
                    with autocast(self._precision, x):
                        logits = vmap(special)({name: values[:lanes] for name, values in mine.items()}, x)
                else:
                    logits = self._logits({name: tensor[:lanes] for name, tensor in tensors.items()}, x)
                found[there[:lanes], start : start + width] = logits.argmax(dim=2)

        longest_first = sorted(range(len(sizes)), key=lambda row: -sizes[row])
        self._work(test, self._dealt(longest_first, theta, _TEST_BATCH, plain=special is None), device)
        labels = found.cpu()
        return [labels[row, :size] for row, size in enumerate(sizes)]

    def _logits(self, tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        if self._low:
            x, tensors = x.bfloat16(), {name: tensor.bfloat16() for name, tensor in tensors.items()}
        return self._forms[x.device.type](tensors, x)

    # Programs.

    def _run(self, tasks: Sequence[Task], purpose: Purpose) -> list[Walked | BaseException]:
        """Walk all programs side by side; those that wait at phases of one kind train together.

        A program that fails ends with its exception, and the others go on.
        """
        walks = [self._walk(task, purpose) for task in tasks]
        done: dict[int, Walked | BaseException] = {}
        waiting: dict[int, tuple[Hashable, Phase]] = {}

        def advance(at: int, answer: Done | None) -> None:
            try:
                phase = next(walks[at]) if answer is None else walks[at].send(answer)
                kind = phase.kind
                hash(kind)
                waiting[at] = kind, phase
            except StopIteration as end:
                done[at] = end.value

        def go_on(at: int, answer: Done | BaseException | None) -> None:
            failure = answer if isinstance(answer, BaseException) else caught(partial(advance, at, answer))
            if failure is not None:
                done[at] = failure

        for at in range(len(tasks)):
            go_on(at, None)
        while waiting:
            groups: dict[Hashable, list[int]] = {}
            for at, (kind, _) in waiting.items():
                groups.setdefault(kind, []).append(at)
            answers = self._side_by_side({kind: [waiting[at][1] for at in group] for kind, group in groups.items()})
            waiting.clear()
            for kind, group in groups.items():
                for at, answer in zip(group, answers[kind], strict=True):
                    go_on(at, answer)
        return [done[at] for at in range(len(tasks))]

    def _side_by_side(self, groups: Mapping[Hashable, Sequence[Phase]]) -> dict[Hashable, list[Done | BaseException]]:
        """Carry out phases of several kinds.

        On CUDA each kind has its stream, because few lanes leave most of a card idle. That is safe without further
        care: within a wave nothing runs on the stream that called, and every walk holds what its phase reads.
        """
        device = next(iter(groups.values()))[0].task.people.data.x.device
        if device.type != "cuda":
            return {kind: self._carry_out(phases) for kind, phases in groups.items()}
        self._kernels(device)  # their tables are for all streams
        here, found = torch.cuda.current_stream(), {}
        # Those last that ask clients whether to go on: there the host waits.
        for kind, phases in sorted(groups.items(), key=lambda one: getattr(one[1][0].item, "more", None) is not None):
            stream = self._stream_of(kind)
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                found[kind] = self._carry_out(phases)
        for kind in groups:
            here.wait_stream(self._stream_of(kind))
        return found

    def _carry_out(self, phases: Sequence[Phase]) -> list[Done | BaseException]:
        """Carry out phases of one kind together; where that fails, without those that fail alone."""
        before = self.counters
        found = caught(partial(self._fit if isinstance(phases[0].item, Train) else self._sweep, phases))
        if not isinstance(found, BaseException):
            return [*found]
        if len(phases) == 1:
            return [found]
        del found  # its frames hold memory
        alone = [self._carry_out([phase])[0] for phase in phases]
        right = [phase for phase, one in zip(phases, alone, strict=True) if not isinstance(one, BaseException)]
        if len(right) in (0, len(phases)):
            return alone
        self.counters = before  # those steps are taken again
        again = iter(self._carry_out(right))
        return [one if isinstance(one, BaseException) else next(again) for one in alone]

    def _stream_of(self, kind: Hashable) -> torch.cuda.Stream:
        """Return a kind's stream, always the same: its graphs share scratch memory with all that runs there."""
        self._streams[kind] = self._streams.pop(kind) if kind in self._streams else next(self._free)
        if len(self._streams) > 2 * KINDS:
            del self._streams[next(iter(self._streams))]  # whose graphs are long gone
        return self._streams[kind]

    def _walk(self, task: Task, purpose: Purpose) -> Walk:
        """Run one program on its cohort; stop at every `Train` and `Sweep`, of which the outcome is sent in."""
        people, like, cohort = task.people, task.people.data.mean, task.now.cohort
        keys = _keys(task, purpose)
        loss, seen = like.new_full((len(cohort),), math.nan), 0
        numbers = send(list(task.hp.values()), like.device, like.dtype).unbind()
        sizes = [people.data.size(client, "train") for client in cohort.tolist()]
        # All that is known beforehand goes to the device at once: sizes, ids, no steps, and every training's steps.
        epochs = [item.epochs if isinstance(item, Train) else 0 for item in task.program]
        steps = [[times * batches_of(size, self._batch) for size in sizes] for times in (0, *epochs)]
        n, who, none, *known = send(torch.tensor([sizes, cohort.tolist(), *steps]), like.device)
        client = Client(
            own=people.own.gather(cohort.tolist()),
            down={name: poisoned(value) for name, value in task.down.items()},
            work={},
            up={},
            hp={name: number.expand(len(cohort)) for name, number in zip(task.hp, numbers, strict=True)},
            data={"n": n, "counts": people.data.label_counts[who], "steps": none},
        )
        for at, item in enumerate(task.program):
            if isinstance(item, Train | Sweep):
                done = yield Phase(task, item, client, fold(keys, at))
                taken = known[at] if done.steps is None else done.steps
                client = replace(client.set(**done.work), data={**client.data, "steps": taken})
                loss = done.loss if isinstance(item, Train) and item.epochs else loss
                seen += done.seen
            else:
                client = self._vectorised(item, client)
        if client.theta.shape != (len(cohort), self._model.layout.size):
            raise ValueError(f"work['theta'] has shape {tuple(client.theta.shape[1:])}, not that of the model's vector")
        return client, loss, seen

    def _vectorised(self, function: Callable[[Model, Client], Client], client: Client) -> Client:
        """Call a function of one client on all of them."""

        def one(own: Tensors, down: Record, work: Tensors, up: Record, hp: Tensors, data: Tensors) -> Any:
            after = function(self._model, Client(own, down, work, up, hp, data))
            return after.own, after.work, after.up

        own, work, up = vmap(one)(client.own, client.down, client.work, client.up, client.hp, client.data)
        return replace(client, own=own, work=work, up=up)

    # Training.

    def _lanes(self, phases: Sequence[Phase]) -> list[Lane]:
        """Return the clients of phases that have a step to take, those with most of them first."""
        lanes = []
        for phase in phases:
            data = phase.task.people.data
            for row, client in enumerate(phase.task.now.cohort.tolist()):
                n, item = data.size(client, "train"), phase.item
                if isinstance(item, Train):
                    steps = item.epochs * batches_of(n, self._batch)
                else:
                    n = share_of(n, item.fraction)
                    steps = batches_of(n, n if item.whole else self._batch, item.smallest) if n and item.epochs else 0
                lanes.append(Lane(phase, row, client, n, steps))
        return sorted((lane for lane in lanes if lane.steps), key=lambda lane: -lane.steps)

    def _fit(self, phases: Sequence[Phase]) -> list[Done]:
        """Train the lanes of phases of one kind."""
        moving = self._lanes(phases)
        vectors = {id(p): {name: p.client.work[name].clone() for name in p.item.learn} for p in phases}
        like = phases[0].client.work[phases[0].item.learn[0]]
        losses = {id(phase): like.new_full((len(phase.keys),), math.nan) for phase in phases}
        plain, norms = phases[0].item.loss is None, self._model.layout.learned < self._model.layout.size
        fit = self._fit_plain if plain and not norms else self._fit_vectorised

        def train(some: Sequence[Lane]) -> int:
            rows = [[vectors[id(lane.phase)][name][lane.row] for name in lane.phase.item.learn] for lane in some]
            loss, slots = fit(some, rows)
            loss = loss / send([lane.steps for lane in some], like.device)
            torch._foreach_copy_([losses[id(lane.phase)][lane.row] for lane in some], list(loss.unbind()))
            return slots

        slots = self._work(train, self._dealt(moving, like, self._batch, plain), like.device)
        seen = {id(phase): 0 for phase in phases}
        for lane in moving:
            seen[id(lane.phase)] += lane.phase.item.epochs * (lane.n - (lane.n % self._batch == 1))
        self.counters += Counters(sum(lane.steps for lane in moving), sum(slots), sum(seen.values()))
        return [Done(vectors[id(p)], losses[id(p)], None, seen[id(p)]) for p in phases]

    def _sweep(self, phases: Sequence[Phase]) -> list[Done]:
        """Take equal functions of several phases through their lanes' batches."""
        without_norms(self._model)
        item, lanes = phases[0].item, self._lanes(phases)
        work = {id(phase): {name: value.clone() for name, value in phase.client.work.items()} for phase in phases}
        steps, seen = {id(phase): [0] * len(phase.keys) for phase in phases}, {id(phase): 0 for phase in phases}
        like = phases[0].client.theta
        size = max((lane.n for lane in lanes), default=0) if item.whole else self._batch

        def go(some: Sequence[Lane]) -> tuple[list[int], int]:
            after, epochs, slots = self._functions.sweep(some, size)
            for name, values in after.items():
                torch._foreach_copy_([work[id(lane.phase)][name][lane.row] for lane in some], list(values.unbind()))
            return epochs, slots

        each = size * self._model.layout.size * like.element_size() if item.per_sample else 0
        stacks = self._dealt(lanes, like, size, plain=False, more=each)
        done = self._work(go, stacks, like.device)
        for some, (epochs, _) in zip(stacks, done, strict=True):
            for lane, times in zip(some, epochs, strict=True):
                steps[id(lane.phase)][lane.row] = times * lane.steps
                left_out = lane.n % size if lane.n % size < item.smallest else 0
                seen[id(lane.phase)] += item.passes * times * (lane.n - left_out)
        slots = item.passes * sum(slots for _, slots in done)
        self.counters += Counters(sum(map(sum, steps.values())), slots, sum(seen.values()))
        nan = {id(phase): like.new_full((len(phase.keys),), math.nan) for phase in phases}
        return [Done(work[id(p)], nan[id(p)], send(steps[id(p)], like.device), seen[id(p)]) for p in phases]

    def _fit_plain(self, lanes: Sequence[Lane], rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, int]:
        """Train a stack with cross-entropy: `rows` change in place. Return the sums of losses, and the slots taken."""
        ids, counts = self._data_order(lanes)
        data = [lane.phase.task.people.data for lane in lanes]
        item, layout = lanes[0].phase.item, self._model.layout
        fused, steps = self._kernels(ids.device), [lane.steps for lane in lanes]
        if fused:
            theta = torch.stack([row for [row] in rows])
            rule = rule_of(lanes, 0)  # the kernels hold velocities of their own
            loss, slots = fused.train(theta, rule, item.part, ids, counts, data, steps)
            torch._foreach_copy_([row for [row] in rows], list(theta.unbind()))
            return loss, slots
        learned = {name for name in layout.names if item.part == "all" or layout.in_head(name) == (item.part == "head")}
        models = [row for [row] in rows]
        # One alone is trained where it lies: as `data`, because its neighbours' steps are no changes to it.
        theta = torch.stack(models) if len(models) > 1 else models[0].data[None]
        given = {"rule": rule_of(lanes, layout.size).used(), **scaling_of(lanes)}
        tensors = {name: tensor.contiguous() for name, tensor in layout.views(theta).items()}
        moving: dict[str, Any] = {"tensors": tensors, "loss": theta.new_zeros(len(lanes))}
        make = training(data[0], learned, layout, self._forms[theta.device.type], self._low)
        plan = {"ids": ids, "counts": counts}
        if theta.is_cuda:
            slots = self._graphs.descend(lanes[0].phase.options, given, moving, plan, steps, make)
        else:
            slots = descend(given, moving, plan, steps, make)
        if len(models) > 1 or theta.is_cuda:
            torch._foreach_copy_(models, list(layout.flatten(tensors).unbind()))
        return moving["loss"], slots

    def _fit_vectorised(self, lanes: Sequence[Lane], rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, int]:
        """Train a stack as `_fit_plain` does, by a vectorised function of one lane."""
        return self._functions.fit(lanes, rows, *self._data_order(lanes))

    def _data_order(self, lanes: Sequence[Lane]) -> tuple[Tensor, Tensor]:
        """Return every step's samples [steps, lanes, batch], and how many of them are real [steps, lanes]."""
        ready = self._ready.pop(_names(lanes), None) if self._ready else None
        if ready is not None and self._aside is not None:
            here = torch.cuda.current_stream()
            here.wait_stream(self._aside)
            for tensor in ready:
                tensor.record_stream(here)
            return ready
        device = lanes[0].phase.task.people.data.x.device
        keys = send(torch.stack([lane.phase.keys[lane.row] for lane in lanes]), device)
        epochs = [lane.phase.item.epochs for lane in lanes]
        positions, counts = orders(keys, [lane.n for lane in lanes], epochs, self._batch)
        return ids_of(lanes, positions).transpose(0, 1).contiguous(), counts.t().contiguous()

    # Stacks and cores.

    def _dealt(
        self, longest_first: Sequence[T], like: Tensor, samples: int, plain: bool = True, more: int = 0
    ) -> list[list[T]]:
        """Deal lanes out to stacks, so that all are about equally long and none exceeds the memory.

        A step without a loss of its own (`plain`) may be one of the fused kernels'; others may take `more` a lane.
        """
        fused = self._kernels(like.device) if plain else None
        lanes = len(longest_first)
        size = self._fit_in(like, samples, lanes, more) if fused is None else self._memory / fused.lane_bytes
        stacks = -(-lanes // max(1, int(min(size, lanes))))
        return [list(longest_first[at::stacks]) for at in range(stacks)]

    def _fit_in(self, like: Tensor, samples: int, lanes: int, more: int) -> float:
        """Return how many of some lanes the general path takes in a stack."""
        where = like.device.type, like.dtype
        if where not in self._costs:
            self._costs[where] = cost(self._model, self._forms[where[0]], self._batch, like.dtype)
        price = self._costs[where]
        share = samples / self._batch
        at_once = 1 if like.is_cuda else self._workers
        size = self._memory / at_once / (price.fixed_bytes + share * price.batch_bytes + more)
        if like.is_cuda:
            return size
        work = max(1, round(_STACK_WORK / max(1, price.flops * share)))
        return min(size, _STACK_LANES, work, -(-lanes // self._workers) or 1)

    def _work(self, job: Callable[[list[T]], Any], stacks: Sequence[list[T]], device: torch.device) -> list[Any]:
        """Do a job for every stack: on CUDA one after the other, on the CPU with a core for each."""
        if device.type != "cpu":
            with steady(self._precision):
                return [job(stack) for stack in stacks]
        threads = max(1, self._workers // max(1, len(stacks)))

        def alone(stack: list[T]) -> Any:
            torch.set_num_threads(threads)  # this is a property of the thread that says it
            return job(stack)

        with steady(self._precision, threads):
            return list(self._pool.map(alone, stacks))


def _keys(task: Task, purpose: Purpose) -> Tensor:
    """Return every client's key in this round."""
    return fold(task.people.seed, task.now.round, task.now.cohort, purpose)


def _names(lanes: Sequence[Lane]) -> Hashable:
    """Return what the order of lanes' samples depends on."""
    return tuple((id(one.phase.task.people), one.phase.item.epochs, int(one.phase.keys[one.row])) for one in lanes)
