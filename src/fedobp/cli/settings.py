"""Command-line flags: those made from the fields of `Config`, and those shared by several commands."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from fedobp.cli.output import print_note
from fedobp.config import Config, flag, number_type, settings
from fedobp.errors import FedobpError, short, unknown

SETTINGS = tuple(spec.name for spec in settings())

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the method.")]
PartitionSet = Annotated[
    list[str] | None,
    typer.Option(
        "--partition-set", metavar="NAME=VALUE", help="An option of the partition; see fedobp partition --help."
    ),
]
ModelSet = Annotated[
    list[str] | None,
    typer.Option("--model-set", metavar="NAME=VALUE", help="An option of the model, such as depth=6 of conv."),
]
Q = Annotated[float | None, typer.Option("--q", help="Short for --set q=..., the quantile of FedOBP.")]
Out = Annotated[Path | None, typer.Option(help="Folder to write to (default: a new one under runs/).")]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="NAME",
        help="Also write for tensorboard, wandb or mlflow, offline, into the run folder.",
    ),
]
CheckpointEvery = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        metavar="ROUNDS",
        help="Rounds between checkpoints; 0: none (default: one a minute, or fewer where they take long).",
        min=0,
        rich_help_panel="Machine and output",
    ),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Settings to start from, such as the config.toml of a run; flags override them.",
    ),
]


KernelPrecisionFlag = Annotated[
    str, typer.Option("--precision", metavar="bf16|tf32|fp32", help="Arithmetic of the kernels.")
]


def kernel_precision(given: str) -> Any:
    """Return a precision that the kernels have, or say which there are."""
    precisions = ("bf16", "tf32", "fp32")
    if given not in precisions:
        raise unknown("value of --precision", given, precisions)
    return given


def with_settings(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command a flag for each named setting of `Config`; it receives the given ones as one mapping, `given`.

    `defaults` replace the defaults of `Config`.
    """

    def wrap(command: Callable[..., None]) -> Callable[..., None]:
        chosen = [spec for spec in settings() if spec.name in names]

        def wrapped(**arguments: Any) -> None:
            given = {spec.name: arguments.pop(spec.name) for spec in chosen}
            given = {name: value for name, value in given.items() if value is not None}
            command(given={**defaults, **given}, **arguments)

        parameters = [p for p in inspect.signature(command).parameters.values() if p.name != "given"]
        for spec in chosen:
            words = get_args(spec.type) if spec.type is not str else ()
            choices = [word for word in words if isinstance(word, str)]
            text, default = spec.metadata["help"], defaults.get(spec.name, spec.default)
            if default is not None:  # instead of what the help says of another default
                text = f"{text.partition(' (default')[0]} (default: {default})"
            detail: dict[str, Any] = {"metavar": "|".join(choices)} if choices else {}
            detail["rich_help_panel"] = spec.metadata["panel"]
            kind = number_type(spec) or str
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


def note_chosen(given: Mapping[str, Any], resolved: Config) -> None:
    """Name the values that were chosen by size for an imported dataset."""
    from fedobp.data import REGISTRY

    if resolved.dataset not in REGISTRY and not resolved.partition_file and resolved.partition != "natural":
        names = ("clients", "alpha") if str(resolved.partition).startswith("dirichlet") else ("clients",)
        chosen = [f"{flag(name)} {getattr(resolved, name)}" for name in names if name not in given]
        if chosen:
            print_note(f"'{resolved.dataset}' has no published settings: {' '.join(chosen)} was chosen by its size")


def method_options(pairs: list[str] | None, q: float | None) -> dict[str, Any]:
    """Return the method's options from --set and --q."""
    options = parse_pairs("--set", pairs)
    return options if q is None else {**options, "q": q}


def parse_pairs(flag: str, pairs: list[str] | None) -> dict[str, Any]:
    """Return the values of a flag that takes NAME=VALUE."""
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            example = {"--set": "q=0.999", "--model-set": "depth=6"}.get(flag, "k=3")
            raise FedobpError(f"{flag} {short(pair)} must be written NAME=VALUE, such as {flag} {example}")
        found[name.strip()] = value.strip()
    return found
