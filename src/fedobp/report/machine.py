"""Tables of what a machine has, and of how fast its kernels are."""

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from fedobp.report.result_table import ResultTable

_SOURCES = {
    "shipped": "shipped with fedobp",
    "tuned": "tuned on this machine",
    "default": "default, from which the first run tunes for up to a minute",
}


def _gigabytes(count: float) -> str:
    return f"{count / 2**30:,.1f} GiB"


def doctor_table(found: Mapping[str, Any]) -> RenderableType:
    """Return what this machine has, one line each."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    packages = [f"{name} {version}" for name, version in found["packages"].items() if version]
    missing = [name for name, version in found["packages"].items() if not version]
    table.add_row("fedobp", f"{found['fedobp']}, Python {found['python']}, {found['platform']}")
    table.add_row("packages", ", ".join(packages))
    table.add_row("not installed", ", ".join(missing) or "none")
    device = found["device"]
    if device:
        memory = device["memory"]
        about = f"{device['name']}, compute capability {'.'.join(map(str, device['capability']))}"
        more = f", {device['count']} cards" if device["count"] > 1 else ""
        table.add_row("CUDA", f"{about}, {_gigabytes(memory['free'])} of {_gigabytes(memory['total'])} free{more}")
    else:
        build = f"built for CUDA {found['cuda_build']}" if found["cuda_build"] else "without CUDA"
        table.add_row("CUDA", f"no card that torch ({build}) can use")
    for row in _kernel_rows(found["kernels"]):
        table.add_row(*row)
    data = found["data"]
    table.add_row("data", f"{data['folder']}: {data['problem'] or ', '.join(data['datasets'])}")
    memory = found["memory"]
    table.add_row(
        "memory", f"{_gigabytes(memory['free'])} of {_gigabytes(memory['total'])} free, {found['threads']} threads"
    )
    for path, free in found["disk"].items():
        table.add_row("disk", f"{path}: {'not known' if free is None else f'{_gigabytes(free)} can be written'}")
    return table


def _kernel_rows(kernels: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return what the kernels do on the card."""
    if kernels is None:
        return [("kernels", "off: there is no card (fedobp doctor --card 8.6 answers for one that is not there)")]
    shared = f"{kernels['shared_memory'] // 1024} KiB of shared memory a block"
    rows = [
        ("card", f"{kernels['card']}, compute capability {kernels['capability']}, {shared}"),
        ("kernels", f"{'on' if kernels['on'] else 'off'} in {kernels['precision']}: {kernels['why']}"),
        ("tile table", f"{_SOURCES[kernels['table']['source']]}, hash {kernels['table']['hash']}"),
    ]
    if kernels["hazards"]:
        rows.append(("race check", kernels["hazards"]))
    sizes = [one["shared_memory"] for one in kernels["kernels"] if one["shared_memory"]]
    if sizes:
        rows.append(("compiled", f"{len(kernels['kernels'])} kernels, at most {max(sizes) / 1024:.0f} KiB a block"))
    return rows


def tune_table(found: Mapping[str, Any]) -> RenderableType:
    """Return the time of a step, kernel by kernel, and where the table is kept."""
    names = list(found["timings"][0]["kernels"])
    table = ResultTable("lanes", "step", "before", *names)
    for row in found["timings"]:
        times = [f"{row['kernels'][name]:.1f}" for name in names]
        table.add_row(str(row["lanes"]), f"{row['step']:.1f}", f"{row['before']:.1f}", *times)
    kept = f"kept in {found['file']}" if found["file"] else "nothing was written"
    about = f"{found['card']}, {found['precision']}, {found['seconds']:.0f} s"
    table.notes = [f"Microseconds of a step of all lanes ({about}).", f"Table {found['table']['hash']}: {kept}."]
    return table
