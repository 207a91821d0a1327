"""One row of a table, by what the table is made of.

A *part* is a value of a graph and its dimension of one number for each step. The row of a part is that value with
that dimension narrowed to one step; it stays a dimension, so that what broadcasts, and which dtype a result has, is as
in the table. A rule says of which parts an operator makes a row, and how. A part is a *root* where no rule helps, or
where the roots behind it are not smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import fx
from torch._ops import OpOverload

from nsa_compile.ir.aten import COPIED, MASKED_FILL, arguments, aten, filled_with, is_inexact, operand
from nsa_compile.ir.rewriting import NodeBuilder
from nsa_compile.ir.scans import example

# None: each step takes all of the value.
Part = tuple[fx.Node, int | None]
Make = Callable[[NodeBuilder, Sequence[fx.Node]], fx.Node]

# How many times larger a table is than what it is made of.
SMALLER = 4


@dataclass(frozen=True)
class _Rule:
    """How a row is made: of the rows of which parts, by what; and whether it joins values along several dimensions."""

    parts: tuple[Part, ...]
    make: Make
    joins: bool = False


@dataclass
class TableRows:
    """How rows of tables in a functional graph are made.

    Attributes:
        steps: the node that numbers the steps, `[S]`.
    """

    steps: fx.Node
    _rules: dict[Part, _Rule | None] = field(default_factory=dict)
    _roots: dict[Part, frozenset[Part]] = field(default_factory=dict)
    _joins: dict[Part, bool] = field(default_factory=dict)

    def roots(self, part: Part) -> frozenset[Part]:
        """What a row is made of in the end; the part itself, where that is no less."""
        if part not in self._roots:
            found = self._behind(part)
            if found is None or 2 * sum(example(node).numel() for node, _ in found) > example(part[0]).numel():
                found, self._rules[part] = frozenset([part]), None
            self._roots[part] = found
        return self._roots[part]

    def _behind(self, part: Part) -> frozenset[Part] | None:
        node, dim = part
        rule = self._rules[part] = None if dim is None else self._rule(node, dim)
        return None if rule is None else frozenset[Part]().union(*map(self.roots, rule.parts))

    def joins(self, part: Part) -> bool:
        """Whether something on the way from the roots is larger than what it is made of, and not by repeating it."""
        if part not in self._joins:
            self.roots(part)
            rule = self._rules[part]
            self._joins[part] = rule is not None and (rule.joins or any(map(self.joins, rule.parts)))
        return self._joins[part]

    def make(self, part: Part, build: NodeBuilder, rows: dict[Part, fx.Node]) -> fx.Node:
        """The row of a part, made of those of its roots, which are in `rows`, where others are noted."""
        if part not in rows:
            rule = self._rules[part]
            assert rule is not None
            rows[part] = rule.make(build, [self.make(p, build, rows) for p in rule.parts])
            if "stack_trace" in part[0].meta:
                rows[part].meta["stack_trace"] = part[0].meta["stack_trace"]
        return rows[part]

    def _rule(self, node: fx.Node, dim: int) -> _Rule | None:
        if not isinstance(node.target, OpOverload):
            return None
        if filled_with(node) is not None:
            return _filled(node, dim)
        if node.target in _BY_ELEMENT or torch.Tag.pointwise in node.target.tags:
            return _by_element(node, dim)
        if node.target in (aten.tril.default, aten.triu.default):
            return self._triangle(node, dim)
        if node.target in (aten.index.Tensor, aten.embedding.default):
            return self._picked(node, dim)
        rule = _MOVED.get(node.target)
        return None if rule is None else rule(node, dim)

    def _triangle(self, node: fx.Node, dim: int) -> _Rule:
        given, rank = arguments(node), example(node).dim()
        if dim < rank - 2:
            return _Rule(((given.self, dim),), lambda build, rows: build(node.target, rows[0], given.diagonal))
        lower, of_rows = node.target is aten.tril.default, dim == rank - 2

        def make(build: NodeBuilder, rows: Sequence[fx.Node]) -> fx.Node:
            row, t = rows
            there = build(aten.arange.default, example(node).shape[-1 if of_rows else -2], device=example(node).device)
            if of_rows:
                ahead = build(aten.sub.Tensor, there, t)
            else:
                ahead = build(aten.sub.Tensor, t, build(aten.unsqueeze.default, there, 1))
            hidden = build(aten.gt.Scalar if lower else aten.lt.Scalar, ahead, given.diagonal)
            return build(aten.masked_fill.Scalar, row, hidden, 0)

        return _Rule(((given.self, dim), (self.steps, 0)), make, joins=True)

    def _picked(self, node: fx.Node, dim: int) -> _Rule | None:
        """A row of a table of numbers that are picked, by numbers of which there is a row that is no root."""
        given = arguments(node)
        if node.target is aten.index.Tensor:
            places = [i for i, x in enumerate(given.indices) if x is not None]
            if len(places) != 1:
                return None
            source, (place,) = given.self, places
            index = given.indices[place]
        else:
            source, place, index = given.weight, 0, given.indices
        own = dim - place
        integer = example(index).dtype in (torch.int64, torch.int32)
        if not integer or not 0 <= own < example(index).dim() or (index, own) in self.roots((index, own)):
            return None
        picked = [*[None] * place, index]

        def make(build: NodeBuilder, rows: Sequence[fx.Node]) -> fx.Node:
            return build(aten.index.Tensor, rows[0], [*picked[:-1], rows[1]])

        return _Rule(((source, None), (index, own)), make)


_BY_ELEMENT = MASKED_FILL | COPIED | {aten._to_copy.default}


def _by_element(node: fx.Node, dim: int) -> _Rule:
    sources = list(node.all_input_nodes)

    def make(build: NodeBuilder, rows: Sequence[fx.Node]) -> fx.Node:
        row = dict(zip(sources, rows, strict=True))
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), row.__getitem__)
        return build(node.target, *args, **kwargs)

    largest = max(example(x).numel() for x in sources)
    parts = tuple(_aligned(x, node, dim) for x in sources)
    return _Rule(parts, make, joins=example(node).numel() >= SMALLER * largest)


def _aligned(x: fx.Node, node: fx.Node, dim: int) -> Part:
    """The part of an operand that broadcasts to a dimension of a result."""
    own = dim - (example(node).dim() - example(x).dim())
    return (x, None) if own < 0 or example(x).shape[own] == 1 else (x, own)


def _filled(node: fx.Node, dim: int) -> _Rule | None:
    number, value = filled_with(node), example(node)
    assert number is not None
    if not is_inexact(value.dtype):
        if abs(number) > 2**53:
            return None
        number = bool(number) if value.dtype == torch.bool else int(number)
    shape = _narrowed(node, dim)
    kind = {"dtype": value.dtype, "device": value.device}
    return _Rule((), lambda build, _: build(aten.full.default, shape, number, **kind))


def _narrowed(node: fx.Node, dim: int) -> list[int]:
    shape = list(example(node).shape)
    shape[dim] = 1
    return shape


def _permuted(node: fx.Node, dim: int) -> _Rule:
    source, rank = operand(node), example(node).dim()
    if node.target is aten.permute.default:
        order = [d % rank for d in arguments(node).dims]
    elif node.target is aten.t.default:
        order = list(range(rank))[::-1]
    else:
        given = arguments(node)
        order, a, b = list(range(rank)), given.dim0 % rank, given.dim1 % rank
        order[a], order[b] = order[b], order[a]
    return _Rule(((source, order[dim]),), lambda build, rows: build(aten.permute.default, rows[0], order))


def _repeated(node: fx.Node, dim: int) -> _Rule:
    shape = _narrowed(node, dim)
    part = _aligned(operand(node), node, dim)
    return _Rule((part,), lambda build, rows: build(aten.expand.default, rows[0], shape))


def _reshaped(node: fx.Node, dim: int) -> _Rule | None:
    """What has the dimension, of as many numbers behind it."""
    source, shape = operand(node), example(node).shape
    old = example(source).shape
    behind = prod(shape[dim + 1 :])
    own = next((d for d in range(len(old)) if old[d] == shape[dim] and prod(old[d + 1 :]) == behind), None)
    if own is None:
        return None
    narrowed = _narrowed(node, dim)
    return _Rule(((source, own),), lambda build, rows: build(aten.reshape.default, rows[0], narrowed))


def _selected(node: fx.Node, dim: int) -> _Rule:
    given = arguments(node)
    chosen = given.dim % example(given.self).dim()
    own = dim if dim < chosen else dim + 1
    return _Rule(((given.self, own),), lambda build, rows: build(aten.select.int, rows[0], chosen, given.index))


def _sliced(node: fx.Node, dim: int) -> _Rule | None:
    given = arguments(node)
    along = given.dim % example(node).dim()
    if along == dim:
        return None
    bounds = (along, given.start, given.end, given.step)
    return _Rule(((given.self, dim),), lambda build, rows: build(aten.slice.Tensor, rows[0], *bounds))


def _flipped(node: fx.Node, dim: int) -> _Rule | None:
    dims = [d % example(node).dim() for d in arguments(node).dims]
    if dim in dims:
        return None
    return _Rule(((operand(node), dim),), lambda build, rows: build(aten.flip.default, rows[0], dims))


_MOVED: dict[object, Callable[[fx.Node, int], _Rule | None]] = {
    aten.permute.default: _permuted,
    aten.transpose.int: _permuted,
    aten.t.default: _permuted,
    aten.expand.default: _repeated,
    **dict.fromkeys(
        (
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.unsqueeze.default,
            aten.squeeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
        ),
        _reshaped,
    ),
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.flip.default: _flipped,
}
