"""What it costs a client to compute the scores: time and memory, measured, and operations, counted.

Operations of N entries and n training samples, with F operations for a sample's forward and backward pass (matrix
products and convolutions, counted by torch): OBP takes 2N (difference, square), the released code's formula 3N, the
gradient score 2N (difference, absolute value), Fisher n (F + 2N) (a squared gradient of each sample, added up), Fisher
of the mean loss n F + N. A round's local training takes epochs * n F + 2N for each step. Comparing scores with a
threshold is the same for all and is timed by itself. Time does not depend on what images show, so they are random.
"""

import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedobp.bench import clock, noise
from fedobp.config import Config
from fedobp.data import REGISTRY
from fedobp.engine import dtype_of
from fedobp.engine.cost import cost
from fedobp.engine.stack import Grouped, stacked
from fedobp.errors import FedobpError
from fedobp.importance import above, product, squared, squared_gradients
from fedobp.models import Model
from fedobp.paper.experiment import Experiment, Files, Setting, Work
from fedobp.paper.figures import COLUMN, panels
from fedobp.paper.published import title
from fedobp.paper.quantiles import published_q
from fedobp.paper.rows import where
from fedobp.paper.tables import Table
from fedobp.report.tables import format_bytes
from fedobp.resolution import resolve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORES = {
    "training": "local training, 5 epochs",
    "obp": "OBP (eq. 19)",
    "product": "OBP, released code",
    "gradient": "gradient (eq. 5)",
    "fisher": "Fisher (eq. 6, by sample)",
    "fisher-batch": "Fisher (eq. 6, as printed)",
    "selection": "threshold, the same for all",
}
EPOCHS, BATCH = 5, 32
_FEWEST = 5  # repetitions


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of tensors that are made inside it: the largest sum of those that live at one time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and count the storages of its outputs that are new."""
        out = function(*args, **(kwargs or {}))
        given = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and (key := one.untyped_storage()._cdata) not in given | self._sizes.keys():
                storage = one.untyped_storage()
                self._sizes[key] = storage.nbytes()
                self._now += storage.nbytes()
                self.peak = max(self.peak, self._now)
                weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        self._now -= self._sizes.pop(key, 0)


def operations(entries: int, samples: int, per_sample: float) -> dict[str, float]:
    """Return the operations of each score, and of a round's local training, as the module's text counts them."""
    steps = EPOCHS * -(-samples // BATCH)
    return {
        "training": EPOCHS * samples * per_sample + 2 * entries * steps,
        "obp": 2 * entries,
        "product": 3 * entries,
        "gradient": 2 * entries,
        "fisher": samples * (per_sample + 2 * entries),
        "fisher-batch": samples * per_sample + entries,
    }


def measure_client(config: Config, model: Model, samples: int, seconds: float) -> list[dict[str, Any]]:
    """Measure the scores of one client with random images, in turn, for about as many seconds."""
    device, dtype = torch.device(config.device), dtype_of(config.precision)
    generator = torch.Generator().manual_seed(0)
    before = model.initial(0).to(device, dtype)
    after, shared = (before + 1e-3 * torch.randn(before.shape, generator=generator).to(before) for _ in range(2))
    x = torch.randn(samples, *model.shape, generator=generator).to(device, dtype)
    y = torch.randint(0, model.classes, (samples,), generator=generator).to(device)
    parts = list(torch.arange(samples, device=device).split(BATCH))
    score = squared(after, shared)

    def loss(theta: Tensor, part: Tensor) -> Tensor:
        return functional.cross_entropy(model.logits(theta, x[part]), y[part], reduction="sum")

    def train() -> Tensor:
        theta = before
        for _ in range(EPOCHS):
            for part in parts:
                theta = theta - 0.01 * grad(loss)(theta, part) / len(part)
        return theta

    def fisher() -> Tensor:
        total = torch.zeros_like(before)
        for part in parts:
            batch = SimpleNamespace(x=x[part], y=y[part], weight=torch.ones(len(part), dtype=dtype, device=device))
            total += squared_gradients(model, after, batch)
        return total / samples

    def fisher_batch() -> Tensor:
        total = torch.zeros_like(before)
        for part in parts:
            total += grad(loss)(after, part)
        return (total / samples).square()

    steps: dict[str, Callable[[], Tensor]] = {
        "training": train,
        "obp": lambda: squared(after, shared),
        "product": lambda: product(after, shared),
        "gradient": lambda: (before - after).abs(),
        "fisher": fisher,
        "fisher-batch": fisher_batch,
        "selection": lambda: above(score, published_q(config.dataset, config.alpha)),
    }
    per_sample = cost(model, stacked(model, Grouped), BATCH, dtype).flops / BATCH
    counted = operations(model.layout.size, samples, per_sample)
    memory = {name: _peak_of(step) for name, step in steps.items()}  # a warm-up, too
    times: dict[str, list[float]] = {name: [] for name in steps}
    until = time.perf_counter() + seconds
    # In turn: what else the machine does meets all alike.
    while len(times["training"]) < _FEWEST or time.perf_counter() < until:
        for name, step in steps.items():
            begun = clock(device)
            step()
            times[name].append(clock(device) - begun)
    common = {
        "network": model.name, "parameters": model.layout.size, "samples": samples, "repeats": len(times["training"]),
        "device": _device_name(device), "threads": torch.get_num_threads(), "torch": torch.__version__,
    }  # fmt: skip
    return [
        {
            "dataset": config.dataset, "score": name, "seconds": statistics.median(times[name]),
            "operations": counted.get(name), "peak_bytes": memory[name], **common,
        }
        for name in steps
    ]  # fmt: skip


def _files(config: Config, model: Model, samples: int, seconds: float) -> Files:
    return {"results": measure_client(config, model, samples, seconds)}


def _peak_of(step: Callable[[], Tensor]) -> int:
    step()
    memory = PeakMemory()
    with memory:
        step()
    return memory.peak


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def measure(setting: Setting, work: Work) -> Files:
    """Measure a client of average size for each dataset, once on each kind of device."""
    rows = []
    for name in setting.datasets:
        if name not in REGISTRY:
            raise FedobpError(
                f"overhead takes random images in the shape of a known dataset, and {name} is none of them: choose "
                f"from {', '.join(REGISTRY)}"
            )
    for at, name in enumerate(setting.datasets):
        work.progress(f"overhead, {title(name)}", at / len(setting.datasets))
        facts = REGISTRY[name]
        asked = setting.config(name, setting.alphas[0], setting.seeds[0], "fedobp", precision="fp32")
        config, _ = resolve(asked, noise(name, facts.shape, 1000, facts.classes))
        shape = (1, *facts.shape) if len(facts.shape) == 2 else (facts.shape[2], *facts.shape[:2])
        model = Model(config.model, shape, facts.classes)
        samples = round(0.75 * facts.samples / config.clients)
        seconds = 1.0 if setting.scale == "smoke" else 20.0
        key = f"{name}-{torch.device(config.device).type}-{setting.scale}"
        rows += work.once("overhead", key, partial(_files, config, model, samples, seconds)).get("results", [])
    return {"results": rows}


def tables(setting: Setting, files: Files) -> list[Table]:
    """Return the costs beside those of a round's local training."""
    found = []
    for dataset in setting.datasets:
        rows = where(files["results"], dataset=dataset)
        if not rows:
            found.append(Table(f"{title(dataset)}: not measured", ["what"]))
            continue
        table = Table(
            f"{title(dataset)}: {rows[0]['network']} of {rows[0]['parameters']:,} parameters, a client of "
            f"{rows[0]['samples']} samples",
            ["what", "milliseconds", "of local training", "MFLOP", "of local training", "peak memory"],
            notes=[
                f"Measured on {rows[0]['device']}, {rows[0]['threads']} threads, torch {rows[0]['torch']}, float32: "
                "median time; the largest sum of tensors that live at one time, beside model and data. MFLOP are "
                "counted: N entries, n samples, F for a sample's forward and backward pass: OBP and gradient 2N, the "
                "released code's formula 3N, Fisher n(F + 2N), as printed nF + N, training 5nF + 2N a step. The paper "
                "says 'low overhead' and publishes no number."
            ],
        )
        training = where(rows, score="training")[0]
        for row in rows:
            flop = row["operations"]
            table.add(
                SCORES[row["score"]],
                f"{1e3 * row['seconds']:.3f}",
                f"{100 * row['seconds'] / training['seconds']:.3f} %",
                "" if flop is None else f"{flop / 1e6:,.2f}",
                "" if flop is None else f"{100 * flop / training['operations']:.4f} %",
                format_bytes(row["peak_bytes"]),
            )
        found.append(table)
    return found


