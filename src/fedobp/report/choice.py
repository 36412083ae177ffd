"""Which of several values is best: chosen on the validation parts, and never on the test parts."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedobp.plugins import label
from fedobp.report.groups import by_settings

if TYPE_CHECKING:
    from fedobp.config import Config
    from fedobp.result import Result


def chosen_values(results: "Sequence[Result]") -> list[dict[str, Any]]:
    """Return for each method and kind of data the settings with the best mean validation accuracy, if several were run.

    Without validation parts `chosen` is None.
    """
    families: dict[tuple[object, ...], dict[str, list[Result]]] = {}
    for name, runs in by_settings(results).items():
        families.setdefault(_family(runs[0].config), {})[name] = runs
    return [_choice(groups) for groups in families.values() if len(groups) > 1]


def _family(config: "Config") -> tuple[object, ...]:
    """Return what is compared with its like: the method, the data, who is evaluated, and how long it trains."""
    shares = tuple(value for name, value in config.partition_settings.items() if name != "partition_seed")
    clients = config.partition_file, config.eval_clients, shares
    return config.method, config.dataset, config.rounds, config.protocol, label(config.model), clients


def _choice(groups: "dict[str, list[Result]]") -> dict[str, Any]:
    first = next(iter(groups.values()))[0]
    head = {"method": first.config.method, "dataset": first.config.dataset, "values": len(groups)}
    validation = {
        name: statistics.fmean(run.validation.pooled for run in runs if run.validation)
        for name, runs in groups.items()
        if all(run.validation for run in runs)
    }
    if len(validation) < len(groups):
        return {**head, "chosen": None}
    best = max(validation, key=lambda name: validation[name])
    accuracy = statistics.fmean(run.accuracy.pooled for run in groups[best])
    return {**head, "chosen": best, "validation": validation[best], "accuracy": accuracy}


def choice_notes(choices: Sequence[dict[str, Any]]) -> list[str]:
    """Return the choices in sentences."""
    notes = [
        f"Best of {one['values']} by validation accuracy: {one['chosen']} ({one['validation']:.2f}; test "
        f"{one['accuracy']:.2f})."
        for one in choices
        if one["chosen"]
    ]
    if any(one["chosen"] is None for one in choices):
        notes.append("No value is chosen: that needs validation parts (--val-ratio 0.2), the test parts only measure.")
    return notes
