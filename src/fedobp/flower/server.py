"""The server of a federation on nodes: the rounds of a `Run`, whose clients are asked by Flower messages.

Every answer is checked against what the server itself expects: one that is wrong or late is refused, and the round goes
on with the others. After every round it takes a checkpoint, from which the same command goes on.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedobp.checkpoint import Checkpoints, PastRun, common_round, remove
from fedobp.config import run_name
from fedobp.engine import Budget, ClientJob, LostClients, memory_of
from fedobp.errors import FedobpError, short
from fedobp.evaluation import Counts, Report, ServerView, report
from fedobp.evaluation.evaluator import Keep
from fedobp.files import user_cache
from fedobp.flower.nodes import Nodes, Request, Say
from fedobp.flower.task import NO_VISIT, FederationSettings, Visit, read_settings
from fedobp.method import CohortUpdate
from fedobp.records import Record, stack, take
from fedobp.result import Result
from fedobp.run import Run
from fedobp.wire import decode_expected, encode

T = TypeVar("T")


class Server:
    """A run whose clients are on nodes."""

    def __init__(self, nodes: Nodes, settings: FederationSettings, accepted: dict[int, Visit]) -> None:
        self._nodes, self._settings = nodes, settings
        self._accepted = accepted  # of each client: the last training that the server took

    def answer(self, job: ClientJob, known: dict[int, Any]) -> CohortUpdate | LostClients:
        """Train a cohort on its nodes; `known` are answers to the same job, from before some clients were lost."""
        number, cohort = job.ctx.round, job.ctx.cohort.tolist()
        requests, expected = dict[int, Request](), dict[int, Record]()
        state = self._settings.initial()[1].state
        for position, client in enumerate(cohort):
            if client not in known:
                download = take(job.download, position)
                ctx = replace(job.ctx, cohort=job.ctx.cohort[position : position + 1])
                expected[client] = self._settings.method.expected_upload(ctx, download, state)
                values = self._values(client, self._next(client, number), full=job.ctx.full_participation)
                requests[client] = Request(values, encode(download))
        known |= self._nodes.ask("train", requests, _Reader(self._nodes.about, expected), number)
        lost = tuple(client for client, answer in known.items() if answer is None)
        if lost:
            for client in lost:
                del known[client]
                self._accepted.pop(client, None)
                self._nodes.log("train", number, client, None, "lost")
            return LostClients(lost)
        answered = tuple(position for position, client in enumerate(cohort) if client in known)
        if len(answered) < self._settings.rules.min_replies * len(cohort):
            answered = ()
        for position in answered:
            self._accepted[cohort[position]] = self._next(cohort[position], number)
        return _update([known[cohort[position]] for position in answered], answered)

    def _next(self, client: int, number: int) -> Visit:
        """Return a client's next visit: its first one of this round, or one more."""
        last, turn = self._accepted.get(client, NO_VISIT)
        return (number, turn + 1) if last == number else (number, 1)

    def _values(self, client: int, visit: Visit, full: bool = False) -> dict[str, Any]:
        accepted = self._accepted.get(client, NO_VISIT)
        return {"visit": visit, "accepted": accepted, "session": self._nodes.session, "all": full}

    def evaluate(self, view: ServerView, *, everything: bool, keep: Keep | None = None) -> Report:
        """Evaluate all clients on their nodes, and merge their counts."""
        config, method, layout = self._settings.config, self._settings.method, self._settings.model.layout
        clients = torch.arange(config.trainers)
        number, requests = view.context(clients[:1]).round, dict[int, Request]()
        for client in clients.tolist():
            ctx = view.context(clients[client : client + 1])
            download: Record = take(method.download(ctx, view.server, view.records.gather([client]))[0], 0)
            if everything:  # the last model of a client that has not trained
                download["global"] = view.server["theta"]
            values = self._values(client, (number, 0), full=False)
            requests[client] = Request({**values, "everything": everything}, encode(download))

        def read(client: int, values: dict[str, Any], payload: bytes) -> Counts | None:
            return None if values.get("lost") else Counts.from_json(values["counts"], len(self._settings.inputs.labels))

        found = self._nodes.ask("evaluate", requests, read, number)
        counts = {client: one for client, one in sorted(found.items()) if one is not None}
        if not any(bool(one.columns["served"][0].tested.any()) for one in counts.values()):
            raise FedobpError(
                f"no node answered the evaluation of round {number} with test samples: start nodes, and run this again"
            )
        first, *more = counts.values()
        return _for_all(report(number, sum(more, first), layout), list(counts), config.trainers)


