"""The command line: parse, call, print. Heavy imports happen inside the command that needs them."""

import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_args

import typer

from fedobp._version import __version__
from fedobp.cli.data import Json, data
from fedobp.cli.screen import Output, Unwritten, console, next_run, progress, show, stopwatch, tell
from fedobp.config import Config, flag, read_config, run_name, settings
from fedobp.errors import FedobpError, Stopped, short, unknown

if TYPE_CHECKING:
    from fedobp.federation import Failure
    from fedobp.result import Result

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.add_typer(data, name="data")

# typer carries its own copy of click in newer versions: take the class of usage errors from typer itself.
_UsageError: Any = typer.BadParameter.__bases__[0]

Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the method.")]
PartitionSet = Annotated[
    list[str] | None,
    typer.Option(
        "--partition-set", metavar="NAME=VALUE", help="An option of the partition; see fedobp partition --help."
    ),
]
Q = Annotated[float | None, typer.Option("--q", help="Short for --set q=...: the quantile of FedOBP.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write to (default: a new one under runs/).")]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Settings to start from, such as a run's own; what it holds stays unless a flag says otherwise.",
    ),
]

_PARTITION_SETTINGS = (
    "dataset", "data_dir", "clients", "partition", "alpha", "partition_seed", "seed", "val_ratio", "holdout_clients",
    "partition_file",
)  # fmt: skip
_BENCH_SETTINGS = (
    "dataset", "data_dir", "clients", "alpha", "model", "rounds", "participation", "epochs", "batch_size", "device",
    "precision",
)  # fmt: skip


_STOPPED = {130: "interrupted", 143: "terminated"}
# torch's, of CUDA and of the CPU; what the system says where not even a library finds room.
_NO_MEMORY = re.compile("OutOfMemoryError|can't allocate memory|bad_alloc|can't start new thread|failed to map segment")
_MOST_RUNS = 1_000  # of a comparison


