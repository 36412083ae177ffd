"""The fused kernels without a GPU: interpreted in float32 against autograd in float64, and compiled for sm_90."""

import os
import subprocess
import sys
import warnings
from copy import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.func import grad, vmap
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed: it exists for Linux only")

from kernel_cases import CASES, Case, Problem, fill_with_nan, rounded, rounded_logits
from lanes_cases import BATCH, CLIENTS, Plan, federated, made, task

from fedobp import Config, Federation
from fedobp.data import Dataset, FederatedData, Shard
from fedobp.engine import Budget, ClientPool, Lanes
from fedobp.engine.im2col import PatchConv2d
from fedobp.engine.kernels import dispatch, fused_for, is_supported
from fedobp.engine.kernels.convolutions import Convolutions
from fedobp.engine.kernels.fused import Fused
from fedobp.engine.kernels.shapes import Shapes, flat_order, kernel_order
from fedobp.engine.kernels.step import StepConfig
from fedobp.engine.kernels.tiles import EXACT, Tile, Tiles, tiles_for
from fedobp.errors import FedobpError
from fedobp.models import NETS, Model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are interpreted only without a GPU")

CPU = torch.device("cpu")
# Few large tiles: the interpreter is slow, and its time grows with their number.
LARGE = Tiles(
    1 << 30, Tile(256, 3, 4, 1), Tile(256, 0, 4, 1), Tile(128, 256, 4, 1), Tile(256, 0, 4, 1), Tile(64, 256, 4, 1),
    Tile(256, 2, 4, 1), Tile(256, 256, 4, 1), (3, 2),
)  # fmt: skip


DRAW = np.random.default_rng(3)
DATASET = Dataset("noise", DRAW.integers(0, 256, (60, 28, 28), dtype=np.uint8), np.arange(60) % 10, tuple(range(10)), 0)
SHARDS = [
    Shard(np.arange(20), np.arange(0), np.arange(20, 30)),
    Shard(np.arange(30, 46), np.arange(0), np.arange(46, 60)),
]


@pytest.fixture(autouse=True)
def _large_blocks(monkeypatch):
    monkeypatch.setattr("fedobp.engine.kernels.fused._BLOCK", 1 << 16)


def interpreted(problem, tiles=LARGE):
    return Fused(problem.model, problem.case.batch, "fp32", [tiles], problem.device)


@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_autograds_in_float64(name):
    problem = Problem(CASES[name])
    theta, losses = problem.train(interpreted(problem))
    right, right_losses = problem.expected()
    assert problem.errors(theta, right).max() < 2e-5
    torch.testing.assert_close(losses, right_losses.float(), rtol=1e-5, atol=1e-5)


def test_the_reference_of_lower_precisions():
    """The reference of the GPU tests: values by hand, and the model itself where nothing is rounded."""
    value = torch.tensor([1 + 2**-8 + 2**-9, 1 + 2**-10 + 2**-11, -1 - 2**-10 - 2**-11], dtype=torch.float64)
    assert rounded(value, "bf16").tolist() == [1 + 2**-7, 1, -1]
    assert rounded(value, "tf32").tolist() == [value[0], 1 + 2**-10, -1 - 2**-10]
    problem = Problem(Case())
    x, weights = problem.inputs(torch.arange(4)), problem.theta[0].double().requires_grad_()
    found = rounded_logits(problem.model.layout.views(weights).values(), x, "fp32")
    right = problem.model.logits(weights, x)
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(*(torch.autograd.grad(one.square().sum(), weights) for one in (found, right)))


def losses_of(model):
    """A custom loss: neither plain cross-entropy nor a mean."""

    def loss(theta, x, y):
        features, (weight, bias) = model.features(theta, x), model.head(theta)
        logits = features @ weight.T + bias
        return functional.cross_entropy(logits, y, reduction="sum") + 0.01 * features.square().sum()

    return loss


def near(found, right, share=2e-5):
    assert found.shape == right.shape
    assert (found.double() - right).norm() < share * right.norm()


