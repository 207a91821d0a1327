"""Between which numbers the elements of an integer tensor lie, whatever the data."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from nsa_compile.analyses.masks import MOVES, constant
from nsa_compile.ir.aten import ADD, COPIED, SORTED, WHERE, arguments, aten, operand
from nsa_compile.ir.scans import ScanRecord, example
from nsa_compile.ir.step_values import Separable, Table

Bounds = tuple[int, int]


def bounds(value: Any, record: ScanRecord) -> Bounds:
    """The least and the greatest number that an element of an integer node may be; what is unknown, by its dtype."""
    if not isinstance(value, fx.Node):
        return int(value), int(value)
    dtype = example(value).dtype
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(dtype)
    found = _bounds(value, record)
    # Outside of its dtype, arithmetic wraps around.
    return found if found is not None and fits(found, (info.min, info.max)) else (info.min, info.max)


def fits(inner: Bounds, outer: Bounds) -> bool:
    """Whether one range lies within another."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _bounds(node: fx.Node, record: ScanRecord) -> Bounds | None:
    number = constant(node, record)
    if number is not None:
        return int(number), int(number)
    known = record.known.get(node)
    if isinstance(known, Separable):
        return known.range()
    if isinstance(known, Table) and known.values.numel():
        return int(known.values.min()), int(known.values.max())
    if node.target in MOVES | COPIED:
        return bounds(node.args[0], record)
    if node.target is aten._to_copy.default:
        return None if example(operand(node)).dtype.is_floating_point else bounds(node.args[0], record)
    if node.target is operator.getitem and operand(node).target in SORTED and node.args[1] == 1:
        how = arguments(operand(node))
        return 0, example(how.self).shape[how.dim] - 1
    if node.target in WHERE:
        either = [bounds(x, record) for x in node.args[1:]]
        return min(low for low, _ in either), max(high for _, high in either)
    if node.target in ADD and node.kwargs.get("alpha", 1) == 1:
        a, b = (bounds(x, record) for x in node.args[:2])
        return a[0] + b[0], a[1] + b[1]
    if node.target is aten.clamp.default:
        limit = arguments(node)
        low, high = bounds(limit.self, record)
        if limit.min is not None:
            low, high = max(low, limit.min), max(high, limit.min)
        if limit.max is not None:
            low, high = min(low, limit.max), min(high, limit.max)
        return low, high
    return None
