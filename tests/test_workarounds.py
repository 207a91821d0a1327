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


WRITTEN = {
    "a swap": lambda a, b: (old := a.clone(), a.copy_(b), b.copy_(old))[2] * 1,
    "a shift": lambda a, b: (old := a.clone(), a.mul_(2), b.copy_(old))[2] * 1,
    "a transposed one": lambda a, b: (old := a.t().clone(), a.mul_(2), b.copy_(old))[2] * 1,
    "a part, and then all": lambda a, b: (a[:1].copy_(a[1:2]), a.clone(), a.copy_(b))[1],
    "a part of itself": lambda a, b: (old := a[:1].clone(), a.mul_(2), a[1:2].copy_(old), b.add_(1))[3] * 1,
}


@pytest.mark.parametrize("name", WRITTEN)
def test_an_input_is_written_to_another_as_it_was_before(name):
    torch._dynamo.reset()
    given = [torch.arange(4.0).view(2, 2) + i for i in (1, 10)]
    expected = [x.clone() for x in given]
    result = nsa_compile.compile(WRITTEN[name], cache=False)(*given)
    assert torch.equal(result, WRITTEN[name](*expected))
    assert torch.equal(torch.stack(given), torch.stack(expected))


def test_a_negated_view_is_written_to():
    torch._dynamo.reset()
    z = torch.full((3,), 1 + 1j)

    def write(x, y):
        x.mul_(2)
        return x + y

    result = nsa_compile.compile(write, cache=False)(z.conj().imag, torch.ones(3))
    assert torch.equal(z, torch.full((3,), 1 + 2j))
    assert torch.equal(result, torch.full((3,), -1.0))
