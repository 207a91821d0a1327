"""Parallel forms of a recurrence that is linear in its state: what `affine.py` has found, put into operands.

- `AtEachStep`: the state after each step, by one operator over all of them, where a step reads the state as it likes;
- `InChunks`: what products with the state yield, in chunks of steps, where it is read by products alone. The state is a
  matrix whose factors decay rows, and what is added to it a product of a row and a column.

Raises `Declined` where a recurrence has neither.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile import modes
from nsa_compile.analyses.affine import (
    Affine,
    Axes,
    Axis,
    Factor,
    NotAffine,
    Term,
    opened,
    opened_sum,
    plain,
    without_diagonals,
)
from nsa_compile.analyses.batched_body import BatchedBody, Recurrence
from nsa_compile.ir.aten import aten, is_inexact
from nsa_compile.ir.carries import Latest, Recurrent
from nsa_compile.ir.scans import Declined, ScanRecord, ScanSite, constant_value, example
from nsa_compile.ops.recurrence import chunks, recurrence

Names = tuple[Axis, ...]


def find_parallel_form(site: ScanSite, record: ScanRecord, group: tuple[int, ...], max_bytes: int) -> Recurrence:
    """The form in which the carries of a group are computed for all steps together.

    Raises:
        Declined: there is none; says which operator of the step stands against it.
    """
    if len(group) > 1:
        raise Declined(f"{len(group)} carries are computed from one another", site.outputs()[0][group[0]])
    (place,) = group
    carry, update = site.placeholders()[0][place], site.outputs()[0][place]
    if (extreme := _as_extreme(site, record, place, carry, update)) is not None:
        return extreme
    first = constant_value(site.init[place], {})
    if first is not None and not bool(first.isfinite().all()):
        raise Declined("its first state is not finite, and would be multiplied with zero where it is replaced", carry)
    state = _State.of(site, record, carry, update)
    steps = record.length * example(carry).numel() * example(carry).element_size()
    try:
        if any(on for _, _, on in modes.autocast_at(site.node)):
            raise NotAffine("autocast computes its products with the state in low precision", carry)
        form: Recurrence = _in_chunks(site, record, place, state)
    except NotAffine as why:
        if state.mixed:
            raise
        if steps > max_bytes:
            raise Declined(f"its state at each step takes {steps} bytes, and {why.reason}", update) from why
        return AtEachStep(place, carry, update, state.kept, state.added, state.names)
    return form


# -- values of all steps


def evaluate(terms: Iterable[Term], names: Names, body: BatchedBody, dtype: torch.dtype) -> Tensor:
    """The sum of terms without a state at all steps, `[S | 1, size | 1 of each name]`."""
    total: Tensor | None = None
    for term in terms:
        value = _evaluate_term(term, names, body, dtype)
        total = value if total is None else total + value
    if total is None:
        return torch.zeros([1] * (len(names) + 1), dtype=dtype, device=body.xs[0].device)
    return total.to(torch.promote_types(total.dtype, dtype))  # a state may be kept in less than it is computed in


def _evaluate_term(term: Term, names: Names, body: BatchedBody, dtype: torch.dtype) -> Tensor:
    if not term.factors:
        return torch.full([1] * (len(names) + 1), term.number, dtype=_wide(dtype), device=body.xs[0].device)
    summed = tuple(sorted(term.summed - set(names), key=id))
    inner = [(f, _arranged(f, (*names, *summed), body)) for f in term.factors if f.names & set(summed)]
    outer = [(f, _arranged(f, names, body)) for f in term.factors if not f.names & set(summed)]
    # As beside the state: what factors are among themselves, in less than it, is something else.
    values = (x.dtype for f, x in (*inner, *outer) if f.how in ("value", "reciprocal"))
    common = functools.reduce(torch.promote_types, values, _wide(dtype))
    product: Tensor | None = None
    if summed:  # first, so that they are not spread over what they lack
        product = _times(product, inner, common)
        product = product.sum(tuple(range(len(names) + 1, product.dim())))
    product = _times(product, outer, common)
    return product if term.number == 1 else product * term.number


def _times(product: Tensor | None, factors: Sequence[tuple[Factor, Tensor]], dtype: torch.dtype) -> Tensor:
    """A product times factors; where there is none yet, the product of the factors."""
    for x in (x for f, x in factors if f.how == "value"):
        product = x.to(dtype) if product is None else product * x.to(dtype)
    if product is None:
        product = torch.ones((), dtype=dtype, device=factors[0][1].device)
    for x in (x for f, x in factors if f.how == "reciprocal"):
        product = product / x.to(dtype)
    for factor, x in ((f, x) for f, x in factors if f.how in ("true", "false")):
        zero = torch.zeros((), dtype=dtype, device=x.device)
        product = torch.where(x, product, zero) if factor.how == "true" else torch.where(x, zero, product)
    return product


def _wide(dtype: torch.dtype) -> torch.dtype:
    """A dtype for factors: a decay that is rounded to that of a small state is another decay."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype


