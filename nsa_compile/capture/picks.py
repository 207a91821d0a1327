"""`k[t]` and `k[:, t] = x` in the step of a scan, with a number t that is a tensor.

Python asks such a tensor for its number, which nobody knows while a step is captured. What is captured instead is
`index_select` and `index_copy_`. The first copies where Python's is a view, so a step is refused in which it matters:
where one of both is written to while the other is still used.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.higher_order_ops import _make_inlined
from torch._dynamo.variables.lists import SliceVariable, TupleVariable
from torch._dynamo.variables.tensor import TensorVariable

from nsa_compile.memory import memory
from nsa_compile.workarounds import DATA

__all__ = ["UNROLLED", "Picks", "asks_for_numbers"]

WRITES_AFTER = (
    "it writes to a tensor of which it goes on to use a row that it read before, as row = k[t] with a tensor t; write "
    "row = k[t].clone()"
)
READS_DATA = "it takes .data of a tensor, where it reads a row as k[t] with a tensor t; write .detach() instead"
UNROLLED = (
    "it reads a number out of a tensor, as k[t] does, where the scan is unrolled, as under a transform of torch.func; "
    "write k.index_select(0, t.view(1))[0], and torch.where(torch.arange(S) == t, x, k) for k[t] = x"
)
WRITES_THROUGH = "it writes in place to a row that it read, as k[t].add_(x) with a tensor t; write k[t] = k[t] + x"


@dataclass
class _Pick:
    """A row that was read, and where."""

    node: fx.Node
    row: Tensor
    row_version: int  # when it was read, as the next one
    source: Tensor
    version: int
    where: tuple[Any, Any]


@dataclass
class _Put:
    """A row that was written, with the versions of its tensor before and after."""

    node: fx.Node
    source: Tensor
    before: int
    after: int


@dataclass
class Picks:
    """The rows that a step reads and writes by numbers in tensors, in their order."""

    read: list[_Pick] = field(default_factory=list)
    written: list[_Put] = field(default_factory=list)
    updated: set[fx.Node] = field(default_factory=set)  # of `k[t] += x`: what was read, and is written where it was

    def read_row(self, tx: Any, x: TensorVariable, key: Any) -> Any:
        """`x[key]`, captured."""
        source = _example(x)
        version = source._version
        result: Any = _make_inlined(tx, _row)(x, key)
        row = _example(result)
        self.read.append(_Pick(_node(result), row, row._version, source, version, (x, key)))
        return result

    def write_row(self, tx: Any, x: TensorVariable, key: Any, value: Any) -> ConstantVariable:
        """`x[key] = value`, captured."""
        source = _example(x)
        before, last = source._version, _last(tx)
        for pick in self.read:
            own = last.args[:1] == (pick.node,) and isinstance(value, TensorVariable) and _node(value) is last
            if own and pick.where == (x, key):
                self.updated.add(pick.node)
        _make_inlined(tx, _assign)(x, key, value)
        self.written.append(_Put(_last(tx), source, before, source._version))
        return ConstantVariable.create(None)

    def hazard(self, body: fx.GraphModule) -> str | None:
        """Why a copy of a row is not as good as a view of it, if so."""
        graphs = [graph for graph in body.modules() if isinstance(graph, fx.GraphModule)]
        if self.read and any(node.target is DATA for graph in graphs for node in graph.graph.nodes):
            return READS_DATA  # what is written there has no version
        for pick in self.read:
            if pick.row._version - pick.row_version != (pick.node in self.updated):
                return WRITES_THROUGH
            puts = [put for put in self.written if memory(put.source) == memory(pick.source)]
            puts = [put for put in puts if put.before >= pick.version]
            if pick.source._version - pick.version != sum(put.after - put.before for put in puts):
                return WRITES_AFTER
            if any(put.node.graph is not pick.node.graph or _last_use(pick) > _place(put.node) for put in puts):
                return WRITES_AFTER
        return None


def asks_for_numbers(key: Any, most: int) -> bool:
    """Whether a key has tensors, but not more than so many, that Python asks for numbers, beside slices and such."""
    parts = [part.realize() for part in (key.items if isinstance(key, TupleVariable) else [key])]
    numbers = [part for part in parts if isinstance(part, TensorVariable)]
    others = [part for part in parts if part not in numbers]
    plain = all(
        isinstance(part, SliceVariable)
        or (isinstance(part, ConstantVariable) and (part.value in (None, Ellipsis) or type(part.value) is int))
        for part in others
    )
    return 0 < len(numbers) <= most and plain and all(_is_number(_example(x)) for x in numbers)


def _is_number(x: Tensor) -> bool:
    # An index of bool or uint8 is a mask.
    return not x.dim() and x.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _node(variable: Any) -> fx.Node:
    node: fx.Node = variable.as_proxy().node
    return node


def _example(variable: Any) -> Any:
    return _node(variable).meta["example_value"]


def _last(tx: Any) -> fx.Node:
    node: fx.Node = next(iter(reversed(tx.output.current_tracer.graph.nodes)))
    return node


def _place(node: fx.Node) -> int:
    return list(node.graph.nodes).index(node)


def _last_use(pick: _Pick) -> int:
    """The place of the last node that uses the row or a view of it."""
    nodes = list(pick.node.graph.nodes)

    def is_it(node: fx.Node) -> bool:
        x = node.meta.get("example_value")
        return isinstance(x, Tensor) and memory(x) == memory(pick.row)

    return max(i for i, node in enumerate(nodes) if any(map(is_it, node.all_input_nodes)) or node is pick.node)


# What Dynamo traces in place of Python's own.


def _row(x, key):
    view, numbers = _all_rows(x, key)
    for dim, number in reversed(numbers):
        view = view.index_select(dim, _at(number, view.shape[dim])).squeeze(dim)
    return view


def _assign(x, key, value):
    view, ((dim, number),) = _all_rows(x, key)
    shape = [*view.shape[:dim], *view.shape[dim + 1 :]]
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=view.dtype, device=view.device)
    if value.dim() > len(shape):
        value = value.reshape(value.shape[value.dim() - len(shape) :])
    value = value.to(device=view.device, dtype=view.dtype).expand(shape)
    view.index_copy_(dim, _at(number, view.shape[dim]), value.unsqueeze(dim))


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
