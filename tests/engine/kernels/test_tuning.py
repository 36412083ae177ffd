"""The search for tile shapes, with prices made up by the test: a card is needed to time real ones."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, partialmethod
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from engine.kernels.interpreted import CPU, LARGE, WITHOUT_GPU
from fedobp.engine.kernels import tuning
from fedobp.engine.kernels.cards import known_card
from fedobp.engine.kernels.shapes import Shapes
from fedobp.engine.kernels.tiles import EXACT, Tile, shipped_table
from fedobp.engine.kernels.tuning import SEARCHED, candidates, lanes_of, search
from fedobp.progress import shown_by

pytestmark = WITHOUT_GPU
FEW, *_, MANY = shipped_table((9, 0), "bf16").entries


class Card:
    """A card on which some shapes are fast. Preparing a kernel takes 10 seconds, and timing a shape one."""

    def __init__(self, prices, seconds):
        self.prices, self.left, self.prepared = prices, seconds, []

    def price(self, tiles, what):
        assert tiles in self.prepared[-1][1]
        self.left -= 1
        shape = tiles.splits if what == "splits" else getattr(tiles, what)
        return self.prices.get((what, tuple(shape)), 100.0)

    def prepare(self, what, entries, seconds):
        assert len(entries) == len(set(entries))
        assert seconds == self.left
        self.prepared.append((what, entries))
        self.left -= 10


def tuned(start, prices, seconds=math.inf):
    card, shapes = Card(prices, seconds), partial(candidates, precision="bf16", capability=(9, 0))
    return search(start, shapes, card.price, card.prepare, lambda: card.left), card


def test_the_fastest_shape_of_each_kernel_is_found():
    fast = {
        "weights_backward": (64, 32, 8, 2),
        "splits": (49, 5),
        "dense_backward": (32, 64, 8, 3),
        "conv2_inputs": (128, 1, 8, 4),
        "conv2": (32, 0, 8, 3),
        "dense": (32, 64, 4, 3),
        "conv1": (64, 1, 8, 3),
        "head": (256, 0, 4, 2),
    }
    found, card = tuned(FEW, dict.fromkeys(fast.items(), 1.0))
    assert found == replace(
        FEW, **{name: Tile(*shape) for name, shape in fast.items() if name != "splits"}, splits=(49, 5)
    )
    assert [what for what, _ in card.prepared] == list(SEARCHED)


def test_shapes_in_use_stay_where_none_is_faster():
    """Also if they are no candidates: the first of equal prices is kept."""
    start = replace(MANY, conv2=Tile(16, 0, 4, 1))
    found, _ = tuned(start, {})
    assert found == start


def test_shapes_that_cannot_be_used_are_skipped():
    """An infinite price: it does not compile, does not fit, or has a race."""
    broken = {("conv2", tuple(one.conv2)): math.inf for one in [FEW, *candidates("conv2", FEW, "bf16", (9, 0))]}
    found, _ = tuned(FEW, {**broken, ("conv2", (32, 0, 8, 4)): 3.0})
    assert found.conv2 == (32, 0, 8, 4)
    found, _ = tuned(FEW, broken)
    assert found == FEW


@pytest.mark.parametrize(("seconds", "kernels", "found"), [(0, 0, False), (9, 1, False), (12, 1, False), (40, 2, True)])
def test_the_search_ends_with_its_time(seconds, kernels, found):
    """Of 25 shapes of the first kernel, the last one is the fastest."""
    last = candidates("weights_backward", FEW, "bf16", (9, 0))[-1]
    prices = {("weights_backward", tuple(last.weights_backward)): 1.0, ("dense_backward", (64, 64, 8, 3)): 1.0}
    best, card = tuned(FEW, prices, seconds)
    assert len(card.prepared) == kernels
    assert (best.weights_backward == last.weights_backward) == found
    assert best.dense_backward == FEW.dense_backward


def test_every_candidate_is_an_entry_that_the_kernels_allow():
    for start in (FEW, MANY):
        for precision in ("bf16", "tf32", "fp32"):
            for what, major in product(SEARCHED, (8, 10)):
                found = candidates(what, start, precision, (major, 0))
                assert len(found) > 1
                if major == 10 and precision != "bf16":
                    assert what != "weights_backward" or {one.weights_backward.warps for one in found} == {2}
                for one in found:
                    assert one.lanes == start.lanes
                    assert 512 % one.dense.size == 512 % one.head.size == 64 % one.dense_backward.size == 0


def test_entries_are_timed_at_lanes_that_use_them():
    entries = shipped_table((9, 0), "bf16").entries
    below = 0
    for entry in entries:
        assert below < lanes_of(entry) <= entry.lanes
        below = entry.lanes
    assert lanes_of(entries[-1]) > EXACT


class Timed:
    """In place of the bench on a card: a step takes 50 microseconds, and less with larger tiles of conv2."""

    def __init__(self, card, precision, lanes, device, must_read, compilers):
        self.lanes = lanes

    def step_time(self, tiles):
        return 50.0 - tiles.conv2.size / 16

    def kernel_times(self, tiles):
        return {"conv2": 50.0 - tiles.conv2.size / 16}

    def prepare(self, what, entries, seconds):
        assert seconds > 0

    def price(self, tiles, what):
        return self.step_time(tiles)


def test_a_search_keeps_its_table_and_reports_its_progress(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "Bench", Timed)
    card, seen = known_card("8.6"), []
    with shown_by(lambda what, share: seen.append((what, share))):
        found = tuning.tune(card, "bf16", torch.device("cuda"), 60.0)
    start = tuning.start_table(card, "bf16")
    assert start.source == "default"
    assert [one.conv2.size for one in found.table.entries] == [64] * len(start.entries)
    assert [replace(one, conv2=None) for one in found.table.entries] == [
        replace(one, conv2=None) for one in start.entries
    ]
    assert [(one.lanes, one.before, one.step) for one in found.timings] == [(n, 48.0, 46.0) for n in (1, 4, 10, 160)]
    assert tuning.cache.load("tiles", tuning.cache.key_for(card, "bf16")) is not None
    assert seen
    assert all(what.startswith("tuning kernels for RTX 30") and 0 <= share <= 1 for what, share in seen)
    assert [share for _, share in seen] == sorted(share for _, share in seen)


def test_without_time_only_the_table_in_use_is_timed(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "Bench", Timed)
    table = shipped_table((9, 0), "bf16")
    found = tuning.tune(known_card("9.0"), "bf16", torch.device("cuda"), 0, table)
    assert (found.table, found.path) == (table, None)
    assert len(found.timings) == len(table.entries)
    assert not list(tmp_path.iterdir())


class Event:
    """A CUDA event: a counter instead of a clock."""

    now = 0.0

    def __init__(self, enable_timing):
        self.time = 0.0

    def record(self):
        Event.now += 0.5
        self.time = Event.now

    def elapsed_time(self, other):
        return other.time - self.time


def test_the_bench_launches_every_kernel_and_skips_what_cannot_be_used(monkeypatch):
    """On the CPU, with interpreted kernels and without CUDA: what a card does differently is tested there."""
    for name in ("synchronize", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: nullcontext())
    monkeypatch.setattr(tuning, "capture", lambda job: lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(tuning, "_SHAPES", Shapes(28, 1, 10, 16))
    monkeypatch.setattr(tuning, "_SAMPLES", 8)
    monkeypatch.setattr(tuning.Bench, "_time", partialmethod(tuning.Bench._time, times=1, loops=1))
    asked = []
    monkeypatch.setattr(tuning, "problems", lambda kernel, card, must_read: asked.append(must_read) or [])
    monkeypatch.setattr("fedobp.engine.kernels.launches.Launch.compiled", lambda launch: None)
    roomy = known_card("9.0")._replace(shared=2 << 20)
    compiled = []
    compilers = SimpleNamespace(compile=lambda found, seconds: compiled.extend(found) or range(len(found)))
    bench = tuning.Bench(roomy, "fp32", 1, CPU, must_read=True, compilers=compilers)
    large = replace(LARGE, splits=(3, 2))
    assert bench.price(large, "conv1") == math.inf  # it was not prepared
    bench.prepare("conv1", [large, large], 60.0)
    bench.prepare("conv1", [large], 60.0)
    assert asked == [True]
    assert [one.kernel for one in compiled] == ["conv1"]
    assert bench.price(large, "conv1") == 500.0
    bench.prepare("splits", [large], 60.0)
    assert bench.price(large, "splits") == 1000.0  # with `update`
    compilers.compile = lambda found, seconds: range(0)
    bench.prepare("conv2", [large], 60.0)
    assert bench.price(large, "conv2") == math.inf  # it cannot be compiled
    compilers.compile = lambda found, seconds: range(len(found))
    wide = replace(large, conv2=Tile(4096, 0, 4, 5))
    bench.prepare("conv2", [wide], 60.0)
    assert bench.price(wide, "conv2") == math.inf  # more shared memory than the card has
    monkeypatch.setattr(tuning, "problems", lambda *_, **__: ["%a is overwritten while a product reads it"])
    bench.prepare("conv2", [large], 60.0)
    assert bench.price(large, "conv2") == math.inf
    assert set(bench.kernel_times(large)) == {*SEARCHED, "update"} - {"splits"}
    assert bench.step_time(large) == 500.0
