"""The step that serves all ways of a loop, with every size a number: what `nsa_compile.scan` runs.

A dimension that grows becomes a buffer of full length, an `Axis`: at each step the rows `start <= row < stop` of it
exist, and both are known for all steps before the program runs. What stands in other rows is finite and never counts:
the rules of `operators` see to that, operator by operator.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_compile.ir.rewriting import mark_absent
from nsa_compile.loops.merged import Merged, Node, Source, leaf_results
from nsa_compile.loops.numbers import Number, at_all_steps
from nsa_compile.loops.paths import Symbol
from nsa_compile.loops.recording import place_of
from nsa_compile.loops.state import NotFollowed, Path, in_words
from nsa_compile.loops.trace import Ref, TensorType

aten = torch.ops.aten
Table = np.ndarray  # one number for each step


@dataclass(eq=False, frozen=True)
class Segment:
    """Rows of a buffer of which `start[t] <= row < stop[t]` exist at step t."""

    size: int
    start: Table
    stop: Table

    def clipped(self) -> Segment:
        start = np.clip(self.start, 0, self.size)
        return Segment(self.size, start, np.clip(self.stop, start, self.size))


@dataclass(eq=False, frozen=True)
class Axis:
    """A dimension that grows: segments of buffers, one behind the other."""

    segments: tuple[Segment, ...]
    root: Symbol | None = None  # the leaf of the state whose rows these are, in its order

    @classmethod
    def of(cls, size: int, start: Any, stop: Any, root: Symbol | None = None) -> Axis:
        start, stop = np.broadcast_arrays(np.asarray(start, np.int64), np.asarray(stop, np.int64))
        return cls((Segment(size, start, stop).clipped(),), root)

    @property
    def size(self) -> int:
        return sum(s.size for s in self.segments)

    @property
    def count(self) -> Table:
        return sum((s.stop - s.start for s in self.segments[1:]), self.segments[0].stop - self.segments[0].start)

    @property
    def only(self) -> Segment:
        if len(self.segments) != 1:
            raise NotFollowed("rows of several caches, one behind the other, are taken apart")
        return self.segments[0]


Dim = int | Axis


@dataclass(eq=False)
class Val:
    """A tensor of the step: a node with dimensions of fixed size, and which of them grow."""

    node: fx.Node
    dims: tuple[Dim, ...]
    zero: frozenset[int] = frozenset()  # dimensions that grow and hold exact zeros in rows that do not exist
    is_score: bool = False  # a product of tensors, scaled: it is at no floor such as -inf

    @property
    def example(self) -> Tensor:
        return self.node.meta["example_value"]

    @property
    def grows(self) -> bool:
        return any(isinstance(d, Axis) for d in self.dims)


@dataclass(frozen=True)
class Write:
    """Rows `first[t] …` of a buffer replaced by those of another tensor."""

    buffer: fx.Node
    dim: int
    first: Table
    source: fx.Node


@dataclass
class Carry:
    """A tensor of the state: its buffer."""

    path: Path
    type: TensorType
    dims: tuple[Dim, ...]  # as a step finds it
    node: fx.Node
    after: tuple[Dim, ...] = ()  # as it leaves it


@dataclass
class Body:
    """A step under construction, and what it is given."""

    merged: Merged
    starts: dict[Symbol, Table]  # where in its buffer a leaf of the state begins, at each step
    graph: fx.Graph = field(default_factory=fx.Graph)
    mode: FakeTensorMode = field(default_factory=lambda: FakeTensorMode(allow_non_fake_inputs=True))
    carries: dict[tuple[Path, TensorType], Carry] = field(default_factory=dict)
    xs: list[tuple[fx.Node, Any]] = field(default_factory=list)  # and what it is a row of
    additional: dict[int, fx.Node] = field(default_factory=dict)
    stack: str = ""
    writes: dict[fx.Node, Write] = field(default_factory=dict)
    # Numbers of rows that exist: how many exist at each step.
    numbers_of: dict[fx.Node, Table] = field(default_factory=dict)
    # Truths of a step with which the loop has to run as it is written.
    refused: list[fx.Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exploration = self.merged.exploration
        self.length = self.exploration.length
        self.way_of = self.exploration.way_of
        self.everywhere = np.ones(self.length, bool)
        self.values: dict[Node, list[Val | None]] = {}
        self.kept: list[dict[int, Source]] = []
        self.memo: dict[Any, Any] = {}
        self.given: list[dict[str, Table]] = [
            {str(s): self._table_of(what) for s, what in way.trace.symbols.items()} for way in self.exploration.ways
        ]
        self.numbers: dict[Any, Table] = {}
        self.at = self.everywhere  # the steps of the operator at hand

    # -- numbers

    def _table_of(self, what: Any) -> Table:
        return np.arange(self.length) if what == "t" else self.exploration.before[what]

    def steps_of(self, ways: Sequence[int]) -> Table:
        return np.isin(self.way_of, list(ways))

    def number(self, versions: dict[int, Any]) -> Table:
        """A number at all steps, given its expression in each way; at steps of no way, that of the most usual one."""
        usual = max(versions, key=lambda way: int((self.way_of == way).sum()))
        found = {way: self._evaluated(way, number) for way, number in versions.items()}
        table = found[usual].astype(np.result_type(*found.values()))  # a truth at some steps is a number at others
        for way, mine in found.items():
            if way != usual:
                table[self.way_of == way] = mine[self.way_of == way]
        return table

    def _evaluated(self, way: int, number: Any) -> Table:
        key = way, number
        if key not in self.numbers:
            self.numbers[key] = np.array(at_all_steps(number, self.given[way], self.length))
        return self.numbers[key]

    def known(self, table: Table) -> fx.Node | int:
        """An integer that is known at each step: a number, or a tensor without dimensions."""
        if (table == table[0]).all():
            return int(table[0])
        key = "known", table.tobytes(), str(table.dtype)
        if key not in self.memo:
            row = torch.from_numpy(np.ascontiguousarray(table))[0]
            node = self.graph.placeholder(f"known_{len(self.xs)}")
            node.meta["example_value"] = self.fake(row)
            self.xs.append((node, table))
            self.memo[key] = node
        return self.memo[key]

    def table_of(self, node: fx.Node) -> Table | None:
        """The integers that a node is at each step, if they are known."""
        found = next((what for x, what in self.xs if x is node), None)
        return found if isinstance(found, np.ndarray) and found.dtype == np.int64 else None

    def refuse(self, truth: fx.Node) -> None:
        """Have the loop run as it is written if this is true at one of the steps at hand."""
        if not self.at.all():
            truth = self.emit(aten.bitwise_and.Tensor, truth, self._truth(self.at))
        self.refused.append(truth)

    # -- nodes

    def fake(self, x: Tensor) -> Tensor:
        with self.mode:
            return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """One more operator; equal ones are one."""
        key: Any = (target, _frozen(args), _frozen(kwargs))
        if key not in self.memo:
            self.memo[key] = self._emit_anew(target, *args, **kwargs)
        return self.memo[key]

    def _emit_anew(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        fakes = fx.node.map_arg((args, kwargs), lambda n: n.meta["example_value"])
        with self.mode:
            node.meta["example_value"] = target(*fakes[0], **fakes[1])
        node.meta["stack_trace"] = self.stack
        return node

    def item(self, node: fx.Node, place: int) -> fx.Node:
        return self.emit(operator.getitem, node, place)

    def outside(self, number: int) -> Val:
        x = self.merged.outside[number]
        if number not in self.additional:
            node = self.graph.placeholder(f"outside_{number}")
            node.meta["example_value"] = self.fake(x)
            self.additional[number] = node
        return Val(self.additional[number], tuple(x.shape))

    def row_of(self, number: int, dim: int, table: Table) -> fx.Node:
        """The part of a tensor from outside that each step selects along a dimension."""
        key = "row", number, dim, table.tobytes()
        if key not in self.memo:
            x = self.merged.outside[number]
            node = self.graph.placeholder(f"row_{len(self.xs)}")
            node.meta["example_value"] = self.fake(x.select(dim, 0))
            self.xs.append((node, (number, dim, table)))
            self.memo[key] = node
        return self.memo[key]

    def positions(self, size: int, device: torch.device) -> fx.Node:
        return self.emit(torch.arange, size, device=device)

    def exists(self, axis: Axis, device: torch.device) -> fx.Node | None:
        """Which rows of an axis exist, `[size]`; None if all do at every step."""
        parts = []
        for segment in axis.segments:
            rows = self.positions(segment.size, device)
            mask = None
            if (segment.stop < segment.size).any():
                mask = self.emit(aten.lt.Tensor, rows, self._tensor(segment.stop))
            if (segment.start > 0).any():
                after = self.emit(aten.ge.Tensor, rows, self._tensor(segment.start))
                mask = after if mask is None else self.emit(aten.bitwise_and.Tensor, after, mask)
            parts.append(mask)
        if all(p is None for p in parts):
            return None
        if len(parts) == 1:
            return parts[0]
        whole = [
            self.emit(torch.ones, s.size, dtype=torch.bool, device=device) if p is None else p
            for p, s in zip(parts, axis.segments, strict=True)
        ]
        return self.emit(aten.cat.default, whole)

    def _tensor(self, table: Table) -> fx.Node:
        known = self.known(table)
        return self.emit(torch.full, (), known, dtype=torch.int64) if isinstance(known, int) else known

    def mask(self, value: Val, dim: int) -> fx.Node | None:
        """Which elements of a value exist along a dimension, in a shape that broadcasts against it."""
        axis = value.dims[dim]
        assert isinstance(axis, Axis)
        mask = self.exists(axis, value.example.device)
        if mask is None:
            return None
        behind = len(value.dims) - 1 - dim
        return self.emit(aten.reshape.default, mask, [-1, *[1] * behind]) if behind else mask

    def filled(self, value: Val, dim: int, number: float) -> Val:
        """A value with a number in the rows along a dimension that do not exist."""
        if number == 0 and dim in value.zero:
            return value
        mask = self.mask(value, dim)
        if mask is None:
            return value
        absent = self._absent(mask)
        node = self.emit(aten.masked_fill.Scalar, value.node, absent, number)
        return Val(node, value.dims, value.zero | {dim} if number == 0 else frozenset())

    def _absent(self, mask: fx.Node) -> fx.Node:
        """The opposite of a mask, marked: never the one that the step itself makes."""
        key = "absent", mask
        if key not in self.memo:
            self.memo[key] = self._emit_anew(aten.bitwise_not.default, mask)
            mark_absent(self.memo[key])
        return self.memo[key]

    # -- layout

    def taken(self, value: Val, dim: int, first: Table, count: int) -> Val:
        """Rows `first[t] …` of a buffer, `count` of them, as a dimension of fixed size."""
        size = value.example.shape[dim]
        device = value.example.device
        first = np.clip(first, 0, max(0, size - 1))
        begin = self.known(first)
        if isinstance(begin, int) and begin + count <= size:
            node = self.emit(aten.slice.Tensor, value.node, dim, begin, begin + count)
        else:
            rows = self.emit(aten.add.Tensor, self.positions(count, device), begin)
            axis = value.dims[dim]
            if isinstance(axis, Axis) and len(axis.segments) == 1 and (first + count > axis.only.stop).any():
                # At steps that take another way: no row is read that is not there yet.
                last = np.maximum(axis.only.stop - 1, 0)
                rows = self.emit(aten.minimum.default, rows, self._tensor(last))
            elif (first + count > size).any():
                rows = self.emit(aten.clamp.default, rows, 0, size - 1)
            node = self.emit(aten.index_select.default, value.node, dim, rows)
        dims = (*value.dims[:dim], count, *value.dims[dim + 1 :])
        return Val(node, dims, frozenset(z for z in value.zero if z != dim))

    def constant_count(self, axis: Axis) -> int | None:
        """The number of rows, if it is the same at all steps of the operator at hand."""
        count = axis.count[self.at]
        return int(count[0]) if len(count) and (count == count[0]).all() else None

    def fixed(self, value: Val, dim: int) -> Val:
        """A dimension that grows, but has the same size at the steps at hand, as one of fixed size."""
        axis = value.dims[dim]
        if isinstance(axis, int):
            return value
        count = self.constant_count(axis)
        if count is None:
            raise NotFollowed("its size is another one at other steps")
        if len(axis.segments) > 1:
            value = self.moved(value, dim, Axis.of(count, 0, np.full(self.length, count)))
            return Val(value.node, (*value.dims[:dim], count, *value.dims[dim + 1 :]))
        return self.taken(value, dim, axis.only.start, count)

    def moved(self, value: Val, dim: int, like: Axis) -> Val:
        """The rows of a dimension where another axis has its own."""
        axis = value.dims[dim]
        assert isinstance(axis, Axis)
        if self.same_axis(axis, like):
            return Val(value.node, (*value.dims[:dim], like, *value.dims[dim + 1 :]), value.zero)
        if len(axis.segments) > 1 or len(like.segments) > 1:
            rows = self._rows_of(axis, like, value.example.device)
            node = self.emit(aten.index_select.default, value.node, dim, rows)
            return Val(node, (*value.dims[:dim], like, *value.dims[dim + 1 :]))
        mine, other = axis.only, like.only
        shift = mine.start - other.start
        if mine.size == other.size and not shift[self.at].any():
            return Val(value.node, (*value.dims[:dim], like, *value.dims[dim + 1 :]))
        rows = self.positions(other.size, value.example.device)
        if shift[self.at].any():
            offset = np.where(self.at, shift, shift[self.at][0])
            rows = self.emit(aten.add.Tensor, rows, self.known(offset))
        elif other.size < mine.size:
            return Val(
                self.emit(aten.slice.Tensor, value.node, dim, 0, other.size),
                (*value.dims[:dim], like, *value.dims[dim + 1 :]),
            )
        else:
            return self.padded(value, dim, like)
        rows = self.emit(aten.clamp.default, rows, 0, mine.size - 1)
        node = self.emit(aten.index_select.default, value.node, dim, rows)
        return Val(node, (*value.dims[:dim], like, *value.dims[dim + 1 :]))

    def from_the_first(self, value: Val, dim: int) -> Val:
        """The rows of a dimension in one buffer, from its first row on."""
        axis = value.dims[dim]
        if isinstance(axis, int) or (len(axis.segments) == 1 and not axis.only.start[self.at].any()):
            return value
        return self.moved(value, dim, Axis.of(int(axis.count.max()), 0, axis.count))

    def _rows_of(self, axis: Axis, like: Axis, device: torch.device) -> fx.Node:
        """For each row of one buffer, the row of another one that stands at the same place among those that exist.

        Where none does it is the one before the last segment, which is no new row: those come last.
        """
        parts, before = [], np.zeros(self.length, np.int64)
        for s in like.segments:
            place = self.emit(aten.add.Tensor, self.positions(s.size, device), self.known(before - s.start))
            parts.append(place)
            before = before + s.stop - s.start
        places = self.emit(aten.cat.default, parts) if len(parts) > 1 else parts[0]
        places = self.emit(aten.clamp.default, places, 0)
        rows, first, behind = places, np.zeros(self.length, np.int64), 0
        for i, s in enumerate(axis.segments):
            own = self.emit(aten.add.Tensor, places, self.known(behind + s.start - first))
            is_here = self.emit(aten.ge.Tensor, places, self._tensor(first))
            rows = self.emit(aten.where.self, is_here, own, rows) if i else own
            first, behind = first + s.stop - s.start, behind + s.size
        exists = self.emit(aten.lt.Tensor, places, self._tensor(axis.count))
        old = self.emit(torch.full, (), max(0, behind - axis.segments[-1].size - 1), dtype=torch.int64, device=device)
        return self.emit(aten.where.self, exists, rows, old)

    def padded(self, value: Val, dim: int, like: Axis) -> Val:
        """A longer buffer, with zeros behind."""
        more = like.size - value.example.shape[dim]
        behind = len(value.dims) - 1 - dim
        node = value.node
        if more:
            node = self.emit(aten.constant_pad_nd.default, node, [0, 0] * behind + [0, more], 0)
        return Val(node, (*value.dims[:dim], like, *value.dims[dim + 1 :]))

    def same_axis(self, a: Axis, b: Axis) -> bool:
        """Whether two axes have the same rows at the steps of the operator at hand."""
        return len(a.segments) == len(b.segments) and all(
            x.size == y.size
            and (x.start[self.at] == y.start[self.at]).all()
            and (x.stop[self.at] == y.stop[self.at]).all()
            for x, y in zip(a.segments, b.segments, strict=True)
        )

    def count_of(self, dim: Dim) -> Table:
        return dim.count if isinstance(dim, Axis) else np.full(self.length, dim)

    # -- values

    def value_of(self, source: Source) -> Val:
        if isinstance(source.of, Node):
            found = self.values[source.of][source.place]
            if found is None:
                raise NotFollowed(f"reads a result of {source.of.func} that has no rule")
            return found
        kind, *rest = source.of
        if kind == "outside":
            return self.outside(rest[0])
        if kind == "literal":
            dtype, shape, numbers = rest
            if not numbers:
                return Val(self.emit(torch.zeros, shape, dtype=dtype), shape)
            return Val(self.emit(torch.reshape, self.emit(torch.tensor, numbers, dtype=dtype), shape), shape)
        carry = self.carries[rest[0], rest[1]]
        return Val(carry.node, carry.dims)

    def chosen(self, sources: dict[int, Source]) -> Val:
        """A value that comes from different places at the steps of different ways."""
        groups: dict[Source, list[int]] = {}
        for way, source in self._as_kept(sources).items():
            groups.setdefault(source, []).append(way)
        parts = [(self.value_of(source), self.steps_of(ways)) for source, ways in groups.items()]
        return self.choose(parts)

    def _as_kept(self, sources: dict[int, Source]) -> dict[int, Source]:
        """What a step reads of a cache after it has written to it, at the steps of other ways too: as it is kept, so
        that what is read and what is kept are one."""
        if len(set(sources.values())) == 1:
            return sources
        for kept in self.kept:
            if sources.items() <= kept.items() and all(self._is_there(source) for source in kept.values()):
                return kept
        return sources

    def _is_there(self, source: Source) -> bool:
        return not isinstance(source.of, Node) or source.of in self.values

    def choose(self, parts: list[tuple[Val, Table]]) -> Val:
        """One of several values, by the steps at which each counts."""
        parts.sort(key=lambda part: (-int(part[1].sum()), int(part[1].argmax())))
        same: dict[fx.Node, tuple[Val, Table]] = {}
        for value, steps in parts:
            so_far = same.get(value.node)
            both = (value, steps) if so_far is None else (self._either(value, steps, *so_far), steps | so_far[1])
            same[value.node] = both
        (result, covered), *others = same.values()
        for value, steps in others:
            result = self._either(value, steps, result, covered)
            covered = covered | steps
        return result

    def _either(self, a: Val, steps: Table, b: Val, others: Table) -> Val:
        """`a` at some steps, `b` at the others."""
        a, b = self._of_nothing(a, steps, b), self._of_nothing(b, others, a)
        dims: list[Dim] = []
        for d in range(len(a.dims)):
            x, y = a.dims[d], b.dims[d]
            if isinstance(x, int) and isinstance(y, int) and x == y:
                dims.append(x)
                continue
            a, b, joined = self._joined(a, b, d, steps, others)
            dims.append(joined)
        zero = a.zero & b.zero
        if a.node is b.node or steps.all() or not steps.any():
            return Val(a.node if steps.any() else b.node, tuple(dims), zero)
        return Val(self._one_of(steps, a.node, b.node), tuple(dims), zero)

    def _of_nothing(self, value: Val, steps: Table, other: Val) -> Val:
        """Beside rows of a cache, or of several, what has no rows at some steps is no rows of these."""
        dims = list(other.dims)
        for d, own in enumerate(other.dims):
            if not isinstance(own, Axis) or self.count_of(value.dims[d])[steps].any():
                continue
            if len(own.segments) > 1 or own.root not in (None, getattr(value.dims[d], "root", None)):
                segments = tuple(replace(s, stop=np.where(steps, s.start, s.stop)) for s in own.segments)
                dims[d] = Axis(segments, own.root)
                return Val(other.node, tuple(dims), other.zero)
        return value

    def _one_of(self, steps: Table, a: fx.Node, b: fx.Node) -> fx.Node:
        one, other = self.writes.get(a), self.writes.get(b)
        if one is not None and other is not None and (one.buffer, one.dim) == (other.buffer, other.dim):
            shapes = [w.source.meta["example_value"].shape for w in (one, other)]
            if shapes[0] == shapes[1]:  # other rows, or others' values, in one write
                source = one.source
                if source is not other.source:
                    source = self._one_of(steps, one.source, other.source)
                return self.written(one.buffer, one.dim, np.where(steps, one.first, other.first), source)
        return self.emit(aten.where.self, self._truth(steps), a, b)

    def written(self, buffer: fx.Node, dim: int, first: Table, source: fx.Node) -> fx.Node:
        """A buffer with the rows from `first[t]` on replaced."""
        count = source.meta["example_value"].shape[dim]
        rows = self.positions(count, buffer.meta["example_value"].device)
        rows = self.emit(aten.add.Tensor, rows, self._tensor(first))
        node = self.emit(aten.index_copy.default, buffer, dim, rows, source)
        self.writes[node] = Write(buffer, dim, first, source)
        return node

    def _truth(self, steps: Table) -> fx.Node:
        known = self.known(steps.copy())
        assert isinstance(known, fx.Node)
        return known

    def _joined(self, a: Val, b: Val, d: int, steps: Table, others: Table) -> tuple[Val, Val, Axis]:
        """Two values in one layout along a dimension, and the axis that serves the steps of each."""
        a, b = self._begun(a, b, d), self._begun(b, a, d)
        a, b = (self._as_axis(x, d) for x in (a, b))
        a, b = self._among(a, b, d), self._among(b, a, d)
        x, y = a.dims[d], b.dims[d]
        assert isinstance(x, Axis)
        assert isinstance(y, Axis)
        if len(x.segments) != len(y.segments) or len(x.segments) > 1:
            if len(x.segments) == len(y.segments) and all(
                p.size == q.size for p, q in zip(x.segments, y.segments, strict=True)
            ):
                pairs = zip(x.segments, y.segments, strict=True)
                return a, b, Axis(tuple(_merged_segment(p, q, steps, p.size) for p, q in pairs))
            raise NotFollowed("what it puts together differs from way to way")
        size = max(x.size, y.size)
        joined = Axis((_merged_segment(x.only, y.only, steps, size),), x.root if x.root == y.root else None)
        return self.padded(a, d, joined), self.padded(b, d, joined), joined

    def _among(self, value: Val, other: Val, d: int) -> Val:
        """Rows of one cache as those of several, of which the others have none."""
        own, all_ = value.dims[d], other.dims[d]
        assert isinstance(own, Axis)
        assert isinstance(all_, Axis)
        if len(own.segments) != 1 or len(all_.segments) == 1:
            return value
        size = own.only.size
        places = [i for i, s in enumerate(all_.segments) if s.size == size]
        places = places or [i for i, s in enumerate(all_.segments) if s.size > size]
        if not places:
            return value
        segment = replace(own.only, size=all_.segments[places[-1]].size)
        value = self.padded(value, d, Axis((segment,)))
        nothing = np.zeros(self.length, np.int64)
        segments = [Segment(s.size, nothing, nothing) for s in all_.segments]
        kind = {"dtype": value.example.dtype, "device": value.example.device}
        shape = list(value.example.shape)
        parts = [self.emit(torch.zeros, [*shape[:d], s.size, *shape[d + 1 :]], **kind) for s in segments]
        segments[places[-1]], parts[places[-1]] = segment, value.node
        dims = (*value.dims[:d], Axis(tuple(segments)), *value.dims[d + 1 :])
        return Val(self.emit(aten.cat.default, parts, d), dims, value.zero)

    def _begun(self, value: Val, other: Val, d: int) -> Val:
        """Rows that a cache begins with, beside the cache as it goes on: written to its buffer."""
        axis, size = other.dims[d], value.dims[d]
        if isinstance(size, Axis) or not isinstance(axis, Axis) or axis.root is None:
            return value
        carry = next((c for c in self.carries.values() if (c.path, d) == axis.root), None)
        if carry is None or not self.fits(value, carry, d):
            return value
        own = carry.dims[d]
        assert isinstance(own, Axis)
        begins = np.zeros(self.length, np.int64)
        node = self.written(carry.node, d, begins, value.node)
        begun = Axis.of(own.size, begins, begins + size, axis.root)
        return Val(node, (*value.dims[:d], begun, *value.dims[d + 1 :]))

    @staticmethod
    def fits(value: Val, carry: Carry, dim: int) -> bool:
        """Whether rows of a fixed number can be written to the buffer of a carry as they are."""
        shape, buffer = list(value.example.shape), list(carry.node.meta["example_value"].shape)
        return shape[:dim] + shape[dim + 1 :] == buffer[:dim] + buffer[dim + 1 :] and shape[dim] <= buffer[dim]

    def _as_axis(self, value: Val, d: int) -> Val:
        size = value.dims[d]
        if isinstance(size, Axis):
            return value
        return Val(value.node, (*value.dims[:d], Axis.of(size, 0, np.full(self.length, size)), *value.dims[d + 1 :]))

    # -- the whole

    def build(self, convert: Callable[[Body, Node], list[Val | None]]) -> None:
        """Emit the step: carries, operators, and what it yields."""
        results = leaf_results(self.merged)
        self.kept = list(results.values())
        for key, sources in results.items():
            self._add_carry(*key, sources)
        for node in self.merged.nodes:
            op = node.any
            self.stack = op.stack
            self.at = self.steps_of(list(node.ops))
            try:
                values = convert(self, node)
                self._check(node, values)
            except (NotFollowed, RuntimeError, TypeError) as error:
                why = error if isinstance(error, NotFollowed) else NotFollowed(f"has no form for such sizes: {error}")
                name = str(node.func).removesuffix(".default")
                raise NotFollowed(f"{name}: {why.reason.splitlines()[0]}", why.place or place_of(op.stack)) from error
            if op.no_grad:
                values = [v and Val(self.emit(aten.detach.default, v.node), v.dims, v.zero) for v in values]
            self.values[node] = values
        self.at = self.everywhere

    def _add_carry(self, path: Path, kind: TensorType, sources: dict[int, Source]) -> None:
        dims: list[Dim] = []
        exploration = self.exploration
        present = exploration.present.get(path)
        for d in range(kind.rank):
            before, after = (x.get((path, d)) for x in (exploration.before, exploration.after))
            if before is None or after is None or present is None:  # read after the loop alone
                shapes = {way: self.merged.trace(way).shapes[self._ref_of(way, path)][d] for way in sources}
                sizes = self.number(shapes)[self.steps_of(list(sources))]
                if (sizes != sizes[0]).any():
                    dims.append(Axis.of(int(sizes.max()), 0, np.zeros(self.length, np.int64), (path, d)))
                else:
                    dims.append(int(sizes[0]))
                continue
            there = np.concatenate([before[present[:-1]], after[present[1:]]])
            if len(there) and (there == there[0]).all():
                dims.append(int(there[0]))
                continue
            start = self.starts.get((path, d), np.zeros(self.length + 1, np.int64))
            size = int(max((start[:-1] + before).max(), (start[1:] + after).max()))
            dims.append(Axis.of(size, start[:-1], start[:-1] + before, (path, d)))
        node = self.graph.placeholder(f"carry_{len(self.carries)}")
        shape = [d.size if isinstance(d, Axis) else d for d in dims]
        with self.mode:
            node.meta["example_value"] = torch.empty(shape, dtype=kind.dtype, device=kind.device)
        self.carries[path, kind] = Carry(path, kind, tuple(dims), node)

    def _ref_of(self, way: int, path: Path) -> Ref:
        ref = self.merged.trace(way).results[path]
        assert isinstance(ref, Ref)
        return ref

    def _check(self, node: Node, values: list[Val | None]) -> None:
        """Whether a rule has given a result the sizes that the step had.

        Raises:
            NotFollowed: it has not. A rule for it is missing, or one is wrong.
        """
        for place, value in enumerate(values):
            if value is None:
                continue
            versions = {way: self.merged.trace(way).shapes[op.outs[place]] for way, op in node.ops.items()}
            agree = len(next(iter(versions.values()))) == len(value.dims) == value.example.dim()
            agree &= value.example.dtype == self.merged.trace(next(iter(node.ops))).types[node.any.outs[place]].dtype
            agree = agree and all(
                (self.count_of(dim) == self.number({way: shape[d] for way, shape in versions.items()}))[self.at].all()
                for d, dim in enumerate(value.dims)
            )
            if not agree:
                raise NotFollowed("its result has sizes that no rule accounts for")


def _merged_segment(a: Segment, b: Segment, steps: Table, size: int) -> Segment:
    return Segment(size, np.where(steps, a.start, b.start), np.where(steps, a.stop, b.stop)).clipped()


def _frozen(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_frozen(x) for x in value)
    if isinstance(value, dict):
        return tuple((k, _frozen(x)) for k, x in value.items())
    return (type(value), str(value)) if isinstance(value, float | bool) else value


__all__ = ["Axis", "Body", "Carry", "Dim", "Number", "Segment", "Table", "Val", "in_words"]
