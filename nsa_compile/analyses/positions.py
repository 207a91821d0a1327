"""Rows of a cache at known distances from a position that is not known: those a mask keeps, one that is written.

A step that generates one token has its position as data, one for all sequences or one for each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from nsa_compile.analyses.masks import MOVES, Condition, Unrecognised, moved
from nsa_compile.ir.aten import ADD, COMPARISONS, SUB, aten
from nsa_compile.ir.attention import AttentionCall
from nsa_compile.ir.scans import ScanRecord, example

_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


@dataclass(frozen=True)
class KeyRange:
    """The keys `base + first <= p < base + first + width`."""

    base: fx.Node  # one integer, or one for each sequence
    first: int
    width: int


@dataclass(frozen=True)
class Write:
    """Row `(position - first) // stride` of dimension `dim` becomes `source`, if there is one at this position."""

    cache: fx.Node
    source: fx.Node
    dim: int
    position: fx.Node  # one integer, or one for each sequence
    first: int
    stride: int
    by_sequence: bool  # of dimension 0


def find_window(node: fx.Node, conditions: tuple[Condition, ...], record: ScanRecord) -> KeyRange | None:
    """A window narrower than the cache that holds all an attention node can keep, if its mask has one."""
    call = AttentionCall.of(node)
    count, keys = example(call.q).shape[0], example(call.k).shape[1]
    lower: dict[fx.Node, int] = {}
    upper: dict[fx.Node, int] = {}
    for condition in conditions:
        if (bound := _bound(condition, count, keys, record)) is None:
            continue
        base, is_upper, offset = bound
        if is_upper:
            upper[base] = min(offset, upper.get(base, offset))
        else:
            lower[base] = max(offset, lower.get(base, offset))
    windows = [KeyRange(base, lower[base], upper[base] - lower[base] + 1) for base in lower if base in upper]
    return min((w for w in windows if 0 < w.width < keys), key=lambda w: w.width, default=None)


def _bound(condition: Condition, count: int, keys: int, record: ScanRecord) -> tuple[fx.Node, bool, int] | None:
    """`(base, True, c)` if a condition keeps the keys `p <= base + c`, `(base, False, c)` for `p >= base + c`.

    `base` is one integer, or one for each of equal parts of the `count` rows of heads.
    """
    op = COMPARISONS.get(condition.node.target)
    if condition.additive or op not in _OPPOSITE or not keys:
        return None
    # sign_a * base + a op sign_b * base + b, as numbers op sign * base
    difference = _difference(condition.node, record)
    if difference is None or difference.base is None:
        return None
    op = _OPPOSITE[op] if condition.negated else op
    numbers = difference.offset
    if difference.sign > 0:  # base + numbers op 0
        numbers, op = -numbers, _MIRRORED[op]
    by_key = condition.spread(numbers, record).reshape(-1, keys)
    shift = int(by_key[0, 0])
    if not torch.equal(by_key, (torch.arange(keys) + shift).expand_as(by_key)):
        return None
    which = condition.spread(difference.which, record).reshape(count, -1)
    positions = example(difference.base).numel()
    if count % positions or not torch.equal(
        which, (torch.arange(count) // (count // positions))[:, None].expand_as(which)
    ):
        return None
    # p + shift op base
    return difference.base, op in ("lt", "le"), -shift + {"lt": -1, "le": 0, "gt": 1, "ge": 0}[op]


def find_write(node: fx.Node, record: ScanRecord) -> Write | None:
    """The write of one row that `where(p == t, source, cache)` is, if a node is that."""
    if node.target is not aten.where.self:
        return None
    condition, source, cache = cast(Any, node.args)
    shape, equal = example(node).shape, condition
    if example(cache).shape != shape or not shape.numel() or example(source).dtype != example(cache).dtype:
        return None
    while equal.target in MOVES and len(equal.all_input_nodes) == 1:
        equal = equal.args[0]
    difference = _difference(equal, record) if COMPARISONS.get(equal.target) == "eq" else None
    if difference is None or difference.base is None:
        return None
    numbers, which = difference.offset, difference.which
    if condition is not equal:
        numbers, which = (_followed(condition, equal, x, record) for x in (numbers, which))
    numbers, which = (x[(None,) * (len(shape) - x.dim())] for x in (numbers, which))
    wide = [i for i in range(len(shape)) if _varies(numbers, i)]
    if len(wide) != 1:
        return None
    (dim,) = wide
    rows = numbers.movedim(dim, 0).flatten(1)[:, 0] * -difference.sign  # rows == position
    stride = int(rows[1] - rows[0])
    missing = len(shape) - example(source).dim()
    source_rows = example(source).shape[dim - missing] if dim >= missing else 1
    if stride < 1 or source_rows != 1 or not torch.equal(rows, rows[0] + stride * torch.arange(len(rows))):
        return None
    by_sequence = example(difference.base).numel() > 1
    if by_sequence:
        each = torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
        if dim == 0 or which.shape[0] != shape[0] or not torch.equal(which, each.expand_as(which)):
            return None
    return Write(cache, source, dim, difference.base, int(rows[0]), stride, by_sequence)


def _varies(numbers: Tensor, dim: int) -> bool:
    return not torch.equal(numbers, numbers.narrow(dim, 0, 1).expand_as(numbers))


def _followed(node: fx.Node, source: fx.Node, numbers: Tensor, record: ScanRecord) -> Tensor:
    """What movement between two nodes makes of the elements of the first."""
    if node is source:
        return numbers
    return moved(node, _followed(cast(fx.Node, node.args[0]), source, numbers, record), record)


@dataclass(frozen=True)
class _Affine:
    """Integers `sign * base[which[j]] + offset[j]`; `which` counts the elements of base, a tensor that is not known."""

    base: fx.Node | None
    sign: int
    offset: Tensor
    which: Tensor

    def minus(self, other: _Affine) -> _Affine | None:
        return self.plus(_Affine(other.base, -other.sign, -other.offset, other.which))

    def plus(self, other: _Affine) -> _Affine | None:
        offset, base, sign = self.offset + other.offset, self.base or other.base, self.sign + other.sign
        which = self.which if self.base is not None else other.which
        if self.base is not None and other.base is not None:
            a, b = torch.broadcast_tensors(self.which, other.which)
            if self.base is not other.base or not torch.equal(a, b):
                return None
            which = a
        if abs(sign) > 1:
            return None
        return _Affine(base if sign else None, sign, offset, which.expand(offset.shape) if sign else which)


def _difference(comparison: fx.Node, record: ScanRecord) -> _Affine | None:
    """The first operand of a comparison minus the second, in the shape of its result."""
    a, b = (_affine(x, record) for x in comparison.args[:2])
    difference = None if a is None or b is None else a.minus(b)
    if difference is None:
        return None
    shape = example(comparison).shape
    return _Affine(difference.base, difference.sign, difference.offset.expand(shape), difference.which.expand(shape))


def _affine(x: Any, record: ScanRecord) -> _Affine | None:
    if isinstance(x, int):
        return _known(torch.tensor(x))
    if not isinstance(x, fx.Node) or example(x).dtype != torch.int64:  # a narrower sum may wrap around
        return None
    if x in record.constant:
        return _known(record.constant[x])
    source: Any = x.args[0] if x.args else None
    if x.target in MOVES and (inner := _affine(source, record)) is not None:
        shape = example(source).shape
        try:
            offset, which = (moved(x, y.expand(shape), record) for y in (inner.offset, inner.which))
        except Unrecognised:
            return None
        return _Affine(inner.base, inner.sign, offset, which)
    if x.target in ADD | SUB and x.kwargs.get("alpha", 1) == 1:
        a, b = (_affine(y, record) for y in x.args[:2])
        if a is not None and b is not None:
            total = a.plus(b) if x.target in ADD else a.minus(b)
            if total is not None:
                return total
    shape = example(x).shape
    return _Affine(x, 1, torch.zeros(shape, dtype=torch.int64), torch.arange(shape.numel()).reshape(shape))


def _known(numbers: Tensor) -> _Affine:
    return _Affine(None, 0, numbers, torch.zeros((), dtype=torch.int64))
