"""How large the elements of a value can be, and where derivatives stay finite: what exact zeros and masks rest on.

Zero times a number is zero, zero times an infinity is NaN; a score that a mask keeps counts only if it lies above what
the mask puts in the place of the others. So for each value there is a `Magnitude`, or None where nothing is known. It
holds in the loop and in the compiled program, at every step. Numbers that are known are measured; what is known of the
others is the assumption stated in `staleness`, which enters here and nowhere else: at `DATA` and at `product_bound`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile.ir.aten import (
    ADD,
    COPIED,
    DIV,
    JOINED,
    MASKED_FILL,
    MATMUL,
    MATMUL_ADD,
    MUL,
    PICKED,
    PLACED,
    REARRANGED,
    SORTED,
    SPLIT,
    SUB,
    WHERE,
    aten,
)
from nsa_compile.ir.scans import ScanRecord, example
from nsa_compile.ir.step_values import Choice, Separable, StepMask, StepValue


@dataclass(frozen=True)
class Magnitude:
    """Each element lies at a floor, in `floors`, or is finite, at least `least` and at most `bound` in absolute value.

    A floor is a number so low that masks use it: -inf, or about the lowest of a dtype. A bound of inf means finite, of
    whatever size.
    """

    bound: float
    least: float = -math.inf
    floors: tuple[float, float] | None = None  # the lowest and the highest that may occur

    @property
    def finite(self) -> bool:
        return self.floors is None or self.floors[0] > -math.inf

    @property
    def only_infinite_floors(self) -> bool:
        """Whether floors, if any, are -inf: adding a number or scaling leaves them what they are."""
        return self.floors is None or self.floors[1] == -math.inf

    @property
    def stands_out(self) -> bool:
        """Whether exp(floor - x) is exactly zero for every x that is at no floor."""
        return self.bound < math.inf and (self.floors is None or self.bound <= -self.floors[1] / 2)

    def numbers(self) -> Magnitude | None:
        """The same without floors, but for huge numbers in their place: None if some are infinite."""
        if self.floors is None:
            return self
        return Magnitude(torch.finfo(torch.float64).max) if self.finite else None


# What is given at run time.
DATA = Magnitude(math.inf)


def product_bound(dtype: torch.dtype) -> float:
    """How large an element of a product of matrices may be, both being given at run time: part of the assumption."""
    return min(torch.finfo(dtype).max ** 0.75, 1e28)


def ordinary_bound(dtype: torch.dtype) -> float:
    """Up to here numbers are taken for what the data and sensible constants make; masks use larger ones."""
    return torch.finfo(dtype).max ** 0.875


def floor_level(dtype: torch.dtype) -> float:
    """Numbers of a dtype from here down are floors."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def measured(x: Tensor) -> Magnitude | None:
    """The magnitude of numbers that are known."""
    if x.numel() == 0:
        return Magnitude(0.0, 0.0)
    if x.dtype.is_complex:
        parts = measured(torch.view_as_real(x.resolve_conj()))
        return None if parts is None or parts.floors is not None else Magnitude(parts.bound)
    return _measured(x, floor_level(x.dtype) if x.dtype.is_floating_point else -math.inf)


