"""How Dynamo captures a scan: as one node, whose results it knows by running the step once on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._higher_order_ops import utils
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import optimization_hint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from nsa_compile.capture.refusals import NOT_OURS, ScanNotCompiled, captured_at
from nsa_compile.workarounds import DATA, blank


def capture_scans_by_shape() -> None:
    """While Dynamo captures a scan, find the shapes of its results by running its body once.

    Dynamo runs each operator on fake tensors to learn what its results look like. Where gradients are wanted, torch's
    scan then traces, differentiates and partitions its body, and all of that is thrown away: a third of the time a
    model takes to compile (torch 2.13). What is traced later, by AOTAutograd, is not changed.
    """
    differentiate = scan_op.py_kernels.pop(DispatchKey.Autograd)

    @scan_op.py_impl(DispatchKey.Autograd)
    def scan_autograd(
        combine: fx.GraphModule, init: Sequence[Tensor], xs: Sequence[Tensor], additional: Sequence[Tensor]
    ) -> Any:
        inputs = (*init, *xs, *additional)
        tensors = [x for x in inputs if isinstance(x, Tensor)]  # a size that varies is an input, too
        modes = _get_current_dispatch_mode_stack()
        # Proxies and functional tensors have modes of their own.
        fake = all(isinstance(x, FakeTensor) for x in tensors) and all(isinstance(m, FakeTensorMode) for m in modes)
        if not fake or torch._guards.TracingContext.try_get() is None:
            wants_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
            if (place := captured_at(combine)) and (modes or wants_gradients):
                raise ScanNotCompiled(NOT_OURS.format(place=place, backend="a backend of your own"))
            return differentiate(combine, init, xs, additional)
        return _ShapesOfScan.apply(*_results_of_scan(combine, init, xs, additional), *inputs)


def take_rows_of_any_dtype() -> None:
    """Let Dynamo take the first row of an input, on which it traces a step, with a derivative for complex numbers, too.

    `select_copy` has none (torch 2.13).
    """

    def first_row(t: Tensor, dim: int = 0) -> Tensor:
        return t.select(dim, 0).clone()

    utils.first_slice_copy = first_row


def turns_gradients_on(gm: fx.GraphModule) -> fx.Node | None:
    """The node of a captured graph that turns gradients on, if there is one."""
    nodes = gm.graph.find_nodes(op="call_function", target=torch._C._set_grad_enabled)
    return next((n for n in nodes if n.args[0]), None)


def _results_of_scan(
    combine: fx.GraphModule, init: Sequence[Tensor], xs: Sequence[Tensor], additional: Sequence[Any]
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Stand-ins for the results of a scan on fake tensors, and which of them have gradients."""
    inputs = [*init, *(x[0] for x in xs), *additional]
    length = optimization_hint(xs[0].shape[0])
    wanted = [torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad for x in inputs]

    @cache
    def results_of(flags: tuple[bool, ...]) -> list[tuple[Tensor, bool]]:
        pairs = zip(inputs, flags, strict=True)
        leaves = [x.detach().requires_grad_(flag) if isinstance(x, Tensor) else x for x, flag in pairs]
        return [(x, x.requires_grad) for x in run_body(combine, leaves)]

    with _forgetting_symbols(xs[0]):
        ever, with_gradient = propagate_gradients(results_of, len(init), length, wanted)
        results = [x for x, _ in results_of(tuple(ever))]
    rows = [blank(x, (xs[0].shape[0], *x.shape)) for x in results[len(init) :]]
    return [*(blank(x, x.shape) for x in init), *rows], with_gradient


def _forgetting_symbols(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """What a step reads out of tensors is a symbol while it is run, and stays in it."""
    shape_env = x.fake_mode.shape_env if isinstance(x, FakeTensor) else None
    return contextlib.nullcontext() if shape_env is None else shape_env.ignore_fresh_unbacked_symbols()


# The results of a step, and whether each has a gradient, by which inputs have one.
ResultsOf = Callable[[tuple[bool, ...]], Sequence[tuple[Any, bool]]]


def propagate_gradients(
    results_of: ResultsOf, n_init: int, length: int, first: Sequence[bool]
) -> tuple[list[bool], tuple[int, ...]]:
    """Which inputs have a gradient at some step, and which results after the last one.

    A carry may get a gradient at one step and lose it at another: the two of a swap, say.
    """
    now, ever, stacked = list(first), list(first), set[int]()
    for _ in range(length):
        results = [has_gradient for _, has_gradient in results_of(tuple(now))]
        stacked |= {i for i in range(n_init, len(results)) if results[i]}
        before, now = now, [*results[:n_init], *first[n_init:]]
        if now == before:
            break
        ever = [a or b for a, b in zip(ever, now, strict=True)]
    return ever, (*(i for i in range(n_init) if now[i]), *sorted(stacked))


def applies_functorch(node: fx.Node) -> bool:
    """Whether a captured node enters or leaves a transform of torch.func."""
    return "_functorch" in (getattr(node.target, "__module__", None) or "")


def without_copy(node: Any) -> Any:
    """What a scan is given or its step returns, without the copy in the standard layout that the capture makes of it
    (`scanning._own`)."""
    copied = node.target == "clone" and node.kwargs.get("memory_format") is torch.contiguous_format
    return node.args[0] if copied else node


def run_body(body: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run a step as it was captured, with gradients."""
    with torch.enable_grad():
        return list(StepRun(body).run(*inputs))


class StepRun(fx.Interpreter):
    """Runs a body. A checkpointed region keeps nothing that would have to be computed again, so it is just run."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return StepRun(args[0]).run(*args[1:])
        if target is DATA:
            return args[0].detach()
        return super().call_function(target, args, kwargs)


class _ShapesOfScan(torch.autograd.Function):
    """A scan on fake tensors, whose results say whether they have gradients."""

    @staticmethod
    def forward(ctx: Any, results: Sequence[Tensor], with_gradient: Sequence[int], *inputs: Any) -> Any:
        ctx.inputs = inputs
        ctx.mark_non_differentiable(*(x for i, x in enumerate(results) if i not in with_gradient))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, *(torch.empty_like(x) if isinstance(x, Tensor) else None for x in ctx.inputs)
