"""Clients that are held out from training: how well a method does for a client that it has never seen."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedobp.engine import ClientPool, Engine, PersonalModels, PoolJob, diverged
from fedobp.evaluation.metrics import Accuracy, ClientCounts, merge
from fedobp.evaluation.tester import ClientTester
from fedobp.evaluation.view import ServerView
from fedobp.label_shift import em_prior
from fedobp.method import CohortUpdate, Method, RoundContext
from fedobp.records import Tensors, take


@dataclass(frozen=True)
class NewClients:
    """Accuracies of clients that never trained. Results of older versions have neither of the last two."""

    served: Accuracy  # with the model that a new client gets
    visited: Accuracy  # served again, after one round whose upload no other client gets
    last: Accuracy  # with the model that they trained in that round
    visited_twice: Accuracy | None = None  # served again, after a second such round
    unlabelled: Accuracy | None = None  # with the global model and a label prior from unlabelled inputs

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the accuracies as plain values."""
        return {name: column.to_json() for name, column in vars(self).items() if column}


def evaluate_new_clients(
    method: Method,
    clients: ClientPool,
    engine: Engine,
    test: ClientTester,
    personalize: Callable[[PoolJob], PersonalModels],
    held_out: Iterable[Tensor],
    view: ServerView,
) -> NewClients:
    """Test chunks of held-out clients: as they are served at first, and again after each has trained once and twice.

    The server keeps its record of such a client, as after any round, and nothing else of the upload.
    """
    server, hparams = view.server, view.hparams
    found: dict[str, list[ClientCounts]] = {}

    def add(column: str, counts: list[ClientCounts]) -> None:
        found.setdefault(column, []).extend(counts)

    def use(ctx: RoundContext, records: Tensors, pool: ClientPool) -> PoolJob:
        download, _ = method.download(ctx, server, records)
        return PoolJob(ctx, method.personalize(ctx), hparams, download, method.predict, clients=pool)

    def serve(column: str, job: PoolJob) -> None:
        served = personalize(job)
        add(column, test(job, served.theta, scratch=served.scratch))

    for chunk in held_out:
        ctx, records, pool = view.context(chunk), view.records.gather(chunk.tolist()), clients.untouched_copy()
        for column in ("visited", "visited_twice"):
            if column == "visited":
                new = use(ctx, records, pool)
                serve("served", new)
                if method.predict is None and ctx.model.has_linear_head and not ctx.model.every_position:
                    add("unlabelled", test(new, _with_estimated_priors(new, server["theta"], test)))
            training = replace(ctx, serving=False)
            download, sent = method.download(training, server, records)
            visit = PoolJob(training, method.client_update(training), hparams, download, clients=pool)
            [update] = engine.train([visit])
            if not update.finite.all():
                raise diverged(ctx, update.finite, hparams, method)
            after = _records_after(method, training, server, sent, update)
            records = {name: after[name] for name in records}
            again = use(ctx, records, pool)
            serve(column, again)
            if column == "visited":
                add("last", test(again, pool.last_models(chunk, server["theta"])))
            ctx = replace(ctx, round=ctx.round + 1)  # the second visit has batches of its own
    return NewClients(**{name: merge(counts) for name, counts in found.items()})


def _records_after(method: Method, ctx: RoundContext, server: Tensors, sent: Tensors, update: CohortUpdate) -> Tensors:
    """Return the records after an upload of each client by itself: a method may make them from the whole cohort's."""
    alone = [
        method.aggregate(
            replace(ctx, cohort=ctx.cohort[at]),
            server,
            take(sent, at),
            CohortUpdate(take(update.upload, at), update.n[at]),
        )[1]
        for at in (slice(at, at + 1) for at in range(len(ctx.cohort)))
    ]
    return {name: torch.cat([record[name] for record in alone]) for name in alone[0]}


def _with_estimated_priors(job: PoolJob, theta: Tensor, test: ClientTester) -> Tensor:
    """Return the model theta for each client, with log(p / p_g) in the classifier's bias.

    p is estimated from the inputs of the client's training part. p_g is uniform: nobody may ask other clients for their
    labels, and a client without labels cannot know how often each one occurs among them.
    """
    classes, layout = job.ctx.model.classes, job.ctx.model.layout
    models = theta.repeat(len(job.ctx.cohort), 1)
    uniform = torch.full((classes,), 1 / classes, dtype=torch.float64)
    priors = torch.stack([em_prior(rows.double(), uniform) for rows in test.logits(job, models, "train")])
    models[:, layout.slices["classifier.bias"]] += (priors / uniform).log().to(models)
    return models
