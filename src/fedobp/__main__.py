"""Lets `python -m fedobp` be the command line."""

from fedobp.cli import main

main()
