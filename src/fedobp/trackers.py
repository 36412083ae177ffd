"""Trackers: callbacks that write runs for TensorBoard, Weights & Biases or MLflow, into files on this machine.

Each takes a folder, and writes the rounds of every run, its settings, and the numbers of its result.
"""

import logging
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from fedobp.callbacks import Callback
from fedobp.config import Config, run_name
from fedobp.errors import FedobpError, first_line, unknown
from fedobp.files import unwritable
from fedobp.report.frames import flat, numbers_of
from fedobp.report.groups import settings_of
from fedobp.result import Result


class Tracker(Callback):
    """Base of trackers. A run is opened with its first round, when it has taken its own folder."""

    name: ClassVar[str]  # as in `--track`, and of the extra that installs the package
    subfolder: ClassVar[str] = ""  # of the run folder, where `--track` writes

    def __init__(self, folder: str | Path) -> None:
        self.require()
        self.folder = Path(folder).absolute()
        self._runs: dict[int, Any] = {}  # by the identity of the configuration: two runs may have equal ones

    @classmethod
    def require(cls) -> None:
        """Import the package; one that is missing is a user error."""
        try:
            with _quiet():
                cls._import()
        except ImportError as error:
            raise FedobpError(
                f"tracking with {cls.name} needs its package ({first_line(error)}): pip install 'fedobp[{cls.name}]'"
            ) from error

    def on_round(self, config: Config, line: Mapping[str, Any]) -> None:
        """Write the numbers of a round."""
        with _quiet():
            self._write(self._run(config), numbers_of(line, "/"), line["round"])

    def on_end(self, config: Config, result: Result | BaseException) -> None:
        """Write the numbers of the result, and close the run."""
        found = numbers_of(result.to_json(), "/") if isinstance(result, Result) else None
        numbers = None if found is None else {f"result/{name}": value for name, value in found.items()}
        with _quiet():
            run = self._run(config)
            del self._runs[id(config)]
            self._close(run, config, numbers)

    def _run(self, config: Config) -> Any:
        if id(config) not in self._runs:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise unwritable(self.folder, error) from error
            self._runs[id(config)] = self._open(config)
        return self._runs[id(config)]

    @classmethod
    def _import(cls) -> Any:
        raise NotImplementedError

    def _open(self, config: Config) -> Any:
        """Start a run, and write its settings."""
        raise NotImplementedError

    def _write(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        """Write the numbers of a round."""
        raise NotImplementedError

    def _close(self, run: Any, config: Config, numbers: Mapping[str, float] | None) -> None:
        """End a run, and write the numbers of its result; None: it failed."""
        raise NotImplementedError


class TensorBoard(Tracker):
    """Event files for TensorBoard: a subfolder of `folder` for each run."""

    name = subfolder = "tensorboard"

    @classmethod
    def _import(cls) -> Any:
        return import_module("torch.utils.tensorboard")

    def _open(self, config: Config) -> Any:
        writer = self._import().SummaryWriter(str(_free(self.folder, config)))
        writer.add_text("config", "".join(f"    {line}\n" for line in config.to_toml().splitlines()))
        return writer

    def _write(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            run.add_scalar(name, value, step)
        run.flush()

    def _close(self, run: Any, config: Config, numbers: Mapping[str, float] | None) -> None:
        if numbers is not None:
            run.add_hparams(flat(settings_of(config)), numbers, run_name=".", global_step=config.rounds)
        run.close()


class Wandb(Tracker):
    """Offline runs of Weights & Biases, in the subfolder `wandb` of `folder`."""

    name = "wandb"

    @classmethod
    def _import(cls) -> Any:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when the package is loaded
        return import_module("wandb")

    def _open(self, config: Config) -> Any:
        wandb = self._import()
        return wandb.init(
            project="fedobp",
            name=run_name(config),
            dir=str(self.folder),
            mode="offline",
            config=flat(settings_of(config)),
            reinit="create_new",  # the runs of a sweep are open at the same time
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def _write(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        run.log(dict(numbers), step=step)

    def _close(self, run: Any, config: Config, numbers: Mapping[str, float] | None) -> None:
        run.summary.update(dict(numbers or {}))
        run.finish(exit_code=1 if numbers is None else 0)


class MLflow(Tracker):
    """Runs of MLflow in the SQLite file `mlflow.db` of `folder`, in the experiment `fedobp`."""

    name = "mlflow"

    @classmethod
    def _import(cls) -> Any:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when the package is loaded
        return import_module("mlflow")

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._client: Any = None

    def _open(self, config: Config) -> Any:
        mlflow = self._import()
        if self._client is None:
            for logger in ("alembic", "mlflow.store.db.utils"):  # they report every step that makes the tables
                logging.getLogger(logger).setLevel(logging.WARNING)
            self._client = mlflow.MlflowClient(f"sqlite:///{self.folder / 'mlflow.db'}")
        known = self._client.get_experiment_by_name("fedobp")
        experiment = known.experiment_id if known else self._client.create_experiment("fedobp", self.folder.as_uri())
        run = self._client.create_run(experiment, run_name=run_name(config)).info.run_id
        params = [mlflow.entities.Param(name, str(value)) for name, value in flat(settings_of(config)).items()]
        self._client.log_batch(run, params=params)
        return run

    def _write(self, run: Any, numbers: Mapping[str, float], step: int) -> None:
        metric, now = self._import().entities.Metric, int(1000 * time.time())
        self._client.log_batch(run, [metric(name, value, now, step) for name, value in numbers.items()])

    def _close(self, run: Any, config: Config, numbers: Mapping[str, float] | None) -> None:
        self._write(run, numbers or {}, config.rounds)
        self._client.set_terminated(run, "FAILED" if numbers is None else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {tracker.name: tracker for tracker in (TensorBoard, Wandb, MLflow)}


def trackers_named(given: Iterable[str]) -> list[type[Tracker]]:
    """Return trackers by their names, which commas may separate; an unknown one or a missing package is refused."""
    names = [name.strip() for part in given for name in part.split(",")]
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    found = [TRACKERS[name] for name in dict.fromkeys(names)]
    for tracker in found:
        tracker.require()
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Ignore warnings: those of a tracker's package are not for its user."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _free(folder: Path, config: Config) -> Path:
    """Make a new folder for a run, named after it."""
    stem = re.sub(r"[^\w.-]", "_", run_name(config))
    for attempt in count(1):
        path = folder / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
            return path
        except FileExistsError:  # another run of this name
            continue
        except OSError as error:
            raise unwritable(path, error) from error
    raise AssertionError("count is infinite")
