"""index_cache: a step reads and writes the rows of a cache that it needs, whatever the position.

Before, in a step that generates one token at a position t known at run time only:

    cache = where(p == t, new, cache)                   # writes all rows
    out   = attention(q, k, v, mask = (p <= t) & (p > t - w))   # reads all rows

After:

    cache = index_copy(cache, t, new)                   # writes one row where the cache is updated in place
    out   = attention(q, k, v, mask, indices = t - w + 1 … t)   # reads w rows

Nothing is assumed of t: a row is read if it can be kept, and kept if the mask, computed as it was written, says so; a
position that no row has writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.masks import MOVES, Condition, Unrecognised, moved
from nsa_compile.analyses.softmax import raised
from nsa_compile.ir.aten import ADD, COMPARISONS, SUB, aten
from nsa_compile.ir.attention import ATTENTION, AttentionCall, Opaque
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code, replace_node
from nsa_compile.ir.scans import ScanRecord, Step, example, find_steps, location
from nsa_compile.passes.pipeline import PassContext, register

_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
_MIRRORED = {"lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}


@register("index_cache", requires=("carries",))
def index_cache(gm: fx.GraphModule, context: PassContext) -> bool:
    """Read and write single rows of caches where a step masks all others, at a position known at run time only."""
    changed = False
    for step in find_steps(gm):
        # Both are tried; the rows of a loop's caches are written once it is batched.
        written = step.body is gm and _write_rows(step, context)
        if _read_rows(step, context) or written:
            eliminate_dead_code(step.body)
            step.body.recompile()
            changed = True
    return changed


def _read_rows(step: Step, context: PassContext) -> bool:
    """Give attention under a window that moves with the position the indices of its rows."""
    changed = False
    for node in list(step.body.graph.nodes):
        known = raised(node)
        if known is None or not known.mask.data:
            continue
        with unset_fake_temporarily(), torch.no_grad():
            window = find_window(node, known.mask.data, step.record)
        if window is not None and context.may_rewrite():
            replace_node(node, read_window(NodeBuilder(step.body, node), node, window))
            context.match(step.name, f"window of {window.width} at {location(node)}")
            changed = True
    return changed


def _write_rows(step: Step, context: PassContext) -> bool:
    """Where an input is set to itself with one row replaced, write that row: the backend then leaves the rest alone."""
    changed = False
    for copied in step.body.graph.find_nodes(op="call_function", target=aten.copy.default):
        cache, node = cast(Any, copied.args[:2])
        with unset_fake_temporarily(), torch.no_grad():
            write = find_write(node, step.record)
        if write is None or write.cache is not cache or not context.may_rewrite():
            continue
        written = write_row(NodeBuilder(step.body, node), write)
        for old in (node, copied):
            old.replace_all_uses_with(written)
        context.match(step.name, f"one row is written at {location(node)}")
        changed = True
    return changed


@dataclass(frozen=True)
class KeyRange:
    """The keys `base + first <= p < base + first + width`."""

    base: fx.Node  # one integer
    first: int
    width: int


def find_window(node: fx.Node, conditions: tuple[Condition, ...], record: ScanRecord) -> KeyRange | None:
    """A window narrower than the cache that holds all an attention node can keep, if its mask has one."""
    keys = example(AttentionCall.of(node).k).shape[1]
    lower: dict[fx.Node, int] = {}
    upper: dict[fx.Node, int] = {}
    for condition in conditions:
        if (bound := _bound(condition, keys, record)) is None:
            continue
        base, is_upper, offset = bound
        if is_upper:
            upper[base] = min(offset, upper.get(base, offset))
        else:
            lower[base] = max(offset, lower.get(base, offset))
    windows = [KeyRange(base, lower[base], upper[base] - lower[base] + 1) for base in lower if base in upper]
    return min((w for w in windows if 0 < w.width < keys), key=lambda w: w.width, default=None)


def read_window(build: NodeBuilder, node: fx.Node, window: KeyRange) -> fx.Node:
    """The attention node with the rows of a window as its indices: blocks of one token."""
    call = AttentionCall.of(node)
    queries = example(call.q)
    rows = build(
        aten.arange.start_step, window.first, window.first + window.width, 1,
        dtype=torch.int64, device=queries.device,
    )  # fmt: skip
    rows = build(aten.add.Tensor, rows, build(aten.reshape.default, window.base, []))
    rows = build(aten.expand.default, build(aten.reshape.default, rows, [1, 1, -1]), [queries.shape[0], -1, -1])
    return build(ATTENTION, *replace(call, indices=rows, kind=Opaque(), select_block=1).args)


@dataclass(frozen=True)
class Write:
    """Row `(position - first) // stride` of dimension `dim` becomes `source`, if there is one at this position."""

    cache: fx.Node
    source: fx.Node
    dim: int
    position: fx.Node  # one integer
    first: int
    stride: int


def find_write(node: fx.Node, record: ScanRecord) -> Write | None:
    """The write of one row that `where(p == t, source, cache)` is, if a node is that."""
    if node.target is not aten.where.self:
        return None
    condition, source, cache = cast(Any, node.args)
    shape, equal = example(node).shape, condition
    if example(cache).shape != shape or example(source).dtype != example(cache).dtype:
        return None
    while equal.target in MOVES and len(equal.all_input_nodes) == 1:
        equal = equal.args[0]
    if COMPARISONS.get(equal.target) != "eq":
        return None
    a, b = (_affine(x, record) for x in equal.args[:2])
    difference = None if a is None or b is None else a.minus(b)
    if difference is None or difference.base is None or difference.sign == 0:
        return None
    numbers = difference.rows.expand(example(equal).shape)
    if condition is not equal:
        numbers = _followed(condition, equal, numbers, record)
    wide = [i - numbers.dim() for i, size in enumerate(numbers.shape) if size != 1]
    if len(wide) != 1 or numbers.numel() < 2:
        return None
    dim, rows = wide[0] % len(shape), numbers.flatten() * -difference.sign  # rows == position
    stride = int(rows[1] - rows[0])
    source_rows = example(source).shape[wide[0]] if example(source).dim() >= -wide[0] else 1
    if stride < 1 or source_rows != 1 or not torch.equal(rows, rows[0] + stride * torch.arange(len(rows))):
        return None
    return Write(cache, source, dim, difference.base, int(rows[0]), stride)


def write_row(build: NodeBuilder, write: Write) -> fx.Node:
    """The cache with the row of a write in its place, where the position has one."""
    shape = example(write.cache).shape
    last = shape[write.dim] - 1
    position = build(aten.reshape.default, write.position, [1])
    from_first = build(aten.sub.Tensor, position, write.first)
    row = build(aten.div.Tensor_mode, from_first, write.stride, rounding_mode="floor")
    row = build(aten.clamp.default, row, 0, last)
    there = build(aten.eq.Tensor, build(aten.mul.Tensor, row, write.stride), from_first)
    old = build(aten.index_select.default, write.cache, write.dim, row)
    return build(aten.index_copy.default, write.cache, write.dim, row, build(aten.where.self, there, write.source, old))


def _followed(node: fx.Node, source: fx.Node, numbers: Tensor, record: ScanRecord) -> Tensor:
    """What movement between two nodes makes of the elements of the first."""
    if node is source:
        return numbers
    return moved(node, _followed(cast(fx.Node, node.args[0]), source, numbers, record), record)


def _bound(condition: Condition, keys: int, record: ScanRecord) -> tuple[fx.Node, bool, int] | None:
    """`(base, True, c)` if a condition keeps the keys `p <= base + c`, `(base, False, c)` for `p >= base + c`."""
    op = COMPARISONS.get(condition.node.target)
    if condition.additive or op not in _OPPOSITE or not keys:
        return None
    a, b = (_affine(x, record) for x in condition.node.args[:2])
    if a is None or b is None:
        return None
    # sign_a * base + a op sign_b * base + b, as numbers op sign * base
    difference = a.minus(b)
    if difference is None or difference.base is None or difference.sign == 0:
        return None
    op = _OPPOSITE[op] if condition.negated else op
    numbers = difference.rows
    if difference.sign > 0:  # base + numbers op 0
        numbers, op = -numbers, _MIRRORED[op]
    by_key = condition.spread(numbers.expand(example(condition.node).shape), record).reshape(-1, keys)
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
    if x.target in ADD | SUB and x.kwargs.get("alpha", 1) == 1:
        a, b = (_affine(y, record) for y in x.args[:2])
        if a is not None and b is not None:
            total = a.plus(b) if x.target in ADD else a.minus(b)
            if total is not None:
                return total
    return _Affine(x, 1, torch.zeros((), dtype=torch.int64)) if example(x).numel() == 1 else None
