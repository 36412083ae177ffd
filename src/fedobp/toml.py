"""TOML: read from a file with one sentence for what is wrong, and written value by value."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedobp.errors import FedobpError, short
from fedobp.plugins import label

_LONGEST = 2**20  # bytes of a configuration file
# A key of many names, as in a.a.a: the time that tomllib takes for one grows with the square of their number.
_LONG_KEY = re.compile(r"""(?<![\w."'-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){16}""")


def read_toml(path: Path, kind: str, longest: int = _LONGEST) -> tuple[str, dict[str, Any]]:
    """Return a TOML file's text and what it holds; `kind` says which file is meant, `longest` is in bytes."""
    where = short(path, 200)
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise FedobpError(f"the configuration {where} is no file: give {kind}")
        with path.open("rb") as file:
            content = file.read(longest + 1)
        if len(content) > longest:
            raise FedobpError(f"the configuration {where} is longer than any: give {kind}")
        text = content.decode()
        if _LONG_KEY.search(text):
            raise ValueError("a key of more than 16 names")
        return text, tomllib.loads(text)
    except OSError as error:
        raise FedobpError(f"cannot read the configuration {where} ({error.strerror}): give {kind}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of thousands of digits, deep nesting
        raise FedobpError(f"{where} is not valid TOML ({short(error, 120)}): compare it with {kind}") from error


def toml_lines(values: Mapping[str, Any]) -> list[str]:
    """Return lines of TOML; what is None is left out."""
    return [f"{toml_key(name)} = {toml_value(value)}" for name, value in values.items() if value is not None]


def toml_key(name: str) -> str:
    """Return a name as a key in TOML."""
    return name if re.fullmatch("[A-Za-z0-9_-]+", name) else toml_value(name)


def toml_value(value: Any) -> str:
    """Return a value in TOML; a function is a reference to it."""
    if callable(value):
        value = label(value)
    if isinstance(value, str):
        escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' or ord(c) == 127 else c for c in value)
        return f'"{escaped}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else repr(value)
