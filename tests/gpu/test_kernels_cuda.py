"""The fused kernels on CUDA. Run with: PYTHONPATH=src python -m pytest tests/gpu/test_kernels_cuda.py"""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device that torch can use", allow_module_level=True)

from kernel_cases import CASES, Case, Problem, fill_with_nan
from lanes_cases import same
from torch.func import grad, vmap

from fedobp import Config, Federation, sweep
from fedobp.engine import Budget
from fedobp.engine.kernels import fused_for
from fedobp.engine.kernels.cards import OLDEST, card_of
from fedobp.engine.kernels.convolutions import ConvConfig, Convolutions
from fedobp.engine.kernels.fused import Fused
from fedobp.engine.kernels.reference import rounded, rounded_features
from fedobp.engine.kernels.self_check import BOUNDS, LABEL_BOUND
from fedobp.engine.kernels.tiles import shipped_table
from fedobp.engine.kernels.tuning import start_table
from fedobp.engine.sgd import Rule
from fedobp.grouping import engine_for
from fedobp.launch import simulate
from fedobp.models import Model
from fedobp.transfer import AsyncCopy
from fedobp.wire import Payload

CARD = card_of(torch.device("cuda"))
pytestmark = [
    pytest.mark.skipif(CARD.capability < OLDEST, reason="the kernels do not support this card"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
]

DEVICE = torch.device("cuda")
BIG = {"a batch of 64, 128 classes": Case(32, 3, 128, 64, terms=("momentum",), counts=((64, 33), (64, 0)))}


def tiles_of(precision):
    """The tile shapes of this card: shipped, or those that tuning starts from."""
    return start_table(CARD, precision).entries


def fused_of(problem, precision, tiles=None):
    return Fused(problem.model, problem.case.batch, precision, tiles or tiles_of(precision), DEVICE, CARD)


def check(problem, theta, right, precision):
    usual, worst = BOUNDS[precision]
    errors = problem.errors(theta, right)
    assert errors.median(dim=1).values.max() < usual
    assert errors.max() < worst


# The other precisions are other arithmetic in the same kernels.
ENOUGH = ("plain", "base", "everything, 32x32")


@pytest.mark.parametrize(
    ("precision", "name"), [(p, name) for p in BOUNDS for name in ([*CASES, *BIG] if p == "bf16" else ENOUGH)]
)
def test_steps_are_autograds_in_float64(precision, name):
    problem = Problem({**CASES, **BIG}[name], DEVICE)
    theta, losses = problem.train(fused_of(problem, precision))
    right, right_losses = problem.expected(precision)
    check(problem, theta, right, precision)
    torch.testing.assert_close(losses, right_losses.float(), rtol=BOUNDS[precision][0], atol=1e-5)


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
@pytest.mark.parametrize(("precision", "at"), [(p, at) for p in BOUNDS for at in range(len(tiles_of(p)))])
def test_every_entry_of_the_tables(side, channels, precision, at):
    """Twenty lanes of unequal length, with terms that would change an idle lane."""
    entry = replace(tiles_of(precision)[at], lanes=1 << 30)
    steps = tuple(3 if lane < 7 else 2 if lane < 18 else 1 for lane in range(20))
    counts = tuple(tuple(0 if step >= mine else 32 - lane for step in range(3)) for lane, mine in enumerate(steps))
    problem = Problem(Case(side, channels, batch=32, steps=steps, counts=counts, terms=("momentum", "decay")), DEVICE)
    check(problem, problem.train(fused_of(problem, precision, [entry]))[0], problem.expected(precision)[0], precision)


def gradients(precision, lanes, side, channels, samples=False):
    """Gradients of both convolutions by kernels under vmap, and by autograd in float64 with the same roundings."""
    draw = torch.Generator().manual_seed(1)
    sizes = (32, channels, 5, 5), (32,), (64, 32, 5, 5), (64,)
    weights = [0.1 * torch.randn(lanes, *size, generator=draw) for size in sizes]
    x = torch.randn(lanes, 32, channels, side, side, generator=draw)
    towards = torch.randn(32, ((side - 4) // 2 - 4) // 2, ((side - 4) // 2 - 4) // 2, 64, generator=draw)
    config = ConvConfig(side, channels, precision, tiles_of(precision), CARD)
    there = towards.to(DEVICE)

    def loss(weights, x, towards):
        [out, *_] = Convolutions.apply(config, x[None], *(one[None] for one in weights))
        return (out[0].float() * towards).sum()

    found = grad(loss)
    if samples:
        found = vmap(lambda weights, x, towards: grad(loss)(weights, x[None], towards[None]), in_dims=(None, 0, 0))
    found = vmap(found, in_dims=(0, 0, None))([one.to(DEVICE) for one in weights], x.to(DEVICE), there)
    right = []
    for lane in range(lanes):
        mine = [one[lane].double().requires_grad_() for one in weights]
        h = rounded_features(mine, x[lane].double(), precision)
        losses = (h.permute(0, 2, 3, 1) * rounded(towards.double(), precision)).flatten(1).sum(dim=1)
        each = losses if samples else [losses.sum()]
        right.append([torch.autograd.grad(one, mine, retain_graph=True) for one in each])
    right = [torch.stack([torch.stack([one[at] for one in lane]) for lane in right]) for at in range(4)]
    return [one.cpu().double() for one in found], right if samples else [one[:, 0] for one in right]


def agree(found, right, precision):
    """Compare gradients [lanes, ...]: one window in which two values change their order is up to 0.006 of a lane's."""
    usual, _ = BOUNDS[precision]
    for one, other in zip(found, right, strict=True):
        assert one.shape == other.shape
        wrong = (one - other).flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)
        assert len(wrong) < 5 or wrong.median() < usual
        assert wrong.max() < 0.02


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize(("lanes", "side", "channels"), [(1, 32, 3), (5, 28, 1), (20, 32, 3)])
def test_a_custom_loss_has_autograds_gradient(precision, lanes, side, channels):
    agree(*gradients(precision, lanes, side, channels), precision)


@pytest.mark.parametrize("precision", BOUNDS)
def test_every_sample_has_its_gradient(precision):
    found, right = gradients(precision, 2, 32, 3, samples=True)
    agree(*([one.flatten(0, 1) for one in all_of] for all_of in (found, right)), precision)


@pytest.mark.parametrize("precision", BOUNDS)
def test_results_do_not_depend_on_old_buffer_contents(precision):
    case = CASES["everything, 32x32"]
    problem = Problem(case, DEVICE)
    fused = fused_of(problem, precision)
    first, losses = problem.train(fused)
    [cached] = fused._cache.values()
    fill_with_nan(cached.buffers)
    again, losses_again = problem.train(fused)
    assert torch.equal(first, again)
    assert torch.equal(losses, losses_again)
    afresh, _ = problem.train(fused_of(problem, precision))
    assert torch.equal(first, afresh)


def test_fewer_lanes_do_not_depend_on_the_contents_of_unused_lanes():
    """In buffers for twenty lanes, of which some are idle; and one lane alone, beside the buffers of another."""
    for lanes, few in ((20, 17), (20, 1)):
        problem = Problem(Case(steps=(1,) * lanes, counts=((16,),) * lanes), DEVICE)
        fused = fused_of(problem, "bf16")
        problem.train(fused)
        [cached] = fused._cache.values()
        fill_with_nan(cached.buffers)
        fewer = Problem(Case(steps=(1,) * few, counts=((16,),) * few), DEVICE)
        fewer.data = problem.data
        theta, _ = fewer.train(fused)
        assert len(fused._cache) == 1
        check(fewer, theta, fewer.expected("bf16")[0], "bf16")


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
@pytest.mark.parametrize("lanes", [160, 12, 6, 2])
def test_equal_lanes_stay_equal_beside_other_work(side, channels, lanes):
    """On two streams at once: results must not depend on timing, and a difference would remain.

    Too short for a race that occurs once in tens of thousands of steps: tests/compile_kernels.py checks for its cause.
    """
    times = 200
    problem = Problem(Case(side, channels, batch=32, steps=(times,), counts=((32,) * times,)), DEVICE)
    ids, counts = (one.to(DEVICE).repeat_interleave(lanes, dim=1) for one in (problem.ids, problem.counts))
    rule = Rule(lr=torch.full((lanes, 1), 0.01, device=DEVICE))
    works = [
        (torch.cuda.Stream(), fused_of(problem, "bf16"), problem.theta.to(DEVICE).repeat(lanes, 1)) for _ in range(2)
    ]
    torch.cuda.synchronize()
    for _ in range(4):
        for stream, fused, theta in works:
            with torch.cuda.stream(stream):
                fused.train(theta, rule, "all", ids, counts, [problem.data] * lanes, (times,) * lanes)
    torch.cuda.synchronize()
    thetas = torch.cat([theta for _, _, theta in works])
    assert thetas.isfinite().all()
    assert not torch.equal(thetas[0].cpu(), problem.theta[0])
    assert torch.equal(thetas, thetas[:1].expand_as(thetas))


@pytest.mark.parametrize("precision", BOUNDS)
def test_labels_are_the_largest_logits(precision):
    problem = Problem(Case(32, 3, 62), DEVICE)
    for found, logits in problem.labels(fused_of(problem, precision), [150, 70]):
        best = logits.gather(1, found[:, None])[:, 0]
        assert (logits.max(dim=1).values - best).max() < LABEL_BOUND


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    import numpy as np

    place = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    y = np.arange(3000) % 10
    x = draw.integers(0, 100, (3000, 28, 28), dtype=np.uint8)
    x[np.arange(3000), 2 * y + 2, :] = 255  # a bright row marks the class
    np.savez(place / "fmnist.npz", x=x, y=y)
    return str(place)


@pytest.mark.parametrize("precision", BOUNDS)
def test_runs_are_those_of_the_serial_engine(precision, folder):
    """Several rounds of several methods, in one launch, against the oracle."""
    given = {"dataset": "fmnist", "data_dir": folder, "clients": 20, "participation": 0.3, "rounds": 6, "epochs": 2,
             "lr": 0.02, "finetune_epochs": 1, "model": "cnn", "alpha": 0.3}  # fmt: skip
    methods = ["fedobp", "fedper", "fedavg", "local"]
    fast = sweep([Config(**given, method=m, device="cuda", precision=precision) for m in methods])
    slow = sweep([Config(**given, method=m, device="cuda", precision="fp32", engine="serial") for m in methods])
    for one, other in zip(fast, slow, strict=True):
        assert abs(one.accuracy.pooled - other.accuracy.pooled) < 3
        assert abs(one.finetuned.pooled - other.finetuned.pooled) < 3
        # A mask of other entries has other run lengths.
        assert one.bytes.down_total == pytest.approx(other.bytes.down_total, rel=1e-5)
        assert one.bytes.up_total == pytest.approx(other.bytes.up_total, rel=1e-5)
        moved_alike(one, other, precision)


def test_methods_that_compute_the_same_have_the_same_bits(folder):
    """In one launch: FedAvg and its baselines train alike, FedOBP is a case of `decoupled`; others run beside."""
    given = {"dataset": "fmnist", "data_dir": folder, "clients": 20, "participation": 0.5, "rounds": 20, "epochs": 2,
             "lr": 0.02, "model": "cnn", "alpha": 0.3, "device": "cuda"}  # fmt: skip
    methods = ["fedavg", "fedavg-last", "fedavg-ft", "fedobp", "decoupled", "fedprox", "scaffold", "ditto"]
    first, again = (
        dict(zip(methods, sweep([Config(**given, method=m) for m in methods]), strict=True)) for _ in range(2)
    )
    for one, other in (("fedavg", "fedavg-last"), ("fedavg", "fedavg-ft"), ("fedobp", "decoupled")):
        torch.testing.assert_close(first[one].state_dict(), first[other].state_dict(), rtol=0, atol=0)
    for method in methods:
        same(first[method], again[method], atol=0)


def moved_alike(one, other, precision):
    """Compare all models of two runs, tensor by tensor, as shares of how far they moved from theta^0.

    On the CPU, lanes and the serial engine differ in fp32 by up to 0.02 in half of the models and 0.12 in all, because
    FedOBP and FedDPA choose a few other entries; in bf16 by up to 0.08 and 0.14.
    """
    usual, worst = {"fp32": (0.05, 0.25)}.get(precision, (0.15, 0.4))
    model = Model("cnn", (1, 28, 28), 10)
    for name, start in model.layout.views(model.initial(one.config.seed)).items():
        wrong = []
        for client in (None, *range(one.config.clients)):
            mine, right = (run.state_dict(client)[name].cpu() for run in (one, other))
            change = (right - start).norm()
            if change == 0:
                assert torch.equal(mine, right), (name, client)
            else:
                wrong.append((mine - right).norm() / change)
        if wrong:
            assert torch.stack(wrong).median() < usual, name
            assert max(wrong) < worst, name


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_runs_with_custom_losses_are_those_of_the_serial_engine(precision, folder):
    given = {"dataset": "fmnist", "data_dir": folder, "clients": 10, "participation": 0.3, "rounds": 3, "epochs": 1,
             "lr": 0.02, "model": "cnn", "alpha": 0.3}  # fmt: skip
    methods = ["fedrod", "apfl", "feddpa"]
    fast = sweep([Config(**given, method=m, device="cuda", precision=precision) for m in methods])
    slow = sweep([Config(**given, method=m, device="cuda", precision="fp32", engine="serial") for m in methods])
    for one, other in zip(fast, slow, strict=True):
        assert abs(one.accuracy.pooled - other.accuracy.pooled) < 5
        moved_alike(one, other, precision)


def test_training_does_not_wait_once_its_graphs_are_captured():
    problem = Problem(CASES["everything, 32x32"], DEVICE)
    fused, rule, theta = fused_of(problem, "bf16"), problem.rule(), problem.theta.to(DEVICE)
    ids, counts, data = problem.ids.to(DEVICE), problem.counts.to(DEVICE), [problem.data] * len(theta)
    fused.train(theta, rule, "all", ids, counts, data, problem.case.steps)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fused.train(theta, rule, "all", ids, counts, data, problem.case.steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_whole_round_does_not_wait(folder, monkeypatch):
    """Download, train, aggregate and keep; the round before it is settled, and the next round's order is prepared.

    Bytes are counted on another stream, which may wait for itself.
    """
    config = Config(dataset="fmnist", data_dir=folder, clients=20, participation=0.3, epochs=2, model="cnn", alpha=0.3,
                    device="cuda", rounds=9, eval_every=9)  # fmt: skip
    federation = Federation(config)
    engine = engine_for(federation.config, federation.model)
    run, clients = simulate(federation.plan(federation.config, federation.method), engine, Budget())
    jobs = [run.job(run.context(round, torch.arange(6))) for round in range(1, 5)]
    prepared = None

    def play(at):
        nonlocal prepared
        round = run.round([jobs[at]])
        [update] = engine.train([clients.assign(next(round))], prepared)
        prepared = engine.prepare([clients.assign(jobs[at + 1])])
        with suppress(StopIteration):
            round.send(update)
        return AsyncCopy(update.loss)

    for at in range(2):
        play(at)
    count = Payload.bytes

    def counted(payload):
        torch.cuda.set_sync_debug_mode("default")
        try:
            return count(payload)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(Payload, "bytes", counted)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = play(2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.value().isfinite().all()


def test_an_asynchronous_copy_does_not_wait_for_later_work():
    matrix = torch.rand(8192, 8192, device=DEVICE)
    number = AsyncCopy(matrix[0, 0] * 0 + 7)
    for _ in range(200):
        matrix = matrix @ matrix
    done = torch.cuda.Event()
    done.record()
    assert number.value().item() == 7
    assert not done.query()


@pytest.mark.skipif(shipped_table(CARD.capability, "bf16") is None, reason="no table is shipped for this card")
def test_a_card_with_a_shipped_table_has_them_without_a_warning():
    problem = Problem(Case(), DEVICE)
    assert isinstance(fused_for(problem.model, 16, "bf16", "auto", DEVICE), Fused)
