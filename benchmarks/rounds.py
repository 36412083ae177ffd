"""Single rounds of runs, without evaluation: what `lanes.py` and `kernels.py` measure."""

from dataclasses import replace

from torch import Tensor

from fedobp import Config, Federation
from fedobp.bench import stand_in
from fedobp.data import Dataset
from fedobp.engine import Budget, ClientJob, Engine
from fedobp.federation import read
from fedobp.launch import Simulation, simulate
from fedobp.method import Option
from fedobp.resolution import check_names, resolve, with_method

_NEVER = 10**6


def open_federation(config: Config, dataset: Dataset | None = None) -> tuple[Federation, bool]:
    """Return a federation on a dataset, and whether its images are real.

    The dataset is the one given, or the one that the settings name; where its file is missing, noise of its shape and
    size takes its place.
    """
    check_names(config)
    replaced = dataset or stand_in(config)
    source = replaced or read(config)
    return Federation.resolved(source, *resolve(config, source)), replaced is None


def start(
    federation: Federation,
    engine: Engine,
    budget: Budget,
    *,
    method: str | None = None,
    seed: int | None = None,
    **options: Option,
) -> Simulation:
    """Return a run before its first round; `method`, `seed` and `options` are the federation's unless given.

    None of its rounds is evaluated: its last one is never reached.
    """
    config = federation.config
    changed = replace(config, method=method or config.method, seed=config.seed if seed is None else seed)
    kept = config.options if changed.method == config.method else {}
    resolved, configured = with_method(replace(changed, options={**kept, **options}), federation.source)
    silent = replace(resolved, rounds=_NEVER, eval_every=_NEVER)
    return simulate(federation.plan(silent, configured), engine, budget)


def job(simulation: Simulation, round: int, cohort: Tensor, epochs: int | None = None) -> ClientJob:
    """Return the job of a round for some clients; `epochs` are the configuration's unless others are given."""
    ctx = simulation.run.context(round, cohort)
    return simulation.run.job(ctx if epochs is None else replace(ctx, epochs=epochs))
