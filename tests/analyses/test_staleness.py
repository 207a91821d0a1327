"""The proof behind eliminate_guards, rule by rule: each operator runs on small tensors in two worlds, that of the loop
and that of the compiled program, and what its rule promises of the result must be so in both, at every step.

Values come first, then what is claimed of them: whatever holds of the values that were drawn, tightly or with slack, or
not at all. Stale elements differ between the worlds. Their magnitude may be unknown, and then they may be anything.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from nsa_compile.analyses import magnitudes, staleness, staleness_rules
from nsa_compile.analyses.facts import CLEAN, FIRST_STEPS, INTERVALS, Facts
from nsa_compile.analyses.magnitudes import MAGNITUDES, Magnitude, Magnitudes, floor_level
from nsa_compile.analyses.staleness import Analysis, with_gradients
from nsa_compile.analyses.staleness_rules import CASTS, FINITE, FINITE_WITHIN_BOUNDS, MOVEMENT, RULES  # fmt: skip
from nsa_compile.ir.aten import PICKED, PLACED, SOFTMAX, arguments, aten
from nsa_compile.ir.scans import ScanRecord
from nsa_compile.ir.step_values import Choice, Separable, StepMask, Table

S = 3  # steps
LOWEST = torch.finfo(torch.float64).min
FLOORS = ((-math.inf, -math.inf), (LOWEST, LOWEST), (-math.inf, LOWEST), (LOWEST, -3.5e38))
HUGE = 1.7e308


# -------------------------------------------------------------------------------------------------------- the operands


@dataclass
class Operand:
    """A value in both worlds at every step, `[S, ...]`, and what is claimed of it."""

    loop: Tensor
    compiled: Tensor
    facts: Facts
    magnitude: Magnitude | None
    constant: bool = False  # known to the compiler, the same at every step
    known: bool = False  # known to the compiler


class Draw:
    """Operands for one trial, by a seeded generator."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)

    def chance(self, p: float) -> bool:
        return float(torch.rand((), generator=self.rng)) < p

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.rng))

    def pick(self, *choices: Any) -> Any:
        return choices[self.number(0, len(choices))]

    def where(self, shape: Any, p: float = 0.5) -> Tensor:
        return torch.rand(shape, generator=self.rng) < p

    def among(self, shape: Any, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64)[torch.randint(len(values), shape, generator=self.rng)]

    def steps(self, shape: Any) -> Tensor:
        return torch.randint(0, S + 1, shape, generator=self.rng)

    # -- values

    def floats(self, shape: tuple[int, ...], positive: bool = False, plain: bool = False) -> Operand:
        """Data, scores that are at floors at times, zeros at times, stale or not, or anything at all."""
        full = (S, *shape)
        t = torch.arange(S).reshape(-1, *([1] * len(shape)))
        bound = 4.0 if plain else self.pick(4.0, 4.0, 20.0, HUGE)
        finite = [bound, bound / 2, 1.0, 0.5] if positive else [0.0, 1.0, -1.0, bound, -bound, 0.25]
        loop, compiled = self.among(full, finite), self.among(full, finite)
        floors, wild = None, not plain and not positive and self.chance(0.1)
        if not plain and not positive and self.chance(0.5):
            floors = self.pick(*FLOORS)
            at_floor = (t < self.steps(shape)) if self.chance(0.7) else self.where(full)
            fills = self.among(full, list(floors))
            loop = torch.where(at_floor, fills, loop)
            compiled = torch.where(at_floor, fills, compiled)
        if not positive and self.chance(0.4):
            is_zero = t < self.steps(shape)
            loop, compiled = torch.where(is_zero, 0.0, loop), torch.where(is_zero, 0.0, compiled)
        if wild:
            anything = [math.nan, math.inf, -math.inf, 0.0, 1.0, LOWEST]
            odd = self.where(full, 0.3)
            loop = torch.where(odd, self.among(full, anything), loop)
            compiled = torch.where(odd, self.among(full, anything), compiled)
        ready = t >= self.steps(shape) if self.chance(0.6) else torch.ones(full, dtype=torch.bool)
        compiled = torch.where(ready, loop, compiled)
        return self.claimed(loop, compiled, None if wild else self.magnitude_of(loop, compiled))

    def magnitude_of(self, loop: Tensor, compiled: Tensor) -> Magnitude | None:
        both = torch.cat([loop.flatten(), compiled.flatten()])
        low = both <= floor_level(loop.dtype)
        rest, floors = both[~low], both[low]
        tight = Magnitude(
            float(rest.abs().max()) if rest.numel() else 0.0,
            float(rest.min()) if rest.numel() else 0.0,
            (float(floors.min()), float(floors.max())) if floors.numel() else None,
        )
        if self.chance(0.2) and tight.bound < 100:
            return replace(tight, bound=math.inf)
        return replace(tight, least=-math.inf) if self.chance(0.3) else tight

    def booleans(self, shape: tuple[int, ...]) -> Operand:
        full = (S, *shape)
        t = torch.arange(S).reshape(-1, *([1] * len(shape)))
        first, last = self.steps(shape), self.steps(shape)
        loop = self.pick(t >= first, t < first, (t >= first) & (t <= last), self.where(full))
        compiled = self.where(full)
        if self.chance(0.5):  # a conjunction of what is known with what is stale
            known, compiled = self.pick(t >= first, t < first), self.where(full)
            loop, compiled = known & loop, known & compiled
        if self.chance(0.7):
            compiled = loop
        else:
            compiled = torch.where(t >= self.steps(shape), loop, compiled)
        return self.claimed(loop.expand(full).contiguous(), compiled.expand(full).contiguous(), Magnitude(1.0, 0.0))

    def integers(self, shape: tuple[int, ...]) -> Operand:
        x = self.floats(shape, plain=True)
        loop, compiled = x.loop.long(), x.compiled.long()
        return self.claimed(loop, compiled, Magnitude(2.0**63, -(2.0**63)))

    def rows(self, shape: tuple[int, ...], size: int) -> Operand:
        """Numbers of rows: a constant, known at each step, or data."""
        kind = self.pick("constant", "known", "data")
        loop = torch.randint(0, size, (S, *shape), generator=self.rng)
        if kind == "constant":
            loop = loop[:1].expand(S, *shape).contiguous()
        return Operand(loop, loop, CLEAN, Magnitude(2.0**63, -(2.0**63)), kind == "constant", kind == "known")

    # -- what holds of them

    def claimed(self, loop: Tensor, compiled: Tensor, magnitude: Magnitude | None) -> Operand:
        same = same_bits(loop, compiled)
        claims: dict[str, Any] = {}
        if not bool(same.all()):
            claims["ready"] = self.until(~same.flip(0)).mul(-1).add(S)  # after the last step at which they differ
            claims["sources"] = frozenset(["cache"])
        if loop.dtype == torch.bool:
            claims |= {
                "can_be_true": self.until(~loop & ~compiled, at_most=True),
                "can_be_false": self.until(loop & compiled, at_most=True),
                "surely_true": self.run(loop & compiled),
                "surely_false": self.run(~loop & ~compiled),
            }
        else:
            claims["zero"] = self.until((loop == 0) & (compiled == 0), at_most=True)
        if loop.dtype.is_floating_point and magnitude is not None and magnitude.floors is not None:
            low = (loop <= floor_level(loop.dtype)) & same
            kept = (loop > floor_level(loop.dtype)) & (compiled > floor_level(loop.dtype))
            removed = (loop == -math.inf) & (compiled == -math.inf)
            claims |= {"fill": self.until(low, at_most=True), "surely_kept": self.run(kept)}
            claims["removed"] = self.until(removed, at_most=True)
        for name in FIRST_STEPS[1:] + INTERVALS:
            if name in claims and self.chance(0.2):
                claims[name] = None
        claims = {name: self.coarse(name, value) for name, value in claims.items()}
        return Operand(loop, compiled, Facts(**claims), magnitude)

    def until(self, holds: Tensor, at_most: bool = False) -> Tensor:
        """The first step at which something does not hold, S if none; or a step before."""
        t = torch.arange(S).reshape(-1, *([1] * (holds.dim() - 1)))
        first = torch.where(holds, S, t).amin(0) if at_most else torch.where(~holds, S, t).amin(0)
        return torch.where(self.where(first.shape, 0.2), (first - 1).clamp(min=0), first)

    def run(self, holds: Tensor) -> tuple[Tensor, Tensor]:
        """An interval of steps at which something holds: a run of them, or a part of it."""
        t = torch.arange(S).reshape(-1, *([1] * (holds.dim() - 1)))
        low = torch.where(holds, t, S).amin(0)
        high = torch.where(~holds & (t >= low), t, S).amin(0) - 1
        return low + self.where(low.shape, 0.1), high

    def coarse(self, name: str, value: Any) -> Any:
        """The same claim with one number for all elements along some dimension."""
        if name == "sources" or value is None or not self.chance(0.3):
            return value
        steps = value[0] if isinstance(value, tuple) else value
        if not steps.dim():
            return value
        dim = self.number(0, steps.dim())
        if isinstance(value, tuple):
            return value[0].amax(dim, keepdim=True), value[1].amin(dim, keepdim=True)
        return steps.amax(dim, keepdim=True) if name == "ready" else steps.amin(dim, keepdim=True)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    return (a == b) | (a.isnan() & b.isnan()) if a.dtype.is_floating_point else a == b


