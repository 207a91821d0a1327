"""resolve_carries: what is each carry of a scan at step t, as a function of the inputs?

Before, a carry is whatever the last step returned. After, each is recorded as one of

- `Invariant`: returned as it came;
- `Known`: computable before the program runs, such as a counter;
- `Latest`: replaced as a whole by a value that does not depend on it (the last token, say);
- `Rows`: a buffer along one dimension, of which each step overwrites rows whose numbers are known at compile time
  (an append-only cache, a cache appended to every d tokens, a ring buffer), or shifts them (a window of the last w).

- `Recurrent`: anything else, such as a value that is computed from its own earlier values.

For `Rows` the record answers, for every step and row, which step wrote it.
"""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile import modes
from nsa_compile.analyses.carry_parts import split_carries
from nsa_compile.analyses.joined_rows import join_rows
from nsa_compile.analyses.joined_values import split_products
from nsa_compile.analyses.known import evaluate_constants, evaluate_known
from nsa_compile.analyses.row_writes import join_row_writes, merge_chosen_writes, spread_row_updates
from nsa_compile.analyses.writes import added_row, classify_carries
from nsa_compile.ir.aten import SPLIT, arguments, aten, operand
from nsa_compile.ir.lowering import lower_body, lower_graph
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code, replace_graph
from nsa_compile.ir.scans import (
    RECORD,
    Declined,
    ScanRecord,
    ScanSite,
    constant_value,
    declined_if_it_fails,
    example,
    find_scans,
    is_single_step,
)
from nsa_compile.passes.pipeline import PassContext, register

log = logging.getLogger("nsa_compile")


@register("resolve_carries", ensures=("carries",))
def resolve_carries(gm: fx.GraphModule, context: PassContext) -> bool:
    """Lower the body of each scan to functional ATen and record what its carries are.

    A graph that is one step by itself, as generation runs it, is lowered in the same way. It has no carries to resolve.
    """
    changed = _lower_single_step(gm, context)
    for site in find_scans(gm):
        if site.record is not None or not context.may_rewrite():
            continue
        try:
            lowered, record = resolve(site)
        except Declined as declined:
            context.decline(site, declined)
            continue
        name = context.add_module(site.owner, f"{operand(site.node).target}_resolved", lowered)
        with site.owner.graph.inserting_before(site.node):
            body = site.owner.graph.get_attr(name)
        body.meta = dict(operand(site.node).meta)
        site.node.update_arg(0, body)
        site.node.meta[RECORD] = record
        eliminate_dead_code(site.owner)
        context.match(site.node.name, ", ".join(type(c).__name__ for c in record.carries) or "no carries")
        changed = True
    return changed


def _lower_single_step(gm: fx.GraphModule, context: PassContext) -> bool:
    if not is_single_step(gm) or not context.may_rewrite():
        return False
    try:
        lowered = lower_graph(gm)
    except Declined as declined:
        context.leave(declined)
        return False
    context.match("step", "a step by itself")
    _take_apart(lowered)
    replace_graph(gm, lowered, gm.graph.find_nodes(op="placeholder"))
    body = [n for n in gm.graph.nodes if n.op not in ("placeholder", "output")]
    if body:
        modes.end_autocast(body[0], body[-1], modes.autocast_now())
    record = ScanRecord("step", 1)
    evaluate_constants(gm, record)
    gm.graph.output_node().meta[RECORD] = record
    return True


def resolve(site: ScanSite) -> tuple[fx.GraphModule, ScanRecord]:
    """The lowered body and the record of one scan, whose carries are split where they have parts.

    Raises:
        Declined: the step holds something that no kind of carry helps against.
    """
    if not site.length:
        raise Declined("the loop has no steps", site.node)
    lowered = lower_body(site)
    with declined_if_it_fails("its carries cannot be resolved", site.node):
        _write_as_scatters(lowered)
        _take_apart(lowered)
        split_products(lowered)
        split_carries(site, lowered)
        found = LoweredSite(site.owner, site.node, lowered)
        _place_carries(found)
        record = record_of(found)
        if join_rows(found, record):
            _place_carries(found)
            record = record_of(found)
        return lowered, record


def _place_carries(site: ScanSite) -> None:
    """Give each carry, which comes from no line of the step, that of its update: a decline names it."""
    for carry, update in zip(site.placeholders()[0], site.outputs()[0], strict=True):
        if "stack_trace" in update.meta:
            carry.meta["stack_trace"] = update.meta["stack_trace"]


def record_of(site: ScanSite) -> ScanRecord:
    """What is known of the values of a lowered body, and what its carries are."""
    record = ScanRecord(site.node.name, site.length)
    evaluate_known(site, record)
    _settle_choices(site.body, record)
    changes = [change(site, record) for change in _IN_OTHER_FORMS]
    if any(changes):
        record = ScanRecord(site.node.name, site.length)
        evaluate_known(site, record)
    carries, _, _ = site.placeholders()
    updates, _ = site.outputs()
    with unset_fake_temporarily():
        record.carries = classify_carries(carries, updates, record)
    return record


