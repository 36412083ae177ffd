"""Launches of a sweep on a Ray cluster: one worker a card, and files back.

A worker gets the sweep's plan as text and the names of a launch, and returns the files of its runs as bytes and errors
as texts, so that nothing of ours is serialised. Ray retries a launch whose worker or node died; what other workers have
finished is kept. Every node needs fedobp, and the data in its own $FEDOBP_DATA.
"""

import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedobp.callbacks import Callback
from fedobp.config import Config
from fedobp.errors import FedobpError, described, short
from fedobp.files import lock, write
from fedobp.launch import Progress
from fedobp.result import Failure
from fedobp.sweep_folder import copy_run, train_launches
from fedobp.sweep_plan import Outcome, Sweep, read_plan

RETRIES = 3  # of a launch whose worker or node died
_POLL = 0.2  # seconds between looks at what has finished


def train_launch(plan: str, file: str, launch: list[str], threads: int) -> tuple[dict[str, bytes], dict[str, str]]:
    """Train a launch in a worker; return the files of its runs by path, and why runs could not start by name.

    Ray gives workers one thread; the number of threads changes the last bits, so it is the caller's.
    """
    torch.set_num_threads(threads)
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / file).write_text(plan, encoding="utf-8")
        failed = train_launches(read_plan(folder / file), [launch]).failed
        errors = {name: one.error for name, one in failed.items() if not (folder / name / "failed.json").exists()}
        # Files of a run that has not ended would replace the caller's own checkpoints of it.
        ended = [name for name in launch if name not in errors]
        paths = [path for name in ended for path in sorted((folder / name).rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}, errors


def train_on_ray(
    plan: Sweep,
    launches: Sequence[Sequence[str]],
    deadline: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    address: str | None = None,
) -> Outcome:
    """Train launches of a plan on a cluster: the one at `address`, or a new one on this machine."""
    if callbacks:
        raise FedobpError("--on ray does not report rounds as they happen, which --track needs: leave out one of them")
    ray = _connect(address)
    try:
        with ExitStack() as locks:
            due = [
                launch
                for launch in launches
                if not all(map(plan.is_done, launch)) and locks.enter_context(lock(plan.lock_file(launch)))
            ]
            return _collect(ray, plan, due, deadline, progress)
    finally:
        ray.shutdown()


def _connect(address: str | None) -> Any:
    """Return Ray, connected; who connects has the cluster's token."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as error:
        raise FedobpError("--on ray needs Ray: pip install 'fedobp[ray]'") from error
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _check_reachable(address or "")
        # Not None: that would be any cluster that runs here, of whomever.
        ray.init(
            address or "local",
            include_dashboard=None if address else False,
            log_to_driver=False,
            configure_logging=False,
        )
    except (OSError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        raise FedobpError(
            f"cannot use the Ray cluster at {short(address or 'this machine', 100)} ({short(described(error), 200)}): "
            "check the address and $RAY_AUTH_TOKEN"
        ) from error
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced it
    return ray


def _check_reachable(address: str) -> None:
    """Connect to HOST:PORT and hang up: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _warn_if_none_fits(ray: Any, cpus: int, cards: int) -> None:
    """Say that a launch waits for a node that is not there; a cluster may start one."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= cards for node in nodes):
        needed = f"{cpus} processor{'s' * (cpus > 1)}{' and a card' * cards}"
        warnings.warn(
            f"no node of the Ray cluster has {needed}, which a launch needs: it waits until there is one; add a node"
            f"{'' if cards else ', or set OMP_NUM_THREADS to fewer'}",
            stacklevel=2,
        )


def _collect(
    ray: Any,
    plan: Sweep,
    launches: Sequence[Sequence[str]],
    deadline: float | None,
    progress: Callable[[Progress], None] | None,
) -> Outcome:
    """Hand all launches to Ray, and write the files of each as it ends.

    Python's handlers of signals cannot run inside `ray.wait`, so the time between two looks is spent outside.
    """
    text, threads = plan.to_toml(), torch.get_num_threads()
    tasks: dict[Any, Sequence[str]] = {}
    needs = {tuple(launch): _needs(plan.configs[launch[0]], threads) for launch in launches}
    for cpus, cards in sorted(set(needs.values())):
        _warn_if_none_fits(ray, cpus, cards)
    for launch in launches:
        cpus, cards = needs[tuple(launch)]
        worker = ray.remote(num_gpus=cards, num_cpus=cpus, max_retries=RETRIES, max_calls=1)(train_launch)
        tasks[worker.remote(text, plan.file.name, list(launch), threads)] = launch
    failed: dict[str, Failure] = {}
    try:
        while tasks and (deadline is None or time.monotonic() < deadline):
            finished, _ = ray.wait(list(tasks), timeout=0)
            for task in finished:
                launch = tasks.pop(task)
                try:
                    files, errors = ray.get(task)
                except ray.exceptions.RayTaskError as error:
                    said = f"its Ray worker failed ({short(described(error.cause), 300)}): check fedobp on all nodes"
                    failed |= {name: _failure(plan, name, said) for name in launch}
                except ray.exceptions.RayError as error:
                    said = f"its Ray worker died {RETRIES + 1} times ({short(described(error), 300)}): see Ray's logs"
                    failed |= {name: _failure(plan, name, said) for name in launch}
                else:
                    failed |= {
                        name: _failure(plan, name, f"on its Ray worker: {said}") for name, said in errors.items()
                    }
                    write_runs(plan, launch, files)
                    _report(plan, launch, progress)
            if not finished:
                time.sleep(_POLL)
    finally:
        for task in tasks:
            ray.cancel(task, force=True)
    return Outcome(failed=failed)


def _needs(config: Config, threads: int) -> tuple[int, int]:
    """Return how many processors and cards a launch takes."""
    return (1, 1) if config.device == "cuda" else (threads, 0)


def _failure(plan: Sweep, name: str, sentence: str) -> Failure:
    config = plan.configs[name]
    return Failure(config.method, config.seed, sentence, config)


def write_runs(plan: Sweep, launch: Sequence[str], files: Mapping[str, bytes]) -> None:
    """Write the files of a launch's runs that are not finished yet; each run appears whole."""
    with TemporaryDirectory(dir=plan.folder, prefix=".ray-") as place:
        for name in launch:
            if (plan.path(name) / "result.json").exists():
                continue
            for path, content in files.items():
                run, _, inside = path.partition("/")
                if run == name and ".." not in Path(inside).parts and not Path(inside).is_absolute():
                    target = Path(place) / name / inside
                    target.parent.mkdir(parents=True, exist_ok=True)
                    write(target, content)
            if (Path(place) / name).exists():
                copy_run(Path(place) / name, plan.path(name))


def _report(plan: Sweep, launch: Sequence[str], progress: Callable[[Progress], None] | None) -> None:
    """Report the rounds of runs that have ended."""
    for at, name in enumerate(launch):
        config = plan.configs[name]
        for number in range(1, config.rounds + 1):
            if progress:
                progress(Progress(config.method, number, config.rounds, None, at))
