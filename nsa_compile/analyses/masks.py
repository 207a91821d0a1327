"""Masks of attention, taken apart: what is known at every step, and what depends on data.

A mask reaches its scores through conjunctions, opposites and movement. A `Condition` is one part of it together with
that way, and the way is followed by running the movement on element numbers, so no reshape needs to be understood.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.ir.aten import AND, MASKED_FILL, NOT, OR, REARRANGED, WHERE, arguments, aten, operand
from nsa_compile.ir.attention import All, Blocks, MaskKind, Opaque, Window
from nsa_compile.ir.rewriting import NodeBuilder, is_absent
from nsa_compile.ir.scans import ScanRecord, example
from nsa_compile.ir.step_values import StepMask, step_mask

# Movement that masks and scores are followed through.
MOVES = REARRANGED - {aten.unfold.default, aten.flip.default, aten.roll.default} | {aten.index_select.default}


class Unrecognised(Exception):
    """Why a softmax is not an attention that the pass can raise, and the node that shows it."""

    def __init__(self, why: str, node: fx.Node) -> None:
        super().__init__(why)
        self.why, self.node = why, node


@dataclass(frozen=True)
class Condition:
    """One condition of a mask: a node of the body, or its opposite, and how it gets to the scores it masks."""

    node: fx.Node
    negated: bool
    numbers: Tensor  # for each of these scores, its number in the product of queries and keys; -1: of another product
    keys: int  # T
    additive: bool = False  # a number: 0 keeps, -inf removes
    # What happens to the node on its way: broadcast to a shape, then moved, if there is an operator that moves it.
    moves: tuple[tuple[torch.Size, fx.Node | None], ...] = ()
    absent: bool = False  # what it removes is not there, rather than hidden

    def spread(self, x: Tensor, record: ScanRecord) -> Tensor:
        """Elements of the node, as `[N * m * T]` in the order of the product."""
        for shape, move in self.moves:
            x = x.expand(shape) if move is None else moved(move, x.expand(shape), record)
        own = self.numbers >= 0
        spread = torch.empty(int(own.sum()), dtype=x.dtype)
        spread[self.numbers[own]] = x.expand(self.numbers.shape)[own]
        return spread


@dataclass(frozen=True)
class Mask:
    """What a list of conditions keeps: a part that is known at every step, and conditions on data."""

    known: StepMask | None  # [T], or [N * m, T] where heads differ; None if it keeps everything
    known_conditions: tuple[Condition, ...]
    data: tuple[Condition, ...]
    kind: MaskKind


@dataclass(frozen=True)
class Side:
    """A value of which one side of a condition is a constant."""

    condition: fx.Node
    constant_if_true: bool
    constant: float
    value: fx.Node


def is_float_cast(node: fx.Node) -> bool:
    """A cast between floating dtypes, of at least half precision: what rounds to less is there for its rounding."""
    if node.target is not aten._to_copy.default:
        return False
    return all(x.dtype.is_floating_point and x.dtype.itemsize > 1 for x in (example(node), example(operand(node))))


def side_of_where(node: fx.Node, record: ScanRecord) -> Side | None:
    """`where` or `masked_fill` with a constant, or None if a node is neither."""
    if node.target in MASKED_FILL:
        fill = arguments(node)
        number = constant(fill.value, record)
        return None if number is None else Side(fill.mask, True, number, fill.self)
    if node.target in WHERE:
        condition, if_true, if_false = cast(Any, node.args)
        for number, value, at_true in (
            (constant(if_true, record), if_false, True),
            (constant(if_false, record), if_true, False),
        ):
            if number is not None and isinstance(value, fx.Node):
                return Side(condition, at_true, number, value)
    return None


def constant(value: Any, record: ScanRecord) -> float | None:
    """A number, or a tensor with one constant value."""
    if isinstance(value, bool | int | float):
        return float(value)
    tensor = record.constant.get(value) if isinstance(value, fx.Node) else None
    if tensor is None or tensor.numel() == 0 or not bool((tensor == tensor.flatten()[0]).all()):
        return None
    return float(tensor.flatten()[0])


def moved(node: fx.Node, x: Tensor, record: ScanRecord) -> Tensor:
    """A movement operator on other elements than its own."""
    if any(n is not node.args[0] and n not in record.constant for n in node.all_input_nodes):
        raise Unrecognised("scores are picked by numbers that are no constants", node)
    args, kwargs = fx.node.map_arg(
        (node.args, dict(node.kwargs)), lambda n: x if n is node.args[0] else record.constant[n]
    )
    target: Any = node.target
    return target(*args, **kwargs)


def conjunction(conditions: list[Condition], record: ScanRecord) -> Mask:
    """What a list of conditions keeps, taken apart into what is known and what depends on data."""
    known: StepMask | None = None
    known_conditions: list[Condition] = []
    data: list[Condition] = []
    todo = [replace(condition, absent=is_absent(condition.node)) for condition in conditions]
    while todo:
        condition = todo.pop()
        value = known_condition(condition, record)
        joined = value if value is None or known is None else known & value
        if joined is not None:
            known = joined
            known_conditions.append(condition)
        elif inner := parts(condition, record):
            todo += inner
        else:
            same = next((i for i, other in enumerate(data) if same_condition(condition, other, record)), None)
            if same is None:
                data.append(condition)
            elif condition.absent:  # a condition may be written twice
                data[same] = condition
    return Mask(known, tuple(known_conditions), tuple(data), classify(known, record.length))


def known_condition(condition: Condition, record: ScanRecord) -> StepMask | None:
    """A condition that is known at every step, by key: `[1, T]`, or `[N * m, T]` where heads differ."""
    value: Any = record.known.get(condition.node, record.constant.get(condition.node))
    if condition.additive and value is not None:
        value = value == 0 if isinstance(value, Tensor) else value.where(lambda x: x == 0)
    mask = None if value is None else step_mask(value, record.length)
    if mask is None:
        return None
    mask = ~mask if condition.negated else mask

    def by_key(x: Tensor) -> Tensor:
        return condition.spread(x, record).reshape(-1, condition.keys)

    by_keys = mask.map(by_key)
    parts = (by_keys.start, by_keys.stop, by_keys.outside)
    return by_keys.map(lambda x: x[:1]) if all(bool((x == x[:1]).all()) for x in parts) else by_keys


def parts(condition: Condition, record: ScanRecord) -> list[Condition]:
    """What a condition consists of; nothing if it is no conjunction, opposite or movement of others."""
    node = condition.node
    if not isinstance(node.target, OpOverload) or not all(isinstance(n, fx.Node) for n in node.args[:1]):
        return []
    here = (example(node).shape, None)
    if condition.additive and node.target in WHERE:
        removes_if_true = constant(node.args[1], record) == -math.inf
        moves = (here, *condition.moves)
        return [replace(condition, node=operand(node), negated=removes_if_true, additive=False, moves=moves)]
    if condition.additive and node.target in MASKED_FILL:
        filled = replace(condition, node=operand(node, 1), negated=True, additive=False, moves=(here, *condition.moves))
        rest = [] if constant(node.args[0], record) == 0.0 else [replace(condition, node=operand(node))]
        return [filled, *rest]
    if condition.additive and node.target is aten.add.Tensor:
        return [replace(condition, node=n, moves=(here, *condition.moves)) for n in node.all_input_nodes]
    source = operand(node)
    if node.target in MOVES and all(n is source or n in record.constant for n in node.all_input_nodes):
        return [replace(condition, node=source, moves=((example(source).shape, node), *condition.moves))]
    if node.target is aten._to_copy.default and condition.additive:
        return [replace(condition, node=source)]
    if node.target in NOT:
        return [replace(condition, node=source, negated=not condition.negated)]
    if (node.target in AND and not condition.negated) or (node.target in OR and condition.negated):
        return [
            replace(condition, node=n, moves=(here, *condition.moves)) for n in node.args[:2] if isinstance(n, fx.Node)
        ]
    return []


def keeps_one(known: StepMask | None, record: ScanRecord) -> bool:
    """Whether some key is kept at every step, for every query."""
    if known is None:
        return True
    if bool(known.outside.any()):
        return False
    rows = known.start.reshape(-1, known.shape[-1]), known.stop.reshape(-1, known.shape[-1])
    change = torch.zeros(rows[0].shape[0], record.length + 1, dtype=torch.int64)
    one = torch.ones_like(rows[0])
    change = change.scatter_add(1, rows[0], one).scatter_add(1, rows[1], -one)
    return bool((change.cumsum(1)[:, : record.length] > 0).all())


def classify(known: StepMask | None, length: int) -> MaskKind:
    """The kind of a mask that is known at every step, by its values."""
    if known is None:
        return All()
    if known.shape[0] > 1 or bool(known.outside.any()):
        return Opaque()
    start, stop = known.start[0], known.stop[0]
    keys = torch.arange(len(start))
    if bool((start == 0).all()) and bool((stop == length).all()):
        return All()

    def is_inside(first: Tensor, end: Tensor) -> bool:
        expected = StepMask.inside(first, end, length)
        return torch.equal(expected.start, start) and torch.equal(expected.stop, stop)

    window = int(stop[0])
    if start[0] == 0 and window > 0 and is_inside(keys, keys + (length if window == length else window)):
        return Window(window)
    first = int(start[0])
    stride = int(start[1]) - first if len(start) > 1 and stop[1] > 0 else length
    if stop[0] == length and stride > 0 and is_inside(keys * stride + first, torch.full_like(keys, length)):
        return Blocks(first + 1, stride)
    return Opaque()


def same_mask(a: Mask, b: Mask, record: ScanRecord) -> bool:
    """Whether two masks keep the same keys at every step, whatever the data."""
    if (a.known is None) != (b.known is None) or len(a.data) != len(b.data):
        return False
    if a.known is not None and b.known is not None:
        parts = [(getattr(a.known, name), getattr(b.known, name)) for name in ("start", "stop", "outside")]
        if any(not torch.equal(x.expand_as(x + y), y.expand_as(x + y)) for x, y in parts[:2]):
            return False
        if bool((parts[2][0] != parts[2][1]).any()):
            return False
    return all(
        any(same_condition(x, y, record) for y in others)
        for some, others in ((a.data, b.data), (b.data, a.data))
        for x in some
    )


def same_condition(a: Condition, b: Condition, record: ScanRecord) -> bool:
    """Whether two conditions are one condition, at the same scores."""
    if a.node is not b.node or a.negated != b.negated or a.additive != b.additive:
        return False
    numbers = torch.arange(example(a.node).numel()).reshape(example(a.node).shape)
    return torch.equal(a.spread(numbers, record), b.spread(numbers, record))


def mask_tensor(
    build: NodeBuilder, conditions: Sequence[Condition], rows: tuple[int, int], keys: int, record: ScanRecord
) -> fx.Node | None:
    """The conjunction of conditions at one step, `[N|1, 1, m|1, T]`, from the nodes that hold them; None for none."""
    result = None
    for condition in conditions:
        keep = condition.node
        if condition.additive:
            keep = build(aten.eq.Scalar, keep, 0)
        elif condition.negated:
            keep = build(aten.bitwise_not.default, keep)
        if _is_one_row(condition, keys, record):
            keep = build(aten.reshape.default, keep, [1, 1, 1, keys])
        else:
            for shape, move in condition.moves:
                keep = build(aten.expand.default, keep, list(shape))
                if move is not None:
                    keep = build(move.target, keep, *move.args[1:])
            keep = build(aten.expand.default, keep, list(condition.numbers.shape))
            keep = build(aten.reshape.default, keep, [rows[0], 1, rows[1], keys])
        result = keep if result is None else build(aten.bitwise_and.Tensor, result, keep)
    return result


def _is_one_row(condition: Condition, keys: int, record: ScanRecord) -> bool:
    """Whether a condition holds one boolean a key, in their order."""
    value = example(condition.node)
    if value.numel() != keys:
        return False
    with unset_fake_temporarily():
        numbers = condition.spread(torch.arange(keys).reshape(value.shape), record).reshape(-1, keys)
        return torch.equal(numbers, torch.arange(keys).expand_as(numbers))
