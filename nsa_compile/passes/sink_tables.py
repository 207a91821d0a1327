"""sink_tables: a row of a table that is made of smaller tensors is computed in the step that reads it.

Before, the graph makes a table of all steps and all keys, such as a mask or a bias, and a scan takes its rows:

    bias = slopes[:, None, None] * (keys - steps[:, None])       # [H, S, S]
    scan(step, init, (q, k, v, bias.transpose(0, 1)))

After, the step gets what the table is made of, and the passes that follow see what they see in a step that was written
so:

    scan(step, init, (q, k, v, steps))                           # in the step: slopes[:, None] * (keys - t)

Which tables, and how a row is made, is in `analyses/table_rows.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from nsa_compile import modes
from nsa_compile.analyses.table_rows import SMALLER, Part, TableRows
from nsa_compile.ir.aten import aten, is_inexact, operand
from nsa_compile.ir.lowering import lower_graph
from nsa_compile.ir.rewriting import KEPT, NodeBuilder, copied_body, copy_nodes, eliminate_dead_code
from nsa_compile.ir.scans import (
    WRITTEN,
    Declined,
    ScanSite,
    constant_value,
    declined_if_it_fails,
    example,
    find_scans,
    key_of_example,
    location,
    results,
)
from nsa_compile.passes.pipeline import PassContext, register
from nsa_compile.workarounds import blank

# Nodes of the captured graph that a table is followed through.
MOST_NODES = 64


@register("sink_tables")
def sink_tables(gm: fx.GraphModule, context: PassContext) -> bool:
    """Compute the rows of a table that is made of smaller tensors, as a mask [S, S], in the step that reads them."""
    changed = False
    for site in find_scans(gm):
        while context.may_rewrite():
            try:
                with declined_if_it_fails("its tables cannot be followed", site.node):
                    table = _find(site)
            except Declined as why:
                context.leave(why)
                break
            if table is None:
                break
            context.match(site.node.name, f"rows of the table at {location(table.captured)}")
            _sink(site, table, context)
            changed = True
    return changed


@dataclass
class _Table:
    """A table of which each step reads a row: how it is made, in ATen, of which captured nodes, and how a row is made.

    Attributes:
        captured: the table, outside of the step.
        read: the place in the body of the node that is its row.
        part: the table in the graph that makes it, and its dimension of one number for each step.
    """

    captured: fx.Node
    read: int
    graph: fx.GraphModule
    inputs: list[fx.Node]
    rows: TableRows
    part: Part

    @property
    def roots(self) -> list[Part]:
        order = {n: i for i, n in enumerate(self.graph.graph.nodes)}
        return sorted(self.rows.roots(self.part), key=lambda part: order[part[0]])

    def is_worth_it(self) -> bool:
        """Whether it is made of less, some of which differs from step to step."""
        size = sum(example(node).numel() for node, _ in self.roots)
        small = size * SMALLER <= example(self.captured).numel() and any(dim is not None for _, dim in self.roots)
        return small and self.part not in self.roots and self.rows.joins(self.part)


def _find(site: ScanSite) -> _Table | None:
    """A table of which a step reads a row, and can as well compute it."""
    has_autocast = any(on for _, _, on in modes.autocast_at(site.node)) or modes.sets_autocast(site.owner.graph.nodes)
    if site.length < 2 or has_autocast:
        return None
    without_gradients = _without_gradients(site.owner)
    for captured, dim, read in _rows_read(site):
        if example(captured).dim() < 2 or (made := _made_of(captured, site.length, without_gradients)) is None:
            continue
        try:
            graph = lower_graph(made[0])
        except Declined:
            continue
        first = next(n for n in graph.graph.nodes if n.op != "placeholder")
        steps = NodeBuilder(graph, first)(aten.arange.default, site.length, device=example(captured).device)
        place = list(site.body.graph.nodes).index(read)
        table = _Table(captured, place, graph, made[1], TableRows(steps), (results(graph)[0], dim))
        if table.is_worth_it():
            return table
    return None


def _rows_read(site: ScanSite) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """Tensors outside of a step, their dimension of steps, and the node of the step that is a row of one: what a scan
    takes rows of, and what its step picks a row of by its own number."""
    _, xs, additional = site.placeholders()
    yield from ((captured, 0, row) for captured, row in zip(site.xs, xs, strict=True))
    known = dict[fx.Node, Tensor | None]()
    numbers = [row for captured, row in zip(site.xs, xs, strict=True) if _counts_steps(constant_value(captured, known))]
    outside = dict(zip(additional, site.additional, strict=True))
    for node in site.body.graph.nodes:
        is_pick = node.target in ("index_select", torch.index_select, aten.index_select.default)
        if not is_pick or len(node.args) != 3 or node.kwargs:
            continue
        captured = outside.get(node.args[0])
        if captured is not None and example(captured).dim():
            dim = node.args[1] % example(captured).dim()
            if example(captured).shape[dim] == site.length and _is_one_of(node.args[2], numbers):
                yield captured, dim, node


def _counts_steps(value: Tensor | None) -> bool:
    # Under a default device that holds no numbers, nothing is known of them.
    if value is None or value.dim() != 1 or value.dtype != torch.int64 or value.device.type != "cpu":
        return False
    with unset_fake_temporarily():
        return torch.equal(value, torch.arange(len(value), device="cpu"))


def _is_one_of(index: Any, numbers: list[fx.Node]) -> bool:
    """Whether an index of one element is one of these, none of which is below 0."""
    while isinstance(index, fx.Node) and index not in numbers:
        if index.target is torch.where:  # a number below 0 counts from behind
            below, _, number = index.args
            if not isinstance(below, fx.Node) or below.target is not operator.lt or below.args != (number, 0):
                return False
            index = number
        elif index.target in ("reshape", "view", "long", "unsqueeze") or (
            index.target is operator.getitem and index.args[1] is None
        ):
            index = index.args[0]
        else:
            return False
    return isinstance(index, fx.Node)


def _without_gradients(owner: fx.GraphModule) -> set[fx.Node]:
    """What a captured graph computes under `no_grad`."""
    found, enabled = set[fx.Node](), True
    for node in owner.graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        elif not enabled:
            found.add(node)
    return found


def _made_of(
    table: fx.Node, length: int, without_gradients: set[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]] | None:
    """The part of a captured graph that makes a table of as many rows of something smaller, and what it reads; None if
    none does."""
    followed, inputs = set[fx.Node](), set[fx.Node]()
    todo, joined = [table], False
    while todo:
        node = todo.pop()
        if node in followed or node in inputs:
            continue
        is_small = node is not table and example(node).numel() * length <= example(table).numel()
        if is_small or node in without_gradients or not _is_function(node) or len(followed) == MOST_NODES:
            if example(node).numel() * SMALLER > example(table).numel():
                return None  # nothing smaller makes it
            inputs.add(node)
            continue
        followed.add(node)
        todo += node.all_input_nodes
        joined |= example(node).numel() >= SMALLER * max((example(x).numel() for x in node.all_input_nodes), default=1)
    if not joined:
        return None
    order = [n for n in table.graph.nodes if n in inputs or n in followed]
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in (n for n in order if n in inputs):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in (n for n in order if n in followed):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[table]])
    return fx.GraphModule({}, graph), [n for n in order if n in inputs]


def _is_function(node: fx.Node) -> bool:
    """Whether a captured node makes a tensor of tensors, and does nothing else."""
    values = [n.meta.get(key_of_example(n)) for n in (node, *node.all_input_nodes)]
    return (
        node.op in ("call_function", "call_method")
        and not isinstance(node.target, HigherOrderOperator)
        and not node.is_impure()
        and KEPT not in node.meta
        and WRITTEN not in node.meta
        and all(isinstance(x, Tensor) for x in values)
    )


def _sink(site: ScanSite, table: _Table, context: PassContext) -> None:
    """Let a scan take what a table is made of, and its step compute the rows."""
    scan, owner = site.node, site.owner
    body = copied_body(site.body)
    read = list(body.graph.nodes)[table.read]
    roots = [part for dim in (True, False) for part in table.roots if (part[1] is not None) == dim]
    output = table.graph.graph.output_node()
    build = NodeBuilder(table.graph, output)
    output.args = ([_steps_first(build, *part) for part in roots],)
    _mark_gradients(table)
    outside = copy_nodes(owner, scan, table.graph, table.inputs)

    inputs = body.graph.find_nodes(op="placeholder")
    given = dict(zip(inputs, [*site.init, *site.xs, *site.additional], strict=True))
    own = [part for part in roots if part[1] is not None]
    last_row = inputs[len(site.init) + len(site.xs) - 1]
    rows = _add_inputs(body, last_row, [_row(x) for x in outside[: len(own)]])
    whole = [blank(example(x), requires_grad=example(x).requires_grad) for x in outside[len(own) :]]
    others = _add_inputs(body, body.graph.find_nodes(op="placeholder")[-1], whole)
    given |= dict(zip([*rows, *others], outside, strict=True))

    build = NodeBuilder(body, next(n for n in body.graph.nodes if n.op != "placeholder"))
    # A step is a dimension, as in the table.
    rows = [build(aten.unsqueeze.default, row, part[1]) for row, part in zip(rows, own, strict=True)]
    row = table.rows.make(table.part, build, dict(zip(roots, [*rows, *others], strict=True)))
    read.replace_all_uses_with(build(aten.squeeze.dim, row, 0) if read.op == "placeholder" else row)
    unused = [read] if read.op == "placeholder" else [read, operand(read)]
    for node in unused:
        if not node.users:
            body.graph.erase_node(node)
    body.recompile()

    with owner.graph.inserting_before(scan):
        called = owner.graph.get_attr(context.add_module(owner, f"{operand(scan).target}_sunk", body))
    called.meta = dict(operand(scan).meta)
    taken = [given[n] for n in body.graph.find_nodes(op="placeholder")]
    a, b = len(site.init), len(site.init) + len(site.xs) + len(own) - (read.op == "placeholder")
    scan.args = (called, taken[:a], taken[a:b], taken[b:])
    eliminate_dead_code(owner)


def _steps_first(build: NodeBuilder, node: fx.Node, dim: int | None) -> fx.Node:
    if not dim:
        return node
    order = [dim, *(d for d in range(example(node).dim()) if d != dim)]
    return build(aten.permute.default, node, order)


def _mark_gradients(table: _Table) -> None:
    """Say of what a table is made of whether it has gradients: traced below autograd, it knows nothing of that."""
    captured = iter(table.inputs)
    has_gradient = dict[fx.Node, bool]()
    for node in table.graph.graph.nodes:
        if node.op == "placeholder":
            has_gradient[node] = example(next(captured)).requires_grad and example(table.captured).requires_grad
        elif node.op != "output":
            value = example(node)
            flows = is_inexact(value.dtype) and node.target is not aten.detach.default
            has_gradient[node] = flows and any(has_gradient[n] for n in node.all_input_nodes)
            node.meta["example_value"] = blank(value, requires_grad=has_gradient[node])


def _row(x: fx.Node) -> Tensor:
    value = example(x)
    return blank(value, value.shape[1:], requires_grad=value.requires_grad)


def _add_inputs(body: fx.GraphModule, after: fx.Node, values: list[Tensor]) -> list[fx.Node]:
    """New inputs of a body, behind another one."""
    mode = next(x.fake_mode for n in body.graph.nodes if isinstance(x := n.meta.get(key_of_example(n)), FakeTensor))
    added = []
    for value in values:
        with body.graph.inserting_after(after):
            after = body.graph.placeholder("of_table")
            after.target = after.name
        with mode:
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
        after.meta["val"] = empty.requires_grad_(value.requires_grad)
        added.append(after)
    return added
