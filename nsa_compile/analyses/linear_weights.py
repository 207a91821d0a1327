"""Weights that are their products alone, of the keys up to the query's own: sums that run on from step to step.

`Σ_{j <= i} c (q[i] · k[j]) v[j]` is `c q[i]` times the sum of `k[j] v[j]ᵀ` so far: what linear attention keeps, read
from caches. Where a weight is also multiplied with `a ** (i - j)`, as in retention, that sum decays by a at each step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile.ir.scans import constant_value, example
from nsa_compile.ops.scored.program import Instruction, parse

__all__ = ["Decay", "RunningSum", "running_sum"]


@dataclass(frozen=True)
class Decay:
    """A leaf `[N|1, 1, m|1, 1]` to the power of how far a key lies behind its query; for later keys 0 where `seen`,
    otherwise 1."""

    base: fx.Node
    seen: bool = False


@dataclass(frozen=True)
class RunningSum:
    """A product times a number and a decay: where `seen`, of the keys up to the query's own alone."""

    factor: float = 1.0
    decay: Decay | None = None
    seen: bool = False


@dataclass(frozen=True)
class _Leaf:
    """What differs neither between queries nor between keys."""

    node: fx.Node


# Further values of a program: numbers, integers that are known, how far a key lies behind its query, "apart", the same
# but 0 for later keys, "behind", and whether a key is "seen" or "unseen".
_NEGATED = {"seen": "unseen", "unseen": "seen"}
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


class _Unknown(Exception):
    """A value is of none of these kinds."""


def running_sum(node: fx.Node) -> RunningSum | None:
    """What the weights of a `weighted_sum` are, if they are of this kind, and 0 for later keys."""
    inputs: Any = node.args[:5]
    queries, _, v, leaves, program = inputs
    if len(queries) != 1 or example(queries[0]).shape[1] != example(v).shape[1]:
        return None
    constants: dict[fx.Node, Tensor | None] = {}
    found: dict[str, Any] = {"s0": RunningSum()}
    for i, leaf in enumerate(leaves):
        value = example(leaf)
        is_plain = value.shape[1] == value.shape[3] == 1 and value.dtype.is_floating_point
        found[f"x{i}"] = _Leaf(leaf) if is_plain else _known(constant_value(leaf, constants))
    parsed = parse(str(program))
    try:
        for i, instruction in enumerate(parsed.instructions):
            operands = [found.get(x, x) if isinstance(x, str) else x for x in instruction.operands]
            found[f"v{i}"] = _value(instruction, operands)
    except _Unknown:
        return None
    result = found.get(str(parsed.results[0]))
    return result if isinstance(result, RunningSum) and result.seen else None


def _known(value: Tensor | None) -> Tensor | str | None:
    """A constant; as "seen" where it is 1 for the keys up to the query's own, and 0 for later ones."""
    if value is None or value.shape[0] * value.shape[2] > 1 or not 1 < value.shape[1] == value.shape[3]:
        return value
    rows = value[0, :, 0]
    return "seen" if torch.equal(rows, torch.ones_like(rows).tril()) else value


def _value(instruction: Instruction, operands: list[Any]) -> Any:
    match instruction.operator.partition(".")[0], operands:
        case "lt" | "le" | "gt" | "ge" as name, [Tensor() as a, Tensor() as b]:
            return _compared(name, a, b)
        case "bitwise_not" | "logical_not", ["seen" | "unseen" as x]:
            return _NEGATED[x]
        case "sub", [Tensor() as a, Tensor() as b] if _places(b, a) == 0:
            return "apart"
        case "clamp" | "clamp_min", ["apart", 0] | ["apart", 0, None]:
            return "behind"
        case "pow", [_Leaf() as x, "behind"]:
            return Decay(x.node)
        case "to", ["seen" as x, "float" | "int"]:
            return x
        case "to", [RunningSum() as x, "float"]:
            return x
        case "mul", [RunningSum() | Decay() as x, "seen"] | ["seen", RunningSum() | Decay() as x]:
            return replace(x, seen=True)
        case "masked_fill", [RunningSum() | Decay() as x, "unseen", 0]:
            return replace(x, seen=True)
        case "where", ["seen", RunningSum() | Decay() as x, 0] | ["unseen", 0, RunningSum() | Decay() as x]:
            return replace(x, seen=True)
        case "mul", [RunningSum() as x, Decay() as a] | [Decay() as a, RunningSum() as x] if x.decay is None:
            return replace(x, decay=a, seen=x.seen or a.seen)
        case "mul", [RunningSum() as x, int() | float() as c] | [int() | float() as c, RunningSum() as x]:
            return replace(x, factor=x.factor * c)
        case "div", [RunningSum() as x, int() | float() as c] if c:
            return replace(x, factor=x.factor / c)
        case "neg", [RunningSum() as x]:
            return replace(x, factor=-x.factor)
    raise _Unknown


def _compared(name: str, a: Tensor, b: Tensor) -> str:
    """A comparison of each key's place with each query's."""
    if (last := _places(a, b)) is None:
        name, last = _SWAPPED[name], _places(b, a)
    match name, last:
        case ("le", 0) | ("lt", 1):
            return "seen"
        case ("gt", 0) | ("ge", 1):
            return "unseen"
    raise _Unknown


def _places(keys: Tensor, queries: Tensor) -> int | None:
    """The key whose number is that of the first query, where both are counted; None where they are not."""
    count = keys.numel()
    if count < 2 or keys.shape != (1, 1, 1, count) or queries.shape != (1, count, 1, 1):
        return None
    keys, queries = keys.flatten(), queries.flatten()
    counted = torch.arange(count)
    if not all(x.dtype == torch.int64 and torch.equal(x, counted + x[0]) for x in (keys, queries)):
        return None
    return int(queries[0]) - int(keys[0])
