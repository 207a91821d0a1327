"""Workarounds for defects of torch, each with its cause, its scope and the versions it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def capture_scans_by_shape() -> None:
    """While Dynamo captures a scan, find the shapes of its results by running its body once.

    Dynamo runs each operator on fake tensors to learn what its results look like. Where gradients are wanted, torch's
    scan then traces, differentiates and partitions its body, and all of that is thrown away: a third of the time a
    model takes to compile (torch 2.11 to 2.13). What is traced later, by AOTAutograd, is not changed.
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
