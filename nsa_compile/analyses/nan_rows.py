"""Rows of a softmax that keep no key: NaN in the loop, in every element, and the NaN must not get lost.

Where scores of rows that are not written yet are -inf, their weights are computed as zeros. Beside a key that is kept
they are zeros in the loop, too. Where none is kept they are NaN, as are the other weights of the row: whoever sums over
the row finds NaN either way, and whoever looks at single weights does not. So each reader is followed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile.analyses.facts import Facts, Steps
from nsa_compile.analyses.masks import Mask, Unrecognised, keeps_one, known_condition, side_of_where
from nsa_compile.ir.aten import ADD, COPIED, DIV, MATMUL, MUL, REARRANGED, SUB, arguments, aten, operand
from nsa_compile.ir.rewriting import zeroes_absent
from nsa_compile.ir.scans import ScanRecord, ancestors, example
from nsa_compile.ir.step_values import step_mask


@dataclass
class Readers:
    """Operands of products `(node, place)`, and which of their elements are NaN where their row of the softmax is; and
    values of which that is not known."""

    open: dict[tuple[fx.Node, int], Tensor] = field(default_factory=dict)
    unknown: set[fx.Node] = field(default_factory=set)


_MOVES = REARRANGED | COPIED | {aten._to_copy.default}
_KEEPS_NAN = MUL | ADD | SUB | {aten.neg.default, aten.exp.default, aten.log.default, aten.sqrt.default}
_SUMS = {
    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default, aten.amin.default,
}  # fmt: skip


def sums_over_rows(
    softmax: fx.Node,
    until: Steps,
    facts: Callable[[fx.Node], Facts],
    move: Callable[[fx.Node, fx.Node, Tensor], Tensor],
    record: ScanRecord,
) -> Readers | None:
    """The products that read a softmax's rows, if all readers sum over rows, or take NaN for zero; None otherwise.

    Args:
        until: the step up to which each weight is taken for zero.
        facts: what is known of another node, which is not computed from the softmax.
        move: `move(node, x, numbers)` gives what an operator that moves the elements of x makes of numbers.
    """
    shape, dim = example(softmax).shape, arguments(softmax).dim % example(softmax).dim()
    rows = torch.arange(math.prod(shape) // shape[dim]).reshape([n for d, n in enumerate(shape) if d != dim])
    first = _Elements(rows.unsqueeze(dim).expand(shape), (until == 0).expand(shape), until.expand(shape))
    if not softmax.users and not first.sums_all([dim]):
        return None  # readers that are not here are taken to sum over it
    todo, found = [(softmax, first)], Readers()
    while todo:
        node, x = todo.pop()
        for user in node.users:
            if _takes_nan_for_zero(user, node, record):
                continue
            if user.target in MATMUL:
                for place in (i for i, operand in enumerate(user.args[:2]) if operand is node):
                    if x.is_taken and not x.sums_all([-1 if place == 0 or x.row.dim() == 1 else -2]):
                        return None
                    found.open[user, place] = x.is_open
                continue
            if user.target in _SUMS:
                how = arguments(user)
                dims: Any = getattr(how, "dim", None) or list(range(x.row.dim()))
                if x.sums_all(dims) or not x.is_taken:
                    continue
                after = x.reduced(dims, keepdim=getattr(how, "keepdim", False))
            elif user.target in _MOVES and example(user).dtype.is_floating_point:
                after = _Elements(*(move(user, node, numbers) for numbers in (x.row, x.is_open, x.until)))
            elif user.target in _KEEPS_NAN or (user.target in DIV and user.args[1] is not node):
                after = x.expanded(user)
            elif keeps_what_is_there(user, record):
                after = x.expanded(user)  # each step has a row, and it is written
            else:
                kept = _kept_by_choice(user, node, softmax, facts, record)
                if kept is None and x.is_taken:
                    return None
                if kept is None:
                    found.unknown.add(user)
                    continue
                after = x.expanded(user)
                after = replace(after, is_open=after.is_open & kept[1])
                if bool((kept[0] >= after.until).all()):  # what is taken for zero is zero in the loop
                    after = replace(after, until=torch.zeros_like(after.until))
            todo.append((user, after))
    return found


@dataclass(frozen=True)
class _Elements:
    """Of each element of a value: the row of the softmax that it belongs to, whether it is never taken for zero, so
    that it is NaN where the row is, and until when it may be."""

    row: Tensor
    is_open: Tensor
    until: Steps

    @property
    def is_taken(self) -> bool:
        """Whether any is taken for zero that may be NaN in the loop."""
        return bool((self.until > 0).any())

    def sums_all(self, dims: list[int]) -> bool:
        """Whether each sum is over elements of one row, of which one is NaN where the row is."""
        one_row = self.row.amax(dims) == self.row.amin(dims)
        return bool((one_row & (self.is_open.long().amax(dims) == 1)).all())

    def reduced(self, dims: list[int], *, keepdim: bool) -> _Elements:
        """Of sums over elements of several rows, such as those of all heads: the rows are another row together."""
        apart = self.row.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        _, row = torch.unique(apart.flatten(0, -2), dim=0, return_inverse=True)
        row = row.reshape(apart.shape[:-1])
        for d in sorted(d % self.row.dim() for d in dims) if keepdim else ():
            row = row.unsqueeze(d)
        return _Elements(row, self.is_open.long().amin(dims, keepdim) == 1, self.until.amax(dims, keepdim))

    def expanded(self, node: fx.Node) -> _Elements:
        return _Elements(*(x.expand(example(node).shape) for x in (self.row, self.is_open, self.until)))


def _takes_nan_for_zero(user: fx.Node, node: fx.Node, record: ScanRecord) -> bool:
    """Whether a reader makes zeros of NaN: `nan_to_num`, or `where(isnan(x), 0, x)`."""
    if user.target is aten.nan_to_num.default:
        return arguments(user).nan in (None, 0.0)
    if user.target is aten.isnan.default:
        return bool(user.users) and all(_takes_nan_for_zero(u, node, record) for u in user.users)
    side = side_of_where(user, record)
    if side is None or side.constant != 0 or not side.constant_if_true or side.value is not node:
        return False
    return side.condition.target is aten.isnan.default and operand(side.condition) is node


def _kept_by_choice(
    choice: fx.Node, node: fx.Node, softmax: fx.Node, facts: Callable[[fx.Node], Facts], record: ScanRecord
) -> tuple[Tensor, Tensor] | None:
    """Of a choice between a value and zero: until when it surely takes zero, and where it always takes the value."""
    side = side_of_where(choice, record)
    if side is None or side.constant != 0 or side.value is not node or softmax in ancestors([side.condition]):
        return None
    mask = facts(side.condition)
    if mask.stale:
        return None
    never_taken = mask.can_be_false if side.constant_if_true else mask.can_be_true
    always = mask.surely_false if side.constant_if_true else mask.surely_true
    taken = torch.tensor(False) if always is None else (always[0] <= 0) & (always[1] >= record.length - 1)
    return torch.tensor(0) if never_taken is None else never_taken, taken


# -- which values a row that is NaN gives a gradient of NaN

# Runs of keys that are told apart.
RUNS_LIMIT = 64


def keeps_what_is_there(node: fx.Node, record: ScanRecord) -> bool:
    """Whether a node makes zeros of what is computed for rows that a step does not have, and each step has one."""
    if not zeroes_absent(node):
        return False
    hidden = operand(node, 1)
    absent: Any = record.known.get(hidden, record.constant.get(hidden))
    mask = None if absent is None else step_mask(absent, record.length)
    return mask is not None and keeps_one((~mask).map(lambda x: x.reshape(1, -1)), record)


def keys_there(values: tuple[fx.Node, int], mask: Mask, record: ScanRecord) -> tuple[int, ...]:
    """At which steps each row of values is among those that a step attends to, as `nan_rows` takes it.

    A row is there once it is written, whether a mask hides it or not: a row of the softmax that is NaN is NaN for it,
    too.

    Args:
        values: the values that weights meet, and the dimension of their rows.
        mask: of the scores.

    Raises:
        Unrecognised: this is not known, differs between sequences, or changes too often.
    """
    node, dim = values
    shape = example(node).shape
    ready = _written_from(node, record)
    start = ready.expand(shape).movedim(dim, -1).reshape(-1, shape[dim])
    stop = torch.full((1, shape[dim]), record.length)
    for condition in mask.known_conditions:
        if condition.absent:
            there = known_condition(condition, record)
            if there is None or bool(there.outside.any()):
                raise Unrecognised("at some step no key may be left, and its keys leave and come back", node)
            start, stop = torch.maximum(start, there.start), torch.minimum(stop, there.stop)
    if not all(torch.equal(x, x[:1].expand_as(x)) for x in (start, stop)):
        raise Unrecognised("at some step no key may be left, and its keys differ between sequences", node)
    runs = _runs(start[0].tolist(), stop[0].tolist(), record.length)
    if len(runs) > RUNS_LIMIT:
        raise Unrecognised("at some step no key may be left, and its keys do not come one after the other", node)
    return tuple(itertools.chain(*runs))


def _written_from(node: fx.Node, record: ScanRecord) -> Steps:
    """From which step on each element of a value is made of rows that are written."""
    if record.length == 1 or record.proof is None:
        return torch.tensor(0)
    analysis = record.proof[2]
    if node not in analysis.facts:
        raise Unrecognised("at some step no key may be left, and since when its values are there is not known", node)
    ready = analysis.of(node).ready
    return torch.tensor(0) if ready is None else ready


def _runs(start: list[int], stop: list[int], steps: int) -> list[tuple[int, int, int, int]]:
    """Numbers of rows, from which step on and for how long each is there, as runs `(p, a, b, n)`."""
    found: list[tuple[int, int, int, int]] = []
    for row, (first, last) in enumerate(zip(start, stop, strict=True)):
        if found:
            begin, offset, stride, count = found[-1]
            stride = first - offset if row == begin + 1 else stride
            at = offset + stride * (row - begin)
            if at == first and last == (steps if count < 0 else min(at + count, steps)):
                found[-1] = begin, offset, stride, count
                continue
        found.append((row, first, 0, -1 if last >= steps else max(0, last - first)))
    return found
