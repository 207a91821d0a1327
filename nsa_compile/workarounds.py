"""Workarounds for defects of torch, each with its cause, its scope and the versions it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._dynamo import exc
from torch._dynamo.variables.higher_order_ops import ScanHigherOrderVariable
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def capture_scans_by_shape() -> None:
    """While Dynamo captures a scan, find the shapes of its results by running its body once.

    Dynamo runs each operator on fake tensors to learn what its results look like. Where gradients are wanted, torch's
    scan then traces, differentiates and partitions its body, and all of that is thrown away: a third of the time a
    model takes to compile (torch 2.13). What is traced later, by AOTAutograd, is not changed.
    """
    differentiate = scan_op.py_kernels.pop(DispatchKey.Autograd)

    @scan_op.py_impl(DispatchKey.Autograd)
    def scan_autograd(
        combine: Callable[..., Any], init: Sequence[Tensor], xs: Sequence[Tensor], additional: Sequence[Tensor]
    ) -> Any:
        tensors = (*init, *xs, *additional)
        modes = _get_current_dispatch_mode_stack()
        # Proxies and functional tensors have modes of their own.
        fake = all(isinstance(x, FakeTensor) for x in tensors) and all(isinstance(m, FakeTensorMode) for m in modes)
        if not fake or torch._guards.TracingContext.try_get() is None:
            return differentiate(combine, init, xs, additional)
        return _ShapesOfScan.apply(combine, len(init), len(xs), *tensors)


class _ShapesOfScan(torch.autograd.Function):
    """A scan on fake tensors, whose results say that they have gradients."""

    @staticmethod
    def forward(ctx: Any, combine: Callable[..., Any], n_init: int, n_xs: int, *tensors: Tensor) -> Any:
        ctx.save_for_backward(*tensors)
        n = n_init + n_xs
        with torch._C._AutoDispatchBelowAutograd():
            return scan_op(combine, tensors[:n_init], tensors[n_init:n], tensors[n:])

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return None, None, None, *(torch.empty_like(x) for x in ctx.saved_tensors)


def explain_uncaptured_steps() -> None:
    """Say in one line why the step of a scan cannot be captured, and what to write instead.

    Dynamo's own words are of its insides: an unhinted symbol, an internal assertion (torch 2.13). What is no error,
    such as a restart of the analysis, passes.
    """
    original = ScanHigherOrderVariable._call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        try:
            return original(self, tx, args, kwargs)
        except Exception as error:
            own = isinstance(error, exc.TorchDynamoException)
            failed = isinstance(error, exc.Unsupported | exc.UserError | exc.UncapturedHigherOrderOpError)
            if (own and not failed) or not (place := _caller_of_scan(tx)):
                raise
            raise exc.UncapturedHigherOrderOpError(
                f"the step of the scan at {place} cannot be captured: {why_not_traced(error)}"
            ) from error

    ScanHigherOrderVariable._call_function = call_function  # type: ignore[method-assign]


def _caller_of_scan(tx: Any) -> str | None:
    """`file:line` of the call of `nsa_compile.scan` that Dynamo is in; None if it is in torch's own."""
    inside = False
    while tx is not None:
        if tx.f_code.co_filename.endswith("nsa_compile/loop.py"):
            inside = True
        elif inside:
            return f"{tx.f_code.co_filename}:{tx.lineno}"
        tx = getattr(tx, "parent", None)
    return None


# Words of torch's messages, what they mean for the author of a step, and the way out.
_REASONS = (
    (
        ("unhinted", "data-dependent", "DataDependent", "item()", "_local_scalar_dense", "u0"),
        "it reads a number out of a tensor, as k[t], k[:t + 1], k[:, t] = x and t.item() with a tensor t do; "
        "write k.index_select(0, t.view(1))[0], a mask such as torch.arange(S) <= t, and "
        "torch.where(torch.arange(S) == t, x, k) instead",
    ),
    (
        ("input mutation", "mutat"),
        "it writes in place to its carry, to its input or to a tensor from outside; write to a copy, x.clone(), and "
        "return it",
    ),
    (("metadata", "init and carry"), "it returns a carry of another shape, dtype or structure than it was given"),
)


def why_not_traced(error: Exception) -> str:
    """What torch says of a step that it cannot trace, in one line."""
    text = str(error)
    for words, reason in _REASONS:
        if any(word in text for word in words):
            return reason
    return (text.strip().splitlines() or [type(error).__name__])[0]