def _arranged(factor: Factor, names: Names, body: BatchedBody) -> Tensor:
    """A factor at all steps, with a dimension for each name, of size 1 where it has none."""
    value, has_steps = body.value(factor.node, body.all_times)
    value = value if factor.rounded is None else value.to(factor.rounded)
    value = value.to(_wide(value.dtype))
    own = [axis for dim in factor.axes for axis in dim]
    rows = value.shape[0] if has_steps else 1
    value = value.reshape(rows, *(axis.size for axis in own))
    present = [axis for axis in names if axis in own]
    value = value.permute(0, *(own.index(axis) + 1 for axis in present))
    return value.reshape(rows, *(axis.size if axis in own else 1 for axis in names))


# -- the update of a carry


@dataclass(frozen=True)
class _State:
    """An update, taken apart: `kept` of the state itself, `mixed` of its other elements, and what is `added`.

    All terms have the same names for the axes of the state; in `mixed` the axes of the state that are summed over have
    those of `inner`, by name.
    """

    names: Names
    dims: Axes  # of the state
    kept: list[Term]
    mixed: list[Term]
    added: list[Term]
    inner: dict[Axis, Axis] = field(default_factory=dict)

    @classmethod
    def of(cls, site: ScanSite, record: ScanRecord, carry: fx.Node, update: fx.Node) -> _State:
        if example(update).shape != example(carry).shape or example(update).dtype != example(carry).dtype:
            raise NotAffine("the new state is spread to the shape of the old one", update)
        if example(carry).dtype == torch.bool:
            raise NotAffine("the state is a condition", update)
        terms = [x for term in Affine(site.body, record, [carry]).of(update) for x in _without_sums(term, record)]
        patterns = _patterns([*(t.out for t in terms), *(t.state for t in terms if t.state is not None)], update)
        dims: Axes = tuple(tuple(Axis(n) for n in pattern) for pattern in patterns)
        inner = {axis: Axis(axis.size) for dim in dims for axis in dim}
        kept, mixed, added = [], [], []
        for term in terms:
            term = _refined(term, term.out, patterns)
            term = term if term.state is None else _refined(term, term.state, patterns)
            term = _renamed(term, term.out, dims)
            if term.state is None:
                added.append(term)
            elif term.state == dims:
                if term.summed:
                    raise NotAffine("its factor is itself a sum", update)
                kept.append(term)
            else:
                mixed.append(_with_inner(term, dims, inner, update))
        return cls(tuple(a for dim in dims for a in dim), dims, kept, mixed, added, inner)


def _without_sums(term: Term, record: ScanRecord) -> list[Term]:
    """A term that sums over the state with a factor that is itself a sum, as one for each of its parts."""
    if term.state is None or not term.summed:
        return [term]
    term = without_diagonals(plain(term), record)
    for factor in term.factors:
        parts = opened_sum(term, factor, record) if factor.names & term.summed else None
        if parts is not None and factor.names & set(_axes(term.out)):
            return [x for part in parts for x in _without_sums(part, record)]
    return [term]


