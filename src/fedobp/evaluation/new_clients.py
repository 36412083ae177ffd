"""Clients that are held out from training: how well a method does for a client that it has never seen."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedobp.engine import ClientPool, Engine, PersonalModels, PoolJob, diverged
from fedobp.evaluation.metrics import Accuracy, ClientCounts, merge
from fedobp.evaluation.tester import ClientTester
from fedobp.evaluation.view import ServerView
from fedobp.method import CohortUpdate, Method
from fedobp.records import take


@dataclass(frozen=True)
class NewClients:
    """Accuracies of clients that never trained."""

    served: Accuracy  # with the model that a new client gets
    visited: Accuracy  # served again, after one round whose upload no other client gets
    last: Accuracy  # with the model that they trained in that round

    def to_json(self) -> dict[str, dict[str, float]]:
        """Return the accuracies as plain values."""
        return {name: column.to_json() for name, column in vars(self).items()}


def evaluate_new_clients(
    method: Method,
    clients: ClientPool,
    engine: Engine,
    test: ClientTester,
    personalize: Callable[[PoolJob], PersonalModels],
    held_out: Iterable[Tensor],
    view: ServerView,
) -> NewClients:
    """Test chunks of held-out clients: as they are served at first, and again after each has trained once.

    The server keeps its record of such a client, as after any round, and nothing else of the upload.
    """
    server, hparams = view.server, view.hparams
    found: dict[str, list[ClientCounts]] = {"served": [], "visited": [], "last": []}

    def serve(job: PoolJob) -> list[ClientCounts]:
        served = personalize(job)
        return test(job, served.theta, scratch=served.scratch)

    for chunk in held_out:
        ctx, start = view.context(chunk), view.records.gather(chunk.tolist())
        download, sent = method.download(ctx, server, start)
        job = PoolJob(ctx, method.personalize(ctx), hparams, download, method.predict, clients=clients.untouched_copy())
        found["served"] += serve(job)
        [update] = engine.train([replace(job, program=method.client_update(ctx))])
        if not update.finite.all():
            raise diverged(ctx, update.finite, hparams, method)
        # Each by itself: a method may make records of a cohort's members from one another's uploads.
        alone = [
            method.aggregate(
                replace(ctx, cohort=chunk[at]),
                server,
                take(sent, at),
                CohortUpdate(take(update.upload, at), update.n[at]),
            )[1]
            for at in (slice(at, at + 1) for at in range(len(chunk)))
        ]
        after = {name: torch.cat([record[name] for record in alone]) for name in start}
        download, _ = method.download(ctx, server, after)
        found["visited"] += serve(replace(job, download=download))
        found["last"] += test(job, job.clients.last_models(chunk, server["theta"]))
    return NewClients(**{name: merge(counts) for name, counts in found.items()})