def _for_all(found: Report, answered: Sequence[int], clients: int) -> Report:
    """Return a report with a place for each client; one that did not answer has no accuracy."""
    places = {client: at for at, client in enumerate(answered)}

    def spread(values: Sequence[T], missing: T) -> tuple[T, ...]:
        return tuple(values[places[client]] if client in places else missing for client in range(clients))

    columns = {
        name: replace(column, per_client=spread(column.per_client, None))
        for name in ("served", "last", "finetuned")
        if (column := getattr(found, name)) is not None
    }
    none = (0,) * len(found.personal_per_client[0])
    return replace(found, **columns, personal_per_client=spread(found.personal_per_client, none))


class Upload(NamedTuple):
    """A client's answer to a job."""

    upload: Record
    n: int
    loss: float
    processed: int


@dataclass(frozen=True)
class _Reader:
    """Reads clients' uploads: what is not as the server expects is refused."""

    about: Mapping[int, Mapping[str, Any]]
    expected: Mapping[int, Record]

    def __call__(self, client: int, values: dict[str, Any], payload: bytes) -> Upload | None:
        if values.get("lost"):
            return None
        n, processed, loss = values["n"], values["processed"], values["loss"]
        if n != self.about[client]["train"]:
            raise FedobpError(
                f"client {client} trained on {short(n)} samples, and it has {self.about[client]['train']}"
            )
        if not isinstance(processed, int) or processed < 0 or not (loss is None or math.isfinite(loss)):
            raise FedobpError(f"client {client} reports numbers that are none")
        return Upload(
            decode_expected(payload, self.expected[client]), n, math.nan if loss is None else float(loss), processed
        )


def _update(uploads: Sequence[Upload], answered: tuple[int, ...]) -> CohortUpdate:
    """Return clients' answers as the update of their cohort."""
    n = torch.tensor([one.n for one in uploads], dtype=torch.int64)
    losses = torch.tensor([one.loss for one in uploads], dtype=torch.float64)  # of any precision, exactly
    return CohortUpdate(
        stack([one.upload for one in uploads]) if uploads else {}, n, int(n.sum()), losses,
        torch.ones(len(uploads), dtype=torch.bool), sum(one.processed for one in uploads), answered,
    )  # fmt: skip


