"""Which values of a step are linear in a carry, and with which coefficients: followed operator by operator.

A value is a sum of terms. Each is a product, in the sense of an einsum: of the carry or of nothing, and of factors,
values of the step that do not depend on the carry. Its *axes* name the dimensions: `S[k, v] * q[k]`, summed over k, is
the term with the state's axes `((k,), (v,))`, the factor q with `((k,),)`, and the result's `((v,),)`. A dimension of
size 1 has no axis, one that was flattened has several. Movement, products with independent values, sums and products of
matrices all lead from such sums to such sums.

Nothing is assumed of a program's names or of the order of its operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from nsa_compile.analyses.batched_operators import HALF, reads_unrounded_number
from nsa_compile.analyses.masks import side_of_where
from nsa_compile.ir.aten import (
    ADD,
    COPIED,
    DIV,
    MASKED_FILL,
    MATMUL,
    MATMUL_ADD,
    MUL,
    SUB,
    WHERE,
    arguments,
    aten,
    holds,
    is_inexact,
    operand,
)
from nsa_compile.ir.scans import Declined, ScanRecord, example


@dataclass(frozen=True, eq=False)
class Axis:
    """A dimension of a size, of whatever tensors share it."""

    size: int


Axes = tuple[tuple[Axis, ...], ...]  # of each dimension of a tensor


@dataclass(frozen=True)
class Factor:
    """A value that does not depend on the state, or, by `how`, its reciprocal, or where it is true or false.

    `rounded` is the dtype to which the operator that reads it casts it first, where that may change it: a decay that is
    kept in float32 is another one in half precision, and integers and conditions have other sums and products among
    themselves than beside the state.
    """

    node: fx.Node
    axes: Axes
    how: str = "value"  # value, reciprocal, true, false
    rounded: torch.dtype | None = None

    @property
    def names(self) -> set[Axis]:
        return {axis for axes in self.axes for axis in axes}


@dataclass(frozen=True)
class Term:
    """`number * state * factors`, summed over the axes that `out` lacks; `state` is None in a term without it.

    A factor that is true or false selects: where it does not hold the term is zero, whatever else it is a product of.
    `narrowed` is the dtype that the state was cast to, if it does not hold all that a carry does.
    """

    number: float
    state: Axes | None
    source: fx.Node | None
    factors: tuple[Factor, ...]
    out: Axes
    narrowed: torch.dtype | None = None

    @property
    def summed(self) -> set[Axis]:
        """The axes that are summed over."""
        held = set().union(*(f.names for f in self.factors), *(self.state or ()))
        return held - {axis for axes in self.out for axis in axes}

    def mapped(self, change: Callable[[tuple[Axis, ...]], tuple[Axis, ...]]) -> Term:
        """The term with other axes."""

        def of(axes: Axes) -> Axes:
            return tuple(change(dim) for dim in axes)

        factors = tuple(replace(f, axes=of(f.axes)) for f in self.factors)
        return replace(self, state=None if self.state is None else of(self.state), factors=factors, out=of(self.out))

    def renamed(self, new: Mapping[Axis, tuple[Axis, ...]]) -> Term:
        """The term with axes replaced by others."""
        return self.mapped(lambda found: tuple(y for x in found for y in new.get(x, (x,))))


def axes_of(node: fx.Node) -> Axes:
    """New axes for a value."""
    return tuple(() if n == 1 else (Axis(n),) for n in example(node).shape)


def aligned(node: fx.Node, axes: Axes, how: str = "value") -> Factor:
    """A value as a factor of a tensor with these axes, to which it is broadcast: its own are the last of them."""
    shape = example(node).shape
    own = axes[len(axes) - len(shape) :]
    return Factor(node, tuple(() if n == 1 else dim for dim, n in zip(own, shape, strict=True)), how)


class NotAffine(Declined):
    """A value is no sum of products with the state; says why."""


class Affine:
    """The terms of the values of a step, linear in the sources, of which each is a carry as a step finds or leaves it.

    Raises:
        NotAffine: a value depends on a source in another way.
    """

    def __init__(self, body: fx.GraphModule, record: ScanRecord, sources: Sequence[fx.Node]) -> None:
        self.record, self.sources = record, list(sources)
        self.dependent = set(sources)
        for node in body.graph.nodes:
            # What reads a shape alone, such as `zeros_like`, is a constant.
            known = node in record.constant or node in record.known
            if node.op == "call_function" and not known and not self.dependent.isdisjoint(node.all_input_nodes):
                self.dependent.add(node)
        self.found: dict[fx.Node, list[Term]] = {}

    def of(self, node: fx.Node) -> list[Term]:
        """The terms of a value."""
        waiting = [node]
        while waiting:
            n = waiting[-1]
            inner = [] if n in self.sources else [m for m in n.all_input_nodes if m in self.dependent]
            missing = [] if n not in self.dependent else [m for m in inner if m not in self.found]
            if n in self.found or not missing:
                waiting.pop()
                if n not in self.found:
                    self.found[n] = self._derive(n)
            else:
                waiting += missing
        return self.found[node]

    def _derive(self, node: fx.Node) -> list[Term]:
        if node in self.sources:
            axes = axes_of(node)
            return [Term(1, axes, node, (), axes)]
        if node not in self.dependent:
            if self._is_zero(node):
                return []
            axes = axes_of(node)
            return [Term(1, None, None, (Factor(node, axes),), axes)]
        if not isinstance(example(node), Tensor):
            raise NotAffine(f"the step takes {node.target} of the old state, which is not known to be linear", node)
        if example(node).dtype == torch.bool:
            raise NotAffine(f"{node.target} makes a condition of the old state", node)
        if any((node, place) in self.record.hidden for place in range(len(node.args))):
            raise NotAffine("the step multiplies the old state with rows that are not written yet", node)
        rule = _RULES.get(node.target)
        if rule is None:
            raise NotAffine(f"the step takes {node.target} of the old state, which is not known to be linear", node)
        return [self._narrowed(term, node) for term in rule(self, node)]

    def _narrowed(self, term: Term, node: fx.Node) -> Term:
        """A term of a node's value, with the narrowest dtype that the state had on the way."""
        to, carry = example(node).dtype, example(self.sources[0]).dtype
        if term.state is None:
            return term
        if (to.is_floating_point, to.is_complex) != (carry.is_floating_point, carry.is_complex):
            raise NotAffine(f"{node.target} makes the state {to}", node)
        if term.narrowed is not None and not holds(term.narrowed, to):
            raise NotAffine(f"the state is rounded to {term.narrowed}, and goes on as {to}", node)
        return term if holds(to, carry) else replace(term, narrowed=to)

    def _is_zero(self, node: fx.Node) -> bool:
        value = self.record.constant.get(node)
        return value is not None and not bool(value.any())

    def terms(self, value: Any, like: fx.Node) -> list[Term]:
        """Of an operand, spread to the shape of a result."""
        if isinstance(value, fx.Node):
            terms = self.of(value)
            if value not in self.dependent:
                terms = [replace(t, factors=tuple(_read_by(f, like) for f in t.factors)) for t in terms]
            return [spread(term, example(like).shape, like) for term in terms]
        if example(like).dtype in HALF:
            value = torch.tensor(float(value), dtype=example(like).dtype).item()
            if not math.isfinite(value):
                raise NotAffine(f"a number is added that {example(like).dtype} does not hold", like)
        return [] if value == 0 else [Term(value, None, None, (), tuple(() for _ in example(like).shape))]

    def depends(self, value: Any) -> bool:
        return isinstance(value, fx.Node) and value in self.dependent