# ---------------------------------------------------------------------------------------------------------- one trial


@dataclass
class Case:
    """One call of an operator: its operands, and its arguments with `X(i)` in the place of operand i."""

    operands: Callable[[Draw], list[Operand]]
    args: Callable[..., tuple[Any, ...]]
    kwargs: dict[str, Any] | None = None
    item: int | None = None  # of several results, the one that is looked at
    linked: bool = False  # operand 1 is operand 0


def trial(target: Any, case: Case, seed: int) -> None:
    """Run an operator in both worlds and compare with what its rule says. Raises AssertionError with the claim."""
    operands = case.operands(Draw(seed))
    record = ScanRecord("scan", S)
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for i, operand in enumerate(operands):
        node = graph.placeholder(f"x{i}")
        node.meta["val"] = operand.loop[0]
        if operand.constant:
            record.constant[node] = operand.loop[0]
        elif operand.known:
            record.known[node] = Table(operand.loop)
        nodes.append(node)
    if target is operator.getitem:
        pair = graph.call_function(aten.sort.default, (nodes[0],))
        pair.meta["val"] = aten.sort.default(operands[0].loop[0])
        node = graph.call_function(operator.getitem, (pair, 0))
    else:
        node = graph.call_function(target, case.args(*nodes), case.kwargs or {})

    def call(world: list[Tensor]) -> Tensor:
        if target is operator.getitem:
            return aten.sort.default(world[0])[0]
        out = target(*case.args(*world), **(case.kwargs or {}))
        return out if case.item is None else out[case.item]

    first = [x.loop[0] for x in operands]
    node.meta["val"] = call(first) if case.item is None else target(*case.args(*first), **(case.kwargs or {}))
    analysis = Analysis(record, with_gradients(graph))
    for x, operand in zip(nodes, operands, strict=True):
        analysis.given(x, operand.magnitude, operand.facts)
    if target is operator.getitem:
        analysis.run(pair)
    analysis.run(node)
    for t in range(S):
        worlds = [leaves([x.loop[t] for x in operands]), leaves([x.compiled[t] for x in operands])]
        outs = [call(world) for world in worlds]
        facts = analysis.of(node)
        if node in analysis.settled:
            written = outs
            outs = [settled(call, world, analysis.settled[node] <= t) for world in worlds]
            dim = arguments(node).dim
            assert all(torch.equal(x.isnan().any(dim), y.isnan().any(dim)) for x, y in zip(outs, written, strict=True))
            if bool(outs[0].isnan().any()):
                continue  # such a row is NaN in the loop, and so is what reads it
        if case.item is not None and not facts.stale:
            facts = CLEAN
        huge = any(
            float(x.detach().nan_to_num(0, 0, 0).abs().amax()) > 1e150 for x in worlds[0] + worlds[1] if x.requires_grad
        )
        check_values(facts, analysis.magnitudes.found[node], outs, t, huge)
        if huge or (facts.stale and bool((facts.ready > S).any())):
            continue  # gradients that overflow, and those of a value that no mask may hide
        check_gradients(analysis, node, facts, operands, worlds, outs, t, seed)


