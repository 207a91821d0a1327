"""lower_attention: choose an operator for each attention node.

After batch_prefill a graph holds `nsa_compile.attention` and `nsa_compile.select_blocks` nodes over whole sequences.
Each becomes one of

- `window_attention`, `compressed_attention` (with the selection it feeds, in one go) or `selected_attention` of
  `nsa_compile.ops`, whose cost follows the mask;
- dense attention with a mask, where that is faster: below a measured size, or for masks of no such kind.

Attention of one query on indices, in a step by itself or in the body of a scan that stays a loop, gathers the rows it
reads, and only these.

Which one is faster is decided by the number of keys each of them touches and by what a key costs, as measured
(`operator_costs.json`; `benchmarks/operator_costs.py` measures it anew).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from nsa_compile.branches import BRANCH_OF
from nsa_compile.ops import cpp, flops
from nsa_compile.ops.compressed import compressed_attention
from nsa_compile.ops.selected import selected_attention
from nsa_compile.ops.window import window_attention
from nsa_compile.passes import attention as nodes
from nsa_compile.passes.markers import label_of, set_label
from nsa_compile.passes.pipeline import PassContext, register
from nsa_compile.passes.report import AttentionChoice
from nsa_compile.passes.rewriting import eliminate_dead_code, inline_tensors
from nsa_compile.passes.scans import (
    aten,
    example,
    fake_inputs,
    find_scans,
    location,
    reshape_views,
    subgraphs,
    trace_to_aten,
)

ATTENTION = nodes.attention._opoverload
SELECT = nodes.select_blocks._opoverload
# What batch_prefill puts between the two.
LAYOUT = {aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim}


@register("lower_attention")
def lower_attention(gm: fx.GraphModule, context: PassContext) -> bool:
    """Choose an operator for each attention node, by its mask, device, dtype and size."""
    changed = _drop_needless_indices(gm, context)
    bodies = [site.body for site in find_scans(gm)]
    replaced: set[fx.Node] = set()
    for graph, in_loop in [*((g, False) for g in subgraphs(gm)), *((body, True) for body in bodies)]:
        for node in list(graph.graph.nodes):
            if node.target not in (ATTENTION, SELECT) or node in replaced or not context.may_rewrite():
                continue
            if in_loop:
                name, fn, group = "a step of a loop", _one_query(node), [node]
            else:
                name, fn, group = choose(node, context.options.attention)
            # An attention and the selection from its weights, in whatever order, belong to the attention.
            label = _range_of(next((n for n in group if n.target is ATTENTION), group[0]))
            for member in group:
                set_label(member, label)
            where, what = location(node), " and ".join(_describe(n) for n in group)
            context.report.attention.append(AttentionChoice(_branch_of(group), what, name))
            _replace(graph, group, fn)
            replaced.update(group)
            reshape_views(graph)  # its result may have other strides
            context.match(where, f"{what}: {name}")
            changed = True
    return changed


def _drop_needless_indices(gm: fx.GraphModule, context: PassContext) -> bool:
    """Where a query may take as many blocks as there are, it takes all it is allowed: the indices narrow nothing."""
    changed = False
    for graph in subgraphs(gm):
        dropped = False
        for node in graph.graph.find_nodes(op="call_function", target=ATTENTION):
            indices = node.args[4]
            while indices is not None and indices.target in LAYOUT:
                indices = indices.args[0]
            if indices is None or indices.target is not SELECT or node.args[3] is not None:
                continue
            blocks, selected = indices.args[8], indices.args[11]
            causal = node.args[6] == "window" and node.args[7][0] >= example(node.args[0]).shape[1]
            if selected >= blocks and causal and context.may_rewrite():
                context.match(location(node), f"all {blocks} blocks are selected: no indices")
                set_label(node, _range_of(node))  # of the selected branch all the same
                node.update_arg(4, None)
                dropped = True
        if dropped:
            eliminate_dead_code(graph)  # the ranking, if nobody else reads it
        changed |= dropped
    return changed


def _range_of(node: fx.Node) -> str:
    """The named range of an attention or a selection."""
    if (known := label_of(node)) is not None:
        return known
    if node.target is SELECT:
        return "nsa.sel"
    if node.args[4] is not None:
        return "nsa.sel.ranges_v2"
    return {"blocks": "nsa.cmp", "window": "nsa.win"}.get(node.args[6], "nsa.attention")


def _branch_of(group: list[fx.Node]) -> str:
    """The branch of NSA that an attention, if there is one among these nodes, or else a selection belongs to."""
    attention = next((node for node in group if node.target is ATTENTION), None)
    return "selection" if attention is None else BRANCH_OF.get(_range_of(attention), "attention")


def _describe(node: fx.Node) -> str:
    q, k = (example(x).shape for x in node.args[:2])
    if node.target is SELECT:
        return f"selection of {node.args[11]} of {node.args[8]} blocks for {q[1]} queries"
    kind, params = node.args[6:8]
    masks = {"window": "window of {}", "blocks": "blocks of {}, stride {}", "all": "no mask", "opaque": "opaque mask"}
    chosen = "" if node.args[4] is None else f", {example(node.args[4]).shape[-1]} selected blocks of {node.args[8]}"
    return f"attention of {q[1]} queries to {k[1]} keys ({masks[kind].format(*params)}{chosen})"


# -- the choice

Choice = tuple[str, Callable[..., Any], list[fx.Node]]


def choose(node: fx.Node, wish: str) -> Choice:
    """An implementation for a node over a whole sequence: its name, its function, and the nodes it stands for."""
    if node.target is SELECT:
        partner = next((n for n in node.args[0].users if _same_scores(n, node)), None)
        return _compressed(node, partner) if _prefers_sparse(node, wish) else _dense(node)
    _, _, _, mask, indices, _, kind, params, _ = node.args
    if indices is not None and example(node.args[0]).shape[1] == 1:
        return "rows of the selected blocks", _one_query(node), [node]
    if mask is not None or kind in ("opaque", "all") or not _prefers_sparse(node, wish):
        return _dense(node)
    queries = example(node.args[0]).shape[1]
    if indices is not None:
        return _selected(node) if kind == "window" and params[0] >= queries else _dense(node)
    if kind == "blocks":
        partner = next((n for n in node.args[0].users if n.target is SELECT and _same_scores(node, n)), None)
        return _compressed(partner, node)
    return _window(node)


def _same_scores(attention: fx.Node, selection: fx.Node) -> bool:
    """Whether an attention has the scores that a selection ranks."""
    if attention.target is not ATTENTION or attention.args[3] is not None or attention.args[4] is not None:
        return False
    return attention.args[:2] == selection.args[:2] and (attention.args[5], *attention.args[6:8]) == (
        selection.args[5], "blocks", selection.args[6],
    )  # fmt: skip


@cache
def _costs() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "operator_costs.json").read_text())


def _prefers_sparse(node: fx.Node, wish: str) -> bool:
    """Whether the operator that follows the mask is faster than dense attention, or asked for."""
    if node.target is SELECT and node.args[2] is not None:
        return False
    if len({example(x).dtype for x in node.args[: 2 if node.target is SELECT else 3]}) > 1:
        return False  # the operators want one dtype
    if wish != "auto":
        return wish == "sparse"
    q, k = (example(x) for x in node.args[:2])
    queries, keys = q.shape[1], k.shape[1]
    if node.target is SELECT or node.args[6] == "blocks":
        params = node.args[6] if node.target is SELECT else node.args[7]
        operator, pairs = "compressed", flops.compressed_pairs(queries, keys, *params)
    elif node.args[4] is not None:
        size = example(node.args[4]).shape[-1] * node.args[8]
        operator, pairs = "selected", flops.window_pairs(queries, keys, size)
    else:
        operator, pairs = "window", flops.window_pairs(queries, keys, node.args[7][0])
    costs = _costs().get(_machine(q.device.type), UNMEASURED)
    if node.target is SELECT or not _fits_sdpa(node):
        dense = "dense_scores"
    else:
        dense = "dense_causal" if node.args[7][0] >= queries == keys else "dense"

    def cost(name: str, pairs: int) -> float:
        return costs[name]["per_query"] * queries + costs[name]["per_pair"] * pairs

    return cost(operator, pairs) < cost(dense, queries * keys)


def _machine(device: str) -> str:
    """Whose costs to go by."""
    return "vectors" if device == "cpu" and not cpp.has_matrix_unit() else device


# Of a device on which `benchmarks/operator_costs.py` has not run, in units of a pair of flash attention: an operator
# that follows its mask is taken to get half the rate of flash, which skips half of the pairs where the mask is causal
# and takes no other mask; scores that go through memory are slower yet.
UNMEASURED = {
    name: {"per_query": 0.0, "per_pair": pairs}
    for name, pairs in {
        "window": 2.0, "compressed": 2.0, "selected": 2.0, "dense_causal": 0.5, "dense": 1.5, "dense_scores": 4.0,
    }.items()
}  # fmt: skip


# -- the implementations, on `q [N, S, m, D]`, `k [N, T, D]`, `v [N, T, Dv]`


def _window(node: fx.Node) -> Choice:
    scale, window = node.args[5], node.args[7][0]

    def fn(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [window_attention(q, k.unsqueeze(2), v.unsqueeze(2), window, scale)[0]]

    return "window_attention", fn, [node]


def _selected(node: fx.Node) -> Choice:
    scale, block = node.args[5], node.args[8]

    def fn(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> list[Tensor]:
        return [selected_attention(q, k.unsqueeze(2), v.unsqueeze(2), indices.unsqueeze(2), block, scale)[0]]

    return "selected_attention", fn, [node]


def _compressed(selection: fx.Node | None, attention: fx.Node | None) -> Choice:
    """Attention to compressed blocks, the selection from its weights, or both in one."""
    ranking: list[Any] = [1, [], [], 0, 0, 0]
    params: Any
    if selection is not None:
        scale, params, select_block, _, offsets, factors, *counts = selection.args[5:]
        ranking = [select_block, offsets, factors, *counts]
    else:
        assert attention is not None
        scale, params = attention.args[5], attention.args[7]
    block, stride = params

    def fn(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, _, indices = compressed_attention(q, k.unsqueeze(2), v.unsqueeze(2), block, stride, scale, *ranking)
        found = [out] if attention is not None else []
        return found + ([indices.squeeze(2)] if selection is not None else [])

    group = [n for n in (attention, selection) if n is not None]
    name = "compressed_attention" + (" with selection" if selection is not None else "")
    if attention is None:
        return name, lambda q, k: fn(q, k, k), group  # nobody reads the output
    return name, fn, group


def _dense(node: fx.Node) -> Choice:
    """Dense attention; SDPA where the mask allows it to be used."""
    rest = node.args[5:]
    if node.target is SELECT:
        return "dense scores", lambda *tensors: [nodes.rank_blocks(*_refill(node, tensors), *rest)], [node]
    scale, kind, params, block = rest

    def fn(*tensors: Tensor) -> list[Tensor]:
        q, k, v, mask, indices = _refill(node, tensors)
        if not _fits_sdpa(node):
            return [nodes.dense(q, k, v, mask, indices, scale, kind, params, block)]
        if params[0] >= q.shape[1] == k.shape[1]:
            return [_sdpa(q, k, v, None, scale, is_causal=True)]
        keep = nodes.keep_mask(q, k, mask, indices, kind, params, block)
        return [_sdpa(q, k, v, keep, scale, is_causal=False)]

    return "dense", fn, [node]


def _fits_sdpa(node: fx.Node) -> bool:
    """A row that sees nothing would be NaN; each query sees at least itself through a window. SDPA wants one dtype.

    In low precision SDPA may be taken apart into float32 products, which an ambient autocast would round again.
    """
    q, k, v = (example(x) for x in node.args[:3])
    by_window = node.args[6] == "window" and node.args[3] is None and node.args[4] is None
    precise = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.float64)
    return by_window and k.shape[1] >= q.shape[1] and precise


def _sdpa(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, scale: float, *, is_causal: bool) -> Tensor:
    heads = q.shape[2]
    k, v = (x.unsqueeze(1).expand(-1, heads, -1, -1) for x in (k, v))
    keep = None if keep is None else keep.transpose(1, 2)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=keep, is_causal=is_causal, scale=scale)
    return out.transpose(1, 2)


def _one_query(node: fx.Node) -> Callable[..., Any]:
    """One step: dense, or over the rows of the selected blocks alone."""
    rest = node.args[5:]
    if node.target is SELECT:
        return lambda *tensors: [nodes.rank_blocks(*_refill(node, tensors), *rest)]
    step = nodes.dense if node.args[4] is None else nodes.gathered
    return lambda *tensors: [step(*_refill(node, tensors), *rest)]


def _refill(node: fx.Node, tensors: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The tensor arguments of a node, with None where it has none."""
    given = iter(tensors)
    return [next(given) if isinstance(x, fx.Node) else None for x in node.args[:5]]


def _replace(graph: fx.GraphModule, group: list[fx.Node], fn: Callable[..., Any]) -> None:
    # An attention and the selection from its weights read the same queries and keys; the attention reads values, too.
    inputs = [x for x in group[0].args[:5] if isinstance(x, fx.Node)]
    traced = trace_to_aten(fn, fake_inputs(inputs), decompose_sdpa=False)
    inline_tensors(graph, group, traced, inputs)
