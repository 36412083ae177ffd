"""Fetching named datasets: official files, checked, turned into the one npz that every dataset is.

Files land in `downloads/NAME` of the data folder. A download that broke off is kept there as FILE.part and goes on at
the next attempt; a file that somebody put there by hand is checked and used like one that was downloaded.
"""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedobp.data.datasets import EMBEDDED, Info, describe, store
from fedobp.data.free_memory import room_for
from fedobp.data.sources import SOURCES, File, installed, read
from fedobp.errors import FedobpError, short, unknown
from fedobp.files import regular, unwritable

if TYPE_CHECKING:
    from requests import Response

Progress = Callable[[str, float], None]  # hears what is under way, and which share of it is done

CONNECT = 10.0  # seconds to wait for a connection
STALLED = 30.0  # seconds without a byte after which a connection counts as broken
TRIES = 5
PAUSE = 1.0  # seconds between tries
CHUNK = 1 << 14  # bytes; what a stalled connection has brought of one is lost


def fetch(names: Sequence[str], folder: Path, progress: Progress = lambda what, share: None) -> list[Info]:
    """Get named datasets into the data folder, but for those that are there, and return their sizes."""
    for name in names:
        if name != EMBEDDED and name not in SOURCES:
            raise unknown("dataset to fetch", name, [EMBEDDED, *SOURCES])
    return [_fetch(name, folder, progress) for name in names]


def _fetch(name: str, folder: Path, progress: Progress) -> Info:
    if name == EMBEDDED or os.path.lexists(folder / f"{name}.npz"):
        return describe(name, folder)
    paths, downloaded = installed(name), []
    if not paths:
        place = folder / "downloads" / name
        downloaded = [place / file.name for file in SOURCES[name].files if not os.path.lexists(place / file.name)]
        paths = [_obtain(name, file, place, progress) for file in SOURCES[name].files]
    progress(f"{name}: unpacking", 0.0)
    with room_for(f"dataset '{name}'"):
        dataset = store(name, read(name, paths, lambda share: progress(f"{name}: unpacking", share)), folder)
    for path in downloaded:  # what was put there by hand stays
        path.unlink()
    return dataset.info


def _obtain(name: str, file: File, place: Path, progress: Progress) -> Path:
    """Return an official file's path, after checking the one that lies there or downloading it."""
    import pooch

    path = place / file.name
    if os.path.lexists(path):
        regular(path)
        progress(f"{name}: checking {file.name}", 0.0)
        algorithm, digest = file.checksum.split(":")
        if file.size not in (None, path.stat().st_size) or pooch.file_hash(str(path), algorithm) != digest:
            raise FedobpError(
                f"{short(path, 200)} is not the official file, which has {_identity(file)}: remove it to have it "
                f"downloaded, or replace it by {file.url}"
            )
        return path
    pooch.get_logger().setLevel("WARNING")
    download = _Download(name, file, place, progress)
    try:
        pooch.retrieve(file.url, file.checksum, fname=file.name, path=place, downloader=download)
    except ValueError as error:  # pooch's word for a wrong checksum
        raise download.failed(f"what came is not the official file, which has {_identity(file)}") from error
    except OSError as error:
        raise unwritable(place, error) from error
    return path


def _identity(file: File) -> str:
    algorithm, digest = file.checksum.split(":")
    return f"{f'{file.size:,} bytes and ' if file.size else ''}{algorithm.upper()} {digest}"


class _Interrupted(Exception):
    """A download broke off for a reason that may pass."""


class _Download:
    """What pooch downloads a file with: goes on where an earlier try broke off, if the server can."""

    def __init__(self, name: str, file: File, place: Path, progress: Progress) -> None:
        self._name, self._file, self._place, self._progress = name, file, place, progress
        self._part = place / f"{file.name}.part"
        self._came = 0  # bytes, in this try

    def __call__(self, url: str, output: Any, pooch: object, *, check_only: bool | None = None) -> None:
        for left in reversed(range(TRIES)):
            self._came = 0
            try:
                self._go_on()
                break
            except _Interrupted as error:
                if not (left and self._came):  # where nothing came, nothing will
                    raise self.failed(str(error)) from error
                time.sleep(PAUSE)
        self._part.replace(output)  # pooch checks it there, and removes it if it is wrong

    def failed(self, reason: str) -> FedobpError:
        """Return the error for a file that could not be had, with what to put where."""
        missing = [file for file in SOURCES[self._name].files if not (self._place / file.name).exists()]
        files = ", ".join(f"{file.name} ({file.url})" for file in missing)
        kept = " to go on where it stopped" if self._kept() else ""
        folder = shlex.quote(str(self._place.parent.parent))
        return FedobpError(
            f"dataset '{self._name}' cannot be downloaded from {self._file.url} ({reason}): run `fedobp data fetch "
            f"{self._name} --data-dir {folder}` again{kept}, or first put into {short(self._place, 200)} by "
            f"hand: {files}"
        )

    def _kept(self) -> int:
        return regular(self._part).stat().st_size if os.path.lexists(self._part) else 0

    def _go_on(self) -> None:
        """Fetch what is missing of the file; one try."""
        import requests
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        have = self._kept()
        if have and have == self._file.size:
            return
        # The bytes as they lie on the server: one may pack them, or take a gzipped file for a packed transfer.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with requests.get(self._file.url, headers=headers, stream=True, timeout=(CONNECT, STALLED)) as response:
                goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
                if response.status_code == 200 or (response.status_code == 206 and have and goes_on):
                    self._receive(response, have if response.status_code == 206 else 0)
                    return
        except (requests.ReadTimeout, ReadTimeoutError) as error:
            raise _Interrupted(f"nothing came for {STALLED:g} s") from error
        except requests.ConnectionError as error:
            raise _Interrupted("no connection") from error
        except (requests.RequestException, HTTPError) as error:
            raise _Interrupted(f"the connection broke: {type(error).__name__}") from error
        if not (have and response.status_code in (206, 416)):
            raise self.failed(f"status {response.status_code}, {response.reason}")
        self._part.unlink()  # the server has another idea of how to go on: start over
        self._go_on()

    def _receive(self, response: "Response", have: int) -> None:
        announced = response.headers.get("Content-Length")
        total = have + int(announced) if announced else self._file.size
        if self._file.size not in (None, total):
            raise self.failed(f"the file there has {total:,} bytes, and the official one {self._file.size:,}")
        with self._part.open("ab" if have else "wb") as part:
            for chunk in response.raw.stream(CHUNK, decode_content=False):
                part.write(chunk)
                have, self._came = have + len(chunk), self._came + len(chunk)
                self._tell(have, total)
        if total and have < total:
            raise _Interrupted(f"the connection broke after {have:,} of {total:,} bytes")

    def _tell(self, have: int, total: int | None) -> None:
        size = f" of {total / 1e6:,.0f}" if total else ""
        self._progress(f"{self._name}: {self._file.name}, {have / 1e6:,.0f}{size} MB", have / total if total else 0.0)