def serve(grid: Grid, settings: FederationSettings, folder: Path, say: Say = print) -> Result:
    """Run a federation's rounds; in a folder with an unfinished run, go on after its newest checkpoint."""
    config = replace(settings.config, save_models="none" if settings.config.save_models == "none" else "global")
    name = run_name(config)
    if (folder / "result.json").exists():
        raise FedobpError(f"the run in {short(folder, 200)} has finished: name another folder for a new one")
    past = PastRun(folder, config, settings.id, [name]) if (folder / "config.toml").exists() else None
    done = common_round([past]) if past else 0
    folder.mkdir(parents=True, exist_ok=True)
    nodes = Nodes(grid, settings, folder, _longest(settings))
    say(f"federation {settings.id}: {config.method}, {config.clients} clients, round {done + 1} of {config.rounds}")
    nodes.wait_for(settings.rules.start_nodes or config.clients, settings.rules.wait, say)
    server = Server(nodes, settings, _accepted(folder / "metrics.jsonl", done))
    theta, initial = settings.initial()
    unknown = {"train": None, "test": None, "entropy": None}
    run = Run(
        config, settings.method, settings.model, initial, server.evaluate, Budget(memory_of(theta.device) / 4),
        provenance="Flower nodes", out=folder, partition=settings.id, keep_models=False, launch=[(name, config)],
        metadata=_metadata(settings),
        clients=[nodes.about.get(client, {"client": client, **unknown}) for client in range(config.clients)],
        continued_at=done if past else None,
    )  # fmt: skip
    try:
        with ThreadPoolExecutor(max_workers=1) as writer:
            checkpoints = Checkpoints(folder, run, {}, [name], writer)
            if done:
                checkpoints.restore(done)
            for number in range(done + 1, config.rounds + 1):
                _round(run, server, nodes, number, say)
                checkpoints.save(number)
            checkpoints.wait()
        result = run.result()
        remove(folder)
        return result
    finally:
        run.close()


def _round(run: Run, server: Server, nodes: Nodes, number: int, say: Say) -> None:
    """Run one round, and say how it went."""
    began, before = time.monotonic(), (run.accounting.bytes_down, run.accounting.bytes_up)
    nodes.statuses.clear()
    rounds, known = run.round(run.plan(number)), dict[int, Any]()
    job = next(rounds)
    with suppress(StopIteration):
        while True:
            update = server.answer(job, known)
            if not isinstance(update, LostClients):
                known = {}
            job = rounds.send(update)
    seconds = time.monotonic() - began
    run.log_times({"round": number, "train": seconds, "all": seconds, "runs": 1, "occupancy": 1.0}, seconds)
    counted = ", ".join(f"{count} {status}" for status, count in sorted(nodes.statuses.items()))
    down, up = run.accounting.bytes_down - before[0], run.accounting.bytes_up - before[1]
    last = run.reports[-1] if run.reports and run.reports[-1].round == number else None
    accuracy = f", accuracy {last.served.pooled:.2f}" if last else ""
    say(f"round {number}: {counted}; {down:,} bytes down, {up:,} up{accuracy}, {seconds:.1f} s")


def _accepted(path: Path, done: int) -> dict[int, Visit]:
    """Return the last visit of each client that a checkpoint's round has taken, from the log."""
    found: dict[int, Visit] = {}
    lines = path.read_text(encoding="utf-8").splitlines()[:done] if done else []
    for line in map(json.loads, lines):
        for client, turns in Counter(line["cohort"]).items():
            found[int(client)] = (int(line["round"]), turns)
    return found


def _longest(settings: FederationSettings) -> int:
    """Return more bytes than any upload of a method can have: no method sends more than a few models."""
    return 8 * 8 * (settings.model.layout.size + 1024)


def _metadata(settings: FederationSettings) -> dict[str, Any]:
    inputs = settings.inputs
    scaling = {"unit": inputs.unit, "mean": list(inputs.mean), "std": list(inputs.std)}
    shape, labels = settings.model.shape, list(inputs.labels)
    about = {"method": settings.config.method, "model": settings.model.name}
    return {**about, "input_shape": shape, "labels": labels, "scaling": scaling}


def server_app(file: Path) -> ServerApp:
    """Return the Flower app of the server; `file` is the federation's `federation.toml`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = read_settings(file)
        given = str(context.run_config.get("folder", ""))
        folder = Path(given or user_cache() / "server" / settings.id).expanduser()
        try:
            result = serve(grid, settings, folder, lambda text: print(text, flush=True))  # noqa: T201
            print(f"finished: accuracy {result.accuracy.pooled:.2f}, run folder {folder}", flush=True)  # noqa: T201
        except FedobpError as error:
            print(f"error: {error}", flush=True)  # noqa: T201
            raise  # by another exception than Flower expects, the run would end a minute later, without this line

    return app
