"""Tables of results, methods, datasets and benchmarks. Results come with the protocol that they were measured by."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from fedobp.evaluation import Accuracy
from fedobp.report.groups import by_settings
from fedobp.report.metrics import METRICS, METRICS_NOTE, format_number, metric_tables, pooled, shared_metrics
from fedobp.report.result_table import ResultTable
from fedobp.report.tidy import MODELS, smallest_quarter

if TYPE_CHECKING:
    from fedobp.result import Failure, Result


# Columns of new clients, in words.
_NEW_CLIENTS = {
    "served": "as served",
    "unlabelled": "without labels",
    "visited": "after one round",
    "visited_twice": "after two rounds",
    "last": "own model",
}


def format_bytes(count: float) -> str:
    """Return a number of bytes in the largest unit of which there is at least one."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _protocol_note(results: "Sequence[Result]") -> str:
    protocols = dict.fromkeys(f"{run.protocol.reported} (protocol {run.protocol.name})" for run in results)
    parts = dict.fromkeys(run.protocol.test_parts for run in results)
    return f"Accuracy in per cent on {' or '.join(parts)}, {' or '.join(protocols)}."


def run_table(result: "Result") -> ResultTable:
    """Return one run's accuracies by model, and its costs."""
    table = ResultTable("model", "pooled", "client mean", "std", "worst tenth", "balanced", "smallest quarter")
    names = {
        "served": "as served",
        "last": "own last local model",
        "finetuned": f"fine-tuned {result.config.finetune_epochs} epochs",
    }
    rows: list[tuple[str, Accuracy | None]] = [
        *((name, getattr(result, MODELS[model])) for model, name in names.items()),
        ("as served, validation", result.validation),
        *((f"new client, {name}", getattr(result.new_clients, column, None)) for column, name in _NEW_CLIENTS.items()),
    ]
    smallest = {name: smallest_quarter(result.clients, model) for model, name in names.items()}
    for name, column in rows:
        if column:
            values = (column.pooled, column.client_mean, column.client_std, column.worst_decile, column.balanced)
            few = smallest.get(name)
            table.add_row(name, *(f"{value:.2f}" for value in values), "-" if few is None else f"{few:.2f}")
    down, up = (_traffic(result, way) for way in ("down", "up"))
    cost = (
        f"Personal parameters per client: {result.personal.mean:,.0f} of {result.parameters:,}. Traffic per round: "
        f"{down}, {up}. {result.seconds:.1f} s."
    )
    table.notes = [_protocol_note([result]), *_majority_note([result]), *_new_clients_note([result]), cost]
    table.below = metric_tables(rows, shared_metrics([result]), result.labels)
    return table


def _traffic(result: "Result", way: str) -> str:
    """Return the bytes of a round, and, if they are compressed, how many times less that is than whole models."""
    size, plain = getattr(result.bytes, f"{way}_per_round"), 4 * result.parameters * result.config.cohort_size
    if getattr(result.config, f"compress_{way}") == "none" or not size:
        return f"{format_bytes(size)} {way}"
    return f"{format_bytes(size)} {way} ({plain / size:.1f}x less than models in float32)"


def _new_clients_note(results: "Sequence[Result]") -> list[str]:
    held_out = " or ".join(str(count) for count in sorted({run.config.holdout_clients for run in results}) if count)
    if not held_out:
        return []
    return [f"New clients: {held_out}, held out of all rounds and of the other numbers; each trains by itself."]


def _majority_note(results: "Sequence[Result]") -> list[str]:
    """Return what always answering a client's most frequent label gives: of runs on one kind of data only."""
    data = {(run.config.dataset, run.config.partition, run.config.clients, run.config.alpha) for run in results}
    if len(data) > 1:
        return []
    guess = statistics.fmean(result.accuracy.majority_class for result in results)
    return [f"Always answering each client's most frequent training label would give {guess:.2f}."]


