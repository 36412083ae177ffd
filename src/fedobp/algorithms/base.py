"""What an algorithm is.

A method is a frozen dataclass whose fields are its options. It holds no state, knows no device, file or engine, and
consists of two kinds of functions:

- `begin`, `send`, `receive` run on the server and see the whole cohort: tensors have a leading axis of clients;
- `local` and `serve` return a *program* that one client runs: plain functions of one `Client` (no leading axis), and
  `Train` and `Sweep`, which an engine carries out. An engine may vectorise all; a remote node calls them as they are.

State has three homes: `server` (one), `row` (a client's record on the server) and `own` (a client's state, which never
leaves it). By convention `server["theta"]` is the global model; entries that nobody shares stay at theta^0 there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedobp.models import Model
from fedobp.options import Option as Option  # for methods: all they need is in this file
from fedobp.options import Options
from fedobp.options import option as option

Tensors = dict[str, Tensor]


class Sparse(NamedTuple):
    """A vector of which only the entries in `keep` cross the wire; the receiver finds NaN in all others."""

    values: Tensor
    keep: Tensor

    def fill(self, other: Tensor) -> Tensor:
        """Return the values where they were sent, and `other` elsewhere."""
        return torch.where(self.keep, self.values, other)


Record = dict[str, Tensor | Sparse]


@dataclass(frozen=True)
class Client:
    """All that one client's functions may see. Functions return a changed copy."""

    own: Tensors  # lives on the client from round to round
    down: Record  # what `send` gave this client
    work: Tensors  # scratch, forgotten after the program; the model in use is work["theta"]
    up: Record  # what `receive` will get
    hp: Tensors  # lr, momentum, weight_decay and the method's float options, as 0-d tensors
    # n: training samples; counts: of each label; steps: batches of the last phase
    data: Tensors = field(default_factory=dict)

    @property
    def theta(self) -> Tensor:
        """The model in use."""
        return self.work["theta"]

    def set(self, **work: Tensor) -> "Client":
        """Return a client with changed scratch values. `theta` is the model; `mine` marks its personal entries."""
        return replace(self, work={**self.work, **work})

    def remember(self, **own: Tensor) -> "Client":
        """Return a client that keeps these values until its next visit."""
        return replace(self, own={**self.own, **own})

    def upload(self, **up: Tensor | Sparse) -> "Client":
        """Return a client that will send these values to the server."""
        return replace(self, up={**self.up, **up})


