"""Tensors that scores read by how far a key lies from its query: one element for each distance, not for each pair.

A bias such as T5's is a learned table, of which each step takes rows by numbers that are known: those of its distance
to each key. What query and key it is does not matter then, and neither values nor gradients are held for pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile.analyses.masks import MOVES, moved
from nsa_compile.ir.aten import aten, operand
from nsa_compile.ir.scans import ScanRecord, example
from nsa_compile.ir.step_values import Table

__all__ = ["elements_by_distance", "traced_back"]

# Operators that take elements of a tensor by integers, and the place of these among their arguments.
_PICKS: dict[Any, int] = {
    aten.index.Tensor: 1,
    aten.embedding.default: 1,
    aten.index_select.default: 2,
    aten.gather.default: 2,
}


def numbers_spread(node: fx.Node, shape: Sequence[int]) -> Tensor:
    """Which element of a node each element of what it broadcasts to is."""
    own = example(node).shape
    return torch.arange(own.numel()).reshape(own).expand(shape)


def traced_back(node: fx.Node, elements: Tensor, record: ScanRecord) -> tuple[fx.Node, Tensor]:
    """Where the elements of a node were before they were moved."""
    while (node.target in MOVES or node.target in (aten.clone.default, aten.alias.default)) and all(
        n is node.args[0] or n in record.constant for n in node.all_input_nodes
    ):
        source = operand(node)
        numbers = torch.arange(example(source).numel()).reshape(example(source).shape)
        if node.target in MOVES:
            numbers = moved(node, numbers, record)
        node, elements = source, numbers.flatten()[elements]
    return node, elements


def elements_by_distance(node: fx.Node, elements: Tensor, record: ScanRecord) -> tuple[fx.Node, Tensor] | None:
    """What scores read of a node, if at each step that is a table's elements by the distance of its query to each key.

    Args:
        elements: which of the node's a step reads, `[N|1, 1, m|1, T]`.

    Returns:
        The table, which may itself differ from step to step, and which of its elements belong to each distance,
        `[N|1, 1, m|1, S + T - 1]`, that of key t for query s at `t - s + S - 1`; None where it is otherwise.
    """
    node, elements = traced_back(node, elements, record)
    place = _PICKS.get(node.target)
    if place is None or node.kwargs or not example(node).dtype.is_floating_point or elements.shape[3] == 1:
        return None
    if node.target is aten.embedding.default and len(node.args) > 2:
        return None
    picked: Any = node.args[place]
    known = [record.known.get(x) for x in (picked if isinstance(picked, (list, tuple)) else [picked]) if x is not None]
    if len(known) != 1 or not isinstance(known[0], Table):
        return None
    target: Any = node.target
    table, integers = operand(node), known[0].values
    numbers = torch.arange(example(table).numel()).reshape(example(table).shape)
    length, keys = integers.shape[0], elements.shape[3]
    found = torch.empty(*elements.shape[:3], length + keys - 1, dtype=torch.int64)
    for t, step in enumerate(integers.long()):
        args: list[Any] = list(node.args)
        args[0], args[place] = numbers, [x and step for x in picked] if isinstance(picked, (list, tuple)) else step
        row, first = target(*args).flatten()[elements], length - 1 - t
        if t and not torch.equal(row[..., 1:], found[..., first + 1 : first + keys]):
            return None
        found[..., first : first + (1 if t else keys)] = row[..., :1] if t else row
    return table, found
