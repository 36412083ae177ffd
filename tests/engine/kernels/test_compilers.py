"""Processes that compile kernels, with Triton's cache on disk in a folder of the test."""

import json
import os
import select
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels.compilers import Compilers, Description

pytestmark = WITHOUT_GPU
ARRANGE = Description(
    "fedobp.engine.kernels.param_layout", "arrange", ["*fp32", "*fp32", "*i32", "i32", "i32"], [512], 4, 3, (8, 0)
)
UNKNOWN = ARRANGE._replace(kernel="rearrange")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET")  # the processes compile
    return tmp_path


def cubins(folder):
    return {json.loads(path.read_text())["num_warps"]: path for path in folder.glob("*/arrange.json")}


def members(group):
    """Return the processes of a group that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            found += [int(path.parent.name)] if int(its_group) == group and state not in "ZX" else []
    return found


def test_kernels_are_compiled_into_the_cache(cache):
    with Compilers(2) as compilers:
        assert set(compilers.compile([ARRANGE, UNKNOWN, ARRANGE._replace(warps=8)])) == {0, 2}
        assert list(compilers.compile([UNKNOWN, ARRANGE])) == [1]  # from the cache: no second file
    assert set(cubins(cache)) == {4, 8}
    assert all(path.with_suffix(".cubin").stat().st_size > 1000 for path in cubins(cache).values())


def test_one_process_compiles_all_kernels_in_turn(cache):
    with Compilers(1) as compilers:
        assert list(compilers.compile([ARRANGE, UNKNOWN, ARRANGE._replace(warps=8)])) == [0, 2]


def test_none_is_begun_when_the_time_is_over(cache):
    with Compilers(1) as compilers:
        assert list(compilers.compile([ARRANGE], seconds=0)) == []
        assert list(compilers.compile([ARRANGE])) == [0]


def test_a_process_that_dies_is_no_error(cache):
    with Compilers(1) as compilers:
        compilers._process.kill()
        compilers._process.wait()
        assert list(compilers.compile([ARRANGE, UNKNOWN])) == []


def test_all_processes_end_with_the_block(cache):
    """Also those that it has forked, and that have more to compile."""
    with Compilers(2) as compilers:
        sizes = [2**power for power in range(5, 11)]
        done = compilers.compile([ARRANGE._replace(constants=[size], warps=w) for size in sizes for w in (1, 2, 4, 8)])
        next(done)
        forks = [pid for pid in members(compilers._process.pid) if pid != compilers._process.pid]
        handles = [os.pidfd_open(pid) for pid in forks]
        assert forks
    for handle in handles:  # it can be read when its process has ended
        select.select([handle], [], [])
        os.close(handle)


def test_what_the_compiler_prints_is_no_answer(cache, monkeypatch):
    monkeypatch.setenv("NVPTX_ENABLE_DUMP", "1")
    with Compilers(1) as compilers:
        assert list(compilers.compile([ARRANGE])) == [0]


def test_as_many_processes_as_can_be_forked_compile(cache, monkeypatch):
    """None, here: then nothing is compiled, and the next list may be."""
    code = "import os, runpy, sys; os.fork = lambda: os.open('/no such folder', 0); sys.argv = sys.argv[1:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    start = subprocess.Popen

    def without_forks(command, **how):
        return start([command[0], "-c", code, *command[2:]], **how)

    monkeypatch.setattr("subprocess.Popen", without_forks)
    with Compilers(2) as compilers:
        assert list(compilers.compile([ARRANGE])) == []
        assert list(compilers.compile([ARRANGE])) == []
        assert compilers._process.poll() is None


def test_without_processes_nothing_is_compiled(monkeypatch):
    with Compilers(0) as compilers:
        assert list(compilers.compile([ARRANGE])) == []

    def refused(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("subprocess.Popen", refused)
    with Compilers(2) as compilers:
        assert list(compilers.compile([ARRANGE])) == []
