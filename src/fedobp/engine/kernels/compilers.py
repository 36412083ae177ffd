"""Compilation of kernels by other processes: within one, threads that compile slow each other down.

A kernel is described by text, so that a process needs neither torch nor the tensors of a launch. What it compiles is
then in Triton's cache on disk, where this process finds it. Run as a file, this module reads lists of descriptions, one
a line, and compiles each list by processes that it forks once it has loaded Triton.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

_PACKAGES = ("fedobp", "fedobp.engine", "fedobp.engine.kernels")
_NUMBER = 4  # bytes of a description's number in a pipe, which writes and reads so few atomically
_END = "end\n"


class Description(NamedTuple):
    """What the compiler needs to know of a launch."""

    module: str
    kernel: str
    types: Sequence[str]  # of the arguments before the constants, as Triton writes them
    constants: Sequence[Any]
    warps: int
    stages: int
    capability: tuple[int, int]


def compile_described(one: Description) -> Any:
    """Compile a kernel for a compute capability, or take it from Triton's cache; no card is needed."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(one.module), one.kernel)
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    # Hints are part of the cache's key. A launch has empty ones for constants: with Triton 3.6 for strings only.
    hints: dict[tuple[int], Any] = {}
    hinted = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7)
    for index, (parameter, value) in enumerate(zip(kernel.params, (*one.types, *one.constants), strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[index,] = "constexpr", value
        else:
            signature[parameter.name] = value
        if not parameter.is_constexpr and value.startswith("*"):
            hints[index,] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr and (hinted or isinstance(value, str)):
            hints[index,] = []
    major, minor = one.capability
    source = ASTSource(kernel, signature, constants, hints)
    options = {"num_warps": one.warps, "num_stages": one.stages}
    return triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)


def hash_triton() -> None:
    """Compute the hash of Triton's own files (half a gigabyte), a part of its cache's keys; Triton keeps it."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        triton_key()


class Compilers:
    """A process that compiles kernels into Triton's cache on disk, by forked children on all cores, until closed."""

    def __init__(self, most: int) -> None:
        """Start it, for at most so many children; 0, or where it cannot be started: nothing is compiled."""
        self._process: subprocess.Popen[str] | None = None
        cores, pipe = len(os.sched_getaffinity(0)), subprocess.PIPE
        if most:
            with suppress(OSError):
                command = [sys.executable, "-P", __file__, str(min(most, cores))]
                self._process = subprocess.Popen(
                    command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
                )

    def __enter__(self) -> "Compilers":
        """Return it: it runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, with all that it has forked."""
        if self._process:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()

    def compile(self, descriptions: Sequence[Description], seconds: float = float("inf")) -> Iterator[int]:
        """Start to compile kernels; return the number of each as soon as it is compiled, for those that can be.

        None is begun after these seconds. The numbers must be read to their end before the next call.
        """
        if self._process is None:
            return iter(())
        assert self._process.stdin
        assert self._process.stdout
        with suppress(OSError):  # the process has died
            self._process.stdin.write(json.dumps([time.monotonic() + seconds, descriptions]) + "\n")
            self._process.stdin.flush()
        return map(int, takewhile(_END.__ne__, self._process.stdout))


def main() -> None:
    """Compile what standard input describes; write the number of each kernel that is done, and a last line."""
    # Kernels are imported without the code of the packages around them, which imports torch: that takes seconds.
    folder = Path(__file__).parents[2]
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    hash_triton()
    answers = os.dup(1)
    os.dup2(2, 1)  # Triton and the assembler print there, too
    for line in sys.stdin:
        until, descriptions = json.loads(line)
        _compile_all([Description(*one) for one in descriptions], until, int(sys.argv[1]), answers)
        os.write(answers, _END.encode())


def _compile_all(descriptions: Sequence[Description], until: float, processes: int, answers: int) -> None:
    """Compile kernels in processes that take their numbers from a pipe, none after `until`."""
    for one in descriptions:
        with suppress(Exception):
            importlib.import_module(one.module)
    numbers, pipe = os.pipe()
    for _ in range(processes):
        try:
            fork = os.fork()
        except OSError:  # there are enough processes
            break
        if fork == 0:
            os.close(pipe)
            try:
                while time.monotonic() < until and (read := os.read(numbers, _NUMBER)):
                    at = int.from_bytes(read)
                    try:
                        _build_launcher(compile_described(descriptions[at]))
                    except Exception:  # the compiler and its assembler raise their own, unrelated classes
                        continue
                    os.write(answers, f"{at}\n".encode())
            finally:
                os._exit(0)
    os.close(numbers)
    with suppress(BrokenPipeError):  # all have ended early
        for at in range(len(descriptions)):
            os.write(pipe, at.to_bytes(_NUMBER))
    os.close(pipe)
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _build_launcher(kernel: Any) -> None:
    """Build what launches a kernel, into the cache: Triton 3.6 runs a C compiler for it, later ones need none."""
    import triton

    if triton.__version__.startswith("3.6."):
        from triton.backends.nvidia.driver import CudaLauncher

        with suppress(Exception):  # the machine has no CUDA driver to link
            CudaLauncher(kernel.src, kernel.metadata)


if __name__ == "__main__":
    main()
