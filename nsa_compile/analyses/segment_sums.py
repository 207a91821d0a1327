"""A carry whose elements each sum up what steps bring, from a step of their own on, as the difference of two sums.

    bias = where(positions < t, bias + f[t], 0)    ->    total = total + f[t]; at[t] = total; bias = total - at

Before, each step has a sum for each element, such as the log decay between each key and the query: `[S, S]` over all
steps. After, it has one sum, and a cache of it, in which each element has the sum before its own first step.

The difference of two long sums has fewer digits than a short sum has. The sums are therefore float64, and kept in two
parts of the carry's dtype. What is infinite, mostly -inf for a key that is forgotten, is left out of them and counted,
and added where two counts differ. It gets no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.analyses.row_writes import is_known_row
from nsa_compile.ir.aten import MASKED_FILL, arguments, aten, operand
from nsa_compile.ir.carries import Recurrent
from nsa_compile.ir.rewriting import NodeBuilder, constant_node, eliminate_dead_code
from nsa_compile.ir.scans import (
    PART_NAMES,
    ScanRecord,
    ScanSite,
    ancestors,
    constant_value,
    example,
    key_of_example,
    place_of,
    results,
    scan_results,
)
from nsa_compile.ir.step_values import StepMask, Table, step_mask

__all__ = ["subtract_sums"]

# A carry of so many elements for one sum.
MANY = 8


def subtract_sums(site: ScanSite, record: ScanRecord) -> bool:
    """Compute each such carry of a scan, and of its lowered body, from sums and a cache; whether there were any."""
    known = dict[fx.Node, Tensor | None]()
    changed = False
    for place, kind in enumerate(record.carries):
        if not isinstance(kind, Recurrent) or kind.group != (place,):
            continue
        with unset_fake_temporarily():
            first = constant_value(site.init[place], known)
            starts_empty = first is not None and not bool(first.count_nonzero())
            found = _sums_of(site, place, record, starts_empty)
        if found is not None:
            _rewrite(site, place, found)
            changed = True
    return changed


@dataclass(frozen=True)
class _Sums:
    """What each element of a carry sums up.

    Attributes:
        total: the sum of the carry and what a step brings, taken at some steps.
        brought: that, one number for all elements along `dim`, which counts from the end.
        last: the last step at which each element is not added to, before it is, -1 for none, `[N]`.
        goes_on: whether the sums begin with what the carry was before the first step, rather than with zero.
    """

    total: fx.Node
    brought: fx.Node
    dim: int
    last: Tensor
    goes_on: bool


def _sums_of(site: ScanSite, place: int, record: ScanRecord, starts_empty: bool) -> _Sums | None:
    carry, update = site.placeholders()[0][place], site.outputs()[0][place]
    while update.target is aten.where.self and update.args[1] is update.args[2]:
        update = operand(update, 1)
    if example(carry).dtype not in (torch.float32, torch.float64) or example(update).shape != example(carry).shape:
        return None
    if (chosen := _chosen(update, carry, record)) is None:
        return None
    total, mask, is_kept = chosen
    brought, added = _brought(total, carry), mask.narrowed()
    wide = [d - len(added.shape) for d, size in enumerate(added.shape) if size != 1]
    if brought is None or len(wide) != 1 or carry in ancestors([brought]):
        return None
    dim, x, size = wide[0], example(brought), example(carry).shape[wide[0]]
    one_for_all = x.dim() < -dim or x.shape[dim] == 1
    if not one_for_all or added.shape[dim] != size or size < MANY or example(total).shape != example(carry).shape:
        return None
    added = added.map(torch.flatten)
    is_zero_first = not bool((added.outside | (added.start == 0) & (added.stop > 0)).any())
    from_a_step_on = not bool((added.outside | (added.stop > 0) & (added.stop < added.length)).any())
    if not (from_a_step_on if is_kept else starts_empty or is_zero_first):
        return None  # what it was before the first step is part of some of its sums
    readers = {total, update} | {n for n in carry.users if n.target is aten.zeros_like.default}
    if (last := _last_reset(added)) is None or set(carry.users) - readers or set(total.users) != {update}:
        return None
    return _Sums(total, brought, dim, last, is_kept and not starts_empty)


def _chosen(update: fx.Node, carry: fx.Node, record: ScanRecord) -> tuple[fx.Node, StepMask, bool] | None:
    """What a carry becomes at some steps, and at which; and whether it stays as it is at the others, where it is zero
    otherwise."""
    given: Any = update.args
    if update.target is aten.where.self or update.target in MASKED_FILL:
        # where(mask, total, 0), where(mask, 0, total) or total.masked_fill(mask, 0)
        is_where = update.target is aten.where.self
        condition, if_true, if_false = given if is_where else (given[1], given[2], given[0])
        value = record.known.get(condition, record.constant.get(condition))
        if value is None or (mask := step_mask(value, record.length)) is None:
            return None
        for total, other, at in ((if_true, if_false, mask), (if_false, if_true, ~mask)):
            if isinstance(total, fx.Node) and total is not carry and (other is carry or _is_zero(other, record)):
                return total, at, other is carry
    elif update.target is aten.index_copy.default and example(update).dim():
        put: Any = arguments(update)
        dim, rank = put.dim % example(update).dim(), example(update).dim()
        size = example(update).shape[dim]
        if _is_zero(put.source, record) and is_known_row(put.index, size, record):
            number = record.known[put.index].table() if put.index in record.known else record.constant[put.index]
            added = (number.reshape(-1, example(put.index).numel(), 1) != torch.arange(size)).all(1)
            added = added.expand(record.length, size).reshape(record.length, size, *[1] * (rank - 1 - dim))
            mask = Table(added).mask
            return None if mask is None else (put.self, mask, False)
    return None


def _is_zero(value: Any, record: ScanRecord) -> bool:
    if isinstance(value, fx.Node):
        held = record.constant.get(value)
        return held is not None and not bool(held.count_nonzero())
    return isinstance(value, int | float) and value == 0


def _brought(total: fx.Node, carry: fx.Node) -> fx.Node | None:
    """What is added to a carry, if nothing else happens to it."""
    if total.target is not aten.add.Tensor or total.kwargs or carry not in total.args:
        return None
    other = cast(Any, total.args[1] if total.args[0] is carry else total.args[0])
    if not isinstance(other, fx.Node) or other is carry:
        return None
    other = operand(other) if other.target is aten.expand.default else other
    return other if example(other).dtype == example(carry).dtype else None


def _last_reset(added: StepMask) -> Tensor | None:
    """The last step before each element is added to without a break, -1 for none; None where two have the same one."""
    last = torch.where(added.outside, added.stop, added.start) - 1
    own = last[last >= 0]
    return last if len(own.unique()) == len(own) else None


def _rewrite(site: ScanSite, place: int, found: _Sums) -> None:
    """Give a scan, and its body, the sums and their caches, and compute the carry from these."""
    body, carry = site.body, site.placeholders()[0][place]
    new, build = _NewCarries(site, place), NodeBuilder(body, found.total)
    x, dtype = found.brought, example(carry).dtype
    one = [1] * (-found.dim - example(x).dim()) + list(example(x).shape)
    rows = list(one)
    rows[found.dim] = len(found.last)

    step = new.carry([], torch.int64)
    new.becomes(step, build(aten.add.Tensor, step, 1))
    last = constant_node(build, found.last.reshape(-1, *[1] * (-found.dim - 1)), example(carry).device)
    is_last = build(aten.eq.Tensor, last, step)

    def summed(value: fx.Node) -> fx.Node:
        sum_before = new.carry(one, example(value).dtype)
        return new.becomes(sum_before, build(aten.add.Tensor, sum_before, value))

    def cached(value: fx.Node) -> fx.Node:
        """What it was at the last step at which each element was not added to."""
        cache = new.carry(rows, example(value).dtype)
        return new.becomes(cache, build(aten.where.self, is_last, value, cache))

    def difference(value: fx.Node) -> fx.Node:
        return build(aten.sub.Tensor, value, cached(value))

    def number(value: float, like: fx.Node) -> fx.Node:
        return build(aten.full.default, [], value, **_kind(like))

    is_finite = build(aten.eq.Scalar, build(aten.sub.Tensor, x, x), 0)
    wide = x if dtype == torch.float64 else build(aten._to_copy.default, x, dtype=torch.float64)
    total = summed(build(aten.where.self, is_finite, wide, number(0.0, wide)))
    if dtype == torch.float64:
        between = difference(total)
    else:
        high = build(aten._to_copy.default, total, dtype=dtype)
        exact, rounded = (build(aten.detach.default, n) for n in (total, high))
        rest = build(aten.sub.Tensor, exact, build(aten._to_copy.default, rounded, dtype=torch.float64))
        low = build(aten._to_copy.default, rest, dtype=dtype)
        between = build(aten.add.Tensor, difference(high), difference(low))
    is_other = build(aten.bitwise_not.default, is_finite)
    count = summed(build(aten._to_copy.default, is_other, dtype=dtype))
    value = summed(build(aten.where.self, is_other, build(aten.detach.default, x), number(0.0, x)))
    same = build(aten.eq.Tensor, count, cached(count))
    between = build(aten.add.Tensor, between, build(aten.where.self, same, number(0.0, x), value))

    first = new.first() if found.goes_on else None
    found.total.replace_all_uses_with(between if first is None else build(aten.add.Tensor, first, between))
    for user in list(carry.users):  # what it is where it is not added to
        before = NodeBuilder(body, user)
        zeros = before(aten.full.default, list(example(carry).shape), 0.0, **_kind(carry)) if first is None else first
        user.replace_input_with(carry, zeros)
    new.finish()


def _kind(node: fx.Node) -> dict[str, Any]:
    return {"dtype": example(node).dtype, "device": example(node).device}


class _NewCarries:
    """Carries, most of which begin with zeros, for a scan and its lowered body, behind those that it has."""

    def __init__(self, site: ScanSite, place: int) -> None:
        self.site, self.place = site, place  # of the carry in whose place they come
        self.updates: dict[fx.Node, fx.Node] = {}
        self.inits: dict[fx.Node, fx.Node] = {}  # of those that do not begin with zeros

    def carry(self, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        body, carries = self.site.body, self.site.placeholders()[0]
        old = carries[self.place]
        like: Any = example(old)
        with body.graph.inserting_after([*carries, *self.updates][-1]):
            made = body.graph.placeholder("sums")
        made.target = made.name
        with like.fake_mode:
            made.meta = {**old.meta, key_of_example(old): torch.empty(shape, dtype=dtype, device=like.device)}
        self.updates[made] = made
        return made

    def first(self) -> fx.Node:
        """What the carry in whose place they come is before the first step."""
        made = self.carry(example(self.site.init[self.place]).shape, example(self.site.init[self.place]).dtype)
        self.inits[made] = self.site.init[self.place]
        return made

    def becomes(self, carry: fx.Node, update: fx.Node) -> fx.Node:
        self.updates[carry] = update
        return update

    def finish(self) -> None:
        site, scan, body = self.site, self.site.node, self.site.body
        old, added = len(site.init), len(self.updates)
        returned, output = results(body), body.graph.output_node()
        build = NodeBuilder(body, output)
        copies = [build(aten.clone.default, x, memory_format=torch.contiguous_format) for x in self.updates.values()]
        output.args = ([*returned[:old], *copies, *returned[old:]],)
        eliminate_dead_code(body)
        body.recompile()
        init, values = site.init, scan_results(scan)
        scan.meta[PART_NAMES] = [site.name_of(i) for i in range(old)] + [f"sums of {site.name_of(self.place)}"] * added
        first = []
        for carry in self.updates:
            if carry in self.inits:
                first.append(self.inits[carry])
                continue
            x, like = example(carry), init[self.place]
            with site.owner.graph.inserting_before(scan):
                zeros = site.owner.graph.call_function(torch.zeros, (list(x.shape),), _kind(carry))
            zeros.meta = {**like.meta, key_of_example(like): x}
            first.append(zeros)
        scan.meta[key_of_example(scan)] = (*values[:old], *map(example, first), *values[old:])
        scan.update_arg(1, [*init, *first])
        for user in list(scan.users):
            if place_of(user) >= old:
                user.update_arg(1, place_of(user) + added)
        site.owner.recompile()
