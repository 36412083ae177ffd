"""Tables of results, methods, datasets and benchmarks. Results come with the protocol that they were measured by."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fedobp.evaluation import Accuracy, Confusion, Metric, Protocol
from fedobp.options import MetricName
from fedobp.result import Result

# Heads of metrics that are numbers.
_METRICS: dict[MetricName, str] = {
    "loss": "loss", "f1": "macro F1", "auc": "AUC", "ece": "ECE", "perplexity": "perplexity",
}  # fmt: skip
_METRICS_NOTE = "Loss in nats; F1, AUC and ECE from 0 to 1; -: not defined."
_MOST_CLASSES = 20  # of a confusion matrix that is printed


class _Table:
    """A table that fits the terminal: columns that do not fit are left out, the last ones first, and named below it.

    If not even two columns fit, each row becomes a list. So a name and its first number are never cut.
    """

    def __init__(self, *columns: str) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []

    def add_row(self, *cells: str) -> None:
        """Add a cell for each column."""
        self._rows.append(cells)

    def _with_columns(self, count: int) -> Table:
        table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for position, column in enumerate(self._columns[:count]):
            table.add_column(column, justify="right" if position else "left", no_wrap=True)
        for row in self._rows:
            table.add_row(*map(Text, row[:count]))
        return table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=10_000)
        for count in range(len(self._columns), 1, -1):
            table = self._with_columns(count)
            if console.measure(table, options=unlimited).maximum <= options.max_width:
                yield table
                if missing := self._columns[count:]:
                    yield Text(f"Too narrow to show: {', '.join(missing)}.")
                return
        for name, *cells in self._rows:
            yield Text(name, style="bold")
            yield from (Text(f"{head}: {cell}") for head, cell in zip(self._columns[1:], cells, strict=True))


def _format_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _protocol_note(protocol: Protocol) -> str:
    which = "round " + str(protocol.rounds[-1])
    if protocol.pick == "best":
        which = "best of rounds " + ", ".join(map(str, protocol.rounds))
    return f"Accuracy in per cent on all clients' test parts, {which} (protocol {protocol.name})."


def run_table(result: Result) -> RenderableType:
    """Return one run's accuracies by model, and its costs."""
    table = _Table("model", "pooled", "client mean", "std", "worst tenth", "balanced")
    rows: list[tuple[str, Accuracy | None]] = [
        ("as served", result.accuracy),
        ("own last local model", result.last),
        (f"fine-tuned {result.config.finetune_epochs} epochs", result.finetuned),
        ("as served, validation", result.validation),
    ]
    if result.new_clients:
        rows += [
            ("new client, as served", result.new_clients.served),
            ("new client, after one round", result.new_clients.visited),
            ("new client, own model", result.new_clients.last),
        ]
    for name, column in rows:
        if column:
            values = (column.pooled, column.client_mean, column.client_std, column.worst_decile, column.balanced)
            table.add_row(name, *(f"{value:.2f}" for value in values))
    down, up = _format_bytes(result.bytes.down_per_round), _format_bytes(result.bytes.up_per_round)
    cost = (
        f"Personal parameters per client: {result.personal.mean:,.0f} of {result.models.size:,}. Traffic per round: "
        f"{down} down, {up} up. {result.seconds:.1f} s."
    )
    lines = [_protocol_note(result.protocol), _majority_note([result]), *_new_clients_note([result]), cost]
    return Group(table, *map(Text, lines), *_metric_tables(rows, _shared_metrics([result])))


def _metric_tables(rows: Sequence[tuple[str, Accuracy | None]], names: Sequence[MetricName]) -> list[RenderableType]:
    """Return the metrics that were asked for by model, and the confusion matrix of the first model."""
    parts: list[RenderableType] = []
    if names:
        table = _Table("model", *(_METRICS[name] for name in names))
        for model, column in rows:
            if column:
                metrics = [metric for name in names if isinstance(metric := column.metrics[name], Metric)]
                cells = ((_format_number(metric.pooled), _format_number(metric.client_mean)) for metric in metrics)
                table.add_row(model, *(f"{pooled} ({mean})" for pooled, mean in cells))
        parts += [table, Text(f"Pooled, and in brackets the mean over clients. {_METRICS_NOTE}")]
    model, first = rows[0]
    if first and isinstance(confusion := first.metrics.get("confusion"), Confusion):
        parts += _confusion_table(model, confusion)
    return parts


