"""Following unwritten rows through a step: the proof behind eliminate_guards.

Replace a buffer by its final contents, and at step t the rows written after t hold values of the future: they are
*stale*. They are followed through the body, operator by operator: `facts` says what is known of an element,
`staleness_rules` what each operator makes of that.

Two programs with the same values must have the same gradients. A stale element that is ready has a gradient of exactly
zero as long as it is stale: `where` sets it to zero, and an exact zero that it is multiplied with makes it zero if what
it meets is finite. So a value in which stale elements met zeros is *hollow*, and reads nothing but operators whose
derivatives are finite (`Magnitudes.is_smooth`). A floor that has *absorbed* one passes gradients on, like any sum: it
counts as stale but to operators that move it, add to it, do not choose it, or give it a gradient of zero, as softmax
does beside a score that stands out.

Softmax makes an exact zero of a floor if another score stands out. That a mask keeps a score does not say that: it may
have been at a floor before, by a padding mask that is data, or a column that was put beside. So scores must be shown
to stand out, and weights that are multiplied with stale rows to be no NaN. Neither follows from the program alone.

**What is assumed of data.** What comes into the loop at run time (xs, first values of carries, what the step closes
over, gradients of the outputs) holds no NaN and no +inf; it holds -inf, or numbers near a floor, only where it is added
to scores, not where it is multiplied or kept in a cache. Arithmetic of such numbers does not overflow: an element of a
product of two matrices that are both given at run time is at most `product_bound` (10^28; 4,000 in float16), and what
has no bound of its own is finite. Nothing is assumed of numbers that the program names itself: those are measured.

Whatever is not understood makes its result stale for good.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from nsa_compile.analyses.distances import numbers_spread, traced_back
from nsa_compile.analyses.facts import (
    CLEAN,
    EMPTY,
    FIRST_STEPS,
    INTERVALS,
    Facts,
    Given,
    Interval,
    Steps,
    both,
    covers,
    either,
    ever,
    full_rank,
    intersect,
    or_zero,
    shrink,
    union,
    unseen_until,
)
from nsa_compile.analyses.known import LIMIT
from nsa_compile.analyses.magnitudes import DATA, Magnitude, Magnitudes, floor_level, unmeasured
from nsa_compile.analyses.masks import Unrecognised, conjunction
from nsa_compile.analyses.nan_rows import Readers, sums_over_rows
from nsa_compile.analyses.selection import keeps_best
from nsa_compile.analyses.softmax import walk_up
from nsa_compile.analyses.staleness_rules import (
    CASTS,
    FINITE,
    FINITE_WITHIN_BOUNDS,
    MAY_BE_INFINITE,
    MAY_OVERFLOW,
    MOVEMENT,
    RULES,
)
from nsa_compile.ir.aten import (
    DIV,
    MASKED_FILL,
    PICKED,
    REARRANGED,
    SOFTMAX,
    arguments,
    aten,
    is_inexact,
    operand,
)
from nsa_compile.ir.carries import Latest, Recurrent, Rows
from nsa_compile.ir.scans import ScanRecord, ancestors, example, location, results
from nsa_compile.ir.step_values import Separable, StepMask, StepValue, Table


class Analysis:
    """One pass over a lowered body, given what its inputs are like, and whose operands gradients may reach."""

    def __init__(self, record: ScanRecord, with_gradients: Collection[fx.Node]) -> None:
        self.record, self.with_gradients = record, with_gradients
        self.never = record.length
        self.lost_for_good = record.length + 1  # after any step from which on a mask may let an element through
        self.facts: dict[fx.Node, Facts] = {}
        # Softmaxes whose floors vanish unless a row holds nothing else: until when each score is at a floor.
        self.settled: dict[fx.Node, Steps] = {}
        # Operands (node, place) whose elements may be taken for zero before a step: what they meet is zero in the loop.
        self.hidden: dict[tuple[fx.Node, int], Steps] = {}
        # Who reads a softmax that may be NaN; None: some look at single weights that are taken for zero.
        self._readers: dict[fx.Node, Readers | None] = {}
        self._one_is_kept: dict[fx.Node, bool] = {}
        self.magnitudes = Magnitudes(record)
        self.writes: dict[fx.Node, Rows] = {}  # a buffer as a step leaves it -> which rows that has written
        self._gives_gradients = True  # whether the operator that is looked at does

    def given(self, node: fx.Node, magnitude: Magnitude | None, facts: Facts = CLEAN) -> None:
        """Take what a node is like from outside."""
        self.magnitudes.found[node] = magnitude
        self.facts[node] = facts

    def run(self, node: fx.Node) -> None:
        """Derive the facts and the magnitude of one node from those of its inputs."""
        with unset_fake_temporarily(), torch.no_grad():
            self.magnitudes.found[node] = self._magnitude(node)
            self._gives_gradients = node in self.with_gradients
            self.facts[node] = self._tidy(self._follow_hollow(node, self._derive(node)))
            self._gives_gradients = True

    def of(self, value: Any) -> Facts:
        """What is known of a value to an operator that may give gradients to each of its elements."""
        f = self.raw(value)
        return f.counted if self._gives_gradients else replace(f, absorbed=None)

    def raw(self, value: Any) -> Facts:
        """What is known of a value, with what it absorbed told apart."""
        return self.facts.get(value, CLEAN) if isinstance(value, fx.Node) else CLEAN

    def is_finite(self, value: Any, like: fx.Node | None = None) -> bool:
        return _is_finite(self.magnitudes.of(value, like))

    def compared_with_itself(self, node: fx.Node) -> Interval | None:
        """When each element of a comparison of two integers compares the row of a buffer that a step writes with what
        it writes there."""
        a, b = node.args[:2]
        if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or example(node).numel() > _COMPARED_LIMIT:
            return None
        if example(a).dtype != example(b).dtype or is_inexact(example(a).dtype):
            return None
        return self._of_own_row(node, a, b) or self._of_own_row(node, b, a)

    def _of_own_row(self, node: fx.Node, buffer: fx.Node, other: fx.Node) -> Interval | None:
        shape = example(node).shape
        update, elements = traced_back(buffer, numbers_spread(buffer, shape), self.record)
        kind = self.writes.get(update)
        if kind is None or not kind.write_once or kind.count != 1:
            return None
        whole = example(update).shape
        broadcast, rows = kind.layout(whole)
        written = numbers_spread(kind.written, broadcast).reshape(rows).expand(whole).flatten()[elements]
        source, of_written = traced_back(kind.written, written, self.record)
        compared, of_other = traced_back(other, numbers_spread(other, shape), self.record)
        if source is not compared:
            return None
        at = torch.from_numpy(kind.written_at).reshape([-1] + [1] * (len(whole) - 1 - kind.dim)).expand(whole)
        at, same = at.flatten()[elements], of_written == of_other
        return torch.where(same, at, 1), torch.where(same, at, 0)

    # -- the rules, in the order they are tried

    def _derive(self, node: fx.Node) -> Facts:
        if node in self.record.known:
            return self._known_value(self.record.known[node])
        if node in self.record.constant:
            return self._constant(self.record.constant[node])
        if node.op != "call_function":
            return CLEAN
        if node in self.record.guarded_picks:
            return self._guarded_pick(node)
        rule = RULES.get(node.target)
        return rule(self, node) if rule is not None else self.plain(node)

    def plain(self, node: fx.Node) -> Facts:
        """Of an operator without a rule of its own."""
        if not any(self.of(n).stale for n in node.all_input_nodes):
            return CLEAN
        if node.target in FINITE:
            return self.arithmetic(node)
        bounded = node.target in FINITE_WITHIN_BOUNDS and self.magnitudes.found[node] is not None
        if bounded and self.magnitudes.is_smooth(node):
            return self.arithmetic(node)
        if isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
            return self.lost(node, MAY_OVERFLOW.format(node.target))
        return self.lost(node, f"{node.target} mixes written and unwritten rows in a way the analysis does not follow")

    def _follow_hollow(self, node: fx.Node, facts: Facts) -> Facts:
        """Stale elements that met zeros pass on through whatever has finite derivatives."""
        if not self._gives_gradients:
            return facts
        hollow = frozenset[str]().union(*(self.of(n).hollow for n in node.all_input_nodes))
        if not hollow:
            return facts
        if self.magnitudes.is_smooth(node):
            return replace(facts, hollow=facts.hollow | hollow)
        why = f"the derivative of {node.target} may be infinite, and inf times the zero of an unwritten row is NaN"
        if node.target in DIV:
            why += "; add a small number to what it divides by, or clamp it"
        return Facts(
            ready=torch.tensor(self.lost_for_good), sources=facts.sources | hollow, trail=facts.trail or (why, node)
        )

    def _constant(self, value: Tensor) -> Facts:
        """What a value that is the same at every step says as a mask, as a factor and as an additive mask."""

        def first(holds: Tensor) -> Steps:
            return torch.where(holds, 0, self.never)

        def run(holds: Tensor) -> Interval:
            return torch.where(holds, 0, 1), torch.where(holds, self.never - 1, 0)

        if value.dtype == torch.bool:
            return Facts(
                can_be_true=first(value),
                can_be_false=first(~value),
                surely_true=run(value),
                surely_false=run(~value),
            )
        if not value.dtype.is_floating_point:
            return CLEAN
        low = value <= floor_level(value.dtype)
        return Facts(fill=first(~low), surely_kept=run(~low)) if bool(low.any()) else CLEAN

    def _known_value(self, value: StepValue) -> Facts:
        """What a value known at every step says as a mask, as a factor and as an additive mask."""
        if isinstance(value, Separable):
            return CLEAN  # numbers, such as an index: they say nothing as a mask
        if isinstance(value, StepMask) or (isinstance(value, Table) and value.values.dtype == torch.bool):
            first_true, true_run = value.run_of(True)
            first_false, false_run = value.run_of(False)
            return Facts(can_be_true=first_true, can_be_false=first_false, surely_true=true_run, surely_false=false_run)
        zero = value.where(lambda x: x != 0).run_of(True)[0]
        dtype = value.values.dtype if isinstance(value, Table) else value.if_true.dtype
        if not dtype.is_floating_point:
            return Facts(zero=zero)
        kept = value.where(lambda x: ~(x <= floor_level(dtype)))
        if not ever(~kept):
            return Facts(zero=zero)
        first_kept, kept_run = kept.run_of(True)
        return Facts(zero=zero, fill=first_kept, surely_kept=kept_run)

    def _guarded_pick(self, node: fx.Node) -> Facts:
        """Rows picked by data, with zeros for those that are not written yet: right if the numbers are."""
        fills = node.target in MASKED_FILL
        pick = operand(node) if fills else node
        numbers = [n for n in pick.all_input_nodes if n is not operand(pick)] + ([operand(node, 1)] if fills else [])
        if any(self.of(n).stale for n in numbers):
            return self.lost(node, "its rows are picked by numbers that are made of rows that are not written yet")
        return CLEAN

    def lost(self, node: fx.Node, why: str) -> Facts:
        """Everything of the result is stale for good, and no mask hides it: its derivative may be infinite."""
        inputs = [f for f in (self.of(n) for n in node.all_input_nodes) if f.stale]
        sources = frozenset().union(*(f.sources for f in inputs))
        trail = next((f.trail for f in inputs if f.trail), None) or (why, node)
        return Facts(ready=torch.tensor(self.lost_for_good), sources=sources, trail=trail)

    def pointwise(self, node: fx.Node) -> Facts:
        return self.join([self.of(n) for n in node.all_input_nodes])

    def arithmetic(self, node: fx.Node) -> Facts:
        """Of a function of single elements that is finite, in its derivatives too, where its operands are."""
        if any(self.of(n).stale and not self.is_finite(n) for n in node.all_input_nodes):
            return self.lost(node, MAY_BE_INFINITE)
        return self.pointwise(node)

    def join(self, inputs: list[Facts]) -> Facts:
        stale = [f for f in inputs if f.stale or f.absorbed is not None]
        if not stale:
            return CLEAN
        ready = functools.reduce(union, (f.ready for f in stale))
        absorbed = functools.reduce(union, (f.absorbed for f in stale))
        sources = frozenset().union(*(f.sources for f in stale))
        trail = next((f.trail for f in stale if f.trail), None)
        return Facts(ready=ready, absorbed=absorbed, sources=sources, trail=trail)

    def movement(self, node: fx.Node) -> Facts:
        """Apply the operator to the steps instead of to the values."""
        inputs = {n: self.raw(n) for n in node.all_input_nodes}
        moved: dict[str, Any] = {}
        for name in FIRST_STEPS:
            if any(getattr(f, name) is not None for f in inputs.values()):
                moved[name] = self._move(node, {n: getattr(f, name) for n, f in inputs.items()})
        magnitude = self.magnitudes.found[node]
        has_floors = magnitude is not None and magnitude.floors is not None
        for name in INTERVALS if has_floors else INTERVALS[:2]:
            runs = {n: self._run(n, name) or EMPTY for n in inputs}
            if any(run is not EMPTY for run in runs.values()):
                moved[name] = tuple(
                    self._move(node, {n: run[end] for n, run in runs.items()}, int(EMPTY[end])) for end in (0, 1)
                )
        sources = frozenset[str]().union(*(f.sources for f in inputs.values()))
        return Facts(**moved, sources=sources, trail=next((f.trail for f in inputs.values() if f.trail), None))

    def _run(self, node: fx.Node, name: str) -> Interval | None:
        return self.kept(node) if name == "surely_kept" else getattr(self.of(node), name)

    def kept(self, value: Any, like: fx.Node | None = None) -> Interval | None:
        """When a value surely is at no floor: always, if it has none."""
        magnitude = self.magnitudes.of(value, like)
        if magnitude is not None and magnitude.floors is None:
            return torch.tensor(0), torch.tensor(self.never - 1)
        return self.of(value).surely_kept

    def _move(self, node: fx.Node, steps: dict[fx.Node, Steps | None], padding: int = 0) -> Steps:
        def operand(n: fx.Node) -> Tensor:
            if node.target in PICKED and n is not node.args[0]:
                return self.record.constant[n]  # the index itself; _picked() saw to it that it is one
            value = steps.get(n)
            return (torch.tensor(0) if value is None else value).expand(example(n).shape)

        moved: Any = fx.node.map_arg((node.args, dict(node.kwargs)), operand)
        args, kwargs = moved
        kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "layout", "memory_format")}
        if node.target in CASTS:
            return args[0]
        if node.target is aten.constant_pad_nd.default:
            args = (*args[:2], padding)  # ready at step 0 and claiming nothing, whatever is padded with
        if node.target in (aten.view.default, aten._unsafe_view.default):
            return args[0].reshape(args[1])
        target: Any = node.target
        return target(*args, **kwargs)

    def zeros_until_written(self, node: fx.Node) -> Steps | None:
        """From which step on each row counts that is summed over, if the rows are stale where the loop has zeros alone.

        Sums of some of the rows, such as means of blocks, are left as they are: who reads them may have a mask.
        """
        f, dims = self.of(node.args[0]), arguments(node).dim
        if f.ready is None or f.blank is None or f.absorbed is not None or len(dims or ()) != 1 or not f.ready.dim():
            return None
        written = full_rank(shrink(f.ready), example(operand(node)).dim())
        rows_alone = written.numel() == written.shape[dims[0]]
        return written if rows_alone and bool((f.blank >= f.ready).all()) else None

    def reduce(self, node: fx.Node, dims: Any, keepdim: bool) -> Facts:
        """A reduction is ready when all it reads is."""
        f = self.of(node.args[0])
        if f.ready is None:
            return CLEAN
        shape = example(operand(node)).shape
        dims = list(range(len(shape))) if dims in (None, []) else [d % len(shape) for d in pytree.tree_leaves(dims)]
        ready = f.ready.expand(shape).amax(dims, keepdim=keepdim) if shape else f.ready
        return Facts(ready=ready, sources=f.sources, trail=f.trail)

    def select(self, node: fx.Node, mask: Any, if_true: Any, if_false: Any) -> Facts:
        """`where(mask, if_true, if_false)`: what a side holds matters only while the mask can take it."""
        m, a, b = self.of(mask), self.raw(if_true), self.raw(if_false)
        from_true, from_false = or_zero(m.can_be_true), or_zero(m.can_be_false)
        sides = self._hidden(a, from_true, m.surely_false), self._hidden(b, from_false, m.surely_true)
        facts = replace(self.join([m, *sides]), hollow=sides[0].hollow | sides[1].hollow)
        a_kept, b_kept = self.kept(if_true, node), self.kept(if_false, node)
        facts = replace(
            facts,
            surely_kept=either(
                intersect(a_kept, b_kept),
                either(intersect(a_kept, m.surely_true), intersect(b_kept, m.surely_false)),
            ),
        )
        if not m.stale:
            # Where one side is a constant zero, or a constant floor, the result is it as long as the mask forces it.
            facts = replace(
                facts,
                zero=union(
                    self._forced(if_false, from_true, a.zero, lambda v: v == 0),
                    self._forced(if_true, from_false, b.zero, lambda v: v == 0),
                ),
                fill=union(
                    self._forced(if_false, from_true, a.fill, self._is_floor_of(node)),
                    self._forced(if_true, from_false, b.fill, self._is_floor_of(node)),
                ),
                removed=union(
                    self._forced(if_false, from_true, a.removed, lambda v: v == -math.inf),
                    self._forced(if_true, from_false, b.removed, lambda v: v == -math.inf),
                ),
            )
            # Until a mask can take the other side, the result is what this one is.
            for side, f, until in ((if_true, a, from_false), (if_false, b, from_true)):
                if isinstance(side, fx.Node) and example(side).dtype == example(node).dtype:
                    facts = replace(
                        facts,
                        zero=union(facts.zero, both(f.zero, until)),
                        fill=union(facts.fill, both(f.fill, until)),
                    )
        if facts.stale and facts.trail is None and isinstance(mask, fx.Node):
            facts = replace(
                facts, trail=(self._explain_mask(a if a.stale else b, from_true if a.stale else from_false), mask)
            )
        return self.silence(facts)

    def _explain_mask(self, f: Facts, start: Steps) -> str:
        ready, start = torch.broadcast_tensors(or_zero(f.ready), start)
        worst = int((ready - start).argmax())
        early, late = int(start.flatten()[worst]), int(ready.flatten()[worst])
        return f"this mask lets an element through from step {early} that is written at step {late}"

    def _hidden(self, f: Facts, start: Steps, while_: Interval | None) -> Facts:
        """Staleness of a value nobody looks at before `start`, nor in an interval of steps: one that may begin where
        the value, until then exactly zero or at a floor, no longer is."""
        unseen, by_zero, by_floor = (
            unseen_until(start, exact, while_) for exact in (None, f.zero, union(f.zero, f.fill))
        )
        absorbed = None if f.absorbed is None else torch.where(unseen >= f.absorbed, 0, f.absorbed)
        ready, hollow = f.ready, f.hollow
        if ready is not None:
            if bool(((by_zero >= ready) & (unseen < ready)).any()):
                hollow = hollow | f.sources
            absorbed = union(absorbed, torch.where((by_floor >= ready) & (by_zero < ready), ready, 0))
            ready = torch.where(by_floor >= ready, 0, ready)
        return self._tidy(Facts(ready=ready, absorbed=absorbed, sources=f.sources, trail=f.trail, hollow=hollow))

    def _forced(
        self, side: Any, other_from: Steps, other_until: Steps | None, test: Callable[[float], bool]
    ) -> Steps | None:
        """Until when a choice is a constant that passes a test: until the other side can be taken, and is not such."""
        if not self._is_constant(side, test):
            return None
        return other_from if other_until is None else torch.maximum(other_from, other_until)

    @staticmethod
    def _is_floor_of(node: fx.Node) -> Callable[[float], bool]:
        dtype = example(node).dtype
        return lambda v: dtype.is_floating_point and v <= floor_level(dtype)

    def _is_constant(self, value: Any, test: Callable[[float], bool]) -> bool:
        if isinstance(value, bool | int | float):
            return test(float(value))
        if isinstance(value, fx.Node) and value in self.record.constant:
            values = self.record.constant[value]
            return (
                values.numel() > 0 and bool((values == values.flatten()[0]).all()) and test(float(values.flatten()[0]))
            )
        return False

    def silence(self, f: Facts, *, by_arithmetic: bool = False) -> Facts:
        """An element that is exactly zero, or at a floor, until it is ready is never stale."""
        until = union(f.zero, f.fill)
        if f.ready is None or until is None:
            return f
        ready = torch.where(until >= f.ready, 0, f.ready)
        met = f.sources if by_arithmetic and bool((ready < f.ready).any()) else frozenset[str]()
        return replace(f, ready=ready, hollow=f.hollow | met)

    def contraction(self, node: fx.Node, a: Any, b: Any) -> Facts:
        """`a [..., m, k] @ b [..., k, n]`: a term is harmless while one factor is zero and the other is finite."""
        fa, fb = self.of(a), self.of(b)
        if not fa.stale and not fb.stale:
            return CLEAN
        if not self.is_finite(a) or not self.is_finite(b):
            return self.lost(node, MAY_BE_INFINITE)
        found = self._sum_of_products(node, a, b, fa, fb)
        if found.stale:
            hidden = self._hide(node, (a, b), (fa, fb), (1, 0))
            found = found if hidden is None else self._sum_of_products(node, a, b, *hidden)
        return found

    def _sum_of_products(self, node: fx.Node, a: Any, b: Any, fa: Facts, fb: Facts) -> Facts:
        shape_a, shape_b = example(a).shape, example(b).shape
        vector_a, vector_b = len(shape_a) == 1, len(shape_b) == 1

        def left(steps: Steps | None) -> Tensor:  # [..., m, k, 1]
            full = full_rank(steps, len(shape_a))
            return (full[None] if vector_a else full).unsqueeze(-1)

        def right(steps: Steps | None) -> Tensor:  # [..., 1, k, n]
            full = full_rank(steps, len(shape_b))
            return (full[:, None] if vector_b else full).unsqueeze(-3)

        ready = torch.maximum(left(fa.ready), right(fb.ready))
        silent = torch.maximum(left(fa.zero), right(fb.zero))
        silenced = (silent >= ready) & (ready > 0)
        ready = torch.where(silenced, 0, ready)
        sources = fa.sources | fb.sources
        hollow = sources if bool(silenced.any()) else frozenset[str]()
        inner = shape_a[-1]
        ready = ready.amax(-2) if inner else ready.new_zeros(())
        if vector_b:
            ready = ready[..., 0] if ready.dim() else ready
        if vector_a and ready.dim():
            ready = ready[..., 0, :] if not vector_b else ready[..., 0]
        if not bool((ready > 0).any()):
            return Facts(hollow=hollow)
        trail = fa.trail or fb.trail or (self._explain_contraction(silent, (a, b)), node)
        return Facts(ready=ready, sources=sources, trail=trail, hollow=hollow)

    def _hide(
        self, node: fx.Node, operands: tuple[Any, Any], facts: tuple[Facts, Facts], rows: tuple[int, int]
    ) -> tuple[Facts, Facts] | None:
        """What is known of the operands of a contraction once one of them is made zero where it meets rows of zeros
        that are not written yet. None where that does not help.

        `rows` are the dimensions that are summed over, from the end but one: 0 the last but one, 1 the last.
        """
        for stale, other in ((0, 1), (1, 0)):
            f = facts[stale]
            if f.ready is None or f.blank is None or not isinstance(operands[other], fx.Node):
                continue
            shape, others = example(operands[stale]).shape, example(operands[other]).shape
            ready, blank = (full_rank(x, len(shape)).expand(shape) for x in (f.ready, f.blank))
            if len(shape) > 1:  # [..., k]: all that a term is made of must be zero
                ready, blank = (reduce(-1 if rows[stale] == 0 else -2) for reduce in (ready.amax, blank.amin))
            if not bool((blank >= ready).all()):
                continue
            along = -1 if rows[other] == 1 or len(others) == 1 else -2
            if len(others) > 1:
                ready = ready.unsqueeze(-1 if rows[other] == 0 else -2)
            place = node.args.index(operands[other])
            stays_nan = self._stays_nan(node, place)
            if stays_nan is not None and not bool((stays_nan & (ready == 0)).any(along).all()):
                continue  # of a row of NaN nothing would be left
            zero = self.silence(replace(facts[other], zero=union(facts[other].zero, ready)))
            if zero.ready is not None and bool((zero.ready > 0).any()):  # beside the rows of zeros, too
                continue
            self.hidden[node, place] = shrink(ready)
            return (f, zero) if stale == 0 else (zero, f)
        return None

    def _stays_nan(self, node: fx.Node, place: int) -> Tensor | None:
        """Which elements of an operand surely are NaN where a softmax that it is computed from has a row of NaN; None
        where none has."""
        behind = ancestors([operand(node, place)])
        softmaxes = [n for n in behind if n.target in SOFTMAX and self.may_be_nan(n)]
        shape = example(operand(node, place)).shape
        stays = torch.ones(shape, dtype=torch.bool)
        for softmax in softmaxes:
            readers = self._readers_of(softmax, torch.tensor(0))
            if readers is None or not readers.unknown.isdisjoint(behind):
                return torch.zeros(shape, dtype=torch.bool)
            stays = stays & readers.open.get((node, place), torch.tensor(True))
        return stays if softmaxes else None

    def _explain_contraction(self, silent: Steps, factors: tuple[Any, Any]) -> str:
        if bool((silent > 0).any()):
            return "its weights are not exactly zero until every row they meet is written"
        for node in factors:
            while isinstance(node, fx.Node) and node.target in MOVEMENT:
                node = node.args[0]
            if isinstance(node, fx.Node) and node.target in SOFTMAX and self.of(node.args[0]).fill is not None:
                return (
                    "the softmax before it is masked, but no score is shown to stand out at every step; setting the "
                    "masked weights to zero behind the softmax makes sure"
                )
        return "it reads every row, and no mask makes the unwritten ones exactly zero"

    def softmax(self, node: fx.Node) -> Facts:
        """Floors become exact zeros beside a score that stands out; safe softmax makes zeros of -inf alone, too."""
        value, dim = operand(node), arguments(node).dim
        f = self.raw(value)
        shape = example(value).shape
        if f.absorbed is not None and not self._floors_vanish(node) and not self._may_be_settled(node):
            why = "where the mask that is added keeps no score, all weigh the same, and their gradients reach every row"
            f = replace(f.counted, trail=(f"{why}; setting the masked weights to zero behind the softmax helps", node))
        if f.ready is not None:
            if self.magnitudes.found[node] is None:
                return self.lost(node, MAY_BE_INFINITE)
            ready = f.ready.expand(shape).amax(dim, keepdim=True) if shape else f.ready
            trail = f.trail or ("softmax reads scores of rows that are not written yet", node)
            return Facts(ready=ready, sources=f.sources, trail=trail)
        if f.fill is None:
            return CLEAN
        if self._floors_vanish(node):
            return Facts(zero=f.fill)
        if (until := self._settles(node)) is None:
            return CLEAN
        self.settled[node] = until
        return Facts(zero=until)

    def _may_be_settled(self, node: fx.Node) -> bool:
        return self._settles(node) is not None

    def _settles(self, node: fx.Node) -> Steps | None:
        """Until when each score may be made an exact zero behind a softmax that may be NaN for all this analysis knows.

        It is -inf until then. Beside another score, exp makes a zero of it. Where there is none, the row is NaN in the
        loop, and it is NaN without those elements, too, to those who sum over it, if it has others (`nan_rows`).
        """
        f, magnitude = self.raw(node.args[0]), self.magnitudes.of(node.args[0])
        if f.stale or magnitude is None:
            return None
        until = f.fill if magnitude.only_infinite_floors else f.removed
        shape = example(operand(node)).shape
        if until is None or not shape or not shape.numel():
            return None
        if until is f.removed and f.absorbed is not None and bool((f.absorbed > until).any()):
            return None  # of these the gradient is not that of a zero
        if (magnitude.stands_out and self.one_is_kept(node)) or self._has_given_score(node):
            return until
        return None if self._readers_of(node, until) is None else until

    def _readers_of(self, softmax: fx.Node, until: Steps) -> Readers | None:
        """Those of a softmax of which each weight may be taken for zero until some step."""
        if softmax not in self._readers:
            self._readers[softmax] = sums_over_rows(softmax, until, self._ahead, self._moved, self.record)
        return self._readers[softmax]

    def may_be_nan(self, softmax: fx.Node) -> bool:
        """Whether all scores of a row may be -inf, given ones that are added included."""
        scores = self.magnitudes.of(operand(softmax))
        if softmax.target is aten._safe_softmax.default or self._has_given_score(softmax):
            return False
        return scores is None or scores.bound == math.inf or not (scores.finite or self.one_is_kept(softmax))

    def _has_given_score(self, softmax: fx.Node) -> bool:
        """Whether beside the scores of each row stands one as it is given, such as a sink: -inf may be added alone."""
        joined = operand(softmax)
        while joined.target in CASTS:
            joined = operand(joined)
        if joined.target is not aten.cat.default:
            return False
        rank, how = example(joined).dim(), arguments(joined)
        if how.dim % rank != arguments(softmax).dim % rank:
            return False
        for part in how.tensors:
            source = part
            while source.target in REARRANGED | CASTS:
                source = operand(source)
            if (
                source.op == "placeholder"
                and example(part).numel()
                and self.is_finite(part)
                and not self.of(part).stale
            ):
                return True
        return False

    def _ahead(self, node: fx.Node) -> Facts:
        """What is known of a node that may come later in the body."""
        todo = [node]
        while todo:
            if (last := todo[-1]) in self.facts:
                todo.pop()
            elif later := [n for n in last.all_input_nodes if n not in self.facts]:
                todo += later
            else:
                self.run(last)
        return self.facts[node]

    def _moved(self, node: fx.Node, of: fx.Node, numbers: Tensor) -> Tensor:
        return self._move(node, {of: numbers})

    def _floors_vanish(self, node: fx.Node) -> bool:
        magnitude = self.magnitudes.of(node.args[0])
        if magnitude is None:
            return False
        is_safe = node.target is aten._safe_softmax.default and magnitude.only_infinite_floors
        return is_safe or (magnitude.stands_out and self.one_is_kept(node))

    def _softmax_magnitude(self, node: fx.Node) -> Magnitude | None:
        """Weights, unless all scores of a row may be -inf, which makes NaN."""
        scores = self.magnitudes.of(node.args[0])
        if scores is None:
            return None
        some = scores.finite or node.target is aten._safe_softmax.default or self.one_is_kept(node)
        # A row of a softmax that is settled later may be NaN. It is that in the loop as well, and so is what reads it.
        return Magnitude(1.0, 0.0) if some or self._may_be_settled(node) else None

    def _log_sum_magnitude(self, node: fx.Node) -> Magnitude | None:
        """A log-sum-exp is a number, unless all scores of a row may be -inf."""
        scores, dims = self.magnitudes.of(node.args[0]), cast("list[int]", node.args[1])
        if scores is None or len(dims) != 1:
            return None
        return DATA if scores.finite or self.one_is_kept(node) else None

    def _magnitude(self, node: fx.Node) -> Magnitude | None:
        if node.target in SOFTMAX:
            return self._softmax_magnitude(node)
        return self._log_sum_magnitude(node) if node.target is aten.logsumexp.default else self.magnitudes.derive(node)

    def one_is_kept(self, softmax: fx.Node) -> bool:
        """Whether at each step, in each row, some score is surely at no floor."""
        if softmax not in self._one_is_kept:
            self._one_is_kept[softmax] = self._keeps_known_ones(softmax) or self._keeps_best(softmax)
        return self._one_is_kept[softmax]

    def _keeps_known_ones(self, softmax: fx.Node) -> bool:
        value, dim = cast("tuple[fx.Node, Any]", softmax.args[:2])
        dim = dim[0] if isinstance(dim, list) else dim
        kept, rank = self.kept(value), example(value).dim()
        if kept is None or not rank:
            return kept is not None and covers(kept[0][None], kept[1][None], self.never)
        low, high = torch.broadcast_tensors(*(full_rank(end, rank) for end in kept))
        low, high = (x.movedim(dim, -1).flatten(0, -2) if rank > 1 else x[None] for x in (low, high))
        return all(covers(lo, hi, self.never) for lo, hi in zip(low, high, strict=True))

    def _keeps_best(self, softmax: fx.Node) -> bool:
        """Whether masks alone make floors, and one of them keeps the best of some blocks."""
        if softmax.target not in SOFTMAX:
            return False
        try:
            scores = walk_up(softmax, self.record)
        except Unrecognised:
            return False
        size, mask = self.magnitudes.of(scores.product.node), conjunction(scores.conditions, self.record)
        if size is None or size.floors is not None:
            return False
        return keeps_best(mask, scores.product.shape, self.record, self.magnitudes)

    def known_gather(self, node: fx.Node, dim: int, index: fx.Node, value: fx.Node) -> Facts:
        """Rows picked by numbers known at each step: clean if each is written by the time it is read."""
        f = self.of(value)
        if f.ready is None:
            return CLEAN
        index_steps = self.record.known.get(index)
        if index_steps is None or example(index).numel() * self.record.length > LIMIT:
            return self.lost(node, f"{node.target} picks rows by numbers that depend on data, or by too many")
        shape = example(value).shape
        per_row = f.ready.expand(shape).movedim(dim, 0).flatten(1).amax(1) if len(shape) > 1 else f.ready.expand(shape)
        rows = index_steps.table().reshape(self.record.length, -1)
        if bool((rows < -len(per_row)).any() or (rows >= len(per_row)).any()):
            return self.lost(node, f"{node.target} picks a row that is not there")
        needed = per_row[rows]
        now = torch.arange(self.record.length)[:, None]
        late = needed > now
        if not bool(late.any()):
            return CLEAN
        t, i = (int(x) for x in late.nonzero()[0])
        why = f"at step {t} it reads a row that is written at step {int(needed[t, i])}"
        return Facts(ready=torch.tensor(self.lost_for_good), sources=f.sources, trail=(why, node))

    def _tidy(self, f: Facts) -> Facts:
        """Drop staleness that is none, and shrink dimensions along which all steps agree."""
        if f.absorbed is not None and not bool((f.absorbed > 0).any()):
            f = replace(f, absorbed=None)
        if f.ready is not None and not bool((f.ready > 0).any()):
            f = replace(f, ready=None)
        if f.ready is None and f.absorbed is None:
            f = replace(f, sources=frozenset(), trail=None)
        changes: dict[str, Any] = {}
        for name in FIRST_STEPS:
            if (steps := getattr(f, name)) is not None:
                changes[name] = shrink(steps)
        for name in INTERVALS:
            if (interval := getattr(f, name)) is not None:
                changes[name] = (shrink(interval[0]), shrink(interval[1]))
        return replace(f, **changes)


def with_gradients(graph: fx.Graph) -> set[fx.Node]:
    """The operators whose operands gradients may reach: not through integers, such as the indices of a top-k, and not
    through values that are only compared, or detached. Who reads what has no readers here, nobody knows."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        value: Any = node.meta.get("val")
        is_integer = isinstance(value, Tensor) and not is_inexact(value.dtype)
        stops_here = is_integer or node.target is aten.detach.default
        if not stops_here and (not node.users or not found.isdisjoint(node.users)):
            found.add(node)
    return found


