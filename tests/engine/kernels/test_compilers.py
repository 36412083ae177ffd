"""Processes that compile kernels, with Triton's cache on disk in a folder of the test."""

import json

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


def test_kernels_are_compiled_into_the_cache(cache):
    with Compilers(2) as compilers:
        assert compilers.compile([ARRANGE, UNKNOWN, ARRANGE._replace(warps=8)]) == [True, False, True]
        assert compilers.compile([ARRANGE]) == [True]  # from the cache: no second file
    assert set(cubins(cache)) == {4, 8}
    assert all(path.with_suffix(".cubin").stat().st_size > 1000 for path in cubins(cache).values())


def test_none_is_begun_when_the_time_is_over(cache):
    with Compilers(1) as compilers:
        assert compilers.compile([ARRANGE], seconds=0) == [False]
    assert not cubins(cache)


def test_a_process_that_dies_is_no_error(cache):
    with Compilers(1) as compilers:
        compilers._processes[0].kill()
        compilers._processes[0].wait()
        assert compilers.compile([ARRANGE, UNKNOWN]) == [False, False]


def test_processes_end_with_the_block(cache):
    with Compilers(3) as compilers:
        processes = compilers._processes
        assert all(process.poll() is None for process in processes)
    assert all(process.poll() is not None for process in processes)


def test_without_processes_nothing_is_compiled(monkeypatch):
    with Compilers(0) as compilers:
        assert compilers.compile([ARRANGE]) == [False]

    def refused(*_, **__):
        raise BlockingIOError("no more processes")

    monkeypatch.setattr("subprocess.Popen", refused)
    with Compilers(2) as compilers:
        assert compilers.compile([ARRANGE]) == [False]
