"""The loop operator: equal to the loop as it is written, in values and gradients; it keeps what backward needs once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import nsa_compile
from nsa_compile import backend, modes, ops, scan
from nsa_compile.backend import optimize, parse_options
from nsa_compile.ops.loop import LoopNotTraced, Program, program, register, run_loop
from nsa_compile.ops.loop.step import Layout
from nsa_compile.program import loops
from tests.strategies import few


def lstm(x, w, b):
    def step(carry, row):
        h, c = carry
        i, f, g, o = (torch.cat([row, h]) @ w + b).chunk(4)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h

    return scan(step, (x.new_zeros(3), x.new_zeros(3)), x)


def delta_rule(x, w, b):
    def step(state, row):
        k, v = F.normalize(row, dim=0), row @ w[:3, :3]
        state = state + torch.outer(k, v - state.T @ k)
        return state, state.T @ row

    return scan(step, x.new_zeros(3, 3), x)


def detached_carry(x, w, b):
    def step(c, row):
        c = torch.tanh(c.detach() * 0.5 + row)
        return c, c * b[:3]

    return scan(step, b[:3] * 2, x)


def part_of_the_carries(x, w, b):
    """A carry without gradient beside one with, and one that nothing changes."""

    def step(carry, row):
        a, count, same = carry
        a = a * torch.sigmoid(row) + same
        return (a, count + (row.sum() > 0).long(), same), (count, a.sum())

    return scan(step, (x.new_zeros(3), torch.tensor(-2), b[:3]), x)


def rows_of_what_is_the_same(x, w, b):
    """Rows picked from what all steps read, some of them twice: gradients are added where they belong."""

    def step(c, row):
        rows = w.index_select(0, torch.stack([row.argmax(), row.argmin(), row.argmax()]))
        some = b.view(3, 4).gather(0, row.argsort().view(3, 1).expand(3, 4))
        c = torch.tanh(c + rows.sum(0)[:3] * row)
        return c, (some * row[:, None]).sum() + (rows * c.sum()).sum(0)

    return scan(step, x.new_zeros(3), x)


def data_decides(x, w, b):
    def step(best, row):
        best = torch.where(row.sum() > best.sum(), row, best)
        return best, (best.argmax(), best.amax())

    return scan(step, x.new_full((3,), -5.0), x)


def in_place_in_the_step(x, w, b):
    def step(c, row):
        h = (c * 0.5 + row).clone()
        h[0] = h[1] * 2
        h.mul_(b[:3])
        return h, h

    return scan(step, x.new_zeros(3), x)


LOOPS = [
    lstm, delta_rule, detached_carry, part_of_the_carries, data_decides, in_place_in_the_step, rows_of_what_is_the_same,
]  # fmt: skip


def results_and_gradients(function: Any, inputs: list[Tensor], wanted: list[bool]) -> list[Any]:
    leaves = [x.clone().requires_grad_(flag) for x, flag in zip(inputs, wanted, strict=True)]
    results = pytree.tree_leaves(function(*leaves))
    loss = sum((r * torch.linspace(0.5, 1.5, r.numel(), dtype=r.dtype).view(r.shape)).sum() for r in results
               if r.requires_grad)  # fmt: skip
    found = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(loss, found, allow_unused=True) if isinstance(loss, Tensor) else []
    return [[r.detach() for r in results], [r.requires_grad for r in results], list(gradients)]


@pytest.mark.deep(every=4)
@pytest.mark.parametrize("loop", LOOPS)
@few(8)
@given(data=st.data())
def test_equals_the_loop(loop, data):
    nested = data.draw(st.sampled_from(["eager", "aot_eager"]))
    length = data.draw(st.integers(1, 5))
    wanted = [data.draw(st.booleans()) for _ in range(3)]
    torch.manual_seed(data.draw(st.integers(0, 100)))
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in ((length, 3), (6, 12), (12,))]
    torch._dynamo.reset()
    fast = nsa_compile.compile(loop, nested=nested, cache=False, disable=["batch_prefill"])
    actual, expected = (results_and_gradients(f, inputs, wanted) for f in (fast, loop))
    assert not nsa_compile.last_report().scans[0].batched
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-10, atol=1e-12)
    if nested == "eager":
        assert actual[1] == expected[1]
    for a, e in zip(actual[2], expected[2], strict=True):
        zero = torch.zeros(())
        torch.testing.assert_close(*((zero if g is None else g).sum() if None in (a, e) else g for g in (a, e)))


@pytest.fixture
def compiled_steps(monkeypatch):
    """What a compiler has been given; every loop is worth it."""
    given: list[fx.GraphModule] = []

    def compiler(direction, inputs):
        given.append(direction)
        return compile_step(direction, inputs)

    compile_step = backend._compile_step
    monkeypatch.setattr(backend, "_compile_step", compiler)
    monkeypatch.setattr(loops, "STEPS_WORTH_COMPILING", 1)
    return given


@pytest.mark.deep
def test_compiled_steps_equal_their_loops(compiled_steps):
    """The gradients that meet the results have strides of zero; inputs are compiled for the strides that they have."""

    def all_of_them(x, w, b):
        return [loop(x, w, b) for loop in (part_of_the_carries, rows_of_what_is_the_same)]

    def summed(function):
        def run(x, w, b):
            leaves = pytree.tree_leaves(function(x, w, b))
            return sum(y.double().sum() for y in leaves), [y.detach() for y in leaves]

        return run

    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((4, 3), (6, 12), (12,)))
    torch._dynamo.reset()
    fast = summed(nsa_compile.compile(all_of_them, cache=False, disable=["batch_prefill"]))
    for inputs in ([x, w, b], [x, w.T.contiguous().T, b]):
        actual, expected = (results_and_gradients(f, inputs, [True] * 3) for f in (fast, summed(all_of_them)))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
    assert len(compiled_steps) == 6  # both directions of two loops, twice; one reads nothing that lies differently


@pytest.mark.deep
def test_a_step_that_is_compiled_with_one_tensor_twice_reads_both():
    """It was compiled as a function of one: AOTAutograd leaves out an input that is given twice."""
    step = backend._compile_step(fx.symbolic_trace(lambda a, b: [a * 2 + b]), [x := torch.ones(3), x])
    torch.testing.assert_close(step(x, torch.zeros(3)), [torch.full((3,), 2.0)])


@pytest.mark.deep
def test_gradients_of_two_carries_that_begin_as_one(compiled_steps):
    """Nobody reads what the last step leaves, so that the gradients of both are the same zeros."""

    def run(a, b):
        def step(carry, row):
            c, h = carry
            c = row[1] * c + (row[0] + h).tanh()
            return (c, c.tanh()), c

        return scan(step, (a.new_zeros(4),) * 2, (a, b))[1]

    torch._dynamo.reset()
    a, b = (torch.rand(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(6, 4, dtype=torch.float64)
    results = [torch.autograd.grad((f(a, b) * weights).sum(), (a, b)) for f in (nsa_compile.compile(run), run)]
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)
    assert len(compiled_steps) == 2


@pytest.mark.deep
def test_a_carry_may_leave_a_compiled_step_transposed():
    body = fx.symbolic_trace(lambda c, row: [torch.tanh(c * 0.5 + row).t(), c.sum(0)])
    c, rows = torch.randn(3, 3), torch.randn(4, 3)
    layouts = [Layout.of(c), Layout.of(rows[0])]
    results = []
    for compiler in (None, backend._compile_step):
        loop = Program(body, layouts, 1, 1, 4, modes.autocast_now(), [0, 1], [0, 1], compiler=compiler)
        leaf = c.clone().requires_grad_()
        last, sums = run_loop(register(loop), [leaf, rows])
        results.append((last, sums, *torch.autograd.grad(last.square().sum() + sums.sum(), leaf)))
    torch.testing.assert_close(*results)


@pytest.mark.deep
def test_a_negated_view_has_its_sign_in_a_compiled_step():
    """Of `z.conj().imag` the numbers that lie in memory have the other signs; `z.imag` lies as it does."""
    body = fx.symbolic_trace(lambda c, row, x: [torch.tanh(c * 0.5 + row * x), c * x])
    c, rows, z = torch.zeros(3), torch.randn(4, 3), torch.randn(3, dtype=torch.complex64)
    layouts = [Layout.of(x) for x in (c, rows[0], z.imag)]
    ways = [
        register(Program(body, layouts, 1, 1, 4, modes.autocast_now(), [0, 1], compiler=compiler))
        for compiler in (None, backend._compile_step)
    ]
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for x in (z.imag, z.conj().imag):
        with torch._C._ForceDispatchKeyGuard(included, excluded | ops.loop._LAZY):  # as in a compiled program
            torch.testing.assert_close(*(run_loop(way, [c, rows, x]) for way in ways))


@pytest.mark.deep
def test_steps_that_draw_or_are_complex_are_not_compiled(compiled_steps):
    def drawn(x):
        return scan(lambda c, row: (torch.tanh(c + row * torch.rand(3)), c.sum()), x.new_zeros(3), x)[0]

    def rotated(x):
        turn = torch.polar(x.abs(), x)
        return scan(lambda c, z: (c * z + z.conj() * c.abs(), c.abs()), turn[0], turn)[1]

    x = torch.randn(4, 3)
    for function in (drawn, rotated):
        torch._dynamo.reset()
        torch.manual_seed(1)
        actual = nsa_compile.compile(function, cache=False)(x)
        torch.manual_seed(1)
        torch.testing.assert_close(actual, function(x))
    assert not compiled_steps


def test_a_step_that_inductor_cannot_compile_runs_and_says_so(compiled_steps, monkeypatch, caplog):
    def fails(gm, inputs, nested, **options):
        raise RuntimeError("no such thing\nand more") if gm.graph.find_nodes(op="placeholder") else None

    monkeypatch.setattr(backend, "compile_nested", fails)
    direction = fx.symbolic_trace(lambda x: [x * 2])
    torch.testing.assert_close(
        backend._compile_step(direction, [torch.ones(2)])(torch.ones(2)), [torch.full((2,), 2.0)]
    )
    assert "the step of a loop runs operator by operator, as Inductor cannot compile it: no such thing" in caplog.text


def test_parameters_are_kept_once():
    """What the backward loop needs of each step does not grow with the parameters."""
    torch._dynamo.reset()
    inputs = [torch.randn(*shape, dtype=torch.float64) for shape in ((5, 3), (6, 12), (12,))]
    step = stepped(lstm, inputs).graphs([True] * len(stepped(lstm, inputs).inputs))
    assert max(layout.empty().numel() for layout in step.kept) <= 12
    assert step.rows_read or any(layout.shape == (3,) for layout in step.kept)


@pytest.mark.deep(but=["dtype1-0"])
@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 2), (torch.bfloat16, 0)])
def test_a_gradient_of_picked_rows_is_no_sum_of_whole_tensors(dtype, count):
    inputs = [torch.randn(*shape, dtype=dtype, requires_grad=True) for shape in ((5, 3), (6, 12), (12,))]
    loop = stepped(rows_of_what_is_the_same, inputs, disable=["batch_prefill"])
    assert len(loop.graphs([x.differentiable for x in loop.inputs]).scattered) == count


def stepped(function: Any, inputs: list[Tensor], **options: Any) -> Program:
    """The program of the one loop in a function."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        optimize(gm, parse_options({"cache": False, **options}), example_inputs)
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(*inputs)
    (node,) = graphs[0].graph.find_nodes(op="call_function", target=run_loop)
    return program(node.args[0])


