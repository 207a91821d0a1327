"""The update of a carry as terms, with the names of its axes, and the values of terms at all steps together."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import torch
from torch import Tensor, fx

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
from nsa_compile.analyses.batched_body import BatchedBody
from nsa_compile.ir.aten import ADD, MUL, SUB
from nsa_compile.ir.scans import ScanRecord, ScanSite, example

Names = tuple[Axis, ...]


# -- values of all steps


def evaluate(terms: Iterable[Term], names: Names, body: BatchedBody, dtype: torch.dtype) -> Tensor:
    """The sum of terms without a state at all steps, `[S | 1, size | 1 of each name]`."""
    total: Tensor | None = None
    for term in terms:
        value = evaluate_term(term, names, body, dtype)
        total = value if total is None else total + value
    if total is None:
        return torch.zeros([1] * (len(names) + 1), dtype=dtype, device=body.xs[0].device)
    return total.to(torch.promote_types(total.dtype, dtype))  # a state may be kept in less than it is computed in


def evaluate_term(term: Term, names: Names, body: BatchedBody, dtype: torch.dtype) -> Tensor:
    """The value of a term without a state at all steps, `[S | 1, size | 1 of each name]`."""
    product: Tensor | None = None
    if not term.factors:  # not filled with the number: 300 times a byte wraps around, as the sum with it does
        product = torch.ones([1] * (len(names) + 1), dtype=_wide(dtype), device=body.xs[0].device)
    summed = tuple(sorted(term.summed - set(names), key=id))
    inner = [(f, arranged(f, (*names, *summed), body)) for f in term.factors if f.names & set(summed)]
    outer = [(f, arranged(f, names, body)) for f in term.factors if not f.names & set(summed)]
    # As beside the state: what factors are among themselves, in less than it, is something else.
    values = (x.dtype for f, x in (*inner, *outer) if f.how in ("value", "reciprocal"))
    common = functools.reduce(torch.promote_types, values, _wide(dtype))
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


def arranged(factor: Factor, names: Names, body: BatchedBody) -> Tensor:
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
class State:
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
    def of(cls, site: ScanSite, record: ScanRecord, carry: fx.Node, update: fx.Node) -> State:
        if example(update).shape != example(carry).shape or example(update).dtype != example(carry).dtype:
            raise NotAffine("the new state is spread to the shape of the old one", update)
        if example(carry).dtype == torch.bool:
            raise NotAffine("the state is a condition", update)
        terms = [x for term in Affine(site.body, record, [carry]).of(update) for x in _without_sums(term, record)]
        dims, terms = named_alike(terms, update)
        inner = {axis: Axis(axis.size) for dim in dims for axis in dim}
        kept, mixed, added = [], [], []
        for term in terms:
            if term.state is None:
                added.append(term)
            elif term.state == dims:
                if term.summed:
                    raise NotAffine("its factor is itself a sum", update)
                kept.append(term)
            else:
                mixed.append(_with_inner(term, dims, inner, update))
        return cls(tuple(a for dim in dims for a in dim), dims, _joined(kept), mixed, added, inner)


def _joined(terms: list[Term]) -> list[Term]:
    """Terms of which two that differ in this, where a condition is true and where it is false, are one."""
    for term in terms:
        for factor in (f for f in term.factors if f.how == "true"):
            rest = [f for f in term.factors if f is not factor]
            other = replace(term, factors=(*rest, replace(factor, how="false")))
            same = [x for x in terms if replace(x, factors=()) == replace(other, factors=()) and _equal(x, other)]
            if same:
                without = [x for x in terms if x is not term and x is not same[0]]
                return _joined([*without, replace(term, factors=tuple(rest))])
    return terms


def _equal(a: Term, b: Term) -> bool:
    return Counter(a.factors) == Counter(b.factors)


def _without_sums(term: Term, record: ScanRecord) -> list[Term]:
    """A term that sums over the state with a factor that is itself a sum, as one for each of its parts."""
    if term.state is None or not term.summed:
        return [term]
    term = without_diagonals(plain(term), record)
    for factor in term.factors:
        if not factor.names & term.summed or not factor.names & set(all_axes(term.out)):
            continue
        parts = opened_sum(term, factor, record)
        if parts is None and _holds_sum(factor.node) and (product := opened(term, factor, record)) is not None:
            parts = [product]
        if parts is not None:
            return [x for part in parts for x in _without_sums(part, record)]
    return [term]


def _holds_sum(node: fx.Node) -> bool:
    """Whether a matrix is a sum of matrices, times something."""
    if node.target in ADD | SUB:
        return all(_is_matrix(x) for x in node.args[:2])
    return node.target in MUL and any(_is_matrix(x) and _holds_sum(x) for x in node.args[:2])


def _is_matrix(x: object) -> TypeGuard[fx.Node]:
    return isinstance(x, fx.Node) and example(x).dim() >= 2 and min(example(x).shape[-2:]) > 1


def named_alike(terms: Sequence[Term], node: fx.Node) -> tuple[Axes, list[Term]]:
    """The axes of a state, and the terms of its update with these as the axes of their results."""
    patterns = patterns_of([*(t.out for t in terms), *(t.state for t in terms if t.state is not None)], node)
    dims: Axes = tuple(tuple(Axis(n) for n in pattern) for pattern in patterns)
    split = [refined(term, term.out, patterns) for term in terms]
    split = [term if term.state is None else refined(term, term.state, patterns) for term in split]
    return dims, [renamed(term, term.out, dims) for term in split]


def patterns_of(found: Iterable[Axes], node: fx.Node) -> tuple[tuple[int, ...], ...]:
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


def refined(term: Term, axes: Axes, patterns: Sequence[tuple[int, ...]]) -> Term:
    """A term of whose `axes` those are split that are for others."""
    for dim, pattern in zip(axes, patterns, strict=True):
        if len(dim) == 1 < len(pattern):
            term = term.renamed({dim[0]: tuple(Axis(n) for n in pattern)})
    return term


def renamed(term: Term, have: Axes, want: Axes) -> Term:
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


def all_axes(axes: Axes) -> Names:
    """The axes of all dimensions."""
    return tuple(axis for dim in axes for axis in dim)


def size_of(names: Names) -> int:
    """How many elements a tensor with these axes has."""
    return math.prod(axis.size for axis in names)


def evaluate_result(term: Term, node: fx.Node, body: BatchedBody, dtype: torch.dtype) -> Tensor:
    """The value of a term of a node at all steps, in the node's shape, `[S, ...]`."""
    names, shape = all_axes(term.out), example(node).shape
    value = evaluate_term(term, names, body, dtype)
    return laid_out(value, names, term.out, shape).expand(body.record.length, *shape)


def laid_out(value: Tensor, names: Names, out: Axes, shape: Sequence[int]) -> Tensor:
    """`[S, size | 1 of each name]` in the dimensions of a result."""
    wanted = all_axes(out)
    missing = [axis for axis in names if axis not in wanted]
    assert all(value.shape[1 + names.index(axis)] == 1 for axis in missing)
    value = value.permute(0, *(1 + names.index(axis) for axis in (*[a for a in wanted if a in names], *missing)))
    present = iter(value.shape[1:])
    value = value.reshape(value.shape[0], *(next(present) if axis in names else 1 for axis in wanted))
    return value.expand(value.shape[0], *(axis.size for axis in wanted)).reshape(value.shape[0], *shape)


def is_one(terms: Sequence[Term]) -> bool:
    """Whether a state is kept as it is."""
    return len(terms) == 1 and terms[0].number == 1 and not terms[0].factors
