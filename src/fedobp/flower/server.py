"""The server of a federation on nodes: the rounds of a `Run`, whose clients are asked by Flower messages.

Every answer is checked against what the server itself expects: one that is wrong or late is refused, and the round goes
on with the others. After every round it takes a checkpoint, from which the same command goes on.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedobp.checkpoint import Checkpoints, PastRun, common_round, remove
from fedobp.config import Config, run_name
from fedobp.engine import Budget, ClientJob, LostClients
from fedobp.errors import FedobpError, short
from fedobp.evaluation import Counts, Report, ServerView, report
from fedobp.evaluation.evaluator import Keep
from fedobp.files import holder, lock, user_cache
from fedobp.flower.nodes import Nodes, Request, Say
from fedobp.flower.task import NO_VISIT, FederationSettings, Visit, read_settings
from fedobp.method import CohortUpdate
from fedobp.records import Record, Sparse, stack, take
from fedobp.result import Result
from fedobp.run import Run
from fedobp.wire import decode_expected, encode

T = TypeVar("T")
_MOST = 10**15  # samples that go through a client's models
_LARGEST = 1e6  # of a number that a client sends: a larger weight ends the training of all


class Server:
    """A run whose clients are on nodes."""

    def __init__(self, nodes: Nodes, settings: FederationSettings, accepted: dict[int, Visit]) -> None:
        self._nodes, self._settings = nodes, settings
        self._accepted = accepted  # of each client: the last training that the server took

    def answer(self, job: ClientJob, before: "Partial | None") -> "CohortUpdate | Partial":
        """Train a cohort on its nodes; `before` are answers to the same job, until clients were found to be lost."""
        number, cohort = job.ctx.round, job.ctx.cohort.tolist()
        end = before.end if before else time.monotonic() + self._settings.rules.deadline
        known, ask = (before.known, before.lost) if before else (dict[int, Any](), tuple(cohort))
        requests, expected = dict[int, Request](), dict[int, Record]()
        state = self._settings.initial[1].state
        for position, client in enumerate(cohort):
            if client in ask:
                download = take(job.download, position)
                ctx = replace(job.ctx, cohort=job.ctx.cohort[position : position + 1])
                expected[client] = self._settings.method.expected_upload(ctx, download, state)
                values = self._values(client, self._next(client, number), full=job.ctx.full_participation)
                requests[client] = Request(values, partial(encode, download))
        known |= self._nodes.ask(
            "train", requests, _Reader(self._nodes.about, expected, set(self._accepted)), number, end
        )
        if lost := tuple(client for client, answer in known.items() if answer is None):
            for client in lost:
                del known[client]
                self._accepted.pop(client, None)
            return Partial(known, lost, end)
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

        def payload(client: int) -> bytes:
            ctx = view.context(clients[client : client + 1])
            download: Record = take(method.download(ctx, view.server, view.records.gather([client]))[0], 0)
            if everything:  # the last model of a client that has not trained
                download["global"] = view.server["theta"]
            return encode(download)

        for client in clients.tolist():
            values = {**self._values(client, (number, 0)), "everything": everything}
            requests[client] = Request(values, partial(payload, client))
        columns = {"served", *(("last",) if everything else ())}
        columns |= {"finetuned"} if everything and config.finetune_epochs else set()
        read = partial(self._read_counts, columns)
        found = self._nodes.ask("evaluate", requests, read, number)
        counts = {client: one for client, one in sorted(found.items()) if one is not None}
        if not any(bool(one.columns["served"][0].tested.any()) for one in counts.values()):
            raise FedobpError(
                f"no node answered the evaluation of round {number} with test samples: start nodes, and run this again"
            )
        first, *more = counts.values()
        return _for_all(report(number, sum(more, first), layout), list(counts), config.trainers)

    def _read_counts(self, wanted: set[str], client: int, values: dict[str, Any], payload: bytes) -> Counts | None:
        """Return a client's counts; None if it has lost its state, and cannot tell."""
        if values.get("lost"):
            return None
        counts = Counts.from_json(values["counts"], len(self._settings.inputs.names))
        sizes, metrics = torch.tensor(self._settings.model.layout.sizes), set(self._settings.config.metric_names)
        found = {name for name, column in counts.columns.items() if column}
        once = all(len(column) <= 1 for column in counts.columns.values())
        if not once or found - {"validation"} != wanted or counts.personal.shape != (1, len(sizes)):
            raise FedobpError(f"client {client} did not count what it was asked for")
        if any(set(one.metrics) != metrics for column in counts.columns.values() for one in column):
            raise FedobpError(f"client {client} counted other metrics than it was asked for")
        personal = counts.personal
        if personal.is_floating_point() or not ((personal >= 0) & (personal <= sizes)).all():
            raise FedobpError(f"client {client} counted more than there is")
        positions = math.prod(self._settings.inputs.shape) if self._settings.inputs.every_position else 1
        tested, known = counts.columns["served"][0].tested.sum(), self._nodes.about[client]["test"]
        if tested != positions * known or not all(0 <= n <= _MOST for n in (counts.processed, counts.samples)):
            raise FedobpError(f"client {client} counted {short(int(tested))} samples, and it has {known}")
        if known:
            report(0, counts, self._settings.model.layout)  # what cannot be merged is refused here
        return counts


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


