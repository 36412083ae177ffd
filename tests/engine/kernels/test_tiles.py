from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels.tiles import EXACT, tiles_for

pytestmark = WITHOUT_GPU


def test_tables_are_sorted_and_cover_any_number_of_lanes():
    tables = {
        precision: [entry.lanes for entry in tiles_for((9, 0), precision)] for precision in ("bf16", "tf32", "fp32")
    }
    for lanes in tables.values():
        assert lanes == sorted(lanes)
        assert lanes[-1] >= 1 << 20
    assert EXACT in tables["bf16"]
    assert EXACT in tables["tf32"]
    assert tiles_for((8, 0), "bf16") is None
