"""pFedFDA (McLaughlin and Su, Personalized Federated Learning via Feature Distribution Adaptation, NeurIPS 2024).

A shared base whose features are modelled as Gaussians, one mean per class and one covariance for all. The head is not
learned: it is the linear discriminant of means, covariance and the client's label frequencies. The base is trained
under the head of the global Gaussians; then a client estimates its own Gaussians and interpolates between the global
ones and them by beta, one number for the means and one for the covariance, chosen by cross-validation. The server
averages the results. For use, a client adapts again with the current base.

From the authors' code: two folds, beta from 0.5 in at most 10 iterations, all constants, and that a class of up to two
samples has the global mean in use. Their batches of 50, momentum 0.5, weight decay 5e-4 and Bernoulli cohorts are
replaced by the common protocol. Deviations: features are computed in one pass after training, while the authors collect
them during all epochs of training; beta is found by damped Gauss-Newton steps instead of L-BFGS and a clip; no
projection to a positive definite matrix is needed.

`as-published` is what ran behind the FedOBP paper's table: there the framework trains and averages whole models as in
FedAvg and never updates the Gaussians, so that clients adapt from random means and the identity, and only for use. On a
GPU its search for beta always fails, because features are on the device and labels on the CPU, and the initial values
stay: 1 for the means, 0.5 for the covariance.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedobp import method as fl
from fedobp.algorithms.fedavg import take_global, upload_model
from fedobp.algorithms.gaussians import EPS, CrossValidation, best_beta, discriminant, estimate, shrunk
from fedobp.keys import NO_CLIENT, Purpose, fold, uniform

_FOLDS = 2
_FEW = 2  # in use, a class of so many samples or fewer has the global mean
_INITIAL = (1.0, 0.5)  # beta as-published


def log_prior(client: fl.Client) -> Tensor:
    """Return the log of the client's label frequencies, made positive."""
    frequencies = client.data["counts"].to(client.theta.dtype) / client.data["n"].clamp(min=1) + EPS
    return (frequencies / frequencies.sum()).log()


def take_gaussians(model: fl.Model, client: fl.Client) -> fl.Client:
    """Start from the base under the head of the global Gaussians; beta is 0 until it has been searched for."""
    layout, download = model.layout, client.download
    mean = fl.dense(download, "mean").unflatten(0, (model.classes, -1))
    covariance = fl.dense(download, "covariance").unflatten(0, (mean.shape[1], -1))
    base = fl.dense(download, "base") if "base" in download else layout.split(fl.dense(download, "theta"))[0]
    theta = layout.join(base, base.new_zeros(layout.size - len(base)))
    client = client.set(theta=theta, mean=mean, covariance=covariance, mine=layout.is_head(theta.device))
    return adapt(model, client.set(own_mean=mean, own_covariance=covariance, beta=mean.new_zeros(2)))


def replace_rare_means(model: fl.Model, client: fl.Client) -> fl.Client:
    """Use the global mean for classes of very few samples, as the authors do before use."""
    enough = client.data["counts"] > _FEW
    return client.set(own_mean=torch.where(enough[:, None], client.scratch["own_mean"], client.scratch["mean"]))


def adapt(model: fl.Model, client: fl.Client) -> fl.Client:
    """Take beta of the client's Gaussians and 1 - beta of the global ones, and set the head of the result."""
    scratch, beta = client.scratch, client.scratch["beta"]
    mean = scratch["mean"] + beta[0] * (scratch["own_mean"] - scratch["mean"])
    covariance = scratch["covariance"] + beta[1] * (scratch["own_covariance"] - scratch["covariance"])
    theta = model.with_head(client.theta, *discriminant(mean, covariance, log_prior(client)))
    return client.set(theta=theta, mean=mean, covariance=covariance)


def upload_adapted(model: fl.Model, client: fl.Client) -> fl.Client:
    """Upload the trained base and the adapted Gaussians."""
    (base, _), scratch = model.layout.split(client.theta), client.scratch
    return client.send(base=base, mean=scratch["mean"].flatten(), covariance=scratch["covariance"].flatten())