def main() -> NoReturn:
    """Run the command line.

    Exit codes: 0 it worked, also where the reader of the output has gone; 2 a user error, in one sentence;
    130 interrupted (Ctrl-C); 143 terminated (SIGTERM).
    """
    code: Any
    output = Output()
    try:
        with redirect_stdout(output), warnings.catch_warnings():
            warnings.showwarning = _note
            _refuse_blanks(sys.argv[1:])
            code = app(standalone_mode=False)
            output.flush()
    except FedobpError as error:
        code = _complain(str(error), 1000)
    except _UsageError as error:
        # typer and click each suggest the nearest command: once is enough.
        code = _complain(re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message()), 300)
    except (MemoryError, RuntimeError, ImportError) as error:
        if not isinstance(error, MemoryError) and not _NO_MEMORY.search(f"{type(error).__name__}: {error}"):
            raise
        code = _complain("there is not enough memory: use a smaller --participation, --batch-size or --model", 300)
    except OSError as error:
        if error.filename is None:
            raise
        place = short(error.filename, 200)
        code = _complain(f"cannot use {place} ({error.strerror}): choose another place or name", 300)
    except Stopped as stop:
        code = stop.code
    except (KeyboardInterrupt, typer.Abort):  # in Python, where no signal handler of ours is set
        code = 130
    except Unwritten as error:
        # The reader of our output has gone (`fedobp methods | head`): that is no error.
        gone = isinstance(error.reason, BrokenPipeError)
        code = 0 if gone else _complain(f"cannot write the output ({error.reason.strerror}): send it elsewhere", 300)
    if code in _STOPPED:
        tell(_STOPPED[code])
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_blanks(arguments: list[str]) -> None:
    """Refuse arguments and values of flags that are empty or blank, or that hold what no name or path can."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        if equals and not value.strip():
            what = name if name.startswith("--") else "an argument"
            raise FedobpError(f"{short(what)} must not be empty: give it a value, or leave it out")
        if "\0" in argument:
            raise FedobpError(f"'{short(argument)}' holds a zero byte, which no name or path can")


def _note(message: Warning | str, *_: object, **__: object) -> None:
    tell(f"note: {short(message, 1000)}")


def _complain(sentence: str, limit: int) -> int:
    tell(f"error: {short(sentence, limit)}")
    return 2


def with_settings(*names: str, **defaults: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each named setting of `Config`; it receives those given as one mapping, `given`.

    `defaults` replace the settings' own.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        chosen = [spec for spec in settings() if spec.name in names]

        def wrapped(**arguments: Any) -> None:
            given = {spec.name: arguments.pop(spec.name) for spec in chosen}
            given = {name: value for name, value in given.items() if value is not None}
            command(given={**defaults, **given}, **arguments)

        parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
        for spec in chosen:
            words = get_args(spec.type) if spec.type not in (int, float, str) else ()
            choices = [word for word in words if isinstance(word, str)]
            default = defaults.get(spec.name, spec.default)
            text = spec.metadata["help"] if default is None else f"{spec.metadata['help']} (default: {default})"
            detail: dict[str, Any] = {"metavar": "|".join(choices)} if choices else {}
            detail["rich_help_panel"] = spec.metadata["panel"]
            kind = spec.type if spec.type in (int, float) else str
            option = typer.Option(flag(spec.name), help=text, show_default=False, **detail)
            parameters.append(
                inspect.Parameter(
                    spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
                )
            )
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapped

    return wrap


_ALL = tuple(spec.name for spec in settings())


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fedobp {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog="Exit codes: 0 worked, 2 a user error, 130 interrupted, 143 terminated.",
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Personalised federated learning: many clients share one model, each keeps a few parameters of its own.

    Start with [bold]fedobp compare[/bold]: FedOBP beside its baselines on real handwritten digits, in under a minute.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
@with_settings(*_ALL)
def run(
    *,
    given: Mapping[str, Any],
    set_: Set = None,
    q: Q = None,
    partition_set: PartitionSet = None,
    config: ConfigFile = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train one method on a federation and write a run folder.

    [bold]Examples[/bold]

    \b
    fedobp run
    fedobp run --method fedper --rounds 20 --clients 10 --alpha 0.5
    fedobp run --dataset cifar10 --q 0.9999 --set score=product --protocol paper
    fedobp run --config runs/NAME/config.toml
    """
    from fedobp.federation import Federation
    from fedobp.report.tables import run_table
    from fedobp.storage import new_run_folder

    base = read_config(config) if config else {}
    if "method" in given and given["method"] != base.get("method", given["method"]):
        base.pop("options", None)
    if "partition" in given and given["partition"] != base.get("partition", given["partition"]):
        base.pop("partition_options", None)
    options = {**base.get("options", {}), **_options(set_, q)}
    dealt = {**base.get("partition_options", {}), **_pairs("--partition-set", partition_set)}
    resolved = _configured({**base, **given, "options": options, "partition_options": dealt})
    federation = Federation(resolved)
    label = f"{resolved.method}-{resolved.dataset}-seed{resolved.seed}"
    folder = out or new_run_folder(label)
    with progress(1, resolved.rounds) as advance, redirect_stdout(sys.stderr):  # what plugins print
        result = federation.run(out=folder, progress=partial(advance, resolved.method))
    show(result.to_json() if as_json else run_table(result), f"Run folder: {folder}")


