"""Engines run the clients: they hold the clients' data and state, and run their programs.

The round talks to an engine through `Engine` alone, so it is the same text for every way of running clients.
"""

from fedobp.engine.client_pool import ClientPool, ClientSnapshot, PoolJob
from fedobp.engine.failures import caught, diverged
from fedobp.engine.global_gradient import global_gradient
from fedobp.engine.lanes import Lanes
from fedobp.engine.memory import memory_of
from fedobp.engine.precision import dtype_of
from fedobp.engine.protocol import ClientJob, Counters, Engine, PersonalModels, Prepared
from fedobp.engine.serial import Serial
from fedobp.engine.store import Budget, Store

__all__ = [
    "Budget", "ClientJob", "ClientPool", "ClientSnapshot", "Counters", "Engine", "Lanes", "PersonalModels", "PoolJob",
    "Prepared", "Serial", "Store", "caught", "diverged", "dtype_of", "global_gradient", "memory_of",
]  # fmt: skip
