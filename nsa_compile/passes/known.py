"""Values the compiler knows before the program runs: what depends on the step index and on constants alone.

A *constant* node has one value for every step; a *known* node has one for each step, stored as `[S, ...]`. Masks,
slots and predicates of a cache are of this kind, so the passes need not guess at them: they evaluate them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.passes.scans import ScanRecord, ScanSite, constant_value, example, on_cpu

# Elements a known value may hold over all steps; a mask [S, S] of booleans fits up to S = 8192.
LIMIT = 2**26


def evaluate_known(site: ScanSite, record: ScanRecord) -> None:
    """Fill `record.known` and `record.constant` for the nodes of a lowered body."""
    cache: dict[fx.Node, Tensor | None] = {}
    _, xs, additional = site.placeholders()
    for placeholder, source in zip(additional, site.additional, strict=True):
        if (value := constant_value(source, cache)) is not None:
            record.constant[placeholder] = value
    for placeholder, source in zip(xs, site.xs, strict=True):
        if (value := constant_value(source, cache)) is not None:
            record.known[placeholder] = value
    with unset_fake_temporarily(), torch.no_grad():
        _simulate_carries(site, record, [constant_value(source, cache) for source in site.init])
        for node in site.body.graph.nodes:
            _evaluate(node, record)


def _evaluate(node: fx.Node, record: ScanRecord) -> None:
    if node.op != "call_function" or node in record.known or node in record.constant:
        return
    if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return
    operands = node.all_input_nodes
    if all(n in record.constant for n in operands):
        record.constant[node] = _call(node, record.constant)
        return
    known = all(n in record.constant or n in record.known for n in operands)
    if known and example(node).numel() * record.length <= LIMIT:
        record.known[node] = _call_each_step(node, record)


def _call(node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    return node.target(*args, **on_cpu(kwargs))


def _call_each_step(node: fx.Node, record: ScanRecord) -> Tensor:
    names = [n for n in node.all_input_nodes if n in record.known]

    def one_step(*values: Tensor) -> Tensor:
        return _call(node, {**record.constant, **dict(zip(names, values, strict=True))})

    rows = [record.known[n] for n in names]
    try:
        return torch.vmap(one_step)(*rows)
    except RuntimeError:  # no batching rule: the loop is slower and says the same
        return torch.stack([one_step(*(row[t] for row in rows)) for t in range(record.length)])


def _simulate_carries(site: ScanSite, record: ScanRecord, init: list[Tensor | None]) -> None:
    """Carries that are known at every step, such as a counter: run their part of the body, and only that.

    A carry belongs to them if its first value is known and its update needs nothing but known values; the largest
    such set is found by striking out carries until nothing changes.
    """
    carries, _, _ = site.placeholders()
    updates, _ = site.outputs()
    candidates = {
        i
        for i, value in enumerate(init)
        if value is not None and updates[i] is not carries[i] and value.numel() * record.length <= 2**16
    }
    while True:
        roots = {carries[i] for i in candidates} | record.known.keys() | record.constant.keys()
        failing = {i for i in candidates if not _depends_only_on(updates[i], roots)}
        if not failing:
            break
        candidates -= failing
    if not candidates:
        return
    needed: list[fx.Node] = []
    for node in site.body.graph.nodes:  # graph order is a valid evaluation order
        if node.op == "call_function" and any(_reaches(node, updates[i]) for i in candidates):
            needed.append(node)
    state = {carries[i]: init[i] for i in candidates}
    history: dict[fx.Node, list[Any]] = {carries[i]: [] for i in candidates}
    for t in range(record.length):
        env = dict(record.constant) | state | {n: value[t] for n, value in record.known.items()}
        for i in candidates:
            history[carries[i]].append(env[carries[i]])
        for node in needed:
            env[node] = _call(node, env)
        state = {carries[i]: env[updates[i]] for i in candidates}
    for i in candidates:
        record.known[carries[i]] = torch.stack(history[carries[i]])


def _depends_only_on(node: fx.Node, roots: set[fx.Node]) -> bool:
    if node in roots:
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return all(_depends_only_on(n, roots) for n in node.all_input_nodes)


def _reaches(node: fx.Node, target: fx.Node) -> bool:
    return node is target or any(_reaches(user, target) for user in node.users if user.op != "output")
