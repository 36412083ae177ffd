"""Engines stand for the clients: they hold the clients' data and state, and run their programs.

The round loop talks to an engine through `Engine` alone, so it is the same text for every way of running clients.
"""

from fedobp.engine.arithmetic import Precision, dtype_of
from fedobp.engine.interface import Counters, Engine, Population, Task, Trained, caught, diverged
from fedobp.engine.lanes import Lanes
from fedobp.engine.memory import memory_of
from fedobp.engine.pooled import pooled_gradient
from fedobp.engine.serial import Serial
from fedobp.engine.store import Budget, Store

__all__ = [
    "Budget", "Counters", "Engine", "Lanes", "Population", "Precision", "Serial", "Store", "Task", "Trained",
    "caught", "diverged", "dtype_of", "memory_of", "pooled_gradient",
]  # fmt: skip