@dataclass(frozen=True)
class PFedFDA(fl.Method):
    """A shared base, with heads computed from Gaussians that are adapted to each client."""

    name: ClassVar[str] = "pfedfda"
    summary: ClassVar[str] = "shared base and class Gaussians; each head follows from Gaussians adapted to the client"
    paper: ClassVar[str] = "McLaughlin and Su, Personalized FL via Feature Distribution Adaptation, NeurIPS 2024"
    one_label: ClassVar[bool] = True

    mode: str = fl.mode_option("as-published: FedAvg, with the adaptation from random Gaussians only for use")
    betas: str = fl.option(
        "two",
        "one beta for means and one for the covariance (two, the authors' default), one for both, or 1 for both (own); "
        "no effect as-published",
        choices=("two", "one", "own"),
    )
    beta_steps: int = fl.option(
        10, "steps of the search for beta; 10 is the authors' limit; no effect as-published", low=0
    )
    last: str = fl.option("sample", "clients of the last round; the authors: all", choices=("sample", "all"))

    def cohorts(self, round: int, rounds: int) -> tuple[fl.CohortKind, ...]:
        """With last=all, all clients take part in the last round."""
        return ("all",) if self.last == "all" and round == rounds else ("sampled",)

    def init(self, model: fl.Model, theta: Tensor, seed: int) -> fl.InitialState:
        """Means are uniform in [0, 1], the covariance is the identity; the server's model keeps the head of theta^0."""
        classes, size = model.head(theta)[0].shape
        mean = uniform(fold(seed, 0, NO_CLIENT, Purpose.INIT), classes * size).to(theta)
        covariance = torch.eye(size).flatten().to(theta)
        return fl.InitialState(server={"theta": theta, "mean": mean, "covariance": covariance}, record={}, state={})

    def download(self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors) -> tuple[fl.Record, fl.Tensors]:
        """Send the base (as-published: the whole model) and the Gaussians."""
        download = dict(server)
        if self.mode == "faithful":
            download["base"], _ = ctx.model.layout.split(download.pop("theta"))
        return {name: fl.broadcast(value, ctx) for name, value in download.items()}, records

    def client_update(self, ctx: fl.RoundContext) -> fl.Program:
        """Train the base under a frozen head, then adapt the Gaussians to its features."""
        if self.mode == "as-published":
            return [take_global, fl.Train(ctx.epochs), upload_model]
        measure = fl.Sweep(self._measure, whole=True)
        return [take_gaussians, fl.Train(ctx.epochs, part="base"), measure, adapt, upload_adapted]

    def aggregate(
        self, ctx: fl.RoundContext, server: fl.Tensors, records: fl.Tensors, update: fl.CohortUpdate
    ) -> tuple[fl.Tensors, fl.Tensors]:
        """Average bases and Gaussians by samples."""
        layout, mean = ctx.model.layout, {name: update.mean(name) for name in update.upload}
        if self.mode == "faithful":
            mean["theta"] = layout.join(mean.pop("base"), layout.split(server["theta"])[1])
        return {**server, **mean}, records

    def personalize(self, ctx: fl.RoundContext) -> fl.Program:
        """Adapt the Gaussians to the features of the current base, and use the head of the result."""
        return [take_gaussians, fl.Sweep(self._measure, whole=True), replace_rare_means, adapt]

    def _measure(self, model: fl.Model, client: fl.Client, batch: fl.Batch) -> fl.Client:
        """Estimate the client's Gaussians, and beta; beta is 0 where a fold would leave fewer than two samples."""
        mean, covariance, dtype = client.scratch["mean"], client.scratch["covariance"], client.theta.dtype
        features = model.features(client.theta, batch.x).to(dtype)
        with torch.autocast(features.device.type, enabled=False):
            labels = one_hot(batch.y, model.classes).to(dtype) * batch.weight[:, None]
            published = self.mode == "as-published"
            own = estimate(features, labels, mean, few=_FEW if published else 0)
            client = client.set(own_mean=own[0], own_covariance=own[1])
            in_both = labels.sum(dim=0) >= _FOLDS  # classes that both folds have a sample of
            if published:
                return client.set(beta=torch.where(in_both.any(), mean.new_tensor(_INITIAL), 0))
            if self.betas == "own":
                return client.set(beta=torch.ones_like(client.scratch["beta"]))
            # Stratified: the samples of each class, in random order, go to the folds in turn, from a random one on.
            counted = labels * in_both
            first = fold(batch.key, torch.arange(model.classes, device=features.device)) % _FOLDS
            which = torch.arange(_FOLDS, device=features.device)[:, None, None]
            held_out = (counted.cumsum(dim=0) + first) % _FOLDS == which
            kept = counted * ~held_out
            means, covariances = estimate(features, kept, mean)
            start, change = (mean, shrunk(covariance)), (means - mean, shrunk(covariances - covariance))
            validation = CrossValidation(features, counted * held_out, log_prior(client), *start, *change)
            beta = best_beta(validation, self.beta_steps, self.betas == "one")
            return client.set(beta=torch.where((kept.sum(dim=(1, 2)) >= 2).all(), beta, 0))
