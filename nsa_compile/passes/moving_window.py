"""Windows around a position that is known at run time only.

`(p <= t) & (p > t - w)` keeps w keys wherever t is, and which ones is an addition. So a step that generates one token
reads w rows of its cache, not all of it. Nothing is assumed of t: a row is read if it can be kept, and kept if the
mask, computed as it was written, says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from nsa_compile.passes.attention import attention
from nsa_compile.passes.attention_masks import MOVES, Factor, NodeBuilder, Unrecognised, moved
from nsa_compile.passes.known import COMPARISONS
from nsa_compile.passes.scans import ScanRecord, aten, example

_ADD = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


@dataclass(frozen=True)
class Window:
    """The keys `base + first <= p < base + first + width`."""

    base: fx.Node  # one integer
    first: int
    width: int


def find_window(node: fx.Node, factors: tuple[Factor, ...], record: ScanRecord) -> Window | None:
    """A window narrower than the cache that holds all an attention node can keep, if its mask has one."""
    _, k, *_ = cast(Any, node.args)
    keys = example(k).shape[1]
    lower: dict[fx.Node, int] = {}
    upper: dict[fx.Node, int] = {}
    for factor in factors:
        if (bound := _bound(factor, keys, record)) is None:
            continue
        base, is_upper, offset = bound
        if is_upper:
            upper[base] = min(offset, upper.get(base, offset))
        else:
            lower[base] = max(offset, lower.get(base, offset))
    windows = [Window(base, lower[base], upper[base] - lower[base] + 1) for base in lower if base in upper]
    return min((w for w in windows if 0 < w.width < keys), key=lambda w: w.width, default=None)


def read_window(build: NodeBuilder, node: fx.Node, window: Window) -> fx.Node:
    """The attention node with the rows of a window as its indices: blocks of one token."""
    q, k, v, mask, _, scale, *_ = cast(Any, node.args)
    rows = build(
        aten.arange.start_step, window.first, window.first + window.width, 1,
        dtype=torch.int64, device=example(q).device,
    )  # fmt: skip
    rows = build(aten.add.Tensor, rows, build(aten.reshape.default, window.base, []))
    rows = build(aten.expand.default, build(aten.reshape.default, rows, [1, 1, -1]), [example(q).shape[0], -1, -1])
    return build(attention._opoverload, q, k, v, mask, rows, scale, "opaque", [], 1)


def _bound(factor: Factor, keys: int, record: ScanRecord) -> tuple[fx.Node, bool, int] | None:
    """`(base, True, c)` if a factor keeps the keys `p <= base + c`, `(base, False, c)` for `p >= base + c`."""
    op = COMPARISONS.get(factor.node.target)
    if factor.additive or op not in _OPPOSITE:
        return None
    a, b = (_affine(x, record) for x in factor.node.args[:2])
    if a is None or b is None:
        return None
    # sign_a * base + a op sign_b * base + b, as numbers op sign * base
    difference = a.minus(b)
    if difference is None or difference.base is None or difference.sign == 0:
        return None
    op = _OPPOSITE[op] if factor.negated else op
    numbers = difference.rows
    if difference.sign > 0:  # base + numbers op 0
        numbers, op = -numbers, _MIRRORED[op]
    by_key = factor.spread(numbers.expand(example(factor.node).shape), record).reshape(-1, keys)
    shift = int(by_key[0, 0])
    if not torch.equal(by_key, (torch.arange(keys) + shift).expand_as(by_key)):
        return None
    # p + shift op base
    return difference.base, op in ("lt", "le"), -shift + {"lt": -1, "le": 0, "gt": 1, "ge": 0}[op]


@dataclass(frozen=True)
class _Affine:
    """Integers `sign * base + rows[j]`, where base is one number that is not known."""

    base: fx.Node | None
    sign: int
    rows: Tensor

    def minus(self, other: _Affine) -> _Affine | None:
        return self.plus(_Affine(other.base, -other.sign, -other.rows))

    def plus(self, other: _Affine) -> _Affine | None:
        if self.base is not None and other.base is not None and self.base is not other.base:
            return None
        base, sign = self.base or other.base, self.sign + other.sign
        return _Affine(base, sign, self.rows + other.rows) if abs(sign) <= 1 else None


def _affine(x: Any, record: ScanRecord) -> _Affine | None:
    if isinstance(x, int):
        return _Affine(None, 0, torch.tensor(x))
    if not isinstance(x, fx.Node) or example(x).dtype != torch.int64:  # a narrower sum may wrap around
        return None
    if x in record.constant:
        return _Affine(None, 0, record.constant[x])
    source: Any = x.args[0] if x.args else None
    if x.target in MOVES and (inner := _affine(source, record)) is not None:
        try:
            return _Affine(inner.base, inner.sign, moved(x, inner.rows.expand(example(source).shape), record))
        except Unrecognised:
            return None
    if x.target in _ADD and x.kwargs.get("alpha", 1) == 1:
        a, b = (_affine(y, record) for y in x.args[:2])
        if a is not None and b is not None:
            total = a.plus(b) if _ADD[x.target] == 1 else a.minus(b)
            if total is not None:
                return total
    return _Affine(x, 1, torch.zeros((), dtype=torch.int64)) if example(x).numel() == 1 else None
