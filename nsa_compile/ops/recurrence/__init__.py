"""Recurrences over the steps of a sequence, in parallel forms: `nsa_compile::recurrence`,
`nsa_compile::matrix_recurrence`, and `nsa_compile::unit_lower_inverse`, the recurrence of a step on all before it.

They keep the value of each step and are differentiable once. A recurrence whose states are matrices that nobody needs
at each step is computed in chunks of steps (`chunks.py`), which hand their states on by these operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_compile.ops.declaration import refuse_second_derivatives
from nsa_compile.ops.recurrence import portable

__all__ = ["KINDS", "matrix_recurrence", "recurrence", "turning_recurrence", "unit_lower_inverse"]

_TURNING = "turn"
KINDS = ("sum", "logsumexp", *portable.OF_EQUALS)


def recurrence(a: Tensor | None, b: Tensor, first: Tensor, kind: str = "sum") -> Tensor:
    """`h[t] = a[t] * h[t - 1] + b[t]`, element by element; of other kinds, `h[t] = max(h[t - 1] + a[t], b[t])`, a
    minimum, or the logarithm of the sum of the exponentials of both.

    Args:
        a: `[S, ...]` or `[1, ...]`, broadcast against `b`; without, `h[t - 1]` is taken as it is.
        b: `[S, ...]`.
        first: `[...]`, the value before the first step.
        kind: sum, logsumexp, max or min. Where both sides of a maximum are equal, each has half of the gradient, as in
            torch; of kind max_old, as `where(b > h, b, h)` has it, the old value has all of it, of max_new the new one.

    Returns:
        `h [S, ...]`.

    Raises:
        ValueError: shapes that do not fit together, or an unknown kind.
    """
    return torch.ops.nsa_compile.recurrence(a, b, first, kind)


def turning_recurrence(a: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """`h[t] = a[t] * h[t - 1] + b[t]` of complex numbers, given and yielded as their two parts: `a [S | 1, ..., 2]`,
    `b [S, ..., 2]` and `first [..., 2]`. Inductor generates no code for complex numbers (torch 2.13)."""
    return torch.ops.nsa_compile.recurrence(a, b, first, _TURNING)


def matrix_recurrence(m: Tensor, b: Tensor, first: Tensor) -> Tensor:
    """`h[t] = m[t] @ h[t - 1] + b[t]` with `m [S, ..., K, K]`, `b [S, ..., K, V]` and `first [..., K, V]`."""
    return torch.ops.nsa_compile.matrix_recurrence(m, b, first)


def unit_lower_inverse(below: Tensor) -> Tensor:
    """`(1 + below)^-1` of matrices `[..., C, C]`, C a power of two, whose elements on and above the diagonal are 0.

    `x[i] = b[i] - Σ_{j < i} below[i, j] x[j]` is this matrix times b.
    """
    return torch.ops.nsa_compile.unit_lower_inverse(below)


def _as_complex(*parts: Tensor | None) -> list[Any]:
    return [None if x is None else torch.view_as_complex(x.contiguous()) for x in parts]


def _check(a: Tensor | None, b: Tensor, first: Tensor, kind: str) -> None:
    if kind not in (*KINDS, _TURNING):
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    if first.shape != b.shape[1:]:
        raise ValueError(f"first is {list(first.shape)} and b {list(b.shape)}; b must be a row of first's shape a step")
    if a is not None and (a.dim() != b.dim() or any(n not in (1, m) for n, m in zip(a.shape, b.shape, strict=True))):
        raise ValueError(f"a is {list(a.shape)} and b {list(b.shape)}; each size of a must be 1 or that of b")


@torch.library.custom_op(
    "nsa_compile::recurrence", mutates_args=(), schema="(Tensor? a, Tensor b, Tensor first, str kind) -> Tensor"
)
def _recurrence(a: Tensor | None, b: Tensor, first: Tensor, kind: str) -> Tensor:
    _check(a, b, first, kind)
    if kind == _TURNING:
        turn, brought, state = _as_complex(a, b, first)
        return torch.view_as_real(portable.forward(turn, brought, state, "sum")).contiguous()
    return portable.forward(a, b, first, kind).contiguous()


@_recurrence.register_fake
def _(a: Tensor | None, b: Tensor, first: Tensor, kind: str) -> Tensor:
    _check(a, b, first, kind)
    return b.new_empty(b.shape)


@torch.library.custom_op(
    "nsa_compile::recurrence_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor? a, Tensor values, Tensor b, Tensor first, str kind) -> (Tensor, Tensor, Tensor)",
)
def _recurrence_backward(
    gradient: Tensor, a: Tensor | None, values: Tensor, b: Tensor, first: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    if kind == _TURNING:
        of_values, turn, found, brought, state = _as_complex(gradient, a, values, b, first)
        gradients = portable.backward(of_values, turn, found, brought, state, "sum")
        of_a, of_b, of_first = (torch.view_as_real(x.resolve_conj()) for x in gradients)
    else:
        of_a, of_b, of_first = portable.backward(gradient, a, values, b, first, kind)
    return of_a.contiguous(), of_b.contiguous(), of_first.clone(memory_format=torch.contiguous_format)


@_recurrence_backward.register_fake
def _(
    gradient: Tensor, a: Tensor | None, values: Tensor, b: Tensor, first: Tensor, kind: str
) -> tuple[Tensor, Tensor, Tensor]:
    of_a = gradient.new_empty(0) if a is None else a.new_empty(a.shape)
    return of_a, b.new_empty(b.shape), first.new_empty(first.shape)


def _save(ctx: Any, inputs: tuple, output: Tensor) -> None:
    a, b, first, ctx.kind = inputs
    # What a sum brings has nothing to do with its gradient.
    ctx.save_for_backward(a, output, output if ctx.kind in ("sum", _TURNING) else b, first)


@torch._disable_dynamo  # saved tensors of a checkpoint are read once
def _differentiate(ctx: Any, gradient: Tensor) -> tuple:
    a, values, b, first = ctx.saved_tensors
    of_a, of_b, of_first = torch.ops.nsa_compile.recurrence_backward(gradient, a, values, b, first, ctx.kind)
    return None if a is None else of_a, of_b, of_first, None


_recurrence.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op(
    "nsa_compile::matrix_recurrence", mutates_args=(), schema="(Tensor m, Tensor b, Tensor first) -> Tensor"
)
def _matrix_recurrence(m: Tensor, b: Tensor, first: Tensor) -> Tensor:
    return portable.matrix_forward(m, b, first)


@_matrix_recurrence.register_fake
def _(m: Tensor, b: Tensor, first: Tensor) -> Tensor:
    return b.new_empty(b.shape)


@torch.library.custom_op(
    "nsa_compile::matrix_recurrence_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor m, Tensor values, Tensor first) -> (Tensor, Tensor, Tensor)",
)
def _matrix_recurrence_backward(
    gradient: Tensor, m: Tensor, values: Tensor, first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_m, of_b, of_first = portable.matrix_backward(gradient, m, values, first)
    return of_m.contiguous(), of_b.contiguous(), of_first.contiguous()


@_matrix_recurrence_backward.register_fake
def _(gradient: Tensor, m: Tensor, values: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return m.new_empty(m.shape), values.new_empty(values.shape), first.new_empty(first.shape)


def _save_matrix(ctx: Any, inputs: tuple, output: Tensor) -> None:
    m, _, first = inputs
    ctx.save_for_backward(m, output, first)


@torch._disable_dynamo
def _differentiate_matrix(ctx: Any, gradient: Tensor) -> tuple:
    return torch.ops.nsa_compile.matrix_recurrence_backward(gradient, *ctx.saved_tensors)


_matrix_recurrence.register_autograd(_differentiate_matrix, setup_context=_save_matrix)


@torch.library.custom_op("nsa_compile::unit_lower_inverse", mutates_args=(), schema="(Tensor below) -> Tensor")
def _unit_lower_inverse(below: Tensor) -> Tensor:
    return portable.unit_lower_inverse(below)


@_unit_lower_inverse.register_fake
def _(below: Tensor) -> Tensor:
    return below.new_empty(below.shape)


def _save_inverse(ctx: Any, inputs: tuple, output: Tensor) -> None:
    ctx.save_for_backward(output)


@torch._disable_dynamo
def _differentiate_inverse(ctx: Any, gradient: Tensor) -> Tensor:
    (inverse,) = ctx.saved_tensors
    return -(inverse.mH @ gradient @ inverse.mH).tril(-1)


_unit_lower_inverse.register_autograd(_differentiate_inverse, setup_context=_save_inverse)


refuse_second_derivatives(_recurrence_backward, "a recurrence in parallel")
refuse_second_derivatives(_matrix_recurrence_backward, "a recurrence in parallel")
