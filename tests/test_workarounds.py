"""Workarounds for torch: that they do what they are for, and that what they change stays right."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.partitioner import HopGraphMinCutPartitioner
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa_compile
from nsa_compile.capture.refusals import ScanNotCompiled
from nsa_compile.workarounds import blank


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


@pytest.mark.deep(but=["recurrent"])
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


@pytest.mark.deep
@pytest.mark.parametrize("name", WRITTEN)
def test_an_input_is_written_to_another_as_it_was_before(name):
    torch._dynamo.reset()
    given = [torch.arange(4.0).view(2, 2) + i for i in (1, 10)]
    expected = [x.clone() for x in given]
    result = nsa_compile.compile(WRITTEN[name], cache=False)(*given)
    assert torch.equal(result, WRITTEN[name](*expected))
    assert torch.equal(torch.stack(given), torch.stack(expected))


@pytest.mark.deep
def test_a_negated_view_is_written_to():
    torch._dynamo.reset()
    z = torch.full((3,), 1 + 1j)

    def write(x, y):
        x.mul_(2)
        return x + y

    result = nsa_compile.compile(write, cache=False)(z.conj().imag, torch.ones(3))
    assert torch.equal(z, torch.full((3,), 1 + 2j))
    assert torch.equal(result, torch.full((3,), -1.0))


def shifted(x):
    x[1:] = x[:-1].clone()
    return x.sum(0)


def shifted_window(x):
    x.copy_(torch.slice_scatter(x, x[:-1], 0, 1, len(x)))
    return x.sum(0)


def shifted_by_index(x):
    x.copy_(x.index_copy(0, torch.arange(1, len(x)), x[:-1]))
    return x.sum(0)


@pytest.mark.deep
@pytest.mark.parametrize("function", [shifted, shifted_window, shifted_by_index])
def test_rows_that_are_shifted_in_place(function):
    """The first row came out everywhere."""
    torch._dynamo.reset()
    x, y = (torch.arange(6.0)[:, None].repeat(1, 17) for _ in range(2))
    torch.testing.assert_close(nsa_compile.compile(function)(x), function(y))
    torch.testing.assert_close(x, y)


def test_loops_are_fused_where_one_reads_an_input_that_is_written_to():
    """Inductor failed: `KeyError: 'buf7'`."""

    def function(h, mask, x):
        new = torch.nn.functional.rms_norm(h + torch.where(mask, x, -x), (16,)).clone(), (~mask).clone()
        h.copy_(new[0])
        mask.copy_(new[1])
        return x.sum()

    torch._dynamo.reset()
    one, other = ((torch.ones(3, 16), torch.zeros(3, 16) > 0, torch.arange(48.0).reshape(3, 16)) for _ in range(2))
    torch.testing.assert_close(nsa_compile.compile(function)(*one), function(*other))
    torch.testing.assert_close(one, other)


@pytest.mark.deep
@pytest.mark.parametrize("nested", ["aot_eager", "inductor"])
def test_inputs_that_share_memory_in_another_way_at_each_call(nested, caplog):
    """What was compiled for two tensors was run for two views of one, and the other way round (torch 2.13)."""

    def function(a, b):
        a.add_(1)
        return a + b

    def given():
        x = torch.zeros(12)
        yield torch.zeros(4), torch.zeros(4)
        yield x[:4], x[:4].view(4)
        yield x[:4], x[2:6]
        yield x[2:6], x[:4]
        yield x[:4], x[4:8]
        yield x[0:8:2], x[1:8:2]
        yield x[2:6], torch.view_as_complex(x[0:8].view(4, 2)).imag

    for start in range(7):
        torch._dynamo.reset()
        compiled = nsa_compile.compile(function, nested=nested)
        for (a, b), (c, d) in zip([*given()][start:], [*given()][start:], strict=True):
            torch.testing.assert_close(compiled(a, b), function(c, d))
            torch.testing.assert_close((a, b), (c, d))
    assert "share" in caplog.text


@pytest.mark.deep(but=["aot_eager"])
@pytest.mark.parametrize("nested", ["aot_eager", "inductor"])
def test_a_write_through_data_to_an_input_that_shares_memory(nested):
    """No counter of versions sees it."""

    def function(a, b):
        a.data.add_(1)
        return b * 2

    torch._dynamo.reset()
    compiled = nsa_compile.compile(function, nested=nested)
    for view in (torch.clone, lambda x: x[:], lambda x: x.view(torch.float32)):
        x, y = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(compiled(x, view(x)), function(y, view(y)))
        torch.testing.assert_close(x, y)


@pytest.mark.deep
def test_a_negated_view_that_is_returned_is_refused():
    """It came out as a copy: what was written to it did not reach the input."""
    view = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    with pytest.raises(ScanNotCompiled, match="returns an input that is a negated view"):
        nsa_compile.compile(lambda x: x[:1])(view)
    torch.testing.assert_close(nsa_compile.compile(lambda x: x * 2)(view), view * 2)


def test_a_blank_stand_in_remembers_no_numbers():
    with FakeTensorMode():
        known = torch.tensor(True)
        assert known.new_empty((1,)).constant is not None  # or `blank` is needed no longer
        assert blank(known, (1,)).constant is None
        assert blank(known, dtype=torch.int64).constant is None


@pytest.mark.deep
@pytest.mark.parametrize("length", [1, 3])
def test_a_check_of_a_constant_in_a_step_reads_no_garbage(length):
    """It held of one step, or not, by what lay in memory."""

    def run(x):
        def step(c, row):
            last = torch.nn.functional.one_hot(torch.tensor(1), 2)
            return c * 0.5 + row, (c * last).sum()

        return nsa_compile.scan(step, x.new_zeros(2), x)[1]

    for _ in range(4):
        torch._dynamo.reset()
        zeros = [torch.zeros(1, dtype=torch.bool) for _ in range(1000)]
        del zeros
        x = torch.randn(length, 2)
        torch.testing.assert_close(nsa_compile.compile(run, nested="eager", cache=False)(x), run(x))


def test_what_is_saved_of_an_input_is_the_input():
    """A view that Inductor made was a tensor of its own, whose writes autograd did not see: gradients were wrong."""

    def function(x, *inputs):
        a, b, c, d, e, f = inputs
        final, ys = nsa_compile.scan(lambda h, row: (h * 0.5 + row @ a, h), x.new_zeros(4), x)
        parts = [x[:, :2] @ part for part in (b.chunk(2)[1], c.unfold(0, 2, 2)[0].t(), d[1:3])]
        return final.sum() + (ys + x * e.diagonal() * f[0]).sum() + sum(parts).sum()

    torch._dynamo.reset()
    x, *weights = (torch.randn(n, 4, requires_grad=True) for n in (6, *[4] * 6))
    out = nsa_compile.compile(function)(x, *weights)
    saved = out.grad_fn.saved_tensors
    for i, w in enumerate(weights):
        of_it = [s for s in saved if s.untyped_storage().data_ptr() == w.untyped_storage().data_ptr()]
        with torch.no_grad():
            w.mul_(2)
        assert {s._version for s in of_it} == {w._version}, f"weight {i}"
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, x)