def _patterns(found: Iterable[Axes], node: fx.Node) -> tuple[tuple[int, ...], ...]:
    """How each dimension of the state falls into axes, for all who take it apart."""
    patterns: list[tuple[int, ...]] | None = None
    for axes in found:
        sizes = [tuple(axis.size for axis in dim) for dim in axes]
        if patterns is None:
            patterns = sizes
        for d, (old, new) in enumerate(zip(patterns, sizes, strict=True)):
            if len(old) > 1 < len(new) and old != new:
                raise NotAffine("its dimensions are taken apart in two ways", node)
            patterns[d] = max(old, new, key=len)
    return tuple(patterns or ())


def _refined(term: Term, axes: Axes, patterns: Sequence[tuple[int, ...]]) -> Term:
    """A term of whose `axes` those are split that are for others."""
    for dim, pattern in zip(axes, patterns, strict=True):
        if len(dim) == 1 < len(pattern):
            term = term.renamed({dim[0]: tuple(Axis(n) for n in pattern)})
    return term


def _renamed(term: Term, have: Axes, want: Axes) -> Term:
    """A term that has other names for some of its axes; one that is the same along a dimension has none there."""
    pairs = [pair for old, new in zip(have, want, strict=True) if old for pair in zip(old, new, strict=True)]
    return term.renamed({old: (new,) for old, new in pairs})


def _with_inner(term: Term, dims: Axes, inner: dict[Axis, Axis], node: fx.Node) -> Term:
    """A term that sums over axes of the state, with the names that these have within."""
    assert term.state is not None
    new: dict[Axis, Axis] = {}
    names = {axis for dim in dims for axis in dim}
    for have, want in zip(term.state, dims, strict=True):
        for old, name in zip(have, want, strict=True):
            if old is not name:
                if old in names:
                    raise NotAffine("its dimensions change places", node)
                new[old] = inner[name]
    return term.renamed({old: (name,) for old, name in new.items()})


# -- the state at each step


@dataclass(frozen=True, eq=False)
class AtEachStep:
    """The state after each step, `h[t] = a[t] * h[t - 1] + b[t]`, or a maximum or minimum in the place of the sum."""

    place: int
    carry: fx.Node
    update: fx.Node
    kept: Sequence[Term] | None  # factors of the state, or what is added to it within an extreme; None for nothing
    added: Sequence[Term]
    names: Names
    kind: str = "sum"
    only: Factor | None = None  # where something is brought

    @property
    def group(self) -> tuple[int, ...]:
        return (self.place,)

    @property
    def yields(self) -> tuple[fx.Node, ...]:
        return self.carry, self.update

    @property
    def form(self) -> str:
        return f"a running {_IN_WORDS[self.kind[:3]]}"

    def _nothing(self, dtype: torch.dtype) -> float:
        """What changes no extreme."""
        of_lowest = self.kind.startswith("min")
        if is_inexact(dtype):
            return math.inf if of_lowest else -math.inf
        return torch.iinfo(dtype).max if of_lowest else torch.iinfo(dtype).min

    def compute(self, body: BatchedBody) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        first, steps = body.init[self.place], body.record.length
        dtype, sizes = first.dtype, [axis.size for axis in self.names]
        inner = torch.uint8 if dtype == torch.bool else dtype
        a = None if self.kept is None or _is_one(self.kept) else evaluate(self.kept, self.names, body, inner)
        b = evaluate(self.added, self.names, body, inner).expand(steps, *sizes)
        if self.only is not None:
            at = _arranged(self.only, self.names, body)
            b = torch.where(at if self.only.how == "true" else ~at, b, self._nothing(b.dtype))
        values = recurrence(a, b, first.to(b.dtype).reshape(sizes), self.kind)
        values = values.reshape(steps, *first.shape).to(dtype)
        before = torch.cat([first.unsqueeze(0), values[:-1]])
        return {self.place: values[-1]}, {self.carry: before, self.update: values}


_IN_WORDS = {"sum": "sum", "log": "log-sum-exp", "max": "maximum", "min": "minimum"}


def _is_one(terms: Sequence[Term]) -> bool:
    return len(terms) == 1 and terms[0].number == 1 and not terms[0].factors


