"""A buffer that is put together anew from its own old rows and new ones: a window of the last w rows.

`cat([c[1:], x])`, `cat([c, x])[1:]`, `stack([*c.unbind()[1:], x])`, `n[:-1] = c[1:]; n[-1] = x`, and `c.roll(-1)` or
`F.pad(c, ..)[1:]` with a row written are one thing, and so are rows that are picked and written by known numbers, as
where a cache is cut when it is full. Each is a table here, which says for every step and row of the result which row of
which value it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx

from nsa_compile.analyses.masks import constant
from nsa_compile.ir.aten import arguments, aten, operand
from nsa_compile.ir.carries import TABLE_LIMIT, Rows
from nsa_compile.ir.scans import ScanRecord, ancestors, example

Numbers = np.ndarray  # [S | 1, rows]
# In the place of where a row comes from: it is filled with a number.
NOWHERE = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Assembly:
    """For each step and row of a value along a dimension: `part`, which of the values `parts` it is from, and its `row`
    there.

    A part has the dimension, or is one row and lacks it. None stands for rows of a number.
    """

    parts: tuple[fx.Node | None, ...]
    part: Numbers
    row: Numbers

    def taken(self, rows: Numbers) -> Assembly:
        return Assembly(self.parts, _at(self.part, rows), _at(self.row, rows))

    def replaced(self, rows: Numbers, by: Assembly) -> Assembly:
        """The same with other rows in the place of some."""
        (part, other), parts = _aligned([self, by])
        return Assembly(parts, _put(part, rows, other), _put(self.row, rows, by.row))

    def where(self, flags: Numbers, other: Assembly) -> Assembly:
        """The same where a flag is true, `[S | 1, rows | 1]`, and another where it is false."""
        (part, part_of_other), parts = _aligned([self, other])
        return Assembly(parts, np.where(flags, part, part_of_other), np.where(flags, self.row, other.row))

    def rows_of(self, part: fx.Node | None) -> Numbers:
        """The row of a part that each row is, -1 for those of others."""
        place = self.parts.index(part) if part in self.parts else -1
        return np.where(self.part == place, self.row, -1)

    def sources(self, carry: fx.Node) -> list[fx.Node | None]:
        """The other values that it has rows of."""
        return [part for i, part in enumerate(self.parts) if part is not carry and bool((self.part == i).any())]


class Assembler:
    """Finds the rows of nodes of a step along a dimension, as rows of one of its carries and of other nodes."""

    def __init__(self, carry: fx.Node, dim: int, record: ScanRecord) -> None:
        self.carry, self.dim, self.record = carry, dim, record
        self._found: dict[fx.Node, Assembly] = {}

    def written_at(self, node: fx.Node, buffer: Rows, before: Numbers) -> Numbers | None:
        """Where the rows of a node come from, as `Rows.table` says it, `NOWHERE` for rows of a number; None where not
        all are rows of the carry, which is `buffer`, or of those a step writes, or of a number. `before` says it of the
        carry as each step finds it."""
        found, written = self.of(node), _first_name(buffer.written)
        if example(written).dim() == example(self.carry).dim():
            (written,) = cast("tuple[fx.Node]", self._new(written).parts)
        kept, new = (found.rows_of(part) for part in (self.carry, written))
        numbers = [i for i, part in enumerate(found.parts) if part is None or constant(part, self.record) is not None]
        if not (kept >= 0).any() or ((kept < 0) & (new < 0) & ~np.isin(found.part, numbers)).any():
            return None
        of_steps = np.where(new >= 0, np.arange(len(before))[:, None] * buffer.count + new, NOWHERE)
        return np.where(kept >= 0, _at(before, np.maximum(kept, 0)), of_steps)

    def of(self, node: fx.Node) -> Assembly:
        """The rows of a node; those of itself, where no rule says what else they are."""
        if node not in self._found:
            found = None
            if self.carry not in ancestors([node]):
                found = self._new(node)
            elif node is not self.carry and self._puts_together(node):
                found = _RULES[node.target](self, node)
            self._found[node] = found or _rows_of(node, example(node).shape[self.dim])
        return self._found[node]

    def _new(self, node: fx.Node) -> Assembly:
        """Rows that are none of the carry's, under the first of their names."""
        node = _first_name(node)
        is_one_row = node.target is aten.unsqueeze.default and self._puts_together(node)
        return _rows_of(_first_name(operand(node)), 1) if is_one_row else _rows_of(node, example(node).shape[self.dim])

    def ends(self, body: fx.GraphModule) -> list[fx.Node]:
        """Nodes put together of rows that a step reads otherwise than to put together more."""
        found = [node for node in body.graph.nodes if self._puts_together(node)]
        return [node for node in found if any(not self._puts_together(user) for user in node.users)]

    def _puts_together(self, node: fx.Node) -> bool:
        x, carry = node.meta.get("val"), example(self.carry)
        if not isinstance(x, Tensor) or x.dim() != carry.dim() or x.dtype != carry.dtype:
            return False
        same = all(a == b for d, (a, b) in enumerate(zip(x.shape, carry.shape, strict=True)) if d != self.dim)
        return same and dimension(node) == self.dim

    def row(self, node: fx.Node) -> Assembly:
        """The one row that a value without the dimension is."""
        if node.target is aten.select.int:
            taken = arguments(node)
            if taken.dim % example(taken.self).dim() == self.dim:
                return self.of(taken.self).taken(np.array([[taken.index]]))
        return _rows_of(_first_name(node), 1)

    def numbers(self, index: fx.Node, size: int) -> Numbers | None:
        """Row numbers at each step, if they are known."""
        if example(index).dim() != 1 or example(index).dtype not in (torch.int32, torch.int64):
            return None
        return self._known(index, size)

    def flags(self, condition: fx.Node, size: int) -> Numbers | None:
        """A truth for each step and row, or for all rows, if they are known: `[S | 1, rows | 1]`."""
        shape = example(condition).shape
        from_the_end = example(self.carry).dim() - self.dim
        if shape.numel() not in (1, shape[-from_the_end] if len(shape) >= from_the_end else 1):
            return None
        return self._known(condition, size)

    def _known(self, node: fx.Node, size: int) -> Numbers | None:
        """What a node holds at each step, for a table of `size` rows: `[S | 1, elements]`."""
        elements = example(node).numel()
        if (constant := self.record.constant.get(node)) is not None:
            return constant.numpy().reshape(1, elements)
        if (known := self.record.known.get(node)) is None or self.record.length * size > TABLE_LIMIT:
            return None
        return known.table().numpy().reshape(self.record.length, elements)

    def side(self, node: Any, size: int) -> Assembly | None:
        """The rows of one side of a choice, which may be one row for all of them."""
        if not isinstance(node, fx.Node):
            return None
        shape, rank = example(node).shape, example(self.carry).dim()
        if len(shape) == rank:
            rows = self.of(node)
            return rows if shape[self.dim] == size else rows.taken(np.zeros((1, size), np.int64))
        lacks_rows = len(shape) < rank - self.dim
        return _rows_of(_first_name(node), 1).taken(np.zeros((1, size), np.int64)) if lacks_rows else None


