"""Values the compiler knows before the program runs: what depends on the step index and on constants alone.

A *constant* node has one value for every step; a *known* node has one for each step. Masks, slots and predicates of a
cache are of this kind, so the passes need not guess at them: they evaluate them. Steps times elements would be too
many for the masks of a long sequence, so these are kept in the forms of `step_values`, and as a table only where no
form fits and the table is small.
"""

from __future__ import annotations

import logging
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from nsa_compile.ir.aten import (
    ADD,
    AND,
    COMPARISONS,
    COPIED,
    MASKED_FILL,
    MUL,
    NOT,
    OR,
    PICKED,
    REARRANGED,
    SUB,
    WHERE,
    aten,
)
from nsa_compile.ir.scans import ScanRecord, ScanSite, ancestors, constant_value, example, on_cpu
from nsa_compile.ir.step_values import (
    INTEGERS,
    MODERATE,
    Choice,
    Separable,
    StepMask,
    StepValue,
    Table,
    compare,
    separable,
    step_mask,
    two_sided,
)

log = logging.getLogger("nsa_compile")

# Elements that a known value may hold over all steps as a table.
LIMIT = 2**26
# What the values of a carry over all steps may take while they are computed one after the other.
_SIMULATED_BYTES = 2**26


def evaluate_known(site: ScanSite, record: ScanRecord) -> None:
    """Fill `record.known` and `record.constant` for the nodes of a lowered body."""
    cache: dict[fx.Node, Tensor | None] = {}
    _, xs, additional = site.placeholders()
    for placeholder, source in zip(additional, site.additional, strict=True):
        if (value := constant_value(source, cache)) is not None:
            record.constant[placeholder] = value
    for placeholder, source in zip(xs, site.xs, strict=True):
        if (value := constant_value(source, cache)) is not None:
            record.known[placeholder] = Table(value)
    with unset_fake_temporarily(), torch.no_grad():
        for node in site.body.graph.find_nodes(op="get_attr"):
            _evaluate(node, record)
        _simulate_carries(site, record, [constant_value(source, cache) for source in site.init])
        for node in site.body.graph.nodes:
            _evaluate(node, record)


def evaluate_constants(step: fx.GraphModule, record: ScanRecord) -> None:
    """Fill `record.constant` for the nodes of a lowered graph that is one step by itself."""
    with unset_fake_temporarily(), torch.no_grad():
        for node in step.graph.nodes:
            _evaluate(node, record)


def _evaluate(node: fx.Node, record: ScanRecord) -> None:
    """Record the value of a node whose operands' values are recorded, if it can be computed."""
    if node in record.known or node in record.constant:
        return
    if node.op == "get_attr":
        _evaluate_attribute(node, record)
        return
    if not is_function(node):
        return
    try:
        if node.target in _LIKE:
            _evaluate_filled(node, record)
        elif all(n in record.constant for n in node.all_input_nodes):
            record.constant[node] = _call(node, record.constant)
        elif (value := _at_every_step(node, record)) is not None:
            record.known[node] = value
    except Exception as error:  # what raises here raises in the loop as well, or wants a device that is not the CPU
        log.debug("%s is not evaluated: %s", node.format_node(), error)


def is_function(node: fx.Node) -> bool:
    """Whether a node is the application of a function to tensors: equal operands, equal result, and nothing else.

    Torch says so of its own operators. Those of others are not run at compile time: they may read anything.
    """
    return (
        node.op == "call_function"
        and isinstance(node.target, OpOverload)
        and node.target.namespace in ("aten", "prims")
        and not node.target._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in node.target.tags
        and isinstance(node.meta.get("val"), Tensor)
    )


def _evaluate_attribute(node: fx.Node, record: ScanRecord) -> None:
    """A constant that the body holds, such as `torch.tensor([1, 2])` in a step."""
    assert isinstance(node.target, str)
    value = operator.attrgetter(node.target)(node.graph.owning_module)
    if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
        record.constant[node] = value.detach().cpu()


