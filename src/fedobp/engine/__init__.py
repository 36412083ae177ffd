"""Engines run the programs of clients on their data.

A round uses an engine through the protocol `Engine` alone, so its code is the same for every engine.
"""

from fedobp.engine.client_pool import ClientPool, ClientSnapshot, PoolJob
from fedobp.engine.failures import caught, diverged, refuse_programs
from fedobp.engine.gradients import global_gradient
from fedobp.engine.lanes import Lanes
from fedobp.engine.memory import memory_of
from fedobp.engine.precision import dtype_of
from fedobp.engine.probe import vectorises
from fedobp.engine.protocol import ClientJob, Counters, Engine, LostClients, PersonalModels, Prepared
from fedobp.engine.serial import Serial
from fedobp.engine.store import Budget, Store

__all__ = [
    "Budget", "ClientJob", "ClientPool", "ClientSnapshot", "Counters", "Engine", "Lanes", "LostClients",
    "PersonalModels", "PoolJob", "Prepared", "Serial", "Store", "caught", "diverged", "dtype_of", "global_gradient",
    "memory_of", "refuse_programs", "vectorises",
]  # fmt: skip
