"""`nsa_compile::decayed_scores`, of the steps of a chunk for one another, whose keys decay on the way; and
`nsa_compile::decay_products`, what decays leave of a value over a chunk."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nsa_compile.ops import cpp
from nsa_compile.ops.declaration import refuse_second_derivatives
from nsa_compile.ops.dispatch import KERNELS

__all__ = ["decay_products", "decayed_scores", "takes"]


def takes(x: Tensor) -> bool:
    """Whether the operators are for factors `[..., D]`: on the CPU, in float32 and float64, with a compiler.

    Those of a single column are one operand of a product that Inductor makes anyway.
    """
    return (
        x.shape[-1] > 1
        and x.device.type == "cpu"
        and x.dtype in (torch.float32, torch.float64)
        and cpp.works("decayed", "decays are computed by plain torch")
    )


def decayed_scores(a: Tensor, q: Tensor, k: Tensor, *, strict: bool) -> Tensor:
    """`Σ_c q[i, c] k[j, c] ∏ a[m, c]` over the steps m after j, up to i, for `j <= i`, else 0.

    Args:
        a, q, k: `[N, C, K]`.
        strict: for `j < i` alone, and without step i's own factor.

    Returns:
        `[N, C, C]`. A product of long runs vanishes where the loop's does; a factor may be zero or of any sign.
    """
    return torch.ops.nsa_compile.decayed_scores(a, q, k, strict)


def decay_products(a: Tensor) -> tuple[Tensor, Tensor]:
    """The products of factors `a [N, C, D]` up to each step, its own included, and after it."""
    return torch.ops.nsa_compile.decay_products(a)


def _code() -> Any:
    return KERNELS["decayed"]["cpu"].code


@torch.library.custom_op("nsa_compile::decayed_scores", mutates_args=())
def _decayed_scores(a: Tensor, q: Tensor, k: Tensor, strict: bool) -> Tensor:
    return _code().forward(a, q, k, strict)


@_decayed_scores.register_fake
def _(a: Tensor, q: Tensor, k: Tensor, strict: bool) -> Tensor:
    return a.new_empty(*a.shape[:2], a.shape[1])


@torch.library.custom_op("nsa_compile::decayed_scores_backward", mutates_args=())
def _decayed_scores_backward(
    gradient: Tensor, a: Tensor, q: Tensor, k: Tensor, strict: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _code().backward(gradient, a, q, k, strict)


@_decayed_scores_backward.register_fake
def _(gradient: Tensor, a: Tensor, q: Tensor, k: Tensor, strict: bool) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), q.new_empty(q.shape), k.new_empty(k.shape)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    *operands, ctx.strict = inputs
    ctx.save_for_backward(*operands)


@torch._disable_dynamo  # saved tensors of a checkpoint are read once
def _differentiate(ctx: Any, gradient: Tensor) -> tuple:
    return *torch.ops.nsa_compile.decayed_scores_backward(gradient, *ctx.saved_tensors, ctx.strict), None


_decayed_scores.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("nsa_compile::decay_products", mutates_args=())
def _decay_products(a: Tensor) -> tuple[Tensor, Tensor]:
    return _code().products(a)


@_decay_products.register_fake
def _(a: Tensor) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape), a.new_empty(a.shape)


@torch.library.custom_op("nsa_compile::decay_products_backward", mutates_args=())
def _decay_products_backward(of_up_to: Tensor, of_after: Tensor, a: Tensor, up_to: Tensor, after: Tensor) -> Tensor:
    return _code().products_backward(of_up_to, of_after, a, up_to, after)


@_decay_products_backward.register_fake
def _(of_up_to: Tensor, of_after: Tensor, a: Tensor, up_to: Tensor, after: Tensor) -> Tensor:
    return a.new_empty(a.shape)


def _save_products(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


@torch._disable_dynamo
def _differentiate_products(ctx: Any, of_up_to: Tensor, of_after: Tensor) -> Tensor:
    return torch.ops.nsa_compile.decay_products_backward(of_up_to, of_after, *ctx.saved_tensors)


_decay_products.register_autograd(_differentiate_products, setup_context=_save_products)


refuse_second_derivatives(_decayed_scores_backward, "a recurrence in parallel")
refuse_second_derivatives(_decay_products_backward, "a recurrence in parallel")


@register_flop_formula(torch.ops.nsa_compile.decayed_scores)
def _flops(a: Any, q: Any, k: Any, strict: bool, *, out_shape: Any = None) -> int:
    chunks, steps, columns = a
    return 2 * chunks * steps * steps * columns


@register_flop_formula(torch.ops.nsa_compile.decayed_scores_backward)
def _backward_flops(gradient: Any, a: Any, q: Any, k: Any, strict: bool, *, out_shape: Any = None) -> int:
    return 2 * _flops(a, q, k, strict)


cpp.register_step_kernel("decayed")
