"""lower_attention: choose an operator for each attention node.

After batch_prefill a graph holds `nsa_compile.attention` and `nsa_compile.select_blocks` nodes over whole sequences.
Each becomes one of

- `window_attention`, `compressed_attention` (with the selection it feeds, in one go) or `selected_attention` of
  `nsa_compile.ops`, whose cost follows the mask;
- dense attention with a mask, where that is faster: below a measured size, or for masks of no such kind.

Values summed by weights that are products alone, of earlier keys, are computed in chunks, as linear attention is.

Attention of one query, in a step by itself, reads the rows it needs where they lie, by `step_attention` on the CPU.
Where it has a gradient or another device, and in the body of a scan that stays a loop, it gathers the rows of its
indices.

`analyses/attention_costs.py` says which one is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from nsa_compile.analyses.attention_costs import (
    Call,
    fits_sdpa,
    is_causal,
    prefers_sparse,
    reads_in_place,
    selected_blocks,
)
from nsa_compile.analyses.linear_weights import running_sum
from nsa_compile.analyses.operands import by_group, rows_of, unexpanded
from nsa_compile.branches import BRANCH_OF
from nsa_compile.ir import attention as eager
from nsa_compile.ir.aten import aten
from nsa_compile.ir.attention import (
    ATTENTION,
    PLACES,
    SCORED,
    SELECT,
    WEIGHTED,
    All,
    AttentionCall,
    Blocks,
    Opaque,
    SelectCall,
    Window,
)
from nsa_compile.ir.lowering import reshape_views, trace_to_aten
from nsa_compile.ir.markers import label_of, set_label
from nsa_compile.ir.rewriting import eliminate_dead_code, inline_graph, inline_tensors
from nsa_compile.ir.scans import example, fake_inputs, find_scans, location, subgraphs
from nsa_compile.ops.compressed import compressed_attention
from nsa_compile.ops.recurrence import chunks
from nsa_compile.ops.scored import reference
from nsa_compile.ops.scored.program import parse
from nsa_compile.ops.selected import selected_attention
from nsa_compile.ops.step import step_attention
from nsa_compile.ops.window import window_attention
from nsa_compile.passes.pipeline import PassContext, register
from nsa_compile.passes.report import AttentionChoice

# What batch_prefill puts between a selection and the attention to what it selects.
LAYOUT = {aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim}


class Implementation(NamedTuple):
    """How to compute a node: a name for reports, the function, the nodes it stands for, and its inputs where they are
    others than those of the first node."""

    name: str
    run: Callable[..., list[Tensor]]
    nodes: list[fx.Node]
    inputs: list[fx.Node] | None = None


@register("lower_attention")
def lower_attention(gm: fx.GraphModule, context: PassContext) -> bool:
    """Choose an operator for each attention node, by its mask, device, dtype and size."""
    changed = _drop_needless_indices(gm, context)
    bodies = [site.body for site in find_scans(gm)]
    replaced: set[fx.Node] = set()
    for graph, in_loop in [*((g, False) for g in subgraphs(gm)), *((body, True) for body in bodies)]:
        for node in list(graph.graph.nodes):
            if node.target in _BY_PROGRAM and not in_loop:
                changed |= _by_program(graph, node, context)
                continue
            if node.target not in (ATTENTION, SELECT) or node in replaced or not context.may_rewrite():
                continue
            if in_loop:
                chosen = Implementation("a step of a loop", _one_query(call_of(node)), [node])
            else:
                chosen = choose(node, context.options.attention)
            group = chosen.nodes
            # An attention and the selection from its weights, in whatever order, belong to the attention.
            label = _range_of(next((n for n in group if n.target is ATTENTION), group[0]))
            for member in group:
                set_label(member, label)
            where, what = location(node), " and ".join(_describe(call_of(n)) for n in group)
            context.report.attention.append(AttentionChoice(_branch_of(group), what, chosen.name))
            _replace(graph, chosen)
            replaced.update(group)
            reshape_views(graph)  # its result may have other strides
            context.match(where, f"{what}: {chosen.name}")
            changed = True
    return changed


class _ByProgram(NamedTuple):
    """An operator that computes a program: its name, what its programs make, and how it is computed densely."""

    name: str
    made: str
    dense: Callable[..., Any]


_BY_PROGRAM: dict[Any, _ByProgram] = {
    SCORED: _ByProgram("scored_attention", "scores", lambda *given: reference.scored_attention(*given[:5])),
    WEIGHTED: _ByProgram("weighted_sum", "weights", lambda *given: [reference.weighted_sum(*given[:5])]),
    PLACES: _ByProgram(
        "scored_places", "scores", lambda q, k, xs, text, _, n: [reference.scored_places(q, k, xs, text, n)]
    ),
}


def _by_program(graph: fx.GraphModule, node: fx.Node, context: PassContext) -> bool:
    """Leave what is computed by a program to its operator, unless dense attention is asked for."""
    q, k, *others = cast(Any, node.args)
    queries, keys = example(q[0]).shape[1], example(k[0]).shape[1]
    program = next(x for x in others if isinstance(x, str))
    operator, dense = _BY_PROGRAM[node.target], context.options.attention == "dense"
    running = None
    if node.target is WEIGHTED and not dense and (context.options.attention == "sparse" or _is_long(q[0], others[0])):
        running = running_sum(node)
    name = "running sums in chunks" if running else "dense" if dense else operator.name
    where = location(node)
    does = "ranking" if node.target is PLACES else "attention"
    made = f"{operator.made} of {len(parse(program).instructions)} instructions"
    what = f"{does} of {queries} queries to {keys} keys ({made})"
    context.report.attention.append(AttentionChoice("attention", what, name))
    if not context.may_rewrite():
        return False
    if not dense and running is None:
        set_label(node, "nsa.attention")
        context.match(where, f"{what}: {name}")
        return True
    tensors = node.all_input_nodes
    if running is not None:
        tensors = [q[0], k[0], others[0], *([running.decay.base] if running.decay else [])]

    def run(*inputs: Tensor) -> list[Tensor]:
        if running is not None:
            return [_running_sums(running.factor, *inputs)]
        given: Any = fx.node.map_arg(node.args, dict(zip(tensors, inputs, strict=True)).__getitem__)
        return list(operator.dense(*given))

    inline_graph(graph, node, trace_to_aten(run, fake_inputs(tensors)), tensors)
    context.match(where, f"{what}: {name}")
    return True


def _is_long(q: fx.Node, v: fx.Node) -> bool:
    """Whether sums that run on cost less than the weights of all earlier keys."""
    keys, (width, values) = example(q).shape[1], (example(x).shape[-1] for x in (q, v))
    return keys * (width + values) > 2 * (chunks.CHUNK * (width + values) + 2 * width * values)


def _running_sums(factor: float, q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None = None) -> Tensor:
    """`Σ_{j <= i} factor decay ** (i - j) (q[i] · k[j]) v[j]` of `q [N, S, m, D]`, `k [N, S, D]`, `v [N, S, Dv]` and
    `decay [N|1, 1, m|1, 1]`."""
    q = q.transpose(0, 1)
    k, v = (x.transpose(0, 1).unsqueeze(2) for x in (k, v))
    states = 1 if decay is None else decay.shape[2]  # of a group of heads, which share one, or have one each
    first = q.new_zeros(q.shape[1], states, q.shape[3], v.shape[3])
    out, _ = chunks.linear(q, k, v, None if decay is None else decay.transpose(0, 1), None, first)
    return (out * factor).transpose(0, 1).to(v.dtype)


def call_of(node: fx.Node) -> Call:
    """The arguments of an attention node or a selection."""
    return AttentionCall.of(node) if node.target is ATTENTION else SelectCall.of(node)


def _drop_needless_indices(gm: fx.GraphModule, context: PassContext) -> bool:
    """Where a query may take as many blocks as there are, it takes all it is allowed: the indices narrow nothing."""
    changed = False
    for graph in subgraphs(gm):
        dropped = False
        for node in graph.graph.find_nodes(op="call_function", target=ATTENTION):
            call = AttentionCall.of(node)
            source: Any = call.indices
            while source is not None and source.target in LAYOUT:
                source = source.args[0]
            if source is None or source.target is not SELECT or call.mask is not None:
                continue
            selection = SelectCall.of(source)
            takes_all = selection.num_selected >= selection.num_blocks
            if takes_all and is_causal(call) and context.may_rewrite():
                context.match(location(node), f"all {selection.num_blocks} blocks are selected: no indices")
                set_label(node, _range_of(node))  # of the selected branch all the same
                node.args = replace(call, indices=None).args
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
    call = AttentionCall.of(node)
    if call.indices is not None:
        return "nsa.sel.ranges_v2"
    ranges: dict[type, str] = {Blocks: "nsa.cmp", Window: "nsa.win"}
    return ranges.get(type(call.kind), "nsa.attention")


def _branch_of(group: list[fx.Node]) -> str:
    """The branch of NSA that an attention, if there is one among these nodes, or else a selection belongs to."""
    attention = next((node for node in group if node.target is ATTENTION), None)
    return "selection" if attention is None else BRANCH_OF.get(_range_of(attention), "attention")


def _describe(call: Call) -> str:
    queries, keys = example(call.q).shape[1], example(call.k).shape[1]
    if isinstance(call, SelectCall):
        return f"selection of {call.num_selected} of {call.num_blocks} blocks for {queries} queries"
    blocks = "" if call.indices is None else f", {selected_blocks(call)} selected blocks of {call.select_block}"
    return f"attention of {queries} queries to {keys} keys ({call.kind}{blocks})"


# -- the choice


def choose(node: fx.Node, wish: str) -> Implementation:
    """An implementation for a node over a whole sequence."""
    call = call_of(node)
    if isinstance(call, SelectCall):
        partner = next((n for n in call.q.users if n.target is ATTENTION and _same_scores(n, node)), None)
        if reads_in_place(call, wish) and (step := _step(partner, node)):
            return step
        return _compressed(node, partner) if prefers_sparse(call, wish) else _dense(node, call)
    queries = example(call.q).shape[1]
    if reads_in_place(call, wish):
        partner = next((n for n in call.q.users if n.target is SELECT and _same_scores(node, n)), None)
        if step := _step(node, partner):
            return step
    if call.indices is not None and queries == 1:
        return Implementation("rows of the selected blocks", _one_query(call), [node])
    if call.mask is not None or isinstance(call.kind, Opaque | All) or not prefers_sparse(call, wish):
        return _dense(node, call)
    if call.indices is not None:
        return _selected(node, call) if is_causal(call) else _dense(node, call)
    if isinstance(call.kind, Blocks):
        partner = next((n for n in call.q.users if n.target is SELECT and _same_scores(node, n)), None)
        return _compressed(partner, node)
    return _window(node, call, call.kind)


def _same_scores(attention: fx.Node, selection: fx.Node) -> bool:
    """Whether an attention has the scores that a selection ranks."""
    a, b = AttentionCall.of(attention), SelectCall.of(selection)
    same_mask = a.mask is b.mask and (a.mask is not None or a.kind == b.kind)
    return a.indices is None and same_mask and (a.q, a.k, a.scale) == (b.q, b.k, b.scale)


# -- the implementations, on `q [N, S, m, D]`, `k [N, T, D]`, `v [N, T, Dv]`


def _window(node: fx.Node, call: AttentionCall[fx.Node], kind: Window) -> Implementation:
    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [window_attention(q, k.unsqueeze(2), v.unsqueeze(2), kind.size, call.scale)[0]]

    return Implementation("window_attention", run, [node])


def _selected(node: fx.Node, call: AttentionCall[fx.Node]) -> Implementation:
    def run(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> list[Tensor]:
        k, v, indices = (x.unsqueeze(2) for x in (k, v, indices))
        out, lse = selected_attention(q, k, v, indices, call.select_block, call.scale)
        return [eager.nan_rows(out, lse == -torch.inf, v.squeeze(2), call.nan_from) if call.nan_from else out]

    return Implementation("selected_attention", run, [node])


def _compressed(selection: fx.Node | None, attention: fx.Node | None) -> Implementation:
    """Attention to compressed blocks, the selection from its weights, or both in one."""
    ranking: list[Any] = [1, [], [], 0, 0, 0]
    if selection is not None:
        ranked = SelectCall.of(selection)
        counts = (ranked.num_selected, ranked.num_initial, ranked.num_local)
        ranking = [ranked.select_block, list(ranked.offsets), list(ranked.factors), *counts]
    group = [n for n in (attention, selection) if n is not None]
    call = call_of(group[0])
    assert isinstance(call.kind, Blocks)
    block, stride, scale = call.kind.size, call.kind.stride, call.scale

    def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        out, _, indices = compressed_attention(q, k.unsqueeze(2), v.unsqueeze(2), block, stride, scale, *ranking)
        found = [out] if attention is not None else []
        return found + ([indices.squeeze(2)] if selection is not None else [])

    name = "compressed_attention" + (" with selection" if selection is not None else "")
    if attention is None:
        return Implementation(name, lambda q, k: run(q, k, k), group)  # nobody reads the output
    return Implementation(name, run, group)


def _dense(node: fx.Node, call: Call) -> Implementation:
    """Dense attention; SDPA where the mask allows it to be used."""
    if isinstance(call, SelectCall):
        return Implementation("dense scores", lambda *tensors: [eager.rank_blocks(_refill(call, tensors))], [node])

    def run(*tensors: Tensor) -> list[Tensor]:
        given = _refill(call, tensors)
        if not fits_sdpa(call):
            return [eager.dense(given)]
        if is_causal(call) and given.q.shape[1] == given.k.shape[1]:
            return [_sdpa(given, None, is_causal=True)]
        return [_sdpa(given, eager.keep_mask(given), is_causal=False)]

    return Implementation("dense", run, [node])


def _sdpa(call: AttentionCall[Tensor], keep: Tensor | None, *, is_causal: bool) -> Tensor:
    heads = call.q.shape[2]
    # One query for several places makes torch lay out the output so that its kernel for the CPU, which takes features
    # to lie side by side, writes elsewhere (torch 2.13).
    repeated = any(size > 1 and stride == 0 for size, stride in zip(call.q.shape, call.q.stride(), strict=True))
    q = (call.q.contiguous() if repeated else call.q).transpose(1, 2)
    k, v = (x.unsqueeze(1).expand(-1, heads, -1, -1) for x in (call.k, call.v))
    keep = None if keep is None else keep.transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=is_causal, scale=call.scale)
    return out.transpose(1, 2)


def _one_query(call: Call) -> Callable[..., list[Tensor]]:
    """One step: dense, or over the rows of the selected blocks alone."""
    if isinstance(call, SelectCall):
        return lambda *tensors: [eager.rank_blocks(_refill(call, tensors))]
    step = eager.dense if call.indices is None else eager.gathered
    here = replace(call, nan_from=eager.ALWAYS_THERE if call.nan_from else ())  # all keys that the step finds are there
    return lambda *tensors: [step(_refill(here, tensors))]


def _step(attention: fx.Node | None, selection: fx.Node | None) -> Implementation | None:
    """One query of each sequence over rows as they lie: attention, the ranking of its weights, or both. None where they
    would have to be copied first."""
    group = [n for n in (attention, selection) if n is not None]
    call = call_of(group[0])
    values = call.v if isinstance(call, AttentionCall) else call.k  # nobody reads the output of a ranking
    indices = call.indices if isinstance(call, AttentionCall) else None
    k, v = rows_of(call.k), rows_of(values)
    batch, groups = k.batch, k.groups
    count, _, heads, _ = example(call.q).shape
    if k.is_copy or v.is_copy or v.factor != 1 or (v.batch, v.groups) != (batch, groups):
        return None
    mask = None if call.mask is None else unexpanded(call.mask, batch, count // batch)
    repeated = count != batch * groups  # a product for each head of a group
    if repeated and not (indices is selection is None and _is_shared(mask, batch)):
        return None
    allowed = forced = None
    ranking: list[Any] = [1, [], [], 0]
    if selection is not None:
        ranked = SelectCall.of(selection)
        allowed, forced = ranked.allowed, ranked.forced
        ratio = ranked.select_block // ranked.kind.stride
        ranking = [ratio, list(ranked.offsets), list(ranked.factors), ranked.num_selected]
    given = [call.q, k.source, v.source, mask, indices, allowed, forced]
    block = max(1, call.select_block) if isinstance(call, AttentionCall) else 1
    undefined = isinstance(call, AttentionCall) and bool(call.nan_from)

    def run(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        q, keys, rows = (next(left) for _ in range(3))
        keys, rows = (side.view(x).transpose(1, 2) for side, x in ((k, keys), (v, rows)))
        q = q.reshape(batch, 1, -1, q.shape[3])
        keep, blocks, may, must = (None if x is None else by_group(next(left), batch, groups) for x in given[3:])
        if keep is not None and blocks is not None:
            keep = _at_blocks(keep, blocks, block, keys.shape[1])
        out, chosen = step_attention(q, keys, rows, keep, blocks, may, must, block, call.scale * k.factor, *ranking)
        if undefined:
            shape = (batch, groups, out.shape[2] // groups)
            out = out + torch.where(_sees_nothing(keep, blocks, block, shape), torch.nan, 0.0).to(out.dtype)[..., None]
        found = [out.reshape(count, 1, heads, -1)] if attention is not None else []
        return found + ([chosen.reshape(count, 1, -1)] if selection is not None else [])

    name = "step_attention" + (" with selection" if selection is not None else "")
    return Implementation(name, run, group, [x for x in given if x is not None])


def _at_blocks(mask: Tensor, blocks: Tensor, size: int, rows: int) -> Tensor:
    """A mask `[B or 1, G or 1, m, T]` at the rows of blocks `[B, G, n]`: `[B, G, m, n * size]`, what is read of it."""
    row = (blocks.long()[..., None] * size + torch.arange(size, device=mask.device)).flatten(2)[:, :, None]
    row = torch.where((row >= 0) & (row < rows), row, 0).expand(-1, -1, mask.shape[2], -1)
    return mask.expand(*row.shape[:3], rows).gather(-1, row)


def _sees_nothing(keep: Tensor | None, blocks: Tensor | None, size: int, shape: Sequence[int]) -> Tensor:
    """Which heads see none of the rows that `step_attention` reads, `[B, 1, Hq]`; `shape` is `[B, G, h]`."""
    if blocks is not None:
        there = (blocks >= 0).repeat_interleave(size, -1)[:, :, None]  # [B, G, 1, n * size]
        keep = there if keep is None else keep & there
    assert keep is not None  # without a mask each head sees every row
    return ~keep.any(-1).expand(*shape).flatten(1).unsqueeze(1)


def _is_shared(mask: fx.Node | None, batch: int) -> bool:
    """Whether all heads of a sequence keep the same rows."""
    return mask is None or example(mask).shape[:3] in ((1, 1, 1), (batch, 1, 1))


def _inputs(call: Call) -> dict[str, fx.Node]:
    """The tensors that a call has."""
    return {name: x for name in call.TENSORS if (x := getattr(call, name)) is not None}


def _refill(call: Any, tensors: tuple[Tensor, ...]) -> Any:
    """A call of nodes, with tensors in their place."""
    return replace(call, **dict(zip(_inputs(call), tensors, strict=True)))


def _replace(graph: fx.GraphModule, chosen: Implementation) -> None:
    # An attention and the selection from its weights read the same queries and keys; the attention reads values, too.
    inputs = chosen.inputs or list(_inputs(call_of(chosen.nodes[0])).values())
    traced = trace_to_aten(chosen.run, fake_inputs(inputs), decompose_sdpa=False)
    inline_tensors(graph, chosen.nodes, traced, inputs)