def settled(call: Callable[[list[Tensor]], Tensor], world: list[Tensor], keep: Tensor) -> Tensor:
    """A softmax over the last dimension, settled as `BatchedBody` does it."""
    return torch.where(keep, call([torch.where(keep, world[0], -torch.inf)]), 0.0)


def leaves(world: list[Tensor]) -> list[Tensor]:
    return [x.clone().requires_grad_() if x.dtype.is_floating_point else x for x in world]


def check_values(facts: Facts, magnitude: Magnitude | None, outs: list[Tensor], t: int, huge: bool) -> None:
    loop, compiled = (x.detach() for x in outs)

    def at(steps: Tensor | None) -> Tensor | None:
        return None if steps is None else steps.expand(loop.shape)

    ready = at(facts.ready)
    is_ready = torch.ones(loop.shape, dtype=torch.bool) if ready is None else ready <= t
    assert bool((same_bits(loop, compiled) | ~is_ready).all()), "ready"
    for world in (loop, compiled):
        if (zero := at(facts.zero)) is not None:
            assert bool(((world == 0) | (zero <= t)).all()), "zero"
        if (fill := at(facts.fill)) is not None and magnitude is not None:
            low, high = magnitude.floors or (math.inf, -math.inf)
            assert bool((((world >= low) & (world <= high)) | (fill <= t)).all()), "fill"
        if (removed := at(facts.removed)) is not None:
            assert bool(((world == -math.inf) | (removed <= t)).all()), "removed"
        for name, wrong in (("can_be_true", world != 0), ("can_be_false", world == 0)):
            if (steps := at(getattr(facts, name))) is not None:
                assert not bool((wrong & (steps > t)).any()), name
        for name, right in (("surely_true", world != 0), ("surely_false", world == 0)):
            if (run := getattr(facts, name)) is not None:
                low, high = (at(end) for end in run)
                assert bool((right | (t < low) | (t > high)).all()), name
        if (run := facts.surely_kept) is not None and magnitude is not None and world.dtype.is_floating_point:
            low, high = (at(end) for end in run)
            kept = (low <= t) & (t <= high)
            assert huge or bool(((world.abs() <= magnitude.bound) & world.isfinite() | ~kept).all()), "surely_kept"
        if magnitude is not None and world.dtype.is_floating_point:
            low, high = magnitude.floors or (math.inf, -math.inf)
            at_floor = (world >= low) & (world <= high)
            slack = 1e-9 * max(1.0, abs(magnitude.bound)) if magnitude.bound < math.inf else 0.0
            inside = world.isfinite() & (world.abs() <= magnitude.bound + slack) & (world >= magnitude.least - slack)
            overflow = huge and magnitude.bound == math.inf  # that arithmetic does not is what is assumed
            assert overflow or bool((at_floor | inside).all()), "magnitude"
    if (fill := at(facts.fill)) is not None and magnitude is not None:
        assert bool((same_bits(loop, compiled) | (fill <= t)).all()), "fill"


