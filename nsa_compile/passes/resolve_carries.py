"""resolve_carries: what is each carry of a scan at step t, as a function of the inputs?

Before, a carry is whatever the last step returned. After, each is recorded as one of

- `Invariant`: returned as it came;
- `Known`: computable before the program runs, such as a counter;
- `Latest`: replaced as a whole by a value that does not depend on it (the last token, say);
- `Rows`: a buffer along one dimension, of which each step overwrites rows whose numbers are known at compile time
  (an append-only cache, a cache appended to every d tokens, a ring buffer), or shifts them (a window of the last w).

For `Rows` the record answers, for every step and row, which step wrote it. A carry of any other kind declines the
scan: it stays the loop it was.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.passes.attention_masks import NodeBuilder
from nsa_compile.passes.known import evaluate_constants, evaluate_known
from nsa_compile.passes.moving_rows import find_write, write_row
from nsa_compile.passes.pipeline import PassContext, register
from nsa_compile.passes.rewriting import eliminate_dead_code, replace_graph
from nsa_compile.passes.scans import (
    RECORD,
    Declined,
    ScanRecord,
    ScanSite,
    ancestors,
    aten,
    example,
    find_scans,
    is_single_step,
    location,
    lower_body,
    lower_graph,
)
from nsa_compile.passes.step_values import StepMask, Table, step_mask

log = logging.getLogger("nsa_compile")

# Entries of the table "step, row -> writer" that a buffer with rewritten rows may need.
TABLE_LIMIT = 2**26


@dataclass(frozen=True)
class Invariant:
    """The carry is its initial value at every step."""


@dataclass(frozen=True)
class Known:
    """The carry's value as each step finds it is known."""

    values: Tensor = field(repr=False)  # [S, ...]


@dataclass(frozen=True)
class Latest:
    """The carry is what the previous step computed without it."""


