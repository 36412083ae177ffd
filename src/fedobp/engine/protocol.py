"""The interface between a round and an engine: jobs, results and counters."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
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
    predict: Predict | None = None  # logits from what a program leaves in `scratch`; None: the model theta's

    def with_download(self, download: Record) -> "ClientJob":
        """Return the job with the cohort's download."""
        return replace(self, download=download)

    def part(self, positions: Sequence[int]) -> "ClientJob":
        """Return the job of some of its cohort's clients, without their download."""
        return replace(self, ctx=replace(self.ctx, cohort=self.ctx.cohort[list(positions)]), download={})


class LostClients(NamedTuple):
    """An answer to a job: these clients of its cohort have lost their state, and have not trained."""

    clients: tuple[int, ...]


class PersonalModels(NamedTuple):
    """The models that a cohort uses at present, with a leading axis of clients."""

    theta: Tensor
    mine: Tensor  # which entries are personal
    scratch: Tensors  # all that the program left, for a job with `predict`; otherwise empty
    processed: int  # samples that went through the clients' models


@dataclass(frozen=True)
class Counters:
    """Amounts of computation: steps of lanes, the batch slots of all steps, and the real samples in them."""

    steps: int = 0
    slots: int = 0
    samples: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(self.steps + other.steps, self.slots + other.slots, self.samples + other.samples)

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(self.steps - other.steps, self.slots - other.slots, self.samples - other.samples)

    @property
    def occupancy(self) -> float:
        """The share of batch slots with a sample; the rest is padding."""
        return self.samples / self.slots if self.slots else 1.0


class Prepared(NamedTuple):
    """Batch orders that an engine has computed in advance, by all that they depend on."""

    orders: Mapping[Hashable, tuple[Tensor, Tensor]]
    stream: Any = None  # the CUDA stream that computes them


class Engine(Protocol):
    """Runs the programs of clients."""

    counters: Counters  # of all that this engine has run

    def provenance(self, device: torch.device) -> str:
        """Return what the bytes of its results on a device depend on, beside configuration and versions."""

    def try_train(
        self, jobs: Sequence["PoolJob"], prepared: Prepared | None = None
    ) -> list[CohortUpdate | BaseException]:
        """Run the client programs of several runs on their cohorts, and keep each client's new state.

        The result of a run whose program fails is its exception; the other runs are not affected. `prepared` is what
        `prepare` returned for these jobs.
        """

    def train(self, jobs: Sequence["PoolJob"], prepared: Prepared | None = None) -> list[CohortUpdate]:
        """Do the same, and raise the first exception."""

    def prepare(self, jobs: Sequence["PoolJob"]) -> Prepared:
        """Compute in advance what the next jobs need, while a device still works; these jobs have no downloads yet."""

    def personalize(self, job: "PoolJob") -> PersonalModels:
        """Run a program on a cohort for the models that it uses; changes of client state are dropped."""

    def predict(self, job: "PoolJob", theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the labels that each client's model predicts for its samples, on the CPU.

        With `scratch`, as returned by `personalize`, the job's `predict` computes the logits.
        """

    def logits(self, job: "PoolJob", theta: Tensor, split: Split, scratch: Tensors | None = None) -> list[Tensor]:
        """Return the logits of each client's samples, on the CPU, in the type of theta.

        They are [samples, classes], or [samples, positions, classes] where every position has a label. The labels of
        `predict` may come from other kernels: where two logits are almost equal, they need not be the largest here.
        """