def _evaluate_filled(node: fx.Node, record: ScanRecord) -> None:
    filled = _LIKE[node.target]
    number: Any = node.args[filled] if isinstance(filled, int) else filled
    if not isinstance(number, fx.Node):
        record.constant[node] = torch.full((), number, dtype=example(node).dtype).expand(example(node).shape)


def _at_every_step(node: fx.Node, record: ScanRecord) -> StepValue | None:
    """The value of a node at every step, or None if it is not known or has no form that fits."""
    if not all(n in record.constant or n in record.known for n in node.all_input_nodes):
        return None
    elements = example(node).numel()
    value = _in_closed_form(node, record) if elements > 1 else None
    if value is not None:
        return value if value.shape == example(node).shape else None
    if elements * record.length > LIMIT or not _tables_fit(node.all_input_nodes, record):
        return None
    return Table(_call_each_step(node, record))


# Operators that take nothing but the shape of their operand: what they fill it with, or which argument says that.
_LIKE: dict[Any, float | int] = {
    aten.zeros_like.default: 0.0,
    aten.ones_like.default: 1.0,
    aten.new_zeros.default: 0.0,
    aten.new_ones.default: 1.0,
    aten.full_like.default: 1,
    aten.new_full.default: 2,
}


def _tables_fit(operands: list[fx.Node], record: ScanRecord) -> bool:
    return all(example(n).numel() * record.length <= LIMIT for n in operands if n in record.known)


def _call(node: fx.Node, values: dict[fx.Node, Any]) -> Tensor:
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    target: Any = node.target
    return target(*args, **on_cpu(kwargs))


def _call_each_step(node: fx.Node, record: ScanRecord) -> Tensor:
    names = [n for n in node.all_input_nodes if n in record.known]

    def one_step(*values: Tensor) -> Tensor:
        return _call(node, {**record.constant, **dict(zip(names, values, strict=True))})

    rows = [record.known[n].table().to(example(n).dtype) for n in names]
    if not promotes_by_rank(node) and not _computes_one_float(node):
        try:
            values = torch.vmap(one_step)(*rows)
            if values.dtype == example(node).dtype and values.shape[1:] == example(node).shape:
                return values
        except Exception as error:  # no batching rule: the loop is slower and says the same
            log.debug("%s is evaluated step by step: %s", node.target, error)
    return torch.stack([one_step(*(row[t] for row in rows)) for t in range(record.length)])


def _computes_one_float(node: fx.Node) -> bool:
    """Whether an operator computes with a single floating-point number, which torch may round otherwise than many."""
    tensors = [example(n) for n in (node, *node.all_input_nodes)]
    return any(x.is_floating_point() for x in tensors) and any(x.numel() == 1 for x in tensors)


def promotes_by_rank(node: fx.Node) -> bool:
    """Whether an operator meets tensors of several dtypes, some without dimensions. These weigh less in the common
    dtype, and with a dimension of steps they would not."""
    operands = [example(n) for n in node.all_input_nodes]
    return len({x.dtype for x in operands}) > 1 and len({x.dim() == 0 for x in operands}) > 1


# -- evaluation in closed form


# Operators that only move elements of their first argument.
_MOVEMENT = REARRANGED | COPIED | PICKED


