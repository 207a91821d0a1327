"""Writes to a row of a carry, put into the forms that other analyses know.

- A row that is written where it was read is not written. `M[i] += x` of Python adds to the row and then writes it.

      index_copy(M, 0, i, M[i])    ->    M

- A row that is itself written to is one write at two numbers.

      index_copy(K, 0, i, index_copy(K[i], 0, j, k))    ->    index_put(K, [i, j], k)

- Writes of one row that are chosen between by what is known, or that are made at some steps alone, are one write.

      where(f, index_copy(K, 0, i, k), K)    ->    where((arange(n) == i) & f, k, K)

- What is added to one row is added to all, as zeros but to that one. Sums of the blocks of a sequence, and so their
  means, are kept so. They are linear in the carry then, which gives them a parallel form. So have extremes of blocks.

      M[t // d] += x                        ->    M + where(arange(n) == t // d, x, 0)
      M[t // d] = maximum(M[t // d], x)     ->    where(arange(n) == t // d, maximum(M, x), M)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.ir.aten import arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder, constant_node, eliminate_dead_code
from nsa_compile.ir.scans import ScanRecord, ScanSite, ancestors, example

__all__ = ["is_known_row", "join_row_writes", "merge_chosen_writes", "spread_row_updates"]


def join_row_writes(site: ScanSite, record: ScanRecord) -> bool:
    """Leave out writes of a row to its own place, and join a write to a row with the write of that row; whether there
    were any. The numbers of rows are known to be right: nothing else would say that they are not."""
    changed = False
    for node in site.body.graph.find_nodes(op="call_function", target=aten.index_copy.default):
        put: Any = arguments(node)
        source = _moved_from(put.source)
        if not example(node).dim() or not is_known_row(put.index, example(node).shape[put.dim], record):
            continue
        if _is_row_of(source, put.self, put.dim, put.index):
            node.replace_all_uses_with(put.self)
            changed = True
        elif source.target is aten.index_copy.default and (indices := _numbers_of_both(put, source, record)):
            values = arguments(source).source
            joined = NodeBuilder(site.body, node)(aten.index_put.default, put.self, indices, values)
            node.replace_all_uses_with(joined)
            changed = True
    if changed:
        eliminate_dead_code(site.body)
    return changed


def _numbers_of_both(put: Any, source: fx.Node, record: ScanRecord) -> list[fx.Node | None] | None:
    """Where a row of `put` and a part of that row lie, whose dimensions are neighbours."""
    within: Any = arguments(source)
    rank = example(put.self).dim()
    first, second = put.dim % rank, within.dim % max(1, rank - 1)
    is_row = _is_row_of(_moved_from(within.self), put.self, put.dim, put.index)
    if not is_row or example(within.self).dim() != rank - 1 or second not in (first, first - 1):
        return None
    if not is_known_row(within.index, example(within.self).shape[second], record):
        return None
    numbers = [put.index, within.index] if second == first else [within.index, put.index]
    return [*[None] * min(first, second), *numbers]


def merge_chosen_writes(site: ScanSite, record: ScanRecord) -> bool:
    """Make one write of those of a carry's rows that are chosen between; whether there were any."""
    changed = False
    for carry, node in zip(site.placeholders()[0], site.outputs()[0], strict=True):
        if node.target is not aten.where.self or (found := _chosen(node, carry, record)) is None:
            continue
        if len(dims := {write.dim for write in found.writes()}) == 1:
            build, dim = NodeBuilder(site.body, node), dims.pop()
            flag, number, row = found.joined(build)
            here = _mask_of_row(carry, dim, number, flag if isinstance(flag, fx.Node) else None, build)
            node.replace_all_uses_with(build(aten.where.self, here, row, carry))
            changed = True
    if changed:
        eliminate_dead_code(site.body)
    return changed


# Whether a row is written, its number, and the row.
Made = tuple["fx.Node | bool", Any, Any]


