"""Where the fused kernels are used, and the warnings where they cannot be."""

import sys
import warnings

import pytest
import torch

from engine.kernels.interpreted import CPU, WITHOUT_GPU
from fedobp.engine.kernels import cache, dispatch, fused_for, is_supported
from fedobp.engine.kernels.cards import Card
from fedobp.engine.kernels.checks import HazardCheck
from fedobp.engine.kernels.tiles import Table, default_table, shipped_table
from fedobp.engine.kernels.tuning import Tuned
from fedobp.errors import FedobpError
from fedobp.models import NETS, Model

pytestmark = WITHOUT_GPU


@pytest.mark.parametrize(
    ("shape", "classes", "batch", "precision", "right"),
    [
        ((1, 28, 28), 10, 32, "bf16", True),
        ((3, 32, 32), 128, 16, "fp32", True),
        ((4, 32, 32), 2, 64, "tf32", True),
        ((3, 32, 32), 129, 32, "bf16", False),
        ((3, 32, 32), 10, 15, "bf16", False),
        ((3, 32, 32), 10, 65, "bf16", False),
        ((3, 32, 32), 10, 32, "fp64", False),
        ((3, 30, 30), 10, 32, "bf16", False),
        ((5, 32, 32), 10, 32, "bf16", False),
    ],
)
def test_supported_models_batches_and_precisions(shape, classes, batch, precision, right):
    assert is_supported(Model("cnn", shape, classes), batch, precision) == right


def test_another_network_under_the_papers_name_is_not_supported(monkeypatch):
    assert not is_supported(Model("mlp", (1, 28, 28), 10), 32, "bf16")
    monkeypatch.setitem(NETS, "cnn", NETS["cnn-small"])
    assert not is_supported(Model("cnn", (1, 28, 28), 10), 32, "bf16")


CUDA = torch.device("cuda")
CNN = Model("cnn", (1, 28, 28), 10)


class Fused:
    """Kernels on a card that is not there."""

    def __init__(self, model, batch, precision, tiles, device, card, must_read):
        self.tiles, self.card, self.must_read = tiles, card, must_read


class Machine:
    """What the machine of a test has, and what was asked of it."""

    def __init__(self):
        self.card = Card((9, 0), 227 * 1024, "NVIDIA H200")
        self.readable, self.wrong = HazardCheck(True, "finds the known race"), None
        self.asked = []

    def hazard_check(self, card):
        self.asked.append("races")
        return self.readable

    def disagreement(self, fused, model):
        self.asked.append("self-check")
        return self.wrong

    def compile_ahead(self, fused, model, card):
        assert card == self.card
        self.asked.append("compile")

    def tune(self, card, precision, device, seconds, must_read):
        self.asked.append("tune")
        assert (card, seconds) == (self.card, 60)
        table = Table(default_table(card.capability).entries[-1:], "tuned")
        path = cache.save("tiles", cache.key_for(card, precision), table.to_json())
        return Tuned(table, 48.2, path, [])


@pytest.fixture
def machine(monkeypatch, tmp_path):
    found = Machine()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cache, "_kept", {})
    monkeypatch.setattr(dispatch, "card_of", lambda device: found.card)
    monkeypatch.setattr(dispatch, "triton_problem", lambda: None)
    monkeypatch.setattr("fedobp.engine.kernels.fused.Fused", Fused)
    monkeypatch.setattr("fedobp.engine.kernels.checks.hazard_check", found.hazard_check)
    monkeypatch.setattr("fedobp.engine.kernels.self_check.disagreement", found.disagreement)
    monkeypatch.setattr("fedobp.engine.kernels.self_check.compile_ahead", found.compile_ahead)
    monkeypatch.setattr("fedobp.engine.kernels.tuning.tune", found.tune)
    dispatch._warn_once.cache_clear()
    return found


@pytest.fixture(autouse=True)
def _warnings_are_new():
    dispatch._warn_once.cache_clear()


