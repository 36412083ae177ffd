"""What only a CUDA card can show. Run there with: PYTHONPATH=src python -m pytest tests/gpu"""

import pytest
import torch

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.importance import above

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card that torch can use")

SMALL = {"clients": 8, "rounds": 4, "participation": 0.5, "epochs": 2, "lr": 0.05}


def vectors(result):
    return torch.stack(
        [torch.cat([tensor.reshape(-1) for tensor in result.state_dict(client).values()]) for client in range(8)]
    )


@pytest.mark.parametrize("method", METHODS)
def test_cuda_equals_cpu_in_float64(method):
    on_cpu, on_cuda = (Federation(Config(**SMALL, precision="fp64", device=device)) for device in ("cpu", "cuda"))
    ours, oracle = on_cuda.run(method), on_cpu.run(method)
    assert torch.allclose(vectors(ours), vectors(oracle), rtol=0, atol=1e-9)
    assert ours.accuracy == oracle.accuracy
    assert ours.bytes == oracle.bytes


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_twice(method, tmp_path):
    for name in ("first", "second"):
        Federation(Config(**SMALL, device="cuda")).run(method, out=tmp_path / name)
    for name in ("config.toml", "metrics.jsonl", "models/global.safetensors", "models/clients.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_auto_takes_the_card():
    assert Config().device == "cuda"


def test_thresholds_agree_with_the_cpu():
    score = torch.rand(10, 878_538, generator=torch.Generator().manual_seed(0))
    for q in (0.99998, 0.995, 0.3, 0.0, 1.0):
        assert torch.equal(above(score.cuda(), q).cpu(), above(score, q))


def test_the_callers_cuda_generator_is_left_alone():
    before = torch.cuda.get_rng_state()
    Federation(Config(**SMALL, device="cuda")).run("fedobp")
    assert torch.equal(torch.cuda.get_rng_state(), before)