def analyse(
    body: fx.GraphModule,
    record: ScanRecord,
    given: Given,
    stale: dict[fx.Node, Facts],
) -> Analysis:
    """Go through a lowered body, given what its inputs are like and the views of caches that are stale.

    A carry holds what comes from outside and what the steps put there. Step by step, that is finite, and hollow only as
    far as said, as long as each step makes it so of what is: supposed at first, and taken back where it proves wrong.
    """
    carries = body.graph.find_nodes(op="placeholder")[: len(record.carries)]
    updates = [operand(u) if u.target is aten.clone.default else u for u in results(body)[: len(record.carries)]]
    infinite = {carry for carry in carries if not _is_finite(given.magnitudes.get(carry, unmeasured(carry)))}
    hollow = dict.fromkeys(carries, frozenset[str]())
    reached = with_gradients(body.graph)
    while True:
        analysis = Analysis(record, reached)
        held: dict[fx.Node, fx.Node] = {}  # the nodes that are a carry before or after the step
        for carry, update, kind in zip(carries, updates, record.carries, strict=True):
            if isinstance(kind, Latest | Recurrent | Rows):
                held[carry] = carry
            if isinstance(kind, Rows):
                held[update] = carry
                analysis.writes[update] = kind
        for node in body.graph.nodes:
            if node in held:
                magnitude = None if held[node] in infinite else unmeasured(node)
                analysis.given(node, magnitude, replace(stale.get(node, CLEAN), hollow=hollow[held[node]]))
            elif node.op == "placeholder" and node not in record.known and node not in record.constant:
                magnitude = given.magnitudes.get(node, unmeasured(node))
                analysis.given(node, magnitude, given.facts.get(node, CLEAN))
            else:
                analysis.run(node)
        settled = True
        for carry, update, kind in zip(carries, updates, record.carries, strict=True):
            if isinstance(kind, Latest | Recurrent | Rows):
                put = kind.written if isinstance(kind, Rows) else update
                found = hollow[carry] | analysis.of(put).hollow
                settled &= found == hollow[carry] and (carry in infinite or analysis.is_finite(put))
                hollow[carry] = found
                infinite |= set() if analysis.is_finite(put) else {carry}
        if settled:
            return analysis


# Elements of a comparison that are looked at one by one.
_COMPARED_LIMIT = 2**22


def _is_finite(magnitude: Magnitude | None) -> bool:
    return magnitude is not None and magnitude.finite


def explain(facts: Facts) -> tuple[str, str, str]:
    """Operation, place and reason of what left a value stale."""
    if facts.trail is None:
        return "scan", "unknown", "an output reads rows that are not written yet"
    why, node = facts.trail
    return str(node.target), location(node), why
