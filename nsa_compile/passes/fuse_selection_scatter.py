"""fuse_selection_scatter: top-k, scatter and dense mask become attention on the indices of blocks.

Before, in the body of a scan, after raise_attention:

    p       = softmax(q_cmp · k_cmpᵀ)                        # [N, m, T / d]
    score   = where(allowed, where(forced, inf, eq. 9(p.sum(heads))), -inf)
    index   = sort(score, descending, stable)[:n]            # eq. 11
    chosen  = zeros.scatter(index, taken)                    # [N, T / l'], a mask of blocks
    out     = attention(q, k, v, mask = expand(chosen) & causal)

After:

    index   = select_blocks(q_cmp, k_cmp, ...)               # importance, ranking and top-n in one
    out     = attention(q, k, v, causal, indices = index)

Indices that are data, and not ranked here, become those of the attention in the same way. A ranking of keys by scores
that are a program of their own (`analyses/places.py`) becomes one operator, too.

The two halves are separate (`analyses/selection.py` and `analyses/ranking.py` find them): where the scores are computed
in another way than by eq. 8 to 11, the attention still becomes one on indices, and they stay as they are.
"""

from __future__ import annotations

import contextlib
import operator
from dataclasses import replace
from typing import cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.masks import MOVES, Unrecognised, mask_tensor
from nsa_compile.analyses.places import rankings
from nsa_compile.analyses.ranking import Ranking, find_ranking
from nsa_compile.analyses.scores import MASK, build_operands
from nsa_compile.analyses.selection import Selection, find_selection, position_node, table_of
from nsa_compile.analyses.softmax import AttentionRecord, raised
from nsa_compile.ir.aten import aten, operand
from nsa_compile.ir.attention import ATTENTION, PLACES, SELECT, AttentionCall, Opaque, SelectCall
from nsa_compile.ir.rewriting import NodeBuilder, constant_node, eliminate_dead_code, replace_earlier, replace_node
from nsa_compile.ir.scans import (
    Declined,
    ScanRecord,
    ScanSite,
    Step,
    declined_if_it_fails,
    example,
    find_scans,
    find_steps,
    location,
)
from nsa_compile.ir.step_values import StepMask
from nsa_compile.passes.pipeline import PassContext, register


@register("fuse_selection_scatter", requires=("attention",))
def fuse_selection_scatter(gm: fx.GraphModule, context: PassContext) -> bool:
    """Turn masks scattered from block indices into attention on the indices, and their ranking into one operator."""
    changed = False
    sites = {site.body: site for site in find_scans(gm)}
    for step in find_steps(gm):
        record = step.record
        not_ranked: dict[fx.Node, Declined] = {}  # indices or a mask, and why their ranking is not that of NSA
        for node in list(step.body.graph.nodes):
            known = raised(node)
            if known is None or not known.mask.data:
                continue
            try:
                with (
                    unset_fake_temporarily(),
                    torch.no_grad(),
                    declined_if_it_fails("it cannot be analysed", node, Unrecognised),
                ):
                    selection = _selection_of(node, known, step)
                    ranking = _ranking_of(selection, step, by_itself=step.body is gm)
            except Unrecognised as found:
                context.leave(Declined(found.why, found.node))
                continue
            if isinstance(ranking, Declined):
                not_ranked[selection.indices or selection.members.node], ranking = ranking, None
            if context.may_rewrite():
                rewrite(step.body, node, known, selection, ranking, record)
                what = "importance, ranking and mask" if ranking else "mask"
                context.match(step.name, f"{what} of blocks of {selection.block} at {location(node)}")
                changed = True
        if changed:
            eliminate_dead_code(step.body)  # rankings that are NSA's
        by_programs = set[fx.Node]()
        if (site := sites.get(step.body)) is not None:
            with contextlib.suppress(Unrecognised):
                by_programs = _rank_by_programs(step, site, context)
        for indices, why in not_ranked.items():
            if indices not in by_programs:
                context.leave(why)
        changed |= bool(by_programs)
        if changed:
            eliminate_dead_code(step.body)
            step.body.recompile()
    return changed


