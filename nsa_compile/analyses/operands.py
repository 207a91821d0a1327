"""Operands of products as they lie: a reshape that merges dimensions of a cache would copy it, and so would a factor.

A product of batches wants keys `[N, T, D]` and masks `[N, 1, m, T]`; a cache is `[B, T, G, D]`, with N = B · G, or N =
B · G · h where each query head has a product of its own. What takes a stride for B and one for G needs no copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx

from nsa_compile.ir.aten import aten
from nsa_compile.ir.scans import example

_RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
_MOVES = (aten.permute.default, aten.transpose.int, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor)


@dataclass(frozen=True)
class Rows:
    """A node `[N, T, D]` as a view `[B, G, T, D]` of `source`, each group of which stands for N / (B · G) in a row."""

    source: fx.Node
    batch: int
    groups: int
    matrix: tuple[int, int]  # the last two dimensions of the source, beside those of size 1
    transposed: bool = False
    factor: float = 1.0  # the node is the view times this

    @property
    def is_copy(self) -> bool:
        """Whether the source was copied or multiplied to be read in this form."""
        node: Any = self.source
        while node.target in _MOVES:
            node = node.args[0]
        return node.target in (*_RESHAPES, aten.expand.default, aten.mul.Scalar, aten.clone.default)

    def view(self, x: Tensor) -> Tensor:
        """The source's value as `[B, G, T, D]`."""
        x = x.reshape(self.batch, self.groups, *self.matrix)
        return x.transpose(2, 3) if self.transposed else x


def rows_of(node: fx.Node) -> Rows:
    """Rows `[N, T, D]` as they lie before they were repeated for several heads, multiplied or merged into one batch."""
    count, *_ = example(node).shape
    source: Any = node
    matrix: tuple[int, int] = (example(node).shape[1], example(node).shape[2])
    transposed, factor = False, 1.0
    found = Rows(node, count, 1, matrix)
    while source is not None:
        before = _leading(example(source).shape, matrix)
        if before is not None and len(before) <= 2 and prod(before) == count:
            batch, groups = (*before, 1, 1)[:2]
            found = Rows(source, batch, groups, matrix, transposed, factor)
        if before is not None and source.target is aten.expand.default and _repeats(source):
            batch, groups = (*(size for size in example(source.args[0]).shape[:-3] if size != 1), 1, 1)[:2]
            if count % (batch * groups) == 0:
                return Rows(source.args[0], batch, groups, matrix, transposed, factor)
        following: Any = source.args[0] if source.args else None
        rank = example(source).dim()
        if source.target is aten.transpose.int and {d % rank for d in source.args[1:]} == {rank - 2, rank - 1}:
            matrix, transposed = (matrix[1], matrix[0]), not transposed
        elif source.target is aten.mul.Scalar:
            factor *= float(source.args[1])
        elif source.target is aten.expand.default and example(following).shape == example(source).shape:
            pass
        elif source.target not in _RESHAPES or _leading(example(following).shape, matrix) is None:
            return found
        source = following
    return found


def _repeats(expanded: fx.Node) -> bool:
    """Whether `[B, G, 1, T, D]` is repeated for the heads of a group, and nothing else."""
    shape, before = example(expanded).shape, example(expanded.args[0]).shape  # pyrefly: ignore[bad-argument-type]
    return len(shape) == len(before) == 5 and before[2] == 1 and shape[:2] == before[:2] and shape[3:] == before[3:]


def _leading(shape: Any, matrix: tuple[int, int]) -> list[int] | None:
    """What a shape has before a matrix, if it ends in that. Dimensions of 1 move no element, and are left out."""
    sizes, last = ([size for size in x if size != 1] for x in (shape, matrix))
    split = len(sizes) - len(last)
    return sizes[:split] if split >= 0 and sizes[split:] == last else None


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
