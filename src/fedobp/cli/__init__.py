"""The command line. Each command imports what it needs when it runs, so that `--help` loads neither torch nor numpy."""

from fedobp.cli.app import main

__all__ = ["main"]