_EXTREMES = {
    aten.maximum.default: "max",
    aten.minimum.default: "min",
    aten.logaddexp.default: "logsumexp",
    aten.logical_or.default: "max",
    aten.bitwise_or.Tensor: "max",
    aten.logical_and.default: "min",
    aten.bitwise_and.Tensor: "min",
}
_OF_CONDITIONS = (
    aten.logical_or.default, aten.bitwise_or.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor,
)  # fmt: skip
# Of `where(a > b, a, b)`: the extreme, and whether b is taken of equals.
_COMPARED = {
    aten.gt.Tensor: ("max", True),
    aten.ge.Tensor: ("max", False),
    aten.lt.Tensor: ("min", True),
    aten.le.Tensor: ("min", False),
}


def _as_extreme(site: ScanSite, record: ScanRecord, place: int, carry: fx.Node, update: fx.Node) -> AtEachStep | None:
    """`max(state + a, b)`, or a minimum, or what `logaddexp` yields; of conditions, `or` and `and`. Where `state` is
    the carry, it may be chosen by a condition: `where(at, max(carry, b), carry)`."""
    affine = Affine(site.body, record, [carry])
    chosen, only = _chosen(update, carry, affine)
    if (extreme := _extreme_of(chosen)) is None:
        return None
    if any(
        example(x).shape != example(carry).shape or example(x).dtype != example(carry).dtype for x in (chosen, update)
    ):
        return None
    kind, a, b, equal = extreme
    logical = chosen.target in _OF_CONDITIONS
    if logical and example(carry).dtype != torch.bool:
        return None
    state, other = (a, b) if affine.depends(a) else (b, a)
    if not isinstance(other, fx.Node) or affine.depends(other) or not isinstance(state, fx.Node):
        return None
    if example(other).dtype != example(carry).dtype or example(state).shape != example(carry).shape:
        return None
    if state is not carry and (logical or only is not None):
        return None
    if equal is not None:
        kind += "_old" if equal is state else "_new"
    terms = affine.of(state)
    ((own,), added) = [[t for t in terms if (t.state is None) is free] for free in (False, True)]
    if own.number != 1 or own.factors or own.state != own.out:
        raise NotAffine("it is scaled before a maximum or minimum is taken of it", update)
    if added and not is_inexact(example(carry).dtype):
        raise NotAffine("integers that are added before a maximum or minimum is taken may wrap around", update)
    dims = own.out
    if any(len(dim) > 1 for term in terms for dim in term.out):
        raise NotAffine("its dimensions are taken apart", update)
    shape = example(carry).shape
    brought = Term(1, None, None, (_own_factor(other, shape, dims),), dims)
    names = tuple(a for dim in dims for a in dim)
    kept = [_renamed(term, term.out, dims) for term in added] or None
    at = None if only is None else replace(_own_factor(only[0], shape, dims), how=only[1])
    return AtEachStep(place, carry, update, kept, [brought], names, kind, at)


def _chosen(update: fx.Node, carry: fx.Node, affine: Affine) -> tuple[fx.Node, tuple[fx.Node, str] | None]:
    """The update of a carry where it is not left as it is, and the condition that it is not, with what this is then."""
    if update.target is aten.where.self:
        condition, *values = update.args
        for value, other, how in ((*values, "true"), (*values[::-1], "false")):
            if other is carry and isinstance(value, fx.Node) and not affine.depends(condition):
                return value, (condition, how)  # type: ignore[return-value]
    return update, None


def _extreme_of(node: Any) -> tuple[str, Any, Any, Any] | None:
    """The kind of an extreme, the two values that it is of, and, where it is chosen by a comparison, which of equals it
    is; None for other nodes."""
    if (kind := _EXTREMES.get(node.target)) is not None:
        return kind, *node.args[:2], None
    if node.target is not aten.where.self:
        return None
    condition, x, y = node.args
    compared = _COMPARED.get(condition.target)
    if compared is None or not ((x, y) == condition.args or (y, x) == condition.args):
        return None
    kind, second = compared
    if x is not condition.args[0]:
        kind = "min" if kind == "max" else "max"
    return kind, x, y, y if second else x


def _own_factor(node: fx.Node, shape: Sequence[int], dims: Axes) -> Factor:
    own = example(node).shape
    axes = dims[len(shape) - len(own) :]
    return Factor(node, tuple(() if n == 1 else dim for dim, n in zip(axes, own, strict=True)))


