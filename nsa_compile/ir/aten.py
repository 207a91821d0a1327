"""ATen's operators by what they do, in one table, and their arguments by name.

A rule or a pattern that leaves out some operators of a group says so where it does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import fx

aten = torch.ops.aten

WHERE = frozenset({aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar})
MASKED_FILL = frozenset({aten.masked_fill.Scalar, aten.masked_fill.Tensor})
AND = frozenset({aten.bitwise_and.Tensor, aten.logical_and.default})
OR = frozenset({aten.bitwise_or.Tensor, aten.logical_or.default})
NOT = frozenset({aten.bitwise_not.default, aten.logical_not.default})
XOR = frozenset({aten.bitwise_xor.Tensor, aten.logical_xor.default})
ADD = frozenset({aten.add.Tensor, aten.add.Scalar})
SUB = frozenset({aten.sub.Tensor, aten.sub.Scalar})
MUL = frozenset({aten.mul.Tensor, aten.mul.Scalar})
DIV = frozenset({aten.div.Tensor, aten.div.Scalar})
# Operators that compare, by what they ask.
COMPARISONS = {
    getattr(getattr(aten, op), overload): op
    for op in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
# Names of operators whose value, or whose derivative, jumps where two operands are equal or one is a round number.
JUMPS = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "relu", "abs", "sign",
     "floor", "ceil", "remainder", "floor_divide", "to", "div", "reciprocal", "log", "sqrt", "rsqrt", "pow"}
)  # fmt: skip
SUMS = frozenset({aten.sum.dim_IntList, aten.mean.dim})
MATMUL = frozenset({aten.mm.default, aten.bmm.default, aten.mv.default})
SOFTMAX = frozenset({aten._softmax.default, aten._safe_softmax.default})
MATMUL_ADD = frozenset({aten.addmm.default, aten.baddbmm.default})
# Operators that move the elements of one operand, repeat or drop them, by numbers that are no tensors.
REARRANGED = frozenset({
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.unfold.default, aten.repeat.default, aten.flip.default,
    aten.roll.default,
})  # fmt: skip
COPIED = frozenset({aten.clone.default, aten.detach.default, aten.alias.default})
# The same by the numbers in a tensor.
PICKED = frozenset({aten.index_select.default, aten.index.Tensor, aten.gather.default})
JOINED = frozenset({aten.cat.default, aten.stack.default})
SPLIT = frozenset({
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.unbind.int,
})  # fmt: skip
# Operators that put elements of one operand into another.
PLACED = frozenset({
    aten.scatter.src, aten.scatter.value, aten.index_put.default, aten._unsafe_index_put.default,
    aten.slice_scatter.default, aten.select_scatter.default, aten.index_copy.default,
})  # fmt: skip
# What reads the shape of a tensor alone.
FILLED = frozenset({aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default})
# The same, and zeros, ones and full of another dtype or size.
SHAPED = FILLED - {aten.empty_like.default} | {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
# Where operators that fill a tensor have the number; those that are not here fill it with their own.
_NUMBER: dict[Any, int] = {
    aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0,
}  # fmt: skip
_FILL: dict[Any, float] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0.0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1.0),
}
SORTED = frozenset({aten.sort.default, aten.sort.stable, aten.topk.default})


def filled_with(node: fx.Node) -> float | None:
    """The number that a node fills a tensor with, if that is what it does."""
    if node.target not in _NUMBER:
        return _FILL.get(node.target)
    number: Any = node.args[_NUMBER[node.target]]
    return float(number) if isinstance(number, int | float) else None


def is_inexact(dtype: torch.dtype) -> bool:
    """Whether a dtype is of real or complex floating point, so that it may have gradients and its numbers round."""
    return dtype.is_floating_point or dtype.is_complex


def holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Whether a dtype has all values of another; those of floating point are taken to have all integers."""
    if dtype == other or other == torch.bool:
        return True
    if is_inexact(dtype) != is_inexact(other):
        return is_inexact(dtype)
    if not is_inexact(dtype):
        own, its = torch.iinfo(dtype), torch.iinfo(other)
        return own.min <= its.min and own.max >= its.max
    mine, theirs = torch.finfo(dtype), torch.finfo(other)
    return dtype.is_complex >= other.is_complex and mine.eps <= theirs.eps and mine.max >= theirs.max


def operand(node: fx.Node, place: int = 0) -> fx.Node:
    """The node at a place of another one's arguments."""
    return cast(fx.Node, node.args[place])


class Arguments(SimpleNamespace):
    """Arguments by name."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the operator has no argument {name!r}")


def arguments(node: fx.Node) -> Arguments:
    """The arguments of a node by the names of its operator's schema, defaults filled in: `arguments(node).dim`."""
    target: Any = node.target
    names = [(a.name, a.default_value) for a in target._schema.arguments]
    given = [(name, node.kwargs.get(name, default)) for name, default in names[len(node.args) :]]
    return Arguments(**dict(zip((name for name, _ in names), node.args, strict=False)), **dict(given))
