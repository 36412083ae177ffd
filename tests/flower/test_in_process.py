"""Federations on nodes, in one process: every method through the codec equals the serial simulation."""

import numpy as np
import pytest

from fedobp import Config, FedobpError
from fedobp.algorithms import METHODS
from fedobp.flower.server import serve
from flower.cases import SMALL, LocalGrid, prepared


def cases():
    """Every method, in each of its modes, but one that needs a simulation; and what clients of `decoupled` compute."""
    for name, method in METHODS.items():
        if name == "group-oracle":
            continue
        modes = [spec.metadata["choices"] for spec in method.options() if spec.name == "mode"]
        yield from ((name, {"mode": mode}) for mode in modes[0]) if modes else [(name, {})]
    yield from (("decoupled", options) for options in ({"rule": "statistic"}, {"q": 0.9, "soft": 1.0, "warmup": 2}))


@pytest.mark.parametrize(("method", "options"), list(cases()), ids=str)
def test_every_method_equals_the_simulation(method, options, tmp_path):
    equals_the_simulation(tmp_path, method=method, options=options, finetune_epochs=1, val_ratio=0.2)


@pytest.mark.parametrize("method", ["fedobp", "fedavg", "scaffold"])
def test_compressed_messages_equal_the_simulation(method, tmp_path):
    """References and residuals are in the state of clients and in the server's records."""
    equals_the_simulation(tmp_path, method=method, compress_down="8bit", compress_up="4bit", rounds=4)


@pytest.mark.parametrize(
    "parts",
    [{"prior": "serve"}, {"prior": "train", "compress_up": "8bit"}, {"calibrate": "head", "average": 0.9}],
    ids=str,
)
def test_label_priors_and_averages_equal_the_simulation(parts, tmp_path):
    """A node makes them of its own labels; the server learns no label counts."""
    equals_the_simulation(tmp_path, method="scaffold", rounds=4, finetune_epochs=1, **parts)


@pytest.mark.parametrize(
    "more",
    [
        {"metrics": "loss,f1,ece,confusion"},
        {"precision": "fp64"},
        {"partition": "feature"},
        {"partition": "concept", "partition_options": {"groups": 2, "change": "merge"}},
    ],
)
def test_other_settings_equal_the_simulation(more, tmp_path):
    equals_the_simulation(tmp_path, method="fedobp", **more)


def test_groups_are_refused_which_only_a_simulation_knows(tmp_path):
    with pytest.raises(FedobpError, match="group-oracle needs the groups of clients, which only a simulation knows"):
        prepared(tmp_path / "nodes", Config(**SMALL, method="group-oracle", partition="concept"))


@pytest.mark.parametrize("labels", [False, True])
def test_tokens_equal_the_simulation(labels, tmp_path, monkeypatch):
    random = np.random.default_rng(0)
    arrays = {"tokens": random.integers(0, 7, (60, 9)), "vocabulary": 7, "client": np.arange(60) % 5}
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "texts.npz", **arrays, **({"y": np.arange(60) % 3} if labels else {}))
    monkeypatch.setenv("FEDOBP_DATA", str(tmp_path / "data"))
    equals_the_simulation(tmp_path, method="fedavg", dataset="texts", model="lstm", partition="natural")


def equals_the_simulation(tmp_path, **settings):
    config = Config(**{**SMALL, **settings})
    settings, federation = prepared(tmp_path / "nodes", config)
    simulated = federation.run(out=tmp_path / "simulated")
    result = serve(LocalGrid(tmp_path / "nodes", 5), settings, tmp_path / "served", lambda text: None)
    for name in ("metrics.jsonl", "clients.csv"):
        assert (tmp_path / "served" / name).read_text() == (tmp_path / "simulated" / name).read_text()
    one, other = result.state_dict(), simulated.state_dict()
    assert all(one[name].equal(other[name]) for name in other)
