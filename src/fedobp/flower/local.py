"""A federation on this machine: a superlink and nodes as processes, which all end with the block that started them.

Each program is started in a process group of its own. Flower's programs start others, some in groups of their own, so
a program's groups are looked up while it runs: they are still known when it has died.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fedobp.errors import STOP_SIGNALS, FedobpError, Stopped, short
from fedobp.files import unwritable
from fedobp.flower.keys import CA, CERTIFICATE, KEY
from fedobp.toml import toml_value

CONNECTION = "fedobp"
PATIENCE = 10.0  # seconds that programs have to end by themselves
# Flower would install the app's dependencies anew for every run, report usage, and look for updates.
QUIET = {
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}

# Starts a program. On Linux it is terminated with the process that started it, also if that is killed itself; what
# Flower's programs start ends with them.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
os.execv(sys.argv[1], sys.argv[1:])
"""


class LocalDeployment:
    """Processes of a deployment in a folder, each with a log and a Flower home; they end with the block.

    Without `keys`, a folder that `make_keys` filled, there is neither TLS nor authentication. In the block a stop
    signal is kept until `check` raises it: it cannot come between the start of a process and the note of its id, and a
    second one cannot stop the ending of processes.
    """

    def __init__(self, folder: Path, keys: Path | None = None) -> None:
        self.folder, self._keys, self._running = folder, keys, dict[str, subprocess.Popen[bytes]]()
        self._groups = dict[str, set[int]]()  # process groups of a program and of what it started
        self._signal: int | None = None
        self._handlers = ExitStack()
        self.port = free_port()

    def __enter__(self) -> Self:
        def keep(number: int, frame: object) -> None:
            self._signal = self._signal or number

        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, signal.SIGHUP):
                if (before := signal.getsignal(number)) != signal.SIG_IGN:  # as in `nohup`
                    self._handlers.callback(signal.signal, number, before)
                    signal.signal(number, keep)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._handlers:
            self._end(list(self._running), signal.SIGTERM)

    def check(self) -> None:
        """Raise a stop signal that has come."""
        if self._signal:
            raise Stopped(self._signal)

    def check_running(self) -> None:
        """Raise a stop signal that has come, or say which program has ended: all but `run` have no reason to."""
        self.check()
        self._look()
        for name in self._running:
            if name != "run" and not self.running(name):
                raise FedobpError(f"{name} ended early: {short(self.log(name), 200)} says why")

    @property
    def address(self) -> str:
        """Where the superlink listens."""
        return f"127.0.0.1:{self.port}"

    def log(self, name: str) -> Path:
        """Return the log of a process."""
        return self.folder / "logs" / f"{name}.log"

    def start(self, name: str, program: str, arguments: Sequence[object], **environment: str) -> None:
        """Start one of Flower's programs; what ran under the same name must have ended."""
        home = self.folder / "homes" / name
        try:
            home.mkdir(parents=True, exist_ok=True)
            self.log(name).parent.mkdir(exist_ok=True)
            log = self.log(name).open("ab")
        except OSError as error:
            raise unwritable(self.folder, error) from error
        with log:
            self._running[name] = subprocess.Popen(
                [sys.executable, "-ISc", _LAUNCHER, find_program(program), *map(str, arguments)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env=_environment(home, **environment),
            )  # fmt: skip

    def running(self, name: str) -> bool:
        """Say whether a process is running."""
        return name in self._running and self._running[name].poll() is None

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End a program, and all that it started, by a signal; what is left after a few seconds is killed."""
        self._end([name], number)

    def _end(self, names: Sequence[str], number: int) -> None:
        self._look()
        processes = {name: self._running.pop(name) for name in names}
        for process in processes.values():
            _signal_group(process.pid, number)
        end = time.monotonic() + PATIENCE
        for process in processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for name, process in processes.items():
            for group in self._groups.pop(name):
                _signal_group(group, signal.SIGKILL)
            process.wait()

    def _look(self) -> None:
        """Note the process groups of all that programs have started."""
        parents = _parents()
        for name, process in self._running.items():
            found = {process.pid}
            while more := {pid for pid, (parent, _) in parents.items() if parent in found and pid not in found}:
                found |= more
            self._groups.setdefault(name, {process.pid}).update(parents[pid][1] for pid in found if pid in parents)

    def pid(self, name: str) -> int:
        """Return the process id of what runs under a name."""
        return self._running[name].pid

    def start_superlink(self, seconds: float = 60.0) -> None:
        """Start the superlink, and wait until it listens."""
        secure = self._keys
        tls: list[object] = ["--insecure"]
        if secure:
            tls = [
                "--ssl-ca-certfile", secure / CA, "--ssl-certfile", secure / CERTIFICATE,
                "--ssl-keyfile", secure / KEY, "--enable-supernode-auth",
            ]  # fmt: skip
        database = self.folder / "superlink.db"
        self.start("superlink", "flower-superlink", [*tls, "--port", self.port, "--database", database])
        end = time.monotonic() + seconds
        while not _listens(self.port):
            self.check()
            if not self.running("superlink") or time.monotonic() > end:
                raise FedobpError(f"the superlink did not start: {short(self.log('superlink'), 200)} says why")
            time.sleep(0.1)

    def register(self, node: str) -> None:
        """Register a node's public key with the superlink."""
        assert self._keys is not None, "only with keys"
        done = self.flwr("supernode", "register", self._keys / f"{node}.pub", CONNECTION)
        if done.returncode:
            raise FedobpError(f"node {short(node)} could not be registered: {short(done.stdout[-300:], 300)}")

    def start_node(self, name: str, config: Mapping[str, Any], keys: Path | None = None, **environment: str) -> None:
        """Start a node; its key is that of its name, or without keys it has none."""
        secure = keys or self._keys
        tls: list[object] = ["--insecure"]
        if secure:
            tls = ["--root-certificates", secure / CA, "--auth-supernode-private-key", secure / name]
        given = flower_config(config)
        arguments = [*tls, "--superlink", self.address, "--port", free_port(), "--node-config", given]
        self.start(name, "flower-supernode", arguments, **environment)

    def start_run(self, app: Path, config: str = "", name: str = "run") -> None:
        """Start the federation: `flwr run`, which follows the server's log until the run has ended."""
        self._write_connection(name)
        more = ["--run-config", config] if config else []
        self.start(name, "flwr", ["run", app.absolute(), CONNECTION, "--stream", *more])

    def flwr(self, *arguments: object) -> "subprocess.CompletedProcess[str]":
        """Run one of Flower's commands to its end, or to a stop signal."""
        self._write_connection("flwr")
        command = [find_program("flwr"), *map(str, arguments)]
        with subprocess.Popen(
            command, env=_environment(self.folder / "homes" / "flwr"), stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process:  # fmt: skip
            try:
                while True:
                    with suppress(subprocess.TimeoutExpired):
                        text, _ = process.communicate(timeout=0.2)
                        return subprocess.CompletedProcess(command, process.returncode, text)
                    self.check()
            finally:
                _signal_group(process.pid, signal.SIGKILL)

    def _write_connection(self, name: str) -> None:
        home = self.folder / "homes" / name
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(connection(self.address, self._keys))


def _environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of Flower's programs, which start one another by name."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(home.absolute()), **more}


def connection(address: str, keys: Path | None) -> str:
    """Return the text of a Flower home's `config.toml` that names a superlink."""
    trust = f'root-certificates = "{(keys / CA).absolute()}"' if keys else "insecure = true"
    return f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{address}"\n{trust}\n'


def flower_config(values: Mapping[str, Any]) -> str:
    """Return values as Flower's command line takes them; it wants quotes around texts, and none in them."""
    return " ".join(f"{name}={toml_value(value)}" for name, value in values.items())


def find_program(name: str) -> str:
    """Return one of Flower's programs: the one beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FedobpError(f"{name} is not installed: pip install 'fedobp[flower]'")
    return found


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as one:
        one.settimeout(1)
        return one.connect_ex(("127.0.0.1", port)) == 0


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def _parents() -> dict[int, tuple[int, int]]:
    """Return the parent and the process group of every process."""
    found = dict[int, tuple[int, int]]()
    if not Path("/proc/self/stat").exists():
        listed = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,pgid="], capture_output=True, text=True, check=False)
        rows = (map(int, line.split()) for line in listed.stdout.splitlines())
        return {pid: (parent, group) for pid, parent, group in rows}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # PID (NAME) STATE PARENT GROUP ...; a name may have spaces and brackets
            _, parent, group, *_ = path.read_text(errors="replace").rpartition(")")[2].split()
            found[int(path.parent.name)] = int(parent), int(group)
    return found
