"""Attention to rows that a buffer holds for a while, written as attention to the rows of all steps under a mask.

Before, with a ring of w rows:

    ring    = where(slots == t % w, k, ring)                     # row r holds one token after another
    s       = masked_fill(q · ringᵀ, slots > t, -inf)            # [..., w]
    out     = softmax(s) · ring_v

After, the same numbers:

    cache   = index_copy(cache, t, k)                            # [S, ...]: row p holds token p
    s       = masked_fill(q · cacheᵀ, slots[p % w] > t, -inf)    # [..., S]
    out     = softmax(masked_fill(s, p > t or p <= t - w, -inf)) · cache_v

Which token row r holds at step t is known for every buffer that `resolve_carries` finds rows in, so a ring, a window
that is shifted and rows that are picked by known numbers are all one case: a dimension of w *columns*, each with its
*place* in a longer dimension at each step. What is computed of the row in a column is computed of it in its place.
Places that no column has at a step are removed from the softmax, which makes their weights exactly zero, and a product
over columns has the same terms but for those zeros. Columns whose weights are zero anyway, such as those of rows that
are not written yet, have no place.

What comes out is a step like any other, with one cache more, written once: no proof rests on how it came about.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.assembled_rows import NOWHERE, Assembler
from nsa_compile.analyses.masks import Unrecognised, constant
from nsa_compile.analyses.staleness import Analysis
from nsa_compile.ir.aten import (
    COPIED,
    JUMPS,
    MASKED_FILL,
    MATMUL,
    MUL,
    REARRANGED,
    SOFTMAX,
    WHERE,
    arguments,
    aten,
    operand,
)
from nsa_compile.ir.carries import TABLE_LIMIT, Rows
from nsa_compile.ir.rewriting import NodeBuilder, constant_node, is_absent, mark_absent
from nsa_compile.ir.scans import ScanRecord, ancestors, example

VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}
_MOVED = REARRANGED | COPIED | {aten._to_copy.default}
_SQUEEZED = {aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims}
REDUCED = {aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.linalg_vector_norm.default}
# Operators between a buffer and a product, one after the other.
DEPTH_LIMIT = 100


@dataclass(frozen=True)
class Part:
    """Columns of a dimension side by side: rows of a buffer, rows picked from a tensor, or what has always been there.

    `table[t, c]` is the place of column c at step t: of a buffer the row it came in as, `-1 - r` for its first row r;
    of a tensor the row that is picked; `NOWHERE` for none. None where each column is its own place.
    """

    width: int
    places: int
    initial: int = 0  # rows of a buffer before the first step
    table: np.ndarray | None = field(repr=False, default=None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Part) or (self.table is None) != (other.table is None):
            return False
        same = (self.width, self.places, self.initial) == (other.width, other.places, other.initial)
        return same and (self.table is None or np.array_equal(self.table, cast(Any, other.table)))


Columns = tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Axis:
    """Columns and their places.

    `place[t, c]` is the place of column c at step t, -1 where it has none. Place p is taken at the steps
    `start[p] <= t < stop[p]`, or never. `lead` is how many first rows of a buffer come before its others.
    """

    columns: Columns
    lead: tuple[int, ...]
    place: Tensor  # [S, w]
    start: Tensor  # [places]
    stop: Tensor

    @classmethod
    def of(cls, columns: Columns, live: Tensor, node: fx.Node) -> Axis:
        """The places of columns, given at which steps they count; `node` is the product that is taken for an example.

        Raises:
            Unrecognised: two columns share a place at a step, or a place is taken, left and taken again.
        """
        steps, width = live.shape
        place = torch.full((steps, width), -1)
        lead: list[int] = []
        column = total = 0
        for part in columns:
            here = slice(column, column + part.width)
            alive = live[:, here]
            if part.table is None:
                alive, codes, first = torch.ones_like(alive), torch.arange(part.width).expand(steps, -1), 0
            else:
                codes = torch.from_numpy(part.table)
                if bool((alive & (codes == NOWHERE)).any()):
                    raise Unrecognised("rows that are filled with a number have weights", node)
                written = alive | (codes >= 0)
                alive = written if part.initial and _are_once(codes, written) else alive
                first = part.initial if bool((alive & (codes < 0)).any()) else 0
                codes = torch.where(codes < 0, -1 - codes, codes + first)
            place[:, here] = torch.where(alive, codes + total, -1)
            lead.append(first)
            column, total = column + part.width, total + part.places + first
        t, c = (place >= 0).nonzero(as_tuple=True)
        taken = place[t, c]
        start = torch.full((total,), steps).scatter_reduce(0, taken, t, "amin")
        stop = torch.zeros(total, dtype=torch.int64).scatter_reduce(0, taken, t + 1, "amax")
        count = torch.zeros(total, dtype=torch.int64).scatter_add(0, taken, torch.ones_like(taken))
        there = torch.zeros(steps, total, dtype=torch.bool) if steps * total <= TABLE_LIMIT else None
        if there is not None:
            there[t, taken] = True
            once = int(there.sum()) == len(taken)
        else:
            once = len(torch.unique(t * total + taken)) == len(taken)
        if not once or not torch.equal(count, (stop - start).clamp(min=0)):
            raise Unrecognised("a row of its keys is taken twice at a step, or comes back later", node)
        return cls(columns, tuple(lead), place, start, stop)

    @property
    def width(self) -> int:
        return self.place.shape[1]

    @property
    def places(self) -> int:
        return len(self.start)

    def parts(self) -> Iterator[Axis]:
        """The parts, each as an axis of its own."""
        column = total = 0
        for part, first in zip(self.columns, self.lead, strict=True):
            size = part.places + first
            place = self.place[:, column : column + part.width]
            span = slice(total, total + size)
            yield Axis((part,), (first,), torch.where(place < 0, -1, place - total), self.start[span], self.stop[span])
            column, total = column + part.width, total + size


class Unroller:
    """Writes products over columns anew as products over their places.

    New nodes are added before the old one that is asked for, and `caches` for carries that the step does not have yet.

    Args:
        step: the number of the step.
        copied: places of buffers that are written once, and still are copied for each step, since rows that are not
            written yet have weights. Their first rows and those of all steps are rows like those of a ring.
    """

    def __init__(
        self, body: fx.GraphModule, record: ScanRecord, analysis: Analysis, step: fx.Node, copied: Collection[int] = ()
    ) -> None:
        self.body, self.record, self.analysis, self.step = body, record, analysis, step
        placeholders = body.graph.find_nodes(op="placeholder")[: len(record.carries)]
        outputs: Any = body.graph.output_node().args[0]
        updates = [operand(u) if u.target is aten.clone.default else u for u in outputs[: len(record.carries)]]
        # Nodes whose rows are all those of a buffer: its place, and where each row comes from, as `Rows.table` says it.
        self.buffers: dict[fx.Node, tuple[int, np.ndarray]] = {}
        for i, kind in enumerate(record.carries):
            moves = isinstance(kind, Rows) and (not kind.write_once or i in copied)
            if moves and not (kind.slots < 0).any():
                before = np.concatenate([-1 - np.arange(kind.size)[None], kind.table[:-1]])
                self.buffers |= {placeholders[i]: (i, before), updates[i]: (i, kind.table)}
                assembler = Assembler(placeholders[i], kind.dim, record)
                for node in assembler.ends(body):
                    if node not in self.buffers and (table := assembler.written_at(node, kind, before)) is not None:
                        self.buffers[node] = i, table
        self.updates = updates
        self.caches: dict[tuple[int, int], Cache] = {}
        self.columns: dict[tuple[fx.Node, int], Columns] = {}  # those of a dimension with rows of a buffer, or picked
        for node in body.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, Tensor) and node not in record.known and node not in record.constant:
                for dim in range(value.dim()):
                    if (found := self._find(node, dim)) is not None:
                        self.columns[node, dim] = found

    def _find(self, node: fx.Node, dim: int) -> Columns | None:
        """The columns of a dimension, given those of all nodes before."""
        if node in self.buffers:
            i, table = self.buffers[node]
            kind = self.record.carries[i]
            return (Part(table.shape[1], kind.steps * kind.count, kind.size, table),) if kind.dim == dim else None
        if (picked := self.picked(node, dim)) is not None:
            source, table = picked
            return (Part(table.shape[1], example(source).shape[dim], 0, table),)
        if _is_along(node, dim, aten.cat.default):
            tensors: Any = operand(node)
            if not any((x, dim) in self.columns for x in tensors):
                return None
            widths = [example(x).shape[dim] for x in tensors]
            parts = [self.columns.get((x, dim), (Part(n, n),)) for x, n in zip(tensors, widths, strict=True)]
            return tuple(itertools.chain(*parts))
        width = example(node).shape[dim]
        given = [(n, d) for n, d in sources(node, dim) or () if d >= 0 and example(n).shape[d] == width]
        found = [self.columns[key] for key in given if key in self.columns]
        return found[0] if found and all(columns == found[0] for columns in found[1:]) else None

    def picked(self, node: fx.Node, dim: int) -> tuple[fx.Node, np.ndarray] | None:
        """The tensor and the rows, `[S, w]`, that a node picks along a dimension by numbers known at each step."""
        if node.target is aten.index_select.default:
            picked = arguments(node)
            source, at, index = picked.self, picked.dim % max(1, example(picked.self).dim()), picked.index
        elif node.target is aten.index.Tensor:
            given = [(i, x) for i, x in enumerate(arguments(node).indices) if x is not None]
            if len(given) != 1:
                return None
            source, ((at, index),) = operand(node), given
        else:
            return None
        value = self.record.known.get(index)
        if at != dim or value is None or example(index).dim() != 1 or example(index).dtype == torch.bool:
            return None
        size = example(source).shape[dim]
        if example(index).numel() * self.record.length > TABLE_LIMIT or (source, dim) in self.columns:
            return None
        with unset_fake_temporarily():
            rows = value.table().long()
            rows = torch.where(rows < 0, rows + size, rows)
            return (source, rows.numpy()) if bool(((rows >= 0) & (rows < size)).all()) else None

    # -- products over columns

    def products(self) -> list[fx.Node]:
        """Products over columns, of weights that a softmax makes over these with values in the same columns."""
        return [node for node in self.body.graph.nodes if node.target in MATMUL and self._over(node) is not None]

    def read_by(self, product: fx.Node) -> set[fx.Node]:
        """What a product over columns is computed from in these columns: buffers, picked rows and all in between."""
        todo = [*summed(*cast("tuple[fx.Node, fx.Node]", product.args[:2]))]
        found = set(todo)
        while todo:
            node, dim = todo.pop()
            if node in self.buffers or self.picked(node, dim) is not None:
                continue
            joins = _is_along(node, dim, aten.cat.default)
            further = [(x, dim) for x in node.all_input_nodes] if joins else sources(node, dim) or []
            todo += [key for key in further if key in self.columns and key not in found]
            found.update(key for key in further if key in self.columns)
        return {node for node, _ in found}

    def _over(self, product: fx.Node) -> Columns | None:
        """The columns that a product sums over, if both operands have them."""
        a, b = cast("tuple[fx.Node, fx.Node]", product.args[:2])
        rows, others = (self.columns.get(key) for key in summed(a, b))
        return rows if rows is not None and rows == others else None

    def unroll(self, product: fx.Node) -> fx.Node:
        """Write one product over columns anew and let it take the place of the old one; the new one.

        Raises:
            Unrecognised: it cannot be written so.
        """
        columns = self._over(product)
        assert columns is not None
        a, b = cast("tuple[fx.Node, fx.Node]", product.args[:2])
        (_, dim_a), (_, dim_b) = summed(a, b)
        softmaxes = {*self._softmaxes(a, dim_a), *self._softmaxes(b, dim_b)}
        if not softmaxes:
            raise Unrecognised("what it weighs its rows with is no softmax over them", product)
        with unset_fake_temporarily(), torch.no_grad():
            axis = Axis.of(columns, self._live(softmaxes), product)
        writer = Writer(self, axis, NodeBuilder(self.body, product))
        new = writer.write(a, dim_a, axis), writer.write(b, dim_b, axis)
        if not any(value.is_zero_elsewhere for value in new):
            raise Unrecognised("its weights are not zero for the rows that a step does not have", product)
        found = writer.build(product.target, *(value.node for value in new))
        product.replace_all_uses_with(found)
        return found

    def _softmaxes(self, node: fx.Node, dim: int) -> Iterator[fx.Node]:
        """The softmaxes over columns that values in these columns come from."""
        if (node, dim) not in self.columns:
            return
        if node.target in SOFTMAX and arguments(node).dim % example(node).dim() == dim:
            yield node
        elif node not in self.buffers:
            for source, source_dim in sources(node, dim) or ():
                yield from self._softmaxes(source, source_dim)

    def _live(self, softmaxes: set[fx.Node]) -> Tensor:
        """At which steps each column may have a weight, `[S, w]`."""
        live = torch.tensor(False)
        for softmax in softmaxes:
            shape, dim = example(softmax).shape, arguments(softmax).dim
            zero = self.analysis.of(softmax).zero
            until = torch.tensor(0) if zero is None else zero
            until = until.expand(shape).movedim(dim, -1).reshape(-1, shape[dim]).amin(0)
            live = live | ((torch.arange(self.record.length)[:, None] >= until) & ~self._absent(softmax))
        return live

    def _absent(self, softmax: fx.Node) -> Tensor:
        """At which steps a mask says that columns of a softmax are not there, `[S, w]`."""
        shape, dim = example(softmax).shape, arguments(softmax).dim
        absent, scores = torch.tensor(False), operand(softmax)
        while scores.target in MASKED_FILL and constant(scores.args[2], self.record) == -math.inf:
            scores, mask = operand(scores), operand(scores, 1)
            known = self.record.known.get(mask)
            if is_absent(mask) and known is not None and shape.numel() * self.record.length <= TABLE_LIMIT:
                table = known.table()
                table = table.reshape(len(table), *[1] * (len(shape) - table.dim() + 1), *table.shape[1:])
                removed = table.expand(-1, *shape).movedim(dim % len(shape) + 1, -1)
                absent = absent | removed.reshape(len(removed), -1, shape[dim]).all(1)
        return absent

    # -- rows of all steps

    def cache(self, i: int, lead: int) -> Cache:
        """The rows that buffer `i` ever gets, behind its first rows where `lead` counts them."""
        if (i, lead) not in self.caches:
            self.caches[i, lead] = self._new_cache(i, lead)
        return self.caches[i, lead]

    def _new_cache(self, i: int, lead: int) -> Cache:
        kind: Rows = self.record.carries[i]
        update = self.updates[i]
        shape = list(example(update).shape)
        shape[kind.dim] = lead + kind.steps * kind.count
        carries = self.body.graph.find_nodes(op="placeholder")[: len(self.record.carries) + len(self.caches)]
        with self.body.graph.inserting_after(carries[-1]):
            before = self.body.graph.placeholder(f"rows_of_all_steps_{len(self.caches)}")
        fake = example(update)
        with fake.fake_mode:  # pyrefly: ignore[missing-attribute]
            before.meta["val"] = torch.empty(shape, dtype=fake.dtype, device=fake.device)
        inputs = [n for n in self.body.graph.nodes if n.op == "placeholder"]
        needed = {kind.written, self.step, inputs[-1]}
        build = NodeBuilder(self.body, [n for n in self.body.graph.nodes if n in needed][-1].next)
        written, in_rows = kind.layout(example(update).shape)
        rows = build(aten.expand.default, kind.written, list(written))
        rows = build(aten.reshape.default, rows, list(in_rows))
        if example(rows).dtype != fake.dtype:
            rows = build(aten._to_copy.default, rows, dtype=fake.dtype)
        at = build(aten.reshape.default, self.step, [1])
        if kind.count > 1:
            at = build(aten.mul.Tensor, at, kind.count)
        if kind.count > 1 or lead:
            at = build(aten.add.Tensor, at, constant_node(build, torch.arange(kind.count) + lead, fake.device))
        after = build(aten.index_copy.default, before, kind.dim, at, rows)
        return Cache(i, lead, kind.dim, before, after)


@dataclass(frozen=True)
class Cache:
    """A carry that holds the rows that a buffer ever gets, the first `lead` from before the first step."""

    buffer: int
    lead: int
    dim: int
    before: fx.Node
    after: fx.Node

    @property
    def shape(self) -> torch.Size:
        return example(self.before).shape


@dataclass(frozen=True)
class Unrolled:
    """A value with places instead of columns."""

    node: Any
    is_zero_elsewhere: bool = False  # whether it is exactly zero in places that no column has


@dataclass
class Writer:
    """Writes the values that one product needs anew, before that product."""

    of: Unroller
    axis: Axis
    build: NodeBuilder
    done: dict[tuple[fx.Node, int, Axis], Unrolled] = field(default_factory=dict)
    depth: int = 0

    def write(self, node: Any, dim: int, axis: Axis) -> Unrolled:
        """A value whose dimension `dim` has the columns of an axis, with their places there.

        Raises:
            Unrecognised: it cannot be written so.
        """
        if not isinstance(node, fx.Node):
            return Unrolled(node)
        if dim < 0 or (example(node).shape[dim] == 1 and axis.width > 1) or all(p.table is None for p in axis.columns):
            return Unrolled(node)  # the same for all columns, or each column is its own place
        key = node, dim, axis
        if key not in self.done:
            if self.depth == DEPTH_LIMIT:
                raise Unrecognised(f"its rows go through more than {DEPTH_LIMIT} operators", node)
            self.depth += 1
            self.done[key] = self._write(node, dim, axis)
            self.depth -= 1
        return self.done[key]

    def _write(self, node: fx.Node, dim: int, axis: Axis) -> Unrolled:
        of = self.of
        if example(node).shape[dim] != axis.width or of.columns.get((node, dim), axis.columns) != axis.columns:
            raise Unrecognised("it puts rows together that are not the same ones", node)
        if node in of.record.constant or node in of.record.known:
            if (known := self._known(node, dim, axis)) is not None:
                return Unrolled(known)
        elif (node, dim) in of.columns:
            if node in of.buffers:
                return Unrolled(self._rows(*of.buffers[node], dim, axis))
            if (picked := of.picked(node, dim)) is not None:
                return Unrolled(picked[0])
        else:
            return Unrolled(self._data(node, dim, axis))
        if _is_along(node, dim, aten.cat.default):
            return self._joined(node, dim, axis)
        if _is_along(node, dim, *SOFTMAX):
            return self._softmax(node, dim, axis)
        return self._row_by_row(node, dim, axis)

    def _data(self, node: fx.Node, dim: int, axis: Axis) -> fx.Node:
        """A value of each column that is data, as one of each place."""
        with unset_fake_temporarily():
            columns = _of_places(torch.arange(axis.width).expand(self.of.record.length, -1), axis)
        if columns is None or columns[0] != "same":
            raise Unrecognised("what its rows meet is data, and stays in its place while they move", node)
        index = constant_node(self.build, columns[1][0], example(node).device)
        return self.build(aten.index_select.default, node, dim, index)

    def _rows(self, i: int, table: np.ndarray, dim: int, axis: Axis) -> fx.Node:
        """All rows of a buffer, with those that the step writes itself if the table has one."""
        if (known := self._known_rows(i, dim, axis)) is not None:
            return known
        cache, count = self.of.cache(i, axis.lead[0]), self.of.record.carries[i].count
        after = bool((table >= np.arange(len(table))[:, None] * count).any())
        return cache.after if after else cache.before

    def _joined(self, node: fx.Node, dim: int, axis: Axis) -> Unrolled:
        tensors: Any = operand(node)
        parts, new = list(axis.parts()), []
        for tensor in tensors:
            count = len(self.of.columns.get((tensor, dim), (None,)))
            new.append(self.write(tensor, dim, _side_by_side(parts[:count])))
            parts = parts[count:]
        joined = self.build(aten.cat.default, [x.node for x in new], dim)
        return Unrolled(joined, all(x.is_zero_elsewhere for x in new))

    def _softmax(self, node: fx.Node, dim: int, axis: Axis) -> Unrolled:
        scores = self.write(operand(node), dim, axis).node
        steps, missing = self.of.record.length, None
        if not (bool((axis.start == 0).all()) and bool((axis.stop == steps).all())):
            device, shape = example(node).device, [1] * example(node).dim()
            shape[dim] = axis.places
            first, last = (constant_node(self.build, x.reshape(shape), device) for x in (axis.start, axis.stop - 1))
            missing = self.build(
                aten.bitwise_or.Tensor,
                self.build(aten.gt.Tensor, first, self.of.step),
                self.build(aten.lt.Tensor, last, self.of.step),
            )
            mark_absent(missing)
            scores = self.build(aten.masked_fill.Scalar, scores, missing, -math.inf)
        weights = self.build(node.target, scores, dim, *node.args[2:])
        if missing is not None and self.of.analysis.may_be_nan(node):
            weights = self.build(aten.masked_fill.Scalar, weights, missing, 0)
        return Unrolled(weights, is_zero_elsewhere=True)

    def _row_by_row(self, node: fx.Node, dim: int, axis: Axis) -> Unrolled:
        """An operator that computes each row of its result from the same rows of its operands."""
        found = sources(node, dim)
        if found is None:
            raise Unrecognised(f"{node.target} does not compute row by row", node)
        new: dict[fx.Node, Unrolled] = {}
        dims: dict[fx.Node, int] = {}
        for source, source_dim in found:
            if dims.setdefault(source, source_dim) != source_dim:
                raise Unrecognised(f"{node.target} reads rows along two dimensions", node)
            new[source] = self.write(source, source_dim, axis)
        if node.target in MASKED_FILL and self._is_never(operand(node, 1), dims.get(operand(node, 1), -1), axis):
            return new[operand(node)]  # what it hides is in no place
        self._check_rounding(node, {n for n, value in new.items() if value.node is not n})
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: new[n].node if n in new else n)
        args = resized(node, args, dim, axis.places)
        target = aten.reshape.default if node.target in VIEWS else node.target
        return Unrolled(self.build(target, *args, **kwargs), self._stays_zero(node, new))

    def _check_rounding(self, node: fx.Node, unrolled: set[fx.Node]) -> None:
        """Scores are computed again for all places, rounded in another way: beside a number that is made of them as
        they were, such as their maximum, one may be less than itself.

        Raises:
            Unrecognised: a comparison, or what jumps like one, has both.
        """
        others = [n for n in node.all_input_nodes if n not in unrolled]
        if not unrolled or not others or getattr(node.target, "_opname", "") not in JUMPS:
            return
        if any(is_rounded(n) for n in ancestors(unrolled) & ancestors(others)):
            raise Unrecognised("its scores are compared with a number that is made of them", node)

    def _stays_zero(self, node: fx.Node, new: dict[fx.Node, Unrolled]) -> bool:
        zero = {n for n, value in new.items() if value.is_zero_elsewhere}
        first = node.args[0] in zero
        if node.target in MUL:
            return bool(zero)
        if node.target in MASKED_FILL:
            return first and constant(node.args[2], self.of.record) == 0.0
        if node.target in WHERE:
            return all(x in zero or constant(x, self.of.record) == 0.0 for x in node.args[1:3])
        if node.target is aten.nan_to_num.default or node.target is aten.div.Tensor:
            return first
        return first and len(node.all_input_nodes) == 1 and node.target in _MOVED

    def _is_never(self, mask: fx.Node, dim: int, axis: Axis) -> bool:
        """Whether a mask is false in all places; of columns that are picked by data, nothing is known."""
        if not isinstance(axis, Axis) or dim < 0 or example(mask).shape[dim] != axis.width:
            return False
        found = self._of_places(mask, dim, axis)
        return found is not None and found[0] == "same" and not bool(found[1][0].any())

    def _of_places(self, node: fx.Node, dim: int, axis: Axis) -> tuple[str, list[Tensor]] | None:
        """A value known at every step, as `_of_places` of its numbers says it."""
        record, shape = self.of.record, example(node).shape
        known = node in record.constant or node in record.known
        if not known or shape.numel() * record.length > TABLE_LIMIT:
            return None
        with unset_fake_temporarily(), torch.no_grad():
            value = record.constant.get(node)
            values = value.expand(record.length, *shape) if value is not None else record.known[node].table()
            return _of_places(values.expand(record.length, *shape).movedim(dim + 1, -1), axis)  # [S, ..., w]

    def _known(self, node: fx.Node, dim: int, axis: Axis) -> fx.Node | None:
        """A value known at every step, as a value of each place: one number, a truth for a time, or t and a number."""
        if (found := self._of_places(node, dim, axis)) is None:
            return None
        kind, numbers = found
        device = example(node).device

        def held(x: Tensor) -> fx.Node:
            return constant_node(self.build, x.movedim(-1, dim), device)

        if kind == "same":
            return held(numbers[0])
        if kind in ("true", "false"):
            first, last = map(held, numbers)
            inside = self.build(
                aten.bitwise_and.Tensor,
                self.build(aten.le.Tensor, first, self.of.step),
                self.build(aten.ge.Tensor, last, self.of.step),
            )
            return inside if kind == "true" else self.build(aten.bitwise_not.default, inside)
        moving = self.build(aten.add.Tensor if kind == "rising" else aten.sub.Tensor, held(numbers[0]), self.of.step)
        if example(moving).dtype != example(node).dtype:
            moving = self.build(aten._to_copy.default, moving, dtype=example(node).dtype)
        return moving

    def _known_rows(self, i: int, dim: int, axis: Axis) -> fx.Node | None:
        """The rows that a buffer ever gets, if they are known: one number for each place."""
        record, kind = self.of.record, self.of.record.carries[i]
        value = record.known.get(kind.written, record.constant.get(kind.written))
        if value is None or axis.lead[0] or example(kind.written).numel() != 1 or kind.count != 1:
            return None
        with unset_fake_temporarily():
            rows = value.flatten().expand(record.length) if isinstance(value, Tensor) else value.table().flatten()
        shape = list(example(self.of.updates[i]).shape)
        shape[dim] = axis.places
        as_rows = [1] * len(shape)
        as_rows[dim] = axis.places
        held = constant_node(
            self.build, rows.to(example(self.of.updates[i]).dtype).reshape(as_rows), example(self.of.updates[i]).device
        )
        return self.build(aten.expand.default, held, shape)


def is_rounded(node: fx.Node) -> bool:
    """Whether a node holds numbers that are summed up, in an order that the sizes of its operands decide."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or not value.dtype.is_floating_point:
        return False
    target: Any = node.target
    moves = node.target in REARRANGED or node.target in COPIED or node.target in VIEWS
    return isinstance(target, OpOverload) and not moves and torch.Tag.pointwise not in target.tags


