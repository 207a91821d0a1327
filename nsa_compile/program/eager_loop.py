"""A captured graph run as it was written: each scan a Python loop under autograd, operator after operator.

It shares nothing with the passes, nor with the operator that stands for a loop in a compiled program, so that both can
be judged by it.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from nsa_compile.ir.scans import find_scans

__all__ = ["EagerLoop", "Unchecked", "cost_of_step", "in_double", "used_results", "wide", "without_regions"]

# Elements that could be computed in the time that it takes to start an operator.
ELEMENTS_PER_CALL = 2**13
# A loop that keeps more elements than this for its gradients keeps the carries of some steps instead.
KEPT_ELEMENTS = 2**24

_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    **dict.fromkeys((torch.complex32, torch.complex64), torch.complex128),
}
_CASTS = ("float", "half", "bfloat16")
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


class Unchecked(Exception):
    """A program that cannot be compared with its loop, with the reason."""


def wide(value: Any) -> Any:
    """A tensor or a dtype in double precision; anything else as it is."""
    if isinstance(value, Tensor):
        return value.to(_WIDE.get(value.dtype, value.dtype))
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def in_double(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph that computes in double precision whatever it names another one for, and without autocast."""
    gm = copy.deepcopy(gm)
    for graph in (g for g in gm.modules() if isinstance(g, fx.GraphModule)):
        for node in graph.graph.nodes:
            if node.target is torch.amp.autocast_mode._enter_autocast:
                node.args = (*node.args[:2], False, *node.args[3:])
                continue
            node.args, node.kwargs = (fx.node.map_aggregate(x, wide) for x in (node.args, node.kwargs))
            if node.op == "call_method" and node.target in _CASTS:
                node.target = "double"
            if node.op == "get_attr" and isinstance(held := operator.attrgetter(node.target)(graph), Tensor):
                node.target = _attach(graph, f"{node.target}_double".replace(".", "_"), wide(held))
        graph.recompile()
    return gm


class EagerLoop(fx.Interpreter):
    """Runs a captured graph, with its scans as loops.

    Args:
        gm: the graph.
        steps: for scans of these names, how many steps the loop makes; the rows from there on are another's.
        rest: gives what such scans yield where somebody reads it, by name and place: its rows from there on, and its
            carries, are taken. Called at most once.

    Attributes:
        dtypes: floating dtypes that were computed in.
        steps_made: over all loops of the graph.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        steps: Mapping[str, int] | None = None,
        rest: Callable[[], Mapping[tuple[str, int], Tensor]] | None = None,
    ) -> None:
        super().__init__(gm)
        self.steps, self.rest = steps or {}, cache(rest or dict)
        self.dtypes: set[torch.dtype] = set()
        self.steps_made = 0

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        result = super().run_node(n)
        for x in pytree.tree_leaves(result) if n.op.startswith("call") else ():
            if isinstance(x, Tensor) and x.dtype.is_floating_point:
                self.dtypes.add(x.dtype)
        return result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is scan_op:
            return self._scan(*args)
        if target is _CHECKPOINT:
            return self._inner(args[0]).run(*args[1:])
        bodies = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, fx.GraphModule)]
        if isinstance(target, HigherOrderOperator) and any(map(find_scans, bodies)):
            raise Unchecked(f"a scan lies within the higher-order operator {target}")
        return super().call_function(target, args, kwargs)

    def _inner(self, body: fx.GraphModule) -> EagerLoop:
        inner = EagerLoop(body)
        inner.dtypes = self.dtypes
        return inner

    def _scan(self, body: fx.GraphModule, init: Any, xs: Any, additional: Any) -> list[Any]:
        name, length = self.node.name, int(xs[0].shape[0])
        steps = min(self.steps.get(name, length), length)
        self.steps_made += steps
        carry, rows = self._loop(body, list(init), [x[:steps] for x in xs], list(additional), steps)
        if steps == length:
            return [*carry, *rows]
        rest = [self.rest().get((name, i)) for i in range(len(carry) + len(rows))]
        ys = zip(rows, rest[len(carry) :], strict=True)
        return [*rest[: len(carry)], *(None if y is None else torch.cat([head, y[steps:].to(head)]) for head, y in ys)]

    def _loop(
        self, body: fx.GraphModule, carry: list[Tensor], xs: list[Tensor], additional: list[Tensor], steps: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The carry after the last step, and the rows of each further result."""
        n = len(carry)
        calls_others = any(isinstance(node.target, HigherOrderOperator) for node in body.graph.nodes)

        def part(start: int, stop: int, carry: Sequence[Tensor]) -> tuple[list[Tensor], list[list[Tensor]]]:
            rows = []
            for t in range(start, stop):
                # The graph's own code is faster; the first step tells the dtypes.
                run = self._inner(body).run if calls_others or t == 0 else body
                results = list(run(*carry, *[x[t] for x in xs], *additional))
                carry = results[:n]
                rows.append(results[n:])
            return list(carry), rows

        # What all steps keep for their gradients may be much more than the memory there is.
        keeps_all = not torch.is_grad_enabled() or steps * cost_of_step(body, calls=0) <= KEPT_ELEMENTS
        size = steps if keeps_all else math.isqrt(steps)
        rows: list[list[Tensor]] = []
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            if keeps_all:
                carry, more = part(start, stop, carry)
            else:
                carry, more = checkpoint(part, start, stop, carry, use_reentrant=False)
            rows += more
        return carry, [torch.stack(column) for column in zip(*rows, strict=True)]


def used_results(scan: fx.Node) -> dict[int, fx.Node] | None:
    """The places of a scan's results that somebody reads, each with a node that takes it out; None where they are read
    in another way."""
    if any(user.target is not operator.getitem for user in scan.users):
        return None
    return {int(user.args[1]): user for user in scan.users}  # pyrefly: ignore[bad-argument-type]


def cost_of_step(body: fx.GraphModule, calls: int = ELEMENTS_PER_CALL) -> int:
    """Elements that one step computes; `calls` more for each operator."""
    cost = 0
    for node in body.graph.nodes:
        if node.op.startswith("call"):
            values = pytree.tree_leaves(node.meta.get("example_value"))
            cost += calls + sum(x.numel() for x in values if isinstance(x, Tensor))
    return cost + sum(site.length * cost_of_step(site.body, calls) for site in find_scans(body))


def without_regions(gm: fx.GraphModule) -> None:
    """Put what a graph computes in checkpointed regions into the graph itself, in place."""
    while regions := gm.graph.find_nodes(op="call_function", target=_CHECKPOINT):
        for node in regions:
            body = getattr(gm, node.args[0].target)
            placeholders = body.graph.find_nodes(op="placeholder")
            given: dict[fx.Node, Any] = dict(zip(placeholders, node.args[1:], strict=True))
            for held in body.graph.find_nodes(op="get_attr"):
                held_name = _attach(gm, held.target, getattr(body, held.target))
                with gm.graph.inserting_before(node):
                    given[held] = gm.graph.get_attr(held_name)
            with gm.graph.inserting_before(node):
                results = gm.graph.graph_copy(body.graph, given)
            for user in list(node.users):
                user.replace_all_uses_with(results[user.args[1]])  # pyrefly: ignore[bad-index, unsupported-operation]
                gm.graph.erase_node(user)
            gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


def _attach(gm: fx.GraphModule, name: str, held: Any) -> str:
    free, i = name, 0
    while hasattr(gm, free):
        i += 1
        free = f"{name}_{i}"
    setattr(gm, free, held)
    return free
