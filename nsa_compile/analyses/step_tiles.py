"""What of a batched step is computed in tiles of steps, so that no value of all steps is held that is large.

An attention without an operator of its own has scores for each step and each key; so has an indexer that ranks keys, and
the loss that teaches it. Over all steps these are `[S, ..., S]`. What is made of them is small: indices, outputs, a
number for each step. Between what they read and what is made of them they are computed for a tile of steps after the
other, and once more in the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_compile.analyses.batched_body import ATTENTIONS, BatchedBody, Recurrence, compute_at
from nsa_compile.analyses.batched_operators import Value, spread
from nsa_compile.analyses.inner_loops import bytes_of, varying_nodes
from nsa_compile.ir.aten import aten, operand
from nsa_compile.ir.carries import Rows
from nsa_compile.ir.inner_loops import run_inner_loop
from nsa_compile.ir.lowering import copy_outputs, trace_to_aten
from nsa_compile.ir.scans import ScanRecord, ScanSite, example, fake_inputs

# The largest value of a tile takes about as much: what the caches of a core hold, or what keeps a GPU busy.
_TILE_BYTES = {"cpu": 2**21, "cuda": 2**26}


@dataclass(frozen=True)
class InTiles:
    """Values of a step that are computed in tiles of steps, and the small ones that are made of them.

    Attributes:
        nodes: what is computed, in the order of the step.
        yields: those that others read.
        rows: what it reads that differs from step to step; same: what does not.
        size: steps of a tile.
        tile: `(rows, same) -> yields` for that many steps, whose numbers are the last of the rows.
    """

    nodes: tuple[fx.Node, ...]
    yields: tuple[fx.Node, ...]
    rows: tuple[fx.Node, ...]
    same: tuple[fx.Node, ...]
    size: int
    tile: fx.GraphModule
    form = "tiles"
    group: tuple[int, ...] = ()

    def compute(self, body: BatchedBody) -> tuple[dict[int, Tensor], dict[fx.Node, Tensor]]:
        length = body.record.length
        rows = [spread(body.value(node, body.all_times), length) for node in self.rows]
        rows.append(torch.arange(length, device=body.xs[0].device))
        same = [body.value(node, body.all_times)[0] for node in self.same]
        count = length // self.size
        whole = count * self.size
        tiles = [x[:whole].unflatten(0, (count, self.size)) for x in rows]
        found = [x.flatten(0, 1) for x in run_inner_loop(self.tile, [], tiles, same, recomputed=True)]
        if whole < length:
            inputs = [*(x[whole:] for x in rows), *same]
            rest = _evaluated(self.nodes, self.yields, self.rows, self.same, body.record, inputs)
            found = [torch.cat(pair) for pair in zip(found, rest, strict=True)]
        return {}, dict(zip(self.yields, found, strict=True))


def plan_tiles(
    site: ScanSite, record: ScanRecord, recurrences: Sequence[Recurrence], most_bytes: int
) -> list[InTiles]:
    """What of a step is computed in tiles: between small values, what takes more than `most_bytes` at all steps."""
    plan = _Plan(site, record, recurrences, most_bytes)
    found = []
    for level in sorted(set(plan.ends.values())):
        yields = [n for n, other in plan.ends.items() if other == level]
        inside = plan.behind(yields)
        inputs = {n for x in inside for n in x.all_input_nodes} - inside
        found.append(_in_tiles(plan, record, inside, inputs, yields))
    return found


class _Plan:
    """Which values of a step are large over all steps, and which small ones are made of them.

    A large value is computed within the tiles of what is made of it, for each anew: first the indices that a ranking
    yields, say, and in later tiles what is made of these and of the same scores.
    """

    def __init__(
        self, site: ScanSite, record: ScanRecord, recurrences: Sequence[Recurrence], most_bytes: int
    ) -> None:
        self.order = {n: i for i, n in enumerate(site.body.graph.nodes)}
        self.varying = varying_nodes(site, record)
        updates, ys = site.outputs()
        elsewhere = {n for r in recurrences for n in r.yields}
        elsewhere |= {u for u, kind in zip(updates, record.carries, strict=True) if isinstance(kind, Rows)}
        self.elsewhere = elsewhere
        most = most_bytes // record.length
        self.large = {n for n in self.order if self._is_computed(n) and bytes_of(n) > most}
        # What is needed as a whole is there anyway.
        self.large -= {n for n in self.large if n in ys or any(not self._is_computed(u) for u in n.users)}
        self.ends = self._ends()

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether a node is computed by its operator, and differs from step to step."""
        if node.target is operator.getitem:
            return self._is_computed(operand(node))
        plain = isinstance(node.target, OpOverload)
        return plain and node in self.varying and node not in self.elsewhere and node.target not in ATTENTIONS

    def _ends(self) -> dict[fx.Node, int]:
        """The small values that are made of large ones, and after how many others each of them can be computed."""
        ends: dict[fx.Node, int] = {}
        level: dict[fx.Node, int] = {}
        for node in self.order:
            level[node] = max((level[n] for n in node.all_input_nodes), default=0)
            tuple_of_large = not isinstance(node.meta.get("val"), Tensor) and self._is_computed(node)
            if node in self.large or self.large.isdisjoint(node.all_input_nodes):
                continue
            if tuple_of_large:
                self.large.add(node)
                continue
            ends[node] = level[node]
            level[node] += 1
        return ends

    def behind(self, nodes: Collection[fx.Node]) -> set[fx.Node]:
        """Nodes, and the large values that they are made of."""
        found, todo = set(nodes), list(nodes)
        while todo:
            new = {n for n in todo.pop().all_input_nodes if n in self.large} - found
            found |= new
            todo += new
        return found


