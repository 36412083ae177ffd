"""Compilation for all cards, with each supported version of Triton, and what happens to kernels with problems."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton

from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels import checks, compilation
from fedobp.engine.kernels.cards import known_card
from fedobp.errors import FedobpError

pytestmark = WITHOUT_GPU
HOPPER = known_card("9.0")


@pytest.mark.parametrize("version", ["3.6", "3.7"])
def test_every_kernel_compiles_for_every_card(version, ran):
    """In a separate process, because the kernels of this one are interpreted. `make` installs the older version."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if not triton.__version__.startswith(f"{version}."):
        folder = Path(sys.prefix) / f"triton-{version}"
        if not folder.exists():
            pytest.skip(f"Triton {version} is not in {folder}: make setup puts it there")
        environment["PYTHONPATH"] = str(folder)
    done = ran(Path(__file__).parents[2] / "compile_kernels.py", env=environment, stderr=subprocess.STDOUT)
    assert done.code == 0, done.out
    assert f"Triton {version}." in done.out


def kernel(name="conv1", ttgir="", shared=0):
    return SimpleNamespace(asm={"ttgir": ttgir}, metadata=SimpleNamespace(name=name, shared=shared))


def test_a_kernel_must_fit_its_card():
    assert checks.problems(kernel(shared=227 * 1024), HOPPER) == []
    [problem] = checks.problems(kernel(shared=227 * 1024), known_card("8.6"))
    assert problem == "needs 232,448 bytes of shared memory, and a block has 101,376"


def test_a_product_of_weights_backward_reads_what_was_copied():
    stored = (
        "%b = ttg.local_alloc %x : (tensor<32x128xbf16, #blocked>) -> !ttg.memdesc<32x128xbf16, #shared, #smem>\n"
        "%z = ttng.warp_group_dot %a, %b, %c {inputPrecision = 0 : i32} : tensor<64x32xbf16> * "
        "!ttg.memdesc<32x128xbf16, #shared, #smem> -> tensor<64x128xf32, #mma>\n"
    )
    problem = "has a product whose operand is not copied asynchronously"
    assert checks.problems(kernel("weights_backward", stored), HOPPER) == [problem]
    assert checks.problems(kernel("head", stored), HOPPER) == []


class Launch:
    """A launch on a card that is not there."""

    def __init__(self, name, compiled):
        self.kernel, self.found, self.times, self.variant = SimpleNamespace(__name__=name), compiled, 0, object()

    def compiled(self):
        return self.found

    def __call__(self):
        self.times += 1


@pytest.fixture
def no_cuda(monkeypatch):
    from contextlib import nullcontext

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(compilation, "Launch", Launch)


@pytest.mark.usefixtures("no_cuda")
def test_all_variants_are_compiled_and_a_race_is_refused(monkeypatch):
    good = [Launch(name, kernel(name)) for name in ("conv1", "conv2")]
    compilation.compile_all(good, torch.device("cuda"), HOPPER)
    assert [one.times for one in good] == [1, 1]
    bad = [*good, Launch("dense", kernel("dense", shared=1 << 20))]
    compilation.compile_all(bad, torch.device("cuda"), None)
    with pytest.raises(FedobpError, match=r"kernel dense cannot be used on this card: needs .* use --kernels off"):
        compilation.compile_all(bad, torch.device("cuda"), HOPPER)
    assert bad[-1].times == 1  # not launched again: it is checked before


@pytest.mark.usefixtures("no_cuda")
def test_what_cannot_be_read_is_refused_unless_that_is_allowed():
    unreadable = kernel(ttgir="ttg.remote_copy %a : !ttg.memdesc<x>\n")
    assert checks.problems(unreadable, HOPPER, must_read=False) == []
    one = Launch("conv1", unreadable)
    compilation.compile_all([one], torch.device("cuda"), HOPPER, must_read=False)
    assert one.times == 1
    with pytest.raises(FedobpError, match=r"kernel conv1 .* has IR that cannot be read: it has .* ttg.remote"):
        compilation.compile_all([one], torch.device("cuda"), HOPPER)


def test_kernels_of_custom_losses_are_checked_once():
    good, bad = Launch("conv1", kernel()), Launch("conv2", kernel(shared=1 << 20))
    compilation.launch_checked([good, good], HOPPER, must_read=True)
    assert good.times == 2
    with pytest.raises(FedobpError, match="kernel conv2 cannot be used on this card: needs"):
        compilation.launch_checked([good, bad], HOPPER, must_read=True)
    assert bad.times == 0
    compilation.launch_checked([bad], None, must_read=True)


class Specimen:
    def __init__(self, ttgir):
        self.ttgir = ttgir

    def compiled_for(self, capability):
        if self.ttgir is None:
            raise checks.CompileError("PassManager::run failed")
        return kernel(ttgir=self.ttgir)


READ = "%a = ttg.local_alloc : () -> !ttg.memdesc<1xbf16>\n{}%x = ttg.local_load %a : !ttg.memdesc<1xbf16> -> t\n"
COPY = "%t = ttg.async_copy_global_to_local %p, %a : x -> <1xbf16>\n%g = ttg.async_commit_group tokens %t\n"
SYNCHRONOUS = READ.format(COPY + "%w = ttg.async_wait %g {num = 0 : i32}\n")
PRODUCT = "%z = ttng.warp_group_dot %a, %a, %c {isAsync = true} : !ttg.memdesc<x> * !ttg.memdesc<x> -> t\n"


@pytest.mark.parametrize(
    ("ttgir", "readable", "sentence"),
    [
        (SYNCHRONOUS, True, "a race cannot occur: products read registers on this card"),
        (SYNCHRONOUS + PRODUCT, True, "the known races do not occur: the compiler waits for the products"),
        (SYNCHRONOUS + PRODUCT + COPY, True, "finds the known race in one"),
        (READ.format(""), False, "no race is found in one without its waits"),
        (
            READ.format("ttg.remote_copy %a : !ttg.memdesc<x>\n"),
            False,
            "it has the operation ttg.remote_copy",
        ),
        (None, False, "one cannot be compiled: PassManager::run failed"),
    ],
)
def test_what_the_check_says_of_a_version_of_triton(ttgir, readable, sentence, monkeypatch):
    monkeypatch.setattr("fedobp.engine.kernels.specimens.specimens", lambda capability: {"one": Specimen(ttgir)})
    found = checks.hazard_check(HOPPER)
    assert found.readable == readable
    assert sentence in found.sentence