def figures(setting: Setting, files: Files) -> "dict[str, Figure]":
    """Draw times and memory on logarithmic axes."""
    figure, axes = panels(len(setting.datasets), 2, width=2 * COLUMN, height=1.9, sharey="row")
    for line, dataset in zip(axes, setting.datasets, strict=True):
        rows = where(files["results"], dataset=dataset)
        line[0].set_title(title(dataset))
        if not rows:
            continue
        names = [SCORES[row["score"]] for row in rows]
        for ax, values, text in (
            (line[0], [1e3 * row["seconds"] for row in rows], "milliseconds"),
            (line[1], [row["peak_bytes"] / 1e6 for row in rows], "peak memory, MB"),
        ):
            colours = ["#999999" if row["score"] in ("training", "selection") else "#0072b2" for row in rows]
            ax.barh(names, values, color=colours, height=0.62)
            ax.set(xscale="log", xlabel=text, title=title(dataset))
            ax.grid(axis="y", visible=False)
        line[0].invert_yaxis()  # both panels share it
    return {"figure": figure}


EXPERIMENTS = [
    Experiment(
        "overhead", "client time, operations and memory of the OBP, gradient and Fisher scores", measure, tables,
        figures, ("cifar10", "fmnist"), alphas=(0.1,), needs_data=False, trains=False, takes_seeds=False,
    )
]  # fmt: skip
