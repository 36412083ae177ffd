"""Sweeps: many configurations, as many as possible trained at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Literal, get_args, overload

from fedobp.callbacks import Callback, check_callbacks
from fedobp.checkpoint import NEVER, Interval
from fedobp.config import Config
from fedobp.data import Dataset
from fedobp.engine import caught
from fedobp.errors import LESS_MEMORY, FedobpError, described, out_of_memory, short, unknown
from fedobp.federation import Federation, read, source_key, with_dataset
from fedobp.files import folder_path
from fedobp.grouping import check_launches, group_launches
from fedobp.launch import Progress, RunPlan, train_side_by_side
from fedobp.method import Method
from fedobp.resolution import check_names, resolve
from fedobp.result import Failure, Result, Results
from fedobp.storage import claim


class SweepError(FedobpError):
    """Some runs of a sweep failed; all others have finished.

    `results` has None in the place of each run that failed, `failed` says what went wrong, run by run. The text has a
    line for each cause.
    """

    def __init__(self, results: Sequence[Result | None], failed: Sequence[Failure]) -> None:
        self.results, self.failed = list(results), list(failed)
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> list[str]:
        causes: dict[tuple[str, str], list[int | None]] = {}
        for one in self.failed:
            causes.setdefault((one.method, one.error), []).append(one.seed)
        if not any(self.results) and len({error for _, error in causes}) == 1:
            return [self.failed[0].error]  # what concerns every run is said once
        return [f"{method}{_seeds(seeds)}: {error}" for (method, error), seeds in causes.items()]


def _seeds(seeds: Sequence[int | None]) -> str:
    numbers = [str(seed) for seed in seeds if seed is not None]
    return f", seed{'s' * (len(numbers) > 1)} {', '.join(numbers)}" if numbers else ""


Failures = Literal["raise", "return"]


@dataclass(frozen=True)
class SweepPlan:
    """The runs of a sweep, resolved: which of them train side by side, and which cannot start."""

    asked: Sequence[Config]
    configs: Mapping[int, Config]  # by position in `asked`
    methods: Mapping[int, Method]
    launches: Sequence[Sequence[int]]
    failures: Mapping[int, BaseException]
    datasets: Mapping[tuple[object, ...], Dataset] = field(repr=False)
    names: Sequence[str] = ()  # of the runs in `asked`, where they have some

    def failed(self) -> list[Failure]:
        """Return the runs that cannot start."""
        return _failed(self, self.failures)

    def bug(self) -> BaseException | None:
        """Return the first failure that is no user error."""
        return _first_bug(self.failures)

    def without_failures(self) -> "SweepPlan":
        """Return the plan of the runs that can start, renumbered."""
        return self.only(list(self.configs))

    def only(self, runs: Sequence[int]) -> "SweepPlan":
        """Return the plan of some runs that can start, in that order, renumbered; they stay in their launches."""
        place = {run: at for at, run in enumerate(runs)}
        configs, methods = [self.configs[run] for run in runs], [self.methods[run] for run in runs]
        names = [self.names[run] for run in runs] if self.names else ()
        launches = [[place[run] for run in launch if run in place] for launch in self.launches]
        chosen = [launch for launch in launches if launch]
        return SweepPlan(configs, dict(enumerate(configs)), dict(enumerate(methods)), chosen, {}, self.datasets, names)


def plan_sweep(
    configs: Iterable[Config],
    launches: Sequence[Sequence[int]] | None = None,
    dataset: Dataset | None = None,
    *,
    names: Sequence[str] = (),
    datasets: Mapping[tuple[object, ...], Dataset] | None = None,
    memory: float | None = None,
    most: int | None = None,
) -> SweepPlan:
    """Read the datasets of a sweep, each once, and resolve its runs.

    `dataset` is that of the first run, if it is read already; one in memory is that of all runs. `datasets` are others
    that are read already.

    `launches` says which runs share a launch, by their positions in `configs`; otherwise all do that can, at most
    `most`, as many as fit into `memory` bytes.
    """
    if isinstance(configs, Config):
        raise FedobpError("`configs` must be a list of configurations: write sweep([config])")
    given = dataset if isinstance(dataset, Dataset) and not dataset.in_memory else None
    asked = [with_dataset(config, None if given else dataset) for config in configs]
    opened: dict[tuple[object, ...], Dataset | BaseException] = {**(datasets or {})}
    if dataset is not None and asked:
        opened |= {source_key(config): dataset for config in (asked if dataset.in_memory else asked[:1])}
    resolved: dict[int, Config] = {}
    methods: dict[int, Method] = {}
    failures: dict[int, BaseException] = {}

    def attempt(config: Config) -> tuple[Config, Method]:
        check_names(config)
        if source_key(config) not in opened:
            opened[source_key(config)] = caught(partial(read, config))
        dataset = opened[source_key(config)]
        if isinstance(dataset, BaseException):
            raise dataset
        return resolve(config, dataset)

    for run, config in enumerate(asked):
        found = caught(partial(attempt, config))
        if isinstance(found, BaseException):
            failures[run] = found
        else:
            resolved[run], methods[run] = found
    usable = {key: dataset for key, dataset in opened.items() if not isinstance(dataset, BaseException)}
    places, complete = list(resolved), list(resolved.values())
    if launches is None:
        chosen = list(methods.values())
        groups = group_launches(complete, chosen, lambda config: usable[source_key(config)], memory, most)
        found_launches = [[places[run] for run in group] for group in groups]
    else:
        if sorted(run for launch in launches for run in launch) != list(range(len(asked))):
            raise FedobpError(f"`launches` must name each of the {len(asked)} runs once")
        startable = [[run for run in launch if run in resolved] for launch in launches]
        found_launches = [launch for launch in startable if launch]
        check_launches(found_launches, resolved)
    return SweepPlan(asked, resolved, methods, found_launches, failures, usable, names)


@overload
def sweep(
    configs: "Iterable[Config] | SweepPlan",
    *,
    out: Sequence[str | Path | None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    keep_models: bool = True,
    launches: Sequence[Sequence[int]] | None = None,
    dataset: Dataset | None = None,
    interval: Interval = NEVER,
    resume: bool = False,
    failures: Literal["raise"] = "raise",
) -> Results[Result]: ...
@overload
def sweep(
    configs: "Iterable[Config] | SweepPlan",
    *,
    out: Sequence[str | Path | None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    keep_models: bool = True,
    launches: Sequence[Sequence[int]] | None = None,
    dataset: Dataset | None = None,
    interval: Interval = NEVER,
    resume: bool = False,
    failures: Literal["return"],
) -> Results[Result | Failure]: ...
def sweep(
    configs: "Iterable[Config] | SweepPlan",
    *,
    out: Sequence[str | Path | None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    callbacks: Sequence[Callback] = (),
    keep_models: bool = True,
    launches: Sequence[Sequence[int]] | None = None,
    dataset: Dataset | None = None,
    interval: Interval = NEVER,
    resume: bool = False,
    failures: Failures = "raise",
) -> Results[Result] | Results[Result | Failure]:
    """Run many configurations, as many as possible at once, and return their results in the same order.

    Runs that share dataset, model, batch size and machine settings share a launch: their clients train side by side,
    whatever their seeds, partitions, methods and numbers. With `out`, each run is written to a folder of its own; None
    writes nothing. Without `keep_models`, results hold the global model only, and not every client's. `launches` says
    which runs share a launch, by their positions in `configs`. A `dataset` in memory is that of all runs. `callbacks`
    are called by all runs, which their configurations tell apart. Runs with a folder take checkpoints at an `interval`;
    with `resume`, they go on from those in their folders. A run that fails does not end the others: when they have
    finished, `SweepError` is raised, which holds their results. With `failures="return"` a `Failure` takes the place of
    the result instead.
    """
    if failures not in get_args(Failures):
        raise unknown("value of `failures`", short(failures), get_args(Failures))
    callbacks = check_callbacks(callbacks)
    plan = configs if isinstance(configs, SweepPlan) else plan_sweep(configs, launches, dataset)
    folders = None if out is None else _folders(out, len(plan.asked), resume)
    results: list[Result | None] = [None] * len(plan.asked)
    errors = dict(plan.failures)
    federation: Federation | None = None
    for launch in plan.launches:
        plans: dict[int, RunPlan] = {}
        for run in launch:
            config, dataset = plan.configs[run], plan.datasets[source_key(plan.configs[run])]
            made = caught(partial(Federation.resolved, dataset, config, plan.methods[run], federation))
            if isinstance(made, BaseException):
                if resume and out_of_memory(made):  # the next call goes on with all runs of the launch
                    raise made
                errors[run] = made
            else:
                federation = made
                name = plan.names[run] if plan.names else ""
                plans[run] = made.plan(config, plan.methods[run], folders[run] if folders else None, name)

        def report(at: Progress, runs: Sequence[int] = tuple(plans)) -> None:
            if progress:
                progress(replace(at, run=runs[at.run]))

        outcomes = train_side_by_side(list(plans.values()), report, keep_models, callbacks, interval, resume)
        for run, result in zip(plans, outcomes, strict=True):
            if isinstance(result, BaseException):
                errors[run] = result
            else:
                # Whole personal models of every run would fill the memory.
                models = result.models if keep_models or result.models is None else result.models.without_clients()
                results[run] = replace(result, models=models)
    failed = _failed(plan, errors)
    if failures == "return":
        in_place = dict(zip(sorted(errors), failed, strict=True))
        return Results(in_place[run] if result is None else result for run, result in enumerate(results))
    if errors:
        raise SweepError(results, failed) from _first_bug(errors)
    return Results(result for result in results if result is not None)


def _failed(plan: SweepPlan, errors: Mapping[int, BaseException]) -> list[Failure]:
    """Return failures, in the order of the runs."""
    configs = {run: plan.configs.get(run, plan.asked[run]) for run in sorted(errors)}
    return [
        Failure(config.method, config.seed, _sentence(errors[run]), config, errors[run])
        for run, config in configs.items()
    ]


def _first_bug(failures: Mapping[int, BaseException]) -> BaseException | None:
    bugs = (error for error in failures.values() if not isinstance(error, FedobpError) and not out_of_memory(error))
    return next(bugs, None)


def _sentence(error: BaseException) -> str:
    """Return what to say about a run's end; a bug of the library is named by its place."""
    if isinstance(error, FedobpError):
        return str(error)
    if out_of_memory(error):
        return f"there is not enough memory: free some, or {LESS_MEMORY}"
    *_, (frame, line) = walk_tb(error.__traceback__)
    return f"{described(error)} ({frame.f_code.co_filename}:{line})"


def _folders(out: Sequence[str | Path | None], runs: int, resume: bool) -> list[Path | None]:
    """Return the folders of a sweep's runs, each of its own and free (unless runs go on in them), or what is wrong."""
    if isinstance(out, str | Path) or len(out) != runs:
        raise FedobpError(f"`out` must name a folder for each of the {runs} runs")
    folders = [None if one is None else folder_path(one, "out") for one in out]
    named = [folder for folder in folders if folder]
    if len(set(named)) < len(named):
        raise FedobpError("`out` names a folder twice: give each run one of its own")
    return folders if resume else [folder and claim(folder) for folder in folders]
