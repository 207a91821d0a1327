"""Operands of products as they lie: a reshape that merges dimensions of a cache would copy it.

A product of batches wants keys `[N, T, D]` and masks `[N, 1, m, T]`; a cache is `[B, T, G, D]`, with N = B · G. What
takes a stride for B and one for G needs no copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx

from nsa_compile.ir.aten import aten
from nsa_compile.ir.scans import example

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


@dataclass(frozen=True)
class Rows:
    """A node `[N, T, D]` as a view `[B, G, T, D]` of `source`, with B · G = N."""

    source: fx.Node
    batch: int
    groups: int
    matrix: tuple[int, int]  # the last two dimensions of the source, beside those of size 1
    transposed: bool = False

    def view(self, x: Tensor) -> Tensor:
        """The source's value as `[B, G, T, D]`."""
        x = x.reshape(self.batch, self.groups, *self.matrix)
        return x.transpose(2, 3) if self.transposed else x


def rows_of(node: fx.Node) -> Rows:
    """Rows `[N, T, D]` as they lie before a reshape merges their first dimensions, if one does."""
    source: Any = node
    transposed = False
    while source.target is aten.transpose.int and {d % 3 for d in source.args[1:]} == {1, 2}:
        source, transposed = source.args[0], not transposed
    count, first, second = example(source).shape
    if source.target in _RESHAPES:
        before = _leading(example(source.args[0]).shape, (first, second))
        if before is not None and prod(before) == count:
            batch, groups = (*before, 1, 1)[:2]
            return Rows(source.args[0], batch, groups, (first, second), transposed)
    return as_they_are(node)


def as_they_are(node: fx.Node) -> Rows:
    """Rows `[N, T, D]` without a split of N."""
    count, rows, width = example(node).shape
    return Rows(node, count, 1, (rows, width))


def _leading(shape: Any, matrix: tuple[int, int]) -> list[int] | None:
    """What a shape has before a matrix, without dimensions of 1, if these are at most two."""
    sizes = list(shape)
    while len(sizes) > 2 and sizes[-1] == 1 and tuple(sizes[-2:]) != matrix:
        sizes.pop()
    before = [size for size in sizes[:-2] if size != 1]
    return before if tuple(sizes[-2:]) == matrix and len(before) <= 2 else None


def unexpanded(mask: fx.Node, batch: int, groups: int) -> fx.Node:
    """The tensor `[B | 1, G | 1, m | 1, T]` of which a mask `[B · G, 1, m, T]` is a copy spread over heads, or the mask
    itself."""
    source: Any = mask.args[0] if mask.target in _RESHAPES else None
    if source is None or example(source).dim() != 4 or example(source).shape[:2] != (batch, groups):
        return mask
    while source.target is aten.expand.default and example(source.args[0]).dim() == 4:
        source = source.args[0]
    return source


def by_group(x: Tensor, batch: int, groups: int) -> Tensor:
    """A tensor `[1, 1, …]`, `[B · G, 1, …]` or as `unexpanded` returns, as one that broadcasts to `[B, G, …]`."""
    return x.reshape(batch, groups, *x.shape[2:]) if x.shape[:2] == (batch * groups, 1) else x
