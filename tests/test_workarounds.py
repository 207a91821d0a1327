"""Workarounds for torch: that they do what they are for, and that what they change stays right."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.partitioner import HopGraphMinCutPartitioner

import nsa_compile


def recurrent(x, w):
    """h' = tanh(h w + x), whose body reads a weight: it stays a loop."""

    def step(h, row):
        h = torch.tanh(h @ w + row)
        return h, h * 2

    return nsa_compile.scan(step, x.new_zeros(x.shape[1]), x)


def windows(x, w):
    """Sums over the last three rows, projected: it becomes one product."""

    def step(window, row):
        window = torch.cat([window[1:], row[None]])
        return window, (window @ w).sum(0)

    return nsa_compile.scan(step, x.new_zeros(3, x.shape[1]), x)


def tensors():
    return [torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 4)]


def values_and_gradients(function, inputs):
    carry, ys = function(*inputs)
    return carry, ys, torch.autograd.grad(carry.sum() + ys.square().sum(), inputs)


@pytest.mark.parametrize("function", [windows, recurrent])
def test_no_scan_is_differentiated_by_torch(function, monkeypatch):
    """Neither while it is captured nor later; results have gradients all the same."""

    def refuse(*args, **options):
        raise AssertionError("torch differentiates a scan")

    monkeypatch.setattr(HopGraphMinCutPartitioner, "create_partitioned_graph", refuse)
    torch._dynamo.reset()
    inputs = tensors()
    fast = nsa_compile.compile(function, nested="aot_eager", cache=False)
    torch.testing.assert_close(values_and_gradients(fast, inputs), values_and_gradients(function, inputs))
    with torch.no_grad():
        assert not fast(*inputs)[1].requires_grad