def test_a_step_that_reads_a_number_out_of_a_tensor_is_one_line():
    def loop(x):
        def step(c, row):
            return c, row * c[: c.argmax() + 1].sum()

        return scan(step, x.new_ones(3), x)

    torch._dynamo.reset()
    with pytest.raises(Exception, match="reads a number out of a tensor") as caught:
        nsa_compile.compile(loop, nested="eager", cache=False)(torch.ones(4, 3))
    assert "torch.where(t > 0, a, b)" in str(caught.value)


def test_a_step_that_writes_to_its_inputs_is_refused():
    body = fx.symbolic_trace(lambda c, row: [c.add_(row), c * 2])
    layouts = [Layout.of(torch.zeros(3))] * 2
    with pytest.raises(LoopNotTraced, match=r"write to a copy, x\.clone\(\)"):
        Program(body, layouts, 1, 1, 4, modes.autocast_now(), [0]).graphs([])


def test_its_name_says_all_that_it_does():
    """Code that was compiled in another process finds its loop by this name."""

    def key(body: Any, length: int = 4, shape: tuple[int, ...] = (3,)) -> str:
        layouts = [Layout.of(torch.zeros(shape))] * 2
        return register(Program(fx.symbolic_trace(body), layouts, 1, 1, length, modes.autocast_now(), [0]))

    first = key(lambda c, row: [c + row, c * 2])
    assert first == key(lambda c, row: [c + row, c * 2])
    others = [
        key(lambda c, row: [c + row, c * 3]),
        key(lambda c, row: [c - row, c * 2]),
        key(lambda c, row: [c + row, c * 2], length=5),
        key(lambda c, row: [c + row, c * 2], shape=(4,)),
    ]
    assert len({first, *others}) == 5


def test_second_derivatives_are_refused_not_wrong():
    torch._dynamo.reset()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.eye(3, dtype=torch.float64)
    fast = nsa_compile.compile(lambda x: delta_rule(x, w, None)[1], nested="eager", cache=False)
    (gradient,) = torch.autograd.grad(fast(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        gradient.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="no second derivatives"):  # which looks for one input alone
        torch.autograd.grad(gradient.sum(), x)
