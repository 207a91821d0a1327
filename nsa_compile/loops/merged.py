"""The ways of a loop laid side by side: one program whose operators run at known steps.

Two ways run mostly the same operators at the same places of the program. Where they do, there is one node for both;
its operands may come from different nodes, and its integers are other expressions, at the steps of each way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa_compile.loops.numbers import Number
from nsa_compile.loops.paths import Exploration
from nsa_compile.loops.state import Path
from nsa_compile.loops.trace import Op, Ref, TensorType, Trace


@dataclass(eq=False)
class Node:
    """An operator at the steps of some ways: what each of these gave it."""

    func: Any
    ops: dict[int, Op] = field(default_factory=dict)  # by way

    @property
    def any(self) -> Op:
        return next(iter(self.ops.values()))


@dataclass(frozen=True)
class Source:
    """Where a tensor comes from: a leaf of the state, a tensor from outside, or a result of a node."""

    of: Any  # ("state", path, type), ("outside", index), ("literal", …) or a Node
    place: int = 0


@dataclass
class Merged:
    """All ways of a loop as one program."""

    exploration: Exploration
    nodes: list[Node]
    sources: list[dict[Ref, Source]]  # by way
    outside: list[Tensor]

    def source(self, way: int, ref: Ref) -> Source:
        return self.sources[way][ref]

    def trace(self, way: int) -> Trace:
        return self.exploration.ways[way].trace


def merge(exploration: Exploration) -> Merged:
    """Lay the ways of a loop side by side, beginning with the one that most steps take."""
    outside: list[Tensor] = []
    number_of: dict[int, int] = {}
    nodes: list[Node] = []
    sources: list[dict[Ref, Source]] = []
    for number, way in enumerate(exploration.ways):
        trace = way.trace
        found: dict[Ref, Source] = {}
        for path, ref in trace.state.items():
            found[ref] = Source(("state", path, trace.types[ref]))
        for ref, x in trace.outside.items():
            if ref in trace.literals:
                found[ref] = Source(("literal", x.dtype, tuple(x.shape), tuple(x.flatten().tolist())))
                continue
            if id(x) not in number_of:
                number_of[id(x)] = len(outside)
                outside.append(x)
            found[ref] = Source(("outside", number_of[id(x)]))
        sources.append(found)
        ops, _ = needed_for(trace, trace.results, begins=lambda _: False)
        nodes = _laid_beside(nodes, number, [op for op in ops if not _is_copy(op)], trace, exploration)
        for node in nodes:
            if number in node.ops:
                for place, ref in enumerate(node.ops[number].outs):
                    found.setdefault(ref, Source(node, place))
        for op in filter(_is_copy, ops):
            found.setdefault(op.outs[0], found[op.args[0]])
    return Merged(exploration, nodes, sources, outside)


def refs_of(value: Any) -> Iterator[Ref]:
    """The tensors among arguments."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, list | tuple):
        for x in value:
            yield from refs_of(x)
    elif isinstance(value, dict):
        for x in value.values():
            yield from refs_of(x)


def needed_for(trace: Trace, paths: Iterable[Path], begins: Callable[[Op], bool]) -> tuple[list[Op], set[Ref]]:
    """What the results of a step at some paths need, and what it appends: operators, and tensors, back to operators
    that begin a tensor anew."""
    needed = {ref for path in paths if isinstance(ref := trace.results.get(path), Ref)}
    needed |= {ref for items in trace.appended.values() for ref in items}
    ops = []
    for op in reversed(trace.ops):
        if needed & set(op.outs):
            ops.append(op)
            needed |= set() if begins(op) else set(refs_of([op.args, op.kwargs]))
    return ops[::-1], needed


def _is_copy(op: Op) -> bool:
    """Whether it is a copy, which one way makes where strides ask for it and another one does not."""
    return op.func is torch.ops.aten.clone.default and not op.no_grad


def _key(op: Op) -> Any:
    """Where in the program an operator runs; which of the views that a shape is changed by depends on strides."""
    name, place = op.key
    return ("view" if op.func in _VIEWS else name), place


_VIEWS = {torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default}


def _laid_beside(nodes: list[Node], way: int, ops: list[Op], trace: Trace, exploration: Exploration) -> list[Node]:
    """Join the operators of one more way to the nodes so far, in the order of both."""
    keyed = {}
    for at, node in enumerate(_numbered(_key(n.any) for n in nodes)):
        keyed[node] = at
    pairs: list[tuple[int, int]] = []
    last = -1
    for j, key in enumerate(_numbered(map(_key, ops))):
        at = keyed.get(key, -1)
        if at > last and _fit(nodes[at], ops[j], trace, exploration):
            pairs.append((at, j))
            last = at
    joined: list[Node] = []
    i = j = 0
    for at, k in [*pairs, (len(nodes), len(ops))]:
        joined += nodes[i:at]
        joined += [Node(op.func, {way: op}) for op in ops[j:k]]
        if at < len(nodes):
            nodes[at].ops[way] = ops[k]
            joined.append(nodes[at])
        i, j = at + 1, k + 1
    return joined


def _numbered(keys: Any) -> Iterator[Any]:
    """Each key with how often it has come before."""
    times: dict[Any, int] = {}
    for key in keys:
        times[key] = times.get(key, -1) + 1
        yield key, times[key]


def _fit(node: Node, op: Op, trace: Trace, exploration: Exploration) -> bool:
    """Whether an operator of another way can share a node."""
    first, other = node.any, exploration.ways[next(iter(node.ops))].trace
    if len(first.outs) != len(op.outs) or first.no_grad != op.no_grad:
        return False
    types = all(_same_type(other.types[a], trace.types[b]) for a, b in zip(first.outs, op.outs, strict=True))
    return types and _same_form(first.args, op.args, other, trace) and _same_form(first.kwargs, op.kwargs, other, trace)


def _same_type(a: TensorType, b: TensorType) -> bool:
    return a == b


def _same_form(a: Any, b: Any, other: Trace, trace: Trace) -> bool:
    if isinstance(a, Ref) or isinstance(b, Ref):
        return isinstance(a, Ref) and isinstance(b, Ref) and other.types[a] == trace.types[b]
    if isinstance(a, list | tuple):
        if not isinstance(b, list | tuple) or len(a) != len(b):
            return False
        return all(_same_form(x, y, other, trace) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same_form(a[k], b[k], other, trace) for k in a)
    if _is_integer(a) and _is_integer(b):
        return True
    if isinstance(a, Number) or isinstance(b, Number):
        return isinstance(a, Number) and isinstance(b, Number)
    return type(a) is type(b) and a == b


def _is_integer(x: Any) -> bool:
    return (isinstance(x, int) and not isinstance(x, bool)) or (isinstance(x, Number) and bool(x.expr.is_integer))


def leaf_results(merged: Merged) -> dict[tuple[Path, TensorType], dict[int, Source]]:
    """For each tensor of the state, where each way takes its next value from; none, if it is read and never replaced by
    one of its type."""
    found: dict[tuple[Path, TensorType], dict[int, Source]] = {}
    for number, way in enumerate(merged.exploration.ways):
        for path, ref in way.trace.state.items():
            found.setdefault((path, way.trace.types[ref]), {})
        for path, result in way.trace.results.items():
            if isinstance(result, Ref):
                key = path, way.trace.types[result]
                found.setdefault(key, {})[number] = merged.source(number, result)
    return found
