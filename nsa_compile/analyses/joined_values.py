"""Products of the weights of a softmax with values that were put side by side, as sums of products.

    softmax(scores) · cat([sinks, V])    ->    softmax(scores)[:, :n] · sinks + softmax(scores)[:, n:] · V

The softmax still runs over all of them; what follows has one set of keys and values for each.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

from torch import fx

from nsa_compile.analyses.unrolling import resized, sources, summed
from nsa_compile.ir.aten import COPIED, MATMUL, REARRANGED, SOFTMAX, arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code
from nsa_compile.ir.scans import example

_MOVES = REARRANGED | COPIED | {aten._to_copy.default}


def split_products(body: fx.GraphModule) -> None:
    """Write such products of a lowered body as sums."""
    for node in body.graph.nodes:
        if node.target not in MATMUL:
            continue
        a, b = cast("tuple[fx.Node, fx.Node]", node.args[:2])
        (_, dim_a), (_, dim_b) = summed(a, b)
        for weights, dim, values, values_dim in ((a, dim_a, b, dim_b), (b, dim_b, a, dim_a)):
            way = _way_to_cat(values, values_dim)
            if way is not None and _has_several_sets(weights, dim):
                _split(body, node, (weights, dim), values, way)
                break
    eliminate_dead_code(body)
    body.recompile()


def _way_to_cat(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]] | None:
    """Movement from a cat along a dimension, or a padding with zeros, to a node, the first one first, each with the
    dimension it has become."""
    way = [(node, dim)]
    while not _parts(node, dim):
        found = sources(node, dim) if node.target in _MOVES else None
        if found is None or found[0][1] < 0 or example(found[0][0]).shape[found[0][1]] != example(node).shape[dim]:
            return None
        node, dim = found[0]
        way.append((node, dim))
    return way[::-1]


def _parts(node: fx.Node, dim: int) -> list[tuple[fx.Node, int]]:
    """What was put side by side along a dimension, each with its first place there; zeros are left out."""
    if node.target is aten.cat.default and arguments(node).dim % example(node).dim() == dim:
        tensors: Any = operand(node)
        ends = list(itertools.accumulate(example(x).shape[dim] for x in tensors))
        return [(x, end - example(x).shape[dim]) for x, end in zip(tensors, ends, strict=True) if example(x).numel()]
    if node.target is aten.constant_pad_nd.default:
        padded = arguments(node)
        before = example(node).dim() - 1 - dim  # pairs of numbers, the last dimension first
        only = [i // 2 for i, size in enumerate(padded.pad) if size] == [before] * sum(map(bool, padded.pad))
        if only and padded.value == 0 and min(padded.pad) >= 0:
            return [(padded.self, padded.pad[2 * before])]
    return []


def _has_several_sets(node: fx.Node, dim: int) -> bool:
    """Whether values are the weights of a softmax whose scores, too, were put side by side."""
    while not (node.target in SOFTMAX and arguments(node).dim % example(node).dim() == dim):
        found = sources(node, dim) if node.target in _MOVES else None
        if node.target is aten.slice.Tensor:
            found = [(operand(node), dim)]
        if found is None or found[0][1] < 0:
            return False
        node, dim = found[0]
    todo = [(operand(node), dim)]
    seen = set(todo)
    while todo:
        node, dim = todo.pop()
        if node.target is aten.cat.default and arguments(node).dim % example(node).dim() == dim:
            return True
        further = [] if node.target in MATMUL or dim < 0 else sources(node, dim) or []
        todo += [x for x in further if x not in seen and example(x[0]).dtype.is_floating_point]  # masks are no scores
        seen.update(further)
    return False


def _split(
    body: fx.GraphModule, node: fx.Node, weights: tuple[fx.Node, int], values: fx.Node, way: list[tuple[fx.Node, int]]
) -> None:
    build = NodeBuilder(body, node)
    (joined, joined_dim), *moves = way
    total = None
    for part, start in _parts(joined, joined_dim):
        size = example(part).shape[joined_dim]
        if example(part).dtype != example(joined).dtype:
            part = build(aten._to_copy.default, part, dtype=example(joined).dtype)
        for move, dim in moves:
            part = build(move.target, *resized(move, (part, *move.args[1:]), dim, size), **move.kwargs)
        operands = {weights[0]: build(aten.slice.Tensor, *weights, start, start + size), values: part}
        product = build(node.target, *(operands[cast(fx.Node, x)] for x in node.args))
        total = product if total is None else build(aten.add.Tensor, total, product)
    assert total is not None
    node.replace_all_uses_with(total)
