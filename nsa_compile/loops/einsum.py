"""`torch.einsum` of two tensors as one product of matrices, whatever their sizes.

Torch multiplies and sums where a size is 1, and makes a product of matrices elsewhere. A size that grows is 1 at one
step of a loop alone: that step would take another way than all others, to the same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["einsum"]

Label = str  # a letter, or a place of an ellipsis, counted from its end: "...0"


def einsum(equation: Any, *operands: Any) -> Any:
    """The sum of products that `torch.einsum` computes of two tensors.

    Returns:
        `NotImplemented` for what has another form, and where sizes differ that have to be equal.
    """
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return NotImplemented
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    parts = inputs.split(",")
    if len(parts) != 2:
        return NotImplemented
    labels = [_labels(part, x.dim()) for part, x in zip(parts, operands, strict=True)]
    if any(len(set(names)) != x.dim() for names, x in zip(labels, operands, strict=True)):
        return NotImplemented  # a diagonal, or an error of which torch tells
    places = max((x.dim() - len(p.replace("...", "")) for p, x in zip(parts, operands, strict=True) if "..." in p),
                 default=0)  # fmt: skip
    letters = output if arrow else "..." + "".join(sorted(c for c in set(inputs) - set(".,") if inputs.count(c) == 1))
    kept = _labels(letters, places + len(letters.replace("...", "")))
    left, right = (_without_ones(*pair) for pair in _pairs(operands, labels))
    if not set(kept) <= {*left[1], *right[1]} or not _fit(left, right):
        return NotImplemented
    return _product(left, right, kept)


def _labels(letters: str, dims: int) -> list[Label]:
    """A name for each dimension."""
    before, ellipsis, after = letters.partition("...")
    count = dims - len(before) - len(after) if ellipsis else 0
    return [*before, *(f"...{n}" for n in range(count - 1, -1, -1)), *after]


def _pairs(operands: Sequence[Tensor], labels: list[list[Label]]) -> list[tuple[Tensor, list[Label], dict[Label, Any]]]:
    """Each operand with its labels, and the sizes that the other one has for its."""
    sizes = [dict(zip(names, x.shape, strict=True)) for names, x in zip(labels, operands, strict=True)]
    return [(operands[i], labels[i], sizes[1 - i]) for i in (0, 1)]


def _without_ones(x: Tensor, names: list[Label], other: dict[Label, Any]) -> tuple[Tensor, list[Label]]:
    """An operand without the dimensions of size 1 that are broadcast."""
    ones = [d for d, name in enumerate(names) if _is_one(x.shape[d]) and other.get(name, 1) != 1]
    return x.squeeze(ones), [name for d, name in enumerate(names) if d not in ones]


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _fit(left: tuple[Tensor, list[Label]], right: tuple[Tensor, list[Label]]) -> bool:
    """Whether the sizes of each common label are the same, which becomes a condition of the trace."""
    sizes = dict(zip(right[1], right[0].shape, strict=True))
    return all(n == sizes[name] for name, n in zip(left[1], left[0].shape, strict=True) if name in sizes)


def _product(left: tuple[Tensor, list[Label]], right: tuple[Tensor, list[Label]], kept: list[Label]) -> Tensor:
    x, names = _summed(*left, {*right[1], *kept})
    y, others = _summed(*right, {*left[1], *kept})
    batch = [name for name in kept if name in names and name in others]
    rows = [name for name in kept if name in names and name not in others]
    columns = [name for name in kept if name in others and name not in names]
    inner = [name for name in names if name not in kept]
    order = [*batch, *rows, *columns]
    if inner:
        sizes = dict(zip([*names, *others], [*x.shape, *y.shape], strict=True))
        out = torch.bmm(_grouped(x, names, batch, rows, inner), _grouped(y, others, batch, inner, columns))
        out = out.reshape([sizes[name] for name in order])
    else:
        out = _placed(x, names, order) * _placed(y, others, order)
    return out.permute([order.index(name) for name in kept])


def _placed(x: Tensor, names: list[Label], order: list[Label]) -> Tensor:
    """An operand with a dimension for each label."""
    x = x.permute([names.index(name) for name in order if name in names])
    for d, name in enumerate(order):
        x = x if name in names else x.unsqueeze(d)
    return x


def _summed(x: Tensor, names: list[Label], needed: set[Label]) -> tuple[Tensor, list[Label]]:
    gone = [d for d, name in enumerate(names) if name not in needed]
    return (x.sum(gone), [n for n in names if n in needed]) if gone else (x, names)


def _grouped(x: Tensor, names: list[Label], *groups: list[Label]) -> Tensor:
    """`x [B, M, N]`, a dimension for each group of labels."""
    x = x.permute([names.index(name) for group in groups for name in group])
    for dim, group in enumerate(groups):
        x = x.flatten(dim, dim + len(group) - 1) if len(group) > 1 else x if group else x.unsqueeze(dim)
    return x
