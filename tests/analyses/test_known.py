"""Values known before the program runs, against the program run step by step."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, note
from hypothesis import strategies as st
from torch import Tensor, fx

from nsa_compile.analyses import known
from nsa_compile.ir.lowering import trace_to_aten
from nsa_compile.ir.scans import ScanRecord, example
from nsa_compile.ir.step_values import Choice, Separable, StepMask, Table

INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Where integers wrap around, and floats lose count.
ENDS = [0, 1, -1, 127, 128, 255, 256, 2049, 2**31, -(2**63), 2**63 - 1]
DTYPES = [*INTEGERS, torch.bool, *FLOATS]


def evaluated(fn, steps: list[Tensor]) -> tuple[fx.GraphModule, ScanRecord]:
    """The graph of `fn(t)` and what is known of it when t is a value of each of `steps`."""
    graph = trace_to_aten(torch.func.functionalize(fn, remove="mutations"), [steps[0]])
    record = ScanRecord("scan", len(steps))
    (t,) = graph.graph.find_nodes(op="placeholder")
    record.known[t] = Table(torch.stack(steps))
    with torch.no_grad():
        for node in graph.graph.nodes:
            known._evaluate(node, record)
    return graph, record


class Values(fx.Interpreter):
    """Keeps the value of each node of one run."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.of: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Tensor:
        self.of[n] = super().run_node(n)
        return self.of[n]


def check(fn, steps: list[Tensor]) -> dict[fx.Node, type]:
    """Compare what is known of each node with the runs of all steps; the forms that were found."""
    graph, record = evaluated(fn, steps)
    runs = []
    for t in steps:
        values = Values(graph)
        with contextlib.suppress(
            RuntimeError, IndexError
        ):  # an integer divided by 0, say: what comes next has no value
            values.run(t)
        runs.append(values.of)
    for node in graph.graph.nodes:
        if any(node not in run for run in runs):
            assert node not in record.known, f"{node.format_node()} raises"
        elif node in record.constant:
            assert record.constant[node].dtype == example(node).dtype
            for run in runs:
                assert_same(record.constant[node], run[node], node)
        elif node in record.known:
            value = record.known[node]
            assert value.shape == example(node).shape, node.format_node()
            table = value.table()
            assert table.shape[1:] == value.shape
            for row, run in zip(table, runs, strict=True):
                assert_same(row.to(run[node].dtype), run[node], node)
    return {node: type(value) for node, value in record.known.items()}


def assert_same(actual: Tensor, expected: Tensor, node: fx.Node) -> None:
    same = actual.shape == expected.shape and bool(
        ((actual == expected) | ((actual != actual) & (expected != expected))).all()
    )
    assert same, f"{node.format_node()}: {actual} is {expected}"


# -------------------------------------------------------------------------------------------- one operator at a time

BINARY = {
    **{op: getattr(torch, op) for op in ("lt", "le", "gt", "ge", "eq", "ne", "add", "sub", "mul", "remainder", "fmod")},
    **{op: getattr(torch, op) for op in ("div", "floor_divide", "maximum", "minimum", "bitwise_and", "bitwise_or")},
    **{op: getattr(torch, op) for op in ("bitwise_xor", "logical_and", "logical_or", "pow")},
    "add, alpha": lambda a, b: torch.add(a, b, alpha=3),
    "sub, alpha": lambda a, b: torch.sub(a, b, alpha=-2),
    "rsub": lambda a, b: torch.rsub(a, b),
    "div, floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "div, trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill": lambda a, b: torch.zeros_like(b).masked_fill(a != b, 1),
}
UNARY = {
    "not": lambda a: ~a,
    "logical_not": torch.logical_not,
    "neg": lambda a: -a,
    "abs": torch.abs,
    "clamp": lambda a: a.clamp(min=2),
    "clamp both": lambda a: a.clamp(-3, 4),
    "sum": lambda a: a.sum(-1, keepdim=True) if a.dim() else a.sum(),
    "cumsum": lambda a: a.cumsum(-1) if a.dim() else a,
    "any": lambda a: a.any(),
    "zeros_like": torch.zeros_like,
    "full_like": lambda a: torch.full_like(a, 1),
    "literal": lambda a: a == torch.tensor(3),
    **{f"to {dtype}": lambda a, dtype=dtype: a.to(dtype) for dtype in DTYPES},
    "flip": lambda a: a.flip(0) if a.dim() else a,
    "unsqueeze": lambda a: a.unsqueeze(0),
    "transpose": lambda a: a.transpose(0, -1) if a.dim() else a,
    "outer": lambda a: a.reshape(-1)[:, None] <= a.reshape(-1)[None, :4],
    "expand": lambda a: a.expand(2, *a.shape),
    "slice": lambda a: a[1:] if a.dim() else a,
    "empty": lambda a: a[:0] if a.dim() else a,
    "gather": lambda a: torch.gather(a, 0, a.long().clamp(0, max(a.shape[0] - 1, 0))) if a.dim() == 1 else a,
    "index": lambda a: a[torch.tensor([0, 0, 1])] if a.dim() and a.shape[0] > 1 else a,
    "roll": lambda a: a.roll(1, 0) if a.dim() else a,
    "0.1": lambda a: torch.zeros(a.shape, dtype=torch.float64).masked_fill(a != 0, 0.1) == 0.1,
}


