"""Where the fused kernels are used, and the warnings where they cannot be."""

import sys
import warnings

import pytest
import torch

from engine.kernels.interpreted import CPU, WITHOUT_GPU
from fedobp.engine.kernels import dispatch, fused_for, is_supported
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


def test_a_gpu_without_tiles_warns_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Quadro")
    dispatch._warn_once.cache_clear()
    model, cuda = Model("cnn", (1, 28, 28), 10), torch.device("cuda")
    with pytest.warns(UserWarning, match="no kernels are tuned for bf16 on Quadro, so the general path trains"):
        assert fused_for(model, 32, "bf16", cuda) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_for(model, 32, "bf16", cuda) is None
        assert fused_for(model, 32, "bf16", CPU) is None
        assert fused_for(model, 32, "fp64", cuda) is None


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
        (None, r"need Triton, which is not installed \(pip install 'triton==3\.6\.\*'\)"),
        (Other("3.5.1"), r"need Triton 3\.6, and this is 3\.5\.1 \(pip install 'triton==3\.6\.\*'\)"),
        (Other("3.10.0"), r"need Triton 3\.6, and this is 3\.10\.0"),
        (Broken(), r"need a working Triton, and this one fails \(Failed to find C compiler. Please specify one.\)"),
    ],
)
def test_without_a_working_triton_the_general_path_is_used(monkeypatch, module, sentence):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", module)
    dispatch._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=sentence):
        assert fused_for(Model("cnn", (1, 28, 28), 10), 32, "bf16", torch.device("cuda")) is None