@app.command()
@with_settings(*(name for name in _ALL if name != "method"), save_models="none")
def compare(
    context: typer.Context,
    *,
    given: Mapping[str, Any],
    methods: Annotated[
        str, typer.Option(help="Methods to compare, separated by commas; `all`: every one.")
    ] = "fedobp,fedavg,fedavg-last,local,fedper",
    seeds: Annotated[int, typer.Option(help="How many seeds: the seed, the seed + 1, ...", min=1)] = 1,
    set_: Set = None,
    q: Q = None,
    partition_set: PartitionSet = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            help="The compare.toml of another comparison, to repeat it to the same bytes; only --out and --json go "
            "with it.",
        ),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Train several methods under one protocol and print one table.

    An option given with --set applies to every method that has it. A method that fails does not end the others.

    [bold]Examples[/bold]

    \b
    fedobp compare
    fedobp compare --methods fedobp,fedavg-last,fedavg-ft --seeds 4 --rounds 30
    fedobp compare --methods all --rounds 2
    fedobp compare --dataset fmnist --alpha 0.5 --json
    fedobp compare --config runs/NAME/compare.toml
    """
    from fedobp.comparison import read_comparison, to_toml
    from fedobp.federation import Failure, SweepError, launches_of, sweep
    from fedobp.files import write_json
    from fedobp.report.tables import compare_table, summarise
    from fedobp.storage import claim, new_run_folder, provenance, release

    failed: list[Failure] = []
    launches = None
    if config:
        _refuse_flags(context, "config", "out", "as_json")
        asked, launches = read_comparison(config)
    else:
        partition_options = _pairs("--partition-set", partition_set)
        asked, failed = _asked({**given, "partition_options": partition_options}, methods, seeds, _options(set_, q))
    plan: dict[int, Config] = {}
    for at, wanted in enumerate(asked):
        try:
            plan[at] = Config(**wanted)
        except FedobpError as error:
            failed.append(Failure(wanted["method"], wanted["seed"], str(error)))
    if not plan:
        raise _failing(SweepError([], failed))
    configs, places = list(plan.values()), {at: place for place, at in enumerate(plan)}
    if launches is None:
        launches = launches_of(configs)
    else:
        launches = [[places[at] for at in launch if at in plan] for launch in launches]
        launches = [launch for launch in launches if launch]
    head = f"# Repeat with: fedobp compare --config compare.toml\n{provenance()}"
    made = out is None or not out.exists()
    folder = claim(
        out or new_run_folder(f"compare-{configs[0].dataset}"), "compare.toml", head + to_toml(configs, launches)
    )
    runs, bug = list(map(run_name, configs)), None
    try:
        with progress(len(configs), configs[0].rounds) as advance, redirect_stdout(sys.stderr):  # what plugins print
            found: Sequence[Result | None] = sweep(
                configs,
                out=[folder / run for run in runs],
                progress=lambda at: advance(f"{len(configs)} runs", replace(at, accuracy=None)),
                keep_models=False,
                launches=launches,
            )
    except SweepError as error:
        found, bug = error.results, error.__cause__
        failed += error.failed
    finally:
        released = release(folder, "compare.toml", runs, made)  # where no run could start, it is free for the next try
    results = [result for result in found if result is not None]
    content: dict[str, Any] = {"runs": [result.to_json() for result in results], "table": summarise(results)}
    if failed:
        content["failed"] = [asdict(failure) for failure in failed]
    if not released:
        write_json(folder / "compare.json", content)
    if results:
        show(content if as_json else compare_table(results), f"Run folder: {folder}")
    if failed:
        raise _failing(SweepError(results, failed), bug)


def _refuse_flags(context: typer.Context, *allowed: str) -> None:
    """Refuse flags that were given, but for some."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE" and parameter.name not in allowed:
            raise FedobpError(f"--config repeats a comparison as it was: leave out {parameter.opts[0]}")


def _asked(
    given: Mapping[str, Any], methods: str, seeds: int, options: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], "list[Failure]"]:
    """Return the settings of every run of a comparison, and the methods that cannot be loaded."""
    from fedobp.algorithms import METHODS, available, method_class, names
    from fedobp.federation import Failure

    first = given.get("seed", Config.seed)
    span = range(first, first + seeds)
    count = len(names()) if methods == "all" else methods.count(",") + 1
    if count * seeds > _MOST_RUNS:
        raise FedobpError(
            f"--seeds {short(seeds)} of {count} methods are more than the {_MOST_RUNS:,} runs that a comparison may "
            "have: use fewer, and several comparisons with other values of --seed"
        )
    common = _configured({**given, "seed": span[-1], "method": "fedavg"})  # what concerns every run is said at once
    given = {**given, "clients": common.clients, "alpha": common.alpha}
    usable: dict[str, Any] = {}
    failed: list[Failure] = []
    if methods == "all":
        usable, broken = available()
        for name, error in broken.items():
            failed += [Failure(name, seed, str(error)) for seed in ([None] if name in METHODS else span)]
    else:
        for name in dict.fromkeys(name.strip() for name in methods.split(",")):
            try:
                usable[name] = method_class(name)
            except FedobpError as error:
                if name not in names():
                    raise
                failed += [Failure(name, seed, str(error)) for seed in span]
    fields = {name: [spec.name for spec in method.options()] for name, method in usable.items()}
    for option in options:
        if not failed and not any(option in own for own in fields.values()):
            known = sorted({one for own in fields.values() for one in own})
            if not known:
                raise FedobpError(f"none of these methods has options, so '{short(option)}' cannot be set")
            raise unknown("option of these methods", option, known)
    own = {name: {option: value for option, value in options.items() if option in fields[name]} for name in usable}
    asked = [{**given, "seed": seed, "method": name, "options": own[name]} for seed in span for name in usable]
    return asked, failed


def _failing(error: FedobpError, bug: BaseException | None = None) -> typer.Exit:
    """Print every line of an error, after the traceback of a bug, and return what ends the command."""
    if bug:
        traceback.print_exception(bug)
    for line in str(error).splitlines():
        code = _complain(line, 1000)
    return typer.Exit(code)


