"""Which samples a client sees when: keyed, so that every engine and every node draws the same batches."""

import torch
from torch import Tensor

from fedobp.keys import permutation


def batches(key: Tensor, n: int, size: int, device: torch.device | None = None) -> list[Tensor]:
    """Return one epoch's batches as positions in a client's shard: shuffled, the last one partial.

    A batch of a single sample is left out, as the reference implementation does.
    """
    return [batch for batch in permutation(key, n).to(device).split(size) if len(batch) > 1]
