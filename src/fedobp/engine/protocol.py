"""What a round asks of clients, and what an engine is: the interface between the two."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from fedobp.data import Split
from fedobp.method import CohortUpdate, Predict, Program, RoundContext
from fedobp.records import Record, Tensors

if TYPE_CHECKING:
    from fedobp.engine.client_pool import PoolJob


@dataclass(frozen=True)
class ClientJob:
    """What one run asks of a cohort. Tensors have a leading axis, in the order of `ctx.cohort`."""

    ctx: RoundContext
    program: Program
    hparams: Mapping[str, float]
    download: Record = field(default_factory=dict)
    predict: Predict | None = None  # how logits come from what a program leaves in `scratch`; None: from theta

    def with_download(self, download: Record) -> "ClientJob":
        """Return the job with what the cohort is sent."""
        return replace(self, download=download)


class PersonalModels(NamedTuple):
    """The models that a cohort uses now, with a leading axis of clients."""

    theta: Tensor
    mine: Tensor  # which entries are the client's own
    scratch: Tensors  # for a job with `predict`, all that its program left; else empty
    processed: int  # samples that went through the clients' models


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


class Prepared(NamedTuple):
    """Batch orders that an engine has computed ahead, by what they depend on."""

    orders: Mapping[Hashable, tuple[Tensor, Tensor]]
    stream: Any = None  # the CUDA stream that computes them


class Engine(Protocol):
    """What runs the clients. The round is the same text for every engine."""

    counters: Counters  # of all that this engine has run

    def try_train(
        self, jobs: Sequence["PoolJob"], prepared: Prepared | None = None
    ) -> list[CohortUpdate | BaseException]:
        """Run the client programs of several runs on their cohorts, and keep each client's new state.

        A run whose program fails answers with its exception, and the others are not affected. `prepared` is what
        `prepare` returned for these jobs.
        """

    def train(self, jobs: Sequence["PoolJob"], prepared: Prepared | None = None) -> list[CohortUpdate]:
        """Do the same, and raise the first exception."""

    def prepare(self, jobs: Sequence["PoolJob"]) -> Prepared:
        """Compute ahead what the next jobs need, while a device works on the last ones; they have no downloads yet."""

    def personalize(self, job: "PoolJob") -> PersonalModels:
        """Run a program on a cohort for the models that it uses; changes of client state are dropped."""

    def predict(self, job: "PoolJob", theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model gives to its samples, on the CPU.

        With `scratch`, what `personalize` returned, it is the job's `predict` that computes them.
        """
