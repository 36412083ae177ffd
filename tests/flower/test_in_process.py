"""Federations on nodes, in one process: every method through the codec equals the serial simulation."""

import pytest

from fedobp import Config
from fedobp.algorithms import METHODS
from fedobp.flower.server import serve
from flower.cases import SMALL, LocalGrid, prepared


def cases():
    """Every method, in each of its modes."""
    for name, method in METHODS.items():
        modes = [spec.metadata["choices"] for spec in method.options() if spec.name == "mode"]
        yield from ((name, {"mode": mode}) for mode in modes[0]) if modes else [(name, {})]


@pytest.mark.parametrize(("method", "options"), list(cases()), ids=str)
def test_every_method_equals_the_simulation(method, options, tmp_path):
    config = Config(**SMALL, method=method, options=options, finetune_epochs=1, val_ratio=0.2)
    settings, federation = prepared(tmp_path / "nodes", config)
    simulated = federation.run(out=tmp_path / "simulated")
    result = serve(LocalGrid(tmp_path / "nodes", 5), settings, tmp_path / "served", lambda text: None)
    for name in ("metrics.jsonl", "clients.csv"):
        assert (tmp_path / "served" / name).read_text() == (tmp_path / "simulated" / name).read_text()
    one, other = result.state_dict(), simulated.state_dict()
    assert all(one[name].equal(other[name]) for name in other)
