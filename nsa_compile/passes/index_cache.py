"""index_cache: a step reads and writes the rows of a cache that it needs, whatever the position.

Before, in a step that generates one token at a position t known at run time only:

    cache = where(p == t, new, cache)                   # writes all rows
    out   = attention(q, k, v, mask = (p <= t) & (p > t - w))   # reads all rows

After:

    cache = index_put(cache, t, new)                    # writes one row where the cache is updated in place
    out   = attention(q, k, v, mask, indices = t - w + 1 … t)   # reads w rows

The position is one for all sequences or one for each. Nothing is assumed of it: a row is read if it can be kept, and
kept if the mask, computed as it was written, says so; a position that no row has writes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.positions import KeyRange, Write, find_window, find_write
from nsa_compile.analyses.softmax import raised
from nsa_compile.ir.aten import aten
from nsa_compile.ir.attention import ATTENTION, AttentionCall, Opaque
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code, replace_node
from nsa_compile.ir.scans import Step, example, find_steps, location
from nsa_compile.passes.pipeline import PassContext, register


@register("index_cache", requires=("carries",))
def index_cache(gm: fx.GraphModule, context: PassContext) -> bool:
    """Read and write single rows of caches where a step masks all others, at a position known at run time only."""
    changed = False
    for step in find_steps(gm):
        # Both are tried; the rows of a loop's caches are written once it is batched.
        written = step.body is gm and _write_rows(step, context)
        if _read_rows(step, context) or written:
            eliminate_dead_code(step.body)
            step.body.recompile()
            changed = True
    return changed


def _read_rows(step: Step, context: PassContext) -> bool:
    """Give attention under a window that moves with the position the indices of its rows."""
    changed = False
    for node in list(step.body.graph.nodes):
        known = raised(node)
        if known is None or not known.mask.data:
            continue
        with unset_fake_temporarily(), torch.no_grad():
            window = find_window(node, known.mask.data, step.record)
        if window is not None and context.may_rewrite():
            replace_node(node, read_window(NodeBuilder(step.body, node), node, window))
            context.match(step.name, f"window of {window.width} at {location(node)}")
            changed = True
    return changed


def _write_rows(step: Step, context: PassContext) -> bool:
    """Where an input is set to itself with one row replaced, write that row: the backend then leaves the rest alone."""
    changed = False
    for copied in step.body.graph.find_nodes(op="call_function", target=aten.copy.default):
        cache, node = cast(Any, copied.args[:2])
        with unset_fake_temporarily(), torch.no_grad():
            write = find_write(node, step.record)
        if write is None or write.cache is not cache or not context.may_rewrite():
            continue
        written = write_row(NodeBuilder(step.body, node), write)
        for old in (node, copied):
            old.replace_all_uses_with(written)
        context.match(step.name, f"one row is written at {location(node)}")
        changed = True
    return changed


def read_window(build: NodeBuilder, node: fx.Node, window: KeyRange) -> fx.Node:
    """The attention node with the rows of a window as its indices: blocks of one token."""
    call = AttentionCall.of(node)
    queries = example(call.q)
    rows = build(
        aten.arange.start_step, window.first, window.first + window.width, 1,
        dtype=torch.int64, device=queries.device,
    )  # fmt: skip
    # Neighbours in N are heads of one sequence.
    count, positions = queries.shape[0], example(window.base).numel()
    start = build(aten.reshape.default, window.base, [positions, 1])
    start = build(aten.reshape.default, build(aten.expand.default, start, [-1, count // positions]), [count, 1, 1])
    return build(
        ATTENTION, *replace(call, indices=build(aten.add.Tensor, start, rows), kind=Opaque(), select_block=1).args
    )


def write_row(build: NodeBuilder, write: Write) -> fx.Node:
    """The cache with the row of a write in its place, where the position has one."""
    shape = list(example(write.cache).shape)
    count = example(write.position).numel()
    position = build(aten.reshape.default, write.position, [count])
    from_first = build(aten.sub.Tensor, position, write.first)
    row = build(aten.div.Tensor_mode, from_first, write.stride, rounding_mode="floor")
    row = build(aten.clamp.default, row, 0, shape[write.dim] - 1)
    there = build(aten.eq.Tensor, build(aten.mul.Tensor, row, write.stride), from_first)
    if not write.by_sequence:
        old = build(aten.index_select.default, write.cache, write.dim, row)
        new = build(aten.where.self, there, write.source, old)
        # Not `index_copy`: AOTAutograd makes its result contiguous, a copy of a cache that lies otherwise (torch 2.13).
        return build(aten.index_put.default, write.cache, [*[None] * write.dim, row], new)
    # What is indexed comes first, with nothing between: [B, ...] without the dimension of the rows.
    sequence = build(aten.arange.default, count, dtype=torch.int64, device=example(write.cache).device)
    at = [sequence, *[None] * (write.dim - 1), row]
    one, rest = [*shape], [count, *shape[1 : write.dim], *shape[write.dim + 1 :]]
    one[write.dim] = 1
    source = build(aten.reshape.default, build(aten.expand.default, write.source, one), rest)
    there = build(aten.reshape.default, there, [count, *[1] * (len(rest) - 1)])
    new = build(aten.where.self, there, source, build(aten.index.Tensor, write.cache, at))
    return build(aten.index_put.default, write.cache, at, new)
