"""Which clients take part in a round, and which are evaluated."""

import random
from collections.abc import Iterator

import torch
from torch import Tensor

from fedobp.config import Config
from fedobp.keys import NO_CLIENT, Purpose, fold, permutation


class Sampler:
    """The cohorts of a run: a pure function of the round, keyed by the seed, or the authors' own stream."""

    def __init__(self, config: Config) -> None:
        self._config, self._stream = config, random.Random(config.seed)
        self._drawn, self._last = 0, torch.empty(0)  # of the stream: how many cohorts, and the last one

    def cohort(self, round: int) -> Tensor:
        """Return a round's clients, in the order in which they are sampled; rounds count from 1."""
        config = self._config
        if config.sampling == "keyed":
            key = fold(config.seed, round, NO_CLIENT, Purpose.COHORT)
            return permutation(key, config.trainers)[: config.cohort_size]
        if round < self._drawn:  # a stream can only be drawn in order
            self._stream, self._drawn = random.Random(config.seed), 0
        for _ in range(round - self._drawn):
            self._last = torch.tensor(self._stream.sample(range(config.trainers), config.cohort_size))
        self._drawn = round
        return self._last


def evaluated_clients(config: Config) -> Tensor | None:
    """Return the sample of clients that are evaluated, by id, the same in all rounds; None: all that train."""
    if config.eval_clients is None:
        return None
    key = fold(config.seed, NO_CLIENT, Purpose.EVALUATE)
    return permutation(key, config.trainers)[: config.eval_clients].sort().values


def cohorts(config: Config) -> Iterator[Tensor]:
    """Yield the cohort of each round of a run."""
    sampler = Sampler(config)
    return (sampler.cohort(round) for round in range(1, config.rounds + 1))
