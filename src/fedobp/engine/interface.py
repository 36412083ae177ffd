"""The seam between the round loop and whatever runs the clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import Tensor

from fedobp.algorithms import Method, Moment, Predict, Program, Record, Tensors
from fedobp.data import FederatedData, Split
from fedobp.engine.store import Budget, Store
from fedobp.errors import FedobpError, Stopped

T = TypeVar("T")


class Population:
    """The clients of one run: their data, their own state, their last local models, and the seed of their draws."""

    def __init__(self, data: FederatedData, own: Tensors, theta: Tensor, seed: int, budget: Budget) -> None:
        self.data, self.seed = data, seed
        self._start = own, theta
        self.own = Store(own, data.clients, budget)
        self._last = Store({"theta": theta}, data.clients, budget)
        self._remembered: set[int] = set()  # clients whose last model is own["theta"]

    def keep(self, clients: Sequence[int], own: Tensors, theta: Tensor) -> None:
        """Keep what clients remember and the models that they have just trained; all with a leading axis.

        A model that a client remembers anyway, as in FedOBP, is not kept twice.
        """
        self.own.scatter(clients, own)
        remembered = own.get("theta")
        if remembered is not None and (remembered.data_ptr(), remembered.shape) == (theta.data_ptr(), theta.shape):
            self._remembered.update(clients)
        else:
            self._remembered.difference_update(clients)
            self._last.scatter(clients, {"theta": theta})

    def guests(self) -> "Population":
        """Return the same clients before anybody's first visit: what they do leaves no trace here."""
        return Population(self.data, *self._start, self.seed, Budget())

    def last(self, client: int) -> Tensor | None:
        """Return the model that a client trained last, or None if it never has."""
        if client in self._remembered:
            return self.own[client]["theta"]
        return self._last[client]["theta"] if client in self._last else None


@dataclass(frozen=True)
class Task:
    """What one run asks of a cohort. Tensors have a leading axis, in the order of `now.cohort`."""

    people: Population
    now: Moment
    program: Program
    down: Record
    hp: Mapping[str, float]
    predict: Predict | None = None  # how logits come from what a serving program leaves in `work`, if in no plain way


class Trained(NamedTuple):
    """What a cohort answers."""

    up: Record  # the uploads, with a leading axis of clients
    n: Tensor  # training samples of each client
    loss: Tensor  # mean over each client's batches; NaN where it had none
    finite: Tensor  # whether each client's weights and loss still are
    seen: int  # samples that went through the clients' models, each as often as it did


@dataclass(frozen=True)
class Counters:
    """What was computed: lane-steps, the batch slots of all steps, and the real samples in them."""

    steps: int = 0
    slots: int = 0
    samples: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(self.steps + other.steps, self.slots + other.slots, self.samples + other.samples)

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(self.steps - other.steps, self.slots - other.slots, self.samples - other.samples)

    @property
    def occupancy(self) -> float:
        """The share of computed slots that held a sample; the rest is padding."""
        return self.samples / self.slots if self.slots else 1.0


class Engine(Protocol):
    """What the round loop asks of the clients."""

    counters: Counters

    def attempt(self, tasks: Sequence[Task]) -> list[Trained | BaseException]:
        """Run the local programs of several runs on their cohorts, and keep what each client remembers.

        A run whose program fails answers with its exception, and the others are not affected.
        """

    def train(self, tasks: Sequence[Task]) -> list[Trained]:
        """Do the same, and raise the first exception."""

    def prepare(self, tasks: Sequence[Task]) -> None:
        """Do what can be done for the next tasks while a device works on the last ones; they have no downloads yet."""

    def serve(self, task: Task) -> Tensors:
        """Run a serving program on a cohort; return the models `theta` and their `mine` masks.

        For a task with `predict`, all else that is in `work` comes too.
        """

    def last(self, task: Task, otherwise: Tensor) -> Tensor:
        """Return each client's last local model, and `otherwise` for a client that has never trained."""

    def predict(self, task: Task, theta: Tensor, split: Split, beside: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model gives to its samples, on the CPU.

        With `beside`, what else `serve` returned, it is the task's `predict` that says so.
        """


def caught(function: Callable[[], T]) -> T | BaseException:
    """Return what a function returns or raises, whatever that is; only the user interrupts."""
    try:
        return function()
    except (KeyboardInterrupt, Stopped):
        raise
    except BaseException as error:  # also SystemExit
        return error


def without_failures(answers: Sequence[Trained | BaseException]) -> list[Trained]:
    """Return answers, or raise the first exception among them."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if isinstance(answer, Trained)]


def diverged(now: Moment, finite: Tensor, hp: Mapping[str, float], method: Method) -> FedobpError:
    """Return what to say when clients' weights are no longer numbers; `finite` is False for those.

    A penalty of strength s, such as weight decay, moves a weight by lr s of its distance in a step: with momentum m
    that alone diverges where lr s is above 2 (1 + m). Where no number is that large, the learning rate is blamed, and
    what was raised beside it.
    """
    client = int(now.cohort[~finite.cpu()][0])
    lr, momentum = hp["lr"], hp["momentum"]
    unbounded: dict[str, Any] = {spec.name: spec.default for spec in method.options() if spec.metadata["high"] is None}
    options = {name: hp[name] for name in unbounded if name in hp}
    penalties = {"weight_decay": hp["weight_decay"], **options}
    blamed = {name: value for name, value in penalties.items() if lr <= 1 and lr * value > 2 * (1 + momentum)}
    if not blamed:
        raised = {name: value for name, value in options.items() if value > unbounded[name]}
        blamed = {"lr": lr, **({"momentum": momentum} if momentum else {}), **raised}
    flags = {"lr": "--lr", "momentum": "--momentum", "weight_decay": "--weight-decay"}
    smaller = " or ".join(f"{flags.get(name, f'--set {name}')} (it is {value:g})" for name, value in blamed.items())
    return FedobpError(
        f"round {now.round}, client {client}: the loss or the weights are no longer finite; use a smaller {smaller}"
    )
