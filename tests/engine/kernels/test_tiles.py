import json

import pytest

from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels.cards import KNOWN, known_card
from fedobp.engine.kernels.tiles import EXACT, default_table, shipped_table, table_from_json
from fedobp.errors import FedobpError

pytestmark = WITHOUT_GPU
PRECISIONS = ("bf16", "tf32", "fp32")


def test_tables_are_sorted_and_cover_any_number_of_lanes():
    tables = {
        precision: [entry.lanes for entry in shipped_table((9, 0), precision).entries] for precision in PRECISIONS
    }
    for lanes in tables.values():
        assert lanes == sorted(lanes)
        assert lanes[-1] >= 1 << 20
    assert EXACT in tables["bf16"]
    assert EXACT in tables["tf32"]


def test_every_card_has_a_table_to_start_from():
    for capability in KNOWN:
        table = default_table(capability)
        lanes = [entry.lanes for entry in table.entries]
        assert lanes == sorted(set(lanes))
        assert lanes[-1] >= 1 << 20
        # With more warps Triton 3.6 does not compile it for 10.0.
        assert capability[0] != 10 or {one.weights_backward.warps for one in table.entries} == {2}
    assert shipped_table((8, 6), "bf16") is None


def test_a_table_is_known_by_its_hash_and_survives_a_file():
    table = shipped_table((9, 0), "bf16")
    again = table_from_json(json.loads(json.dumps(table.to_json())))
    assert (again.entries, again.hash, again.source) == (table.entries, table.hash, "tuned")
    assert len({table.hash, default_table((10, 0)).hash, shipped_table((9, 0), "tf32").hash}) == 3


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: None,
        lambda content: [],
        lambda content: content[:-1],  # no entry for many lanes
        lambda content: content[::-1],
        lambda content: [{**content[-1], "lanes": "many"}],
        lambda content: [{**content[-1], "conv1": [64, 1, 4]}],
        lambda content: [{**content[-1], "conv1": [64, 1.5, 4, 2]}],
        lambda content: [{**content[-1], "conv1": [64, -1, 4, 2]}],
        lambda content: [{**content[-1], "conv3": [64, 1, 4, 2]}],
        lambda content: [{**content[-1], "splits": []}],
        lambda content: [{**content[-1], "splits": {}}],
        lambda content: [{**content[-1], "splits": [5]}],
        lambda content: [{"lanes": 1 << 30}],
        lambda content: 3,
    ],
)
def test_a_damaged_table_is_refused(damage):
    with pytest.raises(ValueError, match="not a tile table"):
        table_from_json(damage(shipped_table((9, 0), "bf16").to_json()))


def test_cards_by_their_compute_capability():
    assert known_card("8.6").shared == known_card("12.0").shared == 99 * 1024
    assert known_card("9.0").capability == (9, 0)
    assert known_card("10.0").version == "10.0"
    with pytest.raises(FedobpError, match=r"unknown compute capability '8\.5'"):
        known_card("8.5")
