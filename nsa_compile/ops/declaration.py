"""Declares an attention operator: `torch.library` schema, checks, fake tensors, autograd, vmap and FLOP formulas.

What an operator computes with is a matter of its kernels (`dispatch.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef
from torch.utils.flop_counter import register_flop_formula

from nsa_compile.ops import flops
from nsa_compile.ops.dispatch import choose_kernel
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["declare_operator", "no_second_derivatives", "refuse_second_derivatives"]


def no_second_derivatives(of: str) -> RuntimeError:
    return RuntimeError(f"{of} has no second derivatives; take them of the function as written, without compiling it")


def refuse_second_derivatives(backward: CustomOpDef, of: str) -> None:
    """Let a backward operator say in one line that nobody differentiates it.

    An operator's refusal lies on every way back to its inputs. `once_differentiable` puts its own beside them:
    `torch.autograd.grad` walks past it, and leaves the second derivatives out (torch 2.13).
    """

    def refuse(ctx: Any, *gradients: Any) -> Any:
        raise no_second_derivatives(of)

    backward.register_autograd(refuse)


def _forward(kernel: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
    return kernel(*arguments)


def declare_operator(
    name: str,
    own: str,
    *,
    check: Callable[..., None],
    pairs: Callable[..., int],
    num_indices: Callable[..., int] | None = None,
    forward: Callable[..., tuple[Tensor, ...]] = _forward,
) -> CustomOpDef:
    """The operators `nsa_compile::<name>_attention` and `nsa_compile::<name>_attention_backward`; returns the first.

    It takes q `[B, S, Hq, D]`, k `[B, T, G, D]`, v `[B, T, G, Dv]` and arguments of its own, and returns the output
    `[B, S, Hq, Dv]` and the log-sum-exp `[B, S, Hq]`. The other takes the gradient of the output, that of the
    log-sum-exp or None, q, k, v, output, log-sum-exp and the same arguments, and returns the gradients of q, k and v.

    Args:
        name: by which kernels are registered for it.
        own: schema of its own arguments, tensors `[B, ...]` without a gradient first.
        check: raises for arguments `(q, k, v, *own)` that do not fit together.
        pairs: `(S, T, *own)` to the query-key pairs of a head, for FLOPs; tensors are given as their shapes.
        num_indices: `(*own)` to n, if it returns indices `[B, S, G, n]`, int32 and without a gradient, too.
        forward: `(kernel's forward, q, k, v, *own)` to the results, if the kernel is not simply called.
    """
    own_tensors = own.count("Tensor ")
    indices = ", Tensor indices" if num_indices else ""

    def compute(q: Tensor, k: Tensor, v: Tensor, *own: Any) -> tuple[Tensor, ...]:
        check(q, k, v, *own)
        return forward(choose_kernel(name, q).forward, q, k, v, *own)

    def compute_backward(
        grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
    ) -> tuple[Tensor, ...]:
        check(q, k, v, *rest[2:])
        return choose_kernel(name, q).backward(grad_out, grad_lse, q, k, v, *rest)

    schema = f"(Tensor q, Tensor k, Tensor v, {own}) -> (Tensor out, Tensor lse{indices})"
    attention = torch.library.custom_op(f"nsa_compile::{name}_attention", compute, mutates_args=(), schema=schema)
    schema = f"(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {own})"
    attention_backward = torch.library.custom_op(
        f"nsa_compile::{name}_attention_backward",
        compute_backward,
        mutates_args=(),
        schema=f"{schema} -> (Tensor dq, Tensor dk, Tensor dv)",
    )

    @attention.register_fake
    def _(q: Tensor, k: Tensor, v: Tensor, *own: Any) -> tuple[Tensor, ...]:
        check(q, k, v, *own)
        out, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=compute_dtype(q))
        if num_indices is None:
            return out, lse
        return out, lse, q.new_empty(*q.shape[:2], k.shape[2], num_indices(*own), dtype=torch.int32)

    @attention_backward.register_fake
    def _(grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        check(q, k, v, *rest[2:])
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def save(ctx: Any, inputs: tuple, output: tuple) -> None:
        tensors, ctx.own = inputs[: 3 + own_tensors], inputs[3 + own_tensors :]
        out, lse, *without_gradient = output
        ctx.mark_non_differentiable(*without_gradient)
        ctx.set_materialize_grads(False)  # a log-sum-exp that nobody reads costs nothing
        ctx.save_for_backward(*tensors[:3], out, lse, *tensors[3:])

    def differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple:
        saved = ctx.saved_tensors
        grad_out = torch.zeros_like(saved[3]) if grad_out is None else grad_out
        gradients = attention_backward(grad_out, grad_lse, *saved, *ctx.own)
        return (*gradients, *(None for _ in range(own_tensors)), *(None for _ in ctx.own))

    attention.register_autograd(differentiate, setup_context=save)
    refuse_second_derivatives(attention_backward, "compiled attention")
    _register_vmap(attention, 3 + own_tensors)
    _register_vmap(attention_backward, 7 + own_tensors)

    @register_flop_formula(getattr(torch.ops.nsa_compile, f"{name}_attention"))
    def _(q: Any, k: Any, v: Any, *own: Any, out_shape: Any = None) -> int:
        return flops.attention_flops(q, v, pairs(q[1], k[1], *own))

    @register_flop_formula(getattr(torch.ops.nsa_compile, f"{name}_attention_backward"))
    def _(
        grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *own: Any, out_shape: Any = None
    ) -> int:
        return flops.attention_backward_flops(q, v, pairs(q[1], k[1], *own))

    return attention


def _register_vmap(op: CustomOpDef, num_tensors: int) -> None:
    """The mapped dimension becomes a part of B, with which the first `num_tensors` arguments and the results begin."""

    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple, tuple[int, ...]]:
        size = info.batch_size
        tensors: list[Any] = [
            x if x is None else x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args[:num_tensors], in_dims, strict=False)
        ]
        batch = tensors[0].shape[1]
        outputs = op(*(x if x is None else x.flatten(0, 1) for x in tensors), *args[num_tensors:])
        return tuple(x.unflatten(0, (size, batch)) for x in outputs), (0,) * len(outputs)

    torch.library.register_vmap(op, batched)
