"""Attention without a softmax: sums of values by weights that are a program of products, positions and tensors.

So are the weights of ReLU, sigmoid and SiLU attention, and those of linear attention and retention read from a cache.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from nsa_compile.analyses.masks import Mask, Unrecognised
from nsa_compile.analyses.scores import (
    Changing,
    Divided,
    Follower,
    KeySet,
    Read,
    key_set,
    made_of,
    not_differentiable,
    regrouped,
)
from nsa_compile.analyses.softmax import TRACE_LIMIT, Product
from nsa_compile.analyses.staleness import Analysis
from nsa_compile.ir.aten import MATMUL, arguments, aten, operand
from nsa_compile.ir.attention import Opaque
from nsa_compile.ir.scans import Step, example
from nsa_compile.ir.step_values import StepMask


@dataclass(frozen=True)
class WeightedSum:
    """A product of weights and values, or a sum of the weights themselves: `node`. What the weights of `keys` are made
    of, and who reads them with values."""

    node: fx.Node
    keys: KeySet
    read: Read | None


def weighted_sums(step: Step, xs: int, analysis: Analysis) -> list[WeightedSum]:
    """The sums of a step, values of a cache weighed by what is made of products with keys of one; and the sums of such
    weights, which divide them or what they yield.

    Args:
        xs: how many tensors a step gets one row of.
    """
    changing = Changing(step.body, step.record, xs)
    found: list[WeightedSum] = []
    inside = set[fx.Node]()
    for node in step.body.graph.nodes:
        if node.target not in MATMUL or any((node, place) in step.record.hidden for place in (0, 1)):
            continue
        for flipped in (False, True):
            weights, values = node.args[:2][:: -1 if flipped else 1]
            # Weights of rows that are not written yet are zero: there is a cache. Other products, such as those of a
            # layer with ReLU, stay as they are.
            if analysis.of(weights).zero is None or values in changing:
                continue
            product = Product(node, flipped)
            n, m, _ = product.shape
            numbers = torch.arange(example(weights).numel())
            elements = numbers.reshape(n, -1, m).transpose(1, 2) if flipped else numbers
            try:
                keys = _weights(step, changing, weights, elements.reshape(n * m, -1), analysis)
                inside |= _made_of(keys, weights)
            except (Unrecognised, Divided):
                continue
            if analysis.is_finite(values):
                keys = regrouped(keys, max(n, keys.shape[0])).by_distance(step.record)
                found.append(WeightedSum(node, keys, Read(0, product, without_nan=True, masked=False)))
                break
    sums = [n for n in step.body.graph.nodes if n.target is aten.sum.dim_IntList and n.args[0] in inside]
    for node in sums:
        weights, dims = operand(node), arguments(node).dim
        if len(dims) != 1 or arguments(node).dtype is not None or analysis.of(weights).zero is None:
            continue
        shape = example(weights).shape
        elements = torch.arange(shape.numel()).reshape(shape).movedim(dims[0], -1).reshape(-1, shape[dims[0]])
        with contextlib.suppress(Unrecognised, Divided):
            keys = _weights(step, changing, weights, elements, analysis)
            found.append(WeightedSum(node, keys.by_distance(step.record), None))
    return found


def _weights(step: Step, changing: Changing, weights: fx.Node, elements: torch.Tensor, analysis: Analysis) -> KeySet:
    """Weights as a program; `elements [N * m, T]` are their numbers.

    Raises:
        Unrecognised, Divided: they are no program of products with keys that are the same at all steps.
    """
    value = example(weights)
    if not value.dtype.is_floating_point or not 0 < value.numel() <= TRACE_LIMIT:
        raise Unrecognised(f"a step has no weights, or more than {TRACE_LIMIT}", weights)
    precise = value.dtype == torch.float64
    for shared in (True, False):
        follower = Follower(step.record, changing, len(elements), precise=precise, shared=shared)
        weight = follower.follow(weights, elements)
        if follower.products:
            break
    products = [p.node for p, _ in follower.products]
    if not products or not follower.instructions:
        raise Unrecognised("its weights are not made of products of queries and keys", weights)
    if follower.wide and any(example(p).dtype != torch.float64 for p in products):
        raise Unrecognised("its weights are more precise than its products", weights)
    if not all(analysis.is_finite(x) for p in products for x in p.args):
        raise Unrecognised("what it multiplies may hold infinities or NaN", weights)
    known = _not_zero(weights, elements, analysis)
    keys = key_set(follower, weight, range(elements.shape[1]), known, known)
    if why := not_differentiable(keys):
        raise Unrecognised(why, weights)
    return keys


def _made_of(keys: KeySet, weights: fx.Node) -> set[fx.Node]:
    """What weights are made of, from the products on.

    Raises:
        Unrecognised: somebody else reads that, too, so that it is computed for all steps anyway.
    """
    inside = made_of(keys, weights)
    for node in inside:
        if any(user not in inside and user.target not in (*MATMUL, aten.sum.dim_IntList) for user in node.users):
            raise Unrecognised("what its weights are made of is read elsewhere", node)
    return inside


def _not_zero(weights: fx.Node, elements: torch.Tensor, analysis: Analysis) -> Mask:
    """The steps at which weights may be other than zero."""
    zero: Any = analysis.of(weights).zero
    start = zero.expand(example(weights).shape).flatten()[elements]
    length = analysis.record.length
    return Mask(StepMask.inside(start, torch.full_like(start, length), length), (), (), Opaque())