@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
def test_a_custom_loss_has_autograds_gradient(side, channels):
    """Vectorised over lanes; over lanes and their samples, which share weights; and over samples with one model."""
    problem = Problem(Case(side, channels))
    fused, model = interpreted(problem).vectorised(problem.model), problem.model
    assert PatchConv2d in [type(layer) for layer in fused.structure.modules()]
    theta, ids = problem.theta, problem.ids[0]
    x, y = torch.stack([problem.inputs(one) for one in ids]), problem.data.y[ids]
    every_lane, single = vmap(grad(losses_of(fused))), x.float()
    right = vmap(grad(losses_of(model)))(theta.double(), x, y)
    near(every_lane(theta, single, y), right)
    near(
        vmap(fused.logits, in_dims=(None, 0))(theta[0], single),
        vmap(model.logits, in_dims=(None, 0))(theta[0].double(), x),
    )

    def each_sample(model):
        one = grad(losses_of(model))
        return vmap(vmap(lambda theta, x, y: one(theta, x[None], y[None]), in_dims=(None, 0, 0)))

    some = slice(None), slice(3)
    near(each_sample(fused)(theta, single[some], y[some]), each_sample(model)(theta.double(), x[some], y[some]))


def test_kernels_are_used_for_supported_batch_sizes_and_one_derivative(monkeypatch):
    problem = Problem(Case())
    fused, theta, asked = interpreted(problem).vectorised(problem.model), problem.theta[0], []
    real = Convolutions.apply
    monkeypatch.setattr(Convolutions, "apply", lambda *given: asked.append(len(given[1])) or real(*given))
    x, y = problem.inputs(torch.arange(17)).float(), torch.arange(17) % 10
    loss = losses_of(fused)
    grad(loss)(theta, x[:16], y[:16])
    assert asked
    asked.clear()
    for given in ((x, y), (x[:7], y[:7])):
        near(grad(loss)(theta, *given), grad(losses_of(problem.model))(theta.double(), given[0].double(), given[1]))
    twice = grad(lambda theta, of, x: grad(of)(theta, x, y[:16]).square().sum())
    near(twice(theta, loss, x[:16]), twice(theta.double(), losses_of(problem.model), x[:16].double()), 1e-4)
    near(
        grad(loss, argnums=1)(theta, x[:16], y[:16]),
        grad(losses_of(problem.model), argnums=1)(theta.double(), x[:16].double(), y[:16]),
    )

    def one_by_one(model):
        one = vmap(lambda theta, x, y: losses_of(model)(theta, x[None], y[None]), in_dims=(None, 0, 0))
        return grad(lambda x, theta: one(theta, x, y[:3]).sum())

    near(one_by_one(fused)(x[:3], theta), one_by_one(problem.model)(x[:3].double(), theta.double()))
    near(
        grad(loss)(theta.double(), x[:16].double(), y[:16]),
        grad(losses_of(problem.model))(theta.double(), x[:16].double(), y[:16]),
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert fused.logits(theta, x[:16]).dtype == torch.bfloat16
    assert not asked


def test_a_second_derivative_that_cannot_be_detected_is_refused():
    problem = Problem(Case())
    loss = losses_of(interpreted(problem).vectorised(problem.model))
    x, y = problem.inputs(torch.arange(16)).float(), torch.arange(16) % 10

    def penalised(theta):
        [gradient] = torch.autograd.grad(loss(theta, x, y), theta, create_graph=True)
        return gradient.square().sum()

    with pytest.raises(FedobpError, match="kernels have no second derivative: take both"):
        grad(penalised)(problem.theta[0])


@pytest.fixture
def padded(monkeypatch):
    """Round numbers of lanes up to three, as beyond 16: some lanes are idle, some are padding."""
    monkeypatch.setattr("fedobp.engine.kernels.fused.EXACT", 1)
    monkeypatch.setattr("fedobp.engine.kernels.fused._LANE_MULTIPLE", 3)


def test_idle_lanes_do_not_change(padded):
    """The second lane finishes before the first; its terms would change it even without a gradient."""
    problem = Problem(Case(terms=("momentum", "decay")))
    theta, losses = problem.train(interpreted(problem))
    right, right_losses = problem.expected()
    assert problem.errors(theta, right).max() < 2e-5
    torch.testing.assert_close(losses, right_losses.float(), rtol=1e-5, atol=1e-5)


def test_rows_of_single_pixels_and_a_graph_of_several_steps(monkeypatch):
    """The other variant of conv2's input gradient; three steps, each with the velocity of all before it."""
    monkeypatch.setattr("fedobp.engine.kernels.fused._STEPS_PER_GRAPH", 2)
    problem = Problem(Case(steps=(3,), counts=((16, 9, 4),), terms=("momentum",)))
    theta, _ = problem.train(interpreted(problem, replace(LARGE, conv2_inputs=Tile(256, 1, 4, 1))))
    assert problem.errors(theta, problem.expected()[0]).max() < 5e-5


def test_lanes_of_different_scalings():
    problem = Problem(Case(steps=(1, 1), counts=((16,), (16,))))
    other, theta, fused = copy(problem.data), problem.theta.clone(), interpreted(problem)
    other.mean, other.std = problem.data.mean + 0.3, problem.data.std * 2
    fused.train(theta, problem.rule(), "all", problem.ids, problem.counts, [problem.data, other], (1, 1))
    first, _ = problem.expected()
    problem.data = other
    second, _ = problem.expected()
    wanted = torch.stack([first[0], second[1]])
    change = (wanted - problem.theta.double()).norm(dim=1)
    assert ((theta.double() - wanted).norm(dim=1) / change).max() < 2e-5


@pytest.mark.essential
def test_untrained_and_masked_entries_keep_their_bits():
    problem = Problem(Case(part="head", terms=("momentum", "decay", "moving"), steps=(1,), counts=((16,),)))
    theta, _ = problem.train(interpreted(problem))
    still = ~problem.model.layout.is_head() | ~problem.vectors["moving"][0]
    assert torch.equal(theta[0, still], problem.theta[0, still])
    assert not torch.equal(theta[0, ~still], problem.theta[0, ~still])


def test_results_do_not_depend_on_old_buffer_contents():
    problem = Problem(Case(steps=(1, 1), counts=((3,), (16,)), terms=("momentum",)))
    fused = interpreted(problem)
    clean, losses = problem.train(fused)
    [cached] = fused._cache.values()
    fill_with_nan(cached.buffers)
    again, losses_again = problem.train(fused)
    assert torch.equal(clean, again)
    assert torch.equal(losses, losses_again)


@pytest.mark.parametrize("idle", [False, True])
def test_fewer_lanes_do_not_depend_on_the_contents_of_unused_lanes(idle, request):
    """Windows at an image's end read pixels of the next lane, with weight 0: they must not be NaN."""
    if idle:
        request.getfixturevalue("padded")
    problem = Problem(Case(steps=(1, 1), counts=((16,), (16,))))
    fused = interpreted(problem)
    cached = fused._buffers(StepConfig(fused._shapes, "fp32", "all"), 2, 1, problem.data)
    fill_with_nan(cached.buffers)
    fewer = Problem(Case(steps=(1,), counts=((7,),)))
    fewer.data = problem.data
    theta, _ = fewer.train(fused)
    assert len(fused._cache) == 1
    assert fewer.errors(theta, fewer.expected()[0]).max() < 2e-5


def test_inputs_far_from_0_keep_their_digits():
    """Images of float32 whose mean is thousands of times their deviation: the mean is subtracted first."""
    problem = Problem(Case(steps=(1,), counts=((16,),)))
    data = problem.data
    data.x, data.unit = 0.5 + 2e-5 * torch.randn(data.x.shape, generator=torch.Generator().manual_seed(0)), 1
    data.mean, data.std = torch.full_like(data.mean, 0.5), torch.full_like(data.std, 2e-5)
    theta, _ = problem.train(interpreted(problem))
    assert problem.errors(theta, problem.expected()[0]).max() < 1e-4


def test_lane_bytes_cover_its_buffers():
    problem = Problem(CASES["everything, 32x32"])
    fused = interpreted(problem)
    cached = fused._buffers(StepConfig(fused._shapes, "fp32", "all", 31), 3, 2, problem.data)
    taken = sum(
        one.numel() * one.element_size() for one in vars(cached.buffers).values() if isinstance(one, torch.Tensor)
    )
    # In addition to the buffers (here for a smaller batch) there are copies of its vector.
    assert taken / cached.buffers.lanes < fused.lane_bytes < 8 * taken / cached.buffers.lanes


def test_labels_are_the_largest_logits():
    right_labels(Case(32, 3, 62, steps=(1, 1), counts=((2,), (2,))), [70, 3])


@pytest.fixture
def small_tests(monkeypatch):
    """Evaluate 16 samples at a time instead of 64: the interpreter is slow."""
    monkeypatch.setattr("fedobp.engine.kernels.fused._TEST_BATCH", 16)


@pytest.mark.usefixtures("small_tests")
@pytest.mark.parametrize("sizes", [[34, 16, 0], [18, 17, 3]])
def test_labels_of_lanes_beside_idle_ones(sizes, padded):
    right_labels(Case(steps=(1,) * 3, counts=((2,),) * 3), sizes)


def right_labels(case, sizes):
    problem = Problem(case)
    for found, logits in problem.labels(interpreted(problem), sizes):
        assert torch.equal(found, logits.argmax(dim=1))


@pytest.mark.usefixtures("small_tests")
def test_the_engine_with_kernels_equals_the_serial_one(monkeypatch):
    """A whole run, with evaluations and fine-tuning: without warnings, and with the same predictions."""
    used = []

    class Noted(Fused):
        def train(self, *given):
            used.append("train")
            return super().train(*given)

        def labels(self, *given):
            used.append("labels")
            return super().labels(*given)

    monkeypatch.setattr("fedobp.engine.lanes.fused_for", lambda model, batch, precision, device: Noted(
        model, batch, "fp32", [LARGE], device))  # fmt: skip
    given = {"clients": 2, "rounds": 2, "participation": 0.5, "epochs": 1, "batch_size": 16, "model": "cnn",
             "method": "fedobp", "options": {"q": 0.9}, "momentum": 0.5, "finetune_epochs": 1, "lr": 0.1,
             "eval_every": 2}  # fmt: skip
    federation = Federation.__new__(Federation)
    federation.partition = "made by hand"
    problem = Problem(Case())
    found = {}
    for engine in ("serial", "lanes"):
        federation.config, federation.model = Config(**given, engine=engine, device="cpu"), problem.model
        federation.data = FederatedData(DATASET, SHARDS, CPU, torch.float32)
        found[engine] = federation.run()
    assert sorted(set(used)) == ["labels", "train"]
    for column in ("accuracy", "last", "finetuned"):
        assert getattr(found["lanes"], column) == getattr(found["serial"], column)
    for client in range(2):
        for name, tensor in found["lanes"].state_dict(client).items():
            torch.testing.assert_close(tensor, found["serial"].state_dict(client)[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("side", "channels", "classes"), [(28, 1, 10), (32, 3, 100)])
def test_the_kernels_order_holds_every_entry_once(side, channels, classes):
    model = Model("cnn", (channels, side, side), classes)
    shapes = Shapes(side, channels, classes, 32)
    order = kernel_order(model.layout, shapes)
    assert torch.equal(order[order >= 0].sort().values, torch.arange(model.layout.size))
    assert torch.equal(order[flat_order(order, model.layout.size)], torch.arange(model.layout.size))
    assert len(order) == shapes.size


@pytest.mark.parametrize(
    ("shape", "classes", "batch", "precision", "right"),
    [
        ((1, 28, 28), 10, 32, "bf16", True),
        ((3, 32, 32), 128, 16, "fp32", True),
        ((4, 32, 32), 2, 64, "tf32", True),
        ((3, 32, 32), 129, 32, "bf16", False),
        ((3, 32, 32), 10, 15, "bf16", False),
        ((3, 32, 32), 10, 65, "bf16", False),
        ((3, 32, 32), 10, 32, "fp64", False),
        ((3, 30, 30), 10, 32, "bf16", False),
        ((5, 32, 32), 10, 32, "bf16", False),
    ],
)
def test_supported_models_batches_and_precisions(shape, classes, batch, precision, right):
    assert is_supported(Model("cnn", shape, classes), batch, precision) == right


def test_another_network_under_the_papers_name_is_not_supported(monkeypatch):
    assert not is_supported(Model("mlp", (1, 28, 28), 10), 32, "bf16")
    model = Model("cnn", (1, 28, 28), 10)
    monkeypatch.setitem(NETS, "cnn", NETS["cnn-small"])
    assert not is_supported(model, 32, "bf16")


def test_a_gpu_without_tiles_warns_once(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Quadro")
    dispatch._warn_once.cache_clear()
    model, cuda = Model("cnn", (1, 28, 28), 10), torch.device("cuda")
    with pytest.warns(UserWarning, match="no kernels are tuned for bf16 on Quadro, so the general path trains"):
        assert fused_for(model, 32, "bf16", cuda) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused_for(model, 32, "bf16", cuda) is None
        assert fused_for(model, 32, "bf16", CPU) is None
        assert fused_for(model, 32, "fp64", cuda) is None


class Other:
    def __init__(self, version):
        self.__version__ = version


class Broken:
    __version__ = "3.6.0"

    @property
    def runtime(self):
        raise RuntimeError("Failed to find C compiler. Please specify one.\nAnd more")


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (None, r"need Triton, which is not installed \(pip install 'triton==3\.6\.\*'\)"),
        (Other("3.5.1"), r"need Triton 3\.6, and this is 3\.5\.1 \(pip install 'triton==3\.6\.\*'\)"),
        (Other("3.10.0"), r"need Triton 3\.6, and this is 3\.10\.0"),
        (Broken(), r"need a working Triton, and this one fails \(Failed to find C compiler. Please specify one.\)"),
    ],
)
def test_without_a_working_triton_the_general_path_is_used(monkeypatch, module, sentence):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "triton", module)
    dispatch._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=sentence):
        assert fused_for(Model("cnn", (1, 28, 28), 10), 32, "bf16", torch.device("cuda")) is None


