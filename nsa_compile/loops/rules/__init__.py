"""The rules for operators whose dimensions grow: their registry, and what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from nsa_compile.loops.body import Axis, Body, Dim, Table, Val

aten = torch.ops.aten
Rule = Callable[[Body, Any], Any]
RULES: dict[Any, Rule] = {}


def dim_of(body: Body, size: Table) -> Dim:
    """A dimension of rows from the first on, so many at each step."""
    here = size[body.at]
    return int(here[0]) if (here == here[0]).all() else Axis.of(int(here.max()), 0, size)


def nodes_of(value: Any) -> Any:
    """Values as the nodes that hold them, within lists too."""
    if isinstance(value, Val):
        return value.node
    if isinstance(value, list | tuple):
        return [nodes_of(x) for x in value]
    return value


def rule(*funcs: Any) -> Callable[[Rule], Rule]:
    """Registers the rule of these operators."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(funcs, function))
        return function

    return register


def call(func: Any, **arguments: Any) -> Any:
    """An operator with its arguments, as a rule takes them."""
    return SimpleNamespace(func=func, shapes=[], **arguments)


def place_of(dim: int, rank: int) -> int:
    """A dimension counted from the front."""
    return dim % rank if rank else 0


def with_dim(dims: Sequence[Dim], dim: int, new: Dim) -> tuple[Dim, ...]:
    """Dimensions with another one in a place."""
    return (*dims[:dim], new, *dims[dim + 1 :])


def sizes_of(dims: Sequence[Dim]) -> list[int]:
    """The sizes of the buffers that hold them."""
    return [d.size if isinstance(d, Axis) else d for d in dims]
