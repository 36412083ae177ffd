"""What an experiment of the paper is: its runs as settings, and what is made of their tidy rows.

`run_experiment` trains what is missing and writes everything anew from the rows: `results.csv` and other tidy files,
`table.md`, `table.tex`, and figures. All experiments of a folder share its runs, so a run that two of them need is
trained once.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from fedobp.config import Config
from fedobp.csv_rows import write_rows
from fedobp.data import data_dir, describe
from fedobp.errors import FedobpError, short, unknown
from fedobp.evaluation import PAPER_ROUNDS
from fedobp.files import write
from fedobp.paper.figures import drawing, save
from fedobp.paper.published import GRID, NAMES, SHORT_GRID, title
from fedobp.paper.tables import Table
from fedobp.progress import Listener
from fedobp.report.tidy import history_rows, read_tidy, tidy_rows
from fedobp.saved_runs import SavedRun
from fedobp.sweep_folder import resume_sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "short", "full"]
Mode = Literal["faithful", "as-published", "both"]
Row = dict[str, Any]
Files = dict[str, list[Row]]  # tidy rows, by the name of their file without .csv

FIRST_SEED = 42
_MOST = 16  # runs of a launch: of more, the first would be finished late
_MOST_SEEDS = 1_000
_ROUNDS = {"short": 100, "full": 400}
_SMOKE_GRID = (0.0, 0.9, 0.99, 0.999, 1.0)


@dataclass(frozen=True)
class Setting:
    """The scale of an experiment, and what it goes over."""

    scale: Scale
    datasets: tuple[str, ...]
    alphas: tuple[float, ...]
    seeds: tuple[int, ...]
    rounds: int
    mode: Mode
    grid: tuple[float, ...]  # of quantiles
    methods: tuple[str, ...] = tuple(NAMES)

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to run, the faithful one first."""
        return ("faithful", "as-published") if self.mode == "both" else (self.mode,)

    @cached_property
    def available(self) -> tuple[str, ...]:
        """The datasets that are installed."""
        return tuple(name for name in self.datasets if describe(name, data_dir()).available)

    @property
    def missing(self) -> list[str]:
        """A sentence for each dataset that is not installed."""
        lacking = [name for name in self.datasets if name not in self.available]
        return [f"{title(name)} is not installed, so its cells are empty: fedobp data fetch {name}" for name in lacking]

    def cells(self) -> list[tuple[str, float]]:
        """Return all pairs of dataset and alpha."""
        return [(dataset, alpha) for dataset in self.datasets for alpha in self.alphas]

    def points(self) -> Iterator[tuple[str, float, int]]:
        """Yield dataset, alpha and seed of all runs on installed datasets; the first seed of all comes first."""
        available = self.available
        return (
            (dataset, alpha, seed) for seed in self.seeds for dataset, alpha in self.cells() if dataset in available
        )

    def config(self, dataset: str, alpha: float, seed: int, method: str, **more: Any) -> Config:
        """Return the settings of a run: the paper's own; the dataset's defaults for the digits and at scale `smoke`."""
        common: dict[str, Any] = {
            "dataset": dataset, "alpha": alpha, "seed": seed, "method": method, "rounds": self.rounds,
            "partition_seed": FIRST_SEED, "save_models": "none",
        }  # fmt: skip
        if self.scale == "smoke":
            common |= {"eval_every": 1}
        elif dataset != "digits":
            paper = "paper" if self.rounds >= PAPER_ROUNDS[0] else "default"
            common |= {"clients": 100, "participation": 0.1, "protocol": paper, "sampling": "published"}
            common |= {"eval_every": 20}  # rounds 100, 200, 300 and 400 are among them
        return Config(**{**common, **more})


class TimeOver(Exception):
    """Ends what `Work.once` computes: no time is left."""


class Case(NamedTuple):
    """A run of an experiment, and columns that its rows get."""

    config: Config
    columns: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        """The run's name: what it is, and a hash of all its settings."""
        config, settings = self.config, self.config.to_toml().encode()
        parts = [config.dataset, f"dir{config.alpha:g}", config.method, *map(str, config.options.values())]
        return "-".join([*parts, f"seed{config.seed}", hashlib.sha256(settings).hexdigest()[:6]])


