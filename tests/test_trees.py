"""Pytrees taken apart and put together as torch does it."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from nsa_compile.trees import leaves_like, put_together, taken_apart

A, B, C = torch.tensor(1), torch.tensor(2), torch.tensor(3)


class Pair(NamedTuple):
    first: object
    second: object


TREES = [
    A,
    [],
    (),
    {},
    [A, (B,), {"x": C}],
    {"b": A, "a": {"c": B}},
    Pair(A, [B, C]),
    OrderedDict(x=A, y=(B, C)),
    (Pair({"x": A}, B), 3, "word"),
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_as_torch_does_it(tree):
    leaves, structure = taken_apart(tree)
    assert leaves == pytree.tree_leaves(tree)
    again = put_together(leaves, structure)
    assert pytree.tree_structure(again) == pytree.tree_structure(tree)
    assert pytree.tree_leaves(again) == leaves


def test_none_is_absent_or_a_leaf():
    tree = {"a": None, "b": (A, None)}
    leaves, structure = taken_apart(tree)
    assert leaves == [A]
    assert put_together([B], structure) == {"a": None, "b": (B, None)}
    assert taken_apart(tree, none_is_a_leaf=True)[0] == [None, A, None]
    assert leaves_like(structure, {"a": None, "b": (C, None)}) == [C]
    assert leaves_like(structure, {"a": C, "b": (C, None)}) is None


def test_keys_in_any_order():
    _, structure = taken_apart({"a": A, "b": (B, {"c": C})})
    assert leaves_like(structure, {"b": (B, {"c": C}), "a": A}) == [A, B, C]


@pytest.mark.parametrize("other", [[A], (A, B), {"a": A}, Pair(A, B), [A, [B]], [A, B, C], [A, 3], None, A], ids=str)
def test_another_structure(other):
    _, structure = taken_apart([A, B])
    assert leaves_like(structure, other) is None


def test_another_structure_of_a_named_tuple():
    _, structure = taken_apart(Pair(A, [B]))
    assert leaves_like(structure, Pair(C, [A])) == [C, A]
    assert leaves_like(structure, (C, [A])) is None
    assert leaves_like(structure, Pair(C, A)) is None
