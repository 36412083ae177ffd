"""Which clients take part in a round."""

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
        self._drawn: list[Tensor] = []  # of the stream, which can only be drawn in order

    def cohort(self, round: int) -> Tensor:
        """Return a round's clients, in the order in which they are sampled; rounds count from 1."""
        config = self._config
        if config.sampling == "keyed":
            key = fold(config.seed, round, NO_CLIENT, Purpose.COHORT)
            return permutation(key, config.trainers)[: config.cohort_size]
        while len(self._drawn) < round:
            drawn = self._stream.sample(list(range(config.trainers)), config.cohort_size)
            self._drawn.append(torch.tensor(drawn))
        return self._drawn[round - 1]


def cohorts(config: Config) -> Iterator[Tensor]:
    """Yield the cohort of each round of a run."""
    sampler = Sampler(config)
    return (sampler.cohort(round) for round in range(1, config.rounds + 1))
