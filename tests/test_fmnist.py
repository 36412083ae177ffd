"""The paper's CNN on real Fashion-MNIST, against the same protocol coded independently in the plainest form."""

import os
from pathlib import Path

import numpy as np
import pytest
from plain_federation import plain_run

from fedobp import Config, Federation

FOLDER = Path(os.environ.get("FEDOBP_DATA", "."))


@pytest.mark.slow
@pytest.mark.skipif(
    not (FOLDER / "fmnist.npz").exists(), reason="needs fmnist.npz in the folder that FEDOBP_DATA names"
)
@pytest.mark.parametrize("method", ["fedobp", "fedavg"])
def test_within_three_points_of_the_plain_form(method):
    config = Config(dataset="fmnist", rounds=20, sampling="published", eval_every=20)
    assert (config.clients, config.alpha, config.participation, config.epochs) == (100, 0.1, 0.1, 5)
    assert Config(dataset="fmnist").options["q"] == 0.99993
    ours = Federation(config).run(method).accuracy.pooled
    arrays = np.load(FOLDER / "fmnist.npz")
    plain = plain_run(
        arrays["x"], arrays["y"], method=method, classes=10, clients=100, alpha=0.1, rounds=20, participation=0.1,
        epochs=5, batch_size=32, lr=0.01, seed=42, q=0.99993, mean=0.286, std=0.3205,
    )  # fmt: skip
    assert ours == pytest.approx(plain, abs=3)
