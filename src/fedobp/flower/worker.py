"""A worker beside a node: it keeps torch, the model and the node's data in memory between messages.

The client app of a node talks to it over a socket in a folder that only this user can enter. It starts the worker if
there is none. The worker ends when the node is gone, or when it has not been asked for ten minutes.
"""

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedobp.errors import FedobpError, described, short
from fedobp.files import unwritable

_IDLE = 600.0  # seconds without a message, after which a worker ends
_LOOK = 2.0  # seconds between two looks whether the node is still there
_LONGEST_PATH = 90  # of a socket, with room for a process id
_START = 120.0  # seconds that a worker has to load torch and the node's data


def ask_worker(
    arguments: Sequence[str], kind: str, values: Mapping[str, Any], payload: bytes
) -> tuple[dict[str, Any], bytes]:
    """Return a node's answer to a message, from its worker."""
    path = _socket_path(arguments)
    request = json.dumps({"kind": kind, "values": dict(values)}).encode()
    try:
        with _connected(path) or _started(path, arguments) as connection:
            send_frames(connection, request, payload)
            answer, upload = receive_frames(connection)
    except (OSError, EOFError) as error:
        raise FedobpError(f"the worker of this node ended ({described(error)}): {_log(arguments)} says why") from error
    found: dict[str, Any] = json.loads(answer)
    return found, upload


def _socket_path(arguments: Sequence[str]) -> Path:
    """Return the socket of a node: another one for other arguments, or for a changed federation.toml."""
    content = Path(arguments[0]).read_bytes()
    name = hashlib.sha256(b"\0".join([content, *(one.encode() for one in arguments)])).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"fedobp-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise FedobpError(f"{short(folder, 200)} can be entered by others: remove it, or set TMPDIR")
    path = folder / f"{name}.sock"
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise FedobpError(f"{short(path, 200)} is too long a path for a socket: set TMPDIR to a shorter one")
    return path


def _log(arguments: Sequence[str]) -> Path:
    return Path(arguments[3]) / f"worker-{arguments[1]}.log"


def _connected(path: Path) -> socket.socket | None:
    """Return a connection to a worker, or None if none listens."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        return connection
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None


def _started(path: Path, arguments: Sequence[str]) -> socket.socket:
    """Start a worker, and return a connection to it."""
    log = _log(arguments)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            command = [sys.executable, "-m", "fedobp.flower.worker", str(path), str(os.getppid()), *arguments]
            worker = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    except OSError as error:
        raise unwritable(log, error) from error
    end = time.monotonic() + _START
    while time.monotonic() < end:
        if connection := _connected(path):
            return connection
        if worker.poll() is not None:  # another one may have been started at the same time
            if connection := _connected(path):
                return connection
            break
        time.sleep(0.05)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise FedobpError(f"the worker of this node did not start ({short(lines[-1] if lines else 'no output', 300)})")


def send_frames(connection: socket.socket, *frames: bytes) -> None:
    """Send pieces of bytes, each with its length."""
    for frame in frames:
        connection.sendall(struct.pack("<Q", len(frame)))
        if frame:  # who has all that was announced may have answered and gone: nothing is sent to them
            connection.sendall(frame)


def receive_frames(connection: socket.socket) -> tuple[bytes, bytes]:
    """Receive two pieces of bytes."""
    first, second = (_receive(connection, struct.unpack("<Q", _receive(connection, 8))[0]) for _ in range(2))
    return first, second


def _receive(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(1 << 20, size - len(found)))
        if not part:
            raise EOFError("the connection was closed")
        found += part
    return bytes(found)


def work(path: Path, node: int, arguments: Sequence[str]) -> None:
    """Answer messages, one after another, until the process `node` is gone or nobody asks."""
    from fedobp.flower.node import make_node

    file, client, data, folder, device = arguments
    one = make_node(Path(file), int(client), data, Path(folder), device)
    with socket.socket(socket.AF_UNIX) as listener:
        temporary = path.with_suffix(f".{os.getpid()}")
        listener.bind(str(temporary))
        listener.listen()
        own = temporary.stat().st_ino
        temporary.replace(path)  # of two workers that start at once, the later one is found; the other one is idle
        listener.settimeout(_LOOK)
        asked = time.monotonic()
        while _is_there(node) and time.monotonic() - asked < _IDLE:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection, suppress(OSError, EOFError):  # who asked may be gone
                request, payload = receive_frames(connection)
                given = json.loads(request)
                values, upload = one.answer(given["kind"], given["values"], payload)
                send_frames(connection, json.dumps(values, allow_nan=False).encode(), upload)
            asked = time.monotonic()
        with suppress(OSError):
            if path.stat().st_ino == own:  # and not that of a worker that was started later
                path.unlink()


def _is_there(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def main() -> int:
    """Run a worker: `python -m fedobp.flower.worker SOCKET NODE FILE CLIENT DATA STATE DEVICE`."""
    path, node, *arguments = sys.argv[1:]
    try:
        work(Path(path), int(node), arguments)
    except FedobpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
