from itertools import product

import pytest

from engine.kernels.interpreted import WITHOUT_GPU
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.shared_memory import fitting, shared_bound
from fedobp.engine.kernels.tiles import Tile, shipped_table

pytestmark = WITHOUT_GPU

KIB = 1024
CIFAR = Shapes(32, 3, 10, 32)
# Bounds depend on the number of classes only as rounded up to 16, 32, 64 or 128.
SHAPES = [Shapes(*sizes) for sizes in product((28, 32), (1, 4), (2, 17, 62, 128), (16, 32, 64))]
ENTRIES = [
    (precision, entry) for precision in ("bf16", "tf32", "fp32") for entry in shipped_table((9, 0), precision).entries
]
CARDS = [((8, 0), 163), ((8, 6), 99), ((9, 0), 227), ((10, 0), 227), ((12, 0), 99)]


def tiles_of(entry):
    return {name: tile for name, tile in vars(entry).items() if isinstance(tile, Tile)}


def bounds(entry, shapes, precision, capability):
    return {name: shared_bound(name, tile, shapes, precision, capability) for name, tile in tiles_of(entry).items()}


def test_bounds_of_conv2_count_tiles_that_are_copied_ahead():
    tile = (64 * 32 + 4 * 64 * 32) * 2  # weights, and the pixels of four positions
    assert shared_bound("conv2", Tile(64, 0, 4, 4), CIFAR, "bf16", (8, 6)) == 3 * tile + 1024
    assert shared_bound("conv2", Tile(64, 0, 4, 4), CIFAR, "bf16", (9, 0)) == 4 * tile + 1024
    assert shared_bound("conv2", Tile(64, 0, 4, 4), CIFAR, "bf16", (10, 0)) == 4 * tile + 1024
    assert shared_bound("conv2", Tile(64, 0, 2, 4), CIFAR, "bf16", (9, 0)) == 3 * tile + 1024  # too few warps
    assert shared_bound("conv2", Tile(64, 0, 4, 4), CIFAR, "fp32", (9, 0)) == 3 * 2 * tile + 1024


def test_bounds_of_dense_grow_with_the_batch_and_the_classes():
    tile = Tile(64, 64, 4, 3)
    assert shared_bound("dense", tile, CIFAR, "bf16", (9, 0)) == 2 * (32 * 64 * 2 + 64 * 64 * 4) + 1024
    assert shared_bound("dense", tile, Shapes(32, 3, 10, 64), "bf16", (9, 0)) == 3 * (64 * 64 * 2 + 64 * 64 * 4) + 1024
    # After a loop over few columns, the head's weights need more.
    small, many = Tile(64, 16, 4, 2), Shapes(32, 3, 128, 16)
    assert shared_bound("dense", small, many, "bf16", (9, 0)) == 16 * 64 * 2 + 128 * 64 * 4 + 1024


def test_bounds_of_the_head_do_not_depend_on_stages():
    shapes = Shapes(32, 3, 128, 64)
    expected = (64 * 128 + 64 * 64 + 128 * 64) * 4 + 128 * 64 * 4 + 1024
    assert {shared_bound("head", Tile(64, 0, 4, stages), shapes, "tf32", (9, 0)) for stages in (1, 2, 3)} == {expected}


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(ValueError, match="no kernel update"):
        shared_bound("update", Tile(64, 0, 4, 2), CIFAR, "bf16", (9, 0))


@pytest.mark.parametrize(("precision", "entry"), ENTRIES)
def test_the_h200s_tiles_fit_it(precision, entry):
    for shapes in SHAPES:
        assert fitting(entry, shapes, precision, 227 * KIB, (9, 0)) == entry


@pytest.mark.parametrize(("capability", "limit"), CARDS)
@pytest.mark.parametrize(("precision", "entry"), ENTRIES)
def test_fitted_tiles_fit_and_are_supported(precision, entry, capability, limit):
    for shapes in SHAPES:
        fitted = fitting(entry, shapes, precision, limit * KIB, capability)
        assert max(bounds(fitted, shapes, precision, capability).values()) <= limit * KIB
        assert fitting(fitted, shapes, precision, limit * KIB, capability) == fitted
        for name, tile in tiles_of(fitted).items():
            before = getattr(entry, name)
            assert 16 <= tile.size <= before.size
            assert before.size % tile.size == 0
            assert tile.warps == before.warps
            assert 1 <= tile.stages <= before.stages
        assert (fitted.lanes, fitted.splits) == (entry.lanes, entry.splits)
        assert fitted.conv1.depth == entry.conv1.depth
        assert fitted.conv2_inputs.depth in (1, 2)
        assert min(fitted.dense.depth, fitted.dense_backward.depth, fitted.weights_backward.depth) >= 16
        assert fitted.weights_backward.stages >= 2


@pytest.mark.parametrize(("precision", "entry"), ENTRIES)
def test_only_tiles_that_do_not_fit_change(precision, entry):
    shapes_and_limits = product((Shapes(32, 3, 10, 64), Shapes(28, 1, 128, 64)), (99, 131, 163, 195))
    for (shapes, limit), major in product(shapes_and_limits, (8, 9, 10)):
        fitted = fitting(entry, shapes, precision, limit * KIB, (major, 0))
        for name, bound in bounds(entry, shapes, precision, (major, 0)).items():
            assert (getattr(fitted, name) == getattr(entry, name)) == (bound <= limit * KIB)


def test_stages_are_reduced_first_and_only_where_that_helps():
    entry, shapes = shipped_table((9, 0), "tf32").entries[-1], Shapes(32, 3, 128, 64)
    fitted = fitting(entry, shapes, "tf32", 99 * KIB, (8, 6))
    assert (entry.conv2, fitted.conv2) == (Tile(64, 0, 4, 4), Tile(64, 0, 4, 3))
    assert (entry.head, fitted.head) == (Tile(128, 0, 4, 2), Tile(32, 0, 4, 2))


@pytest.mark.parametrize(("precision", "entry"), ENTRIES)
def test_tiles_that_fit_the_largest_batch_and_most_classes_fit_any(precision, entry):
    for major in (8, 9, 10):
        fitted = fitting(entry, Shapes(32, 3, 128, 64), precision, 99 * KIB, (major, 0))
        for shapes in SHAPES:
            assert fitting(fitted, shapes, precision, 99 * KIB, (major, 0)) == fitted


def test_a_limit_that_no_tile_fits_is_an_error():
    with pytest.raises(ValueError, match="no tile of conv1 fits in 1024 bytes"):
        fitting(shipped_table((9, 0), "bf16").entries[0], CIFAR, "bf16", KIB, (9, 0))