def _read_by(factor: Factor, node: fx.Node) -> Factor:
    """A factor as an operator reads it: in the dtype that this computes in."""
    to, own = example(node).dtype, example(factor.node).dtype
    if factor.how in ("true", "false") or (is_inexact(own) and holds(to, own)):
        return factor
    unrounded = to in HALF and reads_unrounded_number(node) and factor.node is node.args[1]
    return replace(factor, rounded=torch.float32 if unrounded else to)


# -- terms moved


def spread(term: Term, shape: Sequence[int], node: fx.Node) -> Term:
    """A term broadcast to a shape."""
    out: list[tuple[Axis, ...]] = [() for _ in range(len(shape) - len(term.out))] + list(term.out)
    return replace(term, out=tuple(() if n == 1 else dim or (Axis(n),) for dim, n in zip(out, shape, strict=True)))


def _times(term: Term, factor: fx.Node, how: str, node: fx.Node) -> Term:
    """A term of the result's rank, element by element times an independent value."""
    shape = example(factor).shape
    out = list(term.out)
    axes: list[tuple[Axis, ...]] = []
    for place, size in enumerate(shape, len(out) - len(shape)):
        if size == 1:
            axes.append(())
        else:
            out[place] = out[place] or (Axis(size),)
            axes.append(out[place])
    return replace(term, factors=(*term.factors, _read_by(Factor(factor, tuple(axes), how), node)), out=tuple(out))


