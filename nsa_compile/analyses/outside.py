"""What a step is given from outside of its loop: how large it is, and what of it says something as a mask, when.

A mask of all steps that the program makes before the loop and scans row by row is data, but for the part that it names
itself: of `(ids[:, None] == ids) & ones(S, S).tril()` the rows of later keys are false, whatever `ids` is. What leads
to an input is followed operator by operator, by the rules for a step's own; the loop's steps are then a dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx

from nsa_compile.analyses.facts import CLEAN, FIRST_STEPS, INTERVALS, Facts, Given
from nsa_compile.analyses.magnitudes import Magnitude, floor_level, measured, unmeasured
from nsa_compile.analyses.staleness import Analysis
from nsa_compile.ir.aten import filled_with
from nsa_compile.ir.scans import ScanRecord, ScanSite, ancestors, constant_value, example
from nsa_compile.ir.step_values import Table

__all__ = ["given_from_outside"]

# Operators that lead to a mask that is made outside of the loop.
FOLLOWED_LIMIT = 200
# Elements of a mask of all steps.
MASK_LIMIT = 2**24


def given_from_outside(site: ScanSite) -> Given:
    """What is known of the inputs of a body, as they come from outside: of carries, as they are at first."""
    carries, xs, additional = site.placeholders()
    found = Given()
    with unset_fake_temporarily(), torch.no_grad():
        for node, source in zip([*carries, *xs, *additional], [*site.init, *site.xs, *site.additional], strict=True):
            outside = _of(source)
            found.magnitudes[node] = outside.magnitude
            if node not in carries and outside.facts.says_anything:
                found.facts[node] = _at_each_step(outside.facts, example(source).dim(), site.length, node in xs)
    return found


@dataclass
class _Outside:
    magnitude: Magnitude | None
    facts: Facts = CLEAN


def _of(source: fx.Node) -> _Outside:
    value = constant_value(source, {})
    if value is not None:
        return _Outside(measured(value))
    dtype = example(source).dtype
    if source.op == "placeholder" or not (dtype == torch.bool or (dtype.is_floating_point and _names_floors(source))):
        return _Outside(unmeasured(source))
    if example(source).numel() <= MASK_LIMIT:
        return _followed(source, with_facts=True)
    return _followed(source, with_facts=False) if dtype.is_floating_point else _Outside(unmeasured(source))


def _followed(source: fx.Node, *, with_facts: bool) -> _Outside:
    """Of what is made outside of the loop, such as an additive mask."""
    nothing = _Outside(None if example(source).dtype.is_floating_point else unmeasured(source))
    made_of = ancestors([source])
    if len(made_of) > FOLLOWED_LIMIT:
        return nothing
    graph, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), []
    values: dict[fx.Node, Tensor | None] = {}
    constants: list[Tensor | None] = []
    for node in (n for n in source.graph.nodes if n in made_of):
        is_tensor = isinstance(example(node), Tensor)
        value = constant_value(node, values) if is_tensor and with_facts else None
        if is_tensor and (value is not None or node.op == "placeholder"):
            copies[node] = graph.placeholder(node.name)
            inputs.append(example(node))
            constants.append(value)
        elif node.op in ("call_function", "call_method") and not isinstance(node.target, HigherOrderOperator):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        else:
            return nothing
    graph.output(copies[source])
    try:
        lowered = make_fx(fx.GraphModule({}, graph), {}, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    except Exception:  # whatever torch cannot trace is not known
        return nothing
    placeholders = lowered.graph.find_nodes(op="placeholder")
    record = ScanRecord("outside", 1)
    record.constant = {n: x for n, x in zip(placeholders, constants, strict=True) if x is not None}
    analysis = Analysis(record, ())
    for node in lowered.graph.nodes:
        if node.op == "output":
            result: Any = node.args[0]
            return _Outside(analysis.magnitudes.of(result), analysis.of(result))
        if node.op == "placeholder" and node not in record.constant:
            analysis.given(node, unmeasured(node))
        elif (number := filled_with(node)) is not None:
            record.constant[node] = torch.tensor(number, dtype=example(node).dtype)
            analysis.run(node)
        elif with_facts:
            analysis.run(node)
        else:
            analysis.magnitudes.found[node] = analysis.magnitudes.derive(node)
    return nothing


def _at_each_step(facts: Facts, rank: int, length: int, by_step: bool) -> Facts:
    """What is known of a value of all steps, or of one that all see, as what is known of it at each step."""

    def table(holds: Tensor) -> Table:
        full = holds.reshape([1] * (rank - holds.dim()) + list(holds.shape))
        return Table(full.expand(length, *full.shape[1:]) if by_step else full.expand(length, *full.shape))

    found: dict[str, Any] = {}
    for name in FIRST_STEPS:
        if name not in ("ready", "absorbed", "blank") and (until := getattr(facts, name)) is not None:
            found[name] = table(until > 0).run_of(False)[0]
    for name in INTERVALS:
        if (interval := getattr(facts, name)) is not None:
            found[name] = table((interval[0] <= 0) & (interval[1] >= 0)).run_of(True)[1]
    return Facts(**found)


def _names_floors(source: fx.Node) -> bool:
    """Whether what leads to a node names a floor, an infinity or NaN, or memory that was never written."""
    seen, todo = {source}, [source]
    while todo:
        node = todo.pop()
        if "empty" in str(node.target):
            return True
        for value in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, float) and not abs(value) < -floor_level(torch.float32):
                return True
            if isinstance(value, fx.Node) and value not in seen:
                seen.add(value)
                todo.append(value)
    return False