def test_a_card_with_a_shipped_table_is_checked_once_a_setting(machine):
    fused = fused_for(CNN, 32, "bf16", "auto", CUDA)
    assert (fused.tiles, fused.card) == (shipped_table((9, 0), "bf16").entries, machine.card)
    assert fused.must_read
    assert machine.asked == ["compile", "races", "self-check"]
    fused_for(CNN, 32, "bf16", "auto", CUDA)
    assert machine.asked == ["compile", "races", "self-check"]
    for other in ((CNN, 20, "bf16"), (CNN, 32, "tf32"), (Model("cnn", (3, 32, 32), 10), 32, "bf16")):
        machine.asked.clear()
        fused_for(*other, "auto", CUDA)
        assert machine.asked == ["compile", "self-check"]
    machine.asked.clear()
    machine.card = machine.card._replace(name="NVIDIA H100")
    fused_for(CNN, 32, "bf16", "auto", CUDA)
    assert machine.asked == ["compile", "races", "self-check"]


def test_a_card_without_a_table_is_tuned_once(machine):
    machine.card = Card((8, 9), 99 * 1024, "NVIDIA L4")
    with pytest.warns(UserWarning, match="kernels") as said:
        fused = fused_for(CNN, 32, "bf16", "auto", CUDA)
    before, after = (str(one.message) for one in said)
    assert before == "tuning the kernels for NVIDIA L4 in bf16, once, for up to 60 s"
    assert "were tuned for NVIDIA L4 in bf16 in 48 s; the table is kept in " in after
    assert len(fused.tiles) == 1
    assert machine.asked == ["races", "tune", "self-check"]
    assert fused_for(CNN, 32, "bf16", "auto", CUDA).tiles == fused.tiles
    assert machine.asked == ["races", "tune", "self-check"]


def test_the_users_own_table_comes_before_the_shipped_one(machine):
    own = Table(default_table((9, 0)).entries[-1:], "tuned")
    path = cache.save("tiles", cache.key_for(machine.card, "bf16"), own.to_json())
    assert fused_for(CNN, 32, "bf16", "auto", CUDA).tiles == own.entries
    path.write_text(path.read_text().replace("conv1", "conv9"))
    assert fused_for(CNN, 32, "bf16", "auto", CUDA).tiles == shipped_table((9, 0), "bf16").entries


def refused(machine, sentence, mode_on=None):
    """The general path is taken with one warning, and with `on` it is an error; nothing is remembered."""
    with pytest.warns(UserWarning, match=f"{sentence}.*: the general path trains, several times slower"):
        assert fused_for(CNN, 32, "bf16", "auto", CUDA) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_for(CNN, 32, "bf16", "auto", CUDA) is None
        assert fused_for(CNN, 32, "bf16", "off", CUDA) is None
    if mode_on is None:
        with pytest.raises(FedobpError, match=f"--kernels on: {sentence}"):
            fused_for(CNN, 32, "bf16", "on", CUDA)


def test_a_failed_self_check_is_named_with_its_numbers(machine):
    machine.wrong = "a step differs from the reference by 0.31 in conv2.weight (at most 0.2 is allowed)"
    refused(machine, r"the fused kernels failed their self-check on NVIDIA H200 \(a step differs .* by 0.31 in conv2")
    assert machine.asked.count("self-check") == 2  # once, and once for `on`, which may use other kernels
    machine.wrong = None
    cache._kept.clear()  # as in the next process
    assert fused_for(CNN, 32, "bf16", "auto", CUDA) is not None


def test_ir_that_cannot_be_read_runs_only_when_asked_for(machine):
    machine.readable = HazardCheck(False, "the IR of summed_too cannot be read: it has the operation ttg.new")
    refused(
        machine, r"the fused kernels cannot be checked for races with Triton \d.*ttg.new.*--kernels on", mode_on=True
    )
    machine.asked.clear()
    assert not fused_for(CNN, 32, "bf16", "on", CUDA).must_read
    assert machine.asked == ["compile", "races", "self-check"]
    # What `on` has passed is not passed for `auto`.
    dispatch._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="cannot be checked for races"):
        assert fused_for(CNN, 32, "bf16", "auto", CUDA) is None


def test_the_check_for_races_is_repeated_until_it_reads_what_triton_compiles(machine):
    machine.readable = HazardCheck(False, "no race is found in summed_too without its waits")
    assert [dispatch.race_check(machine.card) for _ in range(2)] == [machine.readable] * 2
    assert machine.asked == ["races"] * 2
    machine.readable = HazardCheck(True, "finds the known race in summed_too")
    assert [dispatch.race_check(machine.card) for _ in range(2)] == [machine.readable] * 2
    assert machine.asked == ["races"] * 3


