"""What of a batched step is computed in tiles of steps, so that no value of all steps is held that is large.

An attention without an operator of its own has scores for each step and each key; so has an indexer that ranks keys,
and the loss that teaches it. Over all steps these are `[S, ..., S]`. What is made of them is small: indices, outputs, a
number for each step. All between what they read and what is made of them is computed for one tile of steps after the
other, and once more in the backward pass.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from nsa_compile.analyses.batched_body import ATTENTIONS, BatchedBody, Recurrence, compute_at
from nsa_compile.analyses.batched_operators import Value, spread
from nsa_compile.analyses.inner_loops import bytes_of, varying_nodes
from nsa_compile.ir.aten import aten, operand
from nsa_compile.ir.carries import Invariant, Known, Recurrent, Rows
from nsa_compile.ir.inner_loops import run_inner_loop
from nsa_compile.ir.lowering import copy_outputs, trace_to_aten
from nsa_compile.ir.scans import Declined, ScanRecord, ScanSite, example, fake_inputs
from nsa_compile.ir.zero_gradients import asked_for_gradients

_FEWEST = 8  # steps of a tile: each runs some hundred operators

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


def plan_tiles(site: ScanSite, record: ScanRecord, recurrences: Sequence[Recurrence], most_bytes: int) -> list[InTiles]:
    """What of a step is computed in tiles: between small values, what takes `most_bytes` or more at all steps."""
    plan = _Plan(site, record, recurrences, most_bytes)
    return [_in_tiles(plan, record, *part) for part in plan.parts()]


class _Plan:
    """Which values of a step are large over all steps, and which small ones are made of them.

    Integers that are made of large values, such as the indices of a ranking, end a part of the step: they are kept, and
    need no gradient. What is made of them and of the same large values is a later part, which computes these anew.
    """

    def __init__(self, site: ScanSite, record: ScanRecord, recurrences: Sequence[Recurrence], most_bytes: int) -> None:
        self.order = {n: i for i, n in enumerate(site.body.graph.nodes)}
        self.varying = varying_nodes(site, record)
        self.asked_for_gradients = asked_for_gradients(site.body.graph)
        updates, self.ys = site.outputs()
        carries = site.placeholders()[0]
        self.carries = {
            c: kind.written if isinstance(kind, Rows) else u
            for c, u, kind in zip(carries, updates, record.carries, strict=True)
            if not isinstance(kind, Invariant | Known)
        }
        self.elsewhere = {n for r in recurrences for n in r.yields}
        # What reads a recurrent state is a part of its recurrence, up to what that yields.
        state = {c for c, kind in zip(carries, record.carries, strict=True) if isinstance(kind, Recurrent)}
        for node in self.order:
            if node not in self.elsewhere and not state.isdisjoint(node.all_input_nodes):
                state.add(node)
        self.elsewhere |= state
        self.updates = {u for u, kind in zip(updates, record.carries, strict=True) if isinstance(kind, Rows)}
        self.elsewhere |= self.updates
        self.computed = {n for n in self.order if self._is_computed(n)}
        often = self._needed_often(record)
        self.large = {n for n in self.computed & often if _elements(n) * 4 * record.length >= most_bytes}
        # What is needed as a whole is there anyway.
        self.whole = {n for n in self.large if n in self.ys or any(self._takes_whole(u) for u in n.users)}
        self.large -= self.whole
        self.level, self.after = self._levels()
        self.before = self._before()

    def _needed_often(self, record: ScanRecord) -> set[fx.Node]:
        """Nodes that are needed at more than half of the steps: tiles compute what they hold at all of them.

        What goes into rows alone that few steps write, such as the mean of a block, is needed at those.
        """
        every, never = np.ones(record.length, bool), np.zeros(record.length, bool)
        writes = {k.written: (k.slots >= 0).any(1) for k in record.carries if isinstance(k, Rows) and k.write_once}
        needed = dict.fromkeys(self.order, never)
        for node in reversed(self.order):
            found = [writes.get(node, never)]
            for user in node.users:
                if user in self.computed:
                    found.append(needed[user])
                elif not (node in writes and user in self.updates):
                    found.append(every)
            needed[node] = np.logical_or.reduce(found)
        return {node for node, found in needed.items() if 2 * found.sum() > record.length}

    def parts(self) -> list[tuple[set[fx.Node], list[fx.Node]]]:
        """What is computed together, and what of it others read; earlier parts first."""
        by_level: dict[int, list[fx.Node]] = {}
        for node in self.order:
            if node in self.after and self._is_small_end(node):
                by_level.setdefault(self.level[node], []).append(node)
        return [(self._behind(ends, level), ends) for level, ends in sorted(by_level.items())]

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether a node is computed by its operator, and differs from step to step."""
        if node.target is operator.getitem:
            return self._is_computed(operand(node))
        plain = isinstance(node.target, OpOverload) and node.target not in ATTENTIONS
        return plain and node in self.varying and node not in self.elsewhere

    def _takes_whole(self, user: fx.Node) -> bool:
        return user.op != "output" and user not in self.computed

    def _levels(self) -> tuple[dict[fx.Node, int], set[fx.Node]]:
        """How many parts come before each node; and what is made of large values in the same part.

        A carry comes after the parts that its update, or the row that is written, is made of at the steps before.
        """
        first: dict[fx.Node, int] = {}
        for _ in range(len(self.carries) + 1):
            level, after, of_large = self._levels_from(first)
            found = {c: level[u] + (u in of_large) for c, u in self.carries.items()}
            if found == first or not of_large:
                return level, after
            first = found
        raise Declined("its large values are computed from one another, step after step", next(iter(self.carries)))

    def _levels_from(self, first: dict[fx.Node, int]) -> tuple[dict[fx.Node, int], set[fx.Node], set[fx.Node]]:
        """The same, given how many parts come before each carry; and what any large value goes into."""
        level: dict[fx.Node, int] = {}
        after, of_large = set[fx.Node](), {c for c, n in first.items() if n > 0}
        for node in self.order:
            inputs = node.all_input_nodes
            level[node] = max(
                (level[n] + (n in after and self._ends_part(n)) for n in inputs), default=first.get(node, 0)
            )
            here = [n for n in inputs if n in after and level[n] == level[node] and not self._ends_part(n)]
            made_of_large = bool(here) or any(n in self.large for n in inputs)
            if node in self.large or (made_of_large and node in self.computed - self.whole):
                after.add(node)
            elif made_of_large:
                level[node] += 1
            if node in self.large or not of_large.isdisjoint(inputs):
                of_large.add(node)
        return level, after, of_large

    def _ends_part(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        is_integer = isinstance(value, Tensor) and not value.dtype.is_floating_point
        return is_integer and node not in self.large and not self._is_cut(node)

    def _is_cut(self, node: fx.Node) -> bool:
        """Whether only parts of what is made of a large value are read, as of the indices of a sort."""
        if not node.users or any(u.target is not aten.slice.Tensor or u not in self.computed for u in node.users):
            return False
        return self._reads_large(operand(node) if node.target is operator.getitem else node)

    def _reads_large(self, node: fx.Node) -> bool:
        return not self.large.isdisjoint(node.all_input_nodes)

    def _before(self) -> set[fx.Node]:
        """What is needed, in the same part, for a large value or for what is made of one."""
        found = set[fx.Node]()
        reads_large = {n for n in self.after if self._reads_large(n)}
        for node in reversed(self.order):
            same_part = [u for u in node.users if self.level[u] == self.level[node]]
            if node in self.computed and any(u in self.large or u in reads_large or u in found for u in same_part):
                found.add(node)
        return found

    def _is_small_end(self, node: fx.Node) -> bool:
        """Whether a small value is made of a part, and is read elsewhere."""
        if node in self.large or not isinstance(node.meta.get("val"), Tensor) or self._is_cut(node):
            return False
        if self._ends_part(node) or node not in self.before:
            return any(n in self.large or (n in self.after and self._leads_on(n)) for n in node.all_input_nodes)
        return any(u not in self.computed or self.level[u] != self.level[node] for u in node.users)

    def _behind(self, ends: Collection[fx.Node], level: int) -> set[fx.Node]:
        """Nodes, and what of the same part, and which large values, they are made of."""
        found, todo = set(ends), list(ends)
        while todo:
            inputs = todo.pop().all_input_nodes
            new = {n for n in inputs if n in self.large or self._is_inside(n, level)} - found
            found |= new
            todo += new
        return found

    def _is_inside(self, node: fx.Node, level: int) -> bool:
        return self.level[node] == level and node in self.after and self._leads_on(node)

    def _leads_on(self, node: fx.Node) -> bool:
        has_several = node in self.computed and not isinstance(node.meta.get("val"), Tensor)
        return node in self.before or self._is_cut(node) or (has_several and self._reads_large(node))


def _elements(node: fx.Node) -> int:
    value = node.meta.get("val")
    return sum(x.numel() for x in (value if isinstance(value, tuple | list) else [value]) if isinstance(x, Tensor))


def _in_tiles(plan: _Plan, record: ScanRecord, inside: set[fx.Node], yields: Sequence[fx.Node]) -> InTiles:
    inputs = {n for x in inside for n in x.all_input_nodes} - inside
    nodes, ordered = (tuple(sorted(x, key=plan.order.__getitem__)) for x in (inside, inputs))
    rows = tuple(n for n in ordered if n in plan.varying)
    same = tuple(n for n in ordered if n not in plan.varying)
    device = example(yields[0]).device
    # Each tile adds to the gradients of all that is the same for all: it should be no smaller than that.
    budget = max(_TILE_BYTES.get(device.type, _TILE_BYTES["cpu"]), max((bytes_of(n) for n in same), default=0))
    most = max(bytes_of(n) for n in nodes)
    size = min(record.length, max(_FEWEST, 2 ** ((budget // most).bit_length() - 1) if budget > most else 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(size, *example(n).shape, dtype=example(n).dtype, device=example(n).device) for n in rows]
        fakes.append(torch.empty(size, dtype=torch.int64, device=device))
    fakes += fake_inputs(list(same))

    def tile(*inputs: Tensor) -> list[Tensor]:
        found = _evaluated(nodes, yields, rows, same, record, inputs)
        # The backward pass of a loop would hand back zeros for what nobody asks for.
        return [x if n in plan.asked_for_gradients else x.detach() for n, x in zip(yields, found, strict=True)]

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
