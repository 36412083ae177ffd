"""`fedobp deploy`: the same federation on real nodes, with Flower."""

import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedobp.cli.output import print_result
from fedobp.cli.progress import round_progress
from fedobp.cli.settings import (
    SETTINGS,
    Json,
    ModelSet,
    Out,
    PartitionSet,
    Q,
    Set,
    method_options,
    note_chosen,
    parse_pairs,
    with_settings,
)
from fedobp.config import Config
from fedobp.errors import FedobpError

if TYPE_CHECKING:
    from fedobp.federation import Federation
    from fedobp.flower.task import FederationSettings, Inputs

# Nodes train one client each, on the device that their own config names; all of them are evaluated.
_SIMULATED = (
    "clients", "holdout_clients", "partition_file", "eval_clients", "engine", "device", "kernels", "lane_memory",
    "store_memory",
)  # fmt: skip
_settings_flags = with_settings(*(name for name in SETTINGS if name not in _SIMULATED), participation=1.0, rounds=10)

Folder = Annotated[Path, typer.Argument(metavar="DIR", show_default=False)]
Nodes = Annotated[
    int, typer.Option("--nodes", "--clients", help="Number of nodes; each is one client.", min=1, max=10_000)
]
Deadline = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="Time that nodes have to answer (default: 600).")
]
MinReplies = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="Share of a cohort that must answer, or it is skipped (default: 0.5)."),
]

deploy = typer.Typer()


@deploy.callback(invoke_without_command=True)
def _deploy_root(context: typer.Context) -> None:
    """Run a federation on real nodes, with Flower."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@deploy.command("init")
@_settings_flags
def deploy_init(
    folder: Folder,
    *,
    given: Mapping[str, Any],
    nodes: Nodes = 5,
    shape: Annotated[
        str | None,
        typer.Option(help="Data that is not here: the shape of an input, such as 28,28 or 32,32,3, or 12 (features)."),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(help="With --shape: the number of labels, or their names, separated by commas.")
    ] = None,
    unit: Annotated[
        float, typer.Option(help="With --shape: inputs are scaled by (x / unit - mean) / std; 255 for bytes.")
    ] = 1.0,
    mean: Annotated[str, typer.Option(help="With --shape: one value, or one a channel or feature.")] = "0",
    std: Annotated[str, typer.Option(help="With --shape: likewise.")] = "1",
    deadline: Deadline = None,
    min_replies: MinReplies = None,
    set_: Set = None,
    q: Q = None,
    partition_set: PartitionSet = None,
    model_set: ModelSet = None,
    as_json: Json = False,
) -> None:
    """Write a project into DIR: a federation's settings, its Flower apps, scripts that start them, a README.

    Settings of inputs come from a dataset that is here (--dataset; by default the digits), whose samples are then
    written as the nodes' demo data; for data that is on the nodes alone, give --shape and --labels. Existing files are
    not overwritten.

    [bold]Examples[/bold]

    \b
    fedobp deploy init federation
    fedobp deploy init federation --nodes 8 --method fedper --rounds 50
    fedobp deploy init federation --shape 28,28 --labels 10 --unit 255 --mean 0.13 --std 0.31
    """
    _require_flower()
    from fedobp.flower.project import described_inputs, node_arrays, write_project

    config = _config(given, nodes, set_, q, partition_set, model_set)
    data = None
    if shape is not None:
        if here := [name for name in ("dataset", "partition", "alpha") if name in given]:
            raise FedobpError(f"--shape is for data that is not here: leave out --shape or --{here[0]}")
        if labels is None:
            raise FedobpError("--shape needs --labels: give their number, or their names separated by commas")
        inputs = described_inputs(shape, labels, unit, mean, std)
        # Samples come with their nodes; alpha has no meaning then, and a config has one.
        config = replace(config, dataset="nodes", partition="natural", alpha=0.1)
        settings = _federation(config, inputs, deadline, min_replies)
    elif labels is not None or (unit, mean, std) != (1.0, "0", "1"):
        raise FedobpError("--labels, --unit, --mean and --std describe data that is not here: give --shape as well")
    else:
        simulated = _simulated(config, given)
        settings = _federation_of(simulated, deadline, min_replies)
        data = node_arrays(simulated)
    files = write_project(folder, settings, data)
    about = {"out": str(folder), "federation": settings.id, "nodes": nodes, "files": files}
    text = f"Project of {nodes} nodes: {folder}\nNext: {folder / 'README.md'} says how to start it."
    print_result(about if as_json else text)


@deploy.command("keys")
def deploy_keys(
    folder: Folder,
    *,
    nodes: Nodes = 5,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Name or IP address of the superlink's machine; may be given several times."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a certificate authority, the server's TLS certificate and a key pair for each node, in DIR.

    The certificate is also for localhost and 127.0.0.1. The authority's private key is not kept. Existing keys are not
    overwritten.

    [bold]Examples[/bold]

    \b
    fedobp deploy keys keys --nodes 5
    fedobp deploy keys keys --nodes 5 --host superlink.example.org --host 192.0.2.7
    """
    _require_flower()
    from fedobp.flower.deploy import LOOPBACK
    from fedobp.flower.keys import make_keys

    hosts = list(dict.fromkeys([*(host or ()), *LOOPBACK]))
    make_keys(folder, hosts, nodes)
    text = f"Keys of {nodes} nodes, and a certificate for {', '.join(hosts)}: {folder}"
    print_result({"out": str(folder), "nodes": nodes, "hosts": hosts} if as_json else text)


