"""A whole federation on this machine, in one call: data, keys, a superlink, nodes, and the run."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from fedobp.errors import FedobpError, short
from fedobp.files import unwritable
from fedobp.flower.keys import make_keys
from fedobp.flower.local import LocalDeployment, flower_config
from fedobp.flower.project import Arrays, write_app, write_data
from fedobp.flower.task import FederationSettings
from fedobp.launch import Progress
from fedobp.progress import report

LOOPBACK = ("localhost", "127.0.0.1")
_POLL = 0.2  # seconds between two looks at the run and its processes


def run_on_loopback(
    folder: Path,
    settings: FederationSettings,
    data: Iterable[Arrays],
    *,
    tls: bool,
    progress: Callable[[Progress], None] = lambda at: None,
) -> Path:
    """Run a federation on processes of this machine, and return the server's run folder.

    Everything is written under `folder`, which must be empty. When this returns or raises, no process is left.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise FedobpError(f"{short(folder, 200)} is not empty: choose another --out, nothing was overwritten")
    except (OSError, ValueError) as error:
        raise unwritable(folder, error) from error
    shown, folder = folder, folder.absolute()  # Flower's processes get whole paths
    write_app(folder / "app", settings)
    files = write_data(folder / "data", data)
    keys = folder / "keys" if tls else None
    if keys:
        make_keys(keys, LOOPBACK, len(files))
    run = folder / "run"
    with LocalDeployment(folder, keys) as running:
        report("starting the superlink", 0.0)
        running.start_superlink()
        for node, file in enumerate(files):
            report("starting nodes", node / len(files))
            if keys:
                running.register(f"node-{node}")
            running.start_node(f"node-{node}", {"client": node, "data": str(file), "state": str(folder / "state")})
            running.check_running()
        running.start_run(folder / "app", flower_config({"folder": str(run)}))
        report("waiting for nodes", 1.0)
        for line in _rounds(running, run / "metrics.jsonl"):
            accuracy = line["accuracy"]["pooled"] if "accuracy" in line else None
            progress(Progress(settings.config.method, line["round"], settings.config.rounds, accuracy))
        if not (run / "result.json").exists():
            raise FedobpError(_failure(running.log("run")))
    return shown / "run"


def _rounds(running: LocalDeployment, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a log until the run has ended, as they are written."""
    done = 0
    while True:
        ended = not running.running("run")
        text = path.read_bytes() if path.exists() else b""
        lines = text[: text.rfind(b"\n") + 1].splitlines()
        yield from map(json.loads, lines[done:])
        done = len(lines)
        if ended:
            return
        running.check_running()
        time.sleep(_POLL)


def _failure(log: Path) -> str:
    """Return why the server ended: its own sentence, or where to look."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return said[-1] if said else f"the server ended early: {short(log, 200)} says why"
