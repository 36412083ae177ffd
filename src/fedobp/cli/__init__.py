"""The command line: parse, call, print. Heavy imports happen inside the command that needs them."""

from fedobp.cli.app import main

__all__ = ["main"]
