"""`nsa_compile::window_attention`: query s attends to the keys `s - window < p <= s` (arXiv 2502.11089, 3.3.3)."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.flop_counter
from torch import Tensor

from nsa_compile.ops import checks, flops
from nsa_compile.ops.batching import register_batched
from nsa_compile.ops.dispatch import implementation
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["window_attention", "window_attention_backward"]


def _check(q: Tensor, k: Tensor, v: Tensor, window: int) -> None:
    checks.check_attention(q, k, v)
    checks.check_minimum("window", window, 1)


@torch.library.custom_op(
    "nsa_compile::window_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, int window, float scale) -> (Tensor out, Tensor lse)",
)
def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v, window)
    return implementation("window", q).forward(q, k, v, window, scale)


@window_attention.register_fake
def _fake(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> tuple[Tensor, Tensor]:
    _check(q, k, v, window)
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


@torch.library.custom_op(
    "nsa_compile::window_attention_backward",
    mutates_args=(),
    schema="(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int window, float scale)"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
)
def window_attention_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, window)
    return implementation("window", q).backward(grad_out, q, k, v, out, lse, window, scale)


@window_attention_backward.register_fake
def _fake_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, window)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, ctx.window, ctx.scale = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple:
    gradients = window_attention_backward(grad_out, *ctx.saved_tensors, ctx.window, ctx.scale)
    return (*gradients, None, None)


window_attention.register_autograd(_backward, setup_context=_setup_context)
register_batched(window_attention, 3)
register_batched(window_attention_backward, 6)


@torch.utils.flop_counter.register_flop_formula(torch.ops.nsa_compile.window_attention)
def _flops(q_shape: Any, k_shape: Any, v_shape: Any, window: int, *args: Any, out_shape: Any = None) -> int:
    return flops.attention_flops(q_shape, v_shape, flops.window_pairs(q_shape[1], k_shape[1], window))


@torch.utils.flop_counter.register_flop_formula(torch.ops.nsa_compile.window_attention_backward)
def _backward_flops(
    grad_shape: Any, q_shape: Any, k_shape: Any, v_shape: Any, out: Any, lse: Any, window: int, *args: Any,
    out_shape: Any = None,
) -> int:  # fmt: skip
    return flops.attention_backward_flops(q_shape, v_shape, flops.window_pairs(q_shape[1], k_shape[1], window))
