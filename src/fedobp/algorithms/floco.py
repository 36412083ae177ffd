"""FLOCO (Grinwald et al., Federated Learning over Connected Modes, NeurIPS 2024).

The classifier's weight is a simplex: M endpoints, each a whole weight matrix, of which every convex combination is a
classifier; the bias is shared. Clients train at random points of it, one per batch, and are served its centre. After
tau rounds all clients train once, and their endpoints are projected to points of the simplex, close together for
similar clients. These uploads have no other use. From the next cohort on, in the same round tau + 1, client i trains
around its point p_i and is served the model there.

`faithful` has the authors' M = 20, tau = half of the rounds and rho = 0.01 (CIFAR-10, Dirichlet); `as-published` has
the values behind the FedOBP paper's table, the defaults of the authors' code: M = 10, tau = 10, rho = 0.1. Training
follows the common budget; FLOCO+, which adds a Ditto-like model, is omitted. PCA finds no more components than there
are clients: with fewer than M clients the other coordinates are 0, and in each p_i the endpoints that these stand for
have one common weight.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedobp import method as fl
from fedobp.keys import NO_CLIENT, Purpose, fold, normal, uniform

# Relative difference up to which values tie: above the rounding error, and so small that beside two clients at one
# point, whose energy is 1e8, the energy of other pairs still counts.
_TIE = 1e-12


def is_weight(name: str) -> bool:
    """Say whether a tensor is the one that the endpoints replace."""
    return name == "classifier.weight"


def weight_at(point: Tensor, ends: Tensor) -> Tensor:
    """Return the combination of endpoints [M * entries] at a point [M]."""
    return point @ ends.reshape(len(point), -1)


def model_at(model: fl.Model, point: Tensor, rest: Tensor, ends: Tensor) -> Tensor:
    """Return the whole model at a point; `rest` is all but the classifier's weight."""
    return model.layout.join(rest, weight_at(point, ends), is_weight)


