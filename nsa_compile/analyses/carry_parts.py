"""A carry of several parts, each of which a step reads and writes by itself, becomes as many carries.

    cache[0, t] = k; cache[1, t] = v    of a carry `[2, S, D]`    ->    two carries `[S, D]`, a write to each

One tensor for the keys and values of all layers is a cache like any other then: what a layer writes may depend on what
another one has read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from nsa_compile.ir.aten import arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code
from nsa_compile.ir.scans import PART_NAMES, ScanSite, example, key_of_example, place_of, results, scan_results

__all__ = ["split_carries"]

# A carry of more parts is no cache of some layers: it would be as many carries.
MOST_PARTS = 64


@dataclass
class _Parts:
    """What a body does to the parts of a carry along a dimension.

    Attributes:
        dim: the dimension.
        of: nodes computed from the carry as a whole -> their parts: nodes, and places of the carry's own.
        made: other nodes that were put together of parts -> these.
        picked: nodes that are one part -> which.
    """

    dim: int
    of: dict[fx.Node, list[fx.Node | int]] = field(default_factory=dict)
    made: dict[fx.Node, list[fx.Node | int]] = field(default_factory=dict)
    picked: dict[fx.Node, fx.Node | int] = field(default_factory=dict)

    def known(self, node: Any) -> list[fx.Node | int] | None:
        return self.of.get(node, self.made.get(node))

    def part(self, x: fx.Node | int) -> fx.Node | int:
        while isinstance(x, fx.Node) and x in self.picked:
            x = self.picked[x]
        return x


def split_carries(site: ScanSite, body: fx.GraphModule) -> None:
    """Split the carries of a scan, and of its lowered body, while there are some to split."""
    place = 0
    while place < len(site.init):
        carry = body.graph.find_nodes(op="placeholder")[place]
        found = next(filter(None, (_parts_of(body, place, carry, dim) for dim in range(example(carry).dim()))), None)
        if found is None:
            place += 1
        else:
            _split_in_scan(site, place, found.dim, example(carry).shape[found.dim])
            _split_in_body(body, place, carry, found)


def _parts_of(body: fx.GraphModule, place: int, carry: fx.Node, dim: int) -> _Parts | None:
    """What a body does to a carry, if it does all of that part by part and moves none; None also where all stay."""
    size = example(carry).shape[dim]
    if not 1 < size <= MOST_PARTS or not any(_selects(user, dim) for user in carry.users):
        return None
    found = _Parts(dim, {carry: list(range(size))})
    for node in body.graph.nodes:
        if node.op == "call_function" and not _follows(node, found):
            return None
    returned = results(body)
    if any(x in found.of for i, x in enumerate(returned) if i != place):
        return None
    parts = [found.part(x) for x in found.known(returned[place]) or ()]
    return None if _moves(parts) or not any(isinstance(x, fx.Node) for x in parts) else found


def _moves(parts: list[fx.Node | int]) -> bool:
    """Whether a part takes the place of another one."""
    return any(isinstance(x, int) and x != i for i, x in enumerate(parts))


def _selects(node: fx.Node, dim: int) -> bool:
    return node.target is aten.select.int and arguments(node).dim % example(operand(node)).dim() == dim


def _follows(node: fx.Node, found: _Parts) -> bool:
    """Note the parts of a node; whether it does nothing to a carry but to its parts."""
    source, whole = operand(node), any(x in found.of for x in node.all_input_nodes)
    if node.target in (aten.unsqueeze.default, aten.stack.default) and not whole:
        if arguments(node).dim % example(node).dim() == found.dim:
            found.made[node] = [source] if isinstance(source, fx.Node) else list(cast(Any, source))
    elif node.target is aten.clone.default and (parts := found.known(source)) is not None:
        (found.of if whole else found.made)[node] = parts
    elif _selects(node, found.dim) and (parts := found.known(source)) is not None:
        found.picked[node] = parts[arguments(node).index]
    elif node.target is aten.slice_scatter.default and whole:
        written: Any = arguments(node)
        along = written.dim % example(source).dim() == found.dim and example(written.src).dtype == example(source).dtype
        if not along or source not in found.of or written.src not in found.made:
            return False
        found.of[node] = list(found.of[source])
        found.of[node][written.start : written.end : written.step] = found.made[written.src]
    else:
        return not whole
    return True


def _split_in_body(body: fx.GraphModule, place: int, carry: fx.Node, found: _Parts) -> None:
    """Give a body the parts of a carry in place of it."""
    parts = []
    for i in range(example(carry).shape[found.dim]):
        with body.graph.inserting_before(carry):
            part = body.graph.placeholder(f"{carry.name}_part_{i}")
        part.meta = {**carry.meta, key_of_example(carry): _part(example(carry), found.dim, i)}
        parts.append(part)

    def of(x: fx.Node | int) -> fx.Node:
        part = found.part(x)
        return parts[part] if isinstance(part, int) else part

    returned = results(body)
    updated = [of(x) for x in found.known(returned[place]) or ()]
    for node in found.picked:
        node.replace_all_uses_with(of(node))
    # A part that is returned as it came, or twice, is no view of another result.
    output = body.graph.output_node()
    build = NodeBuilder(body, output)
    copies = [build(aten.clone.default, x, memory_format=torch.contiguous_format) for x in updated]
    output.args = (_put(copies, place, returned),)
    eliminate_dead_code(body)
    body.graph.erase_node(carry)
    body.recompile()


def _put(parts: Sequence[Any], place: int, values: Sequence[Any]) -> list[Any]:
    """Values, of which one is parts now."""
    return [*values[:place], *parts, *values[place + 1 :]]


def _part(x: Tensor, dim: int, i: int) -> Tensor:
    """A stand-in for a part of a tensor, with a gradient where that has one."""
    part = x.detach().select(dim, i).clone(memory_format=torch.contiguous_format)
    return part.requires_grad_(x.requires_grad)


def _split_in_scan(site: ScanSite, place: int, dim: int, count: int) -> None:
    """Give a scan the parts of a carry to begin with, and put its results together."""
    scan, graph = site.node, site.owner.graph
    init, names = site.init, [site.name_of(i) for i in range(len(site.init))]
    build = NodeBuilder(site.owner, scan)
    parts = []
    for i in range(count):
        row = build(aten.select.int, init[place], dim, i)
        part = build(aten.clone.default, row, memory_format=torch.contiguous_format)
        for node in (row, part):  # a builder's values have no gradient
            del node.meta["val"]
            node.meta[key_of_example(init[place])] = _part(example(init[place]), dim, i)
        parts.append(part)
    values = scan_results(scan)
    scan.update_arg(1, _put(parts, place, init))
    scan.meta[PART_NAMES] = _put([f"{names[place]}[{i}]" for i in range(count)], place, names)
    scan.meta[key_of_example(scan)] = tuple(_put([_part(values[place], dim, i) for i in range(count)], place, values))
    for user in list(scan.users):
        if place_of(user) > place:
            user.update_arg(1, place_of(user) + count - 1)
        elif place_of(user) == place:
            with graph.inserting_before(user):
                items = [graph.call_function(operator.getitem, (scan, place + i)) for i in range(count)]
                whole = graph.call_function(torch.ops.aten.stack.default, (items, dim))
            for i, item in enumerate(items):
                item.meta = {**user.meta, key_of_example(user): _part(example(user), dim, i)}
            whole.meta = dict(user.meta)
            user.replace_all_uses_with(whole)
            graph.erase_node(user)
    site.owner.recompile()