def check_gradients(
    analysis: Analysis,
    node: fx.Node,
    facts: Facts,
    operands: list[Operand],
    worlds: list[list[Tensor]],
    outs: list[Tensor],
    t: int,
    seed: int,
) -> None:
    """A gradient that comes from what is ready is the same in both worlds, and zero where an operand is stale."""
    if not all(out.requires_grad for out in outs):
        return
    rng = torch.Generator().manual_seed(seed)
    arriving = torch.randint(-2, 3, outs[0].shape, generator=rng).double()
    ready = torch.tensor(0) if facts.ready is None else facts.ready
    from_ready = torch.where(ready.expand(outs[0].shape) <= t, arriving, 0.0)
    if node.target in (aten.add.Tensor, aten.mul.Tensor, aten.mul.Scalar) and facts.fill is not None:
        from_ready = torch.where(facts.fill.expand(outs[0].shape) > t, 0.0, from_ready)  # as softmax has it
    inputs = [[x for x in world if x.requires_grad] for world in worlds]
    grads = [
        torch.autograd.grad(out * 1.0, xs, from_ready, allow_unused=True, materialize_grads=True)
        for out, xs in zip(outs, inputs, strict=True)
    ]
    of_floats = [x for x in operands if x.loop.dtype.is_floating_point]
    stale_somewhere = any(x.facts.stale for x in operands)
    for operand, loop, compiled in zip(of_floats, *grads, strict=True):

        def at(steps: Tensor | None, shape: torch.Size = loop.shape) -> Tensor:
            return (torch.tensor(0) if steps is None else steps).expand(shape)

        # What reaches an exact zero, or a floor, goes no further: what made it so stops it.
        absorbed = (at(operand.facts.zero) > t) | (at(operand.facts.fill) > t)
        stale = (at(operand.facts.ready) > t) & ~absorbed
        if stale_somewhere:
            for grad in (loop, compiled):
                assert bool(((grad == 0) | ~stale).all()), "gradient of a stale element"
            alike = torch.isclose(loop, compiled, rtol=1e-9, atol=1e-12, equal_nan=True)
            assert bool((alike | absorbed | stale).all()), "gradient"
        if node.target in SOFTMAX and facts.zero is not None:
            filled = at(operand.facts.fill) > t
            assert bool(((loop == 0) & (compiled == 0) | ~filled).all()), "gradient of a floor"
        sizes = [analysis.magnitudes.of(n) for n in node.all_input_nodes]
        if analysis.magnitudes.is_smooth(node) and all(m is not None and m.finite and m.bound < HUGE for m in sizes):
            assert bool(loop.isfinite().all() and compiled.isfinite().all()), "a smooth operator"


# ------------------------------------------------------------------------------------------------------ the operators


def unary(*rest: Any, positive: bool | None = False, **kwargs: Any) -> Case:
    """One operand; `positive` None: now and then."""

    def operands(d: Draw) -> list[Operand]:
        return [d.floats((2, 3), positive=d.chance(0.5) if positive is None else positive)]

    return Case(operands, lambda x: (x, *rest), kwargs)


def binary(*rest: Any, **kwargs: Any) -> Case:
    return Case(
        lambda d: [d.floats((2, 3)), d.floats(d.pick((2, 3), (3,), (2, 1)))], lambda a, b: (a, b, *rest), kwargs
    )


def scalar(number: float) -> Case:
    return Case(lambda d: [d.floats((2, 3))], lambda a: (a, number))


def booleans(count: int) -> Case:
    return Case(lambda d: [d.booleans((2, 3)) for _ in range(count)], lambda *masks: masks)


def product(left: tuple[int, ...], right: tuple[int, ...], added: tuple[int, ...] | None = None) -> Case:
    def operands(d: Draw) -> list[Operand]:
        return [d.floats(s) for s in ((added,) if added is not None else ()) + (left, right)]

    return Case(operands, lambda *x: x)


def choice(if_true: Any, if_false: Any) -> Case:
    """`where`; None stands for an operand."""

    def operands(d: Draw) -> list[Operand]:
        return [d.booleans((2, 3))] + [d.floats((2, 3)) for side in (if_true, if_false) if side is None]

    def args(mask: Any, *sides: Any) -> tuple[Any, ...]:
        rest = list(sides)
        return (mask, *(rest.pop(0) if side is None else side for side in (if_true, if_false)))

    return Case(operands, args)


def fills(*numbers: float) -> list[Case]:
    return [Case(lambda d: [d.floats((2, 3)), d.booleans((2, 3))], lambda x, m, n=n: (x, m, n)) for n in numbers]


def constant_sides() -> list[Case]:
    """`where` with constant tensors: zeros, floors, and neither."""

    def sides(d: Draw) -> list[Operand]:
        value = torch.full((S, 2, 3), d.pick(0.0, -math.inf, LOWEST, 1.0, -1e9), dtype=torch.float64)
        constant = Operand(value, value, CLEAN, magnitudes.measured(value), constant=True)
        facts = Analysis(ScanRecord("", S), ())._constant(value[0])
        return [d.booleans((2, 3)), replace(constant, facts=facts), d.floats((2, 3))]

    return [Case(sides, lambda m, c, x: (m, c, x)), Case(sides, lambda m, c, x: (m, x, c))]


