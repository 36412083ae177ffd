"""The Typer application: commands, exit codes and error handling."""

import re
import sys
import warnings
from contextlib import redirect_stdout
from typing import Annotated, Any, NoReturn

import typer
import typer.core
import typer.main

from fedobp._version import __version__
from fedobp.cli.bench import bench
from fedobp.cli.compare import compare
from fedobp.cli.data import data
from fedobp.cli.deploy import deploy
from fedobp.cli.doctor import doctor
from fedobp.cli.methods import methods
from fedobp.cli.models import models
from fedobp.cli.output import OutputError, StandardOutput, print_error, print_note, print_stderr
from fedobp.cli.paper import paper
from fedobp.cli.partition import partition
from fedobp.cli.report import plot, report
from fedobp.cli.run import run
from fedobp.cli.sweep import collect, sweep
from fedobp.cli.tune import tune
from fedobp.errors import LESS_MEMORY, STOP_SIGNALS, FedobpError, Stopped, out_of_memory, short


class _Argument(typer.core.TyperArgument):
    """An argument that keeps its help: from 8.4 on, click overwrites what typer before 0.21 has set."""

    def __init__(self, *, help: str | None = None, **rest: Any) -> None:
        super().__init__(help=help, **rest)
        self.help = help


typer.main.TyperArgument = _Argument  # type: ignore[attr-defined]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
for command in (run, compare, sweep, collect, report, plot, paper, partition, bench, methods, models, doctor, tune):
    app.command()(command)
app.add_typer(data, name="data")
app.add_typer(deploy, name="deploy")

# Newer versions of typer bundle click, so the class of usage errors is taken from typer itself.
_UsageError: Any = typer.BadParameter.__bases__[0]


def main() -> NoReturn:
    """Run the command line.

    Exit codes: 0 success, also if the reader of the output is gone; 2 a user error, in one sentence;
    130 interrupted (Ctrl-C); 143 terminated (SIGTERM).
    """
    code: Any
    output = StandardOutput()
    try:
        with redirect_stdout(output), warnings.catch_warnings():
            warnings.showwarning = _show_warning
            _refuse_blanks(sys.argv[1:])
            code = app(standalone_mode=False)
            output.flush()
    except FedobpError as error:
        code = print_error(str(error), 1000)
    except _UsageError as error:
        # Both typer and click suggest the nearest command; print it once.
        code = print_error(re.sub(r"( Did you mean [^?]*\?)\1", r"\1", error.format_message()), 300)
    except (MemoryError, RuntimeError, ImportError) as error:
        if not out_of_memory(error):
            raise
        code = print_error(f"there is not enough memory: {LESS_MEMORY}", 300)
    except OSError as error:
        if error.filename is None:
            raise
        place = short(error.filename, 200)
        code = print_error(f"cannot use {place} ({error.strerror}): choose another place or name", 300)
    except Stopped as stop:
        code = stop.code
    except (KeyboardInterrupt, typer.Abort):  # called from Python, without the signal handlers of `__main__`
        code = 130
    except OutputError as error:
        # A reader that closes the pipe early (`fedobp methods | head`) is no error.
        gone = isinstance(error.reason, BrokenPipeError)
        code = 0 if gone else print_error(f"cannot write the output ({error.reason.strerror}): send it elsewhere", 300)
    if isinstance(code, int) and code - 128 in STOP_SIGNALS:
        print_stderr(STOP_SIGNALS[code - 128])
    sys.exit(code if isinstance(code, int) else 0)


def _refuse_blanks(arguments: list[str]) -> None:
    """Refuse empty or blank arguments and flag values, and those with a zero byte."""
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=") if argument.startswith("--") else (before, "=", argument)
        if equals and not value.strip():
            what = name if name.startswith("--") else "an argument"
            raise FedobpError(f"{short(what)} must not be empty: give it a value, or leave it out")
        if "\0" in argument:
            raise FedobpError(f"'{short(argument)}' holds a zero byte, which no name or path can")


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print_note(message)


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
