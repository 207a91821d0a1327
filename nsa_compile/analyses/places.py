"""Rankings of keys: the first indices of a descending sort, or of a top-k, of scores that are a program.

A lightning indexer (eq. 1 of arXiv 2512.02556), say, makes scores of products of queries and keys, sums them over its
heads, and masks the sum. What the sum runs over become the heads of the queries; a mask of -inf is one of each head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from nsa_compile.analyses.batched_operators import first_places_read
from nsa_compile.analyses.distances import traced_back
from nsa_compile.analyses.masks import Unrecognised, side_of_where
from nsa_compile.analyses.scores import (
    Changing,
    Divided,
    Follower,
    KeySet,
    elements_read,
    key_set,
    known_mask,
    made_of,
    regrouped,
)
from nsa_compile.analyses.softmax import TRACE_LIMIT, Product
from nsa_compile.ir.aten import SORTED, arguments, aten, operand
from nsa_compile.ir.scans import Declined, Step, example, place_of
from nsa_compile.ops import ranked

# Scores over all steps from which an operator of its own, which is compiled, is worth it.
FEWEST = 2**22
# Heads that are summed; what a longer sum runs over are features.
_MOST_HEADS = 64


@dataclass(frozen=True)
class Places:
    """A ranking of the scores of `keys`, and how many of the first indices each node is that reads them."""

    ranking: fx.Node
    indices: dict[fx.Node, int]
    keys: KeySet

    @property
    def count(self) -> int:
        return max(self.indices.values())


def rankings(step: Step, xs: int) -> tuple[list[Places], list[Declined]]:
    """The rankings of a step whose scores are a program of products with keys that are the same at all steps; and why
    others are not, which are large.

    Args:
        xs: how many tensors a step gets one row of.
    """
    changing = Changing(step.body, step.record, xs)
    found: list[Places] = []
    left: list[Declined] = []
    for node in step.body.graph.nodes:
        if node.target not in SORTED:
            continue
        try:
            if not (indices := _indices_read(node)):
                raise Unrecognised("more than its first indices is read", node)
            keys = _scores(step, changing, operand(node))
            _check_read_by(keys, node)
        except (Unrecognised, Divided) as why:
            if example(operand(node)).numel() * step.record.length >= FEWEST:
                reason = why.why if isinstance(why, Unrecognised) else "its scores are put side by side"
                left.append(Declined(f"a ranking computes the scores of all keys at each step: {reason}", node))
            continue
        if ranked.takes(example(operand(node)), 1):  # last: it may compile a kernel
            found.append(Places(node, indices, keys.by_distance(step.record)))
    return found, left


def _indices_read(node: fx.Node) -> dict[fx.Node, int]:
    """The nodes that are the first indices of a ranking, and how many each is, if nothing else of it is read."""
    if node.target is aten.topk.default:
        how, rank = arguments(node), example(operand(node)).dim()
        is_last = rank > 0 and how.dim % rank == rank - 1
        read = is_last and how.largest and all(place_of(user) == 1 for user in node.users)
        return dict.fromkeys(node.users, how.k) if read else {}
    if first_places_read(node) is None:
        return {}
    return {part: arguments(part).end for user in node.users for part in user.users}


def _scores(step: Step, changing: Changing, scores: fx.Node) -> KeySet:
    """The scores `[..., T]` that are sorted, as a program whose heads are summed.

    Raises:
        Unrecognised, Divided: they are none.
    """
    value = example(scores)
    if not 0 < value.numel() <= TRACE_LIMIT:
        raise Unrecognised(f"a step has no scores, or more than {TRACE_LIMIT}", scores)
    elements = torch.arange(value.numel()).reshape(-1, value.shape[-1])
    total, masks = _unmasked(scores, elements, step)
    terms = _terms(*total, changing)
    rows, heads = len(elements), len(terms.elements) // len(elements)
    if value.numel() * heads * step.record.length < FEWEST:
        raise Unrecognised("it is small", scores)
    # A product with keys that are others at each step is a leaf.
    follower = Follower(step.record, changing, rows * heads, precise=value.dtype == torch.float64, shared=True)
    score = follower.follow(terms.node, terms.elements)
    if terms.factor is not None:
        score = follower.add("mul.Tensor", [score, follower.follow(*terms.factor)], scores)
    for condition, hidden, of_scores in masks:
        flag = follower.follow(condition, of_scores.repeat_interleave(heads, 0))
        name, given = ("masked_fill.Scalar", [score, flag]) if hidden else ("where.ScalarOther", [flag, score])
        score = follower.add(name, [*given, -math.inf], scores)
    if not follower.products or not follower.instructions:
        raise Unrecognised("its scores are not made of products of queries and keys", scores)
    if any(example(p.node).dtype != value.dtype for p, _ in follower.products):
        raise Unrecognised("its scores have another precision than its products", scores)
    mask = known_mask(scores, elements, step.record, -math.inf)
    keys = key_set(follower, score, range(elements.shape[1]), mask, mask)
    if keys.shape[0] > rows:
        raise Unrecognised("its heads have keys of their own", scores)
    return regrouped(keys, rows)


def _unmasked(
    node: fx.Node, elements: Tensor, step: Step
) -> tuple[tuple[fx.Node, Tensor], list[tuple[fx.Node, bool, Tensor]]]:
    """Scores before masks set them to -inf; and the masks: conditions, whether they say what is set, and elements."""
    masks: list[tuple[fx.Node, bool, Tensor]] = []
    while True:
        node, elements = traced_back(node, elements, step.record)
        side = side_of_where(node, step.record)
        if node.target is aten.detach.default:
            node = operand(node)
        elif side is not None and side.constant == -math.inf:
            masks.append((side.condition, side.constant_if_true, elements_read(side.condition, node, elements)))
            elements, node = elements_read(side.value, node, elements), side.value
        else:
            return (node, elements), masks[::-1]


@dataclass(frozen=True)
class _Terms:
    """What scores `[R, T]` are a sum of: elements `[R * heads, T]` of a node, each times one of a factor, if any."""

    node: fx.Node
    elements: Tensor
    factor: tuple[fx.Node, Tensor] | None = None


def _terms(node: fx.Node, elements: Tensor, changing: Changing) -> _Terms:
    """The terms of a sum over heads, or of a product with one weight for each; else scores are their own."""
    if node.target is aten.sum.dim_IntList and arguments(node).dtype is None and arguments(node).dim:
        source, dims = operand(node), arguments(node).dim
        shape = example(source).shape
        count = math.prod(shape[d] for d in dims)
        if 0 < count <= _MOST_HEADS:
            last = list(range(-len(dims), 0))
            numbers = torch.arange(shape.numel()).reshape(shape).movedim(list(dims), last).reshape(-1, count)
            return _Terms(source, numbers[elements].transpose(1, 2).flatten(0, 1).contiguous())
    if node.target in (aten.mm.default, aten.bmm.default):
        for flipped in (False, True):
            if (terms := _weighed(Product(node, flipped), elements, changing)) is not None:
                return terms
    return _Terms(node, elements)


def _weighed(product: Product, elements: Tensor, changing: Changing) -> _Terms | None:
    """The terms of a product of weights `[n, m, heads]` and scores `[n, heads, T]`; None if it is of something else."""
    weights, scores = product.node.args[:2][:: -1 if product.flipped else 1]
    if not isinstance(weights, fx.Node) or not isinstance(scores, fx.Node) or scores not in changing:
        return None
    n, m, keys = product.shape
    heads = example(weights).shape[-2 if product.flipped else -1]
    numbers = product.numbers().flatten()[elements]
    row = numbers[:, :1] // keys
    if keys != elements.shape[1] or not bool((numbers == row * keys + torch.arange(keys)).all()) or heads > _MOST_HEADS:
        return None
    of_weights = torch.arange(n * m * heads).reshape((n, heads, m) if product.flipped else (n, m, heads))
    of_scores = torch.arange(n * heads * keys).reshape((n, keys, heads) if product.flipped else (n, heads, keys))
    if product.flipped:
        of_weights, of_scores = of_weights.transpose(1, 2), of_scores.transpose(1, 2)
    own = of_weights.reshape(n * m, heads)[row.flatten()].reshape(-1, 1)
    terms = of_scores[row.flatten() // m].flatten(0, 1)
    return _Terms(scores, terms.contiguous(), (weights, own.expand(-1, keys).contiguous()))


def _check_read_by(keys: KeySet, ranking: fx.Node) -> None:
    """That nobody but a ranking reads what its scores are made of, from the products on.

    Raises:
        Unrecognised: it is computed for all steps anyway.
    """
    inside = made_of(keys, ranking)
    for node in inside - {ranking}:
        if any(user not in inside for user in node.users):
            raise Unrecognised("what its scores are made of is read elsewhere", node)
