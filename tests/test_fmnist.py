"""The paper's CNN against the same protocol coded independently in the plainest form, on the same batches."""

import os
from pathlib import Path

import numpy as np
import pytest
from plain_federation import plain_run

from fedobp import Config, Federation
from fedobp.keys import Purpose, fold, permutation

FOLDER = Path(os.environ.get("FEDOBP_DATA", "."))


def keyed_order(round, client, epoch, n):
    """The order of the package's `Train`, which is item 1 of the programs of FedOBP and FedAvg."""
    return permutation(fold(42, round, client, Purpose.TRAIN, 1, epoch), n)


def both(arrays, method, clients, rounds, participation, data_dir):
    config = Config(
        dataset="fmnist", data_dir=str(data_dir), clients=clients, rounds=rounds, participation=participation,
        sampling="published", eval_every=rounds, method=method,
    )  # fmt: skip
    plain = plain_run(
        arrays["x"], arrays["y"], method=method, classes=10, clients=clients, alpha=0.1, rounds=rounds,
        participation=participation, epochs=5, batch_size=32, lr=0.01, seed=42, q=0.99993, mean=0.286, std=0.3205,
        order=keyed_order,
    )  # fmt: skip
    return Federation(config).run().accuracy.pooled, plain


@pytest.mark.parametrize("method", ["fedobp", "fedavg"])
def test_a_small_federation_equals_the_plain_form(method, tmp_path):
    generator = np.random.default_rng(0)
    y = np.arange(600) % 10
    patterns = generator.integers(0, 256, (10, 28, 28))
    x = (0.6 * patterns[y] + 0.4 * generator.integers(0, 256, (600, 28, 28))).astype(np.uint8)
    np.savez(tmp_path / "fmnist.npz", x=x, y=y)
    ours, plain = both({"x": x, "y": y}, method, clients=6, rounds=4, participation=0.5, data_dir=tmp_path)
    # float32 in another order of sums, as another number of threads gives, may turn one of the 148 answers.
    assert ours == pytest.approx(plain, abs=100 / 148 + 1e-9)
    assert 10 < ours < 100


@pytest.mark.slow
@pytest.mark.skipif(
    not (FOLDER / "fmnist.npz").exists(), reason="needs fmnist.npz in the folder that FEDOBP_DATA names"
)
@pytest.mark.parametrize("method", ["fedobp", "fedavg"])
def test_twenty_rounds_on_real_fashion_mnist_agree_with_the_plain_form(method):
    arrays = np.load(FOLDER / "fmnist.npz", allow_pickle=False)
    ours, plain = both(arrays, method, clients=100, rounds=20, participation=0.1, data_dir=FOLDER)
    print(f"{method}: ours {ours:.2f}, plain {plain:.2f}")  # noqa: T201 (shown by pytest -s, and when it fails)
    assert ours == pytest.approx(plain, abs=1)
