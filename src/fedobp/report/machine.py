"""Tables of what a machine has, and of how fast its kernels are."""

from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fedobp.report.result_table import ResultTable
from fedobp.report.tables import format_bytes

_SOURCES = {
    "shipped": "shipped with fedobp",
    "tuned": "tuned on this machine",
    "default": "default, from which the first run tunes for up to a minute",
}


def doctor_table(found: Mapping[str, Any]) -> RenderableType:
    """Return what this machine has, one line each."""
    packages = [f"{name} {version}" for name, version in found["packages"].items() if version]
    missing = [name for name, version in found["packages"].items() if not version]
    data, memory = found["data"], found["memory"]
    rows = [
        ("fedobp", f"{found['fedobp']}, Python {found['python']}, {found['platform']}"),
        ("packages", ", ".join(packages)),
        ("not installed", ", ".join(missing) or "none"),
        ("CUDA", _device(found)),
        *_kernel_rows(found["kernels"]),
        ("data", f"{data['folder'] or 'none'}: {data['problem'] or ', '.join(data['datasets'])}"),
        (
            "memory",
            f"{format_bytes(memory['free'])} of {format_bytes(memory['total'])} free, {found['threads']} threads",
        ),
    ]
    rows.append(("kernel cache", found["kernel_cache"] or "none: there is no home folder"))
    for path, free in found["disk"].items():
        rows.append(("disk", f"{path}: {'not known' if free is None else f'{format_bytes(free)} can be written'}"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, Text(text))  # no markup: names and paths may have brackets
    return table


def _device(found: Mapping[str, Any]) -> str:
    """Return the card that torch uses."""
    device = found["device"]
    if device is None:
        build = f"built for CUDA {found['cuda_build']}" if found["cuda_build"] else "without CUDA"
        return f"no card that torch ({build}) can use"
    if "problem" in device:
        return f"the card cannot be used: {device['problem']}"
    about = f"{device['name']}, compute capability {'.'.join(map(str, device['capability']))}"
    memory = f"{format_bytes(device['memory']['free'])} of {format_bytes(device['memory']['total'])} free"
    return f"{about}, {memory}{', ' + str(device['count']) + ' cards' if device['count'] > 1 else ''}"


def _kernel_rows(kernels: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Return what the kernels do on the card."""
    if kernels is None:
        return [("kernels", "off: no card can be used (fedobp doctor --card 8.6 answers for one that is not there)")]
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