@dataclass(frozen=True)
class _Write:
    """A row of a carry replaced, or, without a number, none."""

    dim: int = 0
    number: fx.Node | None = None
    row: fx.Node | None = None

    def writes(self) -> list[_Write]:
        return [] if self.number is None else [self]

    def joined(self, build: NodeBuilder) -> Made:
        return self.number is not None, self.number, self.row


@dataclass(frozen=True)
class _Chosen:
    """One of two writes, by a condition that is known at each step."""

    flag: fx.Node
    sides: tuple[_Write | _Chosen, _Write | _Chosen]

    def writes(self) -> list[_Write]:
        return [write for side in self.sides for write in side.writes()]

    def joined(self, build: NodeBuilder) -> Made:
        (flag, *mine), (other_flag, *others) = (side.joined(build) for side in self.sides)
        number, row = (self._one(*pair, build) for pair in zip(mine, others, strict=True))
        return self._either(flag, other_flag, build), number, row

    def _one(self, a: Any, b: Any, build: NodeBuilder) -> Any:
        if a is None or b is None:
            return b if a is None else a
        same = _computed_alike(_moved_from(a), _moved_from(b)) and example(a).shape == example(b).shape
        return a if same else build(aten.where.self, self.flag, a, b)

    def _either(self, a: fx.Node | bool, b: fx.Node | bool, build: NodeBuilder) -> fx.Node | bool:
        if isinstance(a, bool) and isinstance(b, bool):
            if a == b:
                return a
            return self.flag if a else build(aten.bitwise_not.default, self.flag)
        a, b = (build(aten.full_like.default, self.flag, x) if isinstance(x, bool) else x for x in (a, b))
        return build(aten.where.self, self.flag, a, b)


def _chosen(node: fx.Node, carry: fx.Node, record: ScanRecord) -> _Write | _Chosen | None:
    if node is carry:
        return _Write()
    if node.target is aten.index_copy.default:
        put: Any = arguments(node)
        if put.self is not carry or example(put.index).numel() != 1 or not example(carry).dim():
            return None
        dim = put.dim % example(carry).dim()
        known = is_known_row(put.index, example(carry).shape[dim], record)
        return _Write(dim, put.index, put.source) if known else None
    if node.target is not aten.where.self or example(operand(node)).numel() != 1:
        return None
    flag, *sides = node.args
    found = [_chosen(side, carry, record) for side in sides]  # pyrefly: ignore[bad-argument-type]
    is_known = flag in record.known or flag in record.constant
    if not is_known or any(side is None for side in found):
        return None
    return _Chosen(flag, tuple(found))  # pyrefly: ignore[bad-argument-type]


def spread_row_updates(site: ScanSite, record: ScanRecord) -> bool:
    """Spread what a row of a carry, or of what is made of one, is combined with over all rows; whether any was."""
    changed, carries = False, set(site.placeholders()[0])
    for write in list(site.body.graph.nodes):
        if (found := _row_update(write)) is None or carries.isdisjoint(ancestors([found.whole])):
            continue
        size = example(found.whole).shape[found.dim]
        if is_known_row(found.number, size, record) and carries.isdisjoint(ancestors([found.number, found.added])):
            write.replace_all_uses_with(_spread(found, NodeBuilder(site.body, write)))
            changed = True
    if changed:
        eliminate_dead_code(site.body)
    return changed


@dataclass(frozen=True)
class _RowUpdate:
    """`whole[..., number, ...] = by(whole[..., number, ...], added)`, along a dimension; of the shape `spread` is the
    row within the whole."""

    whole: fx.Node
    dim: int
    number: fx.Node
    added: fx.Node
    total: list[int]  # the shape of the sum
    spread: list[int]
    by: Any = aten.add.Tensor


