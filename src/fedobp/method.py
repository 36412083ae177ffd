"""What a method is, and all that its author imports: `from fedobp import method as fl`.

A method is a frozen dataclass whose fields are its options. It holds no state, knows no device, file or engine, and
consists of two kinds of functions:

- `init`, `download`, `aggregate` run on the server and see the whole cohort: tensors have a leading axis of clients;
- `client_update` and `personalize` return a *program* that one client runs: plain functions of one `Client` (no leading
  axis), and `Train` and `Sweep`, which an engine carries out. An engine may vectorise all; a node calls them as they
  are.

State lives in three places: `server` (one), `records` (one a client, on the server) and `state` (on the client, which
never leaves it). By convention `server["theta"]` is the global model; entries that no client shares stay at theta^0.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fedobp.models import Model, sample_losses
from fedobp.options import Option, Options, option
from fedobp.records import Record, Sparse, Tensors

__all__ = [
    "Batch", "Client", "CohortKind", "CohortUpdate", "InitialState", "Loss", "Method", "Model", "Option", "Part",
    "Predict", "Program", "Record", "RoundContext", "Sparse", "Sweep", "Tensors", "Train", "average", "broadcast",
    "dense", "last_model", "mode_option", "option", "sample_losses",
]  # fmt: skip


@dataclass(frozen=True)
class Client:
    """All that one client's functions may see. Functions return a changed copy."""

    state: Tensors  # lives on the client from round to round
    download: Record  # what the server sent: this client's part of the method's `download`
    scratch: Tensors  # dropped after the program; the model in use is scratch["theta"]
    upload: Record  # what the method's `aggregate` will get
    hparams: Tensors  # lr, momentum, weight_decay and the method's float options, as 0-d tensors
    # n: training samples; counts: of each label; steps: batches of the last phase
    data: Tensors = field(default_factory=dict)

    @property
    def theta(self) -> Tensor:
        """The model in use."""
        return self.scratch["theta"]

    def set(self, **scratch: Tensor) -> "Client":
        """Return a client with changed scratch values. `theta` is the model; `mine` marks its personal entries."""
        return replace(self, scratch={**self.scratch, **scratch})

    def remember(self, **state: Tensor) -> "Client":
        """Return a client that keeps these values until its next round."""
        return replace(self, state={**self.state, **state})

    def send(self, **upload: Tensor | Sparse) -> "Client":
        """Return a client that will upload these values."""
        return replace(self, upload={**self.upload, **upload})


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

    def cross_entropy(self, logits: Tensor) -> Tensor:
        """Return the mean cross-entropy over the samples that are real."""
        return self.mean(sample_losses(logits, self.y))


Part = Literal["all", "head", "base"]
Loss = Callable[[Model, Client, Batch], Tensor]


@dataclass(frozen=True)
class Train:
    """Epochs of SGD on vectors in `scratch`; a last batch of a single sample is skipped.

    The gradient is that of the loss, plus mu (theta - anchor) for `pull`, plus `drift`; weight decay and momentum
    follow, and momentum is reset at the start of each phase. Entries outside `part` and `mask` do not move. Names refer
    to `scratch`, names of numbers to `hparams`. All but `learn` and `loss` concern learn[0]. A phase without `loss` is
    the fast path: there, clients of different methods train together.
    """

    epochs: int
    learn: tuple[str, ...] = ("theta",)  # vectors that are trained together
    part: Part = "all"  # entries of learn[0], chosen by layer
    mask: str | None = None  # entries of learn[0], chosen at run time: a bool vector
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
    """Go through a client's batches with a function of the method's own: other update rules, statistics, adaptation.

    `step` changes `scratch` only, leaves names, shapes and types as they are, and takes gradients with `torch.func`.
    """

    step: Callable[[Model, Client, Batch], Client]
    epochs: int = 1  # at most
    more: Callable[[Model, Client], Tensor] | None = None  # asked before each epoch: does this client go on?
    fraction: float = 1.0  # of the samples, drawn once a phase
    smallest: int = 1  # batches with fewer samples are skipped; training skips those of one
    whole: bool = False  # all samples are one batch
    per_sample: bool = False  # whether a step holds a gradient of every sample, for which engines reserve memory
    passes: int = 1  # gradients that a step takes on its batch, for the accounting of client computation


Program = Sequence[Train | Sweep | Callable[[Model, Client], Client]]


Predict = Callable[[Model, Tensors, Tensor], Tensor]  # of a model, one client's `scratch`, and inputs


CohortKind = Literal["sampled", "all"]


class InitialState(NamedTuple):
    """The state before round 1; every client starts with the same `record` and `state`."""

    server: Tensors
    record: Tensors
    state: Tensors


@dataclass(frozen=True)
class RoundContext:
    """The model, the round and its cohort: what programs and server functions may depend on."""

    model: Model
    round: int
    rounds: int
    clients: int
    epochs: int  # the local epochs that every method may spend in a round
    cohort: Tensor  # client ids, in sampled order
    seed: int = 0  # the run's: draws on the server are keyed by it
    # In simulations: the gradient of the mean loss over all clients' training samples, at each row of [clients, N].
    global_gradient: Callable[[Tensor], Tensor] | None = None
    # In simulations: the group of every client, [clients], whose data the partition changed alike; 0: it has no groups.
    groups: Tensor | None = None
    held_out: int = 0  # clients that never train: those with the last ids
    full_participation: bool = False  # whether the cohort is all training clients, because the method asks for them
    serving: bool = False  # whether clients get a model to use, in an evaluation, and not one to train


