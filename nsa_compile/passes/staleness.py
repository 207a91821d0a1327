"""Following unwritten rows through a step: the proof behind eliminate_guards.

Replace a buffer by its final contents, and at step t the rows written after t hold values of the future: they are
*stale*. This module follows them through the body, operator by operator. For each element of each value it keeps

- `ready`: from this step on the element is what the loop computes (0: always);
- `zero`: before this step it is exactly zero, in the loop too;
- `fill`: before this step it is a score so low that softmax makes it zero, in the loop too;

each a tensor of steps in the element's own layout, with size-1 dimensions where all agree, so that a slice, an
unfold or a transpose is followed by applying it to the steps themselves. Masks are known at compile time or
conjunctions with what is, so for each element the first step at which it can be true, or false, is known.

Claims hold for finite values: 0 · inf is NaN. Operators that make infinities of finite values, such as exp, therefore
do not let a stale row pass; a sum or product that overflows is outside the claim. Whatever is not understood makes its
result stale for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from nsa_compile.passes.known import LIMIT
from nsa_compile.passes.scans import ScanRecord, aten, example, location
from nsa_compile.passes.step_values import Choice, Separable, StepMask, StepValue, Table

Steps = Tensor  # int64, broadcastable to the value's shape


@dataclass(frozen=True)
class Facts:
    """What is known of one value. None for a step tensor means 0 everywhere."""

    ready: Steps | None = None
    zero: Steps | None = None
    fill: Steps | None = None
    # For booleans: the first step at which an element can be true, and false; and an interval of steps, both ends
    # included, at which it surely is.
    can_be_true: Steps | None = None
    can_be_false: Steps | None = None
    surely_true: tuple[Steps, Steps] | None = None
    surely_false: tuple[Steps, Steps] | None = None
    # After a fill: the steps at which an element surely was not filled.
    surely_kept: tuple[Steps, Steps] | None = None
    # Which guards the stale elements come from, and the last place that might have stopped them.
    sources: frozenset[str] = frozenset()
    trail: tuple[str, fx.Node] | None = None

    @property
    def stale(self) -> bool:
        return self.ready is not None

    @property
    def says_anything(self) -> bool:
        steps = (self.ready, self.zero, self.fill, self.can_be_true, self.can_be_false)
        return any(x is not None for x in (*steps, self.surely_true, self.surely_false, self.surely_kept))


CLEAN = Facts()


class Analysis:
    """One pass over a lowered body, given what its inputs are like."""

    def __init__(self, record: ScanRecord) -> None:
        self.record = record
        self.never = record.length
        self.facts: dict[fx.Node, Facts] = {}

    def run(self, node: fx.Node) -> None:
        """Derive the facts of one node from those of its inputs."""
        with unset_fake_temporarily(), torch.no_grad():
            facts = self._derive(node)
            if facts.surely_kept is None and node.target not in SOFTMAX and self._reads_filled(node):
                # A floor that went through an operator without a rule for it is still no kept score. Indices and
                # masks made from floors are no scores.
                facts = replace(facts, surely_kept=_NEVER_SURE)
            self.facts[node] = self._tidy(facts)

    def _reads_filled(self, node: fx.Node) -> bool:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and not value.dtype.is_floating_point:
            return False
        return any(f.fill is not None or f.surely_kept is not None for f in map(self.of, node.all_input_nodes))

    def of(self, value: Any) -> Facts:
        return self.facts.get(value, CLEAN) if isinstance(value, fx.Node) else CLEAN

    # -- the rules, in the order they are tried

    def _derive(self, node: fx.Node) -> Facts:
        inputs = [self.of(n) for n in node.all_input_nodes]
        if node in self.record.known:
            return self._known_value(self.record.known[node])
        if node in self.record.constant:
            return CLEAN
        if node.op != "call_function":
            return CLEAN
        rule = RULES.get(node.target)
        if rule is not None:
            return rule(self, node)
        if not any(f.stale for f in inputs):
            return CLEAN
        if node.target in FINITE:
            return self.pointwise(node)
        if isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags:
            return self.lost(node, f"{node.target} may overflow on a row that is not written yet, and inf * 0 is NaN")
        return self.lost(node, f"{node.target} mixes written and unwritten rows in a way the analysis does not follow")

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
        if _ever(value.where(torch.isnan)):
            return CLEAN
        kept = value.where(lambda x: x > torch.finfo(dtype).min)
        if not _ever(value.where(lambda x: x <= torch.finfo(dtype).min)):
            return Facts(zero=zero)
        first_kept, kept_run = kept.run_of(True)
        return Facts(zero=zero, fill=first_kept, surely_kept=kept_run)

    def lost(self, node: fx.Node, why: str) -> Facts:
        """Everything of the result is stale for good."""
        inputs = [f for f in (self.of(n) for n in node.all_input_nodes) if f.stale]
        sources = frozenset().union(*(f.sources for f in inputs))
        trail = next((f.trail for f in inputs if f.trail), None) or (why, node)
        return Facts(ready=torch.tensor(self.never), sources=sources, trail=trail)

    def pointwise(self, node: fx.Node) -> Facts:
        return self._join([self.of(n) for n in node.all_input_nodes])

    def _join(self, inputs: list[Facts]) -> Facts:
        stale = [f for f in inputs if f.stale]
        if not stale:
            return CLEAN
        ready = stale[0].ready
        for f in stale[1:]:
            ready = torch.maximum(ready, f.ready)
        sources = frozenset().union(*(f.sources for f in stale))
        return Facts(ready=ready, sources=sources, trail=next((f.trail for f in stale if f.trail), None))

    def movement(self, node: fx.Node) -> Facts:
        """Apply the operator to the steps instead of to the values."""
        inputs = {n: self.of(n) for n in node.all_input_nodes}
        moved: dict[str, Any] = {}
        for name in ("ready", "zero", "fill", "can_be_true", "can_be_false"):
            if any(getattr(f, name) is not None for f in inputs.values()):
                moved[name] = self._move(node, {n: getattr(f, name) for n, f in inputs.items()})
        for name in ("surely_true", "surely_false", "surely_kept"):
            # Padding is sure of nothing.
            if node.target is aten.constant_pad_nd.default:
                continue
            if all(getattr(f, name) is not None for f in inputs.values()) and inputs:
                moved[name] = tuple(
                    self._move(node, {n: getattr(f, name)[end] for n, f in inputs.items()}) for end in (0, 1)
                )
        joined = self._join(list(inputs.values()))
        return Facts(**moved, sources=joined.sources, trail=joined.trail)

    def _move(self, node: fx.Node, steps: dict[fx.Node, Steps | None]) -> Steps:
        def operand(n: fx.Node) -> Tensor:
            if node.target in INDEXED and n is not node.args[0]:
                return self.record.constant[n]  # the index itself; _picked() saw to it that it is one
            value = steps.get(n)
            return (torch.tensor(0) if value is None else value).expand(example(n).shape)

        args: Any
        kwargs: Any
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), operand)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "device", "layout", "memory_format")}
        if node.target in CASTS:
            return args[0]
        if node.target is aten.constant_pad_nd.default:
            args = args[:2]  # the padding is ready at step 0 and claims nothing, whatever its value
        return node.target(*args, **kwargs)

    def reduce(self, node: fx.Node, dims: Any, keepdim: bool) -> Facts:
        """A reduction is ready when all it reads is."""
        f = self.of(node.args[0])
        if not f.stale:
            return CLEAN
        shape = example(node.args[0]).shape
        dims = list(range(len(shape))) if dims in (None, []) else [d % len(shape) for d in pytree.tree_leaves(dims)]
        ready = f.ready.expand(shape).amax(dims, keepdim=keepdim) if shape else f.ready
        return Facts(ready=ready, sources=f.sources, trail=f.trail)

    def select(self, mask: Any, if_true: Any, if_false: Any) -> Facts:
        """`where(mask, if_true, if_false)`: what a side holds matters only while the mask can take it."""
        m, a, b = self.of(mask), self.of(if_true), self.of(if_false)
        from_true, from_false = _or_zero(m.can_be_true), _or_zero(m.can_be_false)
        facts = self._join([m, self._hidden_before(a, from_true), self._hidden_before(b, from_false)])
        if not m.stale:
            # Where one side is a constant zero, or a constant floor, the result is it as long as the mask forces it.
            zero = _union(self._zero_until(if_false, from_true, a.zero), self._zero_until(if_true, from_false, b.zero))
            fill = _union(
                from_true if self._is_floor(if_false) else None, from_false if self._is_floor(if_true) else None
            )
            masked, kept = (a, m.surely_true) if self._is_floor(if_false) else (b, m.surely_false)
            facts = replace(facts, zero=zero)
            if fill is not None:
                facts = _with_fill(replace(facts, fill=masked.fill, surely_kept=masked.surely_kept), fill, kept)
        if facts.stale and facts.trail is None and isinstance(mask, fx.Node):
            facts = replace(
                facts, trail=(self._explain_mask(a if a.stale else b, from_true if a.stale else from_false), mask)
            )
        return self._silence(facts)

    def _explain_mask(self, f: Facts, start: Steps) -> str:
        ready, start = torch.broadcast_tensors(_or_zero(f.ready), start)
        worst = int((ready - start).argmax())
        early, late = int(start.flatten()[worst]), int(ready.flatten()[worst])
        return f"this mask lets an element through from step {early} that is written at step {late}"

    def _hidden_before(self, f: Facts, start: Steps) -> Facts:
        """Staleness of a value nobody looks at before `start`."""
        if not f.stale:
            return f
        ready = torch.where(start >= f.ready, 0, f.ready)
        return replace(f, ready=ready) if bool((ready > 0).any()) else CLEAN

    def _zero_until(self, constant_side: Any, other_from: Steps, other_zero: Steps | None) -> Steps | None:
        if not self._is_constant(constant_side, lambda v: v == 0):
            return None
        return other_from if other_zero is None else torch.maximum(other_from, other_zero)

    def _is_floor(self, value: Any) -> bool:
        """-inf, or the lowest finite number: what softmax turns into an exact zero beside any kept score."""
        if isinstance(value, fx.Node) and example(value).dtype.is_floating_point:
            lowest = torch.finfo(example(value).dtype).min
        else:
            lowest = torch.finfo(torch.float32).min
        return self._is_constant(value, lambda v: v <= lowest)

    def _is_constant(self, value: Any, test: Callable[[float], bool]) -> bool:
        if isinstance(value, bool | int | float):
            return test(float(value))
        if isinstance(value, fx.Node) and value in self.record.constant:
            values = self.record.constant[value]
            return (
                values.numel() > 0 and all(test(float(v)) for v in values.unique()[:2]) and values.unique().numel() == 1
            )
        return False

    def _silence(self, f: Facts) -> Facts:
        """An element that is exactly zero, or a constant floor, until it is ready is never stale."""
        if not f.stale:
            return f
        until = _union(f.zero, f.fill)
        return f if until is None else self._hidden_before_keeping(f, until)

    def _hidden_before_keeping(self, f: Facts, start: Steps) -> Facts:
        ready = torch.where(start >= f.ready, 0, f.ready)
        if bool((ready > 0).any()):
            return replace(f, ready=ready)
        return replace(f, ready=None, sources=frozenset(), trail=None)

    def contraction(self, node: fx.Node, a: Any, b: Any) -> Facts:
        """`a [..., m, k] @ b [..., k, n]`: a term is harmless while one factor is exactly zero."""
        fa, fb = self.of(a), self.of(b)
        if not fa.stale and not fb.stale:
            return CLEAN
        shape_a, shape_b = example(a).shape, example(b).shape
        vector_a, vector_b = len(shape_a) == 1, len(shape_b) == 1

        def left(steps: Steps | None) -> Tensor:  # [..., m, k, 1]
            full = _full_rank(steps, len(shape_a))
            return (full[None] if vector_a else full).unsqueeze(-1)

        def right(steps: Steps | None) -> Tensor:  # [..., 1, k, n]
            full = _full_rank(steps, len(shape_b))
            return (full[:, None] if vector_b else full).unsqueeze(-3)

        ready = torch.maximum(left(fa.ready), right(fb.ready))
        silent = torch.maximum(left(fa.zero), right(fb.zero))
        ready = torch.where(silent >= ready, 0, ready)
        inner = shape_a[-1]
        ready = ready.amax(-2) if inner else ready.new_zeros(())
        if vector_b:
            ready = ready[..., 0] if ready.dim() else ready
        if vector_a and ready.dim():
            ready = ready[..., 0, :] if not vector_b else ready[..., 0]
        if not bool((ready > 0).any()):
            return CLEAN
        joined = self._join([fa, fb])
        trail = joined.trail or (self._explain_contraction(silent), node)
        return Facts(ready=ready, sources=joined.sources, trail=trail)

    @staticmethod
    def _explain_contraction(silent: Steps) -> str:
        if bool((silent > 0).any()):
            return "its weights are not exactly zero until every row they meet is written"
        return "it reads every row, and no mask makes the unwritten ones exactly zero"

    def softmax(self, node: fx.Node, *, needs_a_kept_score: bool) -> Facts:
        """Filled scores become exact zeros, provided some score is surely kept at each step."""
        value, dim = node.args[0], node.args[1]
        f = self.of(value)
        shape = example(value).shape
        if not shape:
            return f
        dim = dim % len(shape)
        if f.stale:
            ready = f.ready.expand(shape).amax(dim, keepdim=True)
            trail = f.trail or ("softmax reads scores of rows that are not written yet", node)
            return Facts(ready=ready, sources=f.sources, trail=trail)
        if f.fill is None:
            return CLEAN
        if needs_a_kept_score and not self._always_one_kept(f, shape, dim):
            return CLEAN
        return Facts(zero=f.fill)

    def _always_one_kept(self, f: Facts, shape: torch.Size, dim: int) -> bool:
        if f.surely_kept is None:
            return False
        low, high = (_full_rank(end, len(shape)) for end in f.surely_kept)
        low, high = torch.broadcast_tensors(low, high)
        low, high = (x.movedim(dim, -1).flatten(0, -2) if x.dim() > 1 else x[None] for x in (low, high))
        return all(_covers(lo, hi, self.record.length) for lo, hi in zip(low, high, strict=True))

    def known_gather(self, node: fx.Node, dim: int, index: fx.Node, value: fx.Node) -> Facts:
        """Rows picked by numbers known at each step: clean if each is written by the time it is read."""
        f = self.of(value)
        if not f.stale:
            return CLEAN
        index_steps = self.record.known.get(index)
        if index_steps is None or example(index).numel() * self.record.length > LIMIT:
            return self.lost(node, f"{node.target} picks rows by numbers that depend on data, or by too many")
        shape = example(value).shape
        per_row = f.ready.expand(shape).movedim(dim, 0).flatten(1).amax(1) if len(shape) > 1 else f.ready.expand(shape)
        needed = per_row[index_steps.table().reshape(self.record.length, -1)]
        now = torch.arange(self.record.length)[:, None]
        late = needed > now
        if not bool(late.any()):
            return CLEAN
        t, i = (int(x) for x in late.nonzero()[0])
        why = f"at step {t} it reads a row that is written at step {int(needed[t, i])}"
        return Facts(ready=torch.tensor(self.never), sources=f.sources, trail=(why, node))

    def _tidy(self, f: Facts) -> Facts:
        """Drop staleness that is none, and shrink dimensions along which all steps agree."""
        if f.ready is not None and not bool((f.ready > 0).any()):
            f = replace(f, ready=None, sources=frozenset(), trail=None)
        changes: dict[str, Any] = {}
        for name in ("ready", "zero", "fill", "can_be_true", "can_be_false"):
            if (steps := getattr(f, name)) is not None:
                changes[name] = _shrink(steps)
        for name in ("surely_true", "surely_false", "surely_kept"):
            if (interval := getattr(f, name)) is not None:
                changes[name] = (_shrink(interval[0]), _shrink(interval[1]))
        return replace(f, **changes)


def _ever(value: Table | StepMask) -> bool:
    """Whether a boolean is true anywhere, at any step."""
    first, _ = value.run_of(True)
    return bool((first < _steps_of(value)).any())


def _steps_of(value: Table | StepMask) -> int:
    return value.length if isinstance(value, StepMask) else value.values.shape[0]


def _covers(low: Tensor, high: Tensor, length: int) -> bool:
    """Whether closed intervals cover the steps 0 … length − 1."""
    order = low.argsort()
    reached = -1
    for lo, hi in zip(low[order].tolist(), high[order].tolist(), strict=True):
        if lo > reached + 1:
            break
        reached = max(reached, hi)
    return reached >= length - 1


def _or_zero(steps: Steps | None) -> Steps:
    return torch.tensor(0) if steps is None else steps


def _union(a: Steps | None, b: Steps | None) -> Steps | None:
    if a is None or b is None:
        return b if a is None else a
    return torch.maximum(a, b)


def _full_rank(steps: Steps | None, rank: int) -> Steps:
    value = _or_zero(steps)
    return value.reshape([1] * (rank - value.dim()) + list(value.shape))


def _shrink(steps: Steps) -> Steps:
    for dim in range(steps.dim()):
        if steps.shape[dim] > 1:
            first = steps.narrow(dim, 0, 1)
            if bool((steps == first).all()):
                steps = first
    return steps.clone() if steps.numel() == 1 or any(s == 0 for s in steps.stride()) else steps


# -- rules by operator


def _and(analysis: Analysis, node: fx.Node) -> Facts:
    a, b = (analysis.of(x) for x in node.args[:2])
    facts = analysis._join([a, b])
    return replace(
        facts,
        can_be_true=_union(a.can_be_true, b.can_be_true),
        can_be_false=_both(a.can_be_false, b.can_be_false),
        surely_true=_intersect(a.surely_true, b.surely_true),
        surely_false=_either(a.surely_false, b.surely_false),
    )


def _or(analysis: Analysis, node: fx.Node) -> Facts:
    a, b = (analysis.of(x) for x in node.args[:2])
    facts = analysis._join([a, b])
    return replace(
        facts,
        can_be_true=_both(a.can_be_true, b.can_be_true),
        can_be_false=_union(a.can_be_false, b.can_be_false),
        surely_true=_either(a.surely_true, b.surely_true),
        surely_false=_intersect(a.surely_false, b.surely_false),
    )


def _both(a: Steps | None, b: Steps | None) -> Steps | None:
    return None if a is None or b is None else torch.minimum(a, b)


def _intersect(a, b):
    return None if a is None or b is None else (torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1]))


def _either(a, b):
    """An interval at which one of two conditions surely holds: the longer one, element by element."""
    if a is None or b is None:
        return b if a is None else a
    longer = (a[1] - a[0]) >= (b[1] - b[0])
    return torch.where(longer, a[0], b[0]), torch.where(longer, a[1], b[1])


def _not(analysis: Analysis, node: fx.Node) -> Facts:
    f = analysis.of(node.args[0])
    return replace(
        f,
        can_be_true=f.can_be_false,
        can_be_false=f.can_be_true,
        surely_true=f.surely_false,
        surely_false=f.surely_true,
    )


def _mul(analysis: Analysis, node: fx.Node) -> Facts:
    a, b = (analysis.of(x) for x in node.args[:2])
    zeros = [_zero_as_factor(analysis, x) for x in node.args[:2]]
    return analysis._silence(replace(analysis._join([a, b]), zero=_union(*zeros)))


def _zero_as_factor(analysis: Analysis, value: Any) -> Steps | None:
    """Until when a factor is zero; a boolean is while it cannot be true."""
    facts = analysis.of(value)
    return facts.can_be_true if isinstance(value, fx.Node) and example(value).dtype == torch.bool else facts.zero


def _add(analysis: Analysis, node: fx.Node) -> Facts:
    """An additive mask: whatever the score, −inf below it is −inf."""
    a, b = (analysis.of(x) for x in node.args[:2])
    facts = analysis._join([a, b])
    for mask, value in ((a, node.args[0]), (b, node.args[1])):
        infinite = isinstance(value, fx.Node) and _fills_with_infinity(analysis, value)
        if mask.fill is not None and infinite and node.kwargs.get("alpha", 1) == 1:
            facts = _with_fill(facts, mask.fill, mask.surely_kept)
        elif mask.fill is not None or mask.surely_kept is not None:
            facts = replace(facts, surely_kept=_NEVER_SURE)  # its floor may be lost: no kept score
    facts = analysis._silence(facts)
    return replace(facts, zero=_both(a.zero, b.zero))


# An interval that holds no step.
_NEVER_SURE = (torch.tensor(1), torch.tensor(0))


def _with_fill(facts: Facts, fill: Steps | None, kept: tuple[Steps, Steps] | None) -> Facts:
    """A further mask over scores that may be masked already: filled by either, kept by both."""
    if facts.fill is not None or facts.surely_kept is not None:
        return replace(facts, fill=_union(facts.fill, fill), surely_kept=_intersect(facts.surely_kept, kept))
    return replace(facts, fill=fill, surely_kept=kept)


def _fills_with_infinity(analysis: Analysis, node: fx.Node) -> bool:
    while node.target in MOVEMENT and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    if node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
        sides = node.args[1:3]
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        sides = (node.args[0], node.args[2])
    else:
        values = analysis.record.known.get(node)
        if not isinstance(values, Table | Choice) or not example(node).dtype.is_floating_point:
            return False
        return not _ever(values.where(lambda x: x == torch.finfo(x.dtype).min))
    floors = [x for x in sides if analysis._is_floor(x)]
    # What was masked before must have been filled with -inf as well.
    inner = [x for x in sides if isinstance(x, fx.Node) and x not in floors and analysis.of(x).fill is not None]
    infinite = all(analysis._is_constant(x, lambda v: v == -math.inf) for x in floors)
    return bool(floors) and infinite and all(_fills_with_infinity(analysis, x) for x in inner)


def _div(analysis: Analysis, node: fx.Node) -> Facts:
    """Zero over a number stays zero. What is divided by a stale value may be infinite."""
    if analysis.of(node.args[1]).stale:
        return analysis.lost(node, "it divides by a row that is not written yet, and inf * 0 is NaN")
    facts = analysis.pointwise(node)
    if not isinstance(node.args[1], fx.Node) and node.args[1] != 0:
        facts = analysis._silence(replace(facts, zero=analysis.of(node.args[0]).zero))
    return facts


def _scaled_fill(analysis: Analysis, node: fx.Node) -> Facts:
    """A product; −inf times a positive number is still −inf."""
    facts = _mul(analysis, node)
    value, factor = node.args[:2]
    f = analysis.of(value)
    positive = isinstance(factor, int | float) and 0 < factor < math.inf
    if f.fill is not None and positive and isinstance(value, fx.Node) and _fills_with_infinity(analysis, value):
        facts = analysis._silence(replace(facts, fill=f.fill, surely_kept=f.surely_kept))
    return facts


def _where(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.select(*node.args[:3])


def _masked_fill(analysis: Analysis, node: fx.Node) -> Facts:
    value, mask, fill = node.args
    return analysis.select(mask, fill, value)


def _to_copy(analysis: Analysis, node: fx.Node) -> Facts:
    """A cast keeps zeros and floors; a boolean turned into a number is zero while it is false."""
    f = analysis.of(node.args[0])
    if example(node.args[0]).dtype == torch.bool and example(node).dtype != torch.bool:
        return Facts(ready=f.ready, zero=f.can_be_true, sources=f.sources, trail=f.trail)
    fill = f.fill if example(node).dtype.is_floating_point else None
    return replace(f, fill=fill)


def _reduction(analysis: Analysis, node: fx.Node) -> Facts:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return analysis.reduce(node, dims, bool(keepdim))


def _full_reduction(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.reduce(node, None, False)


def _matmul(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.contraction(node, node.args[0], node.args[1])


def _addmm(analysis: Analysis, node: fx.Node) -> Facts:
    product = analysis.contraction(node, node.args[1], node.args[2])
    return analysis._join([analysis.of(node.args[0]), product])


def _softmax(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.softmax(node, needs_a_kept_score=True)


def _safe_softmax(analysis: Analysis, node: fx.Node) -> Facts:
    infinite = isinstance(node.args[0], fx.Node) and _keeps_infinity(analysis, node.args[0])
    return analysis.softmax(node, needs_a_kept_score=not infinite)


def _keeps_infinity(analysis: Analysis, node: fx.Node) -> bool:
    if node.target in (aten.add.Tensor, aten.mul.Tensor, aten.mul.Scalar):
        return any(isinstance(x, fx.Node) and _keeps_infinity(analysis, x) for x in node.args[:2])
    return _fills_with_infinity(analysis, node)


def _index_select(analysis: Analysis, node: fx.Node) -> Facts:
    """index_select and gather: `(value, dim, index)`."""
    value, dim, index = cast("tuple[fx.Node, int, fx.Node]", node.args[:3])
    return _picked(analysis, node, value, [(dim % max(1, example(value).dim()), index)])


def _index(analysis: Analysis, node: fx.Node) -> Facts:
    value, indices = node.args
    return _picked(analysis, node, value, [(dim, i) for dim, i in enumerate(indices) if i is not None])


def _picked(analysis: Analysis, node: fx.Node, value: fx.Node, indices: list[tuple[int, fx.Node]]) -> Facts:
    """Elements picked by index tensors: constants move what is known of them, anything else must be safe to read."""
    facts = analysis.of(value)
    if any(analysis.of(i).stale for _, i in indices):
        return analysis.lost(node, f"{node.target} picks by an index that is itself stale")
    if not facts.says_anything:
        return CLEAN
    if all(i in analysis.record.constant for _, i in indices):
        return analysis.movement(node)
    if not facts.stale:
        return CLEAN
    if len(indices) == 1 and example(indices[0][1]).dtype != torch.bool:
        return analysis.known_gather(node, indices[0][0], indices[0][1], value)
    return analysis.lost(node, f"{node.target} picks elements by several indices or by a mask")


def _move(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.movement(node) if any(analysis.of(n).says_anything for n in node.all_input_nodes) else CLEAN


SOFTMAX = {aten._softmax.default, aten._safe_softmax.default}
CASTS = {aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default}
INDEXED = {aten.index_select.default, aten.index.Tensor, aten.gather.default}
MOVEMENT = CASTS | INDEXED | {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.unfold.default, aten.cat.default,
    aten.stack.default, aten.repeat.default, aten.flip.default, aten.roll.default, aten.constant_pad_nd.default,
}  # fmt: skip

# Pointwise operators that take finite values to finite values, in their derivatives too. Others, such as exp, may turn
# a stale row into an infinity, which a later zero does not silence.
FINITE = {
    aten.sub.Tensor, aten.sub.Scalar, aten.add.Scalar, aten.rsub.Scalar, aten.tanh.default, aten.sigmoid.default,
    aten.relu.default, aten.silu.default, aten.gelu.default, aten.leaky_relu.default, aten.abs.default,
    aten.sin.default, aten.cos.default, aten.erf.default, aten.sign.default, aten.floor.default, aten.ceil.default,
    aten.round.default, aten.maximum.default, aten.minimum.default, aten.clamp.default, aten.clamp_min.default,
    aten.clamp_max.default, aten.hardtanh.default, aten.softplus.default,
    aten.eq.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor,
    aten.eq.Scalar, aten.ne.Scalar, aten.lt.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.ge.Scalar,
    aten.bitwise_xor.Tensor, aten.logical_xor.default,
}  # fmt: skip

RULES: dict[Any, Callable[[Analysis, fx.Node], Facts]] = {
    aten.bitwise_and.Tensor: _and,
    aten.logical_and.default: _and,
    aten.bitwise_or.Tensor: _or,
    aten.logical_or.default: _or,
    aten.bitwise_not.default: _not,
    aten.logical_not.default: _not,
    aten.mul.Tensor: _scaled_fill,
    aten.mul.Scalar: _scaled_fill,
    aten.add.Tensor: _add,
    aten.div.Tensor: _div,
    aten.neg.default: lambda a, n: a._silence(replace(a.pointwise(n), zero=a.of(n.args[0]).zero)),
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.where.Scalar: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten._to_copy.default: _to_copy,
    aten.sum.dim_IntList: _reduction,
    aten.mean.dim: _reduction,
    aten.amax.default: _reduction,
    aten.amin.default: _reduction,
    aten.sum.default: _full_reduction,
    aten.mean.default: _full_reduction,
    aten.max.default: _full_reduction,
    aten.min.default: _full_reduction,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.mv.default: _matmul,
    aten.dot.default: _matmul,
    aten.addmm.default: _addmm,
    aten.baddbmm.default: _addmm,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten.index_select.default: _index_select,
    aten.gather.default: _index_select,
    aten.index.Tensor: _index,
} | dict.fromkeys(MOVEMENT - INDEXED - {aten._to_copy.default}, _move)


def explain(facts: Facts) -> tuple[str, str, str]:
    """Operation, place and reason of what left a value stale."""
    if facts.trail is None:
        return "scan", "unknown", "an output reads rows that are not written yet"
    why, node = facts.trail
    return str(node.target), location(node), why
