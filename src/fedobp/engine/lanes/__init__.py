"""The lanes engine: all clients of a round, and of all runs of a launch, train at once."""

from fedobp.engine.lanes.engine import Lanes

__all__ = ["Lanes"]
