"""Fused Triton kernels for the paper's CNN, which the lanes engine uses on NVIDIA cards from compute capability 8.0.

`dispatch` decides whether they are used, `fused` runs whole training phases and evaluations, `step` holds the buffers
and launches of one step, `forward` and `backward` are the kernels, `sgd` is the update of a parameter, `param_layout`
the order of parameters in memory, `shapes` the sizes of the network, `convolutions` an autograd function for custom
losses. `cards`, `tiles`, `shared_memory` and `tuning` choose tile shapes, `compilation`, `checks`, `hazards` and
`self_check` decide whether compiled kernels can be trusted. Triton is imported only when it is used.
"""

from fedobp.engine.kernels.cache import ensure_triton_cache
from fedobp.engine.kernels.dispatch import fused_for, is_supported

__all__ = ["fused_for", "is_supported"]

ensure_triton_cache()
