"""Fuzzing of everything that reads a file or a message: `python tests/fuzz.py --help`."""
