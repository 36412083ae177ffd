"""Callbacks: functions of the user that a run calls after every round and at its end."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from traceback import walk_tb
from typing import Any

from fedobp.config import Config
from fedobp.errors import FedobpError, Stopped, described, short
from fedobp.result import Result


class Callback:
    """Base of callbacks. Override one function or both; here they do nothing.

    All runs of a sweep call the same callbacks: `config`, which is resolved, tells the runs apart. A callback sees
    copies, so it cannot change a run. An exception of a callback ends its run alone, as a user error.
    """

    def on_round(self, config: Config, line: Mapping[str, Any]) -> None:
        """Receive a round when its numbers are known, in the order of rounds; `line` is that of `metrics.jsonl`."""

    def on_end(self, config: Config, result: Result | BaseException) -> None:
        """Receive the result of a run, or the exception that ended it. A run that could not start is not reported."""


def check_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return callbacks as a tuple, or say what is wrong with them."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise FedobpError(f"`callbacks` must be a list of callbacks, not '{short(callbacks)}'")
    for one in callbacks:
        if not isinstance(one, Callback):
            raise FedobpError(
                f"'{short(one)}' in `callbacks` is no callback: derive its class from fedobp.Callback, and give an "
                "object of that class"
            )
    return tuple(callbacks)


def report_round(callbacks: Sequence[Callback], config: Config, line: Mapping[str, Any]) -> None:
    """Pass a round to each callback."""
    for one in callbacks:
        _call(one, f"on_round of round {line['round']}", one.on_round, config, deepcopy(line))


def report_end(callbacks: Sequence[Callback], config: Config, result: Result | BaseException) -> Result | BaseException:
    """Pass the end of a run to every callback, and return how it ended: an exception of a callback is its end too."""
    stop: BaseException | None = None
    for one in callbacks:
        try:
            _call(one, "on_end", one.on_end, config, _copy(result) if isinstance(result, Result) else result)
        except FedobpError as error:
            result = error if isinstance(result, Result) else result  # the first error is the cause
        except (KeyboardInterrupt, Stopped) as error:  # the other callbacks hear of the end before it passes
            stop = stop or error
    if stop is not None:
        raise stop
    return result


def _copy(result: Result) -> Result:
    """Return a result that can be changed without changing the caller's; the models are shared."""
    columns = ("accuracy", "last", "finetuned", "validation", "new_clients", "history", "clients", "provenance")
    return replace(result, **{name: deepcopy(getattr(result, name)) for name in columns})


def _call(callback: Callback, step: str, function: Callable[..., None], *arguments: object) -> None:
    """Call a callback; its exceptions are raised as user errors that name it and the line. Interrupts pass."""
    try:
        function(*arguments)
    except (FedobpError, KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # also SystemExit
        name, module = type(callback).__name__, type(callback).__module__
        places = [
            f", {frame.f_code.co_filename}:{line}"
            for frame, line in walk_tb(error.__traceback__)
            if frame.f_globals.get("__name__") == module
        ]
        raise FedobpError(f"{described(error)} (callback '{name}', {step}{''.join(places[-1:])})") from error