def _in_closed_form(node: fx.Node, record: ScanRecord) -> StepValue | None:
    """The value of a node at every step in one of the forms of `step_values`, or None."""
    target, length = node.target, record.length
    assert isinstance(target, OpOverload)
    operands = [_operand(x, record) for x in node.args]
    if target in _MOVEMENT:
        return _moved(node, record)
    if target in COMPARISONS and (mask := _compared(node, operands, length)) is not None:
        return mask
    if target in ADD | SUB and len(node.args) == 2 and node.kwargs.get("alpha", 1) == 1:
        a, b = (separable(x, length) if x is not None else None for x in operands[:2])
        if a is not None and b is not None:
            sign = 1 if target in ADD else -1
            return _exact(Separable(a.steps + sign * b.steps, a.rows + sign * b.rows), node)
    if target in MUL and (product := _scaled(operands[0], operands[1], length)) is not None:
        return _exact(product, node)
    if example(node).dtype == torch.bool and target in AND | OR | NOT:
        masks: list[Any] = [step_mask(x, length) if x is not None else None for x in operands]
        if None in masks:
            return None
        return ~masks[0] if target in NOT else masks[0] & masks[1] if target in AND else masks[0] | masks[1]
    if target in WHERE:
        return _choice(node, operands[0], operands[1], operands[2], length)
    if target in MASKED_FILL:
        return _choice(node, operands[1], operands[2], operands[0], length)
    if target is aten._to_copy.default and isinstance(operands[0], Separable):
        if example(node).dtype == torch.bool:
            return compare("ne", operands[0], _zero(length))
        return _exact(operands[0], node)
    if target is aten._to_copy.default and isinstance(operands[0], StepMask):
        return _choice(node, operands[0], torch.tensor(True), torch.tensor(False), length)
    if target is aten._to_copy.default or torch.Tag.pointwise in target.tags:
        return _on_both_sides(node, record)
    return None


def _operand(value: Any, record: ScanRecord) -> StepValue | Tensor | None:
    if isinstance(value, fx.Node):
        return record.known.get(value, record.constant.get(value))
    if isinstance(value, bool | int):
        return torch.tensor(value)
    return torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else None


def _zero(length: int) -> Separable:
    return Separable(torch.zeros(length, dtype=torch.int64), torch.zeros((), dtype=torch.int64))


def _compared(node: fx.Node, operands: list[Any], length: int) -> StepValue | None:
    """A comparison of two separable values, if the dtype that torch compares them in holds both.

    An `int64` without dimensions is compared with `int8` as an `int8`, and wraps around.
    """
    a, b = (separable(x, length) if x is not None else None for x in operands[:2])
    if a is None or b is None:
        return None
    compared: Any = [example(x) if isinstance(x, fx.Node) else x for x in node.args[:2]]
    common = torch.result_type(*compared)
    if not (_fits(a, common) and _fits(b, common)):
        return None
    return compare(COMPARISONS[node.target], a, b)


def _moved(node: fx.Node, record: ScanRecord) -> StepValue | None:
    source: Any = node.args[0]
    value = record.known.get(source)
    if any(n not in record.constant for n in _nodes_in(node.args[1:])):
        return None  # moved by an index that differs from step to step

    def movement(x: Tensor) -> Tensor:
        return _call(node, {**record.constant, source: x.expand(example(source).shape)})

    if isinstance(value, StepMask):
        return value.map(movement)
    if isinstance(value, Separable):
        return Separable(value.steps, movement(value.rows))
    if isinstance(value, Choice):
        return Choice(value.mask.map(movement), movement(value.if_true), movement(value.if_false))
    if isinstance(value, Table) and value.shape.numel() == 1:
        if (mask := step_mask(value, record.length)) is not None:
            return mask.map(movement)
        if (numbers := separable(value, record.length)) is not None:
            return Separable(numbers.steps, movement(numbers.rows))
    return None


