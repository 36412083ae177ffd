"""What an evaluation is given: the server's side of a run, at one round."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from torch import Tensor

from fedobp.engine import Store
from fedobp.method import RoundContext
from fedobp.records import Tensors


class ServerView(NamedTuple):
    """The server's state and records, and how jobs are made; an evaluation changes none of it."""

    context: Callable[[Tensor], RoundContext]  # of some clients, to serve them
    server: Tensors
    records: Store
    hparams: Mapping[str, float]
