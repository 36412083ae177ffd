"""FedRoD: two heads and where their gradients go, by hand and against a plain loop."""

import pytest
import torch
from by_hand import context, run_program, update_of
from plain_loops import (
    RATES,
    SIZES,
    batches,
    both_engines,
    each_round,
    hidden,
    mean,
    samples,
    sgd,
    small_federation,
    theta_0,
)

from fedobp.algorithms import METHODS
from fedobp.algorithms.fedrod import two_losses
from fedobp.method import Batch, Client, Train
from fedobp.models import Model
from fedobp.records import take

METHOD = METHODS["fedrod"]()
MODEL = Model("mlp", (4,), 3)
CTX = context(0, 1, model=MODEL)
THETA = MODEL.initial(1).double()
HEAD = MODEL.layout.is_head()
X = torch.linspace(-1, 2, 24, dtype=torch.float64).view(6, 4).sin()
Y = torch.tensor([0, 0, 0, 2, 2, 0])


def client(theta, head, gamma=1.0, y=Y):
    counts = torch.bincount(y, minlength=3)
    number = torch.tensor(gamma, dtype=theta.dtype)
    return Client({}, {}, {"theta": theta, "head": head}, {}, {"gamma": number}, {"n": counts.sum(), "counts": counts})


def batch(x=X, y=Y, weight=None):
    weight, zero = torch.ones(len(y), dtype=x.dtype) if weight is None else weight, torch.tensor(0)
    return Batch(x, y, weight, zero, zero, zero)


def gradients(gamma=1.0, theta=THETA, y=Y, one=None):
    theta, head = theta.clone().requires_grad_(), (theta[HEAD] * 0.3).requires_grad_()
    loss = two_losses(MODEL, client(theta, head, gamma, y), one or batch(y=y))
    return loss.detach(), *torch.autograd.grad(loss, (theta, head))


def tensors(theta):
    return MODEL.layout.views(theta)


def test_the_loss_and_its_gradients_are_those_of_two_separate_losses():
    loss, by_theta, by_head = gradients(gamma=0.7)
    theta = THETA.clone().requires_grad_()
    odds = MODEL.logits(theta, X).exp() * torch.tensor([4, 0, 2]).double() ** 0.7  # class 1 is absent
    balanced = -(odds.gather(1, Y[:, None])[:, 0] / odds.sum(dim=1)).log().mean()
    [expected] = torch.autograd.grad(balanced, theta)
    torch.testing.assert_close(by_theta, expected)  # P's loss has no gradient here
    weight, bias = (part.clone().requires_grad_() for part in MODEL.head(THETA * 0.3))
    hidden = torch.relu(X @ tensors(THETA)["fc1.weight"].T + tensors(THETA)["fc1.bias"])
    joint = torch.nn.functional.cross_entropy(MODEL.logits(THETA, X) + hidden @ weight.T + bias, Y)
    expected = torch.autograd.grad(joint, (weight, bias))
    torch.testing.assert_close(by_head, torch.cat([part.flatten() for part in expected]))
    torch.testing.assert_close(loss, (balanced + joint).detach())


def test_gamma_0_is_the_ordinary_cross_entropy_even_for_absent_classes():
    theta = THETA.clone().requires_grad_()
    [plain] = torch.autograd.grad(torch.nn.functional.cross_entropy(MODEL.logits(theta, X), Y), theta)
    torch.testing.assert_close(gradients(gamma=0.0)[1], plain)
    assert not torch.allclose(gradients(gamma=1.0)[1], plain)


def test_padding_of_a_class_that_the_client_does_not_have_does_not_count():
    x, y = torch.cat([X, X[:2] + 1]), torch.cat([Y, torch.tensor([1, 1])])
    padded = batch(x, y, torch.tensor([1.0] * 6 + [0, 0]).double())
    for found, expected in zip(gradients(one=padded), gradients(), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_client_with_one_class_trains_only_its_private_head():
    loss, by_theta, by_head = gradients(y=torch.full((6,), 2))
    assert loss.isfinite()
    assert by_theta.eq(0).all()  # the balanced softmax over one class is constant
    assert by_head.ne(0).any()


@pytest.mark.essential
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_clients_by_hand(dtype):
    theta = THETA.to(dtype)
    server, records, state = METHOD.init(MODEL, theta, 0)
    assert server["theta"].equal(theta)
    assert state["head"].equal(theta[HEAD])
    download, records = METHOD.download(CTX, server, records)
    assert list(download) == ["theta"]
    clients = []
    for at, step in enumerate((1.0, 5.0)):
        steps = [torch.full_like(theta, step)]
        done, [phase] = run_program(MODEL, METHOD.client_update(CTX), state, take(download, at), steps)
        assert phase == Train(5, learn=("theta", "head"), loss=two_losses)
        assert list(done.upload) == ["theta"]
        assert done.upload["theta"].equal(theta + step)
        assert done.state["head"].equal(state["head"])  # `run_program` changes the first vector only
        assert done.theta[~HEAD].equal(theta[~HEAD] + step)
        assert done.theta[HEAD].equal(theta[HEAD] + step + state["head"])  # the last local model has both heads
        clients.append(done)
    server, _ = METHOD.aggregate(CTX, server, records, update_of(clients, 1, 3))
    torch.testing.assert_close(server["theta"], theta + 4)
    served, _ = run_program(MODEL, METHOD.personalize(CTX), {"head": state["head"] * 2}, {"theta": server["theta"]})
    assert served.scratch["mine"].equal(HEAD)
    assert served.theta.dtype == dtype
    x = X.to(dtype)
    both = [MODEL.logits(MODEL.layout.join(server["theta"][~HEAD], head), x) for head in
            (server["theta"][HEAD], state["head"] * 2)]  # fmt: skip
    torch.testing.assert_close(MODEL.logits(served.theta, x), sum(both))


@pytest.mark.parametrize("rates", RATES)
@pytest.mark.parametrize("gamma", [1.0, 0.4])
def test_runs_equal_a_plain_loop(gamma, rates):
    """Each client has samples of a few classes only."""
    federation = small_federation("fedrod", rates, {"gamma": gamma}, partition="shards")
    shared = theta_0(federation)  # W, b, and G's
    heads = dict.fromkeys(range(4), shared[2:])

    def losses(counts):
        def loss(values, x, y):
            features = hidden(values, x)
            generic = features @ values[2].T + values[3]
            odds = counts**gamma * generic.exp()
            balanced = -(odds / odds.sum(dim=1, keepdim=True))[range(len(y)), y].log().mean()
            personal = generic.detach() + features.detach() @ values[4].T + values[5]
            return balanced + torch.nn.functional.cross_entropy(personal, y)

        return loss

    for round, cohort in each_round(federation):
        models = []
        for client in cohort:
            counts = torch.bincount(samples(federation, client)[1], minlength=10).double()
            assert not counts.all()
            data = batches(federation, client, round, phase=1, epochs=2)
            trained = sgd(federation, [*shared, *heads[client]], losses(counts), data)
            models.append(trained[:4])
            heads[client] = trained[4:]
        shared = mean(federation, cohort, models)
    served = {client: [*shared[:2], shared[2] + head[0], shared[3] + head[1]] for client, head in heads.items()}
    for result in both_engines(federation, shared, served):
        assert result.bytes.down_per_round == result.bytes.up_per_round == 2 * 8 * sum(SIZES)
        assert result.personal.min == result.personal.max == sum(SIZES[2:])
