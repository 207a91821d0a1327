"""Whether a step writes to what others are views of, where its captured form has copies.

A row that is read by a number in a tensor, `k[t]`, is captured as a copy, and so is what a scan within a step returns.
The step is run on stand-ins with views in place of these copies. Where nothing is written to the memory of such a view
while it is still used, and nothing through it, a copy is as good.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_compile.capture.picks import Picks
from nsa_compile.capture.scans import StepRun, applies_functorch, without_copy
from nsa_compile.memory import memory, written_by
from nsa_compile.workarounds import DATA, HonestFunctions

__all__ = ["why_copies_are_no_views"]

_A_ROW = "a row that it read, as row = k[t] with a tensor t"
_WRITES_AFTER = f"it writes to a tensor and goes on to use {_A_ROW}; write row = k[t].clone()"
_WRITES_THROUGH = f"it writes in place to {_A_ROW}; write k[t] += x, k[t, 0] = x for k[t][0] = x, or row = k[t].clone()"
_RETURNS_IT = f"it returns as its carry {_A_ROW}; return k[t].clone()"
_TAKES_DATA = f"it takes .data of a tensor, beside {_A_ROW}; write row = k[t].clone(), and .detach() for .data"
_WRITES_BESIDE = (
    f"it writes in place, and has a branch, a scan or a transform in it, beside {_A_ROW}; write "
    "k.index_select(0, t.view(1))[0]"
)
_WRITES_TO_WHAT_IS_KEPT = (
    "it writes in place to what a scan in it was given or returned as a carry, and both may be one tensor; write to a "
    "copy, x.clone()"
)
_UNKNOWN = f"it cannot be told whether it writes to {_A_ROW}; write k.index_select(0, t.view(1))[0]"


def why_copies_are_no_views(scan: fx.Node, body: fx.GraphModule, picks: Picks) -> tuple[str, fx.Node | None] | None:
    """Why a copy in the captured step of a scan is not as good as the view that it stands for, if so, and where."""
    if not picks.read and not body.graph.find_nodes(op="call_function", target=scan_op):
        return None
    nodes = [node for graph in body.modules() if isinstance(graph, fx.GraphModule) for node in graph.graph.nodes]
    if picks.read and (data := next((node for node in nodes if node.target is DATA), None)) is not None:
        return _TAKES_DATA, data  # what is written there is seen by nobody
    replay = _Replay(body, picks)
    try:
        replay.run_on_stand_ins()
    except Exception:
        return (_UNKNOWN, next(iter(picks.read))) if picks.read else None
    for scan_within, kept in replay.kept.items():
        if writes := [write for where in kept for write in replay.written_after(scan_within, where)]:
            return _WRITES_TO_WHAT_IS_KEPT, writes[0]
    if picks.read and any(map(_is_region, body.graph.nodes)):
        write = next((node for node, written in replay.written.items() if written), None)
        return None if write is None else (_WRITES_BESIDE, write)
    carries: Any = body.graph.output_node().args[0]
    returned = {without_copy(x) for x in carries[: len(scan.args[1])]}
    return next(filter(None, (_why_row_is_no_copy(row, replay, returned) for row in picks.read)), None)


def _why_row_is_no_copy(row: fx.Node, replay: _Replay, returned: set[fx.Node]) -> tuple[str, fx.Node] | None:
    rows, where, picks = replay.views_of(row), memory(replay.env[row]), replay.picks
    if rows & returned:
        return _RETURNS_IT, row
    for write in (n for n, written in replay.written.items() if where in written):
        sets = write in picks.written or write.target is operator.setitem
        if sets and write.args[0] not in rows:
            continue  # it reads a row, and then writes
        if write not in picks.updated and rows & set(write.all_input_nodes):
            return _WRITES_THROUGH, write
    last_use = max((replay.order[user] for node in rows for user in node.users), default=0)
    writes = [write for write in replay.written_after(row, where) if write not in picks.updated]
    return next(((_WRITES_AFTER, write) for write in writes if replay.order[write] < last_use), None)


def _is_region(node: fx.Node) -> bool:
    """Whether a node runs a graph of its own, or enters or leaves a transform of torch.func."""
    return isinstance(node.target, HigherOrderOperator) or applies_functorch(node)


def _memories(value: Any) -> set[int]:
    return {memory(x) for x in pytree.tree_leaves(value) if isinstance(x, Tensor)}


class _Writes(TorchDispatchMode):
    """Notes what operators write to."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            self.written += written_by(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class _Replay(StepRun):
    """Runs a step with views in place of copies of rows.

    Attributes:
        written: the memory that each node writes to.
        kept: of the scans within that may return a tensor that they were given: the memory of both.
        order: of the nodes.
    """

    graph: fx.Graph  # pyrefly: ignore[bad-override-mutable-attribute]

    def __init__(self, body: fx.GraphModule, picks: Picks) -> None:
        super().__init__(body, garbage_collect_values=False)  # so that no memory is used twice
        self.picks = picks
        self.written: dict[fx.Node, set[int]] = {}
        self.kept: dict[fx.Node, set[int]] = {}
        self.order = {node: i for i, node in enumerate(body.graph.nodes)}

    def run_on_stand_ins(self) -> None:
        """Run it on tensors of the captured shapes, without numbers."""
        with unset_fake_temporarily(), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), HonestFunctions():
            examples = [node.meta["example_value"] for node in self.graph.find_nodes(op="placeholder")]
            self.run(*pytree.tree_map_only(Tensor, _new_like, examples))

    def run_node(self, n: fx.Node) -> Any:
        is_checkpointed = n.target is torch.ops.higher_order.tag_activation_checkpoint
        if isinstance(n.target, HigherOrderOperator) and not is_checkpointed:
            results = pytree.tree_map_only(Tensor, _new_like, n.meta["example_value"])
            if n.target is scan_op:
                self.kept[n] = self._kept_by(n, results)
            return results
        if n in self.picks.views:
            copied: Any = n.args[0]
            return self.env[copied.args[0]].select(self.picks.views[n], 0)
        with _Writes() as writes:
            result = super().run_node(n)
        self.written[n] = _memories(writes.written)
        return result

    def _kept_by(self, scan: fx.Node, results: Any) -> set[int]:
        combine, init, *_ = scan.args
        step: Any = getattr(self.module, str(combine.target))  # pyrefly: ignore[missing-attribute]
        given = _memories([n.meta.get("example_value") for n in step.graph.find_nodes(op="placeholder")])
        count = len(init)  # pyrefly: ignore[bad-argument-type]
        carries = [without_copy(x).meta["example_value"] for x in step.graph.output_node().args[0][:count]]
        if not _memories(carries) & given:
            return set()
        inputs = [self.env[without_copy(n)] for n in scan.all_input_nodes]
        return _memories(inputs) | _memories(results[:count])

    def written_after(self, node: fx.Node, where: int) -> Iterable[fx.Node]:
        """What writes to some memory after a node has run."""
        return [n for n, written in self.written.items() if where in written and self.order[n] > self.order[node]]

    def views_of(self, row: fx.Node) -> set[fx.Node]:
        """A row, and all that is or holds a view of it."""
        found, where = {row}, memory(self.env[row])
        for node in self.graph.nodes:
            if found & set(node.all_input_nodes) and where in _memories(self.env.get(node)):
                found.add(node)
        return found


def _new_like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