@dataclass
class Work:
    """Where an experiment is carried out, and how long it may take."""

    folder: Path
    until: float | None = None  # of `time.monotonic`
    progress: Listener = lambda what, share: None
    sources: Sequence[Path] = ()  # folders with result files
    notes: list[str] = field(default_factory=list)  # what is not done, in sentences
    failed: list[str] = field(default_factory=list)  # runs that failed, and why

    @property
    def minutes(self) -> float | None:
        """Minutes that are left."""
        return None if self.until is None else (self.until - time.monotonic()) / 60

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.minutes is not None and self.minutes <= 0

    def advance(self, what: str, share: float) -> None:
        """Report progress of what `once` computes, and end it if no time is left."""
        self.progress(what, share)
        if self.is_over:
            raise TimeOver

    def once(self, name: str, key: str, compute: Callable[[], Files]) -> Files:
        """Return rows that are computed once and kept in files; {} if the time is over before they are there."""
        folder = self.folder / name / "parts"
        kept = {path.stem.removeprefix(f"{key}."): path for path in sorted(folder.glob(f"{key}.*.csv"))}
        if "results" in kept:  # the last to be written
            return {name: read_tidy(path) for name, path in kept.items()}
        try:
            if self.is_over:
                raise TimeOver
            found = compute()
        except TimeOver:
            self.notes.append(f"{key} is not measured: the time is over, call the same command again")
            return {}
        folder.mkdir(parents=True, exist_ok=True)
        for stem, rows in sorted(found.items(), key=lambda item: item[0] == "results"):
            write_rows(folder / f"{key}.{stem}.csv", rows)
        return found

    def train(self, cases: Sequence[Case]) -> list[tuple[Case, SavedRun]]:
        """Train the runs that are not finished, and return all that are."""
        by_name = {case.name: case for case in cases}
        if not by_name:
            return []
        folder = self.folder / "runs"
        due = sum(case.config.rounds for name, case in by_name.items() if not (folder / name / "result.json").exists())
        ended = count(1)
        outcome = resume_sweep(
            folder,
            {name: case.config for name, case in by_name.items()},
            minutes=self.minutes,
            most=_MOST,
            progress=lambda at: self.progress(f"{at.method}, round {at.round}", min(1.0, next(ended) / max(1, due))),
        )
        if outcome.bug:
            raise outcome.bug
        self.failed += [f"{name} failed: {one.error}" for name, one in outcome.failed.items()]
        if outcome.missing:
            self.notes.append(
                f"{len(outcome.missing)} of {len(by_name)} runs are not done: call the same command again"
            )
        return [(case, outcome.runs[name]) for name, case in by_name.items() if name in outcome.runs]


def train_cases(cases: Callable[[Setting], Iterator[Case]]) -> "Callable[[Setting, Work], Files]":
    """Return what trains cases and gives the rows of `results` and `history`."""

    def measure(setting: Setting, work: Work) -> Files:
        done = work.train(list(cases(setting)))
        return {
            "results": [{**row, **case.columns} for case, run in done for row in tidy_rows(run)],
            "history": [{**row, **case.columns} for case, run in done for row in history_rows(run)],
        }

    return measure


@dataclass(frozen=True)
class Experiment:
    """An experiment: what it measures, and the tables and figures of its rows."""

    name: str
    summary: str
    measure: Callable[[Setting, Work], Files]
    tables: Callable[[Setting, Files], list[Table]]
    figures: "Callable[[Setting, Files], dict[str, Figure]]"
    datasets: tuple[str, ...] = ()
    alphas: tuple[float, ...] = (0.1, 0.5)
    seeds: int = 1  # at full scale
    smoke_seeds: int = 1
    smoke_rounds: int = 10
    mode: Mode = "faithful"
    needs_data: bool = True
    trains: bool = True
    takes_folders: bool = False  # reads result files of other folders
    takes_modes: bool = False  # has methods with several modes
    takes_methods: bool = False
    takes_quantiles: bool = False
    beyond: bool = False  # goes beyond the paper