def picked(target: Any) -> list[Case]:
    if target is aten.index_select.default:
        return [Case(lambda d: [d.floats((3, 2)), d.rows((2,), 3)], lambda x, i: (x, 0, i))]
    if target is aten.gather.default:
        return [Case(lambda d: [d.floats((3, 2)), d.rows((2, 2), 3)], lambda x, i: (x, 0, i))]
    return [
        Case(lambda d: [d.floats((3, 2)), d.rows((2,), 3)], lambda x, i: (x, [i])),
        Case(lambda d: [d.floats((2, 3)), d.rows((2,), 3)], lambda x, i: (x, [None, i])),
        Case(lambda d: [d.floats((3, 3)), d.rows((2,), 3), d.rows((2,), 3)], lambda x, i, j: (x, [i, j])),
    ]


def placed(target: Any) -> list[Case]:
    x, row = (lambda d: d.floats((3, 2))), (lambda d: d.floats((1, 2)))

    def index(shape: tuple[int, ...]) -> Callable[[Draw], Operand]:
        return lambda d: d.rows(shape, 3)

    if target in (aten.slice_scatter.default,):
        return [Case(lambda d: [x(d), row(d)], lambda a, b: (a, b, 0, 1, 2))]
    if target is aten.select_scatter.default:
        return [Case(lambda d: [x(d), d.floats((2,))], lambda a, b: (a, b, 0, 1))]
    if target is aten.scatter.value:
        return [Case(lambda d: [x(d), index((1, 2))(d)], lambda a, i: (a, 0, i, 2.0))]
    if target is aten.scatter.src:
        return [Case(lambda d: [x(d), index((1, 2))(d), row(d)], lambda a, i, b: (a, 0, i, b))]
    if target is aten.index_copy.default:
        return [Case(lambda d: [x(d), index((1,))(d), row(d)], lambda a, i, b: (a, 0, i, b))]
    return [Case(lambda d: [x(d), index((1,))(d), row(d)], lambda a, i, b: (a, [i], b))]


def anything(d: Draw) -> Operand:
    return d.pick(d.floats, d.floats, d.booleans, d.integers)((2, 3))


def moves(*rest: Any) -> Case:
    return Case(lambda d: [anything(d)], lambda x: (x, *rest))


def each(targets: tuple[Any, ...], cases: list[Case]) -> dict[Any, list[Case]]:
    """The same cases for several operators."""
    return dict.fromkeys(targets, cases)


