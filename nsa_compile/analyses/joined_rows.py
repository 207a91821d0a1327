"""A carry whose rows have two numbers becomes one whose rows are numbered through.

    K[t // B, t % B] = k    of a carry `[P, B, D]`    ->    a carry `[P * B, D]` of which step t writes row t

A cache in pages or blocks is a cache like any other then; what a step reads of it, it reads of a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from nsa_compile.analyses.row_writes import is_known_row
from nsa_compile.ir.aten import arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder, eliminate_dead_code
from nsa_compile.ir.scans import ScanRecord, ScanSite, example, key_of_example, place_of, results, scan_results

__all__ = ["join_rows"]


def join_rows(site: ScanSite, record: ScanRecord) -> bool:
    """Join the two dimensions of rows of each carry that has such, in a scan and its body; whether there were any."""
    changed = False
    for place in range(len(site.init)):
        carry, update = site.placeholders()[0][place], site.outputs()[0][place]
        found = _writes_of(carry, update, record)
        if found is not None:
            _join_in_body(site.body, place, carry, found)
            _join_in_scan(site, place, found)
            changed = True
    return changed


@dataclass(frozen=True)
class _Joined:
    """The writes to a carry, the first one first, each to rows of dimensions `dim` and the next."""

    dim: int
    shape: tuple[int, ...]  # of the carry
    writes: tuple[fx.Node, ...]

    @property
    def joined(self) -> list[int]:
        """The shape with one dimension for the two."""
        rows = self.shape[self.dim] * self.shape[self.dim + 1]
        return [*self.shape[: self.dim], rows, *self.shape[self.dim + 2 :]]

    def of(self, x: Tensor) -> Tensor:
        """A stand-in of that shape, with a gradient where the tensor has one."""
        joined = x.detach().reshape(self.joined).clone(memory_format=torch.contiguous_format)
        return joined.requires_grad_(x.requires_grad)


def _writes_of(carry: fx.Node, update: fx.Node, record: ScanRecord) -> _Joined | None:
    """The writes that make the update of a carry, if these are all at two known numbers, of neighbouring dimensions."""
    writes: list[fx.Node] = []
    node, dims = _uncopied(update), set[int]()
    while node is not carry:
        if node.target is not aten.index_put.default:
            return None
        put: Any = arguments(node)
        numbered = [dim for dim, index in enumerate(put.indices) if index is not None]
        if put.accumulate or len(numbered) != 2 or numbered[1] != numbered[0] + 1:
            return None
        if not all(is_known_row(put.indices[dim], example(node).shape[dim], record) for dim in numbered):
            return None
        dims.add(numbered[0])
        writes.insert(0, node)
        node = _uncopied(put.self)
    if len(dims) != 1:
        return None
    return _Joined(dims.pop(), tuple(example(carry).shape), tuple(writes))


def _uncopied(node: fx.Node) -> fx.Node:
    while node.target is aten.clone.default:
        node = operand(node)
    return node


def _join_in_body(body: fx.GraphModule, place: int, carry: fx.Node, found: _Joined) -> None:
    """Let a body have the joined carry, write to it, and read views of it."""
    with body.graph.inserting_before(carry):
        joined = body.graph.placeholder(f"{carry.name}_rows")
    joined.meta = {**carry.meta, key_of_example(carry): found.of(example(carry))}
    first = next(node for node in body.graph.nodes if node.op not in ("placeholder", "get_attr"))
    state, shape = joined, list(found.shape)
    carry.replace_all_uses_with(NodeBuilder(body, first)(aten.reshape.default, state, shape))
    for old in found.writes:
        build, put = NodeBuilder(body, old), cast(Any, arguments(old))
        page, row = put.indices[found.dim : found.dim + 2]
        number = build(aten.add.Tensor, build(aten.mul.Tensor, page, shape[found.dim + 1]), row)
        state = build(aten.index_put.default, state, [*put.indices[: found.dim], number], put.values)
        old.replace_all_uses_with(build(aten.reshape.default, state, shape))
    output = body.graph.output_node()
    copied = NodeBuilder(body, output)(aten.clone.default, state, memory_format=torch.contiguous_format)
    output.args = ([copied if i == place else x for i, x in enumerate(results(body))],)
    eliminate_dead_code(body)
    body.graph.erase_node(carry)
    body.recompile()


def _join_in_scan(site: ScanSite, place: int, found: _Joined) -> None:
    """Give a scan the joined carry to begin with, and its last one back in its own shape."""
    scan, init = site.node, site.init
    first = NodeBuilder(site.owner, scan)(aten.reshape.default, init[place], found.joined)
    del first.meta["val"]  # a builder's values have no gradient
    first.meta[key_of_example(init[place])] = found.of(example(init[place]))
    scan.update_arg(1, [first if i == place else x for i, x in enumerate(init)])
    values = scan_results(scan)
    scan.meta[key_of_example(scan)] = tuple(found.of(x) if i == place else x for i, x in enumerate(values))
    for user in list(scan.users):
        if place_of(user) == place:
            readers = list(user.users)
            with site.owner.graph.inserting_after(user):
                whole = site.owner.graph.call_function(aten.reshape.default, (user, list(found.shape)))
            whole.meta = dict(user.meta)
            user.meta = {**user.meta, key_of_example(user): found.of(example(user))}
            for reader in readers:
                reader.replace_input_with(user, whole)
    site.owner.recompile()
