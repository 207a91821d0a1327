"""What each operator makes of stale rows: the rules of `staleness`, by operator."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from nsa_compile.analyses.facts import CLEAN, Facts, Interval, Steps, both, either, intersect, union
from nsa_compile.ir.aten import (
    AND,
    COMPARISONS,
    COPIED,
    JOINED,
    MASKED_FILL,
    MATMUL,
    MATMUL_ADD,
    MUL,
    NOT,
    OR,
    PICKED,
    REARRANGED,
    SOFTMAX,
    SUB,
    SUMS,
    WHERE,
    XOR,
    arguments,
    aten,
    operand,
)
from nsa_compile.ir.scans import example

if TYPE_CHECKING:
    from nsa_compile.analyses.staleness import Analysis


def _and(analysis: Analysis, node: fx.Node) -> Facts:
    a, b = (analysis.of(x) for x in node.args[:2])
    return _both_true(analysis, a, b) if example(node).dtype == torch.bool else analysis.join([a, b])


def _or(analysis: Analysis, node: fx.Node) -> Facts:
    a, b = (analysis.of(x) for x in node.args[:2])
    if example(node).dtype != torch.bool:
        return analysis.join([a, b])
    return _negated(_both_true(analysis, _negated(a), _negated(b)))


def _both_true(analysis: Analysis, a: Facts, b: Facts) -> Facts:
    facts = analysis.join([_decided(a, b.surely_false), _decided(b, a.surely_false)])
    return replace(
        facts,
        can_be_true=union(a.can_be_true, b.can_be_true),
        can_be_false=both(a.can_be_false, b.can_be_false),
        surely_true=intersect(a.surely_true, b.surely_true),
        surely_false=either(a.surely_false, b.surely_false),
    )


def _negated(f: Facts) -> Facts:
    return replace(f, **_swapped(f))


def _swapped(f: Facts) -> dict[str, Any]:
    """What is known of the opposite of a condition."""
    return {
        "can_be_true": f.can_be_false,
        "can_be_false": f.can_be_true,
        "surely_true": f.surely_false,
        "surely_false": f.surely_true,
    }


def _decided(facts: Facts, by_other: Interval | None) -> Facts:
    """One side of a conjunction, or of a disjunction, which is not looked at while the other side decides."""
    if facts.ready is None or by_other is None:
        return facts
    first, last = by_other
    return replace(facts, ready=torch.where((first <= 0) & (last >= facts.ready - 1), 0, facts.ready))


def _not(analysis: Analysis, node: fx.Node) -> Facts:
    f = analysis.of(node.args[0])
    return replace(analysis.join([f]), **_swapped(f))


def _mul(analysis: Analysis, node: fx.Node) -> Facts:
    """Zero times a finite number is zero; -inf times a number above zero is -inf."""
    a, b = node.args[:2]
    of_a, of_b = analysis.of(a), analysis.of(b)
    a_finite, b_finite = analysis.is_finite(a, node), analysis.is_finite(b, node)
    if (of_a.stale or of_b.stale) and not (a_finite and b_finite):
        return analysis.lost(node, MAY_BE_INFINITE)
    zero = union(_zero_as_factor(analysis, a) if b_finite else None, _zero_as_factor(analysis, b) if a_finite else None)
    facts = replace(analysis.join([of_a, of_b]), zero=zero)
    if analysis.magnitudes.found[node] is not None:  # then there are no floors but -inf, on one side alone
        facts = replace(
            facts,
            fill=union(of_a.fill, of_b.fill),
            surely_kept=intersect(analysis.kept(a, node), analysis.kept(b, node)),
        )
    return analysis.silence(facts, by_arithmetic=True)


def _zero_as_factor(analysis: Analysis, value: Any) -> Steps | None:
    """Until when a factor is zero; a boolean is while it cannot be true."""
    facts = analysis.of(value)
    return facts.can_be_true if isinstance(value, fx.Node) and example(value).dtype == torch.bool else facts.zero


def _add(analysis: Analysis, node: fx.Node) -> Facts:
    """An additive mask: whatever the score, a floor stays what it is. Zero and zero are zero."""
    a, b = node.args[:2]
    of_a, of_b = analysis.raw(a), analysis.raw(b)
    facts = analysis.join([of_a, of_b])
    if analysis.magnitudes.found[node] is not None:  # then floors absorb what is added, and there is no NaN
        stale = facts.ready
        facts = analysis.silence(
            replace(
                facts,
                fill=union(of_a.fill, of_b.fill),
                surely_kept=intersect(analysis.kept(a, node), analysis.kept(b, node)),
            ),
            by_arithmetic=True,
        )
        if stale is not None and facts.ready is not None:
            facts = replace(facts, absorbed=union(facts.absorbed, torch.where(facts.ready < stale, stale, 0)))
    else:
        facts = facts.counted
    finite = math.isfinite(arguments(node).alpha)
    return replace(facts, zero=both(of_a.zero, of_b.zero)) if finite else facts


def _sum(analysis: Analysis, node: fx.Node) -> Facts:
    """Terms have factors that are numbers as derivatives: a gradient of zero stays zero, whatever a term is."""
    alpha = vars(arguments(node)).get("alpha", 1)
    return analysis.pointwise(node) if math.isfinite(alpha) else analysis.arithmetic(node)


MAY_BE_INFINITE = "a row that is not written yet, or what it meets, may be infinite or NaN, and inf * 0 is NaN"


def _zero_stays_zero(analysis: Analysis, node: fx.Node) -> Facts:
    return replace(analysis.arithmetic(node), zero=analysis.of(node.args[0]).zero)


def _power(analysis: Analysis, node: fx.Node) -> Facts:
    """A zero stays one, and has a derivative, under an exponent of 1 or more."""
    facts, exponent = analysis.plain(node), node.args[1]
    of_base = analysis.of(node.args[0])
    keeps = isinstance(exponent, int | float) and exponent >= 1 and not of_base.stale
    return replace(facts, zero=of_base.zero) if keeps else facts


def _removed_becomes_zero(analysis: Analysis, node: fx.Node) -> Facts:
    """An exponential or a sigmoid of -inf is exactly 0, and so is its derivative."""
    f = analysis.of(node.args[0])
    if not f.stale:
        return CLEAN if f.removed is None else Facts(zero=f.removed)
    if node.target not in FINITE:
        return analysis.lost(node, MAY_OVERFLOW.format(node.target))
    return replace(analysis.arithmetic(node), zero=f.removed)


def _div(analysis: Analysis, node: fx.Node) -> Facts:
    """By a number that is not zero, it is a product. What is divided by something else may be infinite."""
    value, divisor = node.args[:2]
    of_value, of_divisor, size = analysis.of(value), analysis.of(divisor), analysis.magnitudes.of(divisor, node)
    if of_divisor.stale and not analysis.is_finite(value):
        return analysis.lost(node, MAY_BE_INFINITE)
    keeps_off_zero = divisor != 0 if isinstance(divisor, int | float) else size is not None and size.least > 0
    if size is None or size.floors is not None or not keeps_off_zero:
        stale = of_value.stale or of_divisor.stale
        return analysis.lost(node, "it divides by what may be zero, and inf * 0 is NaN") if stale else CLEAN
    return replace(analysis.arithmetic(node), zero=None if of_divisor.stale else of_value.zero)


def _where(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.select(node, *node.args[:3])


def _masked_fill(analysis: Analysis, node: fx.Node) -> Facts:
    value, mask, fill = node.args
    return analysis.select(node, mask, fill, value)


def _to_copy(analysis: Analysis, node: fx.Node) -> Facts:
    """A cast keeps zeros and floors; a boolean turned into a number is zero while it is false."""
    f = analysis.raw(node.args[0])
    to, source = example(node).dtype, example(operand(node)).dtype
    if source == torch.bool:
        number = Facts(ready=f.ready, zero=f.can_be_true, sources=f.sources, trail=f.trail)
        return f if to == torch.bool else analysis.silence(number)
    plain = Facts(ready=f.ready, zero=f.zero, blank=f.blank, sources=f.sources, trail=f.trail)
    if not source.is_floating_point:
        return plain if to != torch.bool else replace(plain, zero=None)
    if not to.is_floating_point:
        return replace(plain, zero=None)
    return replace(plain, fill=f.fill, removed=f.removed, absorbed=f.absorbed, surely_kept=analysis.kept(node.args[0]))


def _compare_with_number(analysis: Analysis, node: fx.Node) -> Facts:
    """Whether a score is -inf is known as long as it is removed."""
    facts, removed = analysis.arithmetic(node), analysis.raw(node.args[0]).removed
    if removed is None or node.args[1] != -math.inf:
        return facts
    always = torch.zeros_like(removed), removed - 1
    if node.target in (aten.eq.Scalar, aten.le.Scalar):
        return replace(facts, can_be_false=removed, surely_true=always)
    return replace(facts, can_be_true=removed, surely_false=always)


def _compare(analysis: Analysis, node: fx.Node) -> Facts:
    """An integer is equal to the row of a buffer that it has just become, at the step that writes it."""
    facts, written = analysis.plain(node), analysis.compared_with_itself(node)
    if written is None:
        return facts
    if node.target in (aten.eq.Tensor, aten.le.Tensor, aten.ge.Tensor):
        return replace(facts, surely_true=written)
    return replace(facts, surely_false=written)


_NORMS = {aten.linalg_vector_norm.default, aten.var.correction}
_EXTREMES = {aten.amax.default, aten.amin.default, aten.max.default, aten.min.default}


def _reduction(analysis: Analysis, node: fx.Node) -> Facts:
    if node.target in _NORMS and analysis.of(node.args[0]).stale and analysis.magnitudes.found[node] is None:
        return analysis.lost(node, MAY_BE_INFINITE)
    if node.target in _EXTREMES and analysis.of(node.args[0]).stale and not analysis.is_finite(node.args[0]):
        # The gradient is shared among the elements that are the extreme; where that is NaN, there are none.
        return analysis.lost(node, f"{node.target} may find a NaN, and its gradient is then 0 / 0 in every row")
    if node.target in SUMS and (written := analysis.zeros_until_written(node)) is not None:
        analysis.hidden[node, 0] = written  # zeros there, too
        return CLEAN
    reduced = vars(arguments(node))
    return analysis.reduce(node, reduced.get("dim"), reduced.get("keepdim", False))


def _item(analysis: Analysis, node: fx.Node) -> Facts:
    """One of several results, which are ready together."""
    facts = analysis.of(node.args[0])
    return Facts(ready=facts.ready, sources=facts.sources, trail=facts.trail)


def _matmul(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.contraction(node, node.args[0], node.args[1])


def _addmm(analysis: Analysis, node: fx.Node) -> Facts:
    product = analysis.contraction(node, node.args[1], node.args[2])
    return analysis.join([analysis.of(node.args[0]), product])


def _softmax(analysis: Analysis, node: fx.Node) -> Facts:
    return analysis.softmax(node)


def _index_select(analysis: Analysis, node: fx.Node) -> Facts:
    """index_select and gather: `(value, dim, index)`."""
    picked = arguments(node)
    return _picked(analysis, node, picked.self, [(picked.dim % max(1, example(picked.self).dim()), picked.index)])


def _index(analysis: Analysis, node: fx.Node) -> Facts:
    indices = enumerate(arguments(node).indices)
    return _picked(analysis, node, operand(node), [(dim, i) for dim, i in indices if i is not None])


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


CASTS = COPIED | {aten._to_copy.default}
MOVEMENT = REARRANGED | CASTS | PICKED | JOINED | {aten.constant_pad_nd.default}

# Pointwise operators that take finite values to finite values, in their derivatives too. Others, such as exp, may turn
# a stale row into an infinity, which a later zero does not silence.
MAY_OVERFLOW = "{} may overflow on a row that is not written yet, and inf * 0 is NaN"
FINITE = XOR | COMPARISONS.keys() | {
    aten.tanh.default, aten.sigmoid.default, aten.relu.default, aten.silu.default,
    aten.gelu.default, aten.leaky_relu.default, aten.abs.default, aten.sin.default, aten.cos.default,
    aten.erf.default, aten.sign.default, aten.floor.default, aten.ceil.default, aten.round.default,
    aten.maximum.default, aten.minimum.default, aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default,
    aten.hardtanh.default, aten.softplus.default, aten.elu.default, aten.hardsigmoid.default,
    aten.mish.default,
}  # fmt: skip

# The same where the size of what they are given is known to be right: `magnitudes` says so.
FINITE_WITHIN_BOUNDS = frozenset({
    aten.pow.Tensor_Scalar, aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default,
})  # fmt: skip

_BY_RULE: dict[Callable[[Analysis, fx.Node], Facts], Collection[Any]] = {
    _and: AND,
    _or: OR,
    _not: NOT,
    _mul: MUL,
    _add: {aten.add.Tensor},
    _sum: SUB | {aten.add.Scalar, aten.rsub.Scalar},
    _div: {aten.div.Tensor},
    _zero_stays_zero: {
        aten.neg.default, aten.nan_to_num.default, aten.relu.default, aten.leaky_relu.default, aten.gelu.default,
        aten.silu.default, aten.elu.default, aten.tanh.default, aten.abs.default, aten.sin.default, aten.erf.default,
        aten.sign.default,
    },
    _power: {aten.pow.Tensor_Scalar},
    _removed_becomes_zero: {aten.exp.default, aten.sigmoid.default},
    _where: WHERE,
    _masked_fill: MASKED_FILL,
    _to_copy: {aten._to_copy.default},
    _compare_with_number: {aten.eq.Scalar, aten.ne.Scalar, aten.gt.Scalar, aten.le.Scalar},
    _compare: {
        aten.eq.Tensor, aten.le.Tensor, aten.ge.Tensor, aten.ne.Tensor, aten.lt.Tensor, aten.gt.Tensor,
    },
    _reduction: {
        aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.sum.default, aten.mean.default,
        aten.max.default, aten.min.default, aten.linalg_vector_norm.default, aten.var.correction,
        aten.max.dim, aten.min.dim,
    },
    _item: {operator.getitem},
    _matmul: MATMUL | {aten.dot.default},
    _addmm: MATMUL_ADD,
    _softmax: SOFTMAX,
    _index_select: {aten.index_select.default, aten.gather.default},
    _index: {aten.index.Tensor},
    _move: MOVEMENT - PICKED - {aten._to_copy.default},
}  # fmt: skip
RULES = {target: rule for rule, targets in _BY_RULE.items() for target in targets}