@app.command()
@with_settings(*_PARTITION_SETTINGS)
def partition(
    *,
    given: Mapping[str, Any],
    partition_set: PartitionSet = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Also draw it into a file.")] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="NAME", help="Also write NAME.npz and NAME.json, for --partition-file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how a dataset falls on clients: labels by client, sizes, and how much the clients differ.

    Options of partitions: per_client of shards, k of classes, beta of quantity, change and noise of feature.

    [bold]Examples[/bold]

    \b
    fedobp partition
    fedobp partition --clients 10 --alpha 0.5 --plot partition.png
    fedobp partition --dataset cifar10 --partition classes --partition-set k=3 --json
    fedobp partition --partition dirichlet-equal --holdout-clients 4 --save mine
    fedobp run --partition-file mine
    """
    from fedobp.data import digest, save_partition
    from fedobp.federation import deal
    from fedobp.report.partition import facts, heat_map, title
    from fedobp.report.partition import plot as draw

    config = _configured({**given, "partition_options": _pairs("--partition-set", partition_set)})
    dataset, shards = deal(config)
    lines = []
    if plot:
        draw(dataset, shards, plot, title(config))
        lines.append(f"Picture: {plot}")
    found = save_partition(save, dataset, shards, config.dealt) if save else digest(dataset, shards)
    if save:
        lines.append(f"Saved. {next_run(config.dataset, given.get('data_dir'), '--partition-file', save)}")
    if as_json:
        show({**facts(dataset, shards), "hash": found})
    else:
        show(heat_map(dataset, shards, console().width), "\n".join([f"Hash: {found}", *lines]))


@app.command()
@with_settings(*_BENCH_SETTINGS, dataset="fmnist")
def bench(
    *,
    given: Mapping[str, Any],
    runs: Annotated[int, typer.Option(help="Runs that train side by side, each with a seed of its own.")] = 1,
    seconds: Annotated[float, typer.Option(help="About how long to measure.")] = 30.0,
    as_json: Json = False,
) -> None:
    """Measure how fast this machine trains, and how long a run would take.

    No data is needed: where a dataset's file is not there, random images of its shape and size take its place.

    [bold]Examples[/bold]

    \b
    fedobp bench
    fedobp bench --dataset cifar10 --runs 8 --precision tf32
    fedobp bench --dataset digits --participation 1 --seconds 10 --json
    """
    from fedobp.bench import bench as measure
    from fedobp.report.tables import bench_table

    config = _configured(given)
    with stopwatch() as advance:
        found = asdict(measure(config, runs=runs, seconds=seconds, progress=advance))
    show(found if as_json else bench_table(found))


@app.command()
def methods(*, as_json: Json = False) -> None:
    """List every method with its idea, its paper, its options and their defaults."""
    from fedobp.algorithms import available
    from fedobp.report.tables import methods_table

    usable, failed = available()
    rows = [
        {
            "name": name,
            "summary": method.summary,
            "options": [
                {"name": spec.name, "default": spec.default, "doc": spec.metadata["doc"]}
                | ({"choices": list(spec.metadata["choices"])} if spec.metadata["choices"] else {})
                for spec in method.options()
            ],
            "paper": method.paper,
        }
        for name, method in usable.items()
    ]
    content: dict[str, Any] = {"methods": rows}
    if failed:
        content["failed"] = [{"method": name, "error": str(error)} for name, error in failed.items()]
    show(content if as_json else methods_table(rows))
    if failed:
        raise _failing(FedobpError("\n".join(map(str, failed.values()))))


def _configured(given: Mapping[str, Any]) -> Config:
    """Return the settings, and say which numbers were chosen for one's own data."""
    from fedobp.data import KNOWN

    config = Config(**given)
    if config.dataset not in KNOWN and not config.partition_file and config.partition != "natural":
        names = ("clients", "alpha") if config.partition.startswith("dirichlet") else ("clients",)
        chosen = [f"{flag(name)} {getattr(config, name)}" for name in names if name not in given]
        if chosen:
            _note(f"'{config.dataset}' has no published settings: {' '.join(chosen)} was chosen by its size")
    return config


def _options(pairs: list[str] | None, q: float | None) -> dict[str, Any]:
    """Return the method's options given with --set and --q."""
    options = _pairs("--set", pairs)
    return options if q is None else {**options, "q": q}


def _pairs(flag: str, pairs: list[str] | None) -> dict[str, Any]:
    """Return what was given as NAME=VALUE with a flag."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            example = "q=0.999" if flag == "--set" else "k=3"
            raise FedobpError(f"{flag} {short(pair)} must be written NAME=VALUE, such as {flag} {example}")
        found[name.strip()] = value.strip()
    return found