def _rank_by_programs(step: Step, site: ScanSite, context: PassContext) -> set[fx.Node]:
    """Make an operator of each ranking by scores of a program of which the first indices are read: these."""
    with (
        unset_fake_temporarily(),
        torch.no_grad(),
        declined_if_it_fails("it cannot be analysed", step.body.graph.output_node(), Unrecognised),
    ):
        found, left = rankings(step, len(site.xs))
    for why in left:
        context.leave(why)
    ranked = set[fx.Node]()
    for places in found:
        if not context.may_rewrite():
            break
        build = NodeBuilder(step.body, places.ranking)
        given = [[build(aten.detach.default, x) for x in xs] for xs in build_operands(places.keys, step.record, build)]
        node = build(PLACES, *given, str(places.keys.program), None, places.count)
        node.meta[MASK] = places.keys.mask
        *lead, _ = example(operand(places.ranking)).shape
        first = build(aten.reshape.default, node, [*lead, places.count])
        for indices, count in places.indices.items():
            replace_earlier(indices, build(aten.slice.Tensor, first, len(lead), 0, count))
        context.match(step.name, f"keys ranked by a program of scores at {location(places.ranking)}")
        ranked.update(places.indices)
    return ranked


def _selection_of(node: fx.Node, known: AttentionRecord, step: Step) -> Selection:
    call = AttentionCall.of(node)
    n, _, m, _ = example(call.q).shape
    selection = find_selection(node, known.mask, (n, m, example(call.k).shape[1]), step)
    mask = selection.members.node
    if len(mask.users) > 1 and any(u.target not in MOVES for u in mask.users):
        raise Unrecognised("its block mask is used by something else as well", mask)
    return selection


def _ranking_of(selection: Selection, step: Step, *, by_itself: bool) -> Ranking | Declined | None:
    """How the indices were ranked, if that is eq. 8 to 11, or why it is not; None of indices that are given."""
    if selection.given:
        return None
    try:
        return find_ranking(selection, step.body, step.record, by_itself=by_itself)
    except Unrecognised as found:
        return Declined(f"the ranking of its blocks stays as it is: {found.why}", found.node)


def rewrite(
    body: fx.GraphModule,
    node: fx.Node,
    known: AttentionRecord,
    selection: Selection,
    ranking: Ranking | None,
    record: ScanRecord,
) -> None:
    """Give an attention node indices in the place of the part of its mask that depends on data."""
    build = NodeBuilder(body, node)
    call = AttentionCall.of(node)
    ranked = None if ranking is None else _ranked(build, selection, ranking)
    rows, _, heads, _ = example(call.q).shape
    keys = example(call.k).shape[1]
    new = replace(
        call,
        mask=mask_tensor(build, selection.others, (rows, heads), keys, record),
        indices=_indices(build, selection, record) if ranked is None else ranked,
        kind=known.mask.kind if len(known.mask.data) == 1 else Opaque(),
        select_block=selection.block,
    )
    if ranked is not None and selection.marked is not None:
        # Who reads the indices otherwise, such as a step that returns them, is to need no ranking of its own.
        shape, dtype = list(example(selection.marked).shape), example(selection.marked).dtype
        as_ranked = build(aten._to_copy.default, build(aten.reshape.default, ranked, shape), dtype=dtype)
        replace_earlier(selection.marked, as_ranked)
    if selection.by_group:
        replace_node(node, build(ATTENTION, *new.args))
        return
    out = build(ATTENTION, *by_heads(build, new, rows, heads).args)
    replace_node(node, build(aten.reshape.default, out, list(example(node).shape)))


def by_heads(build: NodeBuilder, call: AttentionCall[fx.Node], rows: int, heads: int) -> AttentionCall[fx.Node]:
    """An attention whose heads select blocks of their own, with each of them as a sequence: `[N * m, 1, 1, D]`."""

    def repeated(x: fx.Node) -> fx.Node:
        if heads == 1:
            return x
        shape = list(example(x).shape)
        x = build(aten.expand.default, build(aten.unsqueeze.default, x, 1), [rows, heads, *shape[1:]])
        return build(aten.reshape.default, x, [rows * heads, *shape[1:]])

    mask = call.mask
    if mask is not None and list(example(mask).shape[:3]) != [1, 1, 1]:
        keys = example(mask).shape[3]
        mask = build(aten.expand.default, mask, [rows, 1, heads, keys])
        mask = build(aten.reshape.default, mask, [rows * heads, 1, 1, keys])
    q = build(aten.reshape.default, call.q, [rows * heads, 1, 1, example(call.q).shape[3]])
    return replace(call, q=q, k=repeated(call.k), v=repeated(call.v), mask=mask)