def _row_update(write: fx.Node) -> _RowUpdate | None:
    """What one row of a tensor is combined with, if a write does nothing else."""
    if write.target not in (aten.index_add.default, aten.index_copy.default) or not example(write).dim():
        return None
    put: Any = arguments(write)
    dim, shape = put.dim % example(write).dim(), list(example(put.source).shape)
    if example(put.index).numel() != 1:
        return None
    if write.target is aten.index_add.default:
        found = _RowUpdate(put.self, dim, put.index, put.source, shape, shape) if put.alpha == 1 else None
    else:
        total = _moved_from(put.source)
        if (added := _other_operand(total, put)) is None:
            return None
        found = _RowUpdate(put.self, dim, put.index, added, list(example(total).shape), shape, total.target)
    return found if found is not None and example(found.added).dtype == example(write).dtype else None


def _other_operand(total: fx.Node, put: Any) -> fx.Node | None:
    """What the row that a write replaces is combined with: the other operand of a sum, a maximum or a minimum."""
    if total.target not in _COMBINED or total.kwargs or len(total.args) > 2:
        return None
    for old, added in (total.args[:2], total.args[1::-1]):
        if not isinstance(old, fx.Node) or not isinstance(added, fx.Node) or example(old).shape != example(total).shape:
            continue
        if _is_row_of(_moved_from(old), put.self, put.dim, put.index):
            return added
    return None


_COMBINED = (aten.add.Tensor, aten.maximum.default, aten.minimum.default)


def _is_row_of(read: fx.Node, x: fx.Node, dim: int, number: fx.Node) -> bool:
    """Whether it is the one row of a tensor that has a number, along a dimension."""
    if read.target is not aten.index_select.default or operand(read) is not x or example(number).numel() != 1:
        return False
    picked: Any = arguments(read)
    return (picked.dim - dim) % example(x).dim() == 0 and _computed_alike(picked.index, number)


def _moved_from(node: fx.Node) -> fx.Node:
    """What has the same elements in the same order, in other dimensions."""
    while True:
        joined: Any = node.args[0] if node.target in (aten.cat.default, aten.stack.default) else ()
        if len(joined) == 1:
            node = joined[0]
        elif node.target in _SAME_ORDER and example(node).numel() == example(operand(node)).numel():
            node = operand(node)
        else:
            return node


# Where the number of elements stays.
_SAME_ORDER = {
    aten.squeeze.dim, aten.unsqueeze.default, aten.reshape.default, aten.expand.default, aten.select.int,
}  # fmt: skip


def _computed_alike(a: Any, b: Any) -> bool:
    """Whether two values are the same, as the same operators made them of the same values."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return bool(a is b or a == b)
    if a.op != "call_function" or (a.target, len(a.args), a.kwargs) != (b.target, len(b.args), b.kwargs):
        return False
    return all(map(_computed_alike, a.args, b.args))


def is_known_row(number: fx.Node, size: int, record: ScanRecord) -> bool:
    """Whether the number of a row is known at each step, and that of one that there is."""
    if example(number).dtype == torch.bool:
        return False  # a mask
    with unset_fake_temporarily():
        numbers = record.known[number].table() if number in record.known else record.constant.get(number)
        return numbers is not None and bool(((numbers >= 0) & (numbers < size)).all())


def _spread(found: _RowUpdate, build: NodeBuilder) -> fx.Node:
    here = _mask_of_row(found.whole, found.dim, found.number, None, build)
    added = build(aten.reshape.default, build(aten.expand.default, found.added, found.total), found.spread)
    if found.by is aten.add.Tensor:
        return build(aten.add.Tensor, found.whole, build(aten.where.ScalarOther, here, added, 0))
    return build(aten.where.self, here, build(found.by, found.whole, added), found.whole)


def _mask_of_row(x: fx.Node, dim: int, number: fx.Node, flag: fx.Node | None, build: NodeBuilder) -> fx.Node:
    """Which rows of a tensor along a dimension have a number, where a flag is set; as a mask of the tensor."""
    shape = example(x).shape
    rows = constant_node(build, torch.arange(shape[dim]), example(x).device)
    here = build(aten.eq.Tensor, rows, build(aten.reshape.default, number, [1]))
    if flag is not None:
        here = build(aten.bitwise_and.Tensor, here, build(aten.reshape.default, flag, [1]))
    return build(aten.reshape.default, here, [-1 if d == dim else 1 for d in range(len(shape))])
