"""Which samples a client sees when: keyed, so that every engine and every node draws the same batches."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedobp.keys import fold, permutation
from fedobp.transfer import send

_MAX_INT64 = 2**63 - 1
SUBSET = _DRAWS = -1  # in the place of an epoch: the key is for a draw


def batches(key: Tensor, n: int, size: int, device: torch.device | None = None, smallest: int = 2) -> list[Tensor]:
    """Return one epoch's batches as positions in a client's shard: shuffled, the last one partial.

    In training, a batch of a single sample is left out, as the reference implementation does.
    """
    return [batch for batch in permutation(key, n).to(device).split(size) if len(batch) >= smallest]


def batches_of(n: int, size: int, smallest: int = 2) -> int:
    """Return how many batches `batches` makes of n samples."""
    if size < smallest:
        return 0
    return n // size + (n % size >= smallest)


def step_key(key: Tensor, epoch: Tensor | int, batch: Tensor | int) -> Tensor:
    """Return the key of what is drawn at a step, given its phase's."""
    return fold(key, epoch, _DRAWS, batch)


def subset(key: Tensor, n: int, fraction: float) -> Tensor:
    """Return the positions of a share of a client's samples, at least one."""
    return permutation(fold(key, _DRAWS), n)[: share_of(n, fraction)]


def share_of(n: int, fraction: float) -> int:
    """Return how many samples a share of n is."""
    return min(n, max(1, int(fraction * n)))


class Orders(NamedTuple):
    """All steps of several clients: `positions` [clients, steps, size] in their shards, of which `counts` are real."""

    positions: Tensor
    counts: Tensor


def orders(
    keys: Tensor, n: Sequence[int], epochs: Sequence[int], size: int, smallest: int = 2, first: int = 0
) -> Orders:
    """Return the batches of several clients at once: for each, those of `batches` epoch by epoch, from the `first` on.

    `keys` has an epoch's key still to be folded in. A client with fewer steps has batches without samples at its end.
    """
    device, most_samples = keys.device, max(n)
    per_epoch = [batches_of(one, size, smallest) for one in n]
    most_batches, most_epochs = max(per_epoch), max(epochs)
    steps = max(batches * times for batches, times in zip(per_epoch, epochs, strict=True))
    if not steps:
        return Orders(torch.zeros(len(n), 0, size, dtype=torch.int64, device=device),
                      torch.zeros(len(n), 0, dtype=torch.int64, device=device))  # fmt: skip
    samples, batches_per_epoch, epoch_counts = (send(values, device)[:, None] for values in (n, per_epoch, epochs))
    hashes = fold(keys[:, None], torch.arange(first, first + most_epochs, device=device))
    hashes = fold(hashes[..., None], torch.arange(most_samples, device=device))
    # Those beyond a client's last sample come last: the sort is stable, so a sample whose hash is the largest number
    # of all still comes before them.
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
