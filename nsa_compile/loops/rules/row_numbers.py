"""Numbers of rows: between which they lie, as far as their operators show, and what is refused where that is not
enough."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import fx

from nsa_compile.ir.aten import ADD, COPIED, MASKED_FILL, REARRANGED, SORTED, SUB, arguments, aten
from nsa_compile.loops.body import Axis, Body, Dim, Table, Val

Range = tuple[Table, Table]


def refuse_no_rows(body: Body, index: Val, rows: Dim) -> None:
    """Have the loop run as it is written, and raise there, where an index is the number of no row that exists."""
    count, found = body.count_of(rows), range_of(body, index.node)
    if found is not None and (found[0] >= 0)[body.at].all() and (found[1] < count)[body.at].all():
        return
    below = body.emit(aten.lt.Scalar, index.node, 0)
    beyond = body.emit(aten.ge.Tensor, index.node, body._tensor(count))
    refused = body.emit(aten.bitwise_or.Tensor, below, beyond)
    for dim, own in enumerate(index.dims):
        mask = body.mask(index, dim) if isinstance(own, Axis) else None
        if mask is not None:
            refused = body.emit(aten.bitwise_and.Tensor, refused, mask)
    body.refuse(body.emit(aten.any.default, refused))


def first_row_elsewhere(body: Body, func: Any, given: Sequence[Any]) -> list[Any]:
    """What an operator is given, with the first row in the place of numbers of rows at the steps that take another way:
    these may be numbers of no row there, which none of them reads."""
    changed = list(given)
    for place, argument in enumerate(func._schema.arguments[: len(given)]):
        value = given[place]
        if argument.name == "indices" and isinstance(value, list):
            whole = given[0]
            changed[place] = [x if x is None else _first_elsewhere(body, x, whole.dims[d]) for d, x in enumerate(value)]
        elif argument.name in ("index", "indices", "target") and isinstance(value, Val):
            changed[place] = _first_elsewhere(body, value, _rows_of(func, given))
    return changed


def _rows_of(func: Any, given: Sequence[Any]) -> Dim | None:
    """The rows whose numbers an operator is given, where they are those of its first operand."""
    names = [argument.name for argument in func._schema.arguments]
    if func is aten.embedding.default:
        return cast(Dim, given[0].dims[0])
    if "dim" not in names or not isinstance(dim := given[names.index("dim")], int):
        return None
    dims = given[0].dims
    return cast(Dim, dims[dim]) if dims else 1


def _first_elsewhere(body: Body, index: Val, rows: Dim | None) -> Val:
    if index.example.dtype not in (torch.int64, torch.int32):
        return index
    size = rows.size if isinstance(rows, Axis) else rows
    found = range_of(body, index.node)
    if size is not None and found is not None and (found[0] >= 0).all() and (found[1] < size).all():
        return index
    absent = body.emit(aten.bitwise_not.default, body._truth(body.at))
    return Val(body.emit(aten.masked_fill.Scalar, index.node, absent, 0), index.dims)


def range_of(body: Body, value: Any) -> Range | None:
    """The least and the greatest number that an element may be, at each step; None where nothing is known of them."""
    if isinstance(value, int):
        return np.full(body.length, value), np.full(body.length, value)
    if not isinstance(value, fx.Node):
        return None
    if (count := body.numbers_of.get(value)) is not None:
        return np.zeros_like(count), count - 1
    if (table := body.table_of(value)) is not None:
        return table, table
    if value.target is operator.getitem and value.args[1] == 1:
        return _of_places(body, value.args[0])
    rule = _RULES.get(value.target)
    return None if rule is None or value.meta["example_value"].dtype != torch.int64 else rule(body, value)


def _of_places(body: Body, node: Any) -> Range | None:
    """Of what finds places along a dimension of fixed size."""
    if node.target not in SORTED | {aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default}:
        return None
    given = arguments(node)
    x = given.self.meta["example_value"]
    size = x.numel() if given.dim is None else x.shape[given.dim] if x.dim() else 1
    return np.zeros(body.length, np.int64), np.full(body.length, size - 1)


def _of_operand(body: Body, node: fx.Node) -> Range | None:
    return range_of(body, node.args[0])


def _of_either(body: Body, *values: Any) -> Range | None:
    found = [range_of(body, x) for x in values]
    known = [x for x in found if x is not None]
    if len(known) < len(found):
        return None
    return np.minimum(*(low for low, _ in known)), np.maximum(*(high for _, high in known))


def _arange(body: Body, node: fx.Node) -> Range | None:
    first, end = (range_of(body, x) for x in (0, *node.args)[-2:])
    return None if first is None or end is None or len(node.args) > 2 else (first[0], end[1] - 1)


def _sum(body: Body, node: fx.Node) -> Range | None:
    a, b = (range_of(body, x) for x in node.args[:2])
    if a is None or b is None or node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
        return None
    return (a[0] + b[0], a[1] + b[1]) if node.target in ADD else (a[0] - b[1], a[1] - b[0])


def _remainder(body: Body, node: fx.Node) -> Range | None:
    by = range_of(body, node.args[1])
    return None if by is None or (by[0] < 1).any() else (np.zeros_like(by[0]), by[1] - 1)


def _clamp(body: Body, node: fx.Node) -> Range | None:
    """A clamp is known on a side where its limit is, whatever it is given."""
    given = arguments(node)
    widest = np.iinfo(np.int64)
    low, high = range_of(body, given.self) or tuple(np.full(body.length, x) for x in (widest.min, widest.max))
    if (least := getattr(given, "min", None)) is not None:
        if (limit := range_of(body, least)) is None:
            return None
        low, high = np.maximum(low, limit[0]), np.maximum(high, limit[1])
    if (most := getattr(given, "max", None)) is not None:
        if (limit := range_of(body, most)) is None:
            return None
        low, high = np.minimum(low, limit[0]), np.minimum(high, limit[1])
    return low, high


def _least(body: Body, node: fx.Node) -> Range | None:
    a, b = (range_of(body, x) for x in node.args[:2])
    one = np.minimum if node.target is aten.minimum.default else np.maximum
    return None if a is None or b is None else (one(a[0], b[0]), one(a[1], b[1]))


_RULES: dict[Any, Any] = {
    **dict.fromkeys(REARRANGED | COPIED | {aten.index_select.default}, _of_operand),
    **dict.fromkeys(ADD | SUB, _sum),
    **dict.fromkeys(MASKED_FILL, lambda body, node: _of_either(body, node.args[0], node.args[2])),
    **dict.fromkeys((aten.remainder.Scalar, aten.remainder.Tensor), _remainder),
    **dict.fromkeys((aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.clamp.Tensor), _clamp),
    **dict.fromkeys((aten.minimum.default, aten.maximum.default), _least),
    **dict.fromkeys((aten.argmax.default, aten.argmin.default), _of_places),
    **dict.fromkeys((aten._to_copy.default, aten.scalar_tensor.default), _of_operand),
    aten.where.self: lambda body, node: _of_either(body, node.args[1], node.args[2]),
    torch.arange: _arange,
    torch.full: lambda body, node: range_of(body, node.args[1]),
}
