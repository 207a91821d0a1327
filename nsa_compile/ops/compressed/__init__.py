"""`nsa_compile::compressed_attention`: attention over compressed blocks (arXiv 2502.11089, eq. 8) and the selection of
blocks that follows from its weights (eq. 9-12)."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.flop_counter
from torch import Tensor

from nsa_compile.ops import checks, flops
from nsa_compile.ops.batching import register_batched
from nsa_compile.ops.compressed.selection import Ranking
from nsa_compile.ops.dispatch import implementation
from nsa_compile.ops.keeping import select_once
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["compressed_attention", "compressed_attention_backward"]

_PARAMETERS = (
    "int block_size, int stride, float scale, int select_block, int[] offsets, int[] weights, int num_selected,"
    " int num_initial, int num_local"
)


def _check(q: Tensor, k: Tensor, v: Tensor, block_size: int, stride: int, scale: float, *ranking: Any) -> None:
    checks.check_attention(q, k, v)
    checks.check_compression(block_size, stride)
    checks.check_ranking(stride, Ranking(*ranking))


@torch.library.custom_op(
    "nsa_compile::compressed_attention",
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_PARAMETERS}) -> (Tensor out, Tensor lse, Tensor indices)",
)
def compressed_attention(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, *parameters)
    forward = implementation("compressed", q).forward
    *shared, num_selected, num_initial, num_local = parameters
    if num_selected == 0:
        return forward(q, k, v, *parameters)
    return select_once(
        attend=lambda: forward(q, k, v, *shared, 0, num_initial, num_local)[:2],
        select=lambda: forward(q, k, v, *parameters),
    )


@compressed_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, *parameters: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, *parameters)
    num_selected = parameters[6]
    return (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(q.shape[:3], dtype=compute_dtype(q)),
        q.new_empty(*q.shape[:2], k.shape[2], num_selected, dtype=torch.int32),
    )


@torch.library.custom_op(
    "nsa_compile::compressed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_PARAMETERS})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)
def compressed_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, *parameters)
    return implementation("compressed", q).backward(grad_out, q, k, v, out, lse, *parameters)


@compressed_attention_backward.register_fake
def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *parameters: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, *parameters)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, *ctx.parameters = inputs
    out, lse, indices = output
    ctx.mark_non_differentiable(lse, indices)
    ctx.save_for_backward(q, k, v, out, lse)


def _backward(ctx: Any, grad_out: Tensor, *grads: Tensor | None) -> tuple:
    gradients = compressed_attention_backward(grad_out, *ctx.saved_tensors, *ctx.parameters)
    return (*gradients, *(None for _ in ctx.parameters))


compressed_attention.register_autograd(_backward, setup_context=_setup_context)
register_batched(compressed_attention, 3)
register_batched(compressed_attention_backward, 6)


@torch.utils.flop_counter.register_flop_formula(torch.ops.nsa_compile.compressed_attention)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, block_size: int, stride: int, *args: Any, out_shape: Any) -> int:
    pairs = flops.compressed_pairs(q_shape[1], k_shape[1], block_size, stride)
    return flops.attention_flops(q_shape, v_shape, pairs)


@torch.utils.flop_counter.register_flop_formula(torch.ops.nsa_compile.compressed_attention_backward)
def _backward_flops(
    grad: Any, q_shape: Any, k_shape: Any, v_shape: Any, out: Any, lse: Any, block_size: int, stride: int, *args: Any,
    out_shape: Any,
) -> int:  # fmt: skip
    pairs = flops.compressed_pairs(q_shape[1], k_shape[1], block_size, stride)
    return flops.attention_backward_flops(q_shape, v_shape, pairs)