@st.composite
def clocks(draw) -> list[Tensor]:
    """What a step finds in its input: a counter, or any number of any dtype."""
    dtype = draw(st.sampled_from([torch.int64] * 4 + DTYPES))
    S = draw(st.sampled_from([1, 2, 5]))
    kind = draw(st.sampled_from(["count"] * 3 + ["any", "wide"]))
    numbers = {
        "count": st.just(list(range(S))),
        "any": st.lists(st.integers(-3, 4), min_size=S, max_size=S),
        "wide": st.lists(st.sampled_from([*ENDS]), min_size=S, max_size=S),
    }[kind]
    return list(torch.tensor(draw(numbers)).to(dtype))


@st.composite
def programs(draw):
    """`fn(t)`: a few operators over t, constants and each other."""
    constants = [
        draw(
            st.sampled_from(
                [
                    torch.arange(6),
                    torch.arange(6)[:, None] - 2,
                    torch.arange(3, dtype=torch.int8) * 50,
                    torch.arange(4, dtype=torch.uint8) + 252,
                    torch.arange(5.0),
                    torch.arange(5, dtype=torch.float64) / 2,
                    torch.arange(4, dtype=torch.int32),
                    torch.tensor([[True], [False]]),
                    torch.tensor(3),
                    torch.tensor(200, dtype=torch.int16),
                    torch.tensor([], dtype=torch.int64),
                    torch.tensor([2**62, -(2**62), 1]),
                    torch.arange(5.0).half(),
                    torch.tensor([[5]]),
                ]
            )
        )
        for _ in range(2)
    ]
    numbers = st.sampled_from([0, 1, 2, -1, 3, 300, 2.5, 0.1, True, float("inf"), 2**40])
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from([*BINARY] * 2 + [*UNARY]),
                st.integers(0, 20),
                st.one_of(st.integers(0, 20), numbers.map(lambda x: [x])),
                st.booleans(),
            ),
            min_size=1,
            max_size=7,
        )
    )

    def fn(t):
        values = [t, torch.arange(6) - t.long(), *constants]
        for name, i, j, flip in steps:
            a = values[-1 - i % min(len(values), 3)] if i < 15 else values[i % len(values)]
            try:
                if name in UNARY:
                    values.append(UNARY[name](a))
                    continue
                b = j[0] if isinstance(j, list) else values[j % len(values)]
                pair = (b, a) if flip and isinstance(b, Tensor) else (a, b)
                values.append(BINARY[name](*pair))
            except (RuntimeError, TypeError, IndexError, OverflowError, NotImplementedError):
                continue  # torch has no such combination
        return values

    return fn, [s[0] for s in steps]


@given(programs(), clocks())
def test_what_is_known_is_what_the_loop_computes(program, steps):
    fn, names = program
    note(f"{names} {steps}")
    check(fn, steps)


# ------------------------------------------------------------------------------------------- forms, and their pitfalls

