"""Gradients that are zero: a batched scan asks for them where its loop does.

What is known before the program runs takes part in no gradient any more: a write that a known predicate leaves out, a
first value of which no row is left. The loop's result still has a gradient, of zeros, and `backward()` may be called on
it. The batched result would have none, so it is tied to an input that has one, by a choice that never takes it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from nsa_compile.ops.loop import LoopNotTraced
from nsa_compile.ops.loop.step import results_with_gradient
from nsa_compile.passes.attention_masks import NodeBuilder
from nsa_compile.passes.loops import layouts_of_step
from nsa_compile.passes.scans import ScanSite, aten, example

__all__ = ["ask_for_zero_gradients"]


def ask_for_zero_gradients(site: ScanSite, batched: fx.GraphModule) -> None:
    """Tie the results of a batched scan that have lost their gradient to an input, in place."""
    inputs = [*site.init, *site.xs, *site.additional]
    known: dict[fx.Node, bool] = {}
    wanted = [_has_gradient(n, known) for n in inputs]
    if not torch.is_grad_enabled() or not any(wanted):
        return
    placeholders = batched.graph.find_nodes(op="placeholder")
    output = batched.graph.output_node()
    results: list[fx.Node] = list(output.args[0])
    reached = dict(zip(placeholders, wanted, strict=True))
    without = [i for i, x in enumerate(results) if _differentiable(x) and not _has_gradient(x, reached)]
    lost = site.read.intersection(without)
    if lost:
        lost &= set(_of_the_loop(site, wanted))
    anchor = next((p for p, flag in zip(placeholders, wanted, strict=True) if flag and _differentiable(p)), None)
    if not lost or anchor is None:
        return
    build = NodeBuilder(batched, output)
    never = build(aten.full.default, [], False, dtype=torch.bool, device=example(anchor).device)
    total = build(aten.sum.default, anchor)
    for i in sorted(lost):
        tie = build(aten._to_copy.default, total, dtype=example(results[i]).dtype, device=example(results[i]).device)
        results[i] = build(aten.where.self, never, tie, results[i])
    output.args = (results,)
    batched.recompile()


def _has_gradient(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a node has a gradient: what Dynamo has seen of it, or, of what a pass has put there, that an operand has
    one."""
    todo = [node]
    while todo:
        n = todo[-1]
        put_there = isinstance(n.target, OpOverload) or n.target is operator.getitem
        missing = [m for m in n.all_input_nodes if m not in known] if put_there else []
        if n not in known and missing:
            todo += missing
            continue
        if n not in known:
            seen = isinstance(x := n.meta.get("example_value"), Tensor) and x.requires_grad
            passes_on = put_there and n.target is not aten.detach.default and _differentiable(n)
            known[n] = seen or (passes_on and any(known[m] for m in n.all_input_nodes))
        todo.pop()
    return known[node]


def _differentiable(node: fx.Node) -> bool:
    values: Any = node.meta.get("val", node.meta.get("example_value"))
    found: Sequence[Any] = values if isinstance(values, (tuple, list)) else [values]
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in found)


def _of_the_loop(site: ScanSite, wanted: Sequence[bool]) -> Sequence[int]:
    """The results that have a gradient in the loop; none, if that cannot be found out."""
    try:
        return results_with_gradient(site.body, layouts_of_step(site), len(site.init), site.length, wanted)
    except LoopNotTraced:
        return []
