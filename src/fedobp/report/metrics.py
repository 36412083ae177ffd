"""Tables of the metrics beyond accuracy."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedobp.errors import short
from fedobp.evaluation import Accuracy, Confusion, Metric
from fedobp.options import MetricName
from fedobp.report.result_table import ResultTable

if TYPE_CHECKING:
    from fedobp.result import Result

# Heads of metrics that are numbers.
METRICS: dict[MetricName, str] = {
    "loss": "loss", "f1": "macro F1", "auc": "AUC", "ece": "ECE", "perplexity": "perplexity",
}  # fmt: skip
METRICS_NOTE = "Loss in nats; F1, AUC and ECE from 0 to 1; -: not defined."
_MOST_CLASSES = 20  # of a confusion matrix that is printed


def metric_tables(
    rows: Sequence[tuple[str, Accuracy | None]], names: Sequence[MetricName], labels: Sequence[str | int] = ()
) -> list[ResultTable]:
    """Return the metrics that were asked for by model, and the confusion matrix of the first model."""
    tables = []
    if names:
        table = ResultTable("model", *(METRICS[name] for name in names))
        for model, column in rows:
            if column:
                metrics = [metric for name in names if isinstance(metric := column.metrics[name], Metric)]
                cells = ((format_number(metric.pooled), format_number(metric.client_mean)) for metric in metrics)
                table.add_row(model, *(f"{pooled} ({mean})" for pooled, mean in cells))
        table.notes = [f"Pooled, and in brackets the mean over clients. {METRICS_NOTE}"]
        tables.append(table)
    model, first = rows[0]
    if first and isinstance(confusion := first.metrics.get("confusion"), Confusion):
        tables.append(_confusion_table(model, confusion, labels))
    return tables


def _confusion_table(model: str, confusion: Confusion, labels: Sequence[str | int]) -> ResultTable:
    classes = len(confusion.pooled)
    names = [short(label, 20) for label in labels or range(classes)]
    table = ResultTable("label", *names)
    if classes > _MOST_CLASSES:
        table.notes = [f"The confusion matrix of {classes:,} classes is too wide to show: see --json or result.json."]
        return table
    for name, counts in zip(names, confusion.pooled, strict=True):
        table.add_row(name, *(f"{count:,}" for count in counts))
    table.notes = [
        f"Confusion matrix, {model}, all evaluated clients: samples by true label (row) and predicted label."
    ]
    return table


def shared_metrics(results: "Sequence[Result]") -> list[MetricName]:
    """Return the metrics that all results have, but for the confusion matrix."""
    return [name for name in METRICS if all(name in result.accuracy.metrics for result in results)]


def pooled(runs: "Sequence[Result]", name: MetricName) -> list[float]:
    """Return a metric of the served models, of the runs in which it is defined."""
    metrics = [run.accuracy.metrics[name] for run in runs]
    return [metric.pooled for metric in metrics if isinstance(metric, Metric) and metric.pooled is not None]


def format_number(value: float | None) -> str:
    """Return a number with four decimals, or three digits of a large one."""
    return "-" if value is None else f"{value:.4f}" if value < 1000 else f"{value:.3g}"