A = aten
CASES: dict[Any, list[Case]] = {
    A.bitwise_and.Tensor: [booleans(2), Case(lambda d: [d.integers((2,)), d.booleans((2,))], lambda a, b: (a, b))],
    A.bitwise_or.Tensor: [booleans(2), Case(lambda d: [d.integers((2,)), d.booleans((2,))], lambda a, b: (a, b))],
    A.logical_and.default: [booleans(2), binary()],
    A.logical_or.default: [booleans(2), binary()],
    A.bitwise_xor.Tensor: [booleans(2)],
    A.logical_xor.default: [booleans(2), binary()],
    A.bitwise_not.default: [booleans(1), Case(lambda d: [d.integers((2,))], lambda a: (a,))],
    A.logical_not.default: [booleans(1), unary(), Case(lambda d: [d.integers((2,))], lambda a: (a,))],
    A.mul.Tensor: [binary(), scalar(2.0), scalar(-0.5), scalar(0.0), scalar(math.inf), scalar(1e300),
                   Case(lambda d: [d.booleans((2, 3)), d.floats((2, 3))], lambda a, b: (a, b)),
                   Case(lambda d: [d.floats((2, 3)), d.floats((2, 3), positive=True)], lambda a, b: (a, b)),
                   Case(lambda d: [d.floats((2, 3))], lambda a: (a, a))],
    A.mul.Scalar: [scalar(2.0), scalar(-0.5), scalar(0.0)],
    A.add.Tensor: [binary(), binary(alpha=2), scalar(1.0), scalar(-math.inf), scalar(LOWEST)],
    A.add.Scalar: [scalar(1.0), scalar(-math.inf)],
    A.sub.Tensor: [binary(), scalar(1.0), scalar(math.inf)],
    A.sub.Scalar: [scalar(1.0)],
    A.rsub.Scalar: [scalar(1.0), scalar(-math.inf)],
    A.div.Tensor: [binary(), scalar(2.0), scalar(0.0), scalar(-3.0), scalar(math.inf),
                   Case(lambda d: [d.floats((2, 3)), d.floats((2, 3), positive=True)], lambda a, b: (a, b))],
    A.div.Scalar: [scalar(2.0), scalar(0.0)],
    A.neg.default: [unary()],
    A.nan_to_num.default: [unary(), unary(0.0), unary(-2.0, 1.0, -1.0)],
    **each((A.where.self,), [choice(None, None), *constant_sides()]),
    A.where.ScalarOther: [choice(None, x) for x in (0.0, -math.inf, LOWEST, -1e9, math.nan)],
    A.where.ScalarSelf: [choice(x, None) for x in (0.0, -math.inf, LOWEST, math.inf)],
    A.where.Scalar: [choice(0.0, -math.inf), choice(-3.4028234663852886e38, 1.0)],
    A.masked_fill.Scalar: fills(0.0, -math.inf, LOWEST, 1.0, math.nan),
    A.masked_fill.Tensor: [
        Case(lambda d: [d.floats((2, 3)), d.booleans((2, 3)), d.floats(())], lambda x, m, v: (x, m, v))
    ],
    A._to_copy.default: [unary(dtype=torch.float32), unary(dtype=torch.float64), unary(dtype=torch.float16),
                         Case(lambda d: [d.booleans((2, 3))], lambda x: (x,), {"dtype": torch.float64}),
                         Case(lambda d: [d.booleans((2, 3))], lambda x: (x,), {"dtype": torch.bool}),
                         Case(lambda d: [d.integers((2, 3))], lambda x: (x,), {"dtype": torch.float64}),
                         Case(lambda d: [d.integers((2, 3))], lambda x: (x,), {"dtype": torch.bool}),
                         Case(lambda d: [d.floats((2, 3), plain=True)], lambda x: (x,), {"dtype": torch.int64})],
    **each((A.clone.default, A.detach.default, A.alias.default), [moves()]),
    A.sum.dim_IntList: [unary([1]), unary([0], True), unary([0, 1])],
    A.mean.dim: [unary([1]), unary([-1], True)],
    A.amax.default: [unary([1]), unary([0], True)],
    A.amin.default: [unary([1])],
    **each((A.sum.default, A.mean.default, A.max.default, A.min.default), [unary()]),
    **each((A.max.dim, A.min.dim), [replace(unary(1), item=0)]),
    A.mm.default: [product((2, 3), (3, 2))],
    A.bmm.default: [product((2, 2, 3), (2, 3, 1))],
    A.mv.default: [product((2, 3), (3,))],
    A.dot.default: [product((3,), (3,))],
    A.addmm.default: [product((2, 3), (3, 2), (2,)), product((2, 3), (3, 2), (2, 2))],
    A.baddbmm.default: [product((2, 2, 3), (2, 3, 1), (2, 2, 1))],
    A._softmax.default: [unary(1, False), unary(0, False), Case(lambda d: [d.floats((3,))], lambda x: (x, 0, False))],
    A._safe_softmax.default: [unary(1), unary(0)],
    **{target: picked(target) for target in PICKED},
    A.embedding.default: [Case(lambda d: [d.floats((3, 2)), d.rows((2,), 3)], lambda x, i: (x, i))],
    A.view.default: [moves([3, 2])],
    A._unsafe_view.default: [moves([3, 2])],
    A.reshape.default: [moves([6])],
    A.permute.default: [moves([1, 0])],
    A.transpose.int: [moves(0, 1)],
    A.t.default: [moves()],
    A.expand.default: [moves([2, -1, -1])],
    A.unsqueeze.default: [moves(1)],
    A.squeeze.default: [moves()],
    A.squeeze.dim: [moves(0)],
    A.squeeze.dims: [moves([0, 1])],
    A.slice.Tensor: [moves(1, 1, 3)],
    A.select.int: [moves(0, 1)],
    A.unfold.default: [moves(1, 2, 1)],
    A.cat.default: [Case(lambda d: [d.floats((2, 3)), d.floats((2, 1))], lambda a, b: ([a, b], 1)),
                    Case(lambda d: [d.booleans((2, 3)), d.booleans((2, 1))], lambda a, b: ([a, b], 1))],
    A.stack.default: [Case(lambda d: [d.floats((2, 3)), d.floats((2, 3))], lambda a, b: ([a, b], 1))],
    A.repeat.default: [moves([2, 1])],
    A.flip.default: [moves([1])],
    A.roll.default: [moves([1], [1])],
    A.constant_pad_nd.default: [moves([1, 0], 0), moves([0, 2], 1), unary([1, 0], -math.inf), unary([1, 0], math.nan),
                                moves([1, -1], 2)],
    A.split.Tensor: [replace(unary(2, 1), item=0)],
    A.split_with_sizes.default: [replace(unary([1, 2], 1), item=1)],
    A.unsafe_split.Tensor: [replace(unary(2, 1), item=0)],
    A.unsafe_split_with_sizes.default: [replace(unary([1, 2], 1), item=1)],
    A.unbind.int: [replace(unary(0), item=0)],
    **{target: placed(target) for target in PLACED},
    A.tril.default: [unary()],
    A.triu.default: [unary(1)],
    A.sort.default: [replace(unary(), item=0)],
    A.sort.stable: [Case(lambda d: [d.floats((2, 3))], lambda x: (x,), {"stable": True}, 0)],
    A.topk.default: [replace(unary(2), item=0)],
    operator.getitem: [unary()],
    A.cumsum.default: [unary(1)],
    A._log_softmax.default: [unary(1, False)],
    A.log_sigmoid_forward.default: [replace(unary(), item=0)],
    A.logsumexp.default: [unary([1]), unary([0], True)],
    A.exp.default: [unary()],
    A.linalg_vector_norm.default: [unary(2.0, [1]), unary(1.0, [1]), unary(0.0)],
    A.var.correction: [unary([1], correction=1), unary([1], correction=3), unary([0, 1])],
    A.pow.Tensor_Scalar: [unary(n, positive=None) for n in (1, 2, 3, 1.5, 0.5, -1)],
    A.pow.Tensor_Tensor: [binary(), Case(lambda d: [d.floats((2, 3)), d.integers((2, 3))], lambda a, b: (a, b))],
    A.elu.default: [unary(), unary(1.7, 1.1), unary(-1.0)],
    **each((A.sqrt.default, A.rsqrt.default, A.reciprocal.default, A.log.default), [unary(positive=None)]),
    A.native_layer_norm.default: [replace(unary([3], None, None, eps), item=0) for eps in (1e-5, 0.0)],
    A.native_group_norm.default: [
        Case(lambda d: [d.floats((2, 3))], lambda x: (x, None, None, 2, 3, 1, 1, 1e-5), item=0)
    ],
    **each((A.eq.Tensor, A.ne.Tensor, A.lt.Tensor, A.le.Tensor, A.gt.Tensor, A.ge.Tensor), [binary()]),
    **each((A.eq.Scalar, A.ne.Scalar, A.lt.Scalar, A.le.Scalar, A.gt.Scalar, A.ge.Scalar),
           [scalar(1.0), scalar(-math.inf), scalar(LOWEST), scalar(math.inf)]),
    **each((A.maximum.default, A.minimum.default), [binary()]),
    A.clamp.default: [unary(-1.0, 2.0), unary(0.5), unary(None, 1.0), unary(2.0, 1.0), unary(math.nan, 1.0)],
    A.clamp_min.default: [scalar(0.5), scalar(-math.inf), scalar(LOWEST)],
    A.clamp_max.default: [scalar(0.5), scalar(math.inf)],
    A.hardtanh.default: [unary(), unary(-2.0, 2.0)],
    **each(
        (A.tanh.default, A.sigmoid.default, A.relu.default, A.silu.default, A.gelu.default, A.leaky_relu.default,
         A.abs.default, A.sin.default, A.cos.default, A.erf.default, A.sign.default, A.floor.default,
         A.ceil.default, A.round.default, A.softplus.default, A.hardsigmoid.default,
         A.mish.default), [unary()],
    ),
}  # fmt: skip

