"""FedPAC (Xu et al., Personalized Federated Learning with Feature Alignment and Classifier Collaboration, ICLR 2023).

A shared base, and for each client a head that the server combines from the heads of the cohort. A client computes
statistics of its features under the received base, trains its head, then its base with a term that aligns the features
of a class with that class's global prototype. The server averages bases and prototypes, and computes for each client
the convex combination of heads that minimises an estimate of its loss: variance of the estimates plus distance between
feature distributions.

Defaults are the authors': one head epoch at rate 0.1, lam 1, weights below 1e-3 dropped; their 5 base epochs, momentum
0.5 and weight decay 5e-4 are replaced by the common budget, 1 and 4 of 5 epochs. They solve the quadratic programmes
with cvxpy and cut off negative eigenvalues; here the matrix cannot have any, and an active-set method solves all
programmes at once. A client without samples keeps its head, which no other client's combination uses.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fedobp import method as fl

_SMALLEST = 1e-3  # smaller weights are dropped, as with the authors
_FLAT = 1e-9  # a slope, relative to 1, that counts as 0
_RIDGE = 1e-9  # of the mean diagonal: a client with one sample has no variance


def join_parts(model: fl.Model, client: fl.Client) -> fl.Client:
    """Join the shared base and the combined head."""
    theta = model.layout.join(fl.dense(client.download, "base"), fl.dense(client.download, "head"))
    return reset_sums(model, client.set(theta=theta, mine=model.layout.is_head(theta.device)))


def reset_sums(model: fl.Model, client: fl.Client) -> fl.Client:
    """Set the sums of features to 0."""
    weight, _ = model.head(client.theta)
    return client.set(sums=torch.zeros_like(weight), squares=client.theta.new_zeros(()))


def add_features(model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
    """Add a batch's features to the sums of their classes, and their squares."""
    scratch, features = client.scratch, model.features(client.theta, batch.x).to(client.theta.dtype)
    with torch.autocast(features.device.type, enabled=False):
        labels = one_hot(batch.y, model.classes).to(features.dtype) * batch.weight[:, None]
        squares = (features.square().sum(dim=1) * batch.weight).sum()
        return client.set(sums=scratch["sums"] + labels.T @ features, squares=scratch["squares"] + squares)


def class_means(client: fl.Client) -> Tensor:
    """Return the mean features of each class: its prototype, and 0 for a class that the client does not have."""
    return client.scratch["sums"] / client.data["counts"].clamp(min=1)[:, None]