# Dtypes of which torch has no minimum on the CPU; float64 says enough of them.
_NOT_COMPARED = (
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # fmt: skip


def _measured(x: Tensor, level: float) -> Magnitude | None:
    x = x.double() if x.dtype in _NOT_COMPARED else x
    least, most = float(x.amin()), float(x.amax())  # NaN where there is one
    if math.isnan(most) or most == math.inf:
        return None
    if least > level:
        return Magnitude(max(abs(least), abs(most)), least)
    x = x.double()
    low = x <= level
    rest, floors = x[~low], x[low]
    return Magnitude(
        float(rest.abs().max()) if rest.numel() else 0.0,
        float(rest.min()) if rest.numel() else 0.0,
        (float(floors.min()), float(floors.max())) if floors.numel() else None,
    )


def join(magnitudes: Iterable[Magnitude | None]) -> Magnitude | None:
    """Of a value whose elements are those of several."""
    result: Magnitude | None = None
    for m in magnitudes:
        if m is None:
            return None
        if result is not None:
            both = [f for f in (result.floors, m.floors) if f is not None]
            floors = (min(f[0] for f in both), max(f[1] for f in both)) if both else None
            m = Magnitude(max(result.bound, m.bound), min(result.least, m.least), floors)
        result = m
    return result


Rule = Callable[["Magnitudes", Any], "Magnitude | None"]


class Magnitudes:
    """The magnitudes of the nodes of a lowered body, in the order of the graph."""

    def __init__(self, record: ScanRecord) -> None:
        self.record = record
        self.found: dict[fx.Node, Magnitude | None] = {}

    def of(self, value: Any, like: fx.Node | None = None) -> Magnitude | None:
        """Of a node, or of a number that meets a node's dtype."""
        if isinstance(value, fx.Node):
            return self.found.get(value)
        if isinstance(value, bool | int | float):
            dtype = example(like).dtype if like is not None else torch.float64
            x = torch.tensor(float(value), dtype=torch.float64)
            return _measured(x, floor_level(dtype) if dtype.is_floating_point else -math.inf)
        return None

    def derive(self, node: fx.Node) -> Magnitude | None:
        """Of one node, given those it reads."""
        if node in self.record.constant:
            return _of_known(self.record.constant[node])
        if node in self.record.known:
            return _of_known(self.record.known[node])
        value = node.meta.get("example_value", node.meta.get("val"))
        if isinstance(value, Tensor) and not value.dtype.is_floating_point and not value.is_complex():
            return _of_integers(value.dtype)
        rules = _OF_COMPLEX if any(map(_is_complex, (node, *node.all_input_nodes))) else MAGNITUDES
        rule = rules.get(node.target)
        return None if rule is None or node.op != "call_function" else rule(self, node)

    def is_known(self, value: Any) -> bool:
        return not isinstance(value, fx.Node) or value in self.record.constant or value in self.record.known

    def is_smooth(self, node: fx.Node) -> bool:
        """Whether an operator passes finite gradients on as finite ones, so that they may meet exact zeros."""
        if node.target in _LINEAR:
            return True
        if node.target is aten.sqrt.default:  # finite at zero, with a derivative that is not
            m = self.of(node.args[0])
            return m is not None and m.floors is None and m.least > 0
        return self.found.get(node) is not None


def unmeasured(node: fx.Node) -> Magnitude | None:
    """Of what is given at run time."""
    dtype = example(node).dtype
    return DATA if dtype.is_floating_point or dtype.is_complex else _of_integers(dtype)


def _of_known(value: StepValue | Tensor) -> Magnitude | None:
    if isinstance(value, Tensor):
        return measured(value)
    if isinstance(value, Choice):
        return join((measured(value.if_true), measured(value.if_false)))
    if isinstance(value, StepMask):
        return Magnitude(1.0, 0.0)
    if isinstance(value, Separable):
        low, high = (float(value.steps.amin() + value.rows.amin()), float(value.steps.amax() + value.rows.amax()))
        return Magnitude(max(abs(low), abs(high)), low)
    return measured(value.values)


def _of_integers(dtype: torch.dtype) -> Magnitude | None:
    if dtype == torch.bool:
        return Magnitude(1.0, 0.0)
    return None if dtype.is_complex else Magnitude(-float(torch.iinfo(dtype).min) or math.inf, torch.iinfo(dtype).min)


# -- rules by operator: a node is Any, as what its arguments are follows from the operator's schema


def _within(m: Magnitude, node: Any, *operands: Magnitude) -> Magnitude | None:
    """Arithmetic of ordinary numbers does not overflow; how far it gets is not known. That of others may."""
    dtype = example(node).dtype
    if dtype.is_complex:
        return None
    if not dtype.is_floating_point:  # integers wrap around; they are finite whatever happens
        return m if dtype != torch.bool and m.bound <= torch.iinfo(dtype).max else _of_integers(dtype)
    if m.bound <= torch.finfo(dtype).max:
        return m
    ordinary = ordinary_bound(example(node).dtype)
    return None if any(ordinary < x.bound < math.inf for x in operands) else replace(m, bound=math.inf)


def _add(sizes: Magnitudes, node: Any) -> Magnitude | None:
    alpha = node.kwargs.get("alpha", 1)
    a, b = (sizes.of(x, node) for x in node.args[:2])
    if a is None or b is None or alpha != 1:
        return None
    for m, other in ((a, b), (b, a)):
        if not m.only_infinite_floors:
            if not _absorbs(m, other, example(node).dtype):
                return None  # the lowest number and something below zero are -inf, with something above zero no floor
            return _within(Magnitude(a.bound + b.bound, a.least + b.least, m.floors), node, a, b)
    floors = (-math.inf, -math.inf) if a.floors or b.floors else None
    return _within(Magnitude(a.bound + b.bound, a.least + b.least, floors), node, a, b)


def _absorbs(m: Magnitude, other: Magnitude, dtype: torch.dtype) -> bool:
    """Whether a floor plus a number is the floor, by rounding."""
    if m.floors is None or other.floors is not None or not dtype.is_floating_point:
        return False
    return other.bound <= -m.floors[1] * torch.finfo(dtype).eps / 4


def _sub(sizes: Magnitudes, node: Any) -> Magnitude | None:
    a, b = (sizes.of(x, node) for x in node.args[:2])
    if node.target is aten.rsub.Scalar:
        a, b = b, a
    if a is None or b is None or b.floors is not None or not a.only_infinite_floors:
        return None
    if node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
        return None
    return _within(Magnitude(a.bound + b.bound, a.least - b.bound, a.floors), node, a, b)


def _mul(sizes: Magnitudes, node: Any) -> Magnitude | None:
    a, b = (sizes.of(x, node) for x in node.args[:2])
    if a is None or b is None:
        return None
    floors = None
    for m, other in ((a, b), (b, a)):
        if m.floors is not None:
            if not m.only_infinite_floors or other.floors is not None or not other.least > 0:
                return None  # -inf times something above zero is -inf; all else is no floor
            floors = m.floors
    bound = 0.0 if 0 in (a.bound, b.bound) else a.bound * b.bound
    if node.args[0] is node.args[1] or (a.least >= 0 and b.least >= 0):
        return _within(Magnitude(bound, max(0.0, a.least) * max(0.0, b.least), floors), node, a, b)
    return _within(Magnitude(bound, -bound, floors), node, a, b)


def _div(sizes: Magnitudes, node: Any) -> Magnitude | None:
    a, b = (sizes.of(x, node) for x in node.args[:2])
    divisor = node.args[1]
    if a is None or b is None or b.floors is not None or len(node.args) > 2 or "rounding_mode" in node.kwargs:
        return None
    smallest = abs(divisor) if isinstance(divisor, int | float) else b.least
    if not smallest > 0 or not a.only_infinite_floors or (a.floors is not None and not b.least > 0):
        return None
    bound = a.bound / smallest
    return _within(Magnitude(bound, 0.0 if a.least >= 0 and b.least > 0 else -bound, a.floors), node, a, b)


def _matmul(sizes: Magnitudes, node: Any) -> Magnitude | None:
    return _product(sizes, node, node.args[0], node.args[1])


def _addmm(sizes: Magnitudes, node: Any) -> Magnitude | None:
    product, added = _product(sizes, node, node.args[1], node.args[2]), sizes.of(node.args[0])
    plain = all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta"))
    if product is None or added is None or added.floors is not None or not plain:
        return None
    return _within(Magnitude(product.bound + added.bound), node, product, added)


def _product(sizes: Magnitudes, node: Any, left: Any, right: Any) -> Magnitude | None:
    """Sums of products: bounded by what is assumed of them, unless one side only copies or scales the other."""
    a, b = (m and m.numbers() for m in (sizes.of(left), sizes.of(right)))
    ordinary = ordinary_bound(example(node).dtype)
    if a is None or b is None or any(ordinary < m.bound < math.inf for m in (a, b)):
        return None
    terms = max(1, example(left).shape[-1])
    bound = 0.0 if 0 in (a.bound, b.bound) else terms * a.bound * b.bound
    if not sizes.is_known(left) and not sizes.is_known(right):
        bound = min(bound, product_bound(example(node).dtype))
    return _within(Magnitude(bound, 0.0 if a.least >= 0 and b.least >= 0 else -bound), node, a, b)


def _sum(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """A sum; of a product, it is a product of matrices."""
    value = node.args[0]
    m = sizes.of(value)
    m = m and m.numbers()
    if m is None:
        return None
    terms = max(1, example(value).numel() // max(1, example(node).numel()))
    bound = terms * m.bound
    if value.target is aten.mul.Tensor and terms > 1 and not any(sizes.is_known(x) for x in value.args[:2]):
        bound = min(bound, product_bound(example(node).dtype))
    total = _within(Magnitude(bound, 0.0 if m.least >= 0 else -bound), node, m)
    averages = node.target in (aten.mean.dim, aten.mean.default)
    return replace(total, bound=min(m.bound, bound)) if averages and total is not None else total


def _extreme(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """Elements of the operand, or nothing to choose from."""
    return sizes.of(node.args[0]) if example(node.args[0]).numel() else None


def _moved(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """Elements of the operands in other places."""
    values = torch.utils._pytree.tree_leaves(node.args[0])
    return join(sizes.of(x) for x in values)


def _padded(sizes: Magnitudes, node: Any) -> Magnitude | None:
    value = node.args[2] if len(node.args) > 2 else 0
    return join((sizes.of(node.args[0]), sizes.of(value, node)))


def _placed(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """One value written over parts of another."""
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        accumulate = len(node.args) > 3 and node.args[3]
        return None if accumulate else join((sizes.of(node.args[0]), sizes.of(node.args[2], node)))
    source = node.args[1] if node.target in (aten.slice_scatter.default, aten.select_scatter.default) else node.args[3]
    return join((sizes.of(node.args[0]), sizes.of(source, node)))


def _zeroed(sizes: Magnitudes, node: Any) -> Magnitude | None:
    return join((sizes.of(node.args[0]), Magnitude(0.0, 0.0)))


def _cast(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """What no longer fits a narrower dtype becomes infinite; a floor stays one."""
    m = sizes.of(node.args[0])
    largest = torch.finfo(example(node).dtype).max
    if m is None or largest < m.bound < math.inf:
        return None
    if m.floors is None:
        return m
    lowest, highest = (-math.inf if -f > largest else f for f in m.floors)
    return replace(m, floors=(lowest, highest))


def _select(sizes: Magnitudes, node: Any) -> Magnitude | None:
    return join(sizes.of(x, node) for x in node.args[1:3])


def _fill(sizes: Magnitudes, node: Any) -> Magnitude | None:
    return join((sizes.of(node.args[0]), sizes.of(node.args[2], node)))


def _greater(sizes: Magnitudes, node: Any) -> Magnitude | None:
    return join(sizes.of(x, node) for x in node.args[:2])


def _clamp(sizes: Magnitudes, node: Any) -> Magnitude | None:
    low = high = None
    if node.target in (aten.clamp_min.default, aten.clamp.default, aten.hardtanh.default):
        low = node.args[1] if len(node.args) > 1 else (-1.0 if node.target is aten.hardtanh.default else None)
    if node.target in (aten.clamp_max.default, aten.clamp.default, aten.hardtanh.default):
        at = 1 if node.target is aten.clamp_max.default else 2
        high = node.args[at] if len(node.args) > at else (1.0 if node.target is aten.hardtanh.default else None)
    low, high = node.kwargs.get("min", low), node.kwargs.get("max", high)
    parts = [sizes.of(x, node) for x in (node.args[0], low, high) if x is not None]
    m = join(parts)
    if m is None or not isinstance(low, int | float) or (high is not None and not low <= high):
        return m
    return replace(m, least=low, floors=None) if low > floor_level(example(node).dtype) else m


def _exponential(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """That of -inf is 0."""
    m = sizes.of(node.args[0])
    return None if m is None else Magnitude(1.0 if m.bound == 0 else math.inf, 0.0)


def _sigmoid(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """That of -inf is 0."""
    return None if sizes.of(node.args[0]) is None else Magnitude(1.0, 0.0)


def _between(low: float, high: float) -> Rule:
    """A function with these bounds, whatever the finite number."""

    def rule(sizes: Magnitudes, node: Any) -> Magnitude | None:
        m = sizes.of(node.args[0])
        return None if m is None or m.numbers() is None else Magnitude(max(-low, high), low)

    return rule


def _no_larger(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """|f(x)| <= |x| + 1."""
    m = sizes.of(node.args[0])
    m = m and m.numbers()
    return None if m is None else _within(Magnitude(m.bound + 1), node, m)


def _elu(sizes: Magnitudes, node: Any) -> Magnitude | None:
    m = sizes.of(node.args[0])
    m = m and m.numbers()
    alpha, scale, input_scale = (*node.args[1:], 1, 1, 1)[:3]
    if m is None or not min(alpha, scale, input_scale) >= 0:
        return None
    return _within(Magnitude(scale * m.bound + scale * alpha, -scale * alpha), node, m)


def _non_negative(sizes: Magnitudes, node: Any) -> Magnitude | None:
    m = _no_larger(sizes, node)
    return m and replace(m, least=0.0)


def _negated(sizes: Magnitudes, node: Any) -> Magnitude | None:
    m = sizes.of(node.args[0])
    m = m and m.numbers()
    return None if m is None else Magnitude(m.bound, -m.bound)


def _without_nan(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """Where there are no infinities, only NaN is replaced, as a row of softmax may be."""
    m, nan = sizes.of(node.args[0]), node.args[1] if len(node.args) > 1 else None
    return None if m is None or not m.finite else join((m, sizes.of(nan or 0.0, node)))


def _data(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """Finite numbers of finite numbers."""
    inputs = [sizes.of(n) for n in node.all_input_nodes]
    return DATA if all(m is not None and m.numbers() is not None for m in inputs) else None


def _not_below_zero(sizes: Magnitudes, node: Any) -> Magnitude | None:
    m = _data(sizes, node)
    return m and replace(m, least=0.0)


def _norm(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """The norm of order 2, whose derivative at zero is zero to torch."""
    return _not_below_zero(sizes, node) if len(node.args) < 2 or node.args[1] == 2 else None


def _variance(sizes: Magnitudes, node: Any) -> Magnitude | None:
    terms = example(node.args[0]).numel() // max(1, example(node).numel())
    correction = node.kwargs.get("correction", 1)
    return _not_below_zero(sizes, node) if terms > (1 if correction is None else correction) else None


def _power(sizes: Magnitudes, node: Any) -> Magnitude | None:
    m, exponent = sizes.of(node.args[0]), node.args[1]
    m = m and m.numbers()
    if m is None or not isinstance(exponent, int | float) or not 1 <= exponent <= 16:
        return None
    if float(exponent).is_integer():
        return replace(DATA, least=0.0) if exponent % 2 == 0 else DATA
    return replace(DATA, least=0.0) if m.least >= 0 else None


def _power_of_tensors(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """By integers that are not negative: then none of them is infinite at zero, or NaN."""
    base, exponent = (sizes.of(x) for x in node.args[:2])
    base = base and base.numbers()
    counts = exponent is not None and exponent.least >= 0 and not example(node.args[1]).dtype.is_floating_point
    return replace(DATA, least=0.0 if base.least >= 0 else -math.inf) if base is not None and counts else None


def _above_zero(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """Functions that are finite above zero: of numbers that are known to keep away from it."""
    m = sizes.of(node.args[0])
    if m is None or m.floors is not None or m.least < 0 or (m.least == 0 and node.target is not aten.sqrt.default):
        return None
    if node.target is aten.log.default:
        return DATA
    return replace(DATA, least=0.99 * math.sqrt(m.least) if node.target is aten.sqrt.default else 0.0)


def _normalised(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """Layer and group norms with something added below the root; the other results are mean and 1/deviation."""
    return _data(sizes, node) if isinstance(node.args[-1], float) and node.args[-1] > 0 else None


def _item(sizes: Magnitudes, node: Any) -> Magnitude | None:
    return sizes.of(node.args[0])


_MOVED = REARRANGED | COPIED | PICKED | JOINED | SPLIT | {aten.embedding.default}
_CHOSEN = {aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.max.dim, aten.min.dim}

MAGNITUDES: dict[Any, Rule] = {
    **dict.fromkeys(_MOVED, _moved),
    **dict.fromkeys(PLACED, _placed),
    **dict.fromkeys(_CHOSEN | SORTED, _extreme),
    operator.getitem: _item,
    aten.constant_pad_nd.default: _padded,
    aten.tril.default: _zeroed,
    aten.triu.default: _zeroed,
    aten._to_copy.default: _cast,
    **dict.fromkeys(WHERE, _select),
    **dict.fromkeys(MASKED_FILL, _fill),
    **dict.fromkeys(ADD, _add),
    **dict.fromkeys(SUB | {aten.rsub.Scalar}, _sub),
    **dict.fromkeys(MUL, _mul),
    **dict.fromkeys(DIV, _div),
    aten.neg.default: _negated,
    aten.nan_to_num.default: _without_nan,
    **dict.fromkeys(MATMUL | {aten.dot.default}, _matmul),
    **dict.fromkeys(MATMUL_ADD, _addmm),
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim), _sum),
    **dict.fromkeys((aten.maximum.default, aten.minimum.default), _greater),
    **dict.fromkeys(
        (aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default, aten.hardtanh.default), _clamp
    ),
    **dict.fromkeys(
        (aten.tanh.default, aten.sin.default, aten.cos.default, aten.erf.default, aten.sign.default),
        _between(-1.0, 1.0),
    ),
    aten.sigmoid.default: _sigmoid,
    **dict.fromkeys(
        (
            aten.silu.default, aten.gelu.default, aten.leaky_relu.default, aten.floor.default, aten.ceil.default,
            aten.round.default, aten.mish.default,
        ),
        _no_larger,
    ),
    aten.elu.default: _elu,
    aten.hardsigmoid.default: _between(0.0, 1.0),
    **dict.fromkeys((aten.relu.default, aten.abs.default, aten.softplus.default), _non_negative),
    **dict.fromkeys((aten.cumsum.default, aten._log_softmax.default, aten.log_sigmoid_forward.default), _data),
    aten.exp.default: _exponential,
    aten.linalg_vector_norm.default: _norm,
    aten.var.correction: _variance,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power_of_tensors,
    **dict.fromkeys((aten.sqrt.default, aten.rsqrt.default, aten.reciprocal.default, aten.log.default), _above_zero),
    **dict.fromkeys((aten.native_layer_norm.default, aten.native_group_norm.default), _normalised),
}  # fmt: skip


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _ordinary(sizes: Magnitudes, node: Any) -> Magnitude | None:
    """Arithmetic of complex numbers whose parts are ordinary ones."""
    inputs = [sizes.of(x, node) for x in node.args if isinstance(x, fx.Node | int | float)]
    ordinary = ordinary_bound(example(node).dtype.to_real())
    plain = all(m is not None and m.floors is None and not ordinary < m.bound < math.inf for m in inputs)
    return DATA if plain else None


# Where complex numbers go in or come out: rotations. The magnitude of one is that of its parts.
_OF_COMPLEX: dict[Any, Rule] = {
    **dict.fromkeys(_MOVED | {operator.getitem, aten.view_as_real.default}, _moved),
    **dict.fromkeys(
        ADD | SUB | MUL | {aten.neg.default, aten.complex.default, aten.polar.default, aten._conj.default}, _ordinary
    ),
}

# Operators whose derivatives are zeros and ones: smooth whatever their operands are.
_LINEAR = _MOVED | PLACED | SORTED | WHERE | MASKED_FILL | {
    operator.getitem, aten.constant_pad_nd.default, aten.tril.default, aten.triu.default, aten._to_copy.default,
}  # fmt: skip
