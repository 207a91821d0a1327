"""A softmax that a step writes out, by `exp` and a sum.

It is `e / e.sum()` with `e = (s - s.amax()).exp()`, or `(s - s.logsumexp()).exp()`. With one score more, `c`, it is
`e / (e.sum() + (c - top).exp())`, `top` being the largest of the scores and `c`: a softmax over all of them without the
weight of `c`. Only what takes off the largest of all is taken for a softmax: without that, exponentials overflow, which
a softmax does not. A mask may come after the exponentials, and the division after the product with the values,
`(e * mask) @ v / (e * mask).sum()`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import fx

from nsa_compile.ir.aten import (
    ADD,
    COPIED,
    DIV,
    MASKED_FILL,
    MATMUL,
    MUL,
    REARRANGED,
    SOFTMAX,
    SUB,
    WHERE,
    aten,
    filled_with,
)
from nsa_compile.ir.rewriting import NodeBuilder
from nsa_compile.ir.scans import example

# Numbers from here down are those of masks.
LOW = -1e3
MOVED = REARRANGED | COPIED
# Of these, with as many elements, each keeps their order.
_ORDERED = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.clone.default, aten.alias.default,
}  # fmt: skip


def quotient(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    """Exponentials over their sum, to which that of one score more may be added, or their product with the values over
    it."""
    x, total = node.args[:2]
    if not isinstance(x, fx.Node) or not isinstance(total, fx.Node):
        return None
    if (found := _exponentials(x)) is not None:
        if (dim := _summed(total, x)) is not None:
            return _masked_softmax(found, dim, node, gm)
        return None if found.masks else _with_one_more(found, total, node, gm)
    return _through_values(node, gm)


class _Exponentials(NamedTuple):
    """`exp(s - top)`, or a softmax of s along a dimension, and zeros where masks hide them."""

    s: fx.Node
    top: fx.Node | None
    dim: int | None
    masks: tuple[tuple[fx.Node, bool], ...]  # and whether a mask hides where it is true


def _exponentials(x: Any) -> _Exponentials | None:
    if not isinstance(x, fx.Node) or x.kwargs:
        return None
    if x.target in SOFTMAX:
        s: Any = x.args[0]
        return _Exponentials(s, None, int(x.args[1]) % example(s).dim(), ())  # pyrefly: ignore[bad-argument-type]
    if x.target is aten.exp.default:
        less: Any = x.args[0]
        if not is_call(less, aten.sub.Tensor) or less.kwargs or not all(isinstance(y, fx.Node) for y in less.args):
            return None
        return _Exponentials(less.args[0], less.args[1], None, ())
    hidden = _hidden(x)
    inner = None if hidden is None else _exponentials(hidden[0])
    if hidden is None or inner is None or example(hidden[0]).shape != example(x).shape:
        return None
    return inner._replace(masks=(*inner.masks, hidden[1:]))


def _hidden(x: fx.Node) -> tuple[Any, Any, bool] | None:
    """What a mask makes zeros of, the mask, and whether these are where it is true."""
    if x.target is aten.mul.Tensor:
        for value, mask in (x.args[:2], x.args[1::-1]):
            if is_flag(mask):
                return value, mask, False
    if x.target is aten.where.self and _is_zero(x.args[2]):
        return x.args[1], x.args[0], False
    if x.target in MASKED_FILL and _is_zero(x.args[2]):
        return x.args[0], x.args[1], True
    return None


def _is_zero(x: Any) -> bool:
    return bool((filled_with(x) if isinstance(x, fx.Node) else x) == 0)


def _masked_softmax(found: _Exponentials, dim: int, node: fx.Node, gm: fx.GraphModule) -> fx.Node | None:
    """The softmax of what no mask hides. The scores from which the largest of all is taken may be far below it: where
    the sum of all that is left vanishes, the loop has NaN."""
    of_all = _is_largest(found.top, found.s, dim) if found.top is not None else found.dim == dim and found.masks
    if not of_all:
        return None
    build, s = NodeBuilder(gm, node), found.s
    for mask, hides in found.masks:
        condition = mask if example(mask).dtype == torch.bool else build(aten.ne.Scalar, mask, 0)
        nothing = build(aten.full.default, [], -math.inf, dtype=example(s).dtype, device=example(s).device)
        s = build(aten.where.self, condition, *((nothing, s) if hides else (s, nothing)))
    return _softmax(s, dim, node, gm)


def _with_one_more(found: _Exponentials, total: fx.Node, node: fx.Node, gm: fx.GraphModule) -> fx.Node | None:
    if found.top is None or total.target is not aten.add.Tensor or total.kwargs:
        return None
    x: Any = node.args[0]
    for one, other in (total.args[:2], total.args[1::-1]):
        if (dim := _summed(one, x)) is not None and (c := _left_over(other, found.top)) is not None:
            return _softmax(found.s, dim, node, gm, c) if _is_largest_with(found.top, found.s, dim, c) else None
    return None


def _through_values(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    """`(e @ v) / e.sum()`: the weights are divided first."""
    product, after = _in_order(node.args[0])
    if not is_call(product, aten.bmm.default):
        return None
    x, before = _in_order(product.args[0])
    total, _ = _in_order(node.args[1])
    if (found := _exponentials(x)) is None or not is_call(total, aten.sum.dim_IntList) or total.kwargs:
        return None
    last, (*rows, columns) = example(x).dim() - 1, example(node).shape
    dims: Any = total.args[1]
    of_rows = total.args[0] is x and [d % (last + 1) for d in dims] == [last]
    if not of_rows or example(node.args[1]).shape != (*rows, 1) or math.prod(rows) != math.prod(example(x).shape[:-1]):
        return None
    # Each row of weights has kept its place on its way, and so has each row of the product.
    if example(product.args[0]).shape[-1] != example(x).shape[-1] or example(product).shape[-1] != columns:
        return None
    if example(node.args[0]).shape != example(node).shape:
        return None
    if (weights := _masked_softmax(found, last, x, gm)) is None:
        return None
    build = NodeBuilder(gm, node)
    for move in before:
        weights = build(move.target, weights, *move.args[1:], **move.kwargs)
    out = build(aten.bmm.default, weights, product.args[1])
    for move in after:
        out = build(move.target, out, *move.args[1:], **move.kwargs)
    return out


def _in_order(x: Any) -> tuple[Any, list[fx.Node]]:
    """What is moved to `x` with all of its elements in their order, and the moves."""
    moves: list[fx.Node] = []
    while isinstance(x, fx.Node) and (x.target in _ORDERED or _permutes_ones(x)):
        source: Any = x.args[0]
        if example(x).numel() != example(source).numel():
            break
        moves.insert(0, x)
        x = source
    return x, moves


def _permutes_ones(x: Any) -> bool:
    """Whether dimensions of size 1 alone change places."""
    if x.target is not aten.permute.default:
        return False
    shape = example(x.args[0]).shape
    longer = [d % len(shape) for d in x.args[1] if shape[d] > 1]
    return longer == sorted(longer)


def exponential(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    """That of the logarithm of a softmax."""
    x: Any = node.args[0]
    if is_call(x, aten._log_softmax.default) and example(x).dtype == example(x.args[0]).dtype:
        return _softmax(x.args[0], x.args[1], node, gm)
    if is_call(x, aten.sub.Tensor) and not x.kwargs and is_call(x.args[1], aten.logsumexp.default):
        s, dim = x.args[0], _only_dim(x.args[1])
        # Gradients of one of them alone are not those of a softmax.
        if x.args[1].args[0] is s and dim is not None and not _may_be_low(s):
            return _softmax(s, dim, node, gm)
    return None


def _may_be_low(s: Any) -> bool:
    """Whether all scores of a row may be as low as a mask makes them, by a finite number or by what is given.

    Beside 10^9, the logarithm of their number is lost, so that `(s - s.logsumexp()).exp()` is 1 for each of them.
    """
    if not isinstance(s, fx.Node):
        return s != -math.inf and s <= LOW
    if s.op != "call_function":
        return True
    if (number := filled_with(s)) is not None:
        return _may_be_low(number)
    if s.target in WHERE:
        return any(map(_may_be_low, s.args[1:]))
    if s.target in MASKED_FILL:
        return _may_be_low(s.args[0]) or _may_be_low(s.args[2])
    if s.target in ADD | SUB:
        return any(map(_may_be_low, s.args[:2]))
    if s.target in MUL | DIV:  # a factor may be given; one that is large, or its inverse, may make a mask of ones
        factors: list[Any] = [x for x in s.args[:2] if not isinstance(x, fx.Node)]
        large = any(not -1 / LOW < abs(x) < -LOW for x in factors)
        return large or all(_may_be_low(x) for x in s.args[:2] if isinstance(x, fx.Node))
    if s.target in MOVED | {aten._to_copy.default}:
        return _may_be_low(s.args[0])
    return s.target not in MATMUL | {aten.tanh.default}


def _softmax(s: fx.Node, dim: int, node: fx.Node, gm: fx.GraphModule, c: Any = None) -> fx.Node | None:
    """The softmax of scores, and of one more, without the weight of that."""
    value = example(s)
    if value.shape != example(node).shape or value.dtype != example(node).dtype or not value.dtype.is_floating_point:
        return None
    build = NodeBuilder(gm, node)
    if c is None:
        return build(aten._softmax.default, s, dim, False)
    size = [1 if d == dim else n for d, n in enumerate(value.shape)]
    if not isinstance(c, fx.Node):
        column = build(aten.full.default, size, float(c), dtype=value.dtype, device=value.device)
    elif example(c).dtype == value.dtype and torch.broadcast_shapes(example(c).shape, size) == torch.Size(size):
        column = build(aten.expand.default, c, size)
    else:
        return None
    joined = build(aten._softmax.default, build(aten.cat.default, [s, column], dim), dim, False)
    return build(aten.slice.Tensor, joined, dim, 0, value.shape[dim])


def _summed(total: Any, e: fx.Node) -> int | None:
    """The dimension over which a node sums `e`, and keeps."""
    if not is_call(total, aten.sum.dim_IntList) or total.args[0] is not e or total.kwargs:
        return None
    return _only_dim(total)


def _is_largest(top: Any, s: fx.Node, dim: int) -> bool:
    """Whether this is the largest of the scores along a dimension."""
    top = _undone(top)
    if isinstance(top, fx.Node) and top.args[1:] == (0,) and is_call(top.args[0], aten.max.dim):
        top = top.args[0]
    elif not is_call(top, aten.amax.default):
        return False
    return _only_dim(top) == dim and _undone(top.args[0]) is _undone(s)


def _left_over(x: Any, top: fx.Node) -> Any:
    """`c` of `exp(c - top)`."""
    if not is_call(x, aten.exp.default):
        return None
    inner = x.args[0]
    if is_call(inner, aten.neg.default) and inner.args[0] is top:
        return 0.0
    if is_call(inner, aten.sub.Tensor) and inner.args[1] is top and not inner.kwargs:
        return inner.args[0]
    return None


def _is_largest_with(top: Any, s: fx.Node, dim: int, c: Any) -> bool:
    """Whether this is the largest of the scores and of one more."""
    top = _undone(top)
    if not isinstance(top, fx.Node):
        return False
    if top.target in (aten.clamp.default, aten.clamp_min.default):
        bounds = (*top.args[1:], None)[:2]
        return bounds == (c, None) and not top.kwargs and _is_largest(top.args[0], s, dim)
    if top.target is aten.maximum.default:
        a, b = top.args[:2]
        return any(_is_largest(x, s, dim) and _same(y, c) for x, y in ((a, b), (b, a)))
    return False


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes are made in the same way of the same."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)
    if a.op != "call_function" or a.target is not b.target or a.kwargs != b.kwargs or len(a.args) != len(b.args):
        return False
    return all(_same(x, y) for x, y in zip(a.args, b.args, strict=True))


# -- how nodes are made


def is_call(x: Any, target: Any) -> bool:
    """Whether this is a node of an operator."""
    return isinstance(x, fx.Node) and x.target is target


def _only_dim(node: Any) -> int | None:
    """The one dimension that a reduction runs over and keeps, from 0."""
    dims, keepdim = [*node.args[1:3], False][:2] if len(node.args) > 1 else (None, False)
    if isinstance(dims, int):
        dims = [dims]
    if not dims or len(dims) != 1 or not keepdim:
        return None
    return int(dims[0] % example(node.args[0]).dim())


def _undone(x: Any) -> Any:
    """Without what changes no value; a softmax has the same gradients whatever is taken off."""
    while isinstance(x, fx.Node) and x.target in (aten.detach.default, aten.alias.default, aten.clone.default):
        x = x.args[0]
    return x


def is_flag(x: Any) -> bool:
    """Whether numbers are booleans, moved and cast."""
    while isinstance(x, fx.Node) and x.target in MOVED | {aten._to_copy.default}:
        x = x.args[0]
    return isinstance(x, fx.Node) and bool(example(x).dtype == torch.bool)
