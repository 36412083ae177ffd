"""A Flower project for a federation: its settings, the two apps, and what starts them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedobp.federation import Federation, assign


def node_arrays(federation: Federation) -> Iterator[dict[str, NDArray[Any]]]:
    """Yield each client's samples of a simulated federation as the arrays of its npz file, in the order of its parts."""
    dataset, shards = assign(federation.config, federation.source)
    for shard in shards:
        ids = np.concatenate([shard.test, shard.val, shard.train])
        test = np.arange(len(ids)) < len(shard.test)
        names = np.array(dataset.labels)
        yield {"x": dataset.x[ids], "y": names[dataset.y[ids]], "test": test, "client": np.zeros(len(ids), np.int64)}