def measure(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload statistics of the received base's features for the combination of heads; set the targets of the alignment.

    h_c = p_c mu_c, and v = (E|z|^2 - sum_c |h_c|^2) / n. Targets are the global prototypes, and the client's class
    means where there is no global prototype.
    """
    n, means = client.data["n"].clamp(min=1), class_means(client)
    h = means * (client.data["counts"] / n)[:, None]
    variance = (client.scratch["squares"] / n - h.square().sum()) / n
    prototypes = fl.dense(client.download, "prototypes").view_as(means)
    exists = fl.dense(client.download, "has_prototype")
    client = client.set(target=torch.where(exists[:, None], prototypes, means))
    return client.send(h=h.flatten(), variance=variance)


def alignment_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """Return the cross-entropy plus lam times the mean squared distance of features to their class's target."""
    weight, bias = model.head(client.theta)
    features = model.features(client.theta, batch.x)
    distance = (features - client.scratch["target"][batch.y]).square().mean(dim=1)
    losses = cross_entropy(features @ weight.T + bias, batch.y, reduction="none")
    return batch.mean(losses + client.hparams["lam"] * distance)


def upload_model(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload the model, and the prototypes of the trained base with the number of samples of each."""
    counts = client.data["counts"].to(client.theta.dtype)
    return client.send(theta=client.theta, prototypes=class_means(client).flatten(), counts=counts)


def combination(h: Tensor, variance: Tensor, n: Tensor) -> Tensor:
    """Return each client's weights of the cohort's heads [clients, clients].

    Client i's minimise a'(diag(v) + D_i)a on the simplex, D_i[j, k] = (h_i - h_j).(h_i - h_k).
    """
    h, has = h.double(), n > 0
    h = h - h.mean(dim=0)  # leaves differences as they are, and reduces cancellation
    dot = h @ h.T
    distance = dot.diag()[:, None, None] - dot[:, :, None] - dot[:, None, :] + dot
    alone = torch.eye(len(n), dtype=torch.bool, device=n.device)
    weights = on_simplex(distance + variance.double().clamp(min=0).diag(), alone | (has & has[:, None]))
    weights = torch.where(weights < _SMALLEST, 0, weights)
    return weights / weights.sum(dim=1, keepdim=True)


def on_simplex(matrix: Tensor, allowed: Tensor) -> Tensor:
    """Minimise a'Qa for many Q [problems, m, m] at once: a >= 0, sum a = 1, a = 0 where it is not `allowed`.

    a is x / sum x, where x >= 0 minimises x'Qx / 2 - sum x. An active-set method (as Lawson and Hanson's): solve for
    the entries of the positive set and step to that solution, or as far as all entries stay positive, which removes the
    first one that would not from the set; at the solution, add the entry of the steepest descent. Problems proceed
    independently of each other.
    """
    m = matrix.shape[-1]
    eye = torch.eye(m, dtype=matrix.dtype, device=matrix.device)
    scale = matrix.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=torch.finfo(matrix.dtype).tiny)
    matrix = matrix / scale[:, None, None] + _RIDGE * eye
    positive, x = allowed, allowed.to(matrix.dtype)
    for _ in range(10 * m):
        both = positive[:, :, None] & positive[:, None, :]
        factor = torch.linalg.cholesky_ex(torch.where(both, matrix, eye))[0]
        goal = torch.cholesky_solve(positive.to(matrix.dtype)[..., None], factor)[..., 0]
        blocks = positive & (goal <= 0)
        limit = torch.where(blocks, x / (x - goal), 1)
        step = limit.amin(dim=1, keepdim=True)
        positive = positive & ~(blocks & (limit <= step))
        x = torch.where(positive, x + step * (goal - x), 0)
        descent = torch.where(allowed & ~positive, 1 - (matrix @ x[..., None])[..., 0], 0)
        steepest = descent == descent.amax(dim=1, keepdim=True)
        enters = steepest & (descent > _FLAT) & ~blocks.any(dim=1, keepdim=True)
        if not (blocks | enters).any():
            break
        positive = positive | enters
    return x / x.sum(dim=1, keepdim=True)


@dataclass(frozen=True)
class FedPAC(fl.Method):
    """A shared base with aligned features, and heads combined by the server."""

    name: ClassVar[str] = "fedpac"
    summary: ClassVar[str] = "shared base whose features are aligned by class; each head is combined from the cohort's"
    paper: ClassVar[str] = "Xu et al., Personalized FL with Feature Alignment and Classifier Collaboration, ICLR 2023"
    one_label: ClassVar[bool] = True

    lam: float = fl.option(1.0, "weight of the alignment with the prototypes; the authors' 1", low=0)
    head_epochs: int = fl.option(1, "local epochs for the head, before the base's; the authors' 1", low=0)
    head_lr: float = fl.option(0.1, "learning rate of the head's epochs, without a schedule; the authors' 0.1", low=0)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Hold each client's head in its record; it starts as that of theta^0, which the server's model keeps."""
        prototypes = torch.zeros_like(model.head(theta)[0]).flatten()
        none = theta.new_zeros(model.classes, dtype=torch.bool)
        server = {"theta": theta, "prototypes": prototypes, "has_prototype": none}
        return fl.InitialState(server=server, record={"head": model.layout.split(theta)[1]}, state={})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the base, the prototypes, and each client its head."""
        base, _ = ctx.model.layout.split(server["theta"])
        shared = {"base": base, "prototypes": server["prototypes"], "has_prototype": server["has_prototype"]}
        return {**{name: fl.broadcast(value, ctx) for name, value in shared.items()}, "head": records["head"]}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Compute statistics, train the head, then the base; from round 2 on, with alignment to the prototypes."""
        head_epochs = min(self.head_epochs, ctx.epochs)
        head = fl.Train(head_epochs, part="head", lr="head_lr")
        base = fl.Train(ctx.epochs - head_epochs, part="base", loss=alignment_loss if ctx.round > 1 else None)
        features = fl.Sweep(add_features)
        return [join_parts, features, measure, head, base, reset_sums, features, upload_model]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average bases by samples and prototypes by samples of their class; combine heads for each client."""
        layout, counts = ctx.model.layout, update.dense("counts")
        bases, heads = layout.split(update.dense("theta"))
        _, initial_head = layout.split(server["theta"])
        theta, total = layout.join(fl.average(bases, update.n), initial_head), counts.sum(dim=0)
        each = update.dense("prototypes").unflatten(1, (ctx.model.classes, -1))
        prototypes = (each * counts[..., None]).sum(dim=0) / total.clamp(min=1)[:, None]
        weights = combination(update.dense("h"), update.dense("variance"), update.n).to(heads.dtype)
        combined = heads[0] + weights @ (heads - heads[0])  # as differences: equal heads combine to that head exactly
        server = {"theta": theta, "prototypes": prototypes.flatten(), "has_prototype": total > 0}
        return server, {"head": combined}

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the current base with the client's combined head."""
        return [join_parts]