def _first_name(node: fx.Node) -> fx.Node:
    """What a node is but another name of."""
    while True:
        joined = arguments(node).tensors if node.target is aten.cat.default else []
        same_shape = node.target in (aten.expand.default, aten.reshape.default, aten.view.default, aten.clone.default)
        if len(joined) == 1:
            (node,) = joined
        elif same_shape and example(operand(node)).shape == example(node).shape:
            node = operand(node)
        else:
            return node


def _at(x: Numbers, rows: Numbers) -> Numbers:
    steps = max(len(x), len(rows))
    x, rows = (np.broadcast_to(y, (steps, y.shape[1])) for y in (x, rows))
    return np.take_along_axis(x, rows, 1)


def _put(x: Numbers, rows: Numbers, new: Numbers) -> Numbers:
    steps = max(len(x), len(rows), len(new))
    put = np.broadcast_to(x, (steps, x.shape[1])).copy()
    rows, new = (np.broadcast_to(y, (steps, y.shape[1])) for y in (rows, new))
    np.put_along_axis(put, rows, new, 1)
    return put


def _rows_of(part: fx.Node | None, count: int) -> Assembly:
    return Assembly((part,), np.zeros((1, count), np.int64), np.arange(count)[None])


def _aligned(pieces: Sequence[Assembly]) -> tuple[list[Numbers], tuple[fx.Node | None, ...]]:
    """Which part each row of several pieces is from, of the parts that all of them have."""
    parts = list(dict.fromkeys(part for piece in pieces for part in piece.parts))
    places = [np.array([parts.index(part) for part in piece.parts]) for piece in pieces]
    return [place[piece.part] for place, piece in zip(places, pieces, strict=True)], tuple(parts)


def _joined(pieces: Sequence[Assembly]) -> Assembly:
    steps = max(len(piece.part) for piece in pieces)
    found, parts = _aligned(pieces)

    def side_by_side(x: Sequence[Numbers]) -> Numbers:
        return np.concatenate([np.broadcast_to(y, (steps, y.shape[1])) for y in x], 1)

    return Assembly(parts, side_by_side(found), side_by_side([piece.row for piece in pieces]))


def _sliced(count: int, start: int | None, end: int | None, step: int | None = None) -> Numbers:
    return np.arange(count)[None, start:end:step]


def _slice(to: Assembler, node: fx.Node) -> Assembly:
    taken = arguments(node)
    return to.of(taken.self).taken(_sliced(example(taken.self).shape[to.dim], taken.start, taken.end, taken.step))


