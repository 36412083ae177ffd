"""The order of a client's batches: keyed, so that every engine and every node draws the same batches."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedobp.keys import fold, permutation
from fedobp.transfer import to_device

_MAX_INT64 = 2**63 - 1
SUBSET = _DRAWS = -1  # folded in instead of an epoch: the key of a draw other than a batch order


def batches(key: Tensor, n: int, size: int, device: torch.device | None = None, smallest: int = 2) -> list[Tensor]:
    """Return one epoch's batches as positions in a client's shard: shuffled, the last one partial.

    In training, a batch of a single sample is dropped, as in the reference implementation.
    """
    return [batch for batch in permutation(key, n).to(device).split(size) if len(batch) >= smallest]


def batches_of(n: int, size: int, smallest: int = 2) -> int:
    """Return the number of batches that `batches` makes of n samples."""
    if size < smallest:
        return 0
    return n // size + (n % size >= smallest)


def step_key(key: Tensor, epoch: Tensor | int, batch: Tensor | int) -> Tensor:
    """Return the key of the random draws of a step, from the key of its phase."""
    return fold(key, epoch, _DRAWS, batch)


def subset(key: Tensor, n: int, fraction: float) -> Tensor:
    """Return the positions of a random fraction of a client's samples, at least one."""
    return permutation(fold(key, _DRAWS), n)[: share_of(n, fraction)]


def share_of(n: int, fraction: float) -> int:
    """Return how many of n samples a fraction is."""
    return min(n, max(1, int(fraction * n)))


class Orders(NamedTuple):
    """All steps of several clients: `positions` [clients, steps, size] in their shards, of which `counts` are real."""

    positions: Tensor
    counts: Tensor


def orders(
    keys: Tensor, n: Sequence[int], epochs: Sequence[int], size: int, smallest: int = 2, first: int = 0
) -> Orders:
    """Return the batches of several clients at once: for each, those of `batches` epoch by epoch, from epoch `first`.

    `keys` are the clients' keys, without the epoch. A client with fewer steps has empty batches at its end.
    """
    device, most_samples = keys.device, max(n)
    per_epoch = [batches_of(one, size, smallest) for one in n]
    most_batches, most_epochs = max(per_epoch), max(epochs)
    steps = max(batches * times for batches, times in zip(per_epoch, epochs, strict=True))
    if not steps:
        return Orders(torch.zeros(len(n), 0, size, dtype=torch.int64, device=device),
                      torch.zeros(len(n), 0, dtype=torch.int64, device=device))  # fmt: skip
    samples, batches_per_epoch, epoch_counts = (to_device(values, device)[:, None] for values in (n, per_epoch, epochs))
    hashes = fold(keys[:, None], torch.arange(first, first + most_epochs, device=device))
    hashes = fold(hashes[..., None], torch.arange(most_samples, device=device))
    # Padding is sorted last: the sort is stable, so a sample whose hash is the largest int64 still comes before it.
    hashes.masked_fill_(torch.arange(most_samples, device=device) >= samples[..., None], _MAX_INT64)
    shuffled = hashes.argsort(dim=-1, stable=True)
    if most_samples < most_batches * size:
        shuffled = torch.nn.functional.pad(shuffled, (0, most_batches * size - most_samples))
    table = shuffled[..., : most_batches * size].reshape(len(n), most_epochs * most_batches, size)
    step = torch.arange(steps, device=device)
    epoch, batch = step // batches_per_epoch.clamp(min=1), step % batches_per_epoch.clamp(min=1)
    real = (epoch < epoch_counts) & (batches_per_epoch > 0)
    chosen = torch.where(real, epoch * most_batches + batch, 0)
    positions = table.gather(1, chosen[..., None].expand(-1, -1, size))
    counts = torch.where(real, (samples - batch * size).clamp(max=size), 0)
    return Orders(positions, counts)
