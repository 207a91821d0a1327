"""lower_attention: which operator an attention node becomes, what it then costs, and the nodes themselves."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch.utils import _pytree as pytree

import nsa_compile
from nsa_compile.analyses import attention_costs
from nsa_compile.ir import attention as nodes
from nsa_compile.ir.aten import aten
from nsa_compile.ir.scans import example, find_scans
from nsa_compile.models import SparsePattern, nsa_attention
from nsa_compile.ops import cpp
from nsa_compile.passes.pipeline import Options, run_pipeline
from nsa_compile.passes.report import Report
from nsa_compile.scanning import scan as nsa_scan
from nsa_compile.verification.oracle import importance, select
from tests.attention_programs import (
    AttentionProgram,
    assert_equals_loop,
    attention,
    entry,
    fused,
    raised,
    run_compiled,
    selection,
    together,
)

LOWEST = "s.masked_fill(~keep, torch.finfo(s.dtype).min)"


class Captured(Exception):
    """Ends a compilation before anything is executed."""


def capture(fn, args, **options) -> tuple[fx.GraphModule, list[Tensor], Report]:
    """The graph after the passes, its inputs, and the report."""
    found = []

    def backend(gm, inputs):
        found.extend([gm, inputs, run_pipeline(gm, Options(**options))])
        raise Captured

    torch._dynamo.reset()
    with pytest.raises(Exception, match="Captured"):
        torch.compile(fn, backend=backend, fullgraph=True, dynamic=False)(*args)
    return tuple(found)


def chosen(report: Report) -> list[str]:
    """What each attention node became."""
    return [match.rpartition(": ")[2] for match in entry(report, "lower_attention").matches]


# ------------------------------------------------------------------------------------------------------------ choices


KINDS = {
    "window_attention": attention(keep="(position <= t) & (position > t - 3)"),
    "compressed_attention": attention(keep="position * 2 + 1 <= t", masked=LOWEST),
    "scored_attention, opaque": attention(keep="(position <= t) & (position % 2 == 0)", masked=LOWEST),
    "scored_attention, by data": attention(keep='(position <= t) & (x["m"] > 0)', masked=LOWEST, data=(2, 2, 1)),
    "dense, everything": attention(keep=None),
}


@pytest.mark.deep(but=["sparse"])
@pytest.mark.parametrize("wish", ["sparse", "dense"])
def test_the_operator_follows_the_mask(wish):
    program = together([AttentionProgram(**{**vars(p), "outside": True}) for p in KINDS.values()])
    actual, report = run_compiled(program, attention=wish)
    assert sorted(chosen(report)) == sorted(name.split(",")[0] if wish == "sparse" else "dense" for name in KINDS)
    assert_equals_loop(program, actual)


SELECTED = {
    "compressed_attention with selection, selected_attention": selection(),
    "compressed_attention with selection, dense": selection(
        keep="(tokens & (position <= t) & (position > t - 9))[:, :, None]"
    ),
    "compressed_attention, selected_attention": selection(mass="pc.amax(2)"),
}


@pytest.mark.deep
@pytest.mark.parametrize("names", SELECTED)
def test_selection_is_computed_with_its_attention(names):
    program = SELECTED[names]
    actual, report = run_compiled(program, attention="sparse")
    assert sorted(chosen(report)) == sorted(names.split(", "))
    assert_equals_loop(program, actual)
    _, report = run_compiled(program, attention="dense")
    assert set(chosen(report)) <= {"dense", "dense scores"}


def test_values_of_another_dtype_are_left_to_dense_attention():
    low = {"dtype": torch.float32, "soft": torch.float32}
    program = attention(out="p.double() @ v.double().transpose(1, 2)", **low)
    actual, report = run_compiled(program, attention="sparse")
    assert chosen(report) in ([], ["dense"])
    assert_equals_loop(program, actual)


@pytest.mark.deep(but=["1000.0-dense"])
@pytest.mark.parametrize(("cost", "expected"), [(1e-3, "window_attention"), (1e3, "dense")])
def test_auto_asks_the_measured_costs(cost, expected, monkeypatch):
    per_pair = dict.fromkeys(("dense", "dense_causal", "dense_scores"), 1.0)
    per_pair |= dict.fromkeys(("window", "compressed", "selected"), cost)
    costs = {operator: {"per_pair": price, "per_query": 0.0} for operator, price in per_pair.items()}
    monkeypatch.setattr(attention_costs, "costs", lambda: {"cpu": costs, "vectors": costs})
    program = KINDS["window_attention"]
    actual, report = run_compiled(program, attention="auto")
    assert chosen(report) == [expected]
    assert_equals_loop(program, actual)


def test_costs_are_those_of_the_machine(monkeypatch):
    for has_matrix_unit, machine in ((True, "cpu"), (False, "vectors")):
        monkeypatch.setattr(cpp, "has_matrix_unit", lambda has=has_matrix_unit: has)
        assert attention_costs.machine("cpu") == machine
    assert attention_costs.machine("cuda") == "cuda"
    operators = {"dense", "dense_causal", "dense_scores", "window", "compressed", "selected"}
    assert all(operators <= set(attention_costs.costs()[machine]) for machine in ("cpu", "vectors"))
    assert operators <= set(attention_costs.costs().get("cuda", attention_costs.UNMEASURED))


class SomeSteps(AttentionProgram):
    """Attention that only some steps keep: as many queries as keys, and not at the positions of the keys."""

    source = """
