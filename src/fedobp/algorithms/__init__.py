"""The methods, one file each."""

from fedobp.algorithms.registry import METHODS, attributing_errors, available, method_class, names

__all__ = ["METHODS", "attributing_errors", "available", "method_class", "names"]