def _are_once(codes: Tensor, there: Tensor) -> bool:
    """Whether no place is taken twice at a step, as rows are that move and stay behind them, too."""
    apart = torch.where(there, codes, -(2**32) - torch.arange(codes.shape[1]))
    in_order = apart.sort(1).values
    return not bool((in_order[:, 1:] == in_order[:, :-1]).any())


def _side_by_side(parts: Sequence[Axis]) -> Axis:
    """Parts of an axis side by side, as one."""
    if len(parts) == 1:
        return parts[0]
    total, places = 0, []
    for part in parts:
        places.append(torch.where(part.place < 0, -1, part.place + total))
        total += part.places
    return Axis(
        tuple(p for part in parts for p in part.columns),
        tuple(n for part in parts for n in part.lead),
        torch.cat(places, 1),
        torch.cat([part.start for part in parts]),
        torch.cat([part.stop for part in parts]),
    )


def _of_places(values: Tensor, axis: Axis) -> tuple[str, list[Tensor]] | None:
    """Values of columns `[S, ..., w]` as values of their places `[..., places]`.

    They are the `same` at all steps, or `true`, or `false`, from a first step to a last, or `rising` or `falling` with
    the steps: a number plus t, or less t. None if they are nothing of that.
    """
    others = values.shape[1:-1]
    flat = values.reshape(values.shape[0], -1, values.shape[-1])
    t, column = (axis.place >= 0).nonzero(as_tuple=True)
    place = axis.place[t, column]
    here = flat[t, :, column].T  # [rest, entries]

    def at_places(x: Tensor) -> Tensor:
        found = x.new_zeros(x.shape[0], axis.places)
        found[:, place] = x
        return found

    def shaped(x: Tensor) -> Tensor:
        return x.reshape(*others, axis.places)

    if torch.equal(at_places(here)[:, place], here):
        return "same", [shaped(at_places(here))]
    if values.dtype == torch.bool:
        for kind, wanted in (("true", here), ("false", ~here)):
            steps = t.expand_as(wanted)
            index = place.expand_as(wanted)
            rows = wanted.shape[0]
            first = torch.full((rows, axis.places), len(values))
            first = first.scatter_reduce(1, index, torch.where(wanted, steps, len(values)), "amin")
            last = torch.full((rows, axis.places), -1)
            last = last.scatter_reduce(1, index, torch.where(wanted, steps, -1), "amax")
            if torch.equal((steps >= first[:, place]) & (steps <= last[:, place]), wanted):
                return kind, [shaped(first), shaped(last)]
        return None
    if not values.dtype.is_floating_point:
        for kind, rest in (("rising", here - t), ("falling", here + t)):
            if torch.equal(at_places(rest)[:, place], rest):
                return kind, [shaped(at_places(rest))]
    return None