def test_without_a_memory_limit_all_lanes_are_one_stack(monkeypatch):
    monkeypatch.setattr("fedobp.engine.lanes.fused_for", lambda *_: SimpleNamespace(lane_bytes=1000))
    model = Model("cnn", (1, 28, 28), 10)
    lanes, like = list(range(9)), torch.zeros(1)
    assert Lanes(model, 32)._dealt(lanes, like, 32) == [lanes]
    assert [len(stack) for stack in Lanes(model, 32, memory=4500)._dealt(lanes, like, 32)] == [3, 3, 3]
    assert Lanes(model, 32)._dealt([], like, 32) == []


@pytest.mark.parametrize(("custom", "stacks"), [(False, 1), (True, CLIENTS)])
def test_custom_predictions_are_stacked_by_the_general_paths_memory(custom, stacks, monkeypatch):
    """A lane of the kernels needs one byte here, and a lane of the general path more than the limit."""
    monkeypatch.setattr(
        "fedobp.engine.lanes.fused_for", lambda *_: SimpleNamespace(lane_bytes=1, vectorised=lambda model: model)
    )
    counts = []
    monkeypatch.setattr(Lanes, "_work", lambda self, job, stacks, device: counts.append(len(stacks)))
    model = made("mlp")
    theta = model.initial(0).double()
    clients = ClientPool(federated(), {"theta": theta}, theta, 0, Budget())
    answer = (lambda model, scratch, x: model.logits(scratch["theta"], x)) if custom else None
    one = replace(task(Plan(), clients, theta), predict=answer)
    Lanes(model, BATCH, memory=10).predict(one, theta.expand(CLIENTS, -1), "test", {"theta": theta.expand(CLIENTS, -1)})
    assert counts == [stacks]


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


@pytest.mark.parametrize("half", [0, 1])
def test_every_kernel_compiles_for_the_gpu(half, ran):
    """In a separate process, because the kernels of this one are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = ran(Path(__file__).parents[1] / "compile_kernels.py", half, env=environment, stderr=subprocess.STDOUT)
    assert said.code == 0, said.out
