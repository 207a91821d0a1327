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
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator, OpOverload

from nsa_compile.ir.aten import aten, is_inexact, operand
from nsa_compile.ir.inner_loops import INNER_LOOP, body_of_inner_loop
from nsa_compile.ir.rewriting import NodeBuilder
from nsa_compile.ir.scans import ScanSite, example, place_of, results, scan_results
from nsa_compile.workarounds import blank

__all__ = ["asked_for_gradients", "has_gradient", "mark_results", "match_outputs", "match_results"]


def match_results(site: ScanSite, batched: fx.GraphModule) -> None:
    """Let those results of a batched scan have a gradient that had one as captured, and hand it, be it of zeros, to the
    inputs that a loop hands it to, in place."""
    known: dict[fx.Node, bool] = {}
    inputs = [*site.init, *site.xs, *site.additional]
    placeholders = batched.graph.find_nodes(op="placeholder")
    captured = [x.requires_grad for x in scan_results(site.node)]
    flags = {p: _has_gradient(n, known) for p, n in zip(placeholders, inputs, strict=True)}
    hears = _inputs_that_hear_of(site)
    lost = {
        i: [p for j, p in enumerate(placeholders) if flags[p] and j in hears[i]]
        for i in sorted(site.read)
        if captured[i]
    }
    _match(batched, {i: captured[i] for i in sorted(site.read)}, flags, lost)


def mark_results(site: ScanSite) -> None:
    """Say of the results of a scan that no program was captured with whether they have gradients, in place."""
    known: dict[fx.Node, bool] = {}
    flags = [_has_gradient(n, known) for n in (*site.init, *site.xs, *site.additional)]
    site.node.meta["example_value"] = tuple(
        blank(x, requires_grad=is_inexact(x.dtype) and any(flags[j] for j in heard))
        for x, heard in zip(scan_results(site.node), _inputs_that_hear_of(site), strict=True)
    )


def _inputs_that_hear_of(site: ScanSite) -> list[set[int]]:
    """For each result of a scan, the inputs (carries, xs, additional in turn) to which its gradient goes."""
    return _heard_in_loop(site.body, len(site.init), site.length)


def _heard_in_loop(body: fx.GraphModule, n: int, length: int) -> list[set[int]]:
    """The same of a loop of so many carries and steps."""
    read = [_heard_by(x) if isinstance(x, fx.Node) else set() for x in results(body)]
    places = {p: j for j, p in enumerate(body.graph.find_nodes(op="placeholder"))}
    of_step = [{places[p] for p in nodes} for nodes in read]
    carries, ys = [{i} for i in range(n)], [set[int]() for _ in of_step[n:]]
    for _ in range(length):
        now = [set[int]().union(*(carries[j] if j < n else {j} for j in heard)) for heard in of_step]
        ys = [a | b for a, b in zip(ys, now[n:], strict=True)]
        carries, before = now[:n], carries
        if carries == before:
            break
    return [*carries, *ys]


def _heard_by(node: fx.Node) -> set[fx.Node]:
    """The placeholders of a graph of ATen operators that the gradient of a node goes to."""
    found, todo = set[fx.Node](), [node]
    while todo:
        n = todo.pop()
        if n not in found and _differentiable(n) and not _ends_gradients(n):
            found.add(n)
            todo += _sources(n)
    return {n for n in found if n.op == "placeholder"}


def _sources(node: fx.Node) -> list[fx.Node]:
    """What a node is computed from: of a result of a loop, not all that the loop reads."""
    if node.target is not operator.getitem or operand(node).target is not INNER_LOOP:
        return node.all_input_nodes
    init, xs, additional, key = cast(Any, operand(node).args)
    heard = _heard_in_loop(body_of_inner_loop(key), len(init), example(xs[0]).shape[0])[place_of(node)]
    inputs = [*init, *xs, *additional]
    return [inputs[j] for j in sorted(heard)]


def _ends_gradients(node: fx.Node) -> bool:
    """Whether an operator reads a tensor for its shape and dtype alone, or detaches it."""
    name = node.target._opname if isinstance(node.target, OpOverload) else ""
    return name == "detach" or name.startswith("new_") or name.endswith("_like")


def asked_for_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of a graph of ATen operators that a gradient of its outputs reaches."""
    found = set[fx.Node]()
    for node in reversed(graph.nodes):
        passes_on = any(u.op == "output" or (u in found and not _ends_gradients(u)) for u in node.users)
        if passes_on and (node.op != "call_function" or _differentiable(node)):
            found.add(node)
    return found


def match_outputs(gm: fx.GraphModule, captured: Mapping[int, bool]) -> None:
    """Let those outputs of a graph have a gradient that had one as captured, in place."""
    _match(gm, captured, {}, {})


def _match(
    gm: fx.GraphModule,
    captured: Mapping[int, bool],
    known: dict[fx.Node, bool],
    hears: Mapping[int, Sequence[fx.Node]],
) -> None:
    """`hears`: the inputs that a result's gradient goes to."""
    if not torch.is_grad_enabled():
        return
    output, values = gm.graph.output_node(), results(gm)
    now = {i: _has_gradient(values[i], known) for i in captured if _differentiable(values[i])}
    for i, has in now.items():
        if has and not captured[i]:
            values[i] = NodeBuilder(gm, output)(aten.detach.default, values[i])
    inputs = (p for p in gm.graph.find_nodes(op="placeholder") if _has_gradient(p, known) and _differentiable(p))
    anchor = next(inputs, None)
    for i, has in now.items():
        heard = _heard_by(values[i])
        missing = [p for p in hears.get(i, ()) if p not in heard]
        if captured[i] and not has and not missing and anchor is not None:
            missing = [anchor]
        for p in missing:
            values[i] = _tied(gm, values[i], p)
    output.args = (values,)
    gm.recompile()


def _tied(gm: fx.GraphModule, value: fx.Node, anchor: fx.Node) -> fx.Node:
    """A value whose gradient goes to an input, too, and is of zeros there."""
    build, like = NodeBuilder(gm, gm.graph.output_node()), example(value)
    never = build(aten.full.default, [], False, dtype=torch.bool, device=like.device)
    tie = build(aten._to_copy.default, build(aten.sum.default, anchor), dtype=like.dtype, device=like.device)
    return build(aten.where.self, never, tie, value)


def _has_gradient(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a node has a gradient: of an ATen operator, that an operand has one; else what Dynamo has seen of it."""
    todo = [node]
    while todo:
        n = todo[-1]
        computed = isinstance(n.target, OpOverload) or (n.target is operator.getitem and not _is_captured(n))
        sources = _sources(n) if computed else []
        missing = [m for m in sources if m not in known]
        if n not in known and missing:
            todo += missing
            continue
        if n not in known:
            passes_on = not _ends_gradients(n) and _differentiable(n)
            known[n] = passes_on and any(known[m] for m in sources) if computed else has_gradient(n)
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
    return any(isinstance(x, Tensor) and is_inexact(x.dtype) for x in found)
