"""Label shift: how often each label occurs where there are inputs and no labels.

A classifier that was trained where labels have the prior p_g says p_g(y | x). Where labels have another prior p, and
each label's inputs are the same, Bayes' rule gives p(y | x) ~ p_g(y | x) p(y) / p_g(y): log p - log p_g is added to the
logits. Saerens, Latinne & Decaestecker (2002, Neural Computation 14) find p by EM on the inputs alone.
"""

import torch
from torch import Tensor


def em_prior(
    logits: Tensor, prior: Tensor, weight: Tensor | None = None, *, pseudo_count: float = 0.5, iterations: int = 100
) -> Tensor:
    """Return the label prior [..., classes] of inputs with `logits` [..., inputs, classes].

    `prior` [..., classes] is p_g, positive: the start. `weight` [..., inputs] is 1 for an input and 0 for padding. Each
    iteration replaces p by the mean over inputs of softmax(logits + log p - log p_g), in which p_g counts as inputs,
    too: `pseudo_count` for each class. So no share becomes 0, and without inputs p is p_g. The number of iterations is
    fixed: what one client gets does not depend on those beside it.
    """
    weight = torch.ones_like(logits[..., 0]) if weight is None else weight
    pseudo = pseudo_count * logits.shape[-1] * prior
    total = weight.sum(dim=-1, keepdim=True) + pseudo.sum(dim=-1, keepdim=True)
    found = prior
    for _ in range(iterations):
        posterior = (logits + (found / prior).log()[..., None, :]).softmax(dim=-1)
        found = ((posterior * weight[..., None]).sum(dim=-2) + pseudo) / total
    return found