def take_centre(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start at the client's centre: the centre of the simplex, or p_i."""
    rest, ends, centre = (fl.dense(client.download, name) for name in ("rest", "ends", "centre"))
    return client.set(theta=model_at(model, centre, rest, ends), ends=ends, centre=centre)


def upload_ends(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload the endpoints; the client's last local model is the one at its centre."""
    rest, ends = model.layout.split(client.theta, is_weight)[0], client.scratch["ends"]
    return client.send(ends=ends).set(theta=model_at(model, client.scratch["centre"], rest, ends))


def upload_rest(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload all other tensors."""
    return client.send(rest=model.layout.split(client.theta, is_weight)[0])


def mark_weight(model: fl.Model, client: fl.Client) -> fl.Client:
    """Mark the classifier's weight as personal: it is the one at p_i."""
    return client.set(mine=model.layout.mask(is_weight, client.theta.device))


def loss_at(model: fl.Model, client: fl.Client, batch: fl.Batch, point: Tensor) -> Tensor:
    """Return the cross-entropy of the model at a point, the same for the whole batch."""
    tensors = model.layout.views(client.theta)
    weight = weight_at(point.to(client.theta.dtype), client.scratch["ends"]).view_as(tensors["classifier.weight"])
    return batch.cross_entropy(model.apply({**tensors, "classifier.weight": weight}, batch.x))


def simplex_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """Before the projection: at a uniform random point of the simplex, by normalised exponentials."""
    shares = -uniform(batch.key, len(client.scratch["centre"])).log()
    return loss_at(model, client, batch, shares / shares.sum())


def region_loss(model: fl.Model, client: fl.Client, batch: fl.Batch) -> Tensor:
    """After it: at p_i + r u, r uniform up to rho, u of random signs and L1 norm 1; it can be outside the simplex."""
    centre = client.scratch["centre"]
    draws = uniform(batch.key, len(centre) + 1)
    direction = 2 * draws[1:] - 1
    return loss_at(model, client, batch, centre + client.hparams["rho"] * draws[0] * direction / direction.abs().sum())


def principal_components(uploads: Tensor, count: int) -> Tensor:
    """Return the first principal components [clients, count] of uploads, in float64; 0 where there are fewer.

    A component's sign is free, but it matters: the projection onto the simplex keeps positive coordinates. As in
    scikit-learn from 1.5 on, which the authors use, the largest loading, here the first of equals, is positive.
    """
    centred = uploads.double() - uploads.double().mean(dim=0)
    triangle = torch.linalg.qr(centred.t(), mode="r").R  # one column per client, and the same components
    left, values, _ = torch.linalg.svd(triangle.t(), full_matrices=False)
    left, values = left[:, :count], values[:count]
    loadings = centred.t() @ left  # each column times its singular value
    size = loadings.abs()
    largest = (size >= (1 - _TIE) * size.max(dim=0).values).int().argmax(dim=0)  # the first of them
    found = left * values * loadings.gather(0, largest[None]).sign()
    return functional.pad(found, (0, count - found.shape[1]))


def project_to_simplex(points: Tensor, z: Tensor) -> Tensor:
    """Return the nearest points [clients, M] without negative coordinates and with the sum z."""
    ordered = points.sort(dim=1, descending=True).values
    excess = ordered.cumsum(dim=1) - z
    kept = (ordered * torch.arange(1, points.shape[1] + 1, device=points.device) > excess).sum(dim=1, keepdim=True)
    return (points - excess.gather(1, kept - 1) / kept).clamp(min=0)


def place_on_simplex(points: Tensor) -> Tensor:
    """Project points to the simplex of sum z and scale them to sum 1, with the z of 1000 of least Riesz energy (s = 2).

    Many z give the same points: the first of those that tie within rounding is taken.
    """

    def placed(z: Tensor) -> Tensor:
        projected = project_to_simplex(points, z)
        return projected / projected.sum(dim=1, keepdim=True)

    sizes = torch.linspace(1e-4, 1, 1000, dtype=points.dtype, device=points.device)
    energy = torch.stack([torch.pdist(placed(z)).clamp(min=1e-4).pow(-2).sum().log() for z in sizes])
    return placed(sizes[(energy <= energy.min() + _TIE).int().argmax()])


@dataclass(frozen=True)
class Floco(fl.Method):
    """A simplex of classifiers, in which each client has a point."""

    name: ClassVar[str] = "floco"
    summary: ClassVar[str] = "a simplex of classifiers on a shared base; similar clients train neighbouring regions"
    paper: ClassVar[str] = "Grinwald et al., Federated Learning over Connected Modes, NeurIPS 2024"

    mode: str = fl.mode_option(
        "where the other options are 0: the authors' endpoints 20, tau half of the rounds, rho 0.01, or those of the "
        "FedOBP paper's table (as-published): 10, 10, 0.1"
    )
    endpoints: int = fl.option(0, "number M of endpoints; 0: the mode's", low=0)
    tau: int = fl.option(
        0, "rounds before the projection, without one if there are no more rounds; 0: the mode's", low=0, high=10**6
    )
    rho: float = fl.option(0.0, "radius within which clients train after the projection; 0: the mode's", low=0)

    def hparams(self) -> dict[str, float]:
        """Return the radius."""
        return {"rho": self.rho or self._of_mode(0.01, 0.1)}

    def cohorts(self, round: int, rounds: int) -> tuple[fl.CohortKind, ...]:
        """Round tau + 1 starts with the projection, in which all clients take part."""
        return ("all", "sampled") if round == self._tau(rounds) + 1 else ("sampled",)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Draw the endpoints (Xavier, normal); the global model's weight is their mean from the start."""
        weight, _ = model.head(theta)
        count = self.endpoints or int(self._of_mode(20, 10))
        draws = normal(fold(seed, 0, NO_CLIENT, Purpose.INIT), count * weight.numel())
        ends, centre = (draws * math.sqrt(2 / sum(weight.shape))).to(theta), theta.new_full((count,), 1 / count)
        theta = model_at(model, centre, model.layout.split(theta, is_weight)[0], ends)
        return fl.InitialState(server={"theta": theta, "ends": ends}, record={"centre": centre}, state={})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the endpoints, all other tensors, and each client's centre."""
        rest, _ = ctx.model.layout.split(server["theta"], is_weight)
        shared = {"rest": fl.broadcast(rest, ctx), "ends": fl.broadcast(server["ends"], ctx)}
        return {**shared, "centre": records["centre"]}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train all tensors at random points; only the endpoints are uploaded for the projection."""
        projected = ctx.round > self._tau(ctx.rounds) and not ctx.full_participation
        train = fl.Train(ctx.epochs, learn=("theta", "ends"), loss=region_loss if projected else simplex_loss)
        return [take_centre, train, upload_ends, *([] if ctx.full_participation else [upload_rest])]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average all tensors; in the projection keep the model, and set the clients' points instead."""
        centre = records["centre"]
        count = centre.shape[1]
        if ctx.full_participation:
            points = place_on_simplex(principal_components(update.dense("ends"), count))
            return server, {"centre": points.to(centre)}
        ends, middle = update.mean("ends"), torch.full_like(centre[0], 1 / count)
        return {"theta": model_at(ctx.model, middle, update.mean("rest"), ends), "ends": ends}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Use the model at the client's centre."""
        return [take_centre, mark_weight] if ctx.round > self._tau(ctx.rounds) else [take_centre]

    def _tau(self, rounds: int) -> int:
        return self.tau or int(self._of_mode(max(1, rounds // 2), 10))

    def _of_mode(self, faithful: float, published: float) -> float:
        return faithful if self.mode == "faithful" else published
