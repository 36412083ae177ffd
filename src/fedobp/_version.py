"""The version, alone in a file so that `fedobp --version` need not import torch."""

__version__ = "0.1.0"