# -- products with the state, in chunks


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
        flat, names = _axes(self.dims), (*self.batch, *self.rows, *self.columns)
        first = init.reshape([axis.size for axis in flat]).permute([flat.index(axis) for axis in names])
        first = first.reshape(*(axis.size for axis in self.batch), _size(self.rows), _size(self.columns))
        values = {
            node: [_evaluate_result(term, node, body, init.dtype) for term in free] for node, free in self.free.items()
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
        extra = tuple(axis for axis in _axes(readout.query.out) if axis not in names)  # of several queries
        steps = body.record.length

        def rows_of(terms: Sequence[Term], own: Names) -> Tensor:
            every = (*self.batch, *extra, *own)
            value = evaluate(terms, every, body, first.dtype)
            value = value.expand(*value.shape[: -len(own) or None], *(axis.size for axis in own))
            return value.reshape(*value.shape[: len(every) - len(own) + 1], _size(own))

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
            out = out * _evaluate_term(readout.rest, kept, body, first.dtype)
        return _laid_out(out, kept, readout.query.out, example(readout.node).shape), last


def _size(names: Names) -> int:
    return math.prod(axis.size for axis in names)


def _axes(axes: Axes) -> Names:
    return tuple(axis for dim in axes for axis in dim)


def _evaluate_result(term: Term, node: fx.Node, body: BatchedBody, dtype: torch.dtype) -> Tensor:
    names, shape = _axes(term.out), example(node).shape
    value = _evaluate_term(term, names, body, dtype)
    return _laid_out(value, names, term.out, shape).expand(body.record.length, *shape)


def _laid_out(value: Tensor, names: Names, out: Axes, shape: Sequence[int]) -> Tensor:
    """`[S, size | 1 of each name]` in the dimensions of a result."""
    wanted = _axes(out)
    missing = [axis for axis in names if axis not in wanted]
    assert all(value.shape[1 + names.index(axis)] == 1 for axis in missing)
    value = value.permute(0, *(1 + names.index(axis) for axis in (*[a for a in wanted if a in names], *missing)))
    present = iter(value.shape[1:])
    value = value.reshape(value.shape[0], *(next(present) if axis in names else 1 for axis in wanted))
    return value.expand(value.shape[0], *(axis.size for axis in wanted)).reshape(value.shape[0], *shape)


def _in_chunks(site: ScanSite, record: ScanRecord, place: int, state: _State) -> InChunks:
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
        raise NotAffine("nothing reads the state", update)
    dims = state.dims
    patterns = tuple(tuple(axis.size for axis in dim) for dim in dims)
    if _patterns([dims, *(t.state for t in terms if t.state is not None)], update) != patterns:
        raise NotAffine("it is read in other dimensions than it is computed in", update)
    named = {node: [_named(term, dims) for term in found] for node, found in reads.items()}
    reading = [(node, term) for node, found in named.items() for term in found if term.state is not None]
    rows = {frozenset(set(state.names) - set(_axes(term.out))) for _, term in reading}
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
    per_state = _size(of_rows) * _size(columns)
    if per_state <= min(chunks.CHUNK, record.length) + _size(of_rows) + _size(columns):
        raise NotAffine("the state at each step is small", update)
    kept = None if _is_one(state.kept) else state.kept
    free = {node: [_parted(t, record) for t in found if t.state is None] for node, found in named.items()}
    return InChunks(place, batch, of_rows, columns, dims, kept, k, [v], us, p, queries, free)


def _named(term: Term, dims: Axes) -> Term:
    """A term of what is read, with the names of the state."""
    if term.state is None:
        return term
    term = _refined(term, term.state, [tuple(axis.size for axis in dim) for dim in dims])
    return _renamed(term, term.state or (), dims)


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
            if states and all(set(_axes(t.state or ())) - set(_axes(t.out)) for t in states):
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
    mixed: Sequence[Term], k: Term, state: _State, rows: Collection[Axis], node: fx.Node
) -> tuple[list[Term], Term | None]:
    """Of terms that sum over the state: what they sum with, the other way round, and the direction in which they add;
    None for that of k."""
    us, directions = [], []
    inner = {state.inner[axis] for axis in rows}
    for term in mixed:
        held = set(_axes(term.state or ()))
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
