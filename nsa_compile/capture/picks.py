"""`k[t]` and `k[:, t] = x` in the step of a scan, with a number t that is a tensor.

Python asks such a tensor for its number, which nobody knows while a step is captured. What is captured instead is
`index_select` and `index_copy_`. The first copies where Python's is a view. Whether that matters shows when the step is
run on stand-ins with views in place of the copies: nothing may be written to what a row is a view of and the row be
used after that, and nothing be written to a row, but for `k[t] += x`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.higher_order_ops import _make_inlined
from torch._dynamo.variables.lists import SliceVariable, TupleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_compile.memory import memory, written_by
from nsa_compile.workarounds import DATA, HonestBatchNorm

__all__ = ["UNROLLED", "Picks", "asks_for_numbers"]

_READS = "a row that it read, as row = k[t] with a tensor t"
WRITES_AFTER = f"it writes to a tensor and goes on to use {_READS}; write row = k[t].clone()"
WRITES_THROUGH = f"it writes in place to {_READS}; write k[t] = k[t] + x, or k[t] += x"
RETURNS_IT = f"it returns as its carry {_READS}; return k[t].clone()"
READS_DATA = f"it takes .data of a tensor, beside {_READS}; write .detach() instead"
WRITES_BESIDE = (
    f"it writes in place, and has a branch, a scan or a transform in it, beside {_READS}; write "
    "k.index_select(0, t.view(1))[0]"
)
UNKNOWN = f"it cannot be told whether it writes to {_READS}; write k.index_select(0, t.view(1))[0]"
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
        row = next(iter(last.args), None)
        computed = isinstance(row, fx.Node) and self.read.get(row) == (x, key)
        if computed and isinstance(value, TensorVariable) and value.as_proxy().node is last:
            self.updated.add(last)
        _make_inlined(tx, _assign)(x, key, value)
        self.written.add(_last(tx))
        return ConstantVariable.create(None)

    def hazard(self, scan: fx.Node, body: fx.GraphModule) -> str | None:
        """Why a copy of a row is not as good as a view of it, if so."""
        if not self.read:
            return None
        graphs = [graph for graph in body.modules() if isinstance(graph, fx.GraphModule)]
        if any(node.target is DATA for graph in graphs for node in graph.graph.nodes):
            return READS_DATA  # what is written there is seen by nobody
        replay = _Replay(body, self)
        try:
            replay.run_on_stand_ins()
        except Exception as error:
            return f"{UNKNOWN} ({str(error).strip().splitlines()[:1]})"
        if any(map(_is_region, body.graph.nodes)):
            return WRITES_BESIDE if any(replay.written.values()) else None
        carries = list(body.graph.output_node().args[0])[: len(scan.args[1])]  # type: ignore[arg-type]
        for pick in self.read:
            rows, memory_of_rows = replay.views_of(pick), memory(replay.env[pick])
            if any((x.args[0] if x.target == "clone" else x) in rows for x in carries):
                return RETURNS_IT
            writes = [n for n, written in replay.written.items() if memory_of_rows in written]
            for write in writes:
                if (write in self.written or write.target is operator.setitem) and write.args[0] not in rows:
                    continue  # it reads the row, and then writes
                if write not in self.updated and rows & set(write.all_input_nodes):
                    return WRITES_THROUGH
            order = {node: i for i, node in enumerate(body.graph.nodes)}
            last_use = max((order[user] for row in rows for user in row.users), default=0)
            if any(order[pick] < order[write] < last_use and write not in self.updated for write in writes):
                return WRITES_AFTER
        return None


def _is_region(node: fx.Node) -> bool:
    """Whether a node runs a graph of its own, or enters or leaves a transform of torch.func."""
    own = isinstance(node.target, HigherOrderOperator)
    return own or "_functorch" in (getattr(node.target, "__module__", None) or "")


class _Writes(TorchDispatchMode):
    """Notes what operators write to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            self.written += written_by(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Replay(fx.Interpreter):
    """Runs a step with views in place of copies of rows, and notes the memory that each node writes to."""

    def __init__(self, body: fx.GraphModule, picks: Picks) -> None:
        super().__init__(body, garbage_collect_values=False)  # so that no memory is used twice
        self.picks = picks
        self.written: dict[fx.Node, set[int]] = {}

    def run_on_stand_ins(self) -> None:
        """Run it on tensors of the captured shapes, without numbers."""
        with unset_fake_temporarily(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), HonestBatchNorm():
            examples = [node.meta["example_value"] for node in self.graph.find_nodes(op="placeholder")]
            self.run(*pytree.tree_map_only(Tensor, _new_like, examples))

    def run_node(self, n: fx.Node) -> Any:
        if isinstance(n.target, HigherOrderOperator):
            return pytree.tree_map_only(Tensor, _new_like, n.meta["example_value"])
        if n in self.picks.views:
            return self.env[n.args[0].args[0]].select(self.picks.views[n], 0)  # type: ignore[union-attr,index]
        with _Writes() as writes:
            result = super().run_node(n)
        self.written[n] = {memory(x) for x in writes.written}
        return result

    def views_of(self, pick: fx.Node) -> set[fx.Node]:
        """A row and all that is a view of it."""
        found, where = {pick}, memory(self.env[pick])
        for node in self.graph.nodes:
            value = self.env.get(node)
            if found & set(node.all_input_nodes) and isinstance(value, Tensor) and memory(value) == where:
                found.add(node)
        return found


def _new_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def asks_for_numbers(key: Any) -> bool:
    """Whether a key has tensors that Python asks for their numbers, beside slices and such."""
    parts = [part.realize() for part in (key.items if isinstance(key, TupleVariable) else [key])]
    numbers = [part for part in parts if type(part) is TensorVariable]
    others = [part for part in parts if part not in numbers]
    plain = all(
        isinstance(part, SliceVariable)
        or (isinstance(part, ConstantVariable) and (part.value in (None, Ellipsis) or type(part.value) is int))
        for part in others
    )
    return bool(numbers) and plain and all(_is_number(_example(x)) for x in numbers)


def _is_number(x: Tensor) -> bool:
    # An index of bool or uint8 is a mask.
    return not x.dim() and x.dtype in (torch.int64, torch.int32, torch.int16, torch.int8)


def _example(variable: TensorVariable) -> Tensor:
    example: Tensor = variable.as_proxy().node.meta["example_value"]
    return example


def _last(tx: Any) -> fx.Node:
    node: fx.Node = next(iter(reversed(tx.output.current_tracer.graph.nodes)))
    return node


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
    if len(dims) == 1:
        view.index_copy_(dims[0], places[0], value.unsqueeze(dims[0]))
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
