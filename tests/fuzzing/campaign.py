"""Inputs of a reader by number, and what must hold for each: a value or one sentence, and nothing else happens."""

import io
import os
import resource
import tempfile
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random

from fedobp.errors import FedobpError

from .mutators import mutant
from .readers import READERS, Files

LONGEST = 700  # characters of a sentence; lists of names, such as all settings, take most of it
MEMORY = 256 * 2**20  # bytes that reading a small file may touch
ADDRESSES = 6 * 2**30  # bytes that it may reserve: a test that finds a fault must not bring down its machine


class Fault(AssertionError):
    """An input that a reader does not handle as it must."""


@dataclass
class Tally:
    """What became of inputs."""

    inputs: int = 0
    accepted: int = 0
    memory: int = 0  # refused for want of memory
    peak: int = 0  # bytes
    longest: int = 0  # characters of a sentence


def shares(inputs: int, names: list[str]) -> dict[str, int]:
    """Divide inputs among readers."""
    whole = sum(READERS[name].share for name in names)
    found = {name: inputs * READERS[name].share // whole for name in names}
    found[names[0]] += inputs - sum(found.values())
    return found


class Campaign:
    """The inputs of one reader, which a seed and their numbers decide."""

    def __init__(self, name: str, seed: int, place: Path) -> None:
        self.name, self.seed, self.tally = name, seed, Tally()
        self._place, self._home = place, place / "home"
        for folder in (place / "work", self._home):
            folder.mkdir(parents=True)
        self._marker = place / "marker"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._subject = READERS[name].prepare(place / "work")
            self._subject.write(self._subject.files)
            self._subject.read()  # what is not changed is read

    def input(self, number: int) -> Files:
        """Return the changed files of an input."""
        random, subject = Random(f"{self.name} {self.seed} {number}"), self._subject
        name = random.choice(list(subject.files))
        contents = list(subject.files.values())
        begin = random.choice((subject.files[name], *subject.extra))
        if random.random() < 0.01:
            begin = random.choice(hostile(self._marker))
        changed = {name: mutant(random, begin, contents) if random.random() < 0.99 else begin}
        if subject.reseal and random.random() < 0.6:
            with warnings.catch_warnings(), suppress(Exception):  # it may be so damaged that it has no checksum
                warnings.simplefilter("ignore")
                changed |= subject.reseal(changed)
        return changed

    def run(self, number: int) -> None:
        """Make an input and read it; raise `Fault` if anything is wrong."""
        self.check(number, self.input(number))

    def check(self, number: int, changed: Files) -> None:
        """Read an input; raise `Fault` if anything is wrong."""
        self._subject.write(changed)
        reset_peak()
        before = peak_memory()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._subject.read()
            self.tally.accepted += 1
        except FedobpError as error:
            self._check_sentence(number, changed, str(error))
            self.tally.memory += isinstance(error.__cause__, MemoryError) or "more memory than there is" in str(error)
        except Exception as error:
            raise self._fault(number, changed, f"{type(error).__name__} instead of a sentence") from error
        finally:
            self._subject.write({name: self._subject.files[name] for name in changed})
        self.tally.inputs += 1
        grown = peak_memory() - before
        self.tally.peak = max(self.tally.peak, grown)
        if grown > MEMORY:
            raise self._fault(number, changed, f"it took {grown / 2**20:,.0f} MiB")

    def check_surroundings(self) -> None:
        """Raise `Fault` if something was executed, or written outside of the reader's folder."""
        if found := sorted(path.name for path in self._place.iterdir() if path.name not in ("work", "home")):
            raise Fault(f"{self.name}, seed {self.seed}: reading has made {found}")
        if found := [path for path in self._home.rglob("*") if path.is_file()]:
            raise Fault(f"{self.name}, seed {self.seed}: reading has made {found}")

    def _check_sentence(self, number: int, changed: Files, text: str) -> None:
        self.tally.longest = max(self.tally.longest, len(text))
        if not text or len(text) > LONGEST or not text.isprintable():
            raise self._fault(number, changed, f"a message of {len(text):,} characters, {text[:300]!r}")

    def _fault(self, number: int, changed: Files, what: str) -> Fault:
        place = Path(tempfile.gettempdir()) / f"fuzz-{self.name}-{self.seed}-{number}"
        place.mkdir(exist_ok=True)
        for name, content in changed.items():
            (place / Path(name).name).write_bytes(content)
        return Fault(
            f"{what}; the input is in {place}, repeat with: python tests/fuzz.py --reader {self.name} "
            f"--seed {self.seed} --only {number}"
        )


def hostile(marker: Path) -> list[bytes]:
    """Return files that make the marker if a reader executes them: pickles, and Python in an array's header."""
    pickled = f"cbuiltins\nopen\n(V{marker}\nVw\ntR.".encode()
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    code = (
        f"{{'descr': open({str(marker)!r}, 'w'), 'fortran_order': False, 'shape': (1,), }}".ljust(300).encode() + b"\n"
    )
    arrays = [b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + pickled for text in (head, code)]
    return [
        pickled,
        *arrays,
        *(zipped({"x.npy": one, "y.npy": one, "ids.npy": one}) for one in arrays),
        zipped({"a/data.pkl": pickled}),
    ]


def zipped(members: dict[str, bytes]) -> bytes:
    """Return a zip archive."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


@contextmanager
def campaign(name: str, seed: int) -> Iterator[Campaign]:
    """Make a reader's files in a temporary folder, in memory where that is possible, and away from the user's files."""
    memory = Path("/dev/shm")
    kept = {key: os.environ.get(key) for key in ("HOME", "XDG_CACHE_HOME", "FEDOBP_DATA")}
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory if os.access(memory, os.W_OK) else None) as place:
        here = Path.cwd()
        try:
            one = Campaign(name, seed, Path(place))
            os.environ |= {key: str(Path(place) / "home") for key in kept}
            os.chdir(Path(place) / "home")
            with limited_addresses():
                yield one
            one.check_surroundings()
        finally:
            os.chdir(here)
            for key, value in kept.items():
                os.environ.pop(key, None)
                if value is not None:
                    os.environ[key] = value


@contextmanager
def limited_addresses() -> Iterator[None]:
    """Limit how much memory this process may reserve, where the system tells how much it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if size := _status("VmSize"):
        resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESSES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def reset_peak() -> None:
    """Forget how much memory this process has used, where the system can do that."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Return the most bytes that this process has used."""
    return _status("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _status(name: str) -> int:
    try:
        with open("/proc/self/status", "rb") as file:  # noqa: PTH123 (quicker, and it is read for every input)
            found = file.read()
    except OSError:
        return 0
    at = found.index(name.encode() + b":")
    return 1024 * int(found[at:].split(None, 2)[1])
