"""Pytrees, taken apart and put together as torch's `torch.utils._pytree` does, in functions that are quick to trace.

Dynamo takes longer to trace torch's own functions than to trace most steps, and a scan needs nine of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

# A pytree with the number of each leaf in its place, and None where it has None.
Structure = Any


class _Registered(NamedTuple):
    """A container of a class that torch's pytree knows, as the structures of what it holds."""

    spec: pytree.TreeSpec
    parts: list[Any]


def taken_apart(tree: Any, *, none_is_a_leaf: bool = False) -> tuple[list[Any], Structure]:
    """The leaves of a pytree, and its structure. None marks what is absent, unless it is a leaf like others."""
    leaves: list[Any] = []
    return leaves, _numbered(tree, leaves, none_is_a_leaf)


def _numbered(tree, leaves, none_is_a_leaf):
    """The structure of a tree, whose leaves are put behind those that are there."""
    if isinstance(tree, torch.Tensor):
        leaves.append(tree)
        return len(leaves) - 1
    kind = type(tree)
    if kind is dict:
        structure = {}
        for key, part in tree.items():
            structure[key] = _numbered(part, leaves, none_is_a_leaf)
        return structure
    if kind is list or kind is tuple:
        numbers = []
        for part in tree:
            numbers.append(_numbered(part, leaves, none_is_a_leaf))
        return numbers if kind is list else tuple(numbers)
    if tree is None and not none_is_a_leaf:
        return None
    parts, spec = pytree.tree_flatten(tree)
    if spec.is_leaf():
        leaves.append(tree)
        return len(leaves) - 1
    return _Registered(spec, _numbered(parts, leaves, none_is_a_leaf))


def put_together(leaves: Sequence[Any], structure: Structure) -> Any:
    """The pytree of that structure that holds these leaves."""
    kind = type(structure)
    if kind is int:
        return leaves[structure]
    if kind is dict:
        tree = {}
        for key, part in structure.items():
            tree[key] = put_together(leaves, part)
        return tree
    if kind is list or kind is tuple:
        parts = []
        for part in structure:
            parts.append(put_together(leaves, part))
        return parts if kind is list else tuple(parts)
    return None if structure is None else pytree.tree_unflatten(put_together(leaves, structure.parts), structure.spec)


def leaves_like(structure: Structure, tree: Any) -> list[Any] | None:
    """The tensors of a tree that has that structure, in its order; None if it has another.

    The keys of a dict may come in any order.
    """
    leaves: list[Any] = []
    return leaves if _follow(structure, tree, leaves) else None


def _follow(structure, tree, leaves):
    """Whether a tree has a structure, as far as its tensors are put into `leaves`."""
    kind = type(structure)
    if kind is int:
        leaves.append(tree)
        return isinstance(tree, torch.Tensor)
    if structure is None:
        return tree is None
    if kind is _Registered:
        parts, spec = pytree.tree_flatten(tree)
        return spec == structure.spec and _follow(structure.parts, parts, leaves)
    if type(tree) is not kind or len(tree) != len(structure):
        return False
    # No generators: they are calls, to Dynamo.
    for place in structure if kind is dict else range(len(structure)):
        if (kind is dict and place not in tree) or not _follow(structure[place], tree[place], leaves):
            return False
    return True