def _in_tiles(
    plan: _Plan, record: ScanRecord, inside: set[fx.Node], inputs: set[fx.Node], yields: Sequence[fx.Node]
) -> InTiles:
    nodes, ordered = (tuple(sorted(x, key=plan.order.__getitem__)) for x in (inside, inputs))
    rows = tuple(n for n in ordered if n in plan.varying)
    same = tuple(n for n in ordered if n not in plan.varying)
    device = example(yields[0]).device
    budget = _TILE_BYTES.get(device.type, _TILE_BYTES["cpu"])
    most = max(bytes_of(n) for n in nodes)
    size = max(8, min(record.length, 2 ** ((budget // most).bit_length() - 1) if budget > most else 8))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(size, *example(n).shape, dtype=example(n).dtype, device=example(n).device) for n in rows]
        fakes.append(torch.empty(size, dtype=torch.int64, device=device))
    fakes += fake_inputs(list(same))

    def tile(*inputs: Tensor) -> list[Tensor]:
        return _evaluated(nodes, yields, rows, same, record, inputs)

    graph = trace_to_aten(torch.func.functionalize(tile, remove="mutations"), fakes)
    for node in graph.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default  # what is the same at all steps may come with other strides
    copy_outputs(graph)
    return InTiles(nodes, tuple(yields), rows, same, size, graph)


def _evaluated(
    nodes: Sequence[fx.Node],
    yields: Sequence[fx.Node],
    rows: Sequence[fx.Node],
    same: Sequence[fx.Node],
    record: ScanRecord,
    inputs: Sequence[Tensor],
) -> list[Tensor]:
    """The yields for some steps, whose numbers come after the rows."""
    n = len(rows)
    steps = inputs[n]
    values: dict[fx.Node, Value] = {node: (x, True) for node, x in zip(rows, inputs[:n], strict=True)}
    values |= {node: (x, False) for node, x in zip(same, inputs[n + 1 :], strict=True)}
    for node in nodes:
        operands = {x: values[x] for x in node.all_input_nodes}
        with fx.traceback.set_current_meta(node):
            values[node] = compute_at(node, operands, lambda: steps, len(steps), record)
    return [spread(values[node], len(steps)) for node in yields]