def _nodes_in(arguments: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return found


def _fits(value: Separable, dtype: torch.dtype) -> bool:
    """Whether integers of a dtype hold the value at every step."""
    if dtype not in INTEGERS:
        return False
    low, high = value.range()
    return torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max


def _exact(value: Separable | None, node: fx.Node) -> Separable | None:
    """The value in the shape of its node, unless the integers of the node are too narrow for it."""
    if value is None or not _fits(value, example(node).dtype) or not value.is_moderate():
        return None
    return Separable(value.steps, value.rows.expand(example(node).shape))


def _scaled(a: StepValue | Tensor | None, b: StepValue | Tensor | None, length: int) -> Separable | None:
    """A separable value times one constant integer."""
    if isinstance(a, Tensor):
        a, b = b, a
    if not isinstance(a, Separable) or not isinstance(b, Tensor) or b.numel() != 1:
        return None
    factor = separable(b, length)
    if factor is None:
        return None
    number = int(b)
    low, high = a.range()
    scaled = Separable(a.steps * number, a.rows * number)
    return scaled if max(abs(low), abs(high), a.magnitude()) * abs(number) <= MODERATE else None


def _choice(node: fx.Node, mask: Any, if_true: Any, if_false: Any, length: int) -> Choice | StepMask | None:
    if not isinstance(if_true, Tensor) or not isinstance(if_false, Tensor) or mask is None:
        return None
    known, dtype = step_mask(mask, length), example(node).dtype
    return None if known is None else _as_mask_if_boolean(Choice(known, if_true.to(dtype), if_false.to(dtype)))


def _on_both_sides(node: fx.Node, record: ScanRecord) -> Choice | StepMask | None:
    """A pointwise operator on one choice and constants: the operator on each of its sides."""
    choices = [n for n in node.all_input_nodes if n in record.known]
    value = record.known[choices[0]]
    if len(choices) != 1 or not isinstance(value, Choice):
        return None
    # With the rank of the whole: a tensor without dimensions would weigh less in the common dtype.
    rank = example(choices[0]).dim()
    sides = [x.reshape([1] * (rank - x.dim()) + list(x.shape)) for x in (value.if_true, value.if_false)]
    sides = [_call(node, {**record.constant, choices[0]: side}) for side in sides]
    if any(side.dtype != example(node).dtype for side in sides):
        return None
    mask = value.mask.map(lambda x: x.reshape([1] * (rank - x.dim()) + list(x.shape)))
    return _as_mask_if_boolean(Choice(mask, *sides))


def _as_mask_if_boolean(value: Choice) -> Choice | StepMask:
    return value.where(lambda x: x) if value.if_true.dtype == torch.bool else value


def _simulate_carries(site: ScanSite, record: ScanRecord, init: list[Tensor | None]) -> None:
    """Carries that are known at every step, such as a counter: run their part of the body, and only that.

    A carry belongs to them if its first value is known and its update needs nothing but known values; the largest
    such set is found by striking out carries until nothing changes.
    """
    carries, _, _ = site.placeholders()
    updates, _ = site.outputs()
    candidates = {
        i
        for i, value in enumerate(init)
        if value is not None and updates[i] is not carries[i] and value.nbytes * record.length <= _SIMULATED_BYTES
    }
    while True:
        roots = {carries[i] for i in candidates} | record.known.keys() | record.constant.keys()
        computable = _computable(site.body, roots)
        failing = {i for i in candidates if updates[i] not in computable}
        if not failing:
            break
        candidates -= failing
    if not candidates:
        return
    feeding = ancestors([updates[i] for i in candidates])
    # Graph order is a valid evaluation order.
    needed = [n for n in site.body.graph.nodes if n in feeding and n.op == "call_function" and n not in roots]
    state: dict[fx.Node, Any] = {carries[i]: init[i] for i in candidates}
    history: dict[fx.Node, list[Any]] = {carries[i]: [] for i in candidates}
    inputs = {n: value.table() for n, value in record.known.items()}  # the xs, so far
    try:
        for t in range(record.length):
            env = dict(record.constant) | state | {n: rows[t] for n, rows in inputs.items()}
            for i in candidates:
                history[carries[i]].append(env[carries[i]])
            for node in needed:
                env[node] = _call(node, env)
            state = {carries[i]: env[updates[i]] for i in candidates}
    except Exception as error:  # as in _evaluate
        log.debug("carries of %s are not evaluated: %s", record.name, error)
        return
    for i in candidates:
        record.known[carries[i]] = two_sided(Table(torch.stack(history[carries[i]])))


def _computable(body: fx.GraphModule, roots: set[fx.Node]) -> set[fx.Node]:
    """The nodes that need nothing but `roots`."""
    found = set(roots)
    for node in body.graph.nodes:
        if is_function(node) and all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found