def summarise(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Return one row per method: mean and standard deviation (n - 1; None for one seed) over its seeds.

    If other settings differ too, there is a row for each combination, and `method` names them.
    """
    return [
        {
            "method": label,
            **{name: _mean_and_std([getattr(r.accuracy, name) for r in runs]) for name in ("pooled", "client_mean")},
            **{f"new_clients_{name}": _mean_and_std(values) for name, values in _new_client_accuracies(runs).items()},
            **{name: _mean_and_std(pooled(runs, name)) for name in shared_metrics(runs)},
            "seeds": [run.config.seed for run in runs],
        }
        for label, runs in by_settings(results).items()
    ]


def _new_client_accuracies(runs: "Sequence[Result]") -> dict[str, list[float]]:
    """Return the pooled accuracies of held-out clients, if there are any."""
    columns = {
        name: [column.pooled for run in runs if (column := getattr(run.new_clients, name, None))]
        for name in _NEW_CLIENTS
        if name != "last"
    }
    return {name: values for name, values in columns.items() if values}


def _mean_and_std(values: Sequence[float]) -> dict[str, float | None]:
    mean = statistics.fmean(values) if values else None
    return {"mean": mean, "std": statistics.stdev(values) if len(values) > 1 else None}


def compare_table(results: "Sequence[Result]") -> ResultTable:
    """Return a row for each method, in the order given; if other settings differ, for each combination of them."""
    groups = by_settings(results)
    accuracies = ["pooled", "client_mean", *(f"new_clients_{name}" for name in _new_client_accuracies(results))]
    heads = {f"new_clients_{name}": head for name, head in _NEW_CLIENTS.items()}
    heads |= {"client_mean": "client mean", "new_clients_served": "new client"}
    names, metrics = [heads.get(name, name) for name in accuracies], shared_metrics(results)
    table = ResultTable("method", *names, *(METRICS[name] for name in metrics), "personal", "down", "up", "seconds")
    for row, runs in zip(summarise(results), groups.values(), strict=True):
        table.add_row(
            row["method"],
            *(_format_mean_and_std(row[name]) if name in row else "-" for name in accuracies),
            *(_format_mean_and_std(row[name], format_number) for name in metrics),
            f"{statistics.fmean(run.personal.mean for run in runs):,.0f}",
            format_bytes(statistics.fmean(run.bytes.down_per_round for run in runs)),
            format_bytes(statistics.fmean(run.bytes.up_per_round for run in runs)),
            f"{statistics.fmean(run.seconds for run in runs):.1f}",
        )
    sizes = " or ".join(f"{size:,}" for size in sorted({run.parameters for run in results}))
    side_by_side = any(len(run.launch) > 1 for run in results)
    table.notes = [
        f"{_protocol_note(results)} {_seeds_note(results, any(len(runs) > 1 for runs in groups.values()))}",
        f"Personal: a client's own parameters, of {sizes}. Down, up: the cohort's payload per round.",
        *(["Seconds: a run's equal share of the time, because runs train side by side."] if side_by_side else []),
        *_majority_note(results),
        *_new_clients_note(results),
        *([f"Metrics are pooled. {METRICS_NOTE}"] if metrics else []),
    ]
    return table


def _seeds_note(results: "Sequence[Result]", means: bool) -> str:
    seeds = sorted({result.config.seed for result in results})
    partitions = sorted({result.config.partition_seed for result in results})
    if means and len(seeds) == 1 and len(partitions) > 1:
        return f"Seed {seeds[0]}; mean ± deviation (n - 1) over partition seeds {_span(partitions)}."
    if len(seeds) == 1:
        return f"Seed {seeds[0]}."
    return f"{'Mean ± deviation (n - 1) over seeds' if means else 'Seeds'} {_span(seeds)}."


def _span(seeds: Sequence[int]) -> str:
    """Return sorted seeds in words: as a range if none is left out."""
    whole = len(seeds) > 1 and seeds[-1] - seeds[0] + 1 == len(seeds)
    return f"{seeds[0]} to {seeds[-1]}" if whole else ", ".join(map(str, seeds))


def results_html(results: "Sequence[Result]", failures: "Sequence[Failure]") -> str:
    """Return the table of a comparison for a notebook, with a line for each run that failed."""
    table = compare_table(results) if results else ResultTable()
    table.notes += [f"Failed: {failure.method}, seed {failure.seed}: {failure.error}" for failure in failures]
    table.notes += [] if table.notes else ["No runs."]
    return table._repr_html_()


def _format_mean_and_std(
    spread: dict[str, float | None], number: Callable[[float | None], str] = lambda value: f"{value:.2f}"
) -> str:
    return number(spread["mean"]) + (f" ± {number(spread['std'])}" if spread["std"] is not None else "")


def bench_table(found: Mapping[str, Any]) -> RenderableType:
    """Return both engines' speed, the workload that was measured, and the estimated time of a run."""
    top = max(row["flops_per_second"] for row in found["engines"])
    unit, size = ("TFLOP/s", 1e12) if top >= 1e12 else ("GFLOP/s", 1e9)
    table = ResultTable(
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
            format_duration(row["seconds_per_run"]),
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


def format_duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours."""
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


def models_table(models: Sequence[dict[str, Any]]) -> RenderableType:
    """Return all networks with summary and options."""
    parts: list[RenderableType] = []
    for model in models:
        parts.append(Text.assemble((model["name"], "bold"), f"  {model['summary']}"))
        options = " ".join(f"--model-set {option['name']}={option['default']}" for option in model["options"])
        if options:
            parts.append(Padding(Text(options), (0, 0, 0, 4)))
    return Group(*parts)


def datasets_table(datasets: Sequence[dict[str, Any]]) -> RenderableType:
    """Return a row for each dataset."""
    table = ResultTable("dataset", "samples", "shape", "classes", "clients", "available")
    for row in datasets:
        samples, clients = (f"{row[name]:,}" if row[name] else "-" for name in ("samples", "clients"))
        shape = "x".join(map(str, row["shape"]))
        available = "yes" if row["available"] else "no"
        table.add_row(row["name"], samples, shape, str(row["classes"]), clients, available)
    return table
