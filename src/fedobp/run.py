"""One run: the server's side of a federation, round by round."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from fedobp.accounting import Accounting, cost_of
from fedobp.callbacks import Callback, report_round
from fedobp.config import Config, side_by_side
from fedobp.engine import Budget, ClientJob, LostClients, Store, refuse_programs
from fedobp.errors import FedobpError, short
from fedobp.evaluation import Accuracy, NewClients, Report, ServerView, make_protocol, report_from_json
from fedobp.evaluation.evaluator import Keep
from fedobp.method import CohortKind, CohortUpdate, InitialState, Method, RoundContext
from fedobp.models import Model
from fedobp.plugins import label
from fedobp.records import Record, Tensors, take
from fedobp.result import Compute, Result, Traffic
from fedobp.sampling import Sampler
from fedobp.storage import ClientModels, RunFolder, versions


class Evaluate(Protocol):
    """Tests clients' models: in a simulation an `Evaluator`, over nodes what merges their counts."""

    def __call__(self, view: ServerView, *, everything: bool, keep: Keep | None = None) -> Report:
        """Evaluate, and change nothing."""


class Run:
    """One method's training. It holds no client data: the caller of `round` trains the clients."""

    def __init__(
        self,
        config: Config,
        method: Method,
        model: Model,
        initial: InitialState,
        evaluator: Evaluate,
        budget: Budget,
        *,
        provenance: str = "",
        global_gradient: Callable[[Tensor], Tensor] | None = None,
        groups: Tensor | None = None,
        out: Path | None = None,
        partition: str = "",
        metadata: Mapping[str, Any] | None = None,
        keep_models: bool = True,
        launch: Sequence[tuple[str, Config]] = (),
        notes: Sequence[str] = (),
        clients: Sequence[Mapping[str, float]] = (),
        continued_at: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config, self.method, self.model = config, method, model
        self.server, self.records = initial.server, Store(initial.record, config.clients, budget)
        self.accounting, self.seconds = Accounting(method), 0.0
        # Reports have numbers of single clients: kept are the newest one, and those of rounds that are reported.
        self.reports, self.history = list[Report](), list[tuple[int, float, float]]()
        self._sampler, self._evaluator = Sampler(config), evaluator
        self._global_gradient, self._groups = global_gradient, groups  # what only a simulation knows
        self._protocol = make_protocol(config.protocol, config.rounds, config.evaluated)
        self._models: ClientModels | None = None  # those of the last round
        self.partition, self._metadata = partition, metadata or {}
        self._keep_models = keep_models or (out is not None and config.save_models == "all")
        self._launch, self._callbacks = launch, callbacks  # `launch`: all runs that train side by side, by name
        self._notes = tuple(notes)  # what its folder does not hold
        self._clients, self._engine_note = clients, provenance  # `clients`: sizes and label entropy
        refuse_programs(method, self.context(1, self._sampler.cohort(1)))
        # Last: a run that starts has a folder. One that goes on after round `continued_at` (0: anew) has it already.
        names = [name for name, _ in launch]
        self._folder = None
        if out:
            settings = _settings(config, partition, names, notes)
            self._folder = RunFolder(out, settings, provenance, continued_at)

    def plan(self, number: int) -> list[ClientJob]:
        """Return the jobs of a round, without downloads: a pure function of the round.

        There is one cohort, several in turn if the method wants them, and one for each client if it is sequential.
        """
        ctx, kinds = self.context(number, self._sampler.cohort(number)), self.method.cohorts(number, self.config.rounds)
        if not kinds or set(kinds) - set(get_args(CohortKind)):
            raise FedobpError(f"`cohorts` of {self.method.name} must return 'sampled', 'all' or both, not {kinds!r}")
        contexts = [
            replace(ctx, cohort=torch.arange(self.config.trainers), full_participation=True) if kind == "all" else ctx
            for kind in kinds
        ]
        if self.method.sequential:
            contexts = [replace(one, cohort=client) for one in contexts for client in one.cohort.split(1)]
        return [self.job(one) for one in contexts]

    def round(self, plan: Sequence[ClientJob]) -> Generator[ClientJob, CohortUpdate | LostClients, None]:
        """Run a planned round (the paper's Algorithm 1): download, train (yield), aggregate; then evaluate and log."""
        costs = []
        for job in plan:
            download, records = self._download(job.ctx)
            while isinstance(update := (yield job.with_download(download)), LostClients):
                self.records.reset(update.clients)  # nodes that start anew: they get the whole model
                download, records = self._download(job.ctx)
            if update.answered is not None:  # nodes that did not answer in time are left out
                job, answered = job.part(update.answered), list(update.answered)
                download, records = take(download, answered), take(records, answered)
            if update.samples:  # a cohort without training samples skips aggregation
                self.server, records = self.method.aggregate(job.ctx, self.server, records, update)
                self.records.scatter(job.ctx.cohort.tolist(), records)
            costs.append(cost_of(job, download, update))
        self.accounting.add_round(costs)
        self.evaluate_and_log(plan[0].ctx.round)

    def _download(self, ctx: RoundContext) -> tuple[Record, Tensors]:
        """Return what a cohort receives, and its records then."""
        return self.method.download(ctx, self.server, self.records.gather(ctx.cohort.tolist()))

    def job(self, ctx: RoundContext) -> ClientJob:
        """Return a cohort's job, without its download."""
        hparams = hparams_of(self.config, self.method, self.config.lr_at(ctx.round))
        return ClientJob(ctx, tuple(self.method.client_update(ctx)), hparams)

    def context(self, number: int, cohort: Tensor) -> RoundContext:
        """Return the context of a round for some clients."""
        ctx = context_of(self.config, self.model, number, cohort)
        return replace(ctx, global_gradient=self._global_gradient, groups=self._groups)

    def is_due(self, number: int) -> bool:
        """Say whether a round is evaluated."""
        return number % self.config.eval_every == 0 or number == self.config.rounds or number in self._protocol.rounds

    def evaluate_and_log(self, number: int) -> None:
        """Evaluate if it is due, and log all rounds whose numbers are known.

        CUDA may still be working on this round: then it is logged when the next one is under way.
        """
        due = self.is_due(number)
        self._log_pending(1 if self.server["theta"].is_cuda and not due else 0, number if due else None)

    def _log_pending(self, left: int, evaluated: int | None) -> None:
        """Log pending rounds until `left` are pending; the last one is evaluated if its number is given."""
        while self.accounting.pending > left:
            line = self.accounting.settle()
            try:
                if evaluated is not None and not self.accounting.pending:
                    self._add(self._evaluate(evaluated))
                    line |= self.reports[-1].to_json()
            finally:  # what a round cost is logged even if fine-tuning diverges
                if self._folder:
                    self._folder.log("metrics", line)
                report_round(self._callbacks, self.config, line)

    def _add(self, report: Report) -> None:
        """Add an evaluation."""
        self.reports = [*(one for one in self.reports if one.round in self._protocol.rounds), report]
        self.history.append((report.round, report.served.pooled, report.served.client_mean))

    def _evaluate(self, number: int) -> Report:
        """Test clients; the last round's served models are kept as the run's.

        Fine-tuning uses the full learning rate: in a schedule's last rounds it would be close to 0.
        """
        keep = None
        if number == self.config.rounds:
            # pFedSim's mixtures around an average are equal to it but for rounding.
            rounded = self.config.compress_down != "none" or self.config.average > 0
            self._models = ClientModels(self.model.layout, self.server["theta"], rounded=rounded)
            keep = self._models.add if self._keep_models else None
        return self._evaluator(self.view(number), everything=number in self._protocol.rounds, keep=keep)

    def view(self, number: int) -> ServerView:
        """Return what an evaluation in a round is given."""
        hparams = hparams_of(self.config, self.method, self.config.lr)

        def context(cohort: Tensor) -> RoundContext:
            return replace(self.context(number, cohort), serving=True)

        return ServerView(context, self.server, self.records, hparams)

    @property
    def accuracy(self) -> float | None:
        """The newest pooled accuracy."""
        return self.reports[-1].served.pooled if self.reports else None

    def settle(self) -> None:
        """Log the rounds whose numbers a device was still computing."""
        self._log_pending(0, None)

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this run beside its tensors, as plain values; all rounds are settled."""
        reports = [asdict(report) for report in self.reports]
        return {
            "accounting": self.accounting.totals(),
            "reports": reports,
            "history": list(self.history),  # a thread writes it while the next rounds train
            "seconds": self.seconds,
            "metrics": self._folder and self._folder.metrics_checksum,
            "order": list(self.server),  # a file has another one
        }

    def restore(self, server: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Go on from a checkpoint's snapshot."""
        if self._folder and values.get("metrics") not in (None, self._folder.metrics_checksum):  # older ones have none
            raise FedobpError(
                f"{short(self._folder.path / 'metrics.jsonl', 200)} is damaged: its lines are not those of the rounds "
                "before the checkpoint; put it back as it was, or remove the run's folder to train it anew"
            )
        device = self.server["theta"].device
        forms = [{name: (one.shape, one.dtype) for name, one in state.items()} for state in (self.server, server)]
        if forms[0].items() - forms[1].items():  # a method may have more after some rounds
            raise ValueError("the server's state has another form")
        # In the order that it had: fields of a compressed message are one frame, whose length depends on it.
        names = [*values.get("order", self.server), *server]
        self.server = {name: server[name].to(device) for name in names if name in server}
        self.accounting.restore(values["accounting"])
        self.reports = [report_from_json(report) for report in values["reports"]]
        earlier = [(one.round, one.served.pooled, one.served.client_mean) for one in self.reports]
        found = values.get("history", earlier)  # older checkpoints hold all reports instead
        self.history = [(int(number), float(pooled), float(mean)) for number, pooled, mean in found]
        self.seconds = float(values["seconds"])

    def describe_clients(self, clients: Sequence[Mapping[str, Any]]) -> None:
        """Take what is known of clients, for the rows of `clients.csv`: nodes may tell late."""
        self._clients = clients

    def close(self) -> None:
        """Leave the folder to others: the run has ended."""
        if self._folder:
            self._folder.close()

    def log_times(self, times: Mapping[str, float], seconds: float) -> None:
        """Log how long a round took, apart from its metrics, and add this run's share of it."""
        self.seconds += seconds
        if self._folder:
            self._folder.log("timings", times)

    def result(self) -> Result:
        """Choose what the protocol reports, and write models and result."""
        config, folder, reports, accounting = self.config, self._folder, self.reports, self.accounting
        models = self._models
        assert models is not None, "the last round is evaluated"
        down, up = accounting.bytes_down, accounting.bytes_up
        reported = [report for report in reports if report.round in self._protocol.rounds]
        new_clients = [report.new_clients for report in reported if report.new_clients]

        def chosen(columns: Iterable[Accuracy | None]) -> Any:
            return self._protocol.choose([column for column in columns if column is not None])

        result = Result(
            config=config,
            protocol=self._protocol,
            accuracy=chosen(report.served for report in reported),
            last=chosen(report.last for report in reported),
            finetuned=chosen(report.finetuned for report in reported),
            validation=chosen(report.validation for report in reported),
            new_clients=NewClients(
                **{spec.name: chosen(getattr(one, spec.name) for one in new_clients) for spec in fields(NewClients)}
            )
            if new_clients
            else None,
            history=self.history,
            personal=reports[-1].personal,
            bytes=Traffic(down / config.rounds, up / config.rounds, down, up),
            compute=Compute(accounting.processed / max(1, accounting.samples), reports[-1].passes),
            seconds=self.seconds,
            models=models,
            parameters=self.model.layout.size,
            partition=self.partition,
            out=folder.path if folder else None,
            launch=tuple(one for _, one in self._launch),
            labels=tuple(self._metadata.get("labels", ())),
            notes=self._notes,
            clients=tuple(self._client_rows(chosen, reported)),
            provenance=self._provenance(),
        )
        if folder:
            if config.save_models != "none":
                models.save(folder.path / "models", clients=config.save_models == "all", about=self._metadata)
            beside = {"launch": [_changed(config, other) for _, other in self._launch]} if len(self._launch) > 1 else {}
            folder.finish({**result.to_json(), **beside}, result.clients)
        return result

    def _client_rows(self, chosen: Callable[..., Accuracy | None], reported: Sequence[Report]) -> list[dict[str, Any]]:
        """Return a row for each evaluated client: data, visits, accuracies, and personal entries at the end."""
        columns = {
            name: found.per_client
            for name in ("served", "last", "finetuned")
            if (found := chosen(getattr(report, name) for report in reported)) and found.per_client
        }
        tensors = [f"personal.{name}" for name in self.model.layout.names]
        rows, of_clients, visits = [], self.reports[-1].personal_per_client, self.accounting.visits
        for at, (about, counts) in enumerate(zip(self._clients, of_clients, strict=True)):
            accuracies = {name: values[at] for name, values in columns.items()}
            personal = {"personal": sum(counts), **dict(zip(tensors, counts, strict=True))}
            seen = None if visits is None else visits[int(about["client"])]
            models = {**dict.fromkeys(("served", "last", "finetuned")), **accuracies}
            rows.append({**about, "visits": seen, **models, **personal})
        return rows

    def _provenance(self) -> dict[str, Any]:
        """Return what the numbers may depend on."""
        config, device = self.config, self.server["theta"].device
        return {
            "config": config.hash,
            "partition": self.partition,
            "seed": config.seed,
            "protocol": config.protocol,
            **versions(),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "precision": config.precision,
            "engine": ", ".join(filter(None, (config.engine, self._engine_note))),
            "threads": torch.get_num_threads(),
            "beside": [name for name, _ in self._launch],
        }


def context_of(config: Config, model: Model, number: int, cohort: Tensor) -> RoundContext:
    """Return the context of a round for some clients: the same on a server, in a simulation and on a node."""
    return RoundContext(
        model, number, config.rounds, config.clients, config.epochs, cohort, config.seed,
        held_out=config.holdout_clients,
    )  # fmt: skip


def hparams_of(config: Config, method: Method, lr: float) -> dict[str, float]:
    """Return the hyper-parameters that clients receive."""
    return {"lr": lr, "momentum": config.momentum, "weight_decay": config.weight_decay, **method.hparams()}


def _changed(config: Config, other: Config) -> dict[str, Any]:
    """Return the settings of another run that are not the same, as plain values; a function is a reference to it."""
    found = config.changed(other)
    return {name: label(value) if callable(value) else value for name, value in found.items()}


def _settings(config: Config, partition: str, launch: Sequence[str], notes: Sequence[str]) -> str:
    """Return what `config.toml` says of a run."""
    said = "".join(f"# {note}\n" for note in notes)
    return f"# Partition {partition}\n{said}{side_by_side(launch)}{config.to_toml()}"