TABLES = {
    *RULES, *MOVEMENT, *FINITE, *FINITE_WITHIN_BOUNDS, *CASTS, *PICKED, *SOFTMAX, *MAGNITUDES, aten.logsumexp.default
}  # fmt: skip


def test_every_rule_is_checked():
    assert CASES.keys() >= TABLES, sorted(map(str, TABLES - CASES.keys()))
    assert CASES.keys() <= TABLES, "a case of no rule"


@pytest.mark.parametrize("target", sorted(CASES, key=str), ids=str)  # the same order in every process
@given(seed=st.integers(0, 2**40))
def test_rules_keep_their_promises(target, seed):
    for i, case in enumerate(CASES[target]):
        for j in range(3):
            trial(target, case, seed + 1000 * i + j)


@settings(max_examples=settings().max_examples * 4)
@given(seed=st.integers(0, 2**40))
def test_known_values_are_read_right(seed):
    """What is known at every step, in each of its forms, and constants."""
    d = Draw(seed)
    numbers = d.among((S, 2, 3), [0.0, 1.0, -math.inf, LOWEST, -3.0, d.pick(2.0, math.nan, math.inf)])
    mask = StepMask.inside(d.steps((2, 3)), d.steps((2, 3)), S)
    sides = [d.among((2, 3), [0.0, 1.0, -math.inf, LOWEST]) for _ in range(2)]
    integers = torch.randint(-1, 2, (S,), generator=d.rng), torch.randint(-1, 2, (2, 3), generator=d.rng)
    values = [Table(numbers), Table(numbers > 0), mask, ~mask, Choice(mask, *sides), Separable(*integers),
              Table(numbers.nan_to_num(0, 0, 0).long())]  # fmt: skip
    for value in values:
        check_known(value, value.table())
    for constant in (numbers[0], numbers[0] > 0, numbers[0].nan_to_num(0, 0, 0).long()):
        check_known(constant, constant.expand(S, *constant.shape))


def check_known(value: Any, table: Tensor) -> None:
    record, graph = ScanRecord("scan", S), fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = table[0]
    analysis = Analysis(record, with_gradients(graph))
    (record.constant if isinstance(value, Tensor) else record.known)[node] = value
    analysis.run(node)
    for t in range(S):
        check_values(analysis.of(node), analysis.magnitudes.found[node], [table[t], table[t]], t, False)


def test_scores_near_the_lowest_number_do_not_stand_out():
    low = torch.finfo(torch.float16).min
    near, far = Magnitude(65472.0, floors=(low, low)), Magnitude(4000.0, floors=(low, low))
    assert float(torch.softmax(torch.tensor([-65472.0, low]), 0)[1]) > 0
    assert not near.stands_out
    assert float(torch.softmax(torch.tensor([-4000.0, low]), 0)[1]) == 0
    assert far.stands_out


# ------------------------------------------------------------------------------------------------------ planted faults


