"""`k[t]` and `k[:, t] = x` in the step of a scan, with a number t that is a tensor.

Python asks such a tensor for its number, which nobody knows while a step is captured. What is captured instead is
`index_select` and `index_copy_`. The first copies where Python's is a view: `views.py` tells where that matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.higher_order_ops import _make_inlined
from torch._dynamo.variables.lists import SliceVariable, TupleVariable
from torch._dynamo.variables.tensor import TensorVariable

__all__ = ["UNROLLED", "Picks", "asks_for_numbers", "is_one_mask"]

UNROLLED = (
    "it reads a number out of a tensor, as k[t] does, where the scan is unrolled, as under a transform of torch.func; "
    "write k.index_select(0, t.view(1))[0], and torch.where(torch.arange(S) == t, x, k) for k[t] = x"
)


@dataclass
class Picks:
    """The rows that a step reads and writes by numbers in tensors.

    Attributes:
        read: what reads one, with x and key of each `x[key]`.
        views: what copies where Python has a view: the dimension that it picks along.
        written: what writes one.
        updated: what adds to a row in place, as the `+=` of `k[t] += x`, which then writes it where it was.
    """

    read: dict[fx.Node, tuple[Any, Any]] = field(default_factory=dict)
    views: dict[fx.Node, int] = field(default_factory=dict)
    written: set[fx.Node] = field(default_factory=set)
    updated: set[fx.Node] = field(default_factory=set)

    def read_row(self, tx: Any, x: TensorVariable, key: Any) -> Any:
        """`x[key]`, captured."""
        last = _last(tx)
        result = _make_inlined(tx, _row)(x, key)
        node = result.as_proxy().node
        self.read[node] = (x, key)
        while node is not last and node.op != "root":
            if node.target == "squeeze":
                self.views[node] = node.args[1]
            node = node.prev
        return result

    def write_row(self, tx: Any, x: TensorVariable, key: Any, value: Any) -> ConstantVariable:
        """`x[key] = value`, captured."""
        last = _last(tx)
        if last is not None and isinstance(value, TensorVariable) and value.as_proxy().node is last:
            row: Any = next(iter(last.args), None)
            if isinstance(row, fx.Node) and self.read.get(row) == (x, key):
                self.updated.add(last)
        _make_inlined(tx, _assign)(x, key, value)
        self.written.add(cast(fx.Node, _last(tx)))
        return ConstantVariable.create(None)


def asks_for_numbers(key: Any) -> bool:
    """Whether a key has tensors that Python asks for their numbers, beside slices and such."""
    parts = _parts(key)
    return any(map(_is_number, parts)) and all(_is_number(part) or _is_plain(part) for part in parts)


def is_one_mask(key: Any) -> bool:
    """Whether a key has a tensor of one number that Python takes for a mask: all rows of it, or none."""
    return any(_dtype_of_number(part) in (torch.bool, torch.uint8) for part in _parts(key))


def _parts(key: Any) -> list[Any]:
    return [part.realize() for part in (key.items if isinstance(key, TupleVariable) else [key])]


def _is_number(part: Any) -> bool:
    return _dtype_of_number(part) in (torch.int64, torch.int32, torch.int16, torch.int8)


def _dtype_of_number(part: Any) -> torch.dtype | None:
    if type(part) is not TensorVariable:
        return None
    x = part.as_proxy().node.meta["example_value"]
    return None if x.dim() else x.dtype


def _is_plain(part: Any) -> bool:
    is_constant = isinstance(part, ConstantVariable)
    return isinstance(part, SliceVariable) or (is_constant and type(part.value) in (int, type(None), type(Ellipsis)))


def _last(tx: Any) -> fx.Node | None:
    """The last node of the graph that is captured now; None while there is none."""
    return next(iter(reversed(tx.output.current_tracer.graph.nodes)), None)


# What Dynamo traces in place of Python's own.


def _row(x, key):
    view, numbers = _all_rows(x, key)
    for dim, number in reversed(numbers):
        view = view.index_select(dim, _at(number, view.shape[dim])).squeeze(dim)
    return view


def _assign(x, key, value):
    view, numbers = _all_rows(x, key)
    dims = [dim for dim, _ in numbers]
    shape = [size for dim, size in enumerate(view.shape) if dim not in dims]
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=view.dtype, device=view.device)
    if value.dim() > len(shape):
        value = value.reshape(value.shape[value.dim() - len(shape) :])
    value = value.to(device=view.device, dtype=view.dtype).expand(shape)
    places = [_at(number, view.shape[dim]) for dim, number in numbers]
    if len(dims) > 1:  # counted from the end again, one that is below would be another row
        places = [torch.where(at < 0, view.shape[dim], at) for dim, at in zip(dims, places, strict=True)]
    first, last = dims[0], dims[-1]
    if len(dims) == 1:
        view.index_copy_(first, places[0], value.unsqueeze(first))
    elif last - first == len(dims) - 1:  # side by side
        view[(slice(None),) * first + tuple(places)] = value.unsqueeze(first)
    else:
        view.movedim(dims, list(range(len(dims)))).index_put_(tuple(places), value.unsqueeze(0))


def _all_rows(x, key):
    """`x[key]` with all rows where the key has a number of a tensor, and these numbers, each with its dimension."""
    parts = key if isinstance(key, tuple) else (key,)
    if any(not (isinstance(part, Tensor) or part is Ellipsis or _is_all(part)) for part in parts):
        x = x[tuple([slice(None) if isinstance(part, Tensor) else part for part in parts])]
    kept = [part for part in parts if not isinstance(part, int)]
    numbers, dim = [], 0
    for i, part in enumerate(kept):
        if part is Ellipsis:
            dim = x.dim() - len(kept) + i + 1
        elif isinstance(part, Tensor):
            numbers.append((dim, part))
        dim += part is not Ellipsis
    if dim > x.dim():
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    return x, numbers


def _is_all(part):
    return isinstance(part, slice) and part.start is None and part.stop is None and part.step is None


def _at(number, size):
    number = number.long()
    return torch.where(number < 0, number + size, number).reshape(1)
