"""Derivatives that a compiled program does not have: refused, where torch leaves them out without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa_compile.capture.refusals import ScanNotCompiled
from nsa_compile.ops.declaration import no_second_derivatives


def with_derivatives_refused(run: Callable[..., Any]) -> Callable[..., Any]:
    """A program that refuses dual tensors and, where it was compiled by AOTAutograd, second derivatives.

    Operators without a forward derivative drop it (torch 2.13).
    """

    def refusing(*inputs: Any) -> Any:
        if forward_ad._current_level >= 0:
            for x in inputs:
                if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
                    raise ScanNotCompiled(
                        "what is compiled has no derivatives in forward mode, and an input of it is a dual tensor; "
                        "call the function as written, without compiling it"
                    )
        results = run(*inputs)
        if torch.is_grad_enabled():
            _refuse_second_derivatives(results, inputs)
        return results

    return refusing


def _refuse_second_derivatives(results: Iterable[Any], inputs: Sequence[Any]) -> None:
    """Let the first derivatives of a program of AOTAutograd have a history, which says that they have no derivatives.

    Its backward pass knows no history of what it has saved, unless that is an input: with `create_graph=True`, as in a
    Hessian, the gradient of a gradient is zero, or said to be unused (torch 2.13).
    """
    nodes = {node for x in results if isinstance(x, Tensor) and (node := _program_of(x)) is not None}
    given = [_history_of(x) for x in inputs if isinstance(x, Tensor) and x.requires_grad] if nodes else []

    def connected(gradients: tuple[Tensor | None, ...], _: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        return tuple(g if g is None else _Connected.apply(g, *given) for g in gradients)

    for node in nodes:
        node.register_hook(connected)


def _history_of(x: Tensor) -> Tensor:
    """A tensor with the history of an input, which it does not keep in memory, but for a leaf."""
    return x if x.is_leaf else x.unsqueeze(0)[:0].clone()


def _program_of(x: Tensor) -> Any:
    """What of the history of a result is a program of AOTAutograd: the result itself, or what it is a view of."""
    node: Any = x.grad_fn
    if node is not None and _IS_PROGRAM not in node.name() and x._is_view():
        node = node.next_functions[0][0]
    return node if node is not None and _IS_PROGRAM in node.name() else None


_IS_PROGRAM = "CompiledFunctionBackward"


class _Connected(torch.autograd.Function):
    """A gradient as it is, with a history that leads to the inputs."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, *inputs: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise no_second_derivatives("a compiled function")