def _indices(build: NodeBuilder, selection: Selection, record: ScanRecord) -> fx.Node:
    """The indices as they were ranked or given, -1 for those that do not count: `[N, 1, n]`, or `[N * m, 1, n]`."""
    indices = selection.indices
    if indices is None:
        mask = example(selection.members.node)
        indices = build(aten.arange.default, mask.shape[-1], device=mask.device)
        indices = build(aten.expand.default, indices, list(mask.shape))
    if selection.taken is not None:
        none = build(aten.full_like.default, indices, -1)
        indices = build(aten.where.self, selection.taken, indices, none)
    if selection.given:
        indices = _once_each(build, build(aten.sub.Tensor, indices, selection.first))
    count = example(indices).shape[-1]
    indices = build(aten.reshape.default, indices, [-1, count])
    given = example(indices).shape[0]
    if selection.limits is not None:
        indices = _limited(build, indices, selection.limits, record)
    if selection.always is not None:
        indices = _and_always(build, indices, selection.always, record)
    rows = (selection.rows[:, :1] if selection.by_group else selection.rows).flatten()
    if not torch.equal(rows, torch.arange(given)):
        indices = build(aten.index_select.default, indices, 0, constant_node(build, rows, example(indices).device))
    return build(aten.reshape.default, indices, [len(rows), 1, example(indices).shape[-1]])


def _limited(build: NodeBuilder, indices: fx.Node, limits: StepMask, record: ScanRecord) -> fx.Node:
    """Without the indices of blocks that do not count at this step."""
    shape, device = list(example(indices).shape), example(indices).device
    flat = build(aten.reshape.default, build(aten.clamp.default, indices, 0, limits.shape[0] - 1), [-1])
    start, stop = (
        build(aten.index_select.default, constant_node(build, x, device), 0, flat) for x in (limits.start, limits.stop)
    )
    t = _position(build, record)
    counts = build(aten.bitwise_and.Tensor, build(aten.le.Tensor, start, t), build(aten.gt.Tensor, stop, t))
    none = build(aten.full_like.default, indices, -1)
    return build(aten.where.self, build(aten.reshape.default, counts, shape), indices, none)


def _and_always(build: NodeBuilder, indices: fx.Node, always: StepMask, record: ScanRecord) -> fx.Node:
    """Together with the indices of blocks that count anyway."""
    table, given = table_of(always), example(indices)
    row = build(aten.reshape.default, _position(build, record), [1])
    row = build(aten.index_select.default, constant_node(build, table.to(given.dtype), given.device), 0, row)
    row = build(aten.expand.default, row, [given.shape[0], table.shape[1]])
    return _once_each(build, build(aten.cat.default, [indices, row], 1))


def _position(build: NodeBuilder, record: ScanRecord) -> fx.Node:
    position = position_node(build.body, record)
    assert position is not None, "find_selection has seen to it"
    return position


def _once_each(build: NodeBuilder, indices: fx.Node) -> fx.Node:
    """Indices of which none comes twice, as those of a mask."""
    if example(indices).shape[-1] == 1:
        return indices
    indices = build(operator.getitem, build(aten.sort.default, indices), 0)
    ahead, behind = (build(aten.slice.Tensor, indices, -1, *ends) for ends in ((0, -1), (1, 2**63 - 1)))
    again = build(aten.constant_pad_nd.default, build(aten.eq.Tensor, ahead, behind), [1, 0], 0)
    return build(aten.where.self, again, build(aten.full_like.default, indices, -1), indices)


def _ranked(build: NodeBuilder, selection: Selection, ranking: Ranking) -> fx.Node:
    """The node that ranks the blocks and selects the best: `[N, 1, n]`."""
    blocks = ranking.blocks

    def by_block(condition: fx.Node, negated: bool) -> fx.Node:
        if example(condition).numel() == blocks:
            row = build(aten.reshape.default, condition, [1, 1, blocks])
        else:  # one for each sequence, say
            shape = [*example(selection.members.node).shape[:-1], blocks]
            spread = build(aten.expand.default, condition, shape)
            row = build(aten.reshape.default, spread, [len(selection.rows), 1, blocks])
        return build(aten.bitwise_not.default, row) if negated else row

    allowed = by_block(*ranking.allowed)
    call = SelectCall(
        q=ranking.source.q,
        k=ranking.source.k,
        mask=ranking.source.mask,
        allowed=allowed,
        forced=build(aten.zeros_like.default, allowed) if ranking.forced is None else by_block(*ranking.forced),
        scale=ranking.source.scale,
        kind=ranking.kind,
        select_block=ranking.ratio * ranking.kind.stride,
        num_blocks=blocks,
        offsets=ranking.offsets,
        factors=ranking.factors,
        num_selected=example(cast(fx.Node, selection.indices)).shape[-1],
        num_initial=ranking.num_initial,
        num_local=ranking.num_local,
    )
    return build(SELECT, *call.args)
