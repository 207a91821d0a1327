"""Which rows of a buffer each step of a loop writes, whatever operator writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from nsa_compile.analyses.assembled_rows import Assembler, Numbers, dimension
from nsa_compile.ir.aten import PLACED, arguments, aten, operand
from nsa_compile.ir.carries import TABLE_LIMIT, Carry, Invariant, Known, Latest, Recurrent, Rows
from nsa_compile.ir.scans import Declined, ScanRecord, ancestors, example
from nsa_compile.ir.step_values import Choice, StepMask, Table, step_mask


class IsRecurrence(Declined):
    """A carry is computed from its own earlier values, and is no buffer with rows."""


def classify_carries(carries: Sequence[fx.Node], updates: Sequence[fx.Node], record: ScanRecord) -> list[Carry]:
    """What each carry of a step is. Those that need themselves, be it by way of others, are recurrent."""
    kinds: list[Carry] = []
    for place, (carry, update) in enumerate(zip(carries, updates, strict=True)):
        try:
            kinds.append(classify_carry(carry, update, record))
        except Declined as declined:
            kinds.append(Recurrent((place,), declined.afresh()))
    needs = needed_carries(carries, updates, kinds)
    for place, kind in enumerate(kinds):
        if place in needs[place] and not isinstance(kind, Invariant | Known):
            group = tuple(other for other in sorted(needs[place]) if place in needs[other])
            why = kind.why if isinstance(kind, Recurrent) else IsRecurrence(RECURRENCE, carries[place])
            kinds[place] = Recurrent(group, why)
    return kinds


RECURRENCE = "the carry is computed from its own earlier values (a recurrence)"


def needed_carries(
    carries: Sequence[fx.Node], updates: Sequence[fx.Node], kinds: Sequence[Carry]
) -> dict[int, set[int]]:
    """For each carry the carries that its values are computed from, at whatever step."""
    needs: dict[int, set[int]] = {}
    for place, kind in enumerate(kinds):
        found = set[fx.Node]()
        if not isinstance(kind, Invariant | Known):
            found = ancestors([kind.written if isinstance(kind, Rows) else updates[place]])
        needs[place] = {i for i, carry in enumerate(carries) if carry in found}
    while True:
        further = {i: found.union(*(needs[j] for j in found)) for i, found in needs.items()}
        if further == needs:
            return needs
        needs = further


def classify_carry(carry: fx.Node, update: fx.Node, record: ScanRecord) -> Carry:
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


def _depends_on(node: fx.Node, source: fx.Node) -> bool:
    return source in ancestors([node])


def _match_rows(carry: fx.Node, update: fx.Node, record: ScanRecord) -> Rows:
    """Recognise one write of rows over the old buffer, or over one that is put together from its rows."""
    shape = example(carry).shape
    if example(update).shape != shape:
        raise Declined("rows are written to a part of the carry, which is then spread over all of it", update)

    if update.target is aten.where.self:
        return _match_where(carry, update, record)
    write: Any = arguments(update) if update.target in PLACED else None

    if not shape:
        raise IsRecurrence("a carry without dimensions is computed from its own last value (a recurrence)", update)

    is_one_write = update.target is aten.index_copy.default and write.self is carry
    if not is_one_write and (dim := dimension(update)) is not None:
        return _match_assembly(carry, update, dim, record)

    if update.target is aten.index_copy.default:
        slots = _slots(write.index, shape[write.dim], record, update)
        return _rows(carry, write.self, write.dim, slots, (slots.shape[1],), write.source, update, record)

    if update.target in (aten.index_put.default, aten._unsafe_index_put.default):
        if write.accumulate:
            raise Declined("index_put accumulates into the carry instead of writing rows", update)
        given = [(dim, index) for dim, index in enumerate(write.indices) if index is not None]
        if len(given) != 1:
            raise Declined("index_put writes at several index tensors, not at whole rows", update)
        ((dim, index),) = given
        slots = _slots(index, shape[dim], record, update, may_count_from_the_end=True)
        return _rows(carry, write.self, dim, slots, tuple(example(index).shape), write.values, update, record)

    if update.target is aten.scatter.src:
        if example(write.src).shape != example(write.index).shape:
            raise Declined("scatter takes a part of its source only", update)
        slots = _scatter_slots(write.index, write.dim % len(shape), shape, record, update)
        return _rows(carry, write.self, write.dim, slots, (slots.shape[1],), write.src, update, record)

    raise IsRecurrence(
        "the carry is computed from its own last value (a recurrence), neither a counter nor a write of known rows",
        update,
    )


def _match_where(carry: fx.Node, update: fx.Node, record: ScanRecord) -> Rows:
    condition, if_true, if_false = cast(Any, update.args)
    mask = _condition(condition, record)
    other_side_is_new = if_true is carry or not _depends_on(if_false, carry)
    if _depends_on(if_true, carry) and if_false is not carry and other_side_is_new:
        # Written the other way round: where(keep, old, new).
        mask, if_true, if_false = ~mask, if_false, if_true
    shape = example(carry).shape

    if mask.shape.numel() == 1 and if_false is carry and _depends_on(if_true, carry):
        # A known predicate around a write: the write happens at some steps only.
        inner = _match_rows(carry, if_true, record)
        if inner.base is None:
            happens = mask.table().reshape(record.length, 1)
            return replace(inner, slots=np.where(happens.numpy(), inner.slots, -1))

    if _depends_on(if_true, carry):
        if mask.shape.numel() == 1 and (dim := dimension(update)) is not None:
            return _match_assembly(carry, update, dim, record)
        raise Declined("the rows written are computed from the buffer they are written to, in the same place", update)

    wide = [i - len(mask.shape) for i, size in enumerate(mask.shape) if size != 1]
    if len(wide) > 1:
        raise Declined("the condition of this write selects elements, not whole rows", condition)
    if not wide:
        # One predicate that replaces the whole buffer by a value: every row, or none.
        rows = torch.arange(shape[0] if shape else 1)
        slots = torch.where(mask.table().reshape(record.length, 1), rows, -1)
        return _rows(carry, if_false, 0, slots, tuple(shape[:1]), if_true, update, record)
    if_true = _one_row(if_true, wide[0])
    source = example(if_true)
    if source.dim() >= -wide[0] and source.shape[wide[0]] != 1:
        raise Declined("where() takes each row from a different place of its source", update)
    return _rows(carry, if_false, wide[0], _single_slots(mask, condition, record), (1,), if_true, update, record)


def added_row(carry: fx.Node, update: fx.Node, record: ScanRecord) -> tuple[fx.Node, fx.Node] | None:
    """Of `carry + at * row`: numbers that are zeros but for a one at each step, in another place each time, and the row
    that is put there."""
    if update.target is not aten.add.Tensor or update.kwargs or carry not in update.args:
        return None
    product: Any = update.args[1] if update.args[0] is carry else update.args[0]
    if not isinstance(product, fx.Node) or product.target is not aten.mul.Tensor:
        return None
    if not example(product).dtype == example(update).dtype == example(carry).dtype:
        return None
    for at, row in (product.args, product.args[::-1]):
        if isinstance(at, fx.Node) and isinstance(row, fx.Node) and _names_new_rows(at, row, record):
            return at, row
    return None


def _names_new_rows(at: fx.Node, row: fx.Node, record: ScanRecord) -> bool:
    if not isinstance(value := record.known.get(at), Table | Choice):
        return False
    first, _ = value.where(lambda x: (x != 0) & (x != 1)).run_of(True)
    ones = value.where(lambda x: x == 1).narrowed()
    wide = [d for d, size in enumerate(ones.shape) if size != 1]
    if bool((first < record.length).any()) or len(wide) != 1:
        return False
    if isinstance(ones, StepMask) and ones.count > record.length:
        return False  # several at a step, whose places nobody needs
    steps, places = ones.true_entries()
    dim, size = wide[0] - len(ones.shape), example(row)
    one_row = size.dim() < -dim or size.shape[dim] == 1
    return one_row and all(len(x.unique()) == len(x) for x in (steps, places))


def _one_row(source: fx.Node, dim: int) -> fx.Node:
    """A row that was repeated along a dimension, once."""
    if source.target is not aten.expand.default:
        return source
    row, shape = operand(source), list(example(source).shape)
    shape[dim] = 1
    return row if list(example(row).shape) == shape else source


def _condition(condition: fx.Node, record: ScanRecord) -> Table | StepMask:
    """The condition of a write at every step."""
    value: Any = record.known.get(condition, record.constant.get(condition))
    mask: Table | StepMask | None = None if value is None else step_mask(value, record.length)
    if mask is None and isinstance(value, Table) and value.values.dtype == torch.bool:
        mask = value
    if mask is None:
        raise Declined("the condition of this write depends on data, not on the step index alone", condition)
    return mask.narrowed()


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


def _match_assembly(carry: fx.Node, update: fx.Node, dim: int, record: ScanRecord) -> Rows:
    """A buffer that is put together from rows of the old one and from new rows."""
    shape = example(carry).shape
    found = Assembler(carry, dim, record).of(update)
    if len(sources := found.sources(carry)) != 1:
        for source in sources:
            if source is not None and _depends_on(source, carry):
                raise Declined("rows are written over something else than the old buffer", source)
        raise Declined("new rows are from several places, or from none", update)
    (source,) = sources
    if source is None:
        raise Declined("new rows are filled with a number", update)
    if example(source).dtype != example(carry).dtype:
        raise Declined("new rows are cast to another dtype", update)
    has_rows = example(source).dim() == len(shape)
    kept = found.rows_of(carry)
    steps, places = (kept < 0).nonzero()
    rows = found.row[steps, places]
    slots = np.full((len(kept), example(source).shape[dim] if has_rows else 1), -1)
    slots[steps, rows] = places
    if int((slots >= 0).sum()) != len(places):
        raise Declined("one new row is written to several places", update)
    slots = np.broadcast_to(slots, (record.length, slots.shape[1]))
    return Rows(dim, shape[dim], source, slots.shape[1:] if has_rows else (), slots, _moved(kept))


def _moved(kept: Numbers) -> Numbers | None:
    """The rows of the old buffer that rows are, -1 for new ones; None where they stay in their places."""
    return None if bool(((kept < 0) | (kept == np.arange(kept.shape[1]))).all()) else kept


def _rows(
    carry: fx.Node,
    base: fx.Node,
    dim: int,
    slots: Tensor,
    index_shape: tuple[int, ...],
    source: fx.Node,
    update: fx.Node,
    record: ScanRecord,
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
        if example(base).shape != shape:
            raise Declined("rows are written over something else than the old buffer", base)
        kept = Assembler(carry, dim, record).of(base).rows_of(carry)
        if not _all_written(slots.numpy(), kept):
            raise Declined("rows are written over something else than the old buffer", base)
        moved = _moved(kept)
    return Rows(dim, shape[dim], source, index_shape, slots.numpy(), moved)


def _all_written(slots: Numbers, kept: Numbers) -> bool:
    """Whether each step writes all rows that are none of the old buffer."""
    if not (kept < 0).any():
        return True
    if len(slots) * kept.shape[1] > TABLE_LIMIT:
        return False
    written = np.zeros((len(slots), kept.shape[1] + 1), bool)  # the last one is for slots that write nothing
    np.put_along_axis(written, slots, True, 1)
    return bool((written[:, :-1] | (kept >= 0)).all())


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
    if [*given[:dim], *given[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
        raise Declined("scatter writes single elements, not whole rows", update)
    value = _table(index, record, update).movedim(dim + 1, 1)
    value = value.reshape(*value.shape[:2], prod(value.shape[2:]))
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