def setting_for(
    experiment: Experiment,
    *,
    scale: Scale = "full",
    datasets: Sequence[str] = (),
    alphas: Sequence[float] = (),
    seeds: int | None = None,
    rounds: int | None = None,
    mode: Mode | None = None,
    long_grid: bool = False,
    methods: Sequence[str] = (),
) -> Setting:
    """Return the setting of an experiment: what is given, and the defaults of the scale."""
    if scale not in get_args(Scale):
        raise unknown("value of --scale", scale, get_args(Scale))
    if mode not in (None, *get_args(Mode)):
        raise unknown("value of --mode", str(mode), get_args(Mode))
    if seeds is not None and seeds < 1:
        raise FedobpError(f"--seeds must be at least 1, not {seeds}: it is the number of seeds")
    if seeds is not None and seeds > _MOST_SEEDS:
        raise FedobpError(f"--seeds must be at most {_MOST_SEEDS:,}, not {short(seeds)}: it is the number of seeds")
    if rounds is not None and rounds < 1:
        raise FedobpError(f"--rounds must be at least 1, not {rounds}")
    if methods and not experiment.takes_methods:
        raise FedobpError(f"{experiment.name} has methods of its own: leave out --methods")
    if long_grid and not experiment.takes_quantiles:
        raise FedobpError(f"{experiment.name} does not sweep over quantiles: leave out --paper-grid")
    for name in datasets:
        describe(name, data_dir())  # an unknown name is refused
    count = seeds or {"smoke": experiment.smoke_seeds, "short": 1, "full": experiment.seeds}[scale]
    grid = GRID if long_grid else _SMOKE_GRID if scale == "smoke" else SHORT_GRID
    return Setting(
        scale,
        tuple(datasets) or (("digits",) if scale == "smoke" and experiment.datasets else experiment.datasets),
        tuple(alphas) or experiment.alphas,
        tuple(range(FIRST_SEED, FIRST_SEED + count)),
        rounds or _ROUNDS.get(scale, experiment.smoke_rounds),
        mode or experiment.mode,
        grid,
        tuple(methods) or tuple(NAMES),
    )


def unused_flags(experiment: Experiment, given: Mapping[str, object]) -> list[str]:
    """Return notes on given flags that change nothing in an experiment: all experiments take them."""
    reasons = {} if experiment.trains else {"seeds": "has no seeds", "rounds": "trains nothing"}
    reasons |= {} if experiment.takes_modes else {"mode": "has no method with several modes"}
    reasons |= {} if experiment.datasets else {"dataset": "judges what result files have"}
    reasons |= {} if experiment.datasets and experiment.needs_data else {"alpha": "partitions no data"}
    return [
        f"{experiment.name} {reason}: --{name} changes nothing"
        for name, reason in reasons.items()
        if given[name] is not None
    ]


def run_experiment(experiment: Experiment, setting: Setting, work: Work) -> dict[str, Any]:
    """Measure what is missing, write all files, and return what was written, as plain values."""
    folder = work.folder / experiment.name
    folder.mkdir(parents=True, exist_ok=True)
    work.notes += setting.missing if experiment.needs_data else []
    found = experiment.measure(setting, work)
    paths = [folder / f"{name}.csv" for name in found]
    for path, rows in zip(paths, found.values(), strict=True):
        write_rows(path, rows)
    tables = experiment.tables(setting, found)
    tables[-1] = replace(tables[-1], notes=[*tables[-1].notes, *work.notes, *work.failed])
    head = f"# {experiment.name}: {experiment.summary}\n\n{describe_setting(setting, experiment)}\n\n"
    for name, text in (
        ("table.md", head + "\n".join(table.markdown() for table in tables)),
        ("table.tex", "\n".join(table.latex() for table in tables)),
    ):
        write(folder / name, text.encode())
        paths.append(folder / name)
    with drawing():
        for name, figure in experiment.figures(setting, found).items():
            paths += save(figure, folder, name)
    return {
        "experiment": experiment.name,
        "scale": setting.scale,
        "folder": str(folder),
        "files": [path.name for path in paths],
        "rows": {name: len(rows) for name, rows in found.items()},
        "notes": work.notes,
        "failed": work.failed,
    }


def describe_setting(setting: Setting, experiment: Experiment) -> str:
    """Return the setting in a sentence; rounds and seeds are named where something is trained."""
    words = [f"Scale {setting.scale}"]
    if setting.datasets and experiment.datasets:
        alphas = [" and ".join(f"Dirichlet({alpha:g})" for alpha in setting.alphas)] * experiment.needs_data
        words += [", ".join(map(title, setting.datasets)), *alphas, *[f"{setting.rounds} rounds"] * experiment.trains]
        first, last = setting.seeds[0], setting.seeds[-1]
        seeds = [f"seeds {first} to {last}" if first < last else f"seed {first}"] * experiment.trains
        seeds += [f"partition seed {FIRST_SEED}"] * experiment.needs_data
        words += [", ".join(seeds)] if seeds else []
    if setting.scale == "smoke":
        words.append("this shows that everything runs, and says nothing about the methods")
    return "; ".join(words) + "."
