"""The functions of a method for many lanes at once: its losses and sweeps, vectorised by `torch.func`.

Correct for every method, and slower than the paths for plain SGD.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as trees

from fedobp.data import FederatedData
from fedobp.engine.batch_order import SUBSET, batches_of, orders, step_key
from fedobp.engine.cuda_graphs import Graphs
from fedobp.engine.failures import refuse_batch_norm
from fedobp.engine.im2col import patched
from fedobp.engine.lanes.phases import Lane, rule_of, scaling_of, stacked_part
from fedobp.engine.precision import autocast
from fedobp.engine.sgd import Make, Rule, Step, move, run_steps, scaled
from fedobp.method import Batch, Client
from fedobp.models import Model
from fedobp.options import Precision
from fedobp.records import Tensors
from fedobp.transfer import to_device

if TYPE_CHECKING:
    from fedobp.engine.kernels.fused import Fused

_PARTS = ("state", "download", "scratch", "hparams", "data")  # of a `Client`: all that its functions may read


class Vectorised:
    """Runs functions of one lane on stacks of lanes."""

    def __init__(
        self,
        model: Model,
        batch: int,
        precision: Precision,
        graphs: Graphs,
        kernels: Callable[[torch.device], "Fused | None"],
    ) -> None:
        self._model, self._batch, self._precision, self._graphs, self._kernels = (
            model,
            batch,
            precision,
            graphs,
            kernels,
        )
        self._models: dict[torch.device, Model] = {}

    def model_on(self, device: torch.device) -> Model:
        """Return the form of the model that suits a device."""
        if device not in self._models:
            fused = self._kernels(device)
            others = self._model if device.type == "cpu" else patched(self._model)
            self._models[device] = others if fused is None else fused.vectorised(self._model)
        return self._models[device]

    def fit(
        self, lanes: Sequence[Lane], rows: Sequence[Sequence[Tensor]], ids: Tensor, counts: Tensor
    ) -> tuple[Tensor, int]:
        """Train a stack by a vectorised function of one lane: with a custom loss, or with BatchNorm statistics.

        `rows` change in place. Return sums of losses, and the number of slots.
        """
        # The graphs hold these steps, which therefore must not refer to the graphs' owner: device memory in a reference
        # cycle would not be freed before a garbage collection.
        item, model, precision = lanes[0].phase.item, self.model_on(ids.device), self._precision
        layout, loss_of, first = model.layout, item.loss, item.learn[0]

        def one(learned: Tensors, parts: dict[str, Any], batch: Batch) -> Any:
            if loss_of is not None:
                client = Client(**{**parts, "scratch": {**parts["scratch"], **learned}}, upload={})
                return loss_of(model, client, batch), ()
            logits, statistics = model.trained(learned[first], batch.x, batch.weight)
            return batch.cross_entropy(logits), statistics

        step_of: Callable[..., Any] = vmap(grad_and_value(one, has_aux=True))
        if loss_of is not None:
            refuse_batch_norm(model)
            parts = {part: stacked_part(lanes, part) for part in _PARTS}
            learned = {name: parts["scratch"].pop(name) for name in item.learn}
        else:
            parts, learned = {}, {first: torch.stack([row for [row] in rows])}
        rules = {name: rule_of(lanes, learned[name].shape[1], special=name == first) for name in item.learn}
        free = rules[first].moving
        if item.part != "all":
            inside = layout.is_head(ids.device) == (item.part == "head")
            free = (inside if free is None else inside & free).expand(len(lanes), -1)
        given: dict[str, Any] = {"parts": parts, "scaling": scaling_of(lanes)}
        if loss_of is None:
            entries = torch.arange(layout.size, device=ids.device).expand(len(lanes), -1)
            free = torch.ones_like(entries, dtype=torch.bool) if free is None else free
            given["statistics"], free = free[:, layout.learned :], free & (entries < layout.learned)
        rules[first] = replace(rules[first], moving=free)
        given["rules"] = {name: rule.used() for name, rule in rules.items()}
        samples = lanes[0].phase.job.data

        def make(given: Any, moving: Any, active: int) -> Step:
            parts, scaling, learned, total = first_lanes(
                (given["parts"], given["scaling"], moving["learned"], moving["loss"]), active
            )
            rules = {name: Rule(**rule).part(active) for name, rule in given["rules"].items()}

            def step(current: Tensors) -> None:
                with autocast(precision, total):
                    gradients, (loss, seen) = step_of(learned, parts, batch_of(samples, scaling, current))
                is_active = current["counts"] > 0
                total.add_(loss * is_active)
                for name, rule in rules.items():
                    move(learned[name], gradients[name], rule, is_active.to(total.dtype))
                if loss_of is None:
                    statistics = learned[first][:, layout.learned :]
                    new = given["statistics"][:active] & is_active[:, None]
                    statistics.copy_(torch.where(new, seen, statistics))

            return step

        per_epoch = to_device([batches_of(lane.n, self._batch) for lane in lanes], ids.device)
        steps = torch.arange(len(ids), device=ids.device)[:, None].expand(-1, len(lanes))
        plan = plan_of(keys_of(lanes), ids, counts, steps, steps // per_epoch, steps % per_epoch)
        moving = {"learned": learned, "loss": learned[first].new_zeros(len(lanes))}
        slots = self._run_steps(lanes, given, moving, plan, [lane.steps for lane in lanes], make)
        for at, vectors in enumerate(rows):
            torch._foreach_copy_(list(vectors), [values[at] for values in learned.values()])
        return moving["loss"], slots

    def sweep(self, lanes: Sequence[Lane], size: int) -> tuple[Tensors, list[int], int]:
        """Run a sweep on a stack; return `scratch` after it, each lane's epochs, and the number of slots."""
        item, data = lanes[0].phase.item, [lane.phase.job.data for lane in lanes]
        samples, device, keys = data[0], data[0].x.device, keys_of(lanes)
        model, precision = self.model_on(device), self._precision
        parts = {part: stacked_part(lanes, part) for part in _PARTS}
        scratch = parts.pop("scratch")
        chosen = None
        if item.fraction < 1:
            all_of = [one.size(lane.client, "train") for one, lane in zip(data, lanes, strict=True)]
            chosen = orders(keys, all_of, [1] * len(lanes), max(all_of), 1, SUBSET).positions[:, 0]

        def one(scratch: Tensors, parts: dict[str, Any], batch: Batch) -> Any:
            return item.step(model, Client(**parts, scratch=scratch, upload={}), batch).scratch

        def more(scratch: Tensors, parts: dict[str, Any]) -> Any:
            return item.more(model, Client(**parts, scratch=scratch, upload={}))

        step_of: Callable[..., Any] = vmap(one)

        def make(given: Any, moving: Any, active: int) -> Step:
            parts, scaling, alive, scratch = first_lanes(
                (given["parts"], given["scaling"], given["alive"], moving), active
            )

            def step(current: Tensors) -> None:
                batch = batch_of(samples, scaling, current)
                with autocast(precision, batch.x):
                    after = step_of(scratch, parts, batch)
                is_active = alive & (current["counts"] > 0)
                # Unchanged values are not written. A new value may share memory with an old one: it is copied first.
                held = {values.untyped_storage().data_ptr() for values in scratch.values()}
                changed = {name: values for name, values in after.items() if values is not scratch[name]}
                for name, values in changed.items():
                    changed[name] = values.clone() if values.untyped_storage().data_ptr() in held else values
                for name, values in changed.items():
                    here, old = is_active.view(-1, *[1] * (values.ndim - 1)), scratch[name]
                    torch.where(here, values.detach().to(old.dtype), old, out=old)

            return step

        alive, epochs, slots = torch.ones(len(lanes), dtype=torch.bool, device=device), [0] * len(lanes), 0
        rows = to_device([lane.steps for lane in lanes], device)
        # Without a stopping rule all epochs are one plan.
        at_once = item.epochs if item.more is None else 1
        for first in range(0, item.epochs, at_once):
            if item.more is not None:
                alive &= vmap(more)(scratch, parts)
                if not alive.any():
                    break
            going = alive.tolist() if item.more is not None else [True] * len(lanes)
            epochs = [times + at_once * continues for times, continues in zip(epochs, going, strict=True)]
            times = [at_once] * len(lanes)
            positions, counts = orders(keys, [lane.n for lane in lanes], times, size, item.smallest, first)
            if chosen is not None:
                positions = chosen.gather(1, positions.flatten(1)).view_as(positions)
            ids, counts = ids_of(lanes, positions).transpose(0, 1), counts.t()
            steps = torch.arange(len(ids), device=device)[:, None].expand(-1, len(lanes))
            plan = plan_of(keys, ids, counts, first * rows + steps, first + steps // rows, steps % rows)
            given = {"parts": parts, "scaling": scaling_of(lanes), "alive": alive}
            slots += self._run_steps(lanes, given, scratch, plan, [at_once * lane.steps for lane in lanes], make)
        return scratch, epochs, slots

    def _run_steps(
        self, lanes: Sequence[Lane], given: Any, moving: Any, plan: Tensors, steps: Sequence[int], make: Make
    ) -> int:
        """Take all steps; on CUDA from graphs, except in sweeps over whole shards, whose sizes differ by round."""
        phase = lanes[0].phase
        if plan["counts"].is_cuda and not getattr(phase.item, "whole", False):
            return self._graphs.run_steps(phase.group, given, moving, plan, steps, make)
        return run_steps(given, moving, plan, steps, make)


def keys_of(lanes: Sequence[Lane]) -> Tensor:
    """Return the lanes' keys, on their device."""
    return to_device(torch.stack([lane.phase.keys[lane.row] for lane in lanes]), lanes[0].phase.job.data.x.device)


def plan_of(keys: Tensor, ids: Tensor, counts: Tensor, step: Tensor, epoch: Tensor, batch: Tensor) -> Tensors:
    """Return the plan of all steps' batches, [steps, lanes, ...]."""
    return {"ids": ids, "counts": counts, "key": step_key(keys, epoch, batch), "step": step, "epoch": epoch}


def batch_of(data: FederatedData, scaling: Tensors, current: Tensors) -> Batch:
    """Return the batch of a step. A lane without samples gets one sample, so that its result is finite."""
    ids = current["ids"]
    x = scaled(data, ids, **scaling)
    real = torch.arange(ids.shape[1], device=ids.device) < current["counts"].clamp(min=1)[:, None]
    return Batch(x, data.y[ids], real.to(data.dtype), current["key"], current["step"], current["epoch"])


def first_lanes(tree: Any, lanes: int) -> Any:
    """Return a view of the first lanes of every tensor in a tree."""
    return trees.tree_map(lambda values: values[:lanes], tree)


def ids_of(lanes: Sequence[Lane], positions: Tensor) -> Tensor:
    """Return the samples at positions [lanes, ...] in each lane's training part."""
    ids = torch.empty_like(positions)
    for data in dict.fromkeys(lane.phase.job.data for lane in lanes):
        rows = [at for at, lane in enumerate(lanes) if lane.phase.job.data is data]
        clients = torch.tensor([lanes[at].client for at in rows])
        where = to_device(rows, positions.device)
        ids[where] = data.ids(clients, positions[where], "train")
    return ids