def test_ir_is_read_before_anything_is_tuned(machine):
    machine.card, machine.readable = Card((8, 9), 99 * 1024, "NVIDIA L4"), HazardCheck(False, "no race is found")
    with pytest.warns(UserWarning, match="cannot be checked for races"):
        assert fused_for(CNN, 32, "bf16", "auto", CUDA) is None
    assert machine.asked == ["races"]


def test_a_kernel_that_does_not_compile_fails_the_self_check(machine, monkeypatch):
    class Other(Exception):
        """As Triton's own."""

    def disagreement(fused, model):
        raise Other("PassManager::run failed\nmuch more")

    monkeypatch.setattr("fedobp.engine.kernels.self_check.disagreement", disagreement)
    refused(machine, r"failed their self-check on NVIDIA H200 \(PassManager::run failed\)", mode_on=True)

    def full(fused, model):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("fedobp.engine.kernels.self_check.disagreement", full)
    cache._kept.clear()
    with pytest.raises(torch.OutOfMemoryError):
        fused_for(CNN, 32, "bf16", "auto", CUDA)


def test_tuning_that_fails_takes_the_general_path(machine, monkeypatch):
    def tune(*given, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.67 GiB.")

    machine.card = Card((8, 9), 99 * 1024, "NVIDIA L4")
    monkeypatch.setattr("fedobp.engine.kernels.tuning.tune", tune)
    with pytest.warns(UserWarning, match="kernels") as said:
        assert fused_for(CNN, 32, "bf16", "auto", CUDA) is None
    assert "could not be tuned for NVIDIA L4 (CUDA out of memory" in str(said[-1].message)
    assert "the general path trains" in str(said[-1].message)


def test_a_card_of_another_maker(machine, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    refused(machine, "the fused kernels need an NVIDIA card")


def test_a_card_that_is_too_old(machine):
    machine.card = Card((7, 5), 64 * 1024, "Quadro RTX 6000")
    refused(machine, r"the fused kernels need compute capability 8\.0 or newer, and Quadro RTX 6000 has 7\.5")


def test_kernels_that_are_not_asked_for_or_not_supported(machine):
    assert fused_for(CNN, 32, "bf16", "off", CUDA) is None
    assert fused_for(CNN, 32, "bf16", "auto", CPU) is None
    assert fused_for(CNN, 32, "fp64", "auto", CUDA) is None
    assert machine.asked == []
    with pytest.raises(FedobpError, match=r"--kernels on needs a CUDA device: use --kernels auto"):
        fused_for(CNN, 32, "bf16", "on", CPU)
    with pytest.raises(FedobpError, match=r"--kernels on needs the paper's CNN .* --batch-size of 16 to 64"):
        fused_for(CNN, 8, "bf16", "on", CUDA)


class Other:
    def __init__(self, version):
        self.__version__ = version


class Broken:
    __version__ = "3.6.0"

    @property
    def runtime(self):
        raise RuntimeError("Failed to find C compiler. Please specify one.\nAnd more")


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (None, "need Triton, which CUDA builds of torch bring on Linux (pip install 'triton>=3.6,<3.8')"),
        (Other("3.5.1"), "need Triton 3.6 or newer, and this is 3.5.1 (update torch)"),
        (Other("2.3.0"), "need Triton 3.6 or newer, and this is 2.3.0 (update torch)"),
        (Other("main"), "need a working Triton, and this one fails (invalid literal for int() with base 10: 'main')"),
        (object(), "need a working Triton, and this one fails ('object' object has no attribute '__version__')"),
        (Broken(), "need a working Triton, and this one fails (Failed to find C compiler. Please specify one.)"),
    ],
)
def test_a_triton_that_does_not_work(monkeypatch, module, sentence):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", module)
    assert dispatch.triton_problem() == f"the fused kernels {sentence}"


def test_newer_versions_of_triton_are_read_before_they_are_judged(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for version in ("3.6.0", "3.7.1", "3.10.0+git123", "4.0.0"):
        monkeypatch.setitem(sys.modules, "triton", Other(version))
        assert dispatch.triton_problem(launches=False) is None
