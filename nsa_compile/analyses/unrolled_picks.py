"""Attention to rows that are picked by data, written as attention to all rows under a mask of those that are picked.

Before, with the n best rows of a ranking, or the rows of the best blocks:

    index = scores.topk(n).indices                               # [..., n]
    s     = masked_fill(q · gather(cache, index)ᵀ, index > t, -inf)
    out   = softmax(s) · gather(cache_v, index)

After, the same numbers:

    s      = masked_fill(q · cacheᵀ, position > t, -inf)         # [..., S]
    chosen = zeros.scatter(index, True)
    out    = softmax(masked_fill(s, ~chosen, -inf)) · cache_v

The n picked rows are *columns*, and the rows of the cache their *places*. What is computed of a picked row is computed
of the row in its place; a softmax over columns is one over places, but for those that no column has. That holds if no
place is picked twice, so the indices must come from a ranking, which picks each once; and if all that is put together
in a column comes from one place, so each value is followed with *whose* indices picked its rows, by number.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.known import LIMIT
from nsa_compile.analyses.masks import Unrecognised, side_of_where
from nsa_compile.analyses.staleness import Analysis
from nsa_compile.analyses.unrolling import REDUCED, VIEWS, Unrolled, Writer, sources, summed
from nsa_compile.ir.aten import ADD, COPIED, MATMUL, MUL, REARRANGED, SOFTMAX, SORTED, arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder, constant_node, mark_absent
from nsa_compile.ir.scans import ScanRecord, ancestors, example, place_of

__all__ = ["PickUnroller"]

# Comparisons with -inf: whether they say that a number is it, or that it is not.
_IS_REMOVED = {aten.eq.Scalar: True, aten.le.Scalar: True, aten.ne.Scalar: False, aten.gt.Scalar: False}


@dataclass(frozen=True)
class Ranked:
    """Rows that a ranking picks: those of the indices that it gives, or of blocks that the indices are numbers of.

    Attributes:
        ranking: the sort or top-k; `ends` what is cut from its last dimension.
        numbers: how many there are to pick from; `size`: rows of each.
    """

    ranking: fx.Node
    ends: tuple[Any, ...]
    numbers: int
    size: int = 1

    @property
    def places(self) -> int:
        return self.numbers * self.size


@dataclass(frozen=True, eq=False)
class Columns:
    """A dimension of picked rows.

    `whose` says of each element by which row of the ranking's indices its column was picked: in the layout of the
    value, of size 1 along the columns and wherever it is the same.
    """

    ranked: Ranked
    whose: Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """What `x[indices]` is with all rows in the place of those picked: `x.permute(order).reshape(shape)`."""

    dim: int  # of the rows
    columns: Columns
    order: list[int]
    shape: list[int]


class PickUnroller:
    """Writes products over picked rows anew, as products over all rows; `analysis` is that of the step as it was."""

    def __init__(self, body: fx.GraphModule, record: ScanRecord, analysis: Analysis) -> None:
        self.body, self.record, self.analysis = body, record, analysis
        self.columns: dict[tuple[fx.Node, int], Columns] = {}
        self.layouts: dict[fx.Node, Layout] = {}  # of what several indices pick
        self.merged: dict[tuple[fx.Node, int], int] = {}  # a view whose columns are blocks of rows: their dimension
        with unset_fake_temporarily(), torch.no_grad():
            for node in body.graph.nodes:
                value = node.meta.get("val")
                if isinstance(value, Tensor) and 0 < value.numel() <= LIMIT and node not in record.constant:
                    self._find(node, value)

    # -- where columns are

    def _find(self, node: fx.Node, value: Tensor) -> None:
        """Note the dimensions of a value that are columns, given those of all values before."""
        last = value.dim() - 1
        if (ranked := _ranked(node)) is not None:
            rows = torch.arange(value.shape[:-1].numel()).reshape(*value.shape[:-1], 1)
            self.columns[node, last] = Columns(ranked, rows)
        elif node.target in (aten.gather.default, aten.index_select.default):
            dim = arguments(node).dim % value.dim()
            if (picked := self._picked(node, dim)) is not None:
                self.columns[node, dim] = picked
        elif node.target is aten.index.Tensor:
            if (layout := self._layout_of_index(node)) is not None:
                self.layouts[node] = layout
                self.columns[node, layout.dim] = layout.columns
        elif (blocks := self._rows_of_blocks(node)) is not None:
            self.columns[node, last] = blocks
        else:
            for dim in range(value.dim()):
                if (columns := self._moved(node, dim)) is not None:
                    self.columns[node, dim] = columns

    def _picked(self, node: fx.Node, dim: int) -> Columns | None:
        """The columns of what is picked from a tensor along a dimension."""
        given = arguments(node)
        shape, index = example(given.self).shape, example(given.index)
        by_element = node.target is aten.gather.default
        columns = self.columns.get((given.index, dim if by_element else 0))
        if columns is None or columns.ranked.places != shape[dim] or (given.self, dim) in self.columns:
            return None
        if not self._is_place(given.index, columns.ranked.places):
            return None
        if not by_element:
            return Columns(columns.ranked, columns.whose.reshape([1] * len(shape))) if index.dim() == 1 else None
        same = all(n == m for d, (n, m) in enumerate(zip(shape, index.shape, strict=True)) if d != dim)
        return columns if same else None

    def _layout_of_index(self, node: fx.Node) -> Layout | None:
        """`x[batch, :, rows]`, say: one index picks rows, and the others are constants that go through a dimension."""
        indices = [(d, x) for d, x in enumerate(arguments(node).indices) if x is not None]
        shape, constant = example(operand(node)).shape, self.record.constant
        picking = [(d, x) for d, x in indices if x not in constant]
        if len(picking) != 1 or not example(picking[0][1]).dim():
            return None
        ((rows, index),) = picking
        columns = self.columns.get((index, example(index).dim() - 1))
        if columns is None or columns.ranked.places != shape[rows] or not self._is_place(index, shape[rows]):
            return None
        together = list(torch.broadcast_shapes(*(example(x).shape for _, x in indices)))
        through: dict[int, int] = {len(together) - 1: rows}  # a dimension of all indices: that of x
        for d, x in indices:
            if x is not index and (found := _goes_through(constant[x].expand(together), shape[d])) is not None:
                through.setdefault(found, d)
        in_order = sorted(through)
        if len(through) != len(indices) or any(n > 1 and e not in through for e, n in enumerate(together)):
            return None
        dims = [d for d, _ in indices]
        others = [d for d in range(len(shape)) if d not in dims]
        at = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
        order = [*others[:at], *(through[e] for e in in_order), *others[at:]]
        all_rows = [shape[through[e]] if e in through else 1 for e in range(len(together))]
        sizes = [*(shape[d] for d in others[:at]), *all_rows, *(shape[d] for d in others[at:])]
        lead = [1] * (len(together) - columns.whose.dim())
        whose = columns.whose.reshape([1] * at + lead + list(columns.whose.shape) + [1] * (len(others) - at))
        return Layout(at + len(together) - 1, Columns(columns.ranked, whose), order, sizes)

    def _rows_of_blocks(self, node: fx.Node) -> Columns | None:
        """`(index[..., None] * size + arange(size)).flatten(-2)`."""
        if node.target not in VIEWS or not isinstance(total := node.args[0], fx.Node) or total.target not in ADD:
            return None
        shape, size = example(node).shape, example(total).shape[-1] if example(total).dim() else 0
        if example(total).dim() != len(shape) + 1 or example(total).shape[:-2] != shape[:-1]:
            return None
        within = next((x for x in total.args[:2] if x in self.record.constant), None)
        first = next((x for x in total.args[:2] if x is not within), None)
        if within is None or not isinstance(first, fx.Node) or first.target not in MUL or len(total.args) > 2:
            return None
        numbers = next(
            (x for x in first.args[:2] if isinstance(x, fx.Node) and x.target is aten.unsqueeze.default), None
        )
        factor = next((x for x in first.args[:2] if x is not numbers), None)
        if numbers is None or total.kwargs or self._number(factor) != size:
            return None
        offsets = self.record.constant[within]
        index, rank = operand(numbers), example(numbers).dim()
        columns = self.columns.get((index, rank - 2))
        if arguments(numbers).dim % rank != rank - 1 or columns is None or columns.ranked.size != 1:
            return None
        if (
            offsets.shape != (size,)
            or not torch.equal(offsets, torch.arange(size))
            or not self._is_place(index, columns.ranked.places)
        ):
            return None
        return Columns(_of_blocks(columns.ranked, size), columns.whose)

    def _number(self, value: Any) -> Any:
        constant = self.record.constant.get(value) if isinstance(value, fx.Node) else None
        return value if constant is None else constant.item() if constant.numel() == 1 else None

    def _is_place(self, node: fx.Node, places: int) -> bool:
        """Whether a value in columns is their places, and not something that is made of them, or of other numbers."""
        while _ranked(node) is None and self._rows_of_blocks(node) is None:
            if node.target is aten.clamp.default:
                low, high = arguments(node).min, arguments(node).max
                if (low is not None and low > 0) or (high is not None and high < places - 1):
                    return False
            elif node.target not in REARRANGED | COPIED:
                return False
            node = operand(node)
        return _ranked(node) is None or _is_indices(node)

    def _moved(self, node: fx.Node, dim: int) -> Columns | None:
        """The columns of a dimension whose rows are computed from the same rows of others."""
        found = self.sources(node, dim)
        with_columns = [key for key in found or () if key in self.columns]
        if found is None or not with_columns:
            return None
        if any(key not in self.columns and key[1] >= 0 and example(key[0]).shape[key[1]] != 1 for key in found):
            return None
        ranked = self._ranked_of(node, dim, self.columns[with_columns[0]].ranked)
        if any(self.columns[key].ranked != self.columns[with_columns[0]].ranked for key in with_columns):
            return None
        if example(node).shape[dim] != example(with_columns[0][0]).shape[with_columns[0][1]] * (
            ranked.size // self.columns[with_columns[0]].ranked.size
        ):
            return None
        whose = [self._whose(node, dim, *key) for key in with_columns]
        if any(x is None for x in whose):
            return None
        first, *others = cast("list[Tensor]", whose)
        same = all(bool((x == first).all()) for x in others)
        return Columns(ranked, first) if same else None

    def _ranked_of(self, node: fx.Node, dim: int, ranked: Ranked) -> Ranked:
        if (node, dim) not in self.merged:
            return ranked
        return _of_blocks(ranked, example(node).shape[dim] // example(operand(node)).shape[self.merged[node, dim]])

    def sources(self, node: fx.Node, dim: int) -> list[tuple[fx.Node, int]] | None:
        """The operands whose rows the rows of a node are computed from; a view may put blocks of rows in line."""
        found = sources(node, dim)
        if found is not None or node.target not in VIEWS:
            return found
        source, shape = operand(node), example(node).shape
        old = example(source).shape
        for d in range(len(old) - 1):
            columns = self.columns.get((source, d))
            behind = old[d + 2 :].numel() == shape[dim + 1 :].numel()
            if columns is not None and columns.ranked.size == 1 and behind and old[d] * old[d + 1] == shape[dim]:
                self.merged[node, dim] = d
                return [(source, d)]
        return None

    def _whose(self, node: fx.Node, dim: int, source: fx.Node, source_dim: int) -> Tensor | None:
        """By whose indices the columns of a node were picked, as far as those of an operand say; None where several."""
        shape = example(source).shape
        whole = self.columns[source, source_dim].whose
        target: Any = node.target
        if target in COPIED or target is aten._to_copy.default:
            return whole
        if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags:
            return whole.reshape([1] * (example(node).dim() - whole.dim()) + list(whole.shape))
        if target in REARRANGED:
            whole = whole.expand(shape)
            rest: Any = node.args[1:]
            moved = whole.reshape(rest[0]) if target in VIEWS else target(whole, *rest, **node.kwargs)
            return _shrunk(moved) if _is_same(moved, [dim]) else None
        if target in MATMUL:
            gone = len(shape) - 1 if source is node.args[0] and source_dim != len(shape) - 1 else len(shape) - 2
            kept = whole.narrow(gone, 0, 1)
            kept = kept.squeeze(gone) if target is aten.mv.default else kept
            return _shrunk(kept) if _is_same(whole, [gone]) else None
        if target in SOFTMAX:
            return whole if _is_same(whole, [arguments(node).dim]) else None
        if target in REDUCED:
            given = arguments(node)
            dims = given.dim if isinstance(given.dim, list | tuple) else [given.dim]
            dims = [d % len(shape) for d in dims if d is not None] or list(range(len(shape)))
            if not _is_same(whole, dims):
                return None
            kept = whole.amax(dims, keepdim=True)
            return kept if given.keepdim else kept.squeeze(dims)
        return None

    # -- products over columns

    def products(self) -> list[fx.Node]:
        """Products over columns of weights and values that were picked by the same indices."""
        return [n for n in self.body.graph.nodes if n.target in MATMUL and self._over(n) is not None]

    def _over(self, product: fx.Node) -> Columns | None:
        a, b = cast("tuple[fx.Node, fx.Node]", product.args[:2])
        if example(b).dim() < 2:
            return None
        rows, others = (self.columns.get(key) for key in summed(a, b))
        if rows is None or others is None or rows.ranked != others.ranked:
            return None
        return rows if bool((rows.whose == others.whose).all()) else None

    def unroll(self, product: fx.Node) -> fx.Node:
        """Write one product over columns anew and let it take the place of the old one; the new one.

        Raises:
            Unrecognised: it cannot be written so.
        """
        columns = self._over(product)
        assert columns is not None
        writer = _PickWriter(cast(Any, self), cast(Any, columns.ranked), NodeBuilder(self.body, product))
        a, b = cast("tuple[fx.Node, fx.Node]", product.args[:2])
        new = [writer.write(x, dim, columns.ranked) for x, dim in summed(a, b)]
        if not any(value.is_zero_elsewhere for value in new):
            raise Unrecognised("what it weighs its rows with is no softmax over them", product)
        found = writer.build(product.target, *(value.node for value in new))
        product.replace_all_uses_with(found)
        return found


def _ranked(node: fx.Node) -> Ranked | None:
    """If a node is the indices of a ranking, or its values, or the first ones of these."""
    cut = operand(node) if node.target is aten.slice.Tensor else node
    source = cut.args[0] if cut.target is operator.getitem else None
    if not isinstance(source, fx.Node) or source.target not in SORTED:
        return None
    rank = example(cut).dim()
    if not rank or arguments(source).dim % rank != rank - 1:
        return None
    if cut is not node and (arguments(node).dim % rank != rank - 1 or arguments(node).step not in (None, 1)):
        return None
    ends = () if cut is node else (arguments(node).start, arguments(node).end)
    return Ranked(source, ends, example(arguments(source).self).shape[-1])


def _is_indices(node: fx.Node) -> bool:
    cut = operand(node) if node.target is aten.slice.Tensor else node
    return place_of(cut) == 1


def _goes_through(index: Tensor, size: int) -> int | None:
    """The dimension of an index, but the last, along which it is 0, 1, … up to the size."""
    for e in range(index.dim() - 1):
        counting = torch.arange(size).reshape([-1 if d == e else 1 for d in range(index.dim())])
        if index.shape[e] == size and bool((index == counting).all()):
            return e
    return None


def _of_blocks(ranked: Ranked, size: int) -> Ranked:
    return Ranked(ranked.ranking, ranked.ends, ranked.numbers, size)


def _is_same(x: Tensor, dims: list[int]) -> bool:
    return all(bool((x == x.narrow(d, 0, 1)).all()) for d in dims)


def _shrunk(x: Tensor) -> Tensor:
    for d in range(x.dim()):
        if _is_same(x, [d]):
            x = x.narrow(d, 0, 1)
    return x


@dataclass
class _PickWriter(Writer):
    """Writes the values that one product over picked rows needs anew, before that product."""

    instead: fx.Node | None = None  # what takes the place of the scores that are ranked

    def write(self, node: Any, dim: int, axis: Any) -> Unrolled:
        if not isinstance(node, fx.Node) or dim < 0:
            return Unrolled(node)
        of = cast(PickUnroller, self.of)
        columns = of.columns.get((node, dim))
        if columns is None:
            if example(node).shape[dim] == 1:
                return Unrolled(node)
            raise Unrecognised("what its rows meet is in the order in which they were picked", node)
        key = node, dim, columns.ranked
        if key not in self.done:
            self.done[key] = self._write(node, dim, columns.ranked)  # pyrefly: ignore[unsupported-operation]
        return self.done[key]  # pyrefly: ignore[bad-index]

    def _write(self, node: fx.Node, dim: int, axis: Any) -> Unrolled:
        of, shape = cast(PickUnroller, self.of), [1] * example(node).dim()
        shape[dim] = axis.places
        if _ranked(node) is not None and not _is_indices(node):
            return Unrolled(self.instead or arguments(axis.ranking).self)
        if (removed := self._removed(node, dim, axis)) is not None:
            return Unrolled(removed)
        if _ranked(node) is not None or of._rows_of_blocks(node) is not None:
            place = constant_node(self.build, torch.arange(axis.places).reshape(shape), example(node).device)
            return Unrolled(place)
        if node.target in (aten.gather.default, aten.index_select.default):
            return Unrolled(operand(node))
        if (layout := of.layouts.get(node)) is not None:
            moved = self.build(aten.permute.default, operand(node), layout.order)
            return Unrolled(self.build(aten.reshape.default, moved, layout.shape))
        if node.target in SOFTMAX and arguments(node).dim % len(shape) == dim:
            scores = self.write(operand(node), dim, axis).node
            others = self.build(aten.bitwise_not.default, self._chosen(of.columns[node, dim], len(shape), dim))
            mark_absent(others)
            scores = self.build(aten.masked_fill.Scalar, scores, others, -math.inf)
            return Unrolled(self.build(node.target, scores, dim, *node.args[2:]), is_zero_elsewhere=True)
        if (node, dim) in of.merged:
            sizes = list(example(node).shape)
            sizes[dim] = axis.places
            return Unrolled(
                self.build(aten.reshape.default, self.write(operand(node), of.merged[node, dim], axis).node, sizes)
            )
        return self._row_by_row(node, dim, axis)

    def _removed(self, node: fx.Node, dim: int, axis: Any) -> fx.Node | None:
        """Whether ranked scores are -inf, or are not, by the masks that make them so: known ones say more than data.

        None where a node does not compare what a ranking gives with -inf, or scores are -inf without a mask.
        """
        if node.target not in _IS_REMOVED or node.args[1] != -math.inf:
            return None
        of, build, best = cast(PickUnroller, self.of), self.build, operand(node)
        while _ranked(best) is None and best.target in REARRANGED | COPIED:
            best = operand(best)
        if _ranked(best) is None or _is_indices(best):
            return None
        scores = cast(fx.Node, arguments(axis.ranking).self)
        shape = list(example(scores).shape)
        masks = []
        while True:
            if scores.target in COPIED:
                scores = operand(scores)
            elif (side := side_of_where(scores, of.record)) is not None:
                masks.append(side)
                scores = side.value
            else:
                break
        size = of.analysis.magnitudes.of(scores)
        if size is None or size.floors is not None or not of.analysis.settled.keys().isdisjoint(ancestors([scores])):
            return None
        removed = build(aten.full.default, shape, False, dtype=torch.bool, device=example(scores).device)
        for side in reversed(masks):
            held = side.condition if side.constant_if_true else build(aten.bitwise_not.default, side.condition)
            if side.constant == -math.inf:
                removed = build(aten.bitwise_or.Tensor, removed, held)
            else:
                removed = build(aten.bitwise_and.Tensor, removed, build(aten.bitwise_not.default, held))
        if not _IS_REMOVED[node.target]:
            removed = build(aten.bitwise_not.default, removed)
        return cast(fx.Node, replace(self, done={}, instead=removed).write(operand(node), dim, axis).node)

    def _chosen(self, columns: Columns, rank: int, dim: int) -> fx.Node:
        """Which places the columns have, in the layout of a value with these columns."""
        ranked, build = columns.ranked, self.build
        index = build(operator.getitem, ranked.ranking, 1)
        if ranked.ends:
            index = build(aten.slice.Tensor, index, -1, *ranked.ends)
        lead = list(example(index).shape[:-1])
        with_rows = [*lead, ranked.numbers]
        none = build(aten.full.default, with_rows, False, dtype=torch.bool, device=example(index).device)
        chosen = build(aten.scatter.value, none, -1, index, True)
        if ranked.size > 1:
            chosen = build(aten.expand.default, build(aten.unsqueeze.default, chosen, -1), [*with_rows, ranked.size])
        chosen = build(aten.reshape.default, chosen, [-1, ranked.places])
        with unset_fake_temporarily():
            whose = columns.whose.movedim(dim, -1).flatten()
            if not torch.equal(whose, torch.arange(example(chosen).shape[0])):
                chosen = build(aten.index_select.default, chosen, 0, constant_node(build, whose, example(index).device))
            shape = [*columns.whose.movedim(dim, -1).shape[:-1], ranked.places]
        chosen = build(aten.reshape.default, chosen, shape)
        order = [*range(dim), rank - 1, *range(dim, rank - 1)]
        return chosen if dim == rank - 1 else build(aten.permute.default, chosen, order)
