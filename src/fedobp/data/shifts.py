"""Partitioners whose clients differ in more than their labels' frequencies: feature shift and concept shift.

Each assigns samples as `iid` or as `dirichlet` does, by the dataset's own labels, and then changes clients' samples.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.random import Generator, default_rng

from fedobp.data.client_changes import ClientChange
from fedobp.data.partitioners import Dirichlet, Iid, Indices, Partitioner, PartitionTask
from fedobp.errors import FedobpError
from fedobp.options import option


@dataclass(frozen=True)
class Feature(Partitioner):
    """Change each client's inputs: p(x | y) differs between clients.

    With rotation, the numbers of clients with 0, 90, 180 and 270 degrees differ by at most one. The strengths of other
    changes are spaced evenly from 0 to the largest, over the clients or over groups of them. The order over the clients
    is random.
    """

    name: ClassVar[str] = "feature"
    by_label: ClassVar[bool] = True  # by `labels`; and where every next token is a label, inputs are tokens

    change: str = option(
        "rotation",
        "rotation by 90-degree steps, noise, blur, contrast or colour",
        choices=("rotation", "noise", "blur", "contrast", "colour"),
    )
    noise: float = option(
        0.1,
        "the largest deviation, relative to the largest byte or to a float feature's deviation",
        low=0.0,
        high=10.0,
    )
    strength: float = option(0.8, "the largest strength of blur, contrast or colour", low=0.0, high=1.0)
    groups: int = option(
        0, "groups of clients with the same change; 0: four rotations, else each client its own", low=0
    )
    labels: str = option("iid", "how samples are assigned", choices=("iid", "dirichlet"))

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Assign as `iid` or `dirichlet`."""
        return _assign(self.labels, task)

    def client_changes(self, task: PartitionTask) -> list[ClientChange]:
        """Draw each client's change."""
        if self.groups == 1 or (self.change == "rotation" and self.groups > 4):
            most = "at most 4, because there are four rotations" if self.groups > 1 else "at least 2"
            raise FedobpError(f"--partition-set groups={self.groups} of feature must be {most}; or leave it out")
        random = default_rng(task.seed)
        if self.change == "rotation":
            return [ClientChange(turns=rank) for rank in _groups(random, task.clients, self.groups or 4)]
        ranks = _groups(random, task.clients, self.groups or task.clients)
        # Clients of a group have noise of the same deviation, but not the same noise.
        seeds = random.integers(2**32, size=task.clients).tolist() if self.change == "noise" else [0] * task.clients
        largest = self.noise if self.change == "noise" else self.strength
        steps = max(1, (self.groups or task.clients) - 1)
        strengths: list[dict[str, Any]] = [{self.change: largest * rank / steps} for rank in ranks]
        return [
            ClientChange(**strength, seed=seed, group=rank if self.groups else None)
            for strength, seed, rank in zip(strengths, seeds, ranks, strict=True)
        ]


@dataclass(frozen=True)
class Concept(Partitioner):
    """Change what labels mean in groups of clients: p(y | x) differs between groups.

    The sizes of groups differ by at most one, and group 0 keeps its labels. With `permute`, no two groups give a label
    the same new label. With `merge`, labels are paired at random in each other group, and both of a pair become one of
    them; of an odd number, one stays alone.
    """

    name: ClassVar[str] = "concept"
    by_label: ClassVar[bool] = True

    groups: int = option(4, "groups of clients whose labels have the same meaning", low=2)
    change: str = option("permute", "labels are permuted, or merged in pairs", choices=("permute", "merge"))
    labels: str = option("iid", "how samples are assigned", choices=("iid", "dirichlet"))

    def assign(self, task: PartitionTask) -> list[Indices]:
        """Assign as `iid` or `dirichlet`, by the labels before the change."""
        return _assign(self.labels, task)

    def client_changes(self, task: PartitionTask) -> list[ClientChange]:
        """Draw the groups and the labels of each."""
        present = np.unique(task.y)
        random = default_rng(task.seed)
        groups = _groups(random, task.clients, self.groups)
        if self.change == "permute" and self.groups > len(present):
            raise FedobpError(
                f"{self.groups} groups cannot each give {len(present)} labels other meanings: use --partition-set "
                f"groups={len(present)}, or change=merge"
            )
        if self.change == "merge" and len(present) < 3:
            raise FedobpError(f"{len(present)} labels merged in pairs are one: use --partition-set change=permute")
        order = random.permutation(present)
        maps = [tuple[int, ...]()]
        for group in range(1, self.groups):
            new = np.arange(int(task.y.max()) + 1)
            if self.change == "permute":
                new[order] = np.roll(order, group)
            else:
                order = random.permutation(present)
                pairs = len(order) // 2 * 2
                new[order[1:pairs:2]] = order[0:pairs:2]
            maps.append(tuple(new.tolist()))
        return [ClientChange(labels=maps[group], group=group) for group in groups]


def _assign(labels: str, task: PartitionTask) -> list[Indices]:
    return (Dirichlet() if labels == "dirichlet" else Iid()).assign(task)


def _groups(random: Generator, clients: int, groups: int) -> list[int]:
    """Draw each client's group; the sizes of groups differ by at most one."""
    if groups > max(4, clients):  # four rotations of fewer clients are some of them
        raise FedobpError(f"--partition-set groups={groups} is more than the {clients} clients: use fewer groups")
    return [rank % groups for rank in random.permutation(clients).tolist()]