def _confusion_table(model: str, confusion: Confusion) -> list[RenderableType]:
    classes = len(confusion.pooled)
    if classes > _MOST_CLASSES:
        return [Text(f"The confusion matrix of {classes:,} classes is too wide to show: see --json or result.json.")]
    table = _Table("label", *map(str, range(classes)))
    for label, counts in enumerate(confusion.pooled):
        table.add_row(str(label), *(f"{count:,}" for count in counts))
    return [table, Text(f"Confusion matrix, {model}, all clients: samples by true label (row) and predicted label.")]


def _shared_metrics(results: Sequence[Result]) -> list[MetricName]:
    """Return the metrics that all results have, but for the confusion matrix."""
    return [name for name in _METRICS if all(name in result.accuracy.metrics for result in results)]


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}" if value < 1000 else f"{value:.3g}"


def _new_clients_note(results: Sequence[Result]) -> list[str]:
    held_out = results[0].config.holdout_clients
    if not held_out:
        return []
    return [f"New clients: {held_out}, held out of all rounds and of the other numbers; each trains once, by itself."]


def _majority_note(results: Sequence[Result]) -> str:
    guess = statistics.fmean(result.accuracy.majority_class for result in results)
    return f"Always answering each client's most frequent training label would give {guess:.2f}."


