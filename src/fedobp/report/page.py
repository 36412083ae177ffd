"""The report: one HTML file with tables and figures of runs, which needs nothing but a browser."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context

from fedobp._version import __version__
from fedobp.errors import FedobpError, short
from fedobp.files import regular, write
from fedobp.report.figures import COLOURS, COLUMN, STYLE, Column, look
from fedobp.report.panels import Clients, Panel, accuracy_panel, bytes_panel, kept_panels, layer_panels, time_panel
from fedobp.report.sections import Group, Section, sections_of, without_repeats
from fedobp.report.svg import inline_svg
from fedobp.report.tables import format_bytes
from fedobp.report.tidy import smallest_quarter
from fedobp.report.words import GLOSSARY, counted, listed, model_size, setting_in_words, statuses

if TYPE_CHECKING:
    from fedobp.saved_runs import SavedRun

MARK = '<meta name="generator" content="fedobp report">'
_FACTS = ("fedobp", "torch", "triton", "python", "device", "precision", "engine", "threads", "protocol")


def write_report(
    path: Path, runs: "Sequence[SavedRun]", *, title: str | None = None, notes: Sequence[str] = ()
) -> Path:
    """Write the report of some finished runs and return its path; `notes` are sentences for its top.

    A file that is there and is no report is not overwritten.
    """
    check_writable(path, (".html", ".htm"), MARK.encode())
    # Names of folders may hold bytes that are not UTF-8.
    write(path, report_html(runs, title=title, notes=notes).encode(errors="backslashreplace"))
    return path


def check_writable(path: Path, suffixes: Sequence[str], mark: bytes) -> None:
    """Refuse a path with another suffix, without a folder, or of a file that does not hold `mark`: it is not ours."""
    where = short(path, 200)
    if path.suffix.lower() not in suffixes:
        raise FedobpError(f"--out {where} must end in {listed(suffixes, 'or')}")
    if not path.parent.is_dir():
        raise FedobpError(f"--out {where}: there is no folder {short(path.parent, 200)}; make it first")
    if path.is_dir():
        raise FedobpError(f"--out {where} is a folder: give the name of a file")
    if path.exists() and mark not in regular(path).read_bytes():
        raise FedobpError(f"{where} was not made by this command, so it is not overwritten: choose another --out")


def report_html(runs: "Sequence[SavedRun]", *, title: str | None = None, notes: Sequence[str] = ()) -> str:
    """Return the report of some finished runs; the same runs give the same text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if not runs:
        raise FedobpError("there is no finished run to report: look at the errors of those that failed")
    try:
        (title or "").encode()
    except UnicodeEncodeError as error:
        raise FedobpError(f"--title must be readable text, not '{short(title)}'") from error
    kept = without_repeats(runs)
    repeats = len(runs) - len(kept)
    notes = [
        *notes,
        *(f"{run.name} ran on nodes; messages: {statuses(sent)}." for run in kept if (sent := run.messages())),
        *([f"{counted(repeats, 'run')} with settings and seeds of others given: left out."] * bool(repeats)),
    ]
    sections = sections_of(kept)
    environment = Environment(
        loader=PackageLoader("fedobp.report", "template"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    assert environment.loader is not None
    style, script = (environment.loader.get_source(environment, name)[0] for name in ("page.css", "page.js"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    with rc_context(STYLE):
        shown = [_section(at, section) for at, section in enumerate(sections)]
    return environment.get_template("page.html").render(
        title=title or _title(sections),
        lead=_lead(sections),
        mark=MARK,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'",
        style=style,
        script=script,
        notes=notes,
        overview=_overview(sections) if len(sections) > 1 else None,
        sections=shown,
        provenance=_provenance([run for section in sections for run in section.runs]),
        glossary=GLOSSARY,
        version=__version__,
    )


def _title(sections: Sequence[Section]) -> str:
    datasets = listed(section.runs[0].config.dataset for section in sections)
    methods = list(dict.fromkeys(group.method for section in sections for group in section.groups))
    return f"{methods[0] if len(methods) == 1 else counted(len(methods), 'method')} on {datasets}"


def _lead(sections: Sequence[Section]) -> str:
    runs = [run for section in sections for run in section.runs]
    seeds = len({run.config.seed for run in runs})
    parts = [counted(len(runs), "run"), counted(len({run.config.method for run in runs}), "method")]
    parts += [counted(seeds, "seed"), *([counted(len(sections), "setting")] if len(sections) > 1 else [])]
    return listed(parts)


def _section(at: int, section: Section) -> dict[str, Any]:
    """Return what the page shows of a section."""
    clients = Clients(section)
    layers, unchanged = layer_panels(section)
    timed = time_panel(section)
    costs = [bytes_panel(section), *([timed] if timed else [])]
    panels = {"clients": clients.panels(), "layers": layers, "kept": kept_panels(section, clients), "costs": costs}
    return {
        "id": f"setting{at + 1}",
        "title": section.title,
        "table": _summary(section),
        "legend": [_entry(group) for group in section.groups],
        "clients_note": clients.note,
        "clients_data": clients.data,
        "unchanged": unchanged,
        "timed": timed is not None,
        "words": setting_in_words(section),
        "accuracy": _figure(f"accuracy{at}", replace(accuracy_panel(section), heading=""), (1, 2)),
        **{kind: [_figure(f"{kind}{at}x{i}", one) for i, one in enumerate(found)] for kind, found in panels.items()},
    }


def _figure(name: str, panel: Panel, widths: Sequence[int] = (1,)) -> dict[str, Any]:
    """Return a panel for the page: drawn in each width, in columns, of which a page shows the one that fits."""
    drawings = []
    for width in widths:
        figure = Column(figsize=(width * COLUMN, panel.height * (1.15 if width > 1 else 1)), layout="constrained")
        panel.draw(figure.subplots())
        drawings.append(inline_svg(figure, f"{name}w{width}", panel.alt))
    return {"panel": panel, "svgs": drawings}


def _entry(group: Group) -> dict[str, Any]:
    """Return a group's entry in the legend."""
    _, line, marker = look(group.index)
    dashes = {"-": "none", "--": "5 2.4", ":": "1.5 2", "-.": "6 2 1.5 2"}[line]
    shapes = {
        "o": "M13 2.4a2.6 2.6 0 1 0 .01 0z", "s": "M10.6 2.6h4.8v4.8h-4.8z", "^": "M13 1.8l3.2 5.6h-6.4z",
        "D": "M13 1.6l3.4 3.4-3.4 3.4-3.4-3.4z", "v": "M13 8.2l3.2-5.6h-6.4z",
        "P": "M12 2h2v2h2v2h-2v2h-2v-2h-2v-2h2z", "X": "M11 2l2 2 2-2 1 1-2 2 2 2-1 1-2-2-2 2-1-1 2-2-2-2z",
    }  # fmt: skip
    return {"index": group.index, "label": group.label, "colour": group.index % len(COLOURS),
            "dashes": dashes, "marker": shapes[marker]}  # fmt: skip


# Summary tables


def _part(name: str, value: str) -> "Callable[[SavedRun], float | None]":
    return lambda run: (run.result.get(name) or {}).get(value)


def _new(column: str) -> "Callable[[SavedRun], float | None]":
    return lambda run: ((run.result.get("new_clients") or {}).get(column) or {}).get("pooled")


_COLUMNS: "tuple[tuple[str, Callable[[SavedRun], float | None], str], ...]" = (
    ("Pooled", _part("accuracy", "pooled"), "%"),
    ("Client mean", _part("accuracy", "client_mean"), "%"),
    ("Worst tenth", _part("accuracy", "worst_decile"), "%"),
    ("Smallest quarter", lambda run: smallest_quarter(run.clients(), "served"), "%"),
    ("Last", _part("last", "pooled"), "%"),
    ("Fine-tuned", _part("finetuned", "pooled"), "%"),
    ("New clients", _new("served"), "%"),
    ("Without labels", _new("unlabelled"), "%"),
    ("After one round", _new("visited"), "%"),
    ("After two", _new("visited_twice"), "%"),
    ("Personal", _part("personal", "mean"), "count"),
    ("Down", _part("bytes", "down_per_round"), "bytes"),
    ("Up", _part("bytes", "up_per_round"), "bytes"),
    ("Time", lambda run: run.result.get("seconds"), "s"),
)


def _cell(spread: tuple[float | None, float | None], unit: str) -> str:
    """Return a mean, and for accuracies and times the deviation."""
    mean, deviation = spread
    if mean is None:
        return "-"
    if unit == "bytes":
        return format_bytes(mean)
    if unit == "count":
        return f"{mean:,.0f}" if mean >= 10 or mean == round(mean) else f"{mean:.1f}"
    digits, after = (2, "") if unit == "%" else (1, " s")
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}") + after


def _best(means: Sequence[float | None]) -> set[int]:
    """Return the positions of the largest means, as they are shown; none if there is nothing to compare."""
    shown = [None if mean is None else round(mean, 2) for mean in means]
    top = max((mean for mean in shown if mean is not None), default=None)
    return {at for at, mean in enumerate(shown) if mean is not None and mean == top} if len(means) > 1 else set()


def _summary(section: Section) -> dict[str, Any]:
    """Return the summary table: a row a group; the best accuracies are marked."""
    groups = section.groups
    columns = []
    for head, value, unit in _COLUMNS:
        spreads = [group.spread(value) for group in groups]
        if any(mean is not None for mean, _ in spreads):
            best = _best([mean for mean, _ in spreads]) if unit == "%" else set()
            cells = [{"text": _cell(one, unit), "value": one[0], "best": at in best} for at, one in enumerate(spreads)]
            columns.append((head, cells))
    counts = {len(group.runs) for group in groups}
    if counts != {1} and len(counts) > 1:
        columns.append(("Seeds", [{"text": n, "value": n, "best": False} for n in (len(one.runs) for one in groups)]))
    rows = [
        {"index": group.index, "label": group.label, "cells": [cells[at] for _, cells in columns]}
        for at, group in enumerate(groups)
    ]
    size = model_size(section.runs)
    caption = [
        "Accuracy in per cent, the best in bold.",
        *(
            [f"Mean ± standard deviation over {f'{max(counts)} seeds' if len(counts) == 1 else 'the seeds'}."]
            * (max(counts) > 1)
        ),
        f"Personal: a client's own parameters{f', of {size:,}' if size else ''}.",
        "Down, up: bytes of a round.",
    ]
    return {"heads": [head for head, _ in columns], "rows": rows, "caption": " ".join(caption)}


def _overview(sections: Sequence[Section]) -> dict[str, Any]:
    """Return pooled accuracies of all groups (rows) in all sections (columns)."""
    labels = list(dict.fromkeys(group.label for section in sections for group in section.groups))
    rows: dict[str, list[dict[str, Any]]] = {label: [] for label in labels}
    for section in sections:
        spreads = {group.label: group.spread(_COLUMNS[0][1]) for group in section.groups}
        means = [spreads[label][0] if label in spreads else None for label in labels]
        best = _best(means) if len(spreads) > 1 else set()
        for at, label in enumerate(labels):
            spread = spreads.get(label, (None, None))
            rows[label].append({"text": _cell(spread, "%"), "value": spread[0], "best": at in best})
    return {"heads": [section.title for section in sections], "rows": rows}


def _provenance(runs: "Sequence[SavedRun]") -> dict[str, Any]:
    """Return what the numbers depend on: what is the same for all runs, a row a run, and the launches."""
    origins = [run.result.get("provenance") or {} for run in runs]
    values = {name: [_fact(origin, name) for origin in origins] for name in _FACTS}
    common = {name: found[0] for name, found in values.items() if len(set(found)) == 1}
    varied = [name for name in _FACTS if name not in common]
    launches: dict[str, int] = {}
    rows = []
    for run, origin in zip(runs, origins, strict=True):
        beside = origin.get("beside") or []
        # Runs of two folders may have the same names.
        key = json.dumps([str(run.folder.absolute().parent), beside])
        launch = launches.setdefault(key, len(launches) + 1) if beside else None
        rows.append(
            [run.name, run.config.seed, origin.get("config") or "-", (run.result.get("partition") or "-")[:16]]
            + [_fact(origin, name) for name in varied]
            + [launch or "-"]
        )
    heads = ["Run", "Seed", "Settings hash", "Partition hash", *(name.capitalize() for name in varied), "Launch"]
    return {
        "common": common,
        "heads": heads,
        "rows": rows,
        "launches": {number: json.loads(key)[1] for key, number in launches.items()},
    }


def _fact(origin: Mapping[str, Any], name: str) -> str:
    return "not recorded" if name not in origin else "none" if origin[name] is None else str(origin[name])