_NONE = torch.empty(0)


class CohortUpdate(NamedTuple):
    """What a cohort returns after its local training. Tensors have a leading axis, in the order of the cohort."""

    upload: Record
    n: Tensor  # training samples of each client
    samples: int = 0  # their sum, on the host: asking a device for it would wait for the device
    loss: Tensor = _NONE  # mean over each client's batches; NaN where it had none
    finite: Tensor = _NONE  # whether each client's weights and loss still are
    processed: int = 0  # samples that went through the clients' models, each as often as it did
    answered: tuple[int, ...] | None = None  # positions in the cohort of those that these are; None: all of it

    def dense(self, name: str) -> Tensor:
        """Return an upload that is sent whole."""
        return dense(self.upload, name)

    def mean(self, name: str) -> Tensor:
        """Eq. 2 and 11: return the mean of an upload that is sent whole, weighted by training samples."""
        return average(self.dense(name), self.n)


@dataclass(frozen=True)
class Method(Options):
    """Base of all methods: fields are options (floats reach clients as `hparams`), functions as described above."""

    kind: ClassVar[str] = "method"
    summary: ClassVar[str]
    paper: ClassVar[str]
    # Whether state["theta"] is always the model that a client trained last: then it is not stored a second time.
    keeps_last_model: ClassVar[bool] = False
    # Whether it needs one label a sample, so that it cannot predict every next token of a sequence.
    one_label: ClassVar[bool] = False

    @property
    def sequential(self) -> bool:
        """Whether a round's clients train one after the other, each as a cohort by itself, or all at once."""
        return False

    def cohorts(self, round: int, rounds: int) -> tuple[CohortKind, ...]:
        """Return which cohorts train in a round, one after the other: the sampled one, all clients, or both."""
        return ("sampled",)

    @property
    def predict(self) -> Predict | None:
        """How logits come from what `personalize` leaves in `scratch`; None: from the model scratch["theta"]."""
        return None

    def init(self, model: Model, theta: Tensor, seed: int) -> InitialState:
        """Return the state before round 1, given theta^0 and the run's seed."""
        raise NotImplementedError

    def download(self, ctx: RoundContext, server: Tensors, records: Tensors) -> tuple[Record, Tensors]:
        """Return (what each client of the cohort receives, its changed records).

        Also called to evaluate; the records are dropped then, so that evaluation changes nothing.
        """
        raise NotImplementedError

    def client_update(self, ctx: RoundContext) -> Program:
        """Return what a client does in a round: from its download to its upload."""
        raise NotImplementedError

    def aggregate(
        self, ctx: RoundContext, server: Tensors, records: Tensors, update: CohortUpdate
    ) -> tuple[Tensors, Tensors]:
        """Return (server state, records) after the cohort's uploads; `records` are those that `download` returned."""
        raise NotImplementedError

    def personalize(self, ctx: RoundContext) -> Program:
        """Return how a client makes the model to use now: it ends in scratch["theta"], changes to `state` are dropped.

        Entries that are the client's own are marked in scratch["mine"] (absent: none are).
        """
        raise NotImplementedError

    def hparams(self) -> dict[str, float]:
        """Return the options that reach clients as numbers."""
        return {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), float)}

    def expected_upload(self, ctx: RoundContext, download: Record, state: Tensors) -> Record:
        """Return an upload with the names, shapes and types of what one client sends: a receiver compares them.

        Found by following the client's program without training; `download` and `state` are one client's.
        """
        given = [*state.values(), *(v.values if isinstance(v, Sparse) else v for v in download.values())]
        device = given[0].device if given else None
        zero, counts = torch.zeros((), device=device), torch.zeros(ctx.model.classes, dtype=torch.int64, device=device)
        data = {"n": counts.sum(), "counts": counts, "steps": counts.sum()}
        names = ("lr", "momentum", "weight_decay", *self.hparams())
        client = Client(state, download, {}, {}, dict.fromkeys(names, zero), data)
        for item in self.client_update(ctx):
            if not isinstance(item, Train | Sweep):
                client = item(ctx.model, client)
        return client.upload


def mode_option(doc: str) -> str:
    """Declare the option `mode`: as the method's authors have it, or what ran behind the FedOBP paper's tables."""
    choice: str = option("faithful", doc, choices=("faithful", "as-published"))
    return choice


def last_model(theta: Tensor) -> Tensors:
    """Return the state of a client that keeps its last model: theta^0, and that it has not trained yet."""
    return {"theta": theta, "seen": theta.new_zeros((), dtype=torch.bool)}


def dense(record: Record, name: str) -> Tensor:
    """Return a value that is sent whole."""
    value = record[name]
    assert isinstance(value, Tensor)
    return value


def broadcast(vector: Tensor, ctx: RoundContext) -> Tensor:
    """Return one vector as every cohort member's download; no memory is spent on copies."""
    return vector.expand(len(ctx.cohort), -1)


def average(uploads: Tensor, n: Tensor) -> Tensor:
    """Eq. 2 and 11: the mean of [clients, N] weighted by samples, without eq. 11's extra 1/|C| (a misprint).

    Taken as one upload plus the mean difference from it: in floating point the plain mean of equal values is not that
    value, and the scores of entries that no client changed would become rounding noise instead of 0. That upload is the
    first of a client with samples: where no other has any, the mean is that client's upload exactly.
    """
    weights = n.to(uploads.dtype) / n.sum()
    one = uploads.index_select(0, (n > 0).int().argmax(dim=0, keepdim=True))
    return one[0] + weights @ (uploads - one)