class Batch(NamedTuple):
    """Samples of one step. A vectorised engine pads short batches, so every mean over samples must use `mean`."""

    x: Tensor
    y: Tensor
    weight: Tensor  # 1 a sample, 0 padding
    key: Tensor  # a random key of this client's own for this step
    step: Tensor  # batches that the client has had in this phase
    epoch: Tensor

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of one value a sample over the samples that are real."""
        return (values * self.weight).sum() / self.weight.sum()


Part = Literal["all", "head", "base"]
Loss = Callable[[Model, Client, Batch], Tensor]


@dataclass(frozen=True)
class Train:
    """Epochs of SGD on vectors in `work`; a last batch of a single sample is skipped.

    The gradient is that of the loss, plus mu (theta - anchor) for `pull`, plus `drift`; weight decay and momentum
    follow, and momentum starts anew with each phase. Entries outside `part` and `mask` do not move. Names refer to
    `work`, names of numbers to `hp`. All but `learn` and `loss` concern learn[0]. A phase without `loss` is the fast
    path: there, clients of different methods train together.
    """

    epochs: int
    learn: tuple[str, ...] = ("theta",)  # vectors that are trained together
    part: Part = "all"  # entries of learn[0] that the layout knows
    mask: str | None = None  # entries of learn[0] that are known at run time: a bool vector
    pull: tuple[str, str] | None = None  # (anchor, the number mu): a proximal term
    drift: str | None = None  # a vector added to the gradient: a correction term
    loss: Loss | None = None  # None: the cross-entropy of learn[0]
    lr: str = "lr"

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not isinstance(self.epochs, int) or self.epochs < 0:
            raise ValueError(f"`epochs` must be a whole number from 0 on, not {self.epochs!r}")
        if self.part not in get_args(Part):
            raise ValueError(f"`part` must be one of {', '.join(get_args(Part))}, not {self.part!r}")
        hash(self)  # phases are grouped by what they declare
        if self.loss is None and len(self.learn) != 1:
            raise ValueError("without a loss of its own, a phase trains one vector")


@dataclass(frozen=True)
class Sweep:
    """Go through a client's batches with a function of one's own: other rules of learning, statistics, adaptation.

    `step` changes `work` only, leaves names, shapes and types as they are, and takes gradients with `torch.func`.
    """

    step: Callable[[Model, Client, Batch], Client]
    epochs: int = 1  # at most
    more: Callable[[Model, Client], Tensor] | None = None  # asked before each epoch: does this client go on?
    fraction: float = 1.0  # of the samples, drawn once a phase
    smallest: int = 1  # batches with fewer samples are skipped; training skips those of one
    whole: bool = False  # all samples are one batch
    per_sample: bool = False  # whether a step holds a gradient of every sample, for which engines make room
    passes: int = 1  # gradients that a step takes on its batch, for the books of what clients compute


Program = Sequence[Train | Sweep | Callable[[Model, Client], Client]]


Predict = Callable[[Model, Tensors, Tensor], Tensor]  # of a model, one client's `work`, and inputs


Turn = Literal["cohort", "everyone"]


class Start(NamedTuple):
    """The state before round 1; every client starts with the same `row` and `own`."""

    server: Tensors
    row: Tensors
    own: Tensors


@dataclass(frozen=True)
class Moment:
    """When and with whom: what programs and server functions may depend on."""

    round: int
    rounds: int
    clients: int
    epochs: int  # the local epochs that every method may spend on a visit
    cohort: Tensor  # client ids, in sampled order
    seed: int = 0  # the run's: draws on the server are keyed by it
    # In simulations: the gradient of the mean loss over all clients' training samples, at each of [rows, N].
    pooled: Callable[[Tensor], Tensor] | None = None
    held_out: int = 0  # clients that never train: those with the last ids
    everyone: bool = False  # whether the cohort is all clients that train, because the method asks for them (`turns`)


@dataclass(frozen=True)
class Method(Options):
    """Base of all methods: fields are options (floats reach clients as `hp`), functions as described above."""

    kind: ClassVar[str] = "method"
    summary: ClassVar[str]
    paper: ClassVar[str]

    @property
    def together(self) -> bool:
        """Whether a round's clients train at once; if not, each of them is a cohort by itself, one after the other."""
        return True

    def turns(self, round: int, rounds: int) -> tuple[Turn, ...]:
        """Return who trains in a round, one after the other: the sampled cohort, all clients, or both."""
        return ("cohort",)

    @property
    def predict(self) -> Predict | None:
        """How logits come from what `serve` leaves in `work`; None: they are those of the model work["theta"]."""
        return None

    def begin(self, model: Model, theta: Tensor, seed: int) -> Start:
        """Return the state before round 1, given theta^0 and the run's seed."""
        raise NotImplementedError

    def send(self, model: Model, now: Moment, server: Tensors, rows: Tensors) -> tuple[Record, Tensors]:
        """Return (what each client of the cohort receives, its changed rows).

        Also called to evaluate; the rows are dropped then, so testing changes nothing.
        """
        raise NotImplementedError

    def local(self, model: Model, now: Moment) -> Program:
        """Return what a client does in a round: from its download to its upload."""
        raise NotImplementedError

    def receive(
        self, model: Model, now: Moment, server: Tensors, rows: Tensors, up: Record, n: Tensor
    ) -> tuple[Tensors, Tensors]:
        """Return (server state, rows) after the cohort's uploads; n counts each client's training samples."""
        raise NotImplementedError

    def serve(self, model: Model, now: Moment) -> Program:
        """Return how a client makes the model to use now: it ends in work["theta"], changes to `own` are dropped.

        Entries that are the client's own are marked in work["mine"] (absent: none are).
        """
        raise NotImplementedError

    def floats(self) -> dict[str, float]:
        """Return the options that reach clients as numbers."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), float)}


def dense(record: Record, name: str) -> Tensor:
    """Return a value that crosses the wire whole."""
    value = record[name]
    assert isinstance(value, Tensor)
    return value


def to_all(vector: Tensor, now: Moment) -> Tensor:
    """Return one vector as every cohort member's download; no memory is spent on copies."""
    return vector.expand(len(now.cohort), -1)


def average(uploads: Tensor, n: Tensor) -> Tensor:
    """Eq. 2 and 11: the mean of [clients, N] weighted by samples, without eq. 11's extra 1/|C| (a misprint).

    Taken as one upload plus the mean difference from it: in floating point the plain mean of equal values is not that
    value, and the scores of entries that nobody changed would become rounding noise instead of 0. That upload is the
    first of a client with samples: where no other has any, the mean is that client's upload exactly.
    """
    weights = n.to(uploads.dtype) / n.sum()
    one = uploads.index_select(0, (n > 0).int().argmax(dim=0, keepdim=True))
    return one[0] + weights @ (uploads - one)
