"""The plan of a sweep as a table."""

from collections.abc import Mapping
from typing import Any

from fedobp.report.result_table import ResultTable
from fedobp.report.tables import format_duration


def plan_table(found: Mapping[str, Any]) -> ResultTable:
    """Return the launches that would be trained, with their runs and about how long they take."""
    table = ResultTable("launch", "runs", "time", "first run", "last run")
    for at, launch in enumerate(found["launches"], start=1):
        names, time = launch["runs"], launch["seconds"]
        shown = "not known" if time is None else format_duration(time)
        table.add_row(str(at), str(len(names)), shown, names[0], names[-1])
    total = sum(launch["seconds"] or 0 for launch in found["launches"])
    runs = sum(len(launch["runs"]) for launch in found["launches"])
    table.notes = [
        f"{runs} runs to train, about {format_duration(total)} on this machine (measured on three rounds a launch); "
        f"{found['finished']} are finished.",
        f"Launches are planned for {found['memory_gib']:.1f} GiB of clients' state. Nothing was written.",
    ]
    return table