class Partial(NamedTuple):
    """The answers to a job of which some clients have lost their state: these are asked again, until the same end."""

    known: dict[int, Any]
    lost: tuple[int, ...]
    end: float


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
    have_state: Collection[int]  # clients that must have kept a state: others cannot have lost it

    def __call__(self, client: int, values: dict[str, Any], payload: bytes) -> Upload | None:
        if values.get("lost"):
            if client not in self.have_state:
                raise FedobpError(f"client {client} says that it lost its state, and it has none")
            return None
        n, processed, loss = values["n"], values["processed"], values["loss"]
        if n != self.about[client]["train"]:
            raise FedobpError(
                f"client {client} trained on {short(n)} samples, and it has {self.about[client]['train']}"
            )
        if type(processed) is not int or not 0 <= processed <= _MOST or not (loss is None or abs(loss) <= _LARGEST):
            raise FedobpError(f"client {client} reports numbers that are none")
        upload = decode_expected(payload, self.expected[client])
        for value in upload.values():
            sent = value.values[value.keep] if isinstance(value, Sparse) else value
            if sent.dtype != torch.bool and sent.numel() and float(sent.double().abs().max()) > _LARGEST:
                raise FedobpError(f"client {client} sent values above {_LARGEST:g}: one of them would end all training")
        return Upload(upload, n, math.nan if loss is None else float(loss), processed)


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
    _check_folder(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder / ".server") as held:
        if not held:
            raise FedobpError(f"{holder(folder / '.server')} is the server in {short(folder, 200)}: end it first")
        _check_folder(folder, settings)  # another server may have ended since
        return _serve(grid, settings, config, name, folder, say)


def _check_folder(folder: Path, settings: FederationSettings) -> None:
    """Refuse a folder with a finished run, or with one of another federation."""
    if (folder / "result.json").exists():
        raise FedobpError(f"the run in {short(folder, 200)} has finished: name another folder for a new one")
    about = folder / "config.toml"
    if about.exists() and f"# Partition {settings.id}" not in about.read_text(encoding="utf-8").splitlines():
        raise FedobpError(f"{short(folder, 200)} holds a run of something else: name another folder")


