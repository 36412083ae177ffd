"""Whatever a method computes itself, for many lanes at once: its losses and its sweeps, vectorised by `torch.func`.

Right for every method, and slower than the paths that know what a step does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn import functional

from fedobp.algorithms import Batch, Client, Record, Tensors
from fedobp.data import FederatedData
from fedobp.engine.fit import active, move
from fedobp.engine.phases import Lane, first_lanes, rule_of, stacked_home
from fedobp.engine.schedule import SUBSET, batches_of, orders, step_key
from fedobp.engine.serial import without_norms
from fedobp.models import Model
from fedobp.transfer import send


class Vectorised:
    """Runs functions of one lane on stacks of lanes."""

    def __init__(self, model: Model, batch: int, low: bool) -> None:
        self._model, self._batch, self._low = model, batch, low

    def fit(
        self, lanes: Sequence[Lane], rows: Sequence[Sequence[Tensor]], ids: Tensor, counts: Tensor
    ) -> tuple[Tensor, int]:
        """Train a stack as `_fit_plain` does, by a vectorised function of one lane.

        That is for a loss of the method's own, and for BatchNorm, which has statistics to move.
        """
        data = [lane.phase.task.people.data for lane in lanes]
        item, layout = lanes[0].phase.item, self._model.layout
        loss_of, first = item.loss, item.learn[0]

        def one(
            learned: Tensors, own: Tensors, down: Record, work: Tensors, hp: Tensors, data: Tensors, batch: Batch
        ) -> Any:
            if loss_of is not None:
                return loss_of(self._model, Client(own, down, {**work, **learned}, {}, hp, data), batch), ()
            logits, statistics = self._model.trained(learned[first], batch.x, batch.weight)
            return batch.mean(functional.cross_entropy(logits, batch.y, reduction="none")), statistics

        step_of: Callable[..., Any] = vmap(grad_and_value(one, has_aux=True))
        if loss_of is not None:
            without_norms(self._model)
            state = [stacked_home(lanes, home) for home in ("own", "down", "work", "hp", "data")]
            learned = {name: state[2][name].clone() for name in item.learn}
        else:
            state, learned = [{}] * 5, {first: torch.stack([row for [row] in rows])}
        rules = {name: rule_of(lanes, learned[name].shape[1], special=name == first) for name in item.learn}
        free = rules[first].moving
        if item.part != "all":
            inside = layout.is_head(ids.device) == (item.part == "head")
            free = (inside if free is None else inside & free).expand(len(lanes), -1)
        free_statistics = None
        if loss_of is None:
            entries = torch.arange(layout.size, device=ids.device).expand(len(lanes), -1)
            free = torch.ones_like(entries, dtype=torch.bool) if free is None else free
            free_statistics, free = free[:, layout.learned :], free & (entries < layout.learned)
        rules[first] = replace(rules[first], moving=free)
        total = learned[first].new_zeros(len(lanes))
        keys = send(torch.stack([lane.phase.keys[lane.row] for lane in lanes]), ids.device)
        per_epoch = send([batches_of(lane.n, self._batch) for lane in lanes], ids.device)
        slots = 0
        with self.autocast(total):
            for step, awake in enumerate(active([lane.steps for lane in lanes])):
                now, epoch = ids[step, :awake], step // per_epoch[:awake]
                when = step_key(keys[:awake], epoch, step % per_epoch[:awake]), torch.full_like(epoch, step), epoch
                part = [first_lanes(home, awake) for home in (learned, *state)]
                gradients, (loss, seen) = step_of(*part, self._batch_of(data, now, counts[step, :awake], when))
                total[:awake] += loss
                for name in item.learn:
                    move(learned[name][:awake], gradients[name], rules[name].part(awake))
                if free_statistics is not None:
                    statistics = learned[first][:awake, layout.learned :]
                    statistics.copy_(torch.where(free_statistics[:awake], seen, statistics))
                slots += now.numel()
        for at, vectors in enumerate(rows):
            torch._foreach_copy_(list(vectors), [values[at] for values in learned.values()])
        return total, slots

    def sweep(self, lanes: Sequence[Lane], size: int) -> tuple[Tensors, list[int], int]:
        """Take a stack through a sweep: return `work` after it, each lane's epochs, and the slots taken."""
        item, data = lanes[0].phase.item, [lane.phase.task.people.data for lane in lanes]
        device, once = data[0].x.device, [1] * len(lanes)
        keys = send(torch.stack([lane.phase.keys[lane.row] for lane in lanes]), device)
        own, down, work, hp, about = (stacked_home(lanes, home) for home in ("own", "down", "work", "hp", "data"))
        chosen = None
        if item.fraction < 1:
            all_of = [one.size(lane.client, "train") for one, lane in zip(data, lanes, strict=True)]
            chosen = orders(keys, all_of, once, max(all_of), 1, SUBSET).positions[:, 0]

        def step(own: Tensors, down: Record, work: Tensors, hp: Tensors, about: Tensors, batch: Batch) -> Any:
            return item.step(self._model, Client(own, down, work, {}, hp, about), batch).work

        def more(own: Tensors, down: Record, work: Tensors, hp: Tensors, about: Tensors) -> Any:
            return item.more(self._model, Client(own, down, work, {}, hp, about))

        step_of: Callable[..., Any] = vmap(step)
        alive, epochs, slots = torch.ones(len(lanes), dtype=torch.bool, device=device), [0] * len(lanes), 0
        rows = send([lane.steps for lane in lanes], device)
        for epoch in range(item.epochs):
            if item.more is not None:
                alive &= vmap(more)(own, down, work, hp, about)
                if not alive.any():
                    break
            going = alive.tolist() if item.more is not None else [True] * len(lanes)
            epochs = [times + goes for times, goes in zip(epochs, going, strict=True)]
            positions, counts = orders(keys, [lane.n for lane in lanes], once, size, item.smallest, epoch)
            if chosen is not None:
                positions = chosen.gather(1, positions.flatten(1)).view_as(positions)
            ids, counts = ids_of(lanes, positions).transpose(0, 1), counts.t()
            for at, awake in enumerate(active([lane.steps for lane in lanes])):
                when = (
                    step_key(keys[:awake], epoch, at),
                    epoch * rows[:awake] + at,
                    torch.full_like(rows[:awake], epoch),
                )
                batch = self._batch_of(data, ids[at, :awake], counts[at, :awake], when)
                part = [first_lanes(home, awake) for home in (own, down, work, hp, about)]
                with self.autocast(batch.x):
                    after = step_of(*part, batch)
                for name, values in after.items():
                    before = work[name][:awake]
                    if item.more is not None:
                        values = torch.where(alive[:awake].view(-1, *[1] * (values.ndim - 1)), values, before)
                    before.copy_(values)
                slots += ids[at, :awake].numel()
        return work, epochs, slots

    def _batch_of(
        self, data: Sequence[FederatedData], ids: Tensor, counts: Tensor, when: tuple[Tensor, Tensor, Tensor]
    ) -> Batch:
        """Return the samples `ids` [lanes, size] of the first lanes, of which `counts` are real."""
        mean, std = (torch.stack([getattr(one, name) for one in data[: len(ids)]]) for name in ("mean", "std"))
        x = data[0].x[ids.flatten()].unflatten(0, ids.shape)
        x = ((x.to(mean.dtype) / data[0].unit) - mean) / std
        weight = (torch.arange(ids.shape[1], device=ids.device) < counts[:, None]).to(mean.dtype)
        return Batch(x, data[0].y[ids], weight, *when)

    def autocast(self, like: Tensor) -> torch.autocast:
        """Return the context in which products have the engine's precision."""
        return torch.autocast(like.device.type, torch.bfloat16, enabled=self._low, cache_enabled=False)


def ids_of(lanes: Sequence[Lane], positions: Tensor) -> Tensor:
    """Return the samples at positions [lanes, ...] in each lane's training part."""
    ids = torch.empty_like(positions)
    for data in {id(lane.phase.task.people.data): lane.phase.task.people.data for lane in lanes}.values():
        rows = [at for at, lane in enumerate(lanes) if lane.phase.task.people.data is data]
        who = torch.tensor([lanes[at].client for at in rows])
        where = send(rows, positions.device)
        ids[where] = data.ids(who, positions[where], "train")
    return ids