def run(scan, init, xs, w):
    def step(kept, x):
        t, q, position = x["t"], x["q"], torch.arange(3)
        k, v = w[..., :3], w[..., 3:]
        s = torch.einsum("bghd,btgd->bght", q, k)
        p = torch.softmax(s.masked_fill(position > t, -inf), -1)
        o = torch.einsum("bght,btgd->bghd", p, v)
        last = (position * 2 + 1)[:, None, None, None, None]
        kept = torch.where(last == t, o[None], kept)
        return kept, torch.where(last <= t, kept, 0.0).sum(0)

    return scan(step, w.new_zeros(3, 2, 2, 2, 2), {"t": torch.arange(6), **xs})[1]
"""


@pytest.mark.deep(but=["dense"])
@pytest.mark.parametrize("wish", ["sparse", "dense"])
def test_queries_of_some_steps_keep_their_positions(wish):
    program = SomeSteps("tokens", (), rows=3)
    actual, report = run_compiled(program, attention=wish)
    assert raised(report) == ["attention to a window of 6"]
    assert report.scans[0].batched
    assert_equals_loop(program, actual)


# ---------------------------------------------------------------------------------------------------------- structure

S, PATTERN = 4096, SparsePattern(32, 16, 64, 16, 512)


def nsa_inputs(length: int) -> tuple[Tensor, ...]:
    """q, keys and values of three branches, gates: uninitialised, for nothing runs."""
    kv = [torch.empty(1, length, 2, 16, requires_grad=True) for _ in range(6)]
    q, gates = torch.empty(1, length, 4, 16, requires_grad=True), torch.empty(1, length, 4, 3, requires_grad=True)
    return (q, *kv, gates)


def nsa(*tensors: Tensor) -> Tensor:
    return nsa_attention(*tensors, pattern=PATTERN)


def largest(graph: fx.Graph) -> tuple[int, str]:
    """The number of elements of the largest tensor of a graph, and the node it belongs to."""
    sizes = [(0, "")]
    for node in graph.nodes:
        values = pytree.tree_leaves(node.meta.get("val", node.meta.get("example_value")))
        assert values or node.op in ("output", "get_attr"), node.format_node()
        sizes += [(x.numel(), f"{node.format_node()} {list(x.shape)}") for x in values if isinstance(x, Tensor)]
    return max(sizes)


@pytest.fixture(scope="module")
def whole_nsa():
    return capture(nsa, nsa_inputs(S), attention="sparse")


@pytest.mark.deep
def test_nothing_quadratic_is_left_of_native_sparse_attention(whole_nsa):
    gm, _, report = whole_nsa
    assert raised(report) == [
        "attention to blocks of 32 with stride 16, once they are complete",
        f"attention to a window of {S} and a mask that depends on data",
        "attention to a window of 512",
    ]
    assert fused(report) == ["importance, ranking and mask of blocks of 64"]
    names = ["compressed_attention with selection", "selected_attention", "window_attention"]
    assert sorted(chosen(report)) == sorted(names)
    assert not find_scans(gm)
    size, where = largest(gm.graph)
    assert size < S * (S // PATTERN.compress_stride - 1), where


@pytest.mark.deep
def test_nothing_quadratic_in_both_graphs_of_autograd(whole_nsa):
    gm, inputs, _ = whole_nsa
    graphs = []

    def record(graph, _):
        graphs.append(graph)
        return graph

    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        aot_autograd(fw_compiler=record, bw_compiler=record)(gm, inputs)
    assert len(graphs) == 2, "one forward, one backward"
    for graph in graphs:
        size, where = largest(graph.graph)
        assert size < S * (S // PATTERN.compress_stride - 1), where
    names = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    for branch in ("compressed", "selected", "window"):
        assert f"nsa_compile.{branch}_attention.default" in names
        assert f"nsa_compile.{branch}_attention_backward.default" in names


@pytest.mark.deep
def test_dense_attention_is_quadratic():
    """What the two tests above would see."""
    gm, _, _ = capture(nsa, nsa_inputs(768), attention="dense")
    size, _ = largest(gm.graph)
    assert size >= 768 * 768


@pytest.mark.deep
def test_a_step_of_a_loop_reads_the_selected_rows_alone():
    program = selection(S=26, block=4, n=3)
    run, *args = program.build()
    run_step = lambda *inputs: run(nsa_scan, *inputs)  # noqa: E731
    gm, _, report = capture(run_step, args, disable=["batch_prefill"])
    assert fused(report) == ["importance, ranking and mask of blocks of 4"]
    assert set(chosen(report)) == {"a step of a loop"}
    (site,) = find_scans(gm)
    products = [n for n in site.body.graph.nodes if n.target in (aten.bmm.default, aten.mm.default)]
    shapes = [tuple(example(x).shape) for n in products for x in (n, *n.all_input_nodes)]
    assert len(products) >= 4
    assert not any(26 in shape for shape in shapes), shapes
    assert any(shape[-1] == 3 * 4 for shape in shapes)

    gm, _, _ = capture(run_step, args, disable=["batch_prefill", "fuse_selection_scatter"])
    (site,) = find_scans(gm)
    assert any(26 in example(n).shape for n in site.body.graph.nodes if n.target is aten.bmm.default)


# ---------------------------------------------------------------------------------------------------------- the nodes


# From which position on each key is there, and for how long: (first key, position, positions per key, how many).
RUNS = [0, 0, 1, -1], [0, 1, 2, -1], [0, 0, 1, 2], [0, 0, 0, -1, 1, 0, 1, 3, 4, 9, 0, 1]


def is_there(key: int, position: int, runs: list[int]) -> bool:
    first, start, stride, count = next(runs[i : i + 4] for i in range(len(runs) - 4, -1, -4) if runs[i] <= key)
    start += stride * (key - first)
    return position >= start and (count < 0 or position < start + count)


@st.composite
def node_arguments(draw, kinds=("window", "blocks", "all", "opaque")) -> tuple:
    """Arguments of `nodes.attention`, float64 leaves."""

    def pick(*choices):
        return draw(st.sampled_from(choices))

    N, S, m, D, Dv = pick(1, 2), pick(1, 2, 7), pick(1, 2), pick(1, 3), pick(1, 2)
    kind = pick(*kinds)
    T = pick(S, 5)
    params = {"window": [pick(1, 3, 99)], "blocks": [pick(1, 2, 4), pick(1, 2)]}.get(kind, [])
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()

    mask = torch.rand(pick(1, N), pick(1, S), pick(1, m), T, generator=rng) < 0.6
    block = pick(1, 2, 3)
    indices = torch.rand(N, S, -(-T // block), generator=rng).argsort(-1)[..., : pick(1, 2)]
    indices = torch.where(torch.rand(indices.shape, generator=rng) < 0.3, -1, indices)
    mask = mask if kind == "opaque" else None
    tensors = leaf(N, S, m, D), leaf(N, T, D), leaf(N, T, Dv), mask, pick(None, indices)
    return *tensors, 0.7, kind, params, block, pick([], [], *RUNS)


call = nodes.AttentionCall.from_args


def one_by_one(q, k, v, mask, indices, scale, kind, params, block, nan_from) -> Tensor:
    """Attention, query by query and key by key."""
    out = []
    for n, s, m in ((n, s, m) for n in range(q.shape[0]) for s in range(q.shape[1]) for m in range(q.shape[2])):
        seen = []
        for p in range(k.shape[1]):
            keep = {
                "window": lambda p=p, s=s: s - params[0] < p <= s,
                "blocks": lambda p=p, s=s: p * params[1] + params[0] - 1 <= s,
                "all": lambda: True,
                "opaque": lambda n=n, s=s, m=m, p=p: bool(mask.expand(*q.shape[:3], -1)[n, s, m, p]),
            }[kind]()
            if keep and (indices is None or p // block in indices[n, s].tolist()):
                seen.append(p)
        weights = torch.softmax(scale * k[n, seen] @ q[n, s, m], 0)
        if seen or not nan_from:
            out.append(weights @ v[n, seen] if seen else torch.zeros_like(v[n, 0]))
        else:
            there = [p for p in range(k.shape[1]) if is_there(p, s, nan_from)]
            out.append(torch.full_like(v[n, 0], torch.nan) + (v[n, there] * torch.nan).sum(0))
    return torch.stack(out).reshape(*q.shape[:3], v.shape[-1])


@given(arguments=node_arguments())
def test_the_node_is_attention_in_values_and_gradients(arguments):
    leaves = arguments[:3]
    results = []
    for fn in (nodes.attention, lambda *args: nodes.dense(call(*args)), one_by_one):
        out = fn(*arguments)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=out.dtype)
        loss = (out * weight).sum() + sum(0.0 * x.sum() for x in leaves)
        results.append((out.detach(), torch.autograd.grad(loss, leaves)))
    for other in results[:2]:
        torch.testing.assert_close(other, results[2], rtol=1e-10, atol=1e-12, equal_nan=True)


@given(arguments=node_arguments(kinds=("all", "opaque")))
def test_gathered_rows_are_enough(arguments):
    q, k, v, mask, indices, *rest = arguments
    if indices is None:
        return
    q, indices = q[:, :1], indices[:, :1]
    mask = None if mask is None else mask[:, :1]
    *rest, nan_from = rest
    given = call(q, k, v, mask, indices, *rest, [0, 0, 0, -1] if nan_from else [])
    actual, expected = nodes.gathered(given), nodes.dense(given)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
    grads = [torch.autograd.grad(out.square().sum(), (k, v)) for out in (actual, expected)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-12, equal_nan=True)


def example_arguments(
    kind: str,
    params: list[int],
    *,
    mask: bool = False,
    indices: bool = False,
    nan_from: list[int] | None = None,
) -> tuple:
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(s, generator=rng, requires_grad=True) for s in ((2, 5, 2, 3), (2, 5, 3), (2, 5, 4)))
    given_mask = (torch.rand(2, 5, 1, 5, generator=rng) < 0.6) if mask else None
    given_indices = torch.tensor([[[0, -1], [1, 0], [0, 2], [2, 1], [-1, -1]]] * 2) if indices else None
    return q, k, v, given_mask, given_indices, 0.5, kind, params, 2, nan_from or []


@pytest.mark.deep(but=["nan"])
@pytest.mark.parametrize(
    "arguments",
    [
        example_arguments("window", [2]),
        example_arguments("blocks", [2, 2]),
        example_arguments("opaque", [], mask=True),
        example_arguments("window", [5], indices=True),
        example_arguments("window", [5], mask=True, nan_from=RUNS[2]),
    ],
    ids=["window", "blocks", "opaque", "indices", "nan"],
)
def test_registration_of_attention(arguments):
    torch.library.opcheck(nodes.attention._opoverload, arguments)


def test_registration_of_nan_rows():
    out, v = torch.randn(2, 5, 2, 3, requires_grad=True), torch.randn(2, 6, 3, requires_grad=True)
    none = torch.zeros(2, 5, 1, dtype=torch.bool)
    torch.library.opcheck(nodes.nan_rows._opoverload, (out, none, v, [0, 0, 1, -1]))


RANKING = (0.5, [4, 2], 4, 3, [-1, 0, 1], [1, 2, 1], 2, 1, 1)


@pytest.mark.parametrize("with_masks", [False, True])
def test_registration_of_select_blocks(with_masks):
    q, k = torch.randn(2, 10, 2, 3), torch.randn(2, 4, 3)
    masks = (torch.rand(1, 10, 1, 4) < 0.7, torch.rand(1, 10, 3) < 0.7, torch.rand(1, 10, 3) < 0.3)
    torch.library.opcheck(
        nodes.select_blocks._opoverload, (q, k, *(masks if with_masks else (None, None, None)), *RANKING)
    )


@given(
    seed=st.integers(0, 2**16),
    d=st.sampled_from([1, 2]),
    ratio=st.sampled_from([1, 2]),
    n=st.integers(1, 5),
    initial=st.integers(0, 2),
    local=st.integers(1, 2),
)
def test_blocks_are_ranked_as_on_paper(seed, d, ratio, n, initial, local):
    rng = torch.Generator().manual_seed(seed)
    S, l, block = 13, 2 * d, ratio * d  # noqa: E741
    keys, blocks = (S - l) // d + 1, -(-S // block)
    q, k = torch.randn(1, S, 2, 3, generator=rng).double(), torch.randn(1, keys, 3, generator=rng).double()
    offsets = sorted({i - j for i in range(ratio) for j in range(2)})
    factors = [sum(i - j == o for i in range(ratio) for j in range(2)) for o in offsets]
    actual = nodes.select_blocks(
        q, k, None, None, None, 0.5, [l, d], block, blocks, offsets, factors, n, initial, local
    )
    assert actual.shape == (1, S, n)
    for t in range(S):
        visible = torch.arange(keys) * d + l - 1 <= t
        weights = torch.zeros(2, keys, dtype=torch.float64)
        if visible.any():
            weights = torch.softmax((q[0, t] @ k[0].T * 0.5).masked_fill(~visible, -math.inf), -1)
        scores = importance(weights, blocks, l, d, block, "minus")
        expected = select(scores.tolist(), t, block, n, initial, local)
        assert sorted(i for i in actual[0, t].tolist() if i >= 0) == expected


@pytest.mark.deep(but=["dense"])
@pytest.mark.parametrize("attention_is", ["dense", "sparse"])
def test_one_query_for_all_steps(attention_is):
    """torch's SDPA for the CPU writes beside its output where a query is repeated, one head of an odd width."""
    n, d = 6, 3

    def pooled(query, rows):
        def step(carry, row):
            cache, t = carry
            cache = torch.where((torch.arange(n) == t)[:, None], row, cache)
            scores = (cache @ query).masked_fill(torch.arange(n) > t, -torch.inf)
            return (cache, t + 1), scores.softmax(0) @ cache

        return nsa_scan(step, (torch.zeros(n, d), torch.tensor(0)), rows)[1]

    def yields(run):
        query, rows = (torch.randn(size, generator=torch.manual_seed(0)).requires_grad_() for size in ((d,), (n, d)))
        out = run(query, rows)
        return out, *torch.autograd.grad(out.square().sum(), (query, rows))

    compiled = nsa_compile.compile(pooled, nested="aot_eager", attention=attention_is, cache=False)
    torch.testing.assert_close(yields(compiled), yields(pooled))
    assert nsa_compile.last_report().scans[0].batched
