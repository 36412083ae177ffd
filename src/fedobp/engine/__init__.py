"""Engines stand for the clients: they hold the clients' data and state, and run their programs.

The round loop talks to an engine through `Engine` alone, so it is the same text for every way of running clients.
"""

from fedobp.engine.interface import Engine, Trained
from fedobp.engine.serial import Serial
from fedobp.engine.store import Store

__all__ = ["Engine", "Serial", "Store", "Trained"]
