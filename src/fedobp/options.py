"""Options of methods and partitions: fields of a frozen dataclass, each with its meaning, range and choices."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, ClassVar, Literal, Self

from fedobp.errors import FedobpError, short, unknown

Option = float | int | str
Precision = Literal["fp32", "fp64", "tf32", "bf16"]
KernelMode = Literal["auto", "on", "off"]
Compression = Literal["none", "8bit", "4bit", "sparse"]
Prior = Literal["off", "serve", "train"]
Calibrate = Literal["off", "bias", "head"]
MetricName = Literal["loss", "f1", "auc", "ece", "confusion", "perplexity"]  # beyond accuracy
LARGEST = 3.4e38  # what float32 can hold
_MOST = 1_000


def option(
    default: Any, doc: str, *, choices: Sequence[str] = (), low: float | None = None, high: float | None = None
) -> Any:
    """Declare an option: its default, what it does and where the default comes from, and its range.

    It is a number or a text; a switch is a text with `choices`. A whole number without `high` is at most 1,000: most
    are epochs or steps, which take time and memory.
    """
    return field(default=default, metadata={"doc": doc, "choices": tuple(choices), "low": low, "high": high})


@dataclass(frozen=True)
class Options:
    """Base of what has a name and options."""

    kind: ClassVar[str]  # what it is: a method, a partition
    name: ClassVar[str]

    @classmethod
    def options(cls) -> list[Field[Any]]:
        """Return the declared options."""
        return list(fields(cls))

    @classmethod
    def configure(cls, given: Mapping[str, Option]) -> Self:
        """Return it with the given options, each checked."""
        return cls(**cls.check_options(given))

    @classmethod
    def check_options(cls, given: Mapping[str, Option]) -> dict[str, Option]:
        """Return the given options, each checked against its field's type, range and choices."""
        known = {f.name: f for f in cls.options()}
        for name in given:
            if name not in known:
                if not known:
                    raise FedobpError(f"{cls.kind} '{cls.name}' has no options, so '{short(name)}' cannot be set")
                raise unknown(f"option of {cls.name}", name, known)
        return {name: _check_option(cls.name, known[name], value) for name, value in given.items()}


def options_of(kind: str, name: str, function: Callable[..., Any]) -> type[Options]:
    """Return the options of a function: its keyword-only parameters whose default is a number or a text."""
    found = [
        (
            one.name,
            type(one.default),
            field(default=one.default, metadata={"high": 2**31 - 1} if type(one.default) is int else {}),
        )
        for one in inspect.signature(function).parameters.values()
        if one.kind is one.KEYWORD_ONLY and type(one.default) in (int, float, str)
    ]
    made = make_dataclass(name, found, bases=(Options,), frozen=True, namespace={"kind": kind, "name": name})
    checked: type[Options] = made
    return checked


def broken_bound(
    value: float, *, low: float | None = None, above: float | None = None, high: float | None = None,
    below: float | None = None,
) -> str | None:  # fmt: skip
    """Return the bound that a number breaks, in words; `low` and `high` are allowed, `above` and `below` are not."""
    if low is not None and value < low:
        return f"at least {low}"
    if above is not None and value <= above:
        return f"above {above}"
    if high is not None and value > high:
        return f"at most {high}"
    return f"below {below}" if below is not None and value >= below else None


def _check_option(owner: str, spec: Field[Any], value: Option) -> Option:
    """Return an option's value in its field's type, or say what it should be."""
    # Annotations are text in a module that has `from __future__ import annotations`.
    kind = int if spec.type in (int, "int") else float
    where, meta = f"option '{spec.name}' of {owner}", spec.metadata
    if meta.get("choices"):
        if value not in meta["choices"]:
            raise unknown(f"value of {where}", short(value), meta["choices"])
        return value
    if spec.type in (str, "str"):
        if not isinstance(value, str):
            raise FedobpError(f"{where} must be a text, not '{short(value)}'")
        return value
    try:
        number = kind(value)
        if isinstance(value, bool) or not (isinstance(value, str) or number == value) or not math.isfinite(number):
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        noun = "whole number" if kind is int else "number"
        raise FedobpError(f"{where} must be a {noun}, not '{short(value)}'") from None
    low, high = meta.get("low"), meta.get("high")
    most = high if high is not None else _MOST if kind is int else LARGEST
    least = low if low is not None else -LARGEST
    if bound := broken_bound(number, low=least, high=most):
        span = f"between {low} and {high}" if kind is float and high is not None else bound
        raise FedobpError(f"{where} must be {span}, not {short(value)}")
    return number