def _clean(analysis: Analysis, node: Any) -> Facts:
    return CLEAN


def _keeps(name: str, arg: int = 0) -> Callable[[Analysis, Any], Facts]:
    """A rule that carries a claim over from an operand."""

    def rule(analysis: Analysis, node: Any) -> Facts:
        return replace(analysis.pointwise(node), **{name: getattr(analysis.of(node.args[arg]), name)})

    return rule


def _least_ready(analysis: Analysis, node: Any) -> Facts:
    f = analysis.of(node.args[0])
    return f if not f.stale else Facts(ready=f.ready.min(), sources=f.sources)


def _always_kept(self: Analysis, value: Any, like: Any = None) -> Any:
    return torch.tensor(0), torch.tensor(S - 1)


def _as_equal(analysis: Analysis, node: Any) -> Facts:
    facts = staleness_rules._compare_with_number(analysis, node)
    return replace(facts, can_be_false=facts.can_be_true, can_be_true=None)


FAULTS: dict[str, tuple[Any, str, Any, Any, Any]] = {
    # what is broken: the operator that shows it; the object, its attribute or key, and what takes its place
    "a sum is ready when one element is": (aten.sum.default, "item", RULES, aten.sum.default, _least_ready),
    "a product of matrices is always ready": (aten.mm.default, "item", RULES, aten.mm.default, _clean),
    "or is and": (aten.bitwise_or.Tensor, "item", RULES, aten.bitwise_or.Tensor, staleness_rules._and),
    "not keeps what it negates": (aten.logical_not.default, "item", RULES, aten.logical_not.default, _keeps("zero")),
    "a sum is zero where one term is": (aten.add.Tensor, "item", RULES, aten.add.Tensor, _keeps("zero")),
    "padding is zero": (aten.constant_pad_nd.default, "item", RULES, aten.constant_pad_nd.default,
                        lambda a, n: replace(staleness_rules._move(a, n), zero=torch.tensor(S))),
    "a logarithm is finite": (aten.log.default, "attribute", staleness, "FINITE", FINITE | {aten.log.default}),
    "a mask keeps scores by itself": (aten.where.ScalarOther, "attribute", Analysis, "kept", _always_kept),
    "zero times infinity is zero": (aten.mul.Tensor, "attribute", Analysis, "is_finite", lambda *_: True),
    "stale infinities are harmless": (aten.bmm.default, "attribute", Analysis, "is_finite", lambda *_: True),
    "some score is always kept": (aten._softmax.default, "attribute", Analysis, "one_is_kept", lambda *_: True),
    "a log-sum-exp is a number": (aten.logsumexp.default, "attribute", Analysis, "one_is_kept", lambda *_: True),
    "an exponential of a floor is at most 1": (aten.exp.default, "item", MAGNITUDES, aten.exp.default,
                                               lambda sizes, n: sizes.of(n.args[0]) and Magnitude(1.0, 0.0)),
    "a tangent of -inf is zero": (aten.tanh.default, "item", RULES, aten.tanh.default,
                                  staleness_rules._removed_becomes_zero),
    "floors are numbers": (aten.add.Tensor, "item", MAGNITUDES, aten.add.Tensor,
                           lambda sizes, n: magnitudes.join(sizes.of(x, n) for x in n.args[:2])),
    "a quotient is finite": (aten.div.Tensor, "item", MAGNITUDES, aten.div.Tensor, magnitudes._data),
    "any power is finite": (aten.pow.Tensor_Tensor, "item", MAGNITUDES, aten.pow.Tensor_Tensor, magnitudes._data),
    "any power of zero is zero": (aten.pow.Tensor_Scalar, "item", RULES, aten.pow.Tensor_Scalar, _keeps("zero")),
    "a root keeps away from zero": (aten.sqrt.default, "item", MAGNITUDES, aten.sqrt.default,
                                    lambda *_: replace(magnitudes.DATA, least=2.0)),
    "one over a root is finite": (aten.rsqrt.default, "item", MAGNITUDES, aten.rsqrt.default, magnitudes._data),
    "a variance of few is finite": (aten.var.correction, "item", MAGNITUDES, aten.var.correction,
                                    magnitudes._not_below_zero),
    "a root is smooth": (aten.sqrt.default, "attribute", Magnitudes, "is_smooth", lambda *_: True),
    "padding keeps the magnitude": (aten.constant_pad_nd.default, "item", MAGNITUDES, aten.constant_pad_nd.default,
                                    magnitudes._item),
    "what is -inf is above it": (aten.gt.Scalar, "item", RULES, aten.gt.Scalar, _as_equal),
    "a known row may be a step late": (aten.index_select.default, "attribute", torch, "arange",
                                       lambda n, arange=torch.arange: arange(n) + 1),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    target, how, owner, name, broken = FAULTS[fault]
    cases = [(case, seed) for seed in range(120) for case in CASES[target]]
    if how == "item":
        monkeypatch.setitem(owner, name, broken)
    else:
        monkeypatch.setattr(owner, name, broken)
    with pytest.raises(AssertionError):
        run_all(target, cases)


def run_all(target: Any, cases: list[tuple[Case, int]]) -> None:
    for case, seed in cases:
        trial(target, case, seed)
