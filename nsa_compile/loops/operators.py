"""What each operator becomes where dimensions grow: one rule for each, and a decline by name for the rest."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from nsa_compile.loops.body import Body, Table, Val
from nsa_compile.loops.merged import Node
from nsa_compile.loops.numbers import Number
from nsa_compile.loops.rules import (
    RULES,
    along,
    aten,
    blocks,
    dim_of,
    elementwise,
    joining,
    made,
    movement,
    nodes_of,
    picks,
    sizes_of,
    spread,
)
from nsa_compile.loops.rules.elementwise import harmless, is_finite, pointwise
from nsa_compile.loops.rules.row_numbers import first_row_elsewhere
from nsa_compile.loops.state import NotFollowed
from nsa_compile.loops.trace import Ref

REGISTERED = (movement, joining, elementwise, along, made, picks, blocks, spread)  # by being imported


def convert(body: Body, node: Node) -> list[Val | None]:
    """The results of one operator of the loop in the step that serves all ways.

    Raises:
        NotFollowed: the operator has no rule for dimensions that grow, or this is not a case of it.
    """
    op = node.any
    positional = [_argument(body, node, [o.args[i] for o in node.ops.values()]) for i in range(len(op.args))]
    named = {k: _argument(body, node, [o.kwargs[k] for o in node.ops.values()]) for k in op.kwargs}
    named.pop("pin_memory", None)
    if not body.at.all() and not is_finite(node.func, positional):
        positional = [harmless(body, x) for x in positional]
    if not body.at.all():
        positional = first_row_elsewhere(body, node.func, positional)
    if not _varies(positional) and not _varies(named):
        return _as_it_is(body, node.func, positional, named)
    shapes = [_shape(body, node, place) for place in range(len(op.outs))]
    if all(any(not size[body.at].any() for size in shape) for shape in shapes):
        return [_of_no_elements(body, node, place, shape) for place, shape in enumerate(shapes)]
    rule = RULES.get(node.func)
    if rule is None and torch.Tag.pointwise in node.func.tags:
        rule = pointwise
    if rule is None:
        raise NotFollowed("has no rule for sizes that change from step to step")
    schema = [(a.name, a.default_value) for a in node.func._schema.arguments]
    arguments = {name: named.get(name, default) for name, default in schema}
    arguments.update(zip((name for name, _ in schema), positional, strict=False))
    try:
        result = rule(body, SimpleNamespace(func=node.func, shapes=shapes, **arguments))
    except Exception as error:  # of numpy, say, where an argument that no author of a rule thought of varies
        raise NotFollowed("has no rule for arguments that change from step to step as these do") from error
    return list(result) if isinstance(result, list | tuple) else [result]


def _shape(body: Body, node: Node, place: int) -> list[Table]:
    """The sizes of a result of the operator, at all steps."""
    versions = {way: body.merged.trace(way).shapes[op.outs[place]] for way, op in node.ops.items()}
    rank = len(next(iter(versions.values())))
    return [body.number({way: shape[d] for way, shape in versions.items()}) for d in range(rank)]


def _of_no_elements(body: Body, node: Node, place: int, shape: list[Table]) -> Val:
    dims = tuple(dim_of(body, size) for size in shape)
    kind = body.merged.trace(next(iter(node.ops))).types[node.any.outs[place]]
    return Val(body.emit(torch.zeros, sizes_of(dims), dtype=kind.dtype, device=kind.device), dims)


def _argument(body: Body, node: Node, values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Ref):
        return body.chosen({way: body.merged.source(way, ref) for way, ref in zip(node.ops, values, strict=True)})
    if isinstance(first, list | tuple):
        return [_argument(body, node, [v[i] for v in values]) for i in range(len(first))]
    is_number = any(isinstance(v, Number) for v in values)
    if is_number or (isinstance(first, int) and not isinstance(first, bool) and any(v != first for v in values)):
        table = body.number(dict(zip(node.ops, values, strict=True)))
        here = table[body.at]
        if (here == here[0]).all():
            return here[0].item()
        if table.dtype.kind == "f":
            return np.where(body.at, table, here[0])
        return table
    return first


def _varies(value: Any) -> bool:
    if isinstance(value, Val):
        return value.grows
    if isinstance(value, dict):
        return any(map(_varies, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_varies, value))
    return isinstance(value, np.ndarray)


def _as_it_is(body: Body, func: Any, positional: Any, named: Any) -> list[Val | None]:
    if func in _IN_OTHER_WORDS:
        func = _IN_OTHER_WORDS[func]
    node = body.emit(func, *nodes_of(positional), **{k: nodes_of(v) for k, v in named.items()})
    example = node.meta["example_value"]
    if isinstance(example, torch.Tensor):
        return [Val(node, tuple(example.shape))]
    return [Val(body.item(node, i), tuple(x.shape)) for i, x in enumerate(example) if isinstance(x, torch.Tensor)]


# Views hold for strides that a buffer need not have.
_IN_OTHER_WORDS = {aten.view.default: aten.reshape.default, aten._unsafe_view.default: aten.reshape.default}
