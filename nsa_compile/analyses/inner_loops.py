"""What of a step must be computed one step after another, and what need not.

The carries of a group that need each other are computed by a loop of their own, over the part of the step between them
and their updates. All else is batched: before it what it reads, after it what is made of its results. The loop yields
its values at each step, S rows of them, so it ends where these are small: an operator that reduces them (the readout of
a state that is a matrix) belongs into it, and so does one that enlarges what it reads (the outer product of two rows).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from nsa_compile.analyses.writes import needed_carries
from nsa_compile.ir.aten import COPIED, MATMUL, REARRANGED, operand
from nsa_compile.ir.carries import Invariant, Latest, Recurrent, Rows
from nsa_compile.ir.lowering import copy_outputs
from nsa_compile.ir.scans import Declined, ScanRecord, ScanSite, ancestors, example, results

# A value moves to the other side of the border of a loop where that makes the rows there this much smaller.
WORTH_IT = 2


@dataclass(frozen=True)
class InnerLoop:
    """The part of a step that computes the recurrent carries of a group.

    Attributes:
        group: the places of the carries.
        inputs: what it reads besides, computed for all steps before.
        yields: its values that are read outside, at each step.
        nodes: those it computes, in the order of the step.
    """

    group: tuple[int, ...]
    inputs: tuple[fx.Node, ...]
    yields: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]


def recurrent_groups(record: ScanRecord) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(kind.group for kind in record.carries if isinstance(kind, Recurrent)))


def find_inner_loop(site: ScanSite, record: ScanRecord, group: tuple[int, ...]) -> InnerLoop:
    """The loop that computes the carries of a group."""
    return _Border(site, record, group).drawn()


def leaves_something_outside(site: ScanSite, record: ScanRecord, loops: Sequence[InnerLoop]) -> bool:
    """Whether any work of a step is done outside of its loops."""
    inside = {n for loop in loops for n in loop.nodes}
    return any(
        n.op == "call_function"
        and n not in inside
        and n not in results(site.body)
        and n not in record.known
        and n not in record.constant
        and n.target not in REARRANGED | COPIED
        for n in site.body.graph.nodes
    )


class _Border:
    """Where the loop of a group begins and ends."""

    def __init__(self, site: ScanSite, record: ScanRecord, group: tuple[int, ...]) -> None:
        self.site, self.record, self.group = site, record, group
        self.order = {n: i for i, n in enumerate(site.body.graph.nodes)}
        self.carries, _, _ = site.placeholders()
        self.updates, ys = site.outputs()
        self.of_group = {self.carries[i] for i in group}
        self.buffers = {
            u for u, kind in zip(self.updates, record.carries, strict=True) if isinstance(kind, Rows)
        }  # which the batched body knows as a whole
        later = {u for u, kind in zip(self.updates, record.carries, strict=True) if isinstance(kind, Latest)}
        self.wanted = {*ys, *later}
        self.copies = set(results(site.body))
        self.dependent = self._dependent()
        needs = needed_carries(self.carries, self.updates, record.carries)
        self.after = {c for i, c in enumerate(self.carries) if i not in group and not needs[i].isdisjoint(group)}

    def drawn(self) -> InnerLoop:
        inside = self._with_what_reduces(self._needed_inside([self.updates[i] for i in self.group]))
        inputs, inside = self._without_what_enlarges(inside)
        nodes = sorted((n for n in inside if n.op == "call_function"), key=self.order.__getitem__)
        yields = sorted(self._crossing(inside & self.dependent), key=self.order.__getitem__)
        return InnerLoop(self.group, tuple(sorted(inputs, key=self.order.__getitem__)), tuple(yields), tuple(nodes))

    def _dependent(self) -> set[fx.Node]:
        """What depends on the carries of the group within a step."""
        found = set(self.of_group)
        for node in self.site.body.graph.nodes:
            if node.op == "call_function" and any(n in found for n in node.all_input_nodes):
                found.add(node)
        return found

    def _needed_inside(self, nodes: Collection[fx.Node]) -> set[fx.Node]:
        found = (ancestors(nodes) & self.dependent) | self.of_group
        items = (user for n in found if not isinstance(n.meta.get("val"), torch.Tensor) for user in n.users)
        return found | {item for item in items if item.target is operator.getitem}  # for what yields several tensors

    def _crossing(self, inside: Collection[fx.Node]) -> list[fx.Node]:
        """The values of a loop that are read outside of it."""
        return [
            n
            for n in inside
            if n in self.wanted or any(user not in inside and user not in self.copies for user in n.users)
        ]

    def _with_what_reduces(self, inside: set[fx.Node]) -> set[fx.Node]:
        """Take in what makes the rows that leave the loop smaller by far."""
        while True:
            now = sum(map(bytes_of, self._crossing(inside)))
            further = [inside | self._needed_inside([n]) for n in self.dependent - inside if self._may_enter(n)]
            costs = [sum(map(bytes_of, self._crossing(other))) for other in further]
            if not costs or min(costs) * WORTH_IT > now:
                return inside
            inside = further[costs.index(min(costs))]

    def _may_enter(self, node: fx.Node) -> bool:
        """Whether a node reduces what it reads, and reads no carry that this loop has to be computed for."""
        sources = [n for n in node.all_input_nodes if n in self.dependent]
        reduces = bytes_of(node) < max(map(bytes_of, sources), default=0)
        return reduces and node not in self.buffers and node not in self.copies and self._is_before(node)

    def _is_before(self, node: fx.Node) -> bool:
        return self.after.isdisjoint(ancestors([node]))

    def _without_what_enlarges(self, inside: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        """What the loop reads, and what it computes; small operands are read, rather than what they are spread to."""
        inside = set(inside)
        inputs = {x for n in inside if n.op == "call_function" for x in n.all_input_nodes} - inside
        varying = varying_nodes(self.site, self.record)
        while True:
            for node in inputs:
                operands = set(node.all_input_nodes) if self._is_cheap(node) else set()
                brought = sum(bytes_of(n) for n in operands - inputs if n in varying)
                if node in varying and operands and brought * WORTH_IT <= bytes_of(node):
                    inputs = (inputs - {node}) | operands
                    inside.add(node)
                    break
            else:
                return inputs, inside

    def _is_cheap(self, node: fx.Node) -> bool:
        """Whether an operator costs about as much as reading its result."""
        if node.op != "call_function" or node in self.buffers or not isinstance(node.target, OpOverload):
            return False
        outer = node.target in MATMUL and example(operand(node)).shape[-1] == 1
        return outer or torch.Tag.pointwise in node.target.tags or node.target in REARRANGED | COPIED


def varying_nodes(site: ScanSite, record: ScanRecord) -> set[fx.Node]:
    """The nodes of a step that differ from step to step."""
    carries, rows, _ = site.placeholders()
    updates, _ = site.outputs()
    found, buffers = set(rows), set[fx.Node]()
    for carry, update, kind in zip(carries, updates, record.carries, strict=True):
        if isinstance(kind, Rows):
            buffers.add(update)
            views = (carry, f"{carry.name}.before"), (update, carry.name)
            found |= {n for n, view in views if view not in record.guards_dropped}
        elif not isinstance(kind, Invariant):
            found.add(carry)
    for node in site.body.graph.nodes:
        if node.op == "call_function" and node not in buffers and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def bytes_of(node: fx.Node) -> int:
    """What a node's tensors take at one step."""
    values = node.meta.get("val", node.meta.get("example_value"))
    tensors = values if isinstance(values, tuple | list) else [values]
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def body_of(site: ScanSite, loop: InnerLoop, rows: Sequence[fx.Node], same: Sequence[fx.Node]) -> fx.GraphModule:
    """The step of an inner loop, `(carries, rows, same) -> (updates, yields)`.

    Raises:
        Declined: it yields what is no tensor.
    """
    carries, _, _ = site.placeholders()
    updates, _ = site.outputs()
    graph = fx.Graph(site.body)
    env: dict[fx.Node, fx.Node] = {}

    def take(nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            env[node] = graph.placeholder(node.name)
            env[node].meta = {"val": example(node)}

    take([*(carries[i] for i in loop.group), *rows])
    if not rows:  # the rows say how many steps there are
        graph.placeholder("step").meta = {"val": example(carries[0]).new_empty((), dtype=torch.int64)}
    take(same)
    for node in loop.nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    outputs = [*(updates[i] for i in loop.group), *loop.yields]
    for node in outputs:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise Declined("a value that leaves the recurrence is no tensor", node)
    graph.output([env[node] for node in outputs])
    body = fx.GraphModule(site.body, graph)
    copy_outputs(body)
    return body
