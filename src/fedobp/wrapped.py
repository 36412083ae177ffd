"""A method around another one: parts that any method can have, such as compressed messages or a label prior.

A wrapper is called as the inner method is, has its options, and does what it does, except for what it overrides.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedobp.method import (
    Client,
    CohortKind,
    CohortUpdate,
    InitialState,
    Method,
    Model,
    Predict,
    Program,
    Record,
    RoundContext,
    Sweep,
    Tensors,
    Train,
)

Function = Callable[[Model, Client], Client]


@dataclass(frozen=True)
class Wrapped(Method):
    """Base of wrappers: all is the inner method's."""

    inner: Method

    def __post_init__(self) -> None:
        """Be called as the inner method is, and have its options."""
        for name in ("name", "summary", "paper", "keeps_last_model", "one_label", "options"):
            object.__setattr__(self, name, getattr(self.inner, name))

    @property
    def sequential(self) -> bool:
        """As the inner method."""
        return self.inner.sequential

    def cohorts(self, round: int, rounds: int) -> tuple[CohortKind, ...]:
        """As the inner method."""
        return self.inner.cohorts(round, rounds)

    @property
    def predict(self) -> Predict | None:
        """As the inner method."""
        return self.inner.predict

    def hparams(self) -> dict[str, float]:
        """As the inner method."""
        return self.inner.hparams()

    def init(self, model: Model, theta: Tensor, seed: int) -> InitialState:
        """As the inner method."""
        return self.inner.init(model, theta, seed)

    def download(self, ctx: RoundContext, server: Tensors, records: Tensors) -> tuple[Record, Tensors]:
        """As the inner method."""
        return self.inner.download(ctx, server, records)

    def client_update(self, ctx: RoundContext) -> Program:
        """As the inner method."""
        return self.inner.client_update(ctx)

    def aggregate(
        self, ctx: RoundContext, server: Tensors, records: Tensors, update: CohortUpdate
    ) -> tuple[Tensors, Tensors]:
        """As the inner method."""
        return self.inner.aggregate(ctx, server, records, update)

    def personalize(self, ctx: RoundContext) -> Program:
        """As the inner method."""
        return self.inner.personalize(ctx)


def inner_of(method: Method) -> Method:
    """Return the method inside all wrappers; one that is not wrapped is itself."""
    while isinstance(method, Wrapped):
        method = method.inner
    return method


def first_context(model: Model, seed: int) -> RoundContext:
    """Return the context of one client in round 1: for what follows from a method without any training."""
    client = torch.tensor([0])
    return RoundContext(model, 1, 2, 1, 1, client, seed, global_gradient=torch.zeros_like, groups=client)


def compose(*functions: Function) -> Function:
    """Return one function that calls several in turn."""

    def composed(model: Model, client: Client) -> Client:
        for function in functions:
            client = function(model, client)
        return client

    return composed


def first(function: Function, program: Program) -> Program:
    """Return a program that calls a function first.

    It is joined with the program's first function: the random key of a phase is its position in the program, so a
    wrapped method sees the same batches.
    """
    if not program or isinstance(program[0], Train | Sweep):
        return [function, *program]
    return [compose(function, program[0]), *program[1:]]


def last(program: Program, function: Function) -> Program:
    """Return a program that calls a function last, joined with the functions after its last phase."""
    phases = [at for at, item in enumerate(program) if isinstance(item, Train | Sweep)]
    end = phases[-1] + 1 if phases else 0
    after = [item for item in program[end:] if not isinstance(item, Train | Sweep)]
    return [*program[:end], compose(*after, function)]