def summarise(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one row per method: mean and standard deviation (n - 1; None for one seed) over its seeds."""
    return [
        {
            "method": method,
            **{name: _mean_and_std([getattr(r.accuracy, name) for r in runs]) for name in ("pooled", "client_mean")},
            **{f"new_clients_{name}": _mean_and_std(values) for name, values in _new_client_accuracies(runs).items()},
            **{name: _mean_and_std(_pooled(runs, name)) for name in _shared_metrics(runs)},
            "seeds": [run.config.seed for run in runs],
        }
        for method, runs in _by_method(results).items()
    ]


def _new_client_accuracies(runs: Sequence[Result]) -> dict[str, list[float]]:
    """Return the pooled accuracies of held-out clients, if there are any."""
    new = [run.new_clients for run in runs if run.new_clients]
    return {"served": [one.served.pooled for one in new], "visited": [one.visited.pooled for one in new]} if new else {}


def _pooled(runs: Sequence[Result], name: MetricName) -> list[float]:
    """Return a metric of the served models, of the runs in which it is defined."""
    metrics = [run.accuracy.metrics[name] for run in runs]
    return [metric.pooled for metric in metrics if isinstance(metric, Metric) and metric.pooled is not None]


def _by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    grouped: dict[str, list[Result]] = {}
    for result in results:
        grouped.setdefault(result.config.method, []).append(result)
    return grouped


def _mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    mean = statistics.fmean(values) if values else None
    return {"mean": mean, "std": statistics.stdev(values) if len(values) > 1 else None}


def compare_table(results: Sequence[Result]) -> RenderableType:
    """Return a row for each method, in the order given."""
    seeds = sorted({result.config.seed for result in results})
    accuracies = ["pooled", "client_mean", *(f"new_clients_{name}" for name in _new_client_accuracies(results))]
    heads = {"client_mean": "client mean", "new_clients_served": "new client", "new_clients_visited": "after one round"}
    names, metrics = [heads.get(name, name) for name in accuracies], _shared_metrics(results)
    table = _Table("method", *names, *(_METRICS[name] for name in metrics), "personal", "down", "up", "seconds")
    for row, runs in zip(summarise(results), _by_method(results).values(), strict=True):
        table.add_row(
            row["method"],
            *(_format_mean_and_std(row[name]) for name in accuracies),
            *(_format_mean_and_std(row[name], _format_number) for name in metrics),
            f"{statistics.fmean(run.personal.mean for run in runs):,.0f}",
            _format_bytes(statistics.fmean(run.bytes.down_per_round for run in runs)),
            _format_bytes(statistics.fmean(run.bytes.up_per_round for run in runs)),
            f"{statistics.fmean(run.seconds for run in runs):.1f}",
        )
    seen = f"Seed {seeds[0]}." if len(seeds) == 1 else f"Mean ± deviation (n - 1) over seeds {seeds[0]} to {seeds[-1]}."
    units = (
        f"Personal: a client's own parameters, of {results[0].models.size:,}. Down, up: the cohort's payload per round."
    )
    shares = "Seconds: a run's equal share of the time, because runs train side by side."
    lines = (
        f"{_protocol_note(results[0].protocol)} {seen}",
        units,
        shares,
        _majority_note(results),
        *_new_clients_note(results),
        *([f"Metrics are pooled. {_METRICS_NOTE}"] if metrics else []),
    )
    return Group(table, *map(Text, lines))


def _format_mean_and_std(
    spread: dict[str, float | None], number: Callable[[float | None], str] = lambda value: f"{value:.2f}"
) -> str:
    return number(spread["mean"]) + (f" ± {number(spread['std'])}" if spread["std"] is not None else "")


def bench_table(found: Mapping[str, Any]) -> RenderableType:
    """Return both engines' speed, the workload that was measured, and the estimated time of a run."""
    top = max(row["flops_per_second"] for row in found["engines"])
    unit, size = ("TFLOP/s", 1e12) if top >= 1e12 else ("GFLOP/s", 1e9)
    table = _Table(
        "engine", "rounds", "steps/s", "full", unit, "of peak", "s/round", "speed", f"{found['rounds']} rounds"
    )
    for row in found["engines"]:
        table.add_row(
            row["engine"],
            f"{row['rounds']:.1f}",
            f"{row['steps_per_second']:,.0f}",
            f"{row['occupancy']:.0%}",
            f"{row['flops_per_second'] / size:.1f}",
            f"{row['share_of_peak']:.0%}",
            f"{row['seconds_per_round']:.2f}",
            f"{row['speedup']:.2f}x",
            _format_duration(row["seconds_per_run"]),
        )
    spread = f"Dirichlet({found['alpha']:g})" if found["partition"] == "dirichlet" else found["partition"].upper()
    threads = f"{found['threads']} CPU thread" + "s" * (found["threads"] > 1)
    where = threads if found["device"] == "cpu" else found["device"]
    lines = [
        f"{found['dataset']}, {found['clients']:,} clients, {spread}, {found['cohort']:,} a round; {found['model']} of "
        f"{found['parameters']:,} parameters, {found['epochs']} epochs, batches of {found['batch_size']}.",
        f"A step is one client's, on one batch: {found['flops_per_step'] / 1e6:,.1f} MFLOP. Full: the share of the "
        "computation that is not padding. Peak: the fastest matrix product here, "
        f"{found['peak_flops_per_second'] / size:,.1f} {unit} ({where}, {found['precision']}).",
        f"Measured in {found['seconds']:.0f} s on rounds of average size; {found['rounds']} rounds have "
        f"{found['steps_per_round']:,.0f} steps each on average, and {found['evaluations']} evaluations.",
    ]
    if found["runs"] > 1:
        lines[-1] += f" Times are one run's share of {found['runs']} side by side."
    if found["random_data"]:
        lines.append(f"Random images in the shape of {found['dataset']}: time does not depend on what they show.")
    return Group(table, *map(Text, lines))


def _format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def methods_table(methods: Sequence[dict[str, Any]]) -> RenderableType:
    """Return all methods with summary, paper and options."""
    parts: list[RenderableType] = []
    for method in methods:
        parts.append(Text.assemble((method["name"], "bold"), f"  {method['summary']}"))
        parts.append(Padding(Text(method["paper"], style="dim"), (0, 0, 0, 4)))
        options = Table.grid(Column(overflow="fold"), Column(overflow="fold"), padding=(0, 2))
        for option in method["options"]:
            options.add_row(Text(f"--set {option['name']}={option['default']}"), Text(option["doc"]))
        if method["options"]:
            parts.append(Padding(options, (0, 0, 0, 4)))
        parts.append(Text())
    return Group(*parts[:-1])


def datasets_table(datasets: Sequence[dict[str, Any]]) -> RenderableType:
    """Return a row for each dataset."""
    table = _Table("dataset", "samples", "shape", "classes", "clients", "available")
    for row in datasets:
        samples, clients = (f"{row[name]:,}" if row[name] else "-" for name in ("samples", "clients"))
        shape = "x".join(map(str, row["shape"]))
        available = "yes" if row["available"] else "no"
        table.add_row(row["name"], samples, shape, str(row["classes"]), clients, available)
    return table
