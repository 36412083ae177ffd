import pytest
import torch

from fedobp.engine import dtype_of
from fedobp.engine.precision import autocast, deterministic, serial_threads
from fedobp.models import Model

PRECISIONS = ["fp32", "fp64", "tf32", "bf16"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_settings_are_restored_even_after_an_error(precision):
    def settings():
        cudnn = torch.backends.cudnn
        return (
            torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark,
            cudnn.deterministic,
        )  # fmt: skip

    def fail():
        with deterministic(precision, threads=1):
            tf32 = precision in ("tf32", "bf16")
            assert settings() == (1, tf32, tf32, False, True)
            raise ZeroDivisionError

    before = settings()
    with pytest.raises(ZeroDivisionError):
        fail()
    assert settings() == before


def test_small_models_are_trained_on_one_thread(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert serial_threads(Model("mlp", (4,), 2)) == 1
    assert serial_threads(Model("cnn", (1, 28, 28), 10)) == 7


@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_products_are_in_bfloat16(precision):
    dtype = dtype_of(precision)
    assert dtype == (torch.float64 if precision == "fp64" else torch.float32)
    matrix = torch.ones(2, 2, dtype=dtype)
    with autocast(precision, matrix):
        assert (matrix @ matrix).dtype == (torch.bfloat16 if precision == "bf16" else dtype)
