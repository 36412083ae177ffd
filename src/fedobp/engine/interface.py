"""The seam between the round loop and whatever runs the clients."""

from typing import NamedTuple, Protocol

from torch import Tensor

from fedobp.algorithms import Moment, Program, Record, Tensors
from fedobp.data import Split


class Trained(NamedTuple):
    """What a cohort answers."""

    up: Record  # the uploads, with a leading axis of clients
    n: Tensor  # training samples of each client
    loss: list[float | None]  # mean over each client's batches; None where it had none


class Engine(Protocol):
    """What the round loop asks of the clients. Tensors have a leading axis, in the order of `now.cohort`."""

    def train(self, now: Moment, program: Program, down: Record, hp: Tensors) -> Trained:
        """Run a local program on every client of the cohort, and keep what each remembers."""

    def serve(self, now: Moment, program: Program, down: Record, hp: Tensors) -> Tensors:
        """Run a serving program on every client of the cohort; return the models `theta` and their `mine` masks."""

    def last(self, now: Moment, otherwise: Tensor) -> Tensor:
        """Return each client's last local model, and `otherwise` for a client that has never trained."""

    def predict(self, now: Moment, theta: Tensor, split: Split) -> list[Tensor]:
        """Return the labels that each client's model gives to its samples."""
