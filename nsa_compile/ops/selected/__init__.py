"""`nsa_compile::selected_attention`: each query of a group attends to the blocks of keys chosen for it
(arXiv 2502.11089, section 3.3.2)."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.flop_counter
from torch import Tensor

from nsa_compile.ops import checks, flops
from nsa_compile.ops.batching import register_batched
from nsa_compile.ops.dispatch import implementation
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["selected_attention", "selected_attention_backward"]


def _check(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int) -> None:
    checks.check_attention(q, k, v)
    checks.check_indices(q, k, indices)
    checks.check_minimum("block_size", block_size, 1)


@torch.library.custom_op(
    "nsa_compile::selected_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor indices, int block_size, float scale) -> (Tensor out, Tensor lse)",
)
def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    _check(q, k, v, indices, block_size)
    return implementation("selected", q).forward(q, k, v, indices, block_size, scale)


@selected_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v, indices, block_size)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


@torch.library.custom_op(
    "nsa_compile::selected_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor indices, int block_size,"
    " float scale) -> (Tensor dq, Tensor dk, Tensor dv)",
)
def selected_attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, indices, block_size)
    return implementation("selected", q).backward(grad_out, q, k, v, out, lse, indices, block_size, scale)


@selected_attention_backward.register_fake
def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    indices: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, indices, block_size)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, indices, ctx.block_size, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, indices)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple:
    gradients = selected_attention_backward(grad_out, *ctx.saved_tensors, ctx.block_size, ctx.scale)
    return (*gradients, None, None, None)


selected_attention.register_autograd(_backward, setup_context=_setup_context)
register_batched(selected_attention, 4)
register_batched(selected_attention_backward, 7)


@torch.utils.flop_counter.register_flop_formula(torch.ops.nsa_compile.selected_attention)
def _flops(
    q_shape: Any, k_shape: Any, v_shape: Any, indices_shape: Any, block_size: int, *args: Any, out_shape: Any
) -> int:
    pairs = flops.selected_pairs(q_shape[1], k_shape[1], indices_shape[3], block_size)
    return flops.attention_flops(q_shape, v_shape, pairs)


@torch.utils.flop_counter.register_flop_formula(torch.ops.nsa_compile.selected_attention_backward)
def _backward_flops(
    grad: Any, q_shape: Any, k_shape: Any, v_shape: Any, out: Any, lse: Any, indices_shape: Any, block_size: int,
    *args: Any, out_shape: Any,
) -> int:  # fmt: skip
    pairs = flops.selected_pairs(q_shape[1], k_shape[1], indices_shape[3], block_size)
    return flops.attention_backward_flops(q_shape, v_shape, pairs)
