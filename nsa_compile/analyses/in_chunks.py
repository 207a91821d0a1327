"""What products with the state of a recurrence yield, in chunks of steps: no step's state is held.

The state is a matrix whose factors decay rows. What is added to it is a product of a row and a column; what is taken
off along that column, or another one, is read of it by a product.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from nsa_compile.analyses.affine import Affine, Axes, Axis, Factor, NotAffine, Term, opened, plain
from nsa_compile.analyses.batched_body import BatchedBody
from nsa_compile.analyses.terms import (
    Names,
    State,
    all_axes,
    evaluate,
    evaluate_result,
    evaluate_term,
    is_one,
    laid_out,
    patterns_of,
    refined,
    renamed,
    size_of,
)
from nsa_compile.ir.aten import is_inexact
from nsa_compile.ir.carries import Latest, Recurrent
from nsa_compile.ir.scans import ScanRecord, ScanSite, example
from nsa_compile.ops.recurrence import chunks


@dataclass(frozen=True)
class Readout:
    """A product of queries with the state, as a step finds or leaves it: one term of a value that a step reads."""

    node: fx.Node
    query: Term  # factors with axes that are summed over
    rest: Term  # other factors, of the result
    before: bool


@dataclass(frozen=True, eq=False)
class InChunks:
    """`S[t] = a[t] S[t-1] + k[t] v[t] - p[t] (u[t] S[t-1])`, read by products."""

    place: int
    batch: Names
    rows: Names  # that products sum over
    columns: Names
    dims: Axes
    a: Sequence[Term] | None
    k: Term
    v: Sequence[Term]
    u: Sequence[Term]
    p: Term | None  # None for k
    readouts: Sequence[Readout]
    free: dict[fx.Node, list[Term]]  # terms of what is read that are without the state

    @property
    def group(self) -> tuple[int, ...]:
        return (self.place,)

    @property
    def yields(self) -> tuple[fx.Node, ...]:
        return tuple(self.free)

    @property
    def form(self) -> str:
        return "products in chunks" if not self.u else "products in chunks, each solved as a triangular system"

    def compute(self, body: BatchedBody) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        init = body.init[self.place]
        flat, names = all_axes(self.dims), (*self.batch, *self.rows, *self.columns)
        first = init.reshape([axis.size for axis in flat]).permute([flat.index(axis) for axis in names])
        first = first.reshape(*(axis.size for axis in self.batch), size_of(self.rows), size_of(self.columns))
        values = {
            node: [evaluate_result(term, node, body, init.dtype) for term in free] for node, free in self.free.items()
        }
        for readout in self.readouts:
            out, last = self._read(readout, first, body)
            values[readout.node].append(out)
        last = last.reshape([axis.size for axis in names]).permute([names.index(axis) for axis in flat])
        yielded = {node: sum(parts[1:], parts[0]).to(example(node).dtype) for node, parts in values.items()}
        return {self.place: last.reshape(init.shape).to(init.dtype)}, yielded

    def _read(self, readout: Readout, first: Tensor, body: BatchedBody) -> tuple[Tensor, Tensor]:
        """What a readout yields at all steps, `[S, ...]`, and the last state."""
        names = {*self.batch, *self.rows, *self.columns}
        extra = tuple(axis for axis in all_axes(readout.query.out) if axis not in names)  # of several queries
        steps = body.record.length

        def rows_of(terms: Sequence[Term], own: Names) -> Tensor:
            every = (*self.batch, *extra, *own)
            value = evaluate(terms, every, body, first.dtype)
            value = value.expand(*value.shape[: -len(own) or None], *(axis.size for axis in own))
            return value.reshape(*value.shape[: len(every) - len(own) + 1], size_of(own))

        def at_steps(x: Tensor) -> Tensor:
            return x.expand(steps, *x.shape[1:])

        held = {axis for term in self.a or () for f in term.factors for axis in f.names}
        a = None if self.a is None else rows_of(self.a, self.rows if held & set(self.rows) else ())
        k, v = at_steps(rows_of([self.k], self.rows)), at_steps(rows_of(self.v, self.columns))
        u = at_steps(rows_of(self.u, self.rows)) if self.u else None
        p = at_steps(rows_of([self.p], self.rows)) if self.p else None
        q = asked = at_steps(rows_of([readout.query], self.rows))
        state = first.reshape(*first.shape[:-2], *[1] * len(extra), *first.shape[-2:])
        if readout.before:  # step t reads what step t - 1 has left
            q = torch.cat([q[1:], torch.zeros_like(q[:1])])
        out, last = chunks.linear(q, k, v, a, u, state, p)
        if readout.before:
            found = (asked[:1].to(out.dtype).unsqueeze(-2) @ state.to(out.dtype)).squeeze(-2)
            out = torch.cat([found.expand(1, *out.shape[1:]), out[:-1]])
        kept = (*self.batch, *extra, *self.columns)
        out = out.reshape(*out.shape[:-1], *(axis.size for axis in self.columns))
        if readout.rest.factors or readout.rest.number != 1:
            out = out * evaluate_term(readout.rest, kept, body, first.dtype)
        return laid_out(out, kept, readout.query.out, example(readout.node).shape), last


def in_chunks(site: ScanSite, record: ScanRecord, place: int, state: State) -> InChunks:
    """The form in chunks of a recurrence.

    Raises:
        NotAffine: it has none, or the state at each step is smaller than what it computes.
    """
    carry, update = site.placeholders()[0][place], site.outputs()[0][place]
    if not is_inexact(example(carry).dtype):
        raise NotAffine("its state is of integers, of which a product may hold more than a float does", carry)
    reads = _readouts(site, record, place, carry, update)
    terms = [term for found in reads.values() for term in found if term.state is not None]
    if not terms:
        raise NotAffine("nothing but its own update reads the state", update)
    dims = state.dims
    patterns = tuple(tuple(axis.size for axis in dim) for dim in dims)
    if patterns_of([dims, *(t.state for t in terms if t.state is not None)], update) != patterns:
        raise NotAffine("it is read in other dimensions than it is computed in", update)
    named = {node: [_named(term, dims) for term in found] for node, found in reads.items()}
    reading = [(node, term) for node, found in named.items() for term in found if term.state is not None]
    rows = {frozenset(set(state.names) - set(all_axes(term.out))) for _, term in reading}
    if len(rows) != 1 or not next(iter(rows)):
        raise NotAffine("what is read of the state is not summed over the same dimensions", update)
    summed = next(iter(rows))
    of_rows = tuple(axis for axis in state.names if axis in summed)

    queries = [_query(node, term, summed, carry) for node, term in reading]
    asked = {axis for r in queries for f in r.query.factors for axis in f.names}
    values = set(state.names) - summed - asked
    added = [plain(_split_up(term, summed, values, record)) for term in state.added]
    mixed = [plain(_split_up(term, summed, {*values, *state.inner.values()}, record)) for term in state.mixed]
    if len(added) != 1:
        raise NotAffine("what is added to the state is not one product", update)
    k, v = _parts(added[0], summed, update)
    us, p = _feedback(mixed, k, state, summed, update)
    of_rows_alone = [k, *us, *(r.query for r in queries), *state.kept, *([] if p is None else [p])]
    held = {axis for term in of_rows_alone for f in term.factors for axis in f.names}
    batch = tuple(axis for axis in state.names if axis in held and axis not in summed)
    columns = tuple(axis for axis in state.names if axis not in summed and axis not in held)
    for readout in queries:
        if any(f.names & set(columns) for f in readout.query.factors):
            raise NotAffine("a query has the dimensions of a value", readout.node)
    per_state = size_of(of_rows) * size_of(columns)
    if per_state <= min(chunks.CHUNK, record.length) + size_of(of_rows) + size_of(columns):
        raise NotAffine("the state at each step is small", update)
    kept = None if is_one(state.kept) else state.kept
    free = {node: [_parted(t, record) for t in found if t.state is None] for node, found in named.items()}
    return InChunks(place, batch, of_rows, columns, dims, kept, k, [v], us, p, queries, free)


def _named(term: Term, dims: Axes) -> Term:
    """A term of what is read, with the names of the state."""
    if term.state is None:
        return term
    term = refined(term, term.state, [tuple(axis.size for axis in dim) for dim in dims])
    return renamed(term, term.state or (), dims)


def _readouts(
    site: ScanSite, record: ScanRecord, place: int, carry: fx.Node, update: fx.Node
) -> dict[fx.Node, list[Term]]:
    """The values that a step makes of the state by products, as terms; whatever else it reads, it reads of these.

    Raises:
        NotAffine: it reads the state otherwise.
    """
    affine = Affine(site.body, record, [carry, update])
    updates, ys = site.outputs()
    others = {
        u
        for i, (u, kind) in enumerate(zip(updates, record.carries, strict=True))
        if i != place and isinstance(kind, Latest | Recurrent)
    }
    wanted, todo = set[fx.Node](), [n for n in affine.dependent if n in ys or n in others or _written(record, n)]
    while todo:  # what is needed beyond the update itself
        node = todo.pop()
        if node not in wanted:
            wanted.add(node)
            todo += [] if node in affine.sources else [n for n in node.all_input_nodes if n in affine.dependent]
    ends = {n for n in wanted if n in ys or n in others or _written(record, n)}
    found: dict[fx.Node, list[Term]] = {}
    whole = set(affine.sources)  # what holds the state as it is
    for node in site.body.graph.nodes:
        if node not in wanted:
            continue
        if node not in affine.sources:
            if whole.isdisjoint(node.all_input_nodes):
                continue
            terms = affine.of(node)
            states = [term for term in terms if term.state is not None]
            if states and all(set(all_axes(t.state or ())) - set(all_axes(t.out)) for t in states):
                found[node] = terms
                continue
            whole.add(node)
        if node in ends:
            raise NotAffine("the state itself is read at each step", node)
    return found


def _written(record: ScanRecord, node: fx.Node) -> bool:
    """Whether a value is a row that a step writes."""
    return any(getattr(kind, "written", None) is node for kind in record.carries)


def _split_up(term: Term, rows: Collection[Axis], rest: Collection[Axis], record: ScanRecord) -> Term:
    """A term whose factors have axes of rows, or others, but none both, as far as they are seen to be products."""
    todo, tries = True, 0
    while todo and tries < 100:
        todo = False
        for factor in term.factors:
            if factor.names & set(rows) and factor.names & set(rest) and (more := opened(term, factor, record)):
                term, todo, tries = more, True, tries + 1
                break
    return term


def _parted(term: Term, record: ScanRecord) -> Term:
    """A term whose factors are not spread over an axis of the result that is theirs alone while they are summed."""
    held = [axis for f in term.factors for axis in f.names]
    return _split_up(term, term.summed, {axis for axis in held if held.count(axis) == 1} - term.summed, record)


def _parts(term: Term, rows: Collection[Axis], node: fx.Node) -> tuple[Term, Term]:
    """The factors with rows, and the others, with the number."""
    column = tuple(f for f in term.factors if f.names & set(rows))
    row = tuple(f for f in term.factors if not f.names & set(rows))
    if term.summed:
        raise NotAffine("what is added to the state is a sum of products", node)
    if not column and rows:
        raise NotAffine("what is added to the state is the same for all of its rows", node)
    return replace(term, number=1, factors=column), replace(term, factors=row)


def _feedback(
    mixed: Sequence[Term], k: Term, state: State, rows: Collection[Axis], node: fx.Node
) -> tuple[list[Term], Term | None]:
    """Of terms that sum over the state: what they sum with, the other way round, and the direction in which they add;
    None for that of k."""
    us, directions = [], []
    inner = {state.inner[axis] for axis in rows}
    for term in mixed:
        held = set(all_axes(term.state or ()))
        if not inner <= held or (held - inner) - set(state.names):
            raise NotAffine("the state is summed over other dimensions than those that are read", node)
        column = tuple(f for f in term.factors if f.names & set(rows))
        if not column or any(f.names & inner for f in column):
            raise NotAffine("the state is multiplied with a matrix that is not seen to be of rank one", node)
        others = tuple(f for f in term.factors if not f.names & set(rows))
        directions.append(replace(term, number=1, factors=column, state=None, out=state.dims))
        without = replace(term, number=-term.number, factors=others, state=None, out=state.dims)
        us.append(without.renamed({within: (axis,) for axis, within in state.inner.items()}))
    if all(_same_direction(direction, k) for direction in directions):
        return us, None
    if not all(_same_direction(direction, directions[0]) for direction in directions):
        raise NotAffine("what is taken from the state lies in several directions", node)
    return us, directions[0]


def _same_direction(a: Term, b: Term) -> bool:
    numbers: dict[tuple[str, str], int] = {}
    return sorted(_signature(f, numbers) for f in a.factors) == sorted(_signature(f, numbers) for f in b.factors)


def _signature(factor: Factor, numbers: dict[tuple[str, str], int]) -> str:
    """Equal for factors that are computed alike; `numbers` are those of computations seen so far."""

    def of(node: fx.Node) -> str:
        if node.op != "call_function":
            return node.name
        computed = (str(node.target), str(fx.node.map_arg((node.args, node.kwargs), of)))
        return f"%{numbers.setdefault(computed, len(numbers))}"

    return f"{of(factor.node)} {factor.how} {factor.rounded} {[[id(axis) for axis in dim] for dim in factor.axes]}"


def _query(node: fx.Node, term: Term, rows: Collection[Axis], carry: fx.Node) -> Readout:
    query = tuple(f for f in term.factors if f.names & set(rows))
    rest = tuple(f for f in term.factors if not f.names & set(rows))
    return Readout(
        node,
        replace(term, number=1, factors=query, state=None),
        replace(term, factors=rest, state=None),
        term.source is carry,
    )
