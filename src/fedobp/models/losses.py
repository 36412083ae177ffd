"""The cross-entropy of samples that have one label, or one label for each position of a sequence."""

from torch import Tensor
from torch.nn import functional


def sample_losses(logits: Tensor, y: Tensor, axes: int = 1) -> Tensor:
    """Return the cross-entropy of each sample; that of a sequence is the mean over its positions.

    `y` has `axes` axes of samples, and one more if a sample has a label for each position; `logits` have the classes as
    a further axis. Sequences have one length, so a mean over samples is a mean over all positions.
    """
    each = functional.cross_entropy(logits.flatten(0, y.ndim - 1), y.flatten(), reduction="none").view(y.shape)
    return each if y.ndim == axes else each.mean(dim=-1)
