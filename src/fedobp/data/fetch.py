"""Download of registered datasets: official files are checked and converted to NAME.npz.

Files are stored in `downloads/NAME` of the data folder. An interrupted download stays there as FILE.part and resumes at
the next attempt; a file that the user puts there is checked and used like a downloaded one.
"""

import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedobp.data.dataset import Info
from fedobp.data.datasets import EMBEDDED, describe, store
from fedobp.data.free_memory import memory_guard
from fedobp.data.sources import SOURCES, File, installed, read
from fedobp.errors import FedobpError, short, unknown
from fedobp.files import regular, unwritable

if TYPE_CHECKING:
    from requests import Response

Progress = Callable[[str, float], None]  # called with the current step and the share that is done

CONNECT_TIMEOUT = 10.0  # seconds
READ_TIMEOUT = 30.0  # seconds without data
MAX_TRIES = 5
RETRY_PAUSE = 1.0  # seconds between tries
CHUNK_SIZE = 1 << 14  # bytes; an incomplete chunk is lost when the connection stalls


def fetch(names: Sequence[str], folder: Path, progress: Progress = lambda what, share: None) -> list[Info]:
    """Download datasets into the data folder, except those already there, and return their sizes."""
    for name in names:
        if name != EMBEDDED and name not in SOURCES:
            raise unknown("dataset to fetch", name, [EMBEDDED, *SOURCES])
    return [_fetch(name, folder, progress) for name in names]


def _fetch(name: str, folder: Path, progress: Progress) -> Info:
    if name == EMBEDDED or os.path.lexists(folder / f"{name}.npz"):
        return describe(name, folder)
    paths, downloaded = installed(name), []
    if not paths:
        downloads = folder / "downloads" / name
        downloaded = [
            downloads / file.name for file in SOURCES[name].files if not os.path.lexists(downloads / file.name)
        ]
        paths = [_download_or_check(name, file, downloads, progress) for file in SOURCES[name].files]
    progress(f"{name}: unpacking", 0.0)
    with memory_guard(f"dataset '{name}'"):
        dataset = store(name, read(name, paths, lambda share: progress(f"{name}: unpacking", share)), folder)
    for path in downloaded:  # the user's own files stay
        path.unlink()
    return dataset.info


def _download_or_check(name: str, file: File, downloads: Path, progress: Progress) -> Path:
    """Return the path of an official file: check the file if it is there, else download it."""
    import pooch

    path = downloads / file.name
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
    download = _Download(name, file, downloads, progress)
    try:
        pooch.retrieve(file.url, file.checksum, fname=file.name, path=downloads, downloader=download)
    except ValueError as error:  # wrong checksum
        raise download.error(f"the downloaded file is not the official one, which has {_identity(file)}") from error
    except OSError as error:
        raise unwritable(downloads, error) from error
    return path


def _identity(file: File) -> str:
    algorithm, digest = file.checksum.split(":")
    return f"{f'{file.size:,} bytes and ' if file.size else ''}{algorithm.upper()} {digest}"


class _Interrupted(Exception):
    """A download was interrupted for a reason that may be temporary."""


class _Download:
    """A downloader for pooch that resumes an interrupted download if the server supports it."""

    def __init__(self, name: str, file: File, downloads: Path, progress: Progress) -> None:
        self._name, self._file, self._downloads, self._progress = name, file, downloads, progress
        self._part = downloads / f"{file.name}.part"
        self._received = 0  # bytes in this try

    def __call__(self, url: str, output: Any, pooch: object, *, check_only: bool | None = None) -> None:
        for left in reversed(range(MAX_TRIES)):
            self._received = 0
            try:
                self._resume()
                break
            except _Interrupted as error:
                if not (left and self._received):  # no retry if no data was received
                    raise self.error(str(error)) from error
                time.sleep(RETRY_PAUSE)
        self._part.replace(output)  # pooch verifies the checksum there, and removes a wrong file

    def error(self, reason: str) -> FedobpError:
        """Return the user error for a failed download; it names the files to download by hand and their folder."""
        missing = [file for file in SOURCES[self._name].files if not (self._downloads / file.name).exists()]
        files = ", ".join(f"{file.name} ({file.url})" for file in missing)
        kept = " to resume" if self._partial_size() else ""
        folder = shlex.quote(str(self._downloads.parent.parent))
        return FedobpError(
            f"dataset '{self._name}' cannot be downloaded from {self._file.url} ({reason}): run `fedobp data fetch "
            f"{self._name} --data-dir {folder}` again{kept}, or first put into {short(self._downloads, 200)} by "
            f"hand: {files}"
        )

    def _partial_size(self) -> int:
        return regular(self._part).stat().st_size if os.path.lexists(self._part) else 0

    def _resume(self) -> None:
        """Download the missing rest of the file, in one try."""
        import requests
        from urllib3.exceptions import HTTPError, ReadTimeoutError

        size_so_far = self._partial_size()
        if size_so_far and size_so_far == self._file.size:
            return
        # The bytes as stored: a server may compress them, or declare a gzipped file as a compressed transfer.
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={size_so_far}-"} if size_so_far else {})
        try:
            with requests.get(
                self._file.url, headers=headers, stream=True, timeout=(CONNECT_TIMEOUT, READ_TIMEOUT)
            ) as response:
                resumes = response.headers.get("Content-Range", "").startswith(f"bytes {size_so_far}-")
                if response.status_code == 200 or (response.status_code == 206 and size_so_far and resumes):
                    self._write_response(response, size_so_far if response.status_code == 206 else 0)
                    return
        except (requests.ReadTimeout, ReadTimeoutError) as error:
            raise _Interrupted(f"no data for {READ_TIMEOUT:g} s") from error
        except requests.ConnectionError as error:
            raise _Interrupted("no connection") from error
        except (requests.RequestException, HTTPError) as error:
            raise _Interrupted(f"the connection broke: {type(error).__name__}") from error
        if not (size_so_far and response.status_code in (206, 416)):
            raise self.error(f"status {response.status_code}, {response.reason}")
        self._part.unlink()  # the server cannot resume: start over
        self._resume()

    def _write_response(self, response: "Response", size_so_far: int) -> None:
        announced = response.headers.get("Content-Length")
        total = size_so_far + int(announced) if announced else self._file.size
        if self._file.size not in (None, total):
            raise self.error(f"the server's file has {total:,} bytes, the official one {self._file.size:,}")
        with self._part.open("ab" if size_so_far else "wb") as part:
            for chunk in response.raw.stream(CHUNK_SIZE, decode_content=False):
                part.write(chunk)
                size_so_far, self._received = size_so_far + len(chunk), self._received + len(chunk)
                self._report_progress(size_so_far, total)
        if total and size_so_far < total:
            raise _Interrupted(f"the connection broke after {size_so_far:,} of {total:,} bytes")

    def _report_progress(self, size_so_far: int, total: int | None) -> None:
        size = f" of {total / 1e6:,.0f}" if total else ""
        self._progress(
            f"{self._name}: {self._file.name}, {size_so_far / 1e6:,.0f}{size} MB", size_so_far / total if total else 0.0
        )