def _reshaped(term: Term, shape: Sequence[int], node: fx.Node) -> Term:
    """A term whose result is taken in another shape; axes that are split are split throughout."""
    flat = [axis for dim in term.out for axis in dim]
    out: list[tuple[Axis, ...]] = []
    for size in shape:
        dim: list[Axis] = []
        missing = size
        while missing > 1:
            axis = flat.pop(0)
            if missing % axis.size == 0:
                dim.append(axis)
                missing //= axis.size
                continue
            if axis.size % missing:
                raise NotAffine(f"{node.target} cuts across the dimensions of the state", node)
            parts = (Axis(missing), Axis(axis.size // missing))
            term = term.renamed({axis: parts})
            out = [tuple(y for x in axes for y in (parts if x is axis else (x,))) for axes in out]
            flat = [parts[1], *flat]
            dim.append(parts[0])
            missing = 1
        out.append(tuple(dim))
    return replace(term, out=tuple(out))


def _over(term: Term, dims: Sequence[int], keepdim: bool, *, mean: bool) -> Term:
    """A term summed over dimensions of its result, or averaged."""
    gone = [axis for d in dims for axis in term.out[d]]
    held = set().union(*(f.names for f in term.factors), *(term.state or ()))
    number = term.number
    for axis in gone:
        if mean:
            number /= axis.size
        if axis not in held:  # equal elements
            number *= axis.size
    kept = [() if d in dims else dim for d, dim in enumerate(term.out)]
    out = tuple(kept) if keepdim else tuple(dim for d, dim in enumerate(kept) if d not in dims)
    return replace(term, number=number, out=out)


# -- rules


def _moved(analysis: Affine, node: fx.Node) -> list[Term]:
    return [_move(term, node) for term in analysis.of(operand(node))]


def _move(term: Term, node: fx.Node) -> Term:
    moved, target, out = arguments(node), node.target, list(term.out)
    rank = len(out)
    if target is aten.permute.default:
        return replace(term, out=tuple(out[d] for d in moved.dims))
    if target is aten.transpose.int:
        out[moved.dim0], out[moved.dim1] = out[moved.dim1], out[moved.dim0]
        return replace(term, out=tuple(out))
    if target is aten.t.default:
        return replace(term, out=tuple(reversed(out)))
    if target is aten.expand.default:
        return spread(term, example(node).shape, node)
    if target is aten.unsqueeze.default:
        at = moved.dim % (rank + 1)
        return replace(term, out=(*out[:at], (), *out[at:]))
    if target is aten.select.int and not out[moved.dim]:
        del out[moved.dim]
        return replace(term, out=tuple(out))
    same_elements = math.prod(example(node).shape) == math.prod(example(operand(node)).shape)
    squeezes = target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
    if same_elements and (squeezes or target in _VIEWS):
        return _reshaped(spread(term, example(operand(node)).shape, node), example(node).shape, node)
    raise NotAffine(f"{node.target} takes a part of the state", node)


_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


def _same(analysis: Affine, node: fx.Node) -> list[Term]:
    return analysis.of(operand(node))


def _scaled(terms: Sequence[Term], number: Any) -> list[Term]:
    return [replace(term, number=term.number * number) for term in terms if number != 0]


def _add(analysis: Affine, node: fx.Node) -> list[Term]:
    a, b = node.args[:2]
    sign = -1 if node.target in SUB else 1
    return analysis.terms(a, node) + _scaled(analysis.terms(b, node), sign * arguments(node).alpha)


def _rsub(analysis: Affine, node: fx.Node) -> list[Term]:
    a, b = node.args[:2]
    return _scaled(analysis.terms(a, node), -arguments(node).alpha) + analysis.terms(b, node)


def _neg(analysis: Affine, node: fx.Node) -> list[Term]:
    return _scaled(analysis.of(operand(node)), -1)


def _product(analysis: Affine, node: fx.Node, a: Any, b: Any, how: str = "value") -> list[Term]:
    """`a * b`, of which b does not depend on the state."""
    terms = analysis.terms(a, node)
    if isinstance(b, fx.Node):
        return [_times(term, b, how, node) for term in terms]
    return _scaled(terms, 1 / b if how == "reciprocal" else b)


def _mul(analysis: Affine, node: fx.Node) -> list[Term]:
    a, b = node.args[:2]
    if analysis.depends(a) and analysis.depends(b):
        raise NotAffine("the step multiplies two values that depend on the old state", node)
    return _product(analysis, node, *((a, b) if analysis.depends(a) else (b, a)))


def _div(analysis: Affine, node: fx.Node) -> list[Term]:
    a, b = node.args[:2]
    if analysis.depends(b):
        raise NotAffine("something is divided by what depends on the old state", node)
    if not example(cast(fx.Node, a)).dtype.is_floating_point:
        raise NotAffine("the state is divided as an integer", node)
    return _product(analysis, node, a, b, "reciprocal")


def _choice(analysis: Affine, node: fx.Node, mask: fx.Node, if_true: Any, if_false: Any) -> list[Term]:
    if analysis.depends(mask):
        raise NotAffine("a condition depends on the old state", node)
    terms = []
    for value, how in ((if_true, "true"), (if_false, "false")):
        if isinstance(value, float) and not math.isfinite(value):
            raise NotAffine("an infinity is put in the place of the state", node)
        chosen = (_selected(term, mask, how, node) for term in analysis.terms(value, node))
        terms += [term for term in chosen if term is not None]
    return terms


def _selected(term: Term, mask: fx.Node, how: str, node: fx.Node) -> Term | None:
    """A term where a condition holds, or does not; None for one that is selected where it is the other way round."""
    found = _times(term, mask, how, node)
    *others, factor = found.factors
    if replace(factor, how="false" if how == "true" else "true") in others:
        return None
    return replace(found, factors=tuple(others)) if factor in others else found


def _where(analysis: Affine, node: fx.Node) -> list[Term]:
    mask, if_true, if_false = node.args[:3]
    return _choice(analysis, node, mask, if_true, if_false)  # pyrefly: ignore[bad-argument-type]


def _masked_fill(analysis: Affine, node: fx.Node) -> list[Term]:
    value, mask, filling = node.args[:3]
    return _choice(analysis, node, mask, filling, value)  # pyrefly: ignore[bad-argument-type]


def _lerp(analysis: Affine, node: fx.Node) -> list[Term]:
    """`start + weight * (end - start)`."""
    start, end, weight = node.args[:3]
    if analysis.depends(weight):
        raise NotAffine("the weight of a mean depends on the old state", node)
    away = _product(analysis, node, start, weight)
    return analysis.terms(start, node) + _scaled(away, -1) + _product(analysis, node, end, weight)


def _addcmul(analysis: Affine, node: fx.Node) -> list[Term]:
    added = arguments(node)
    a, b = added.tensor1, added.tensor2
    if analysis.depends(a) and analysis.depends(b):
        raise NotAffine("the step multiplies two values that depend on the old state", node)
    product = _product(analysis, node, *((a, b) if analysis.depends(a) else (b, a)))
    return analysis.terms(added.self, node) + _scaled(product, added.value)


def _addcdiv(analysis: Affine, node: fx.Node) -> list[Term]:
    added = arguments(node)
    if analysis.depends(added.tensor2):
        raise NotAffine("something is divided by what depends on the old state", node)
    quotient = _product(analysis, node, added.tensor1, added.tensor2, "reciprocal")
    return analysis.terms(added.self, node) + _scaled(quotient, added.value)


def _reduced(analysis: Affine, node: fx.Node) -> list[Term]:
    source = operand(node)
    rank, reduced = example(source).dim(), vars(arguments(node))
    dims: Any = reduced.get("dim")
    dims = list(range(rank)) if dims in (None, []) else [d % rank for d in ([dims] if isinstance(dims, int) else dims)]
    mean = node.target in (aten.mean.default, aten.mean.dim)
    return [_over(term, dims, reduced.get("keepdim", False), mean=mean) for term in analysis.of(source)]


def _matmul(analysis: Affine, node: fx.Node) -> list[Term]:
    return _matrix_product(analysis, node, *node.args[:2])


def _matrix_product(analysis: Affine, node: fx.Node, a: Any, b: Any) -> list[Term]:
    if analysis.depends(a) and analysis.depends(b):
        raise NotAffine("the step multiplies two values that depend on the old state", node)
    first = analysis.depends(a)
    return [x for term in analysis.of(a if first else b) for x in [_contracted(term, b if first else a, first, node)]]


def _contracted(term: Term, other: fx.Node, first: bool, node: fx.Node) -> Term:
    """The product of matrices of a term and an independent value; `first` says that the term is the first."""
    out, shape = list(term.out), example(other).shape
    batch = out[:-2] if len(out) == 3 else []
    if node.target is aten.mv.default or node.target is aten.dot.default:
        summed = -1 if first else 0
        rows = () if first else tuple(() if n == 1 else (Axis(n),) for n in shape[:-1])
        kept = tuple(out[:-1]) if first else tuple(rows)
        axes: Axes = (out[summed],) if first else (*rows, out[0])
        return replace(term, factors=(*term.factors, Factor(other, axes)), out=kept)
    # [b, m, k] @ [b, k, n]
    size = shape[-1] if first else shape[-2]
    new: tuple[Axis, ...] = () if size == 1 else (Axis(size),)
    if first:
        axes, kept = (*batch, out[-1], new), (*batch, out[-2], new)
    else:
        axes, kept = (*batch, new, out[-2]), (*batch, new, out[-1])
    # A batch that is spread over the state is one of the factor's own.
    return replace(term, factors=(*term.factors, Factor(other, axes)), out=tuple(kept))


def _matmul_add(analysis: Affine, node: fx.Node) -> list[Term]:
    added = arguments(node)
    product = _scaled(_matrix_product(analysis, node, *node.args[1:3]), added.alpha)
    return product + _scaled(analysis.terms(node.args[0], node), added.beta)


_BY_RULE: dict[Callable[[Affine, fx.Node], list[Term]], Any] = {
    _moved: {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
        aten.t.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
        aten.squeeze.dims, aten.select.int,
    },
    _same: (COPIED - {aten.detach.default}) | {aten._to_copy.default},
    _add: {*ADD, *SUB},
    _rsub: {aten.rsub.Scalar, aten.rsub.Tensor},
    _neg: {aten.neg.default},
    _mul: MUL,
    _div: DIV,
    _where: WHERE,
    _masked_fill: MASKED_FILL,
    _lerp: {aten.lerp.Scalar, aten.lerp.Tensor},
    _addcmul: {aten.addcmul.default},
    _addcdiv: {aten.addcdiv.default},
    _reduced: {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim},
    _matmul: MATMUL | {aten.dot.default},
    _matmul_add: MATMUL_ADD,
}  # fmt: skip
_RULES = {target: rule for rule, targets in _BY_RULE.items() for target in targets}


# -- terms without the state, taken apart


def opened(term: Term, factor: Factor, record: ScanRecord) -> Term | None:
    """A term with a factor replaced by what it is a product of, or None where that is not seen."""
    others = tuple(f for f in term.factors if f is not factor)
    node, axes = factor.node, factor.axes
    if factor.how != "value" or factor.rounded is not None or node.op != "call_function":
        return None
    if any((node, place) in record.hidden for place in range(len(node.args))):
        return None  # it multiplies something else than its operands

    def part(x: Any, how: str = "value") -> Factor:
        return aligned(x, axes, how)

    def product(number: Any, *parts: Factor) -> Term:
        return replace(term, number=term.number * number, factors=(*others, *parts))

    args: Any = node.args
    if node.target in MUL | DIV:
        how = "reciprocal" if node.target in DIV else "value"
        if isinstance(args[0], fx.Node) and isinstance(args[1], fx.Node):
            return product(1, _read_by(part(args[0]), node), _read_by(part(args[1], how), node))
        if not isinstance(args[0], fx.Node):
            return product(args[0], part(args[1], how)) if node.target in MUL else None
        return product(1 / args[1] if node.target in DIV else args[1], part(args[0]))
    if node.target is aten.neg.default:
        return product(-1, part(args[0]))
    if node.target in COPIED - {aten.detach.default} or (
        node.target is aten._to_copy.default and example(args[0]).dtype.is_floating_point
    ):
        return product(1, _read_by(part(args[0]), node))
    if (side := side_of_where(node, record)) is not None and side.constant == 0:
        where = "false" if side.constant_if_true else "true"
        return product(1, _read_by(part(side.value), node), part(side.condition, where))
    if node.target is aten.bmm.default and example(args[0]).shape[-1] == 1:
        batch, m, n = axes
        return product(1, Factor(args[0], (batch, m, ())), Factor(args[1], (batch, (), n)))
    if node.target is aten.mm.default and example(args[0]).shape[-1] == 1:
        return product(1, Factor(args[0], (axes[0], ())), Factor(args[1], ((), axes[1])))
    return _moved_back(term, factor, others)


def opened_sum(term: Term, factor: Factor, record: ScanRecord) -> list[Term] | None:
    """A term with a factor replaced by each of what it is a sum of, or None where it is none."""
    others = tuple(f for f in term.factors if f is not factor)
    if factor.how != "value" or factor.node.target not in ADD | SUB or len(factor.axes) < 2 or factor.rounded:
        return None
    sign = -1 if factor.node.target in SUB else 1
    alpha = arguments(factor.node).alpha
    terms = []
    for value, number in zip(factor.node.args[:2], (1, sign * alpha), strict=True):
        if not isinstance(value, fx.Node):
            return None
        part = _read_by(aligned(value, factor.axes), factor.node)
        terms.append(replace(term, number=term.number * number, factors=(*others, part)))
    return terms


def without_diagonals(term: Term, record: ScanRecord) -> Term:
    """A term whose factors are no diagonal matrices, as far as they are seen to be: of such a one the two axes are one.

    It is an identity matrix, `diag_embed` of a vector, or a product with an identity; or a factor is the product of
    matrices with such a one.
    """
    for factor in term.factors:
        node: Any = factor.node
        if factor.how != "value" or len(factor.axes) < 2:
            continue
        if (opening := _product_with_diagonal(term, factor, record)) is not None:
            return without_diagonals(opening, record)
        if node.target in MUL and any(_is_identity(x, record) for x in node.args[:2]):
            opening = opened(term, factor, record)
            return term if opening is None else without_diagonals(opening, record)
        if _is_identity(node, record) or (factor.rounded is None and _is_diagonal(node, record)):
            merged = _with_one_axis(term, factor)
            return term if merged is None else without_diagonals(merged, record)
    return term


def _product_with_diagonal(term: Term, factor: Factor, record: ScanRecord) -> Term | None:
    """A term with a factor that is a product of matrices, of which one is diagonal, replaced by the other one and the
    diagonal; None where it is none."""
    node: Any = factor.node
    if node.target not in (aten.mm.default, aten.bmm.default) or factor.rounded is not None:
        return None
    if not {(node, 0), (node, 1)}.isdisjoint(record.hidden):
        return None  # it multiplies something else than its operands
    a, b = node.args
    within, (*batch, rows, columns) = (Axis(example(a).shape[-1]),), factor.axes
    parts = Factor(a, (*batch, rows, within)), Factor(b, (*batch, within, columns))
    others = tuple(f for f in term.factors if f is not factor)
    apart = plain(replace(term, factors=(*others, *parts)))
    for part in apart.factors:
        if set(within) & part.names and part.how == "value" and _is_diagonal(part.node, record):
            return _with_one_axis(apart, part)
    return None


def _is_diagonal(x: Any, record: ScanRecord) -> bool:
    if not isinstance(x, fx.Node):
        return False
    embeds = x.target is aten.diag_embed.default and not x.args[1:] and not x.kwargs
    return embeds or _is_identity(x, record)


def _is_identity(x: Any, record: ScanRecord) -> bool:
    value = record.constant.get(x) if isinstance(x, fx.Node) else None
    if value is None or value.dim() < 2 or value.shape[-1] != value.shape[-2]:
        return False
    return torch.equal(value, torch.eye(value.shape[-1], dtype=value.dtype).expand(value.shape))


def _with_one_axis(term: Term, factor: Factor) -> Term | None:
    """A term without a factor that is a diagonal matrix, but with its diagonal, where that is a vector of the step's;
    None where the rows or columns have several axes, or none, or another factor has both."""
    rows, columns = factor.axes[-2:]
    if len(rows) != 1 or len(columns) != 1 or rows[0].size != columns[0].size:
        return None
    if any({rows[0], columns[0]} <= f.names for f in term.factors if f is not factor):
        return None
    diagonal: tuple[Factor, ...] = ()
    if factor.node.target is aten.diag_embed.default:
        diagonal = (replace(factor, node=operand(factor.node), axes=(*factor.axes[:-2], rows)),)
    term = replace(term, factors=(*(f for f in term.factors if f is not factor), *diagonal))
    gone, kept = (rows[0], columns[0]) if columns[0] in _out(term) else (columns[0], rows[0])
    return term.renamed({gone: (kept,)})


def _out(term: Term) -> set[Axis]:
    return {axis for dim in term.out for axis in dim}


def plain(term: Term) -> Term:
    """A term whose factors are not moved, and so are the same where they are made of the same values."""
    todo = True
    while todo:
        todo = False
        for factor in term.factors:
            others = tuple(f for f in term.factors if f is not factor)
            if factor.how == "value" and (back := _moved_back(term, factor, others)) is not None:
                term, todo = back, True
                break
    return term


def _moved_back(term: Term, factor: Factor, others: tuple[Factor, ...]) -> Term | None:
    """A factor that is moved, replaced by what it is moved from."""
    node, axes = factor.node, factor.axes
    if node.target not in _BY_RULE[_moved]:
        return None
    source, moved = operand(node), arguments(node)
    shape = example(source).shape
    if node.target is aten.permute.default:
        places = [d % len(axes) for d in moved.dims]
        back: Axes = tuple(axes[places.index(d)] for d in range(len(axes)))
    elif node.target is aten.transpose.int:
        swapped = list(axes)
        swapped[moved.dim0], swapped[moved.dim1] = swapped[moved.dim1], swapped[moved.dim0]
        back = tuple(swapped)
    elif node.target is aten.t.default:
        back = tuple(reversed(axes))
    elif node.target is aten.unsqueeze.default:
        at = moved.dim % len(axes)
        back = (*axes[:at], *axes[at + 1 :])
    elif node.target is aten.expand.default:
        back = aligned(source, axes).axes
    elif math.prod(shape) == math.prod(example(node).shape):
        whole = Term(1, None, None, (), axes)
        try:
            split = _reshaped(whole, shape, node)
        except NotAffine:
            return None
        if {a for dim in split.out for a in dim} != {a for dim in axes for a in dim}:
            return None  # an axis would be split, which others share
        back = split.out
    else:
        return None
    return replace(term, factors=(*others, replace(factor, node=source, axes=back)))
