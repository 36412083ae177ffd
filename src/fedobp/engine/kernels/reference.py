"""What the kernels should compute: steps of SGD by autograd in float64, with operands rounded as in the kernels."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:  # types only: the reference needs no Triton
    from fedobp.data import FederatedData
    from fedobp.engine.kernels.step import KernelPrecision
    from fedobp.engine.sgd import Rule
    from fedobp.method import Part
    from fedobp.models import Layout, Model


def rounded(value: Tensor, precision: "KernelPrecision") -> Tensor:
    """Return the operand of a product: bf16 is rounded to the nearest; for tf32 the GPU drops the last 13 bits."""
    if precision == "bf16":
        return value.bfloat16().to(value.dtype)
    if precision == "tf32":
        return (value.float().view(torch.int32) & ~0x1FFF).view(torch.float32).to(value.dtype)
    return value


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, precision: "KernelPrecision", gradient: "KernelPrecision") -> Tensor:
        ctx.gradient = gradient
        return rounded(value, precision)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return rounded(gradient, ctx.gradient), None, None


def _round(value: Tensor, precision: "KernelPrecision", gradient: "KernelPrecision" = "fp32") -> Tensor:
    """Return a value as an operand of a product; its gradient is rounded likewise, to a precision of its own."""
    return cast(Tensor, _Rounded.apply(value, precision, gradient))  # type: ignore[no-untyped-call]


def rounded_features(weights: Iterable[Tensor], x: Tensor, precision: "KernelPrecision") -> Tensor:
    """Return the outputs of the convolutions [B, 64, P2, P2], with operands rounded forward and backward."""
    w1, b1, w2, b2 = weights
    h = functional.max_pool2d(functional.conv2d(_round(x, precision), _round(w1, precision), b1).relu(), 2)
    h = functional.conv2d(_round(h, precision, precision), _round(w2, precision), b2)
    return functional.max_pool2d(h.relu(), 2)


def rounded_logits(weights: Iterable[Tensor], x: Tensor, precision: "KernelPrecision") -> Tensor:
    """Return the CNN's logits, with operands rounded forward and backward; `weights` are its tensors in order."""
    *convolutions, wf, bf, wc, bc = weights
    h = rounded_features(convolutions, x, precision).flatten(1)
    h = functional.linear(_round(h, precision, precision), _round(wf, precision), bf).relu()
    logits = functional.linear(_round(h, precision, precision), _round(wc, precision), bc)
    return _round(logits, "fp32", precision)


def scaled_inputs(data: "FederatedData", ids: Tensor, precision: "KernelPrecision") -> Tensor:
    """Return scaled inputs in float64, computed in float32 if products round them: its last bit decides the rounding.

    The same operations as in the kernels: (x - shift) * scale.
    """
    dtype = torch.float64 if precision == "fp32" else torch.float32
    shift, scale = data.unit * data.mean.to(dtype), 1 / (data.unit * data.std.to(dtype))
    return ((data.x[ids].to(dtype) - shift) * scale).double()


@torch.enable_grad()
def expected_steps(
    model: "Model",
    precision: "KernelPrecision",
    theta: Tensor,
    rule: "Rule",
    part: "Part",
    ids: Tensor,
    counts: Tensor,
    data: Sequence["FederatedData"],
    steps: Sequence[int],
) -> tuple[Tensor, Tensor]:
    """Return the vectors and the sums of losses that `Fused.train` should compute from the same arguments.

    In float64, on their device, lane by lane and term by term; `theta` and the rule do not change. All batches have one
    shape, with weight 0 for samples that are not real.
    """
    head, real = model.layout.is_head(theta.device), torch.arange(ids.shape[2], device=ids.device) < counts[..., None]
    inside = {"all": head | True, "head": head, "base": ~head}[part]
    vectors, losses = [], []
    for lane, (mine, times) in enumerate(zip(data, steps, strict=True)):
        terms = {name: values[lane].double() for name, values in rule.used().items()}
        moves = inside & terms["moving"].bool() if "moving" in terms else inside
        weights, velocity, total = theta[lane].double(), torch.zeros_like(inside, dtype=torch.float64), []
        for step in range(times):
            batch, weight = ids[step, lane], real[step, lane].double()
            weights = weights.detach().requires_grad_()
            tensors = model.layout.views(weights).values()
            logits = rounded_logits(tensors, scaled_inputs(mine, batch, precision), precision)
            loss = functional.cross_entropy(logits, mine.y[batch], reduction="none") @ weight / weight.sum()
            [gradient] = torch.autograd.grad(loss, weights)
            if "pull" in terms:
                gradient = gradient + terms["pull"] * (weights - terms["anchor"])
            if "drift" in terms:
                gradient = gradient + terms["drift"]
            if "decay" in terms:
                gradient = gradient + terms["decay"] * weights
            velocity = gradient + terms["momentum"] * velocity if "momentum" in terms else gradient
            weights = torch.where(moves, weights - terms["lr"] * velocity, weights)
            total.append(loss.detach())
        vectors.append(weights.detach())
        losses.append(torch.stack(total).sum())
    return torch.stack(vectors), torch.stack(losses)


def change_errors(layout: "Layout", start: Tensor, found: Tensor, right: Tensor) -> Tensor:
    """Return the error of each tensor's change in each lane [tensors, lanes]; vectors are [lanes, N].

    It is ||found - right|| / max(||right - start||, r sqrt(n)), where r is the root mean square of the change of all
    entries of the layer (the tensors that share a name up to its last dot) and n the size of the tensor: the gradient
    of a bias is a sum whose terms may cancel. Where nothing should change, the error is absolute.
    """
    change, wrong = right.double() - start, right.double() - found
    layers: dict[str, list[slice]] = {}
    for name, where in layout.slices.items():
        layers.setdefault(name.rpartition(".")[0] or name, []).append(where)
    errors = []
    for name, where in layout.slices.items():
        layer = torch.cat([change[:, part] for part in layers[name.rpartition(".")[0] or name]], dim=1)
        usual = layer.square().mean(dim=1).sqrt() * change[:, where].shape[1] ** 0.5
        size = torch.maximum(change[:, where].norm(dim=1), usual)
        error = wrong[:, where].norm(dim=1)
        errors.append(torch.where(size > 0, error / size.clamp(min=1e-30), error))
    return torch.stack(errors)
