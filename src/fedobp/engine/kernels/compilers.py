"""Compilation of kernels by other processes: within one, threads that compile slow each other down.

A kernel is described by text, so that a process needs neither torch nor the tensors of a launch. What it compiles is
then in Triton's cache on disk, where this process finds it. Run as a file, this module compiles what it reads, one
description a line, and answers each with a line.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from types import ModuleType
from typing import Any, NamedTuple

_PACKAGES = ("fedobp", "fedobp.engine", "fedobp.engine.kernels")
_DONE = "done\n"


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


class Compilers:
    """Processes that compile kernels into Triton's cache on disk, one for each core of this process, until closed."""

    def __init__(self, most: int) -> None:
        """Start them, at most so many; where none can be started, nothing is compiled here."""
        self._processes: list[subprocess.Popen[str]] = []
        pipe = subprocess.PIPE
        with suppress(OSError):
            for _ in range(min(most, len(os.sched_getaffinity(0)))):
                command = [sys.executable, "-P", __file__]
                process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
                self._processes.append(process)

    def __enter__(self) -> "Compilers":
        """They run already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def compile(self, descriptions: Sequence[Description], seconds: float = float("inf")) -> list[bool]:
        """Compile kernels; return for each whether it was done. None is begun after these seconds."""
        until, done = time.monotonic() + seconds, [False] * len(descriptions)
        waiting: SimpleQueue[tuple[int, Description]] = SimpleQueue()
        for item in enumerate(descriptions):
            waiting.put(item)

        def work(process: "subprocess.Popen[str]") -> None:
            assert process.stdin
            assert process.stdout
            while time.monotonic() < until:
                try:
                    at, one = waiting.get_nowait()
                    process.stdin.write(json.dumps(one) + "\n")
                    process.stdin.flush()
                except (Empty, OSError):  # nothing is left, or the process has died
                    return
                done[at] = process.stdout.readline() == _DONE

        with ThreadPoolExecutor(max(1, len(self._processes))) as pool:
            list(pool.map(work, self._processes))
        return done


def main() -> None:
    """Compile what standard input describes."""
    # Kernels are imported without the code of the packages around them, which imports torch: that takes seconds.
    folder = Path(__file__).parents[2]
    for name in _PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    for line in sys.stdin:
        answer = _DONE
        try:
            compile_described(Description(*json.loads(line)))
        except Exception:  # the compiler and its assembler raise their own, unrelated classes
            answer = "failed\n"
        sys.stdout.write(answer)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