@dataclass(frozen=True)
class Rows:
    """A buffer whose rows along `dim` are written or moved, one event a step at most.

    `written` is the body node that holds the new rows. It meets the buffer in one way, whatever operator writes it: its
    dimensions, aligned with the last ones, broadcast to the buffer's shape with `index_shape` in the place of
    dimension `dim`. That is `(count,)` for rows along a dimension, `()` where the row has none (`buffer[:, t] = k`),
    and several sizes where the row numbers are a tensor of that shape.
    `slots[t]` are the rows that step t writes, `-1` for none. `base[r]` is the row of the old buffer that row r keeps
    when it is not written, for buffers that shift; None when rows stay where they are.
    A buffer without dimensions counts as one row of them.

    The tables are NumPy arrays, which no tracer sees.
    """

    dim: int
    size: int
    written: fx.Node
    index_shape: tuple[int, ...]
    slots: np.ndarray = field(repr=False)  # [S, count]
    base: np.ndarray | None = field(repr=False, default=None)  # [size]

    def layout(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What `written` broadcasts to in a buffer of a shape, and the same with its rows along one dimension."""
        before, after = tuple(shape[: self.dim]), tuple(shape[self.dim + 1 :])
        return (*before, *self.index_shape, *after), (*before, self.count, *after)

    @property
    def steps(self) -> int:
        return self.slots.shape[0]

    @property
    def count(self) -> int:
        return self.slots.shape[1]

    @cached_property
    def write_once(self) -> bool:
        """No row is written twice and none moves: once written, a row stays."""
        used = self.slots[self.slots >= 0]
        return self.base is None and len(np.unique(used)) == len(used)

    @cached_property
    def written_at(self) -> np.ndarray:
        """For a write-once buffer: the step that writes each row, S where none does. `[size]`."""
        steps = np.full(self.size, self.steps)
        t, i = (self.slots >= 0).nonzero()
        steps[self.slots[t, i]] = t
        return steps

    @cached_property
    def which(self) -> np.ndarray:
        """For a write-once buffer: which of its step's `count` rows each row is. `[size]`."""
        which = np.zeros(self.size, dtype=np.int64)
        t, i = (self.slots >= 0).nonzero()
        which[self.slots[t, i]] = i
        return which

    @cached_property
    def table(self) -> np.ndarray:
        """`[S, size]`: where row r comes from after step t; `-1 - r'` is row r' of the initial buffer, `t' * count + i`
        the i-th row that step t' wrote."""
        row = -1 - np.arange(self.size)
        rows = np.empty((self.steps, self.size), dtype=np.int64)
        for t, slots in enumerate(self.slots):
            if self.base is not None:
                row = np.where(self.base >= 0, row[np.maximum(self.base, 0)], row)
            else:
                row = row.copy()
            written = slots >= 0
            row[slots[written]] = t * self.count + np.arange(self.count)[written]
            rows[t] = row
        return rows


Carry = Invariant | Known | Latest | Rows


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
            context.decline(site.node.name, declined)
            continue
        name = context.add_module(site.owner, f"{site.node.args[0].target}_resolved", lowered)
        with site.owner.graph.inserting_before(site.node):
            body = site.owner.graph.get_attr(name)
        body.meta = dict(site.node.args[0].meta)
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
    _write_rows(lowered, context)
    replace_graph(gm, lowered, gm.graph.find_nodes(op="placeholder"))
    record = ScanRecord("step", 1)
    evaluate_constants(gm, record)
    gm.graph.output_node().meta[RECORD] = record
    return True


def _write_rows(lowered: fx.GraphModule, context: PassContext) -> None:
    """Where an input is set to itself with one row replaced, write that row: the backend then leaves the rest alone."""
    record = ScanRecord("step", 1)
    evaluate_constants(lowered, record)
    for copied in lowered.graph.find_nodes(op="call_function", target=aten.copy.default):
        cache, node = copied.args[:2]
        with unset_fake_temporarily(), torch.no_grad():
            write = find_write(node, record)
        if write is None or write.cache is not cache or not context.may_rewrite():
            continue
        written = write_row(NodeBuilder(lowered, node), write)
        for old in (node, copied):
            old.replace_all_uses_with(written)
        context.match(record.name, f"one row is written at {location(node)}")
    eliminate_dead_code(lowered)
    lowered.recompile()


def resolve(site: ScanSite) -> tuple[fx.GraphModule, ScanRecord]:
    """The lowered body and the record of one scan, without touching the graph.

    Raises:
        Declined: a carry is of no kind that can be batched.
    """
    if not site.length:
        raise Declined("the loop has no steps", site.node)
    lowered = lower_body(site)
    record = ScanRecord(site.node.name, site.length)
    with declined_if_it_fails("its carries cannot be resolved", site.node):
        _write_as_scatters(lowered)
        view = _LoweredSite(site.owner, site.node, lowered)
        evaluate_known(view, record)
        carries, _, _ = view.placeholders()
        updates, _ = view.outputs()
        with unset_fake_temporarily():
            record.carries = [_classify(c, u, record) for c, u in zip(carries, updates, strict=True)]
    return lowered, record


@contextlib.contextmanager
def declined_if_it_fails(what: str, node: fx.Node) -> Iterator[None]:
    """Leave a scan alone whose step torch, or this compiler, cannot cope with in an unforeseen way."""
    try:
        yield
    except Declined:
        raise
    except Exception as error:
        log.debug("%s: %s", node.name, what, exc_info=True)
        raise Declined(f"{what}: {first_line(error)}", node) from error


@dataclass
class _LoweredSite(ScanSite):
    lowered: fx.GraphModule

    @property
    def body(self) -> fx.GraphModule:
        return self.lowered


def _classify(carry: fx.Node, update: fx.Node, record: ScanRecord) -> Carry:
    if update is carry or not example(carry).numel():
        return Invariant()
    if carry in record.known:
        return Known(record.known[carry].table())
    if not _depends_on(update, carry):
        return Latest()
    rows = _match_rows(carry, update, record)
    if not rows.write_once and rows.steps * rows.size > TABLE_LIMIT:
        raise Declined(f"{rows.size} rows rewritten over {rows.steps} steps need a table above {TABLE_LIMIT}", update)
    return rows


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _write_as_scatters(body: fx.GraphModule) -> None:
    """Put writes into views, as in `buffer[:, 2:4] = x`, into the form of one scatter of the new rows.

    A copy is the copied value in the shape and dtype of its destination, whose old value it does not read; slices of
    everything are what they are taken from.
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
            if (example(new).dtype, example(new).device) != (example(old).dtype, example(old).device):
                new = build(aten._to_copy.default, new, dtype=example(old).dtype, device=example(old).device)
            if example(new).shape != example(old).shape:
                new = build(aten.expand.default, new, list(example(old).shape))
            node.replace_all_uses_with(new)
        elif node.target is aten.slice.Tensor and example(node).shape == example(node.args[0]).shape:
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.slice_scatter.default and example(node).shape == example(node.args[1]).shape:
            node.replace_all_uses_with(node.args[1])
    eliminate_dead_code(body)
    body.recompile()


def _depends_on(node: fx.Node, source: fx.Node) -> bool:
    return source in ancestors([node])


def _match_rows(carry: fx.Node, update: fx.Node, record: ScanRecord) -> Rows:
    """Recognise one write of rows over the old buffer, or over the old buffer shifted."""
    shape = example(carry).shape
    if example(update).shape != shape:
        raise Declined("rows are written to a part of the carry, which is then spread over all of it", update)

    if update.target is aten.where.self:
        return _match_where(carry, update, record)

    if not shape:
        raise Declined("a carry without dimensions is computed from its own last value (a recurrence)", update)

    if update.target is aten.cat.default:
        return _match_shift(carry, update, record)

    if update.target is aten.index_copy.default:
        base, dim, index, source = update.args
        slots = _slots(index, shape[dim], record, update)
        return _rows(carry, base, dim, slots, (slots.shape[1],), source, update)

    if update.target in (aten.index_put.default, aten._unsafe_index_put.default):
        base, indices, source = update.args[:3]
        if len(update.args) > 3 and update.args[3]:
            raise Declined("index_put accumulates into the carry instead of writing rows", update)
        given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
        if len(given) != 1:
            raise Declined("index_put writes at several index tensors, not at whole rows", update)
        ((dim, index),) = given
        slots = _slots(index, shape[dim], record, update, may_count_from_the_end=True)
        return _rows(carry, base, dim, slots, tuple(example(index).shape), source, update)

    if update.target is aten.scatter.src:
        base, dim, index, source = update.args
        slots = _scatter_slots(index, dim % len(shape), shape, record, update)
        return _rows(carry, base, dim, slots, (slots.shape[1],), source, update)

    if update.target is aten.slice_scatter.default:
        base, source, dim, start, end, step = (*update.args, *(0, None, None, 1)[len(update.args) - 2 :])
        overwritten = torch.arange(shape[dim])[slice(start, end, step)].expand(record.length, -1)
        return _rows(carry, base, dim, overwritten, (overwritten.shape[1],), source, update)

    if update.target is aten.select_scatter.default:
        base, source, dim, row = update.args
        overwritten = torch.full((record.length, 1), row % shape[dim])
        return _rows(carry, base, dim, overwritten, (), source, update)

    raise Declined(
        "the carry is computed from its own last value (a recurrence), neither a counter nor a write of known rows",
        update,
    )


def _match_where(carry: fx.Node, update: fx.Node, record: ScanRecord) -> Rows:
    condition, if_true, if_false = update.args
    mask = _condition(condition, record)
    other_side_is_new = if_true is carry or not _depends_on(if_false, carry)
    if _depends_on(if_true, carry) and if_false is not carry and other_side_is_new:
        # Written the other way round: where(keep, old, new).
        mask, if_true, if_false = ~mask, if_false, if_true
    shape = example(carry).shape

    if mask.shape.numel() == 1 and if_false is carry and _depends_on(if_true, carry):
        # A known predicate around a write: the write happens at some steps only.
        inner = _match_rows(carry, if_true, record)
        if inner.base is not None:
            raise Declined("a shift that happens at some steps only", update)
        happens = mask.table().reshape(record.length, 1)
        return replace(inner, slots=np.where(happens.numpy(), inner.slots, -1))

    if _depends_on(if_true, carry):
        raise Declined("the rows written are computed from the buffer they are written to, in the same place", update)

    wide = [i - len(mask.shape) for i, size in enumerate(mask.shape) if size != 1]
    if len(wide) > 1:
        raise Declined("the condition of this write selects elements, not whole rows", condition)
    if not wide:
        # One predicate that replaces the whole buffer by a value: every row, or none.
        rows = torch.arange(shape[0] if shape else 1)
        slots = torch.where(mask.table().reshape(record.length, 1), rows, -1)
        return _rows(carry, if_false, 0, slots, tuple(shape[:1]), if_true, update)
    source = example(if_true)
    if source.dim() >= -wide[0] and source.shape[wide[0]] != 1:
        raise Declined("where() takes each row from a different place of its source", update)
    return _rows(carry, if_false, wide[0], _single_slots(mask, condition, record), (1,), if_true, update)


def _condition(condition: fx.Node, record: ScanRecord) -> Table | StepMask:
    """The condition of a write at every step."""
    value: Any = record.known.get(condition, record.constant.get(condition))
    mask = None if value is None else step_mask(value, record.length)
    if mask is None and isinstance(value, Table) and value.values.dtype == torch.bool:
        return value
    if mask is None:
        raise Declined("the condition of this write depends on data, not on the step index alone", condition)
    return mask


def _single_slots(mask: Table | StepMask, condition: fx.Node, record: ScanRecord) -> Tensor:
    """The one row that a condition is true for at each step, -1 for none: `[S, 1]`."""
    if isinstance(mask, StepMask) and mask.count > record.length:
        raise Declined("one step writes several rows with one value", condition)
    t, row = mask.true_entries()
    if bool((t[1:] == t[:-1]).any()):
        raise Declined("one step writes several rows with one value", condition)
    slots = torch.full((record.length, 1), -1)
    slots[t, 0] = row
    return slots


def _match_shift(carry: fx.Node, update: fx.Node, record: ScanRecord) -> Rows:
    """`cat([buffer[k:], new])` and `cat([new, buffer[:-k]])`: a window of the last rows."""
    shape = example(carry).shape
    parts, dim = update.args[0], (update.args[1] if len(update.args) > 1 else 0) % len(shape)
    base, slots, sources = [], [], []
    for part in parts:
        if example(part).dim() != len(shape):  # cat() skips what is empty, `[0]`
            continue
        rows = example(part).shape[dim]
        kept = _kept_rows(carry, part, dim)
        if kept is not None:
            base.append(kept)
        elif _depends_on(part, carry):
            raise Declined("cat() puts together something else than rows of the carry and new rows", update)
        else:
            at = sum(len(b) for b in base)
            base.append(torch.full((rows,), -1))
            slots.append(torch.arange(at, at + rows))
            sources.append(part)
    if len(sources) != 1:
        raise Declined("cat() brings new rows from several places, or none", update)
    written = slots[0].expand(record.length, -1)
    return Rows(dim, shape[dim], sources[0], (written.shape[1],), written.numpy(), torch.cat(base).numpy())


def _kept_rows(carry: fx.Node, node: fx.Node, dim: int) -> Tensor | None:
    """The rows of the carry along `dim` that `node` is, or None if it is something else."""
    if node is carry:
        return torch.arange(example(carry).shape[dim])
    if node.target is aten.slice.Tensor:
        inner = _kept_rows(carry, node.args[0], dim)
        _, sliced, start, end, step = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
        if inner is not None and sliced % example(node).dim() == dim:
            return inner[slice(start, end, step)]
    if node.target is aten.roll.default:
        inner = _kept_rows(carry, node.args[0], dim)
        dims = node.args[2] if len(node.args) > 2 else []
        if inner is not None and [d % example(node).dim() for d in dims] == [dim]:
            return inner.roll(node.args[1][0])
    return None


def _rows(
    carry: fx.Node,
    base: fx.Node,
    dim: int,
    slots: Tensor,
    index_shape: tuple[int, ...],
    source: fx.Node,
    update: fx.Node,
) -> Rows:
    """The record of one write to rows `slots` `[S, count]`, laid out as `Rows` says."""
    shape = example(carry).shape
    if source is carry:
        raise Declined("the carry is written to itself", update)
    if not shape:
        if base is not carry:
            raise Declined("a value is written over something else than the old one", base)
        # Looked up in its table like a buffer that shifts: there are no rows for a guard to tell apart.
        return Rows(0, 1, source, index_shape, slots.numpy(), np.arange(1))
    dim, moved = dim % len(shape), None
    if base is not carry:
        kept = _kept_rows(carry, base, dim)
        if kept is None or example(base).shape != shape:
            raise Declined("rows are written over something else than the old buffer", base)
        moved = kept.numpy()
    return Rows(dim, shape[dim], source, index_shape, slots.numpy(), moved)


def _slots(
    index: fx.Node, size: int, record: ScanRecord, update: fx.Node, *, may_count_from_the_end: bool = False
) -> Tensor:
    """The rows an index names at each step, `[S, count]`."""
    if example(index).dtype in (torch.bool, torch.uint8):
        raise Declined("the index of this write is a mask, not a row number or a list of them", update)
    value = _table(index, record, update).reshape(record.length, example(index).numel())
    if may_count_from_the_end:
        value = torch.where((value < 0) & (value >= -size), value + size, value)
    return _checked_slots(value, size, update)


def _table(index: fx.Node, record: ScanRecord, update: fx.Node) -> Tensor:
    """An index at every step, `[S, ...]`."""
    shape = example(index).shape
    if index in record.constant:
        return record.constant[index].expand(record.length, *shape)
    if index not in record.known:
        raise Declined("the row written depends on data, not on the step index alone", update)
    if shape.numel() * record.length > TABLE_LIMIT:
        raise Declined(f"the rows it writes need a table above {TABLE_LIMIT} numbers", update)
    return record.known[index].table()


def _scatter_slots(index: fx.Node, dim: int, shape: Sequence[int], record: ScanRecord, update: fx.Node) -> Tensor:
    given = example(index).shape
    if example(update.args[3]).shape != given:
        raise Declined("scatter takes a part of its source only", update)
    if [*given[:dim], *given[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
        raise Declined("scatter writes single elements, not whole rows", update)
    value = _table(index, record, update).movedim(dim + 1, 1).flatten(2)
    if not (value == value[..., :1]).all():
        raise Declined("scatter writes single elements, not whole rows", update)
    return _checked_slots(value[..., 0], shape[dim], update)


def _checked_slots(slots: Tensor, size: int, update: fx.Node) -> Tensor:
    if slots.numel() and (slots.min() < 0 or slots.max() >= size):
        raise Declined(
            f"row {int(slots.min() if slots.min() < 0 else slots.max())} is written to a buffer of {size}", update
        )
    in_order = slots.sort(1).values
    if bool((in_order[:, 1:] == in_order[:, :-1]).any()):
        raise Declined("one step writes the same row twice: which value stays is not defined", update)
    return slots