@deploy.command("local")
@_settings_flags
def deploy_local(
    *,
    given: Mapping[str, Any],
    nodes: Nodes = 5,
    tls: Annotated[bool, typer.Option("--tls", help="Encrypt, and let only registered nodes join.")] = False,
    deadline: Deadline = None,
    min_replies: MinReplies = None,
    set_: Set = None,
    q: Q = None,
    partition_set: PartitionSet = None,
    model_set: ModelSet = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run a federation on this machine: a superlink and nodes as processes, which end with this command.

    Everything is written into one folder: data, keys, logs, and the server's run folder, which fedobp report reads.

    [bold]Examples[/bold]

    \b
    fedobp deploy local --nodes 5 --tls --rounds 10
    fedobp deploy local --nodes 3 --method fedper --model mlp --rounds 2
    """
    _require_flower()
    from fedobp.flower.deploy import run_on_loopback
    from fedobp.flower.project import node_arrays
    from fedobp.report.tables import format_bytes, run_table
    from fedobp.report.words import statuses
    from fedobp.saved_runs import read_run
    from fedobp.storage import new_run_folder

    simulated = _simulated(_config(given, nodes, set_, q, partition_set, model_set), given)
    settings = _federation_of(simulated, deadline, min_replies)
    config = settings.config
    folder = out or new_run_folder(f"deploy-{config.method}-{config.dataset}-seed{config.seed}")
    try:
        with round_progress(1) as advance:
            shown = partial(advance, config.method)
            run = run_on_loopback(folder, settings, node_arrays(simulated), tls=tls, progress=shown)
    finally:
        if out is None:
            with suppress(OSError):  # the new folder is empty only if nothing could start
                folder.rmdir()
    saved = read_run(run)
    result = saved.to_result()
    if as_json:
        print_result(result.to_json())
        return
    table, messages = run_table(result), saved.messages()
    seconds = fmean(line["all"] for line in saved.timings())
    down, up = (format_bytes(sum(line.get(name, 0) for line in messages)) for name in ("down", "up"))
    table.notes.append(
        f"{nodes} nodes{', TLS' * tls}: {seconds:.1f} s a round; on the wire {down} down, {up} up, evaluations "
        f"included; messages: {statuses(messages)}."
    )
    print_result(table, f"Run folder: {run}")


def _require_flower() -> None:
    if find_spec("flwr") is None:
        raise FedobpError("fedobp deploy needs Flower: pip install 'fedobp[flower]'")


def _config(
    given: Mapping[str, Any],
    nodes: int,
    set_: list[str] | None,
    q: float | None,
    partition_set: list[str] | None,
    model_set: list[str] | None,
) -> Config:
    """Return settings as they were asked for; nodes train with the serial engine, by their own device."""
    return Config(
        **given, clients=nodes, engine="serial", device="cpu", options=method_options(set_, q),
        partition_options=parse_pairs("--partition-set", partition_set),
        model_options=parse_pairs("--model-set", model_set),
    )  # fmt: skip


def _simulated(config: Config, given: Mapping[str, Any]) -> "Federation":
    """Return the federation of a dataset that is here, whose clients' samples become those of nodes."""
    from fedobp.federation import Federation, read
    from fedobp.resolution import resolve

    with redirect_stdout(sys.stderr):  # what code of the user prints
        dataset = read(config)
        resolved, method = resolve(config, dataset)
        note_chosen({**given, "clients": config.clients}, resolved)
        return Federation.resolved(dataset, resolved, method)


def _federation_of(simulated: "Federation", deadline: float | None, min_replies: float | None) -> "FederationSettings":
    from fedobp.flower.task import Inputs

    # The folder of datasets is of this machine alone.
    config, inputs = replace(simulated.config, data_dir=None), Inputs.of(simulated.source, simulated.data)
    return _federation(config, inputs, deadline, min_replies)


def _federation(
    config: Config, inputs: "Inputs", deadline: float | None, min_replies: float | None
) -> "FederationSettings":
    from fedobp.flower.task import Rules, check_values, make_settings

    chosen: dict[str, Any] = {"deadline": deadline, "min_replies": min_replies}
    rules = Rules(**{name: value for name, value in chosen.items() if value is not None})
    try:
        check_values(inputs, rules)
    except ValueError as error:
        raise FedobpError(f"these values describe no federation: {error}") from error
    return make_settings(config, inputs, rules)
