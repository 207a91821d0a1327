"""Formulas that are written out are replaced by the operators the passes know.

Those of a softmax are in `spelled_softmax.py`.

A product of matrices is `(a * b).sum()` over a dimension of both, where each has a dimension that the other lacks, or
one of them has. One of the two may be a mask.

A sum of several softmaxes times values becomes a sum of their products with the values.

A choice by zeros and ones that are made of booleans is `old * (1 - at) + at * new`, or `lerp(old, new, at)`.

A write to rows of a transposed tensor, transposed back, is one to the tensor itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from nsa_compile.ir.aten import SOFTMAX, aten, filled_with
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code
from nsa_compile.ir.scans import example
from nsa_compile.ir.spelled_softmax import MOVED, exponential, is_call, is_flag, quotient


def normalize_spellings(gm: fx.GraphModule) -> None:
    """Replace the formulas above by their operators."""
    softmaxes = {aten.div.Tensor: quotient, aten.exp.default: exponential}
    others = {
        aten.sum.dim_IntList: _sum_of_products,
        aten.add.Tensor: _blend,
        aten.lerp.Tensor: _interpolation,
        aten.bmm.default: _several_weights,
        aten.permute.default: _write_in_another_layout,
        aten.transpose.int: _write_in_another_layout,
    }
    for ways in (softmaxes, others):
        for node in list(gm.graph.nodes):
            if (way := ways.get(node.target)) is not None and (found := way(node, gm)) is not None:
                node.replace_all_uses_with(found)
        eliminate_dead_code(gm)


# -- products of matrices


def _sum_of_products(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    operands: list[Any] = [*node.args, False]
    product, dims, keepdim = operands[:3]
    if not is_call(product, aten.mul.Tensor) or not isinstance(dims, list) or len(dims) != 1 or node.kwargs:
        return None
    if len(product.users) > 1:  # what is there anyway
        return None
    a, b = product.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return None
    value = example(product)
    if not value.dtype.is_floating_point or any(example(x).dtype not in (value.dtype, torch.bool) for x in (a, b)):
        return None
    rank, dim = value.dim(), dims[0] % value.dim()
    sizes = [[1] * (rank - example(x).dim()) + list(example(x).shape) for x in (a, b)]
    if sizes[0][dim] != sizes[1][dim] or value.shape[dim] == 1 or 0 in value.shape:
        return None
    rest = [d for d in range(rank) if d != dim]
    both = [d for d in rest if sizes[0][d] == sizes[1][d]]
    own = [[d for d in rest if d not in both and size[d] > 1] for size in sizes]
    if not own[0] and not own[1]:
        return None
    build = NodeBuilder(gm, node)

    def matrix(x: fx.Node, size: list[int], order: list[int], shape: list[int]) -> fx.Node:
        if example(x).dtype == torch.bool:
            x = build(aten._to_copy.default, x, dtype=value.dtype)
        full = build(aten.reshape.default, x, size)
        return build(aten.reshape.default, build(aten.permute.default, full, order), shape)

    def count(which: list[int]) -> int:
        return math.prod(value.shape[d] for d in which)

    n, left, right, inner = count(both), count(own[0]), count(own[1]), value.shape[dim]
    x = matrix(a, sizes[0], [*both, *own[0], dim, *own[1]], [n, left, inner])
    y = matrix(b, sizes[1], [*both, dim, *own[1], *own[0]], [n, inner, right])
    out = build(aten.bmm.default, x, y)
    order = [*both, *own[0], *own[1]]
    out = build(aten.reshape.default, out, [value.shape[d] for d in order])
    out = build(aten.permute.default, out, [order.index(d) for d in rest])
    return build(aten.unsqueeze.default, out, dim) if keepdim else out


# -- choices


def _blend(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    """`old * (1 - at) + at * new`; infinities of the one that is not chosen would be NaN."""
    if node.kwargs or not all(is_call(x, aten.mul.Tensor) for x in node.args[:2]):
        return None
    for kept, put in (node.args[:2], node.args[1::-1]):
        for old, rest in (kept.args, kept.args[::-1]):
            for at, new in (put.args, put.args[::-1]):
                if _is_rest(rest, at):
                    return _choice(node, at, new, old, gm)
    return None


def _interpolation(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    old, new, at = node.args
    return _choice(node, at, new, old, gm)


def _choice(node: Any, at: Any, new: Any, old: Any, gm: fx.GraphModule) -> fx.Node | None:
    if not all(isinstance(x, fx.Node) and example(x).dtype == example(node).dtype for x in (at, new, old)):
        return None
    if not is_flag(at):
        return None
    build = NodeBuilder(gm, node)
    return build(aten.where.self, build(aten.ne.Scalar, at, 0), new, old)


def _is_rest(x: Any, at: Any) -> bool:
    """Whether this is `1 - at`."""
    if is_call(x, aten.rsub.Scalar):
        return x.args[0] is at and x.args[1:] == (1,) and not x.kwargs
    return is_call(x, aten.sub.Tensor) and x.args[1] is at and not x.kwargs and _is_one(x.args[0])


def _is_one(x: Any) -> bool:
    return bool((filled_with(x) if isinstance(x, fx.Node) else x) == 1)


# -- writes of rows


def _write_in_another_layout(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    """`x.transpose(a, b).index_put(rows, new).transpose(a, b)`, or `index_copy`, at one dimension."""
    write, back = node.args[0], _order(node)
    if not is_call(write, aten.index_put.default) and not is_call(write, aten.index_copy.default):
        return None
    moved = write.args[0]
    if moved.target not in (aten.permute.default, aten.transpose.int):
        return None
    x, there = moved.args[0], _order(moved)
    shape = list(example(moved).shape)
    if [there[d] for d in back] != list(range(len(shape))):
        return None
    if write.target is aten.index_put.default:
        operands: list[Any] = [*write.args, False]
        _, indices, new, accumulate = operands[:4]
        given = [(d, i) for d, i in enumerate(indices) if i is not None]
        if accumulate or len(given) != 1:
            return None
        ((dim, rows),) = given
    else:
        _, dim, rows, new = write.args
        dim %= len(shape)
    if example(rows).dim() != 1 or example(rows).dtype in (torch.bool, torch.uint8):
        return None
    shape[dim] = example(rows).shape[0]
    build = NodeBuilder(gm, node)
    new = build(aten.permute.default, build(aten.expand.default, new, shape), back)
    if write.target is aten.index_copy.default:
        return build(write.target, x, there[dim], rows, new)
    return build(write.target, x, [None] * there[dim] + [rows], new)


def _order(node: fx.Node) -> list[int]:
    """Which dimension of its operand each of a permuted tensor is."""
    rank = example(node).dim()
    if node.target is aten.permute.default:
        dims: Any = node.args[1]
        return [d % rank for d in dims]
    order, (a, b) = list(range(rank)), (int(d) % rank for d in node.args[1:3])  # pyrefly: ignore[bad-argument-type]
    order[a], order[b] = order[b], order[a]
    return order


# -- sums of weights


def _several_weights(node: Any, gm: fx.GraphModule) -> fx.Node | None:
    """`(a.softmax() - c * b.softmax()) @ v`: a product for each softmax."""
    for place in (0, 1):
        total: Any = node.args[place]
        moves: list[Any] = []
        while isinstance(total, fx.Node) and total.target in MOVED:
            moves.append(total)
            total = total.args[0]
        if not isinstance(total, fx.Node) or total.target not in (aten.add.Tensor, aten.sub.Tensor) or total.kwargs:
            continue
        added: tuple[Any, ...] = total.args
        terms = [_weights(x) for x in added]
        if None in terms or any(example(x).shape != example(total).shape for x in added):
            continue
        build = NodeBuilder(gm, node)
        products = []
        for weights, factors in terms:
            for move in reversed(moves):
                weights = build(move.target, weights, *move.args[1:], **move.kwargs)
            operands = [weights if i == place else x for i, x in enumerate(node.args)]
            product = build(aten.bmm.default, *operands)
            for target, factor in reversed(factors):
                product = build(target, product, factor)
            products.append(product)
        return build(total.target, *products)
    return None


def _weights(x: Any) -> Any:
    """A softmax, moved, and the numbers that it is multiplied with or divided by; None for anything else."""
    factors = []
    while isinstance(x, fx.Node) and x.target in (aten.mul.Tensor, aten.div.Tensor):
        a, b = x.args
        if x.target is aten.mul.Tensor and not _is_number(b):
            a, b = b, a
        if not _is_number(b) or not isinstance(a, fx.Node) or example(a).shape != example(x).shape:
            return None
        factors.append((x.target, b))
        x = a
    source = x
    while isinstance(source, fx.Node) and source.target in MOVED:
        source = source.args[0]
    return (x, factors) if isinstance(source, fx.Node) and source.target in SOFTMAX else None


def _is_number(x: Any) -> bool:
    return not isinstance(x, fx.Node) or not example(x).dim()