# -- operators row by row


def summed(a: fx.Node, b: fx.Node) -> tuple[tuple[fx.Node, int], tuple[fx.Node, int]]:
    """The operands of a product with the dimension that it sums over."""
    rank = example(b).dim()
    return (a, example(a).dim() - 1), (b, rank - 2 if rank > 1 else 0)


def _is_along(node: fx.Node, dim: int, *targets: Any) -> bool:
    """Whether a node is one of some operators along a dimension."""
    return node.target in targets and arguments(node).dim % example(node).dim() == dim


def sources(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]] | None:
    """The operands whose rows the rows of a node along `dim` are computed from, each from the same rows, with the
    dimension in which they lie; -1 for none. None if it is not so, or not known to be."""
    target, value = node.target, node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor):
        return None
    rank = value.dim()
    source: Any = node.args[0] if node.args else None
    if not isinstance(target, OpOverload):
        return None
    if target in COPIED or target is aten._to_copy.default:
        return [(source, dim)]
    if torch.Tag.pointwise in target.tags:
        return [(n, dim - (rank - example(n).dim())) for n in node.all_input_nodes]
    if target in MATMUL:
        a, b = cast("tuple[fx.Node, fx.Node]", node.args[:2])
        if target is aten.mv.default:
            return [(a, 0)]
        return {rank - 2: [(a, rank - 2)], rank - 1: [(b, rank - 1)]}.get(dim)
    if target is aten.cat.default:
        tensors: Any = source
        return None if arguments(node).dim % rank == dim else [(x, dim) for x in tensors]
    if not isinstance(source, fx.Node):
        return None
    shape = example(source).shape
    old = len(shape)
    if target in VIEWS:
        after = value.shape[dim + 1 :].numel()
        found = [d for d in range(old) if shape[d] == value.shape[dim] and shape[d + 1 :].numel() == after]
        return [(source, found[0])] if found else None
    if target is aten.permute.default:
        return [(source, arguments(node).dims[dim] % old)]
    if target is aten.transpose.int:
        swapped = [arguments(node).dim0 % old, arguments(node).dim1 % old]
        return [(source, swapped[1 - swapped.index(dim)] if dim in swapped else dim)]
    if target is aten.t.default:
        return [(source, rank - 1 - dim)]
    if target is aten.expand.default:
        return [(source, dim - (rank - old))]
    if target is aten.unsqueeze.default:
        at = arguments(node).dim % rank
        return [(source, -1 if dim == at else dim - (dim > at))]
    if target in _SQUEEZED:
        kept = [d for d in range(old) if d not in _squeezed(node, shape)]
        return [(source, kept[dim])]
    if target is aten.slice.Tensor:
        return None if arguments(node).dim % rank == dim else [(source, dim)]
    if target is aten.select.int:
        at = arguments(node).dim % old
        return [(source, dim + (dim >= at))]
    if target in REDUCED:
        reduced = arguments(node)
        dims = reduced.dim if isinstance(reduced.dim, list | tuple) else [reduced.dim]
        gone = {d % old for d in dims if d is not None} or set(range(old))
        kept = list(range(old)) if reduced.keepdim else [d for d in range(old) if d not in gone]
        return None if kept[dim] in gone else [(source, kept[dim])]
    if target in SOFTMAX:
        return [(source, dim)]
    return None


def _squeezed(node: fx.Node, shape: Sequence[int]) -> set[int]:
    given = vars(arguments(node)).get("dim")
    dims = range(len(shape)) if given is None else given if isinstance(given, list | tuple) else [given]
    return {d % len(shape) for d in dims if shape[d] == 1}


def resized(node: fx.Node, args: tuple[Any, ...], dim: int, places: int) -> tuple[Any, ...]:
    """The arguments of a node with the sizes that it names, where there are places instead of columns."""
    if node.target not in VIEWS and node.target is not aten.expand.default:
        return args
    sizes = list(example(node).shape)
    sizes[dim] = places
    return args[0], sizes, *args[2:]