def _serve(grid: Grid, settings: FederationSettings, config: Config, name: str, folder: Path, say: Say) -> Result:
    past = PastRun(folder, config, settings.id, [name]) if (folder / "config.toml").exists() else None
    done = common_round([past]) if past else 0
    nodes = Nodes(grid, settings, folder, _longest(settings), say)
    say(f"federation {settings.id}: {config.method}, {config.clients} clients, round {done + 1} of {config.rounds}")
    nodes.wait_for(settings.rules.start_nodes or config.clients, settings.rules.wait)
    server = Server(nodes, settings, _accepted(folder / "metrics.jsonl", done))
    _, initial = settings.initial
    stored = Budget(config.store_memory * 2**30)  # records of clients, in memory; by default they are in a file
    unknown, everyone = {"train": None, "test": None, "entropy": None}, range(config.clients)
    run = Run(
        config, settings.method, settings.model, initial, server.evaluate, stored,
        provenance="Flower nodes", out=folder, partition=settings.id, keep_models=False, launch=[(name, config)],
        metadata=_metadata(settings),
        continued_at=done if past else None,
    )  # fmt: skip
    try:
        with ThreadPoolExecutor(max_workers=1) as writer:
            checkpoints = Checkpoints(folder, run, {}, [name], writer)
            if done:
                checkpoints.restore(done)
            for number in range(done + 1, config.rounds + 1):
                _round(run, server, nodes, number, say)
                if number < config.rounds:
                    checkpoints.save(number)
                    checkpoints.wait()  # before nodes hear in the next round that this one was taken
        run.describe_clients([nodes.about.get(client, {"client": client, **unknown}) for client in everyone])
        result = run.result()
        remove(folder)
        return result
    finally:
        run.close()


def _round(run: Run, server: Server, nodes: Nodes, number: int, say: Say) -> None:
    """Run one round, and say how it went."""
    began, before = time.monotonic(), (run.accounting.bytes_down, run.accounting.bytes_up)
    nodes.statuses.clear()
    plan, part = run.plan(number), cast(Partial | None, None)
    asked, rounds = sum(len(one.ctx.cohort) for one in plan), run.round(plan)
    job = next(rounds)
    with suppress(StopIteration):
        while True:
            answer = server.answer(job, part)
            part = answer if isinstance(answer, Partial) else None
            job = rounds.send(LostClients(answer.lost) if isinstance(answer, Partial) else answer)
    seconds = time.monotonic() - began
    run.log_times({"round": number, "train": seconds, "all": seconds, "runs": 1, "occupancy": 1.0}, seconds)
    counted = ", ".join(
        f"{count} {status}" for (kind, status), count in sorted(nodes.statuses.items()) if kind == "train"
    )
    down, up = run.accounting.bytes_down - before[0], run.accounting.bytes_up - before[1]
    last = run.reports[-1] if run.reports and run.reports[-1].round == number else None
    evaluated = f"{nodes.statuses['evaluate', 'accepted']} of {run.config.trainers} nodes evaluated"
    accuracy = f"; accuracy {last.served.pooled:.2f}, {evaluated}" if last else ""
    say(f"round {number}: cohort of {asked}, {counted}; {down:,} bytes down, {up:,} up{accuracy}; {seconds:.1f} s")


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
    shape, labels = settings.model.shape, list(inputs.names)
    about = {"method": settings.config.method, "model": settings.model.name}
    return {**about, "input_shape": shape, "labels": labels, "scaling": scaling}


def server_app(file: Path) -> ServerApp:
    """Return the Flower app of the server; `file` is the federation's `federation.toml`."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        given = str(context.run_config.get("folder", ""))
        try:
            settings = read_settings(file)
            folder = Path(given or user_cache() / "server" / settings.id).expanduser()
            result = serve(grid, settings, folder, lambda text: print(text, flush=True))  # noqa: T201
            print(f"finished: accuracy {result.accuracy.pooled:.2f}, run folder {folder}", flush=True)  # noqa: T201
        except FedobpError as error:
            print(f"error: {error}", flush=True)  # noqa: T201
            raise  # by another exception than Flower expects, the run would end a minute later, without this line

    return app