COUNT = [torch.tensor(t) for t in range(5)]
WIDE = [torch.tensor(t) for t in (-1, 0, 127, 128, 300)]
PITFALLS = {
    "compared where the narrower dtype wraps around": (lambda t: (torch.arange(3, dtype=torch.int8) * 40) < t, WIDE),
    "and from the other side": (lambda t: t >= torch.arange(250, 255).to(torch.uint8), WIDE),
    "a sum that wraps around": (lambda t: torch.arange(100, 104, dtype=torch.int8) + t.to(torch.int8), WIDE),
    "a sum that overflows the widest": (lambda t: torch.tensor([2**63 - 1, 0]) + t, COUNT),
    "a difference of far apart numbers": (lambda t: torch.tensor([2**63 - 1, -(2**63)]) < torch.arange(2) + t, COUNT),
    "a product that overflows": (lambda t: (torch.arange(3) + t) * 2**62, COUNT),
    "a factor with more dimensions": (lambda t: (torch.arange(3) - t) * torch.tensor([[2]]) == 2, COUNT),
    "a complex factor": (lambda t: (torch.arange(3) - t) * torch.tensor(1j), COUNT),
    "alpha": (lambda t: torch.add(torch.arange(3), t, alpha=2), COUNT),
    "indexed by itself": (lambda t: (lambda p: p.gather(0, p))(torch.tensor([0, 1, 0]) + t), COUNT[:2]),
    "a cast to booleans": (lambda t: (torch.arange(5) - t).bool(), COUNT),
    "a cast to floats and back": (lambda t: ((torch.arange(5) - t).half() * 3000).long(), COUNT),
    "a narrow table": (lambda t: ~(torch.arange(3, dtype=torch.uint8) + t.to(torch.uint8)) >> 1, COUNT),
    "0.1 is not the float32 next to it": (
        lambda t: torch.zeros(3, dtype=torch.float64).masked_fill(torch.arange(3) > t, 0.1) == 0.1,
        COUNT,
    ),
    "sides without dimensions": (
        lambda t: torch.where(torch.arange(3) > t, 0.1, 0.0) * torch.tensor(0.1, dtype=torch.float64) > 0.01,
        COUNT,
    ),
    "one number of half precision": (lambda t: t.half() * 0.1, COUNT),
    "a literal": (lambda t: torch.tensor([1, 2]) == t, COUNT),
    "a number that raises at one step": (lambda t: 4 // t, COUNT[::-1]),
    "an index out of range at one step": (lambda t: torch.arange(3).index_select(0, t[None]), COUNT),
    "no steps but one": (lambda t: (torch.arange(3) <= t) & ~(torch.arange(3) < t - 1), COUNT[:1]),
    "of no elements": (lambda t: (torch.arange(0) - t)[:, None].bool() & (torch.arange(3) > t), COUNT),
}


@pytest.mark.parametrize("name", PITFALLS)
def test_pitfalls(name):
    check(*PITFALLS[name])


def test_closed_forms_are_kept():
    """What people write for masks stays two numbers an element, however many steps there are."""

    def masks(t):
        p = torch.arange(6)
        keep = (p <= t) & (p > t - 3)
        bias = torch.zeros(6).masked_fill(~keep, float("-inf"))
        return p[:, None] - t, keep[None].expand(2, 6), bias + 1, (p - t).bool(), bias > -1

    forms = set(check(masks, COUNT).values())
    graph, record = evaluated(masks, COUNT)
    (outputs,) = graph.graph.output_node().args
    assert [type(record.known[x]) for x in outputs] == [Separable, StepMask, Choice, StepMask, StepMask]
    assert forms == {Separable, StepMask, Choice, Table}  # the table is t


def test_what_is_no_function_is_not_evaluated():
    """By torch's tags and schemas: random numbers, mutations, and operators of others, which may read anything."""
    drawn = [
        lambda t: torch.bernoulli(torch.full((3,), 0.5) + 0 * t),
        lambda t: torch.normal(torch.zeros(3) + t, 1.0),
        lambda t: torch.poisson(torch.ones(3) + t),
        lambda t: torch.multinomial(torch.ones(3) + t, 2),
        lambda t: torch.ones(3).exponential_() + t,
        lambda t: torch.randperm(3) + t,
        lambda t: torch.ops.nsa_test_known.reads_anything(t),
    ]
    for fn in drawn:
        graph, record = evaluated(fn, [torch.tensor(1.0), torch.tensor(2.0)])
        (output,) = graph.graph.output_node().args
        assert output not in record.known
        assert output not in record.constant


@torch.library.custom_op("nsa_test_known::reads_anything", mutates_args=())
def reads_anything(t: Tensor) -> Tensor:
    return t.clone()


@reads_anything.register_fake
def _(t: Tensor) -> Tensor:
    return torch.empty_like(t)