def _settle_choices(body: fx.GraphModule, record: ScanRecord) -> None:
    """A number that is chosen by what is the same at every step is that number, as `where(t < 0, t + S, t)` is t."""
    settled = False
    for node in body.graph.find_nodes(op="call_function", target=aten.where.self):
        flag, *numbers = node.args
        if node not in record.known or example(node).numel() != 1 or example(node).is_floating_point():
            continue
        with unset_fake_temporarily():
            flags = record.known[flag].table() if flag in record.known else record.constant[flag]
            always, never = bool(flags.all()), not bool(flags.any())
        chosen = numbers[0] if always else numbers[1]
        if (always or never) and _is_like(chosen, node):
            node.replace_all_uses_with(chosen)
            settled = True
    if settled:
        eliminate_dead_code(body)
        alive = set(body.graph.nodes)
        for values in (record.known, record.constant):
            for node in values.keys() - alive:
                del values[node]


def _is_like(a: fx.Node, b: fx.Node) -> bool:
    x, y = example(a), example(b)
    return (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


def _write_into_zeros(site: ScanSite, record: ScanRecord) -> bool:
    """`cache + one_hot * row` writes the row, if the cache is of zeros and no row of it is added to twice."""
    changed = False
    known = dict[fx.Node, Tensor | None]()
    for carry, init, update in zip(site.placeholders()[0], site.init, site.outputs()[0], strict=True):
        with unset_fake_temporarily():
            if (added := added_row(carry, update, record)) is None:
                continue
            empty = constant_value(init, known)
            if empty is None or bool(empty.any()):
                continue
        at, row = added
        build = NodeBuilder(site.body, update)
        flag = build(aten.ne.Scalar, at, 0)
        update.replace_all_uses_with(build(aten.where.self, flag, row, carry))
        changed = True
    return changed


_IN_OTHER_FORMS = (_write_into_zeros, join_row_writes, merge_chosen_writes, spread_row_updates)


@dataclass
class LoweredSite(ScanSite):
    """A scan with another body than the one it calls."""

    lowered: fx.GraphModule

    @property
    def body(self) -> fx.GraphModule:
        return self.lowered


def _write_as_scatters(body: fx.GraphModule) -> None:
    """Put writes into views, as in `buffer[:, 2:4] = x`, into the form of one scatter of the new rows.

    A copy is the copied value in the shape and dtype of its destination, whose old value it does not read; slices of
    everything, and dimensions in the order that they have, are what they are taken from.
    """
    for node in body.graph.nodes:
        if node.target in (aten.fill.Scalar, aten.zero.default):
            old, number = (*node.args, 0)[:2]
            kind = {"dtype": example(old).dtype, "device": example(old).device}
            filled = NodeBuilder(body, node)(aten.full.default, list(example(old).shape), number, **kind)
            node.replace_all_uses_with(filled)
        elif node.target in (aten.copy.default, aten.fill.Tensor):
            old, new = node.args[:2]
            build = NodeBuilder(body, node)
            new = _cast_as(example(old), new, build)
            if example(new).shape != example(old).shape:
                new = build(aten.expand.default, new, list(example(old).shape))
            node.replace_all_uses_with(new)
        elif _changes_nothing(node):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.slice_scatter.default and example(node).shape == example(node.args[1]).shape:
            node.replace_all_uses_with(_cast_as(example(node), node.args[1], NodeBuilder(body, node)))
    eliminate_dead_code(body)
    body.recompile()


def _changes_nothing(node: fx.Node) -> bool:
    """Whether it is a slice of everything, or has the dimensions in the order that they had."""
    if node.target is aten.permute.default:
        return [dim % example(node).dim() for dim in arguments(node).dims] == list(range(example(node).dim()))
    return node.target is aten.slice.Tensor and example(node).shape == example(operand(node)).shape


def _cast_as(old: Tensor, new: fx.Node, build: NodeBuilder) -> fx.Node:
    if (example(new).dtype, example(new).device) == (old.dtype, old.device):
        return new
    return build(aten._to_copy.default, new, dtype=old.dtype, device=old.device)


def _take_apart(body: fx.GraphModule) -> None:
    """Put what has a simpler form into it: pieces of a tensor are slices and rows of it, a product that is added to
    something is a product and a sum."""
    for node in body.graph.nodes:
        build = NodeBuilder(body, node)
        if node.target is operator.getitem and operand(node).target in SPLIT:
            pieces, number = operand(node), node.args[1]
            split = arguments(pieces)
            if pieces.target is aten.unbind.int:
                piece = build(aten.select.int, split.self, split.dim, number)
            else:
                sizes = [x.shape[split.dim] for x in pieces.meta["val"]]
                start = sum(sizes[:number])
                piece = build(aten.slice.Tensor, split.self, split.dim, start, start + sizes[number])
            node.replace_all_uses_with(piece)
        elif node.target in (aten.baddbmm.default, aten.addr.default) and example(node).dtype.is_floating_point:
            given, added = arguments(node), cast(Any, operand(node))
            if node.target is aten.addr.default:
                column = build(aten.unsqueeze.default, given.vec1, 1)
                product = build(aten.mul.Tensor, column, build(aten.unsqueeze.default, given.vec2, 0))
            else:
                product = build(aten.bmm.default, given.batch1, given.batch2)
            if given.beta == 0:  # what is added is not even read
                added = 0.0
            elif given.beta != 1:
                added = build(aten.mul.Tensor, added, given.beta)
            if given.alpha != 1:
                product = build(aten.mul.Tensor, product, given.alpha)
            node.replace_all_uses_with(build(aten.add.Tensor, product, added))
    eliminate_dead_code(body)
    body.recompile()
