"""What Dynamo captured, with every size a number."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import _pytree as pytree

from nsa_compile.ir.scans import subgraphs

log = logging.getLogger("nsa_compile")

__all__ = ["specialize_shapes"]

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def specialize_shapes(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[Any]:
    """Fix symbolic sizes to those at hand, in place, and return the inputs with numbers for sizes.

    A cache's write times are evaluated at compile time, so a sequence of another length is another program. Reading a
    size as an int adds the guard by which another one compiles again.
    """
    symbolic = False
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        sizes = (*value.shape, *value.stride(), value.storage_offset()) if isinstance(value, Tensor) else (value,)
        for size in sizes:
            symbolic |= _number(size) is not size
    if symbolic:
        log.info("compiling for the sizes %s", [list(x.shape) for x in example_inputs if isinstance(x, Tensor)])
        with unset_fake_temporarily():
            mode = FakeTensorMode()
            for graph in subgraphs(gm):
                _put_numbers(graph, mode)
    return [_number(x) for x in example_inputs]


def _number(value: Any) -> Any:
    """A symbolic number as the one at hand; anything else as it is."""
    if isinstance(value, torch.SymBool):
        return bool(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    return int(value) if isinstance(value, torch.SymInt) else value


def _put_numbers(graph: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Replace the symbolic numbers that a graph and its steps compute, and those in the shapes of its nodes."""
    for node in list(graph.graph.nodes):
        value = node.meta.get("example_value")
        if isinstance(value, _SYMBOLIC):
            _replace(node, _number(value))
            if node.op != "placeholder":
                graph.graph.erase_node(node)
        elif value is not None:
            node.meta["example_value"] = pytree.tree_map(lambda x: _concrete(x, mode), value)
    for node in graph.graph.find_nodes(op="call_function", target=scan_op):
        body, init, xs, additional = node.args
        step = getattr(graph, body.target)
        _put_numbers(step, mode)
        # A number is no input of a step any more.
        inputs = step.graph.find_nodes(op="placeholder")[len(init) + len(xs) :]
        for given, value in zip(inputs, additional, strict=True):
            if not isinstance(value, fx.Node):
                _replace(given, value)
                step.graph.erase_node(given)
        node.update_arg(3, tuple(x for x in additional if isinstance(x, fx.Node)))
        step.recompile()
    graph.recompile()


def _replace(node: fx.Node, number: Any) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.node.map_arg((user.args, dict(user.kwargs)), lambda n: number if n is node else n)


def _concrete(value: Any, mode: FakeTensorMode) -> Any:
    if not isinstance(value, Tensor):
        return _number(value)
    shape, stride = (tuple(map(int, numbers)) for numbers in (value.shape, value.stride()))
    with mode:
        return torch.empty_strided(
            shape, stride, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
        )
