"""The methods, one file each."""

from fedobp.algorithms.registry import (
    METHODS,
    attributing_errors,
    available,
    is_declared,
    method_class,
    names,
    register_method,
)

__all__ = ["METHODS", "attributing_errors", "available", "is_declared", "method_class", "names", "register_method"]
