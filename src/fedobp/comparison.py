"""The file `compare.toml`: the runs of a comparison, and which of them share a launch.

The last bits of a run depend on the runs in its launch, so the file holds the launches too. `fedobp compare --config`
repeats all runs byte for byte.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedobp._version import __version__
from fedobp.algorithms import names
from fedobp.config import Config, check_settings, run_name, settings
from fedobp.errors import FedobpError, short, unknown
from fedobp.toml import read_toml, toml_key, toml_lines, toml_value

_VERSION = 1
_DIGITS = 10  # at most, of a seed
_PER_RUN = ("method", "seed")  # settings that differ between the runs, beside the method's options


def to_toml(configs: Sequence[Config], launches: Sequence[Sequence[int]]) -> str:
    """Return a comparison as TOML, which `read_comparison` reads back."""
    first = configs[0]
    common = {spec.name: getattr(first, spec.name) for spec in settings() if spec.name not in _PER_RUN}
    if all(config.partition_seed == config.seed for config in configs):
        del common["partition_seed"]  # by default it is the seed of each run
    lines = [f"version = {_VERSION}", "", "# Runs that train side by side, launch by launch.", "launches = ["]
    lines += [f"    [{', '.join(toml_value(run_name(configs[run])) for run in launch)}]," for launch in launches]
    lines += ["]", "", "[settings]", *toml_lines(common)]
    lines += ["", "[settings.partition_options]", *toml_lines(first.partition_options)]
    if first.model_options:
        lines += ["", "[settings.model_options]", *toml_lines(first.model_options)]
    for name, options in {config.method: config.options for config in configs}.items():
        lines += ["", f"[methods.{toml_key(name)}]", *toml_lines(options)]
    return "\n".join(lines) + "\n"


def read_comparison(path: Path) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the settings of a file's runs, and its launches by index into these; `Config` checks the values."""
    _, given = read_toml(path, "the compare.toml of a comparison")
    version = given.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise FedobpError(f"{path} is no compare.toml: it has no `version`")
    if version > _VERSION:
        raise FedobpError(
            f"{path} is of version {version}, and fedobp {__version__} reads version {_VERSION}: use a newer fedobp"
        )
    keys = ("version", "launches", "settings", "methods")
    for name in given:
        if name not in keys:
            raise unknown(f"key in {path}", name, keys)
    common, methods = given.get("settings"), given.get("methods")
    if not isinstance(common, dict):
        raise FedobpError(f"{path} has no table [settings]: give the compare.toml of a comparison")
    if not isinstance(methods, dict) or not all(isinstance(options, dict) for options in methods.values()):
        raise FedobpError(f"`methods` in {path} must hold a table of options for each method: write [methods.NAME]")
    shared = [spec.name for spec in settings() if spec.name not in _PER_RUN]
    check_settings(common, path, [*shared, "partition_options", "model_options"])
    for name in methods:
        if name not in names():
            raise unknown(f"method in {path}", name, names())
    launches = _launches(given.get("launches"), methods, path)
    runs = [run for launch in launches for run in launch]
    for name in methods:
        if name not in [method for method, _ in runs]:
            raise FedobpError(f"no launch in {path} has a run of '{name}': add one, or leave out [methods.{name}]")
    each = [{**common, "method": method, "seed": seed, "options": methods[method]} for method, seed in runs]
    return each, [[runs.index(run) for run in launch] for launch in launches]


def _launches(given: object, methods: Mapping[str, Any], path: Path) -> list[list[tuple[str, int]]]:
    """Return the runs of each launch as (method, seed)."""
    if not isinstance(given, list) or not given or not all(isinstance(launch, list) and launch for launch in given):
        raise FedobpError(f"`launches` in {path} must be a list of launches, each a list of runs such as fedavg-seed42")
    seen: set[object] = set()
    for run in (run for launch in given for run in launch):
        method, _, seed = run.rpartition("-seed") if isinstance(run, str) else ("", "", "")
        if method not in methods or not seed.isdecimal() or len(seed) > _DIGITS or str(int(seed)) != seed:
            raise FedobpError(
                f"`launches` in {path} names '{short(run)}', which is no run of its methods: write NAME-seedSEED"
            )
        if run in seen:
            raise FedobpError(f"`launches` in {path} names {run} twice: a run belongs to one launch")
        seen.add(run)
    return [[(run.rpartition("-seed")[0], int(run.rpartition("-seed")[2])) for run in launch] for launch in given]
