"""Compression: codes by hand, error bounds, what a client keeps, and runs that go on to the same bytes."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lanes_cases import normed
from test_checkpoint import SMALL, begin, contents, go_on

from fedobp import Config, Federation
from fedobp.algorithms import METHODS
from fedobp.compression import Compressed, compressed, dequantise, quantise, sizes_of
from fedobp.method import Client, CohortUpdate, RoundContext, Sparse, Train
from fedobp.models import Model
from fedobp.records import take
from fedobp.wrapped import inner_of

LEVELS = ("8bit", "4bit", "sparse")


@pytest.mark.essential
def test_codes_by_hand():
    """Two tensors. 8bit: the largest entry is 127 scales. 4bit: a scale is a quarter of the root mean square."""
    difference = torch.tensor([127.0, -63.5, 0.4, 0.6, 0.0, 3.0, -4.0, 0.0, 0.0])
    codes, scale = quantise(difference, [5, 4], "8bit")
    assert scale.tolist() == pytest.approx([1.0, 4 / 127])
    assert codes.tolist() == [127, -64, 0, 1, 0, 95, -127, 0, 0]  # 63.5 is rounded to even, 3 is 95.25 scales
    codes, scale = quantise(difference, [5, 4], "4bit")
    square = (127**2 + 63.5**2 + 0.4**2 + 0.6**2) / 5
    assert scale.tolist() == pytest.approx([square**0.5 / 4, 2.5 / 4])
    # 127 is 8.0 scales of 15.87, 3 is 4.8 and 4 is 6.4 scales of 0.625.
    assert codes.tolist() == [8, -4, 0, 0, 0, 5, -6, 0, 0]
    assert codes.dtype == torch.int8
    assert dequantise(codes, scale, [5, 4])[5:].tolist() == [3.125, -3.75, 0, 0]


def test_sparse_sends_the_largest_sixteenth():
    difference = torch.arange(1.0, 33.0)
    codes, scale = quantise(difference, [32], "sparse")
    assert codes.nonzero()[:, 0].tolist() == [30, 31]
    assert codes[-1] == 127
    assert scale.tolist() == pytest.approx([32 / 127])


def test_equal_vectors_have_codes_of_0():
    codes, scale = quantise(torch.zeros(7), [3, 4], "4bit")
    assert (codes == 0).all()
    assert scale.tolist() == [0, 0]


vectors = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)


@settings(max_examples=100)
@given(values=vectors, cut=st.integers(0, 40), level=st.sampled_from(LEVELS), wide=st.booleans())
def test_an_entry_that_is_sent_is_at_most_half_a_scale_from_its_code(values, cut, level, wide):
    difference = torch.tensor(values, dtype=torch.float64 if wide else torch.float32)
    sizes = [size for size in (min(cut, len(values)), len(values) - min(cut, len(values))) if size]
    codes, scale = quantise(difference, sizes, level)
    assert codes.abs().max() <= 127
    assert (scale >= 0).all()
    steps = torch.cat([one.expand(size) for one, size in zip(scale, sizes, strict=True)])
    error = (dequantise(codes, scale, sizes) - difference).abs()
    sent = torch.ones_like(codes, dtype=torch.bool) if level != "sparse" else codes != 0
    tiny = torch.finfo(difference.dtype).tiny
    assert (error <= steps * 0.5001 + tiny)[sent].all()


def test_a_cohort_is_coded_client_by_client():
    difference = torch.randn(3, 226, generator=torch.Generator().manual_seed(1))
    for level in LEVELS:
        together = quantise(difference, [128, 98], level)
        for at in range(3):
            alone = quantise(difference[at], [128, 98], level)
            assert all(one[at].equal(other) for one, other in zip(together, alone, strict=True))


def test_a_vector_that_is_no_model_has_a_scale_for_each_block():
    model = Model("mlp", (4,), 2)
    assert sizes_of(model, torch.zeros(2, model.layout.size)) == list(model.layout.sizes)
    assert sizes_of(model, torch.zeros(4096 * 2 + 5)) == [4096, 4096, 5]


def test_entries_beyond_the_parts_arrive_as_they_are():
    difference = torch.tensor([1.0, 0.01, 3.0, -1e-5, 0.0], dtype=torch.float64)
    for level in ("8bit", "4bit"):
        codes, scale = quantise(difference, [2], level)
        assert scale.shape == (4,)
        torch.testing.assert_close(dequantise(codes, scale, [2])[2:], difference[2:], rtol=1e-12, atol=0)
        assert dequantise(codes, scale, [2])[1] != 0.01


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_running_statistics_of_a_compressed_run_stay_variances(engine):
    config = Config(method="fedavg", clients=4, rounds=3, epochs=1, model=normed, engine=engine, compress_down="4bit",
                    compress_up="4bit")  # fmt: skip
    found = Federation(config).run().state_dict(0)
    variances = [value for name, value in found.items() if name.endswith("running_var")]
    assert variances
    assert all((value > 0).all() for value in variances)


# The method


def round_of(method, theta, uploads_from):
    """Run one round of two clients by hand; return what was sent, the clients after it, the server and the records."""
    model = Model("mlp", (4,), 2)
    ctx = RoundContext(model, 1, 1, 2, 1, torch.tensor([0, 1]))
    server, record, state = method.init(model, model.initial(0), 0)
    records = {name: torch.stack([value, value]) for name, value in record.items()}
    download, records = method.download(ctx, {**server, "theta": theta}, records)
    clients = []
    for at in range(2):
        first, _, last = method.client_update(ctx)
        data = {"n": torch.tensor([5, 0][at]), "counts": torch.tensor([5, 0]), "steps": torch.tensor(1)}
        client = first(model, Client(state, take(download, at), {}, {}, {}, data))
        clients.append(last(model, client.set(theta=uploads_from(client.theta))))
    upload = {name: torch.stack([client.upload[name] for client in clients]) for name in clients[0].upload}
    update = CohortUpdate(upload, torch.tensor([5, 0]), 5)
    return download, clients, *method.aggregate(ctx, server, records, update)


def test_what_remains_is_sent_later_and_both_sides_hold_the_same():
    """FedAvg by hand: u' + e' = u + e, and the reference of a client without samples stays."""
    method, theta = compressed(METHODS["fedavg"](), "8bit", "4bit"), Model("mlp", (4,), 2).initial(1)
    start = Model("mlp", (4,), 2).initial(0)
    change = torch.randn(len(theta), generator=torch.Generator().manual_seed(2)) / 10
    download, clients, server, records = round_of(method, theta, lambda received: received + change)
    assert download["theta"].dtype == torch.int8
    sizes = list(Model("mlp", (4,), 2).layout.sizes)
    received = start + dequantise(download["theta"][0], download["theta.scale"][0], sizes)
    assert (received - theta).abs().max() <= download["theta.scale"].max() * 0.51
    sent = dequantise(clients[0].upload["theta"], clients[0].upload["theta.scale"], sizes)
    torch.testing.assert_close(sent + clients[0].state["rest.theta"], change, rtol=0, atol=1e-6)
    assert server["theta"].equal(received + sent)  # the other client has no samples
    assert clients[0].theta.equal(server["theta"])
    for at, client in enumerate(clients):
        assert client.state["sent.theta"].equal(records["sent.theta"][at])
    assert clients[1].state["sent.theta"].equal(start)
    assert not clients[1].state["rest.theta"].any()


def test_the_remainder_of_a_round_is_added_in_the_next():
    model, method = Model("mlp", (4,), 2), compressed(METHODS["fedavg"](), "none", "sparse")
    ctx = RoundContext(model, 1, 1, 1, 1, torch.tensor([0]))
    _, _, state = method.init(model, model.initial(0), 0)
    first, _, last = method.client_update(ctx)
    data = {"n": torch.tensor(5), "counts": torch.tensor([5, 0]), "steps": torch.tensor(1)}
    change, sent = torch.linspace(-1, 1, model.layout.size), torch.zeros(model.layout.size)
    for _ in range(40):
        client = first(model, Client(state, {"theta": model.initial(1)}, {}, {}, {}, data))
        client = last(model, client.set(theta=client.theta + change))
        state, upload = client.state, client.upload
        sent += dequantise(upload["theta"], upload["theta.scale"], sizes_of(model, sent))
    # All but the last remainder has arrived, which is bounded: an entry waits about 16 rounds to be among the largest.
    torch.testing.assert_close(sent + state["rest.theta"], 40 * change, rtol=0, atol=1e-3)
    assert state["rest.theta"].abs().max() < 20


def test_phases_keep_their_place_in_the_program():
    """So a compressed run draws the same batches as the plain one."""
    model = Model("mlp", (4,), 2)
    ctx = RoundContext(model, 1, 10, 2, 5, torch.tensor([0, 1]))
    for name, method in METHODS.items():
        plain, packed = (one.client_update(ctx) for one in (method(), compressed(method(), "8bit", "8bit")))
        places = [[(at, item) for at, item in enumerate(one) if isinstance(item, Train)] for one in (plain, packed)]
        assert places[0] == places[1], name


def test_a_compressed_method_is_called_as_the_plain_one():
    plain = METHODS["fedobp"](q=0.5)
    assert compressed(plain, "none", "none") is plain
    packed = compressed(plain, "8bit", "none")
    assert isinstance(packed, Compressed)
    assert (packed.name, packed.hparams(), packed.keeps_last_model) == ("fedobp", plain.hparams(), True)
    assert [spec.name for spec in packed.options()] == [spec.name for spec in plain.options()]
    assert inner_of(packed) is inner_of(plain) is plain


def test_personal_entries_are_not_sent():
    model = Model("mlp", (4,), 2)
    method = compressed(METHODS["fedobp"](q=0.9), "8bit", "8bit")
    _, record, _ = method.init(model, model.initial(0), 0)
    record = {**record, "theta": model.initial(3), "seen": torch.tensor(True)}
    ctx = RoundContext(model, 1, 1, 1, 1, torch.tensor([0]))
    download, _ = method.download(ctx, {"theta": model.initial(1)}, {k: v[None] for k, v in record.items()})
    sent = download["theta"]
    assert isinstance(sent, Sparse)
    assert (~sent.keep).sum() == 90
    assert (sent.values[~sent.keep] == 0).all()


# Runs


def test_the_settings_name_a_compressed_method():
    plain, packed = Config(rounds=1), Config(rounds=1, compress_up="4bit")
    assert type(Federation(plain).method) is METHODS["fedobp"]
    found = Federation(packed).method
    assert isinstance(found, Compressed)
    assert (found.down, found.up) == ("none", "4bit")
    assert plain.hash != packed.hash


@pytest.mark.parametrize("level", LEVELS)
def test_a_compressed_run_goes_on_to_the_same_bytes(level, tmp_path):
    config = Config(**SMALL, method="fedobp", compress_down=level, compress_up=level)
    Federation(config).run(out=tmp_path / "whole", checkpoint_every=0)
    begin(config, tmp_path / "cut")
    assert go_on(config, tmp_path / "cut") == [4, 5, 6]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_bytes_are_fewer_and_accuracy_stays():
    config = Config(method="fedavg", clients=10, rounds=15, model="mlp", alpha=0.5, participation=0.5)
    plain = Federation(config).run()
    packed = Federation(replace(config, compress_down="8bit", compress_up="8bit")).run()
    assert plain.bytes.down_total > 4 * packed.bytes.down_total
    assert plain.bytes.up_total > 4 * packed.bytes.up_total
    assert packed.accuracy.pooled == pytest.approx(plain.accuracy.pooled, abs=1.5)


def test_new_clients_are_served_with_compression():
    config = Config(method="fedobp", clients=8, holdout_clients=2, rounds=2, model="mlp", compress_down="4bit",
                    compress_up="sparse")  # fmt: skip
    assert Federation(config).run().new_clients is not None
