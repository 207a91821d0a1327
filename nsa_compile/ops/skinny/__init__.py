"""`nsa_compile::skinny_linear`: `torch.nn.functional.linear` of few rows, as a step of generation has them.

The weight is read once, by all threads. A row of the result is the same, bit for bit, whichever rows are beside it and
however many threads there are; that of a library's matrix product is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nsa_compile.ops import cpp
from nsa_compile.ops.dispatch import KERNELS

__all__ = ["MOST_ROWS", "skinny_linear", "takes"]

# A library's product of more rows is as fast.
MOST_ROWS = 32
DTYPES = (torch.float32, torch.float64)  # oneDNN multiplies the others

# Not `custom_op`: what surrounds an operator of that takes as long as the kernel does for a small weight.
_library = torch.library.Library("nsa_compile", "FRAGMENT")
_library.define("skinny_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether the operator is for the rows of `x [..., K]` and `weight [N, K]`: few of them, in float32 or float64, on
    the CPU, with a compiler, and a weight whose rows lie in one piece each."""
    return (
        x.device.type == weight.device.type == "cpu"
        and x.layout == weight.layout == torch.strided
        and x.dtype == weight.dtype
        and x.dtype in DTYPES
        and x.dim() > 0
        and weight.dim() == 2
        and min(*x.shape, *weight.shape) > 0
        and x.shape[:-1].numel() <= MOST_ROWS
        and weight.stride(1) == 1
        and cpp.works("skinny", "products of few rows are a library's")
    )


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x weightᵀ + bias`, without a gradient, on the CPU.

    Args:
        x: `[M, K]`.
        weight: `[N, K]`, the elements of a row side by side.
        bias: `[N]`, or None.

    Returns:
        `[M, N]`.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check(x, weight, bias)
    return torch.ops.nsa_compile.skinny_linear(x, weight, bias)


def _compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return KERNELS["skinny"]["cpu"].code.forward(x, weight, bias)


_library.impl("skinny_linear", _compute, "CompositeExplicitAutograd")


@torch.library.register_fake("nsa_compile::skinny_linear", lib=_library)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    _check(x, weight, bias)
    return x.new_empty(x.shape[0], weight.shape[0])


@register_flop_formula(torch.ops.nsa_compile.skinny_linear)
def _flops(x: Any, weight: Any, bias: Any, out_shape: Any = None) -> int:
    return 2 * x[0] * weight[0] * weight[1]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x is {list(x.shape)}, weight {list(weight.shape)}; they must be [M, K] and [N, K]")
    if weight.stride(1) != 1:
        raise ValueError(f"weight has strides {weight.stride()}; its last one must be 1")
    if bias is not None and list(bias.shape) != [weight.shape[0]]:
        raise ValueError(f"bias is {list(bias.shape)}; it must be {[weight.shape[0]]}")
    dtypes = {y.dtype for y in (x, weight, bias) if y is not None}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES):
        raise ValueError(
            f"the dtypes are {', '.join(sorted(map(str, dtypes)))}; they must be all float32 or all float64"
        )


cpp.register_step_kernel("skinny")
