"""Gradients that are zero, or none: a result has a gradient as compiled where it has one as captured.

What is known before the program runs takes part in no gradient: a write that a known predicate leaves out, a first
value of which no row is left, a tensor that is overwritten as a whole. Eager mode's result still has a gradient, of
zeros, and `backward()` may be called on it. The compiled result would have none, so it is tied to an input that has
one, by a choice that never takes it. A result that has none, such as a row that is read before it is written, is
detached.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from nsa_compile.ir.aten import aten, operand
from nsa_compile.ir.rewriting import NodeBuilder
from nsa_compile.ir.scans import ScanSite, example, place_of, results, scan_results

__all__ = ["has_gradient", "match_outputs", "match_results"]


def match_results(site: ScanSite, batched: fx.GraphModule) -> None:
    """Let those results of a batched scan have a gradient that had one as captured, in place."""
    known: dict[fx.Node, bool] = {}
    inputs = [*site.init, *site.xs, *site.additional]
    given = zip(batched.graph.find_nodes(op="placeholder"), inputs, strict=True)
    captured = [x.requires_grad for x in scan_results(site.node)]
    _match(batched, {i: captured[i] for i in sorted(site.read)}, {p: _has_gradient(n, known) for p, n in given})


def match_outputs(gm: fx.GraphModule, captured: Mapping[int, bool]) -> None:
    """Let those outputs of a graph have a gradient that had one as captured, in place."""
    _match(gm, captured, {})


def _match(gm: fx.GraphModule, captured: Mapping[int, bool], known: dict[fx.Node, bool]) -> None:
    if not torch.is_grad_enabled():
        return
    output, values = gm.graph.output_node(), results(gm)
    now = {i: _has_gradient(values[i], known) for i in captured if _differentiable(values[i])}
    for i, has in now.items():
        if has and not captured[i]:
            values[i] = NodeBuilder(gm, output)(aten.detach.default, values[i])
    _tie(gm, values, [i for i, has in now.items() if captured[i] and not has], known)
    output.args = (values,)
    gm.recompile()


def _tie(gm: fx.GraphModule, values: list[Any], places: Sequence[int], known: dict[fx.Node, bool]) -> None:
    inputs = (p for p in gm.graph.find_nodes(op="placeholder") if _has_gradient(p, known) and _differentiable(p))
    if not places or (anchor := next(inputs, None)) is None:
        return
    build = NodeBuilder(gm, gm.graph.output_node())
    never = build(aten.full.default, [], False, dtype=torch.bool, device=example(anchor).device)
    total = build(aten.sum.default, anchor)
    for i in places:
        like = example(values[i])
        tie = build(aten._to_copy.default, total, dtype=like.dtype, device=like.device)
        values[i] = build(aten.where.self, never, tie, values[i])


def _has_gradient(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a node has a gradient: of an ATen operator, that an operand has one; else what Dynamo has seen of it."""
    todo = [node]
    while todo:
        n = todo[-1]
        computed = isinstance(n.target, OpOverload) or (n.target is operator.getitem and not _is_captured(n))
        missing = [m for m in n.all_input_nodes if m not in known] if computed else []
        if n not in known and missing:
            todo += missing
            continue
        if n not in known:
            passes_on = n.target is not aten.detach.default and _differentiable(n)
            known[n] = passes_on and any(known[m] for m in n.all_input_nodes) if computed else has_gradient(n)
        todo.pop()
    return known[node]


def has_gradient(node: fx.Node) -> bool:
    """Whether a captured node has a gradient."""
    captured = _is_captured(node)
    value = scan_results(operand(node))[place_of(node)] if captured else node.meta.get("example_value")
    return isinstance(value, Tensor) and value.requires_grad


def _is_captured(node: fx.Node) -> bool:
    """One of the results of a scan, or of a region."""
    return node.target is operator.getitem and isinstance(operand(node).target, HigherOrderOperator)


def _differentiable(node: Any) -> bool:
    values: Any = node.meta.get("val", node.meta.get("example_value")) if isinstance(node, fx.Node) else None
    found: Sequence[Any] = values if isinstance(values, (tuple, list)) else [values]
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in found)