def _roll(to: Assembler, node: fx.Node) -> Assembly:
    rows = np.roll(np.arange(example(node).shape[to.dim]), arguments(node).shifts[0])
    return to.of(operand(node)).taken(rows[None])


def _cat(to: Assembler, node: fx.Node) -> Assembly:
    # cat() skips what is empty, `[0]`.
    return _joined([to.of(part) for part in arguments(node).tensors if example(part).dim() == example(node).dim()])


def _stack(to: Assembler, node: fx.Node) -> Assembly:
    return _joined([to.row(part) for part in arguments(node).tensors])


def _unsqueeze(to: Assembler, node: fx.Node) -> Assembly:
    return to.row(operand(node))


def _slice_scatter(to: Assembler, node: fx.Node) -> Assembly:
    write = arguments(node)
    rows = _sliced(example(node).shape[to.dim], write.start, write.end, write.step)
    return to.of(write.self).replaced(rows, to.of(write.src))


def _select_scatter(to: Assembler, node: fx.Node) -> Assembly:
    write = arguments(node)
    row = write.index % example(node).shape[to.dim]
    return to.of(write.self).replaced(np.array([[row]]), to.row(write.src))


def _pad(to: Assembler, node: fx.Node) -> Assembly:
    before, after = _padding(node)[to.dim]
    inner = to.of(operand(node))
    count = inner.part.shape[1]
    kept = inner.taken(_sliced(count, max(-before, 0), count - max(-after, 0)))
    return _joined([_rows_of(None, max(before, 0)), kept, _rows_of(None, max(after, 0))])


def _index_select(to: Assembler, node: fx.Node) -> Assembly | None:
    picked = arguments(node)
    rows = to.numbers(picked.index, example(node).shape[to.dim])
    return None if rows is None else to.of(picked.self).taken(rows)


def _index(to: Assembler, node: fx.Node) -> Assembly | None:
    (index,) = (x for x in arguments(node).indices if x is not None)
    rows = to.numbers(index, example(node).shape[to.dim])
    return None if rows is None else to.of(operand(node)).taken(rows)


def _index_copy(to: Assembler, node: fx.Node) -> Assembly | None:
    write, size = arguments(node), example(node).shape[to.dim]
    rows = to.numbers(write.index, size)
    if rows is None or bool((np.diff(np.sort(rows, 1), axis=1) == 0).any()):
        return None  # of rows that are written twice, which value stays is not defined
    return to.of(write.self).replaced(rows, to.of(write.source))


def _where(to: Assembler, node: fx.Node) -> Assembly | None:
    size = example(node).shape[to.dim]
    flags = to.flags(operand(node), size)
    if_true, if_false = (to.side(side, size) for side in node.args[1:3])
    return None if flags is None or if_true is None or if_false is None else if_true.where(flags, if_false)


def _same(to: Assembler, node: fx.Node) -> Assembly:
    return to.of(operand(node))


def _padding(node: fx.Node) -> list[tuple[int, int]]:
    """How many rows are put before and after each dimension. `pad` names the last one first."""
    given = [*arguments(node).pad, *[0] * 2 * example(node).dim()][: 2 * example(node).dim()]
    return [*zip(given[::2], given[1::2], strict=True)][::-1]


def dimension(node: fx.Node) -> int | None:
    """The dimension along which a node puts rows together, if it does."""
    if node.target in (aten.clone.default, aten.where.self):
        of = [x for x in node.args if isinstance(x, fx.Node) and example(x).shape == example(node).shape]
        if (dim := next((dim for x in of if (dim := dimension(x)) is not None), None)) is not None:
            return dim
        shape = example(operand(node)).shape  # of a condition, which may say which rows are written
        dims = [d - len(shape) for d, size in enumerate(shape) if size != 1 and node.target is aten.where.self]
    elif node.target is aten.index.Tensor:
        given = arguments(node).indices
        dims = [d for d, index in enumerate(given) if index is not None and example(index).dim() == 1]
        dims = dims if len(dims) == sum(index is not None for index in given) else []
    elif node.target is aten.constant_pad_nd.default:
        dims = [dim for dim, sizes in enumerate(_padding(node)) if any(sizes)]
    elif node.target is aten.roll.default:
        dims = arguments(node).dims
    elif node.target in _RULES:
        dims = [arguments(node).dim]
    else:
        return None
    return dims[0] % example(node).dim() if len(dims) == 1 and example(node).dim() else None


_RULES: dict[Any, Callable[[Assembler, fx.Node], Assembly | None]] = {
    aten.slice.Tensor: _slice,
    aten.roll.default: _roll,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.unsqueeze.default: _unsqueeze,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.constant_pad_nd.default: _pad,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.index_copy.default: _index_copy,
    aten.where.self: _where,
    aten.clone.default: _same,
}
