"""Values the compiler knows before the program runs: what depends on the step index and on constants alone.

A *constant* node has one value for every step; a *known* node has one for each step. Masks, slots and predicates of a
cache are of this kind, so the passes need not guess at them: they evaluate them. Steps times elements would be too
many for the masks of a long sequence, so these are kept in the forms of `step_values`, and as a table only where no
form fits and the table is small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import unset_fake_temporarily

from nsa_compile.passes.scans import ScanRecord, ScanSite, aten, constant_value, example, on_cpu
from nsa_compile.passes.step_values import Choice, Separable, StepMask, StepValue, Table, compare, separable, step_mask

# Elements that a known value may hold over all steps as a table.
LIMIT = 2**26


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
        _simulate_carries(site, record, [constant_value(source, cache) for source in site.init])
        for node in site.body.graph.nodes:
            _evaluate(node, record)


def evaluate_constants(step: fx.GraphModule, record: ScanRecord) -> None:
    """Fill `record.constant` for the nodes of a lowered graph that is one step by itself."""
    with unset_fake_temporarily(), torch.no_grad():
        for node in step.graph.nodes:
            _evaluate(node, record)


def _evaluate(node: fx.Node, record: ScanRecord) -> None:
    if node.op == "get_attr" and isinstance(value := getattr(node.graph.owning_module, node.target, None), Tensor):
        record.constant[node] = value.cpu()
        return
    if node.op != "call_function" or node in record.known or node in record.constant:
        return
    if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
        return
    operands = node.all_input_nodes
    if node.target in _LIKE:
        filled = _LIKE[node.target]
        number = node.args[filled] if isinstance(filled, int) else filled
        if not isinstance(number, fx.Node):
            record.constant[node] = torch.full((), number, dtype=example(node).dtype).expand(example(node).shape)
        return
    if all(n in record.constant for n in operands):
        record.constant[node] = _call(node, record.constant)
        return
    if not all(n in record.constant or n in record.known for n in operands):
        return
    elements = example(node).numel()
    value = None if elements == 1 else _in_closed_form(node, record)
    if value is None and (elements * record.length <= LIMIT and _tables_fit(operands, record)):
        value = Table(_call_each_step(node, record))
    if value is not None:
        record.known[node] = value


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
    return node.target(*args, **on_cpu(kwargs))


def _call_each_step(node: fx.Node, record: ScanRecord) -> Tensor:
    names = [n for n in node.all_input_nodes if n in record.known]

    def one_step(*values: Tensor) -> Tensor:
        return _call(node, {**record.constant, **dict(zip(names, values, strict=True))})

    rows = [record.known[n].table() for n in names]
    try:
        return torch.vmap(one_step)(*rows)
    except RuntimeError:  # no batching rule: the loop is slower and says the same
        return torch.stack([one_step(*(row[t] for row in rows)) for t in range(record.length)])


# -- evaluation in closed form


COMPARISONS = {
    getattr(getattr(aten, op), overload): op
    for op in ("lt", "le", "gt", "ge", "eq", "ne")
    for overload in ("Tensor", "Scalar")
}
_AND = {aten.bitwise_and.Tensor, aten.logical_and.default}
_OR = {aten.bitwise_or.Tensor, aten.logical_or.default}
_NOT = {aten.bitwise_not.default, aten.logical_not.default}
_ADD = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
_MUL = {aten.mul.Tensor, aten.mul.Scalar}
_WHERE = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar}
_MASKED_FILL = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
# Operators that only move elements of their first argument, and casts that keep their values.
_MOVEMENT = {
    aten.view.default, aten.reshape.default, aten.permute.default, aten.transpose.int, aten.t.default,
    aten.expand.default, aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.slice.Tensor, aten.select.int, aten.unfold.default, aten.repeat.default, aten.flip.default,
    aten.roll.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.index_select.default,
    aten.index.Tensor, aten.gather.default,
}  # fmt: skip


def _in_closed_form(node: fx.Node, record: ScanRecord) -> StepValue | None:
    """The value of a node at every step in one of the forms of `step_values`, or None."""
    target, length = node.target, record.length
    assert isinstance(target, OpOverload)
    operands = [_operand(x, record) for x in node.args]
    if target in _MOVEMENT:
        return _moved(node, record)
    if target in COMPARISONS:
        a, b = (separable(x, length) if x is not None else None for x in operands[:2])
        if a is not None and b is not None:
            return compare(COMPARISONS[target], a, b)
    if target in _ADD and node.kwargs.get("alpha", 1) == 1:
        a, b = (separable(x, length) if x is not None else None for x in operands[:2])
        if a is None or b is None:
            return None
        sign = _ADD[target]
        return _exact(Separable(a.steps + sign * b.steps, a.rows + sign * b.rows), node)
    if target in _MUL and (product := _scaled(operands[0], operands[1])) is not None:
        return _exact(product, node)
    if example(node).dtype == torch.bool and target in _AND | _OR | _NOT:
        masks = [step_mask(x, length) if x is not None else None for x in operands]
        if any(m is None for m in masks):
            return None
        return ~masks[0] if target in _NOT else masks[0] & masks[1] if target in _AND else masks[0] | masks[1]
    if target in _WHERE:
        return _choice(node, operands[0], operands[1], operands[2], length)
    if target in _MASKED_FILL:
        return _choice(node, operands[1], operands[2], operands[0], length)
    if target is aten._to_copy.default and isinstance(operands[0], Separable):
        return _exact(operands[0], node)
    if target is aten._to_copy.default and isinstance(operands[0], StepMask):
        return _choice(node, operands[0], torch.tensor(True), torch.tensor(False), length)
    if target is aten._to_copy.default or torch.Tag.pointwise in target.tags:
        return _on_both_sides(node, record)
    return None


def _operand(value: Any, record: ScanRecord) -> StepValue | Tensor | None:
    if isinstance(value, fx.Node):
        return record.known.get(value, record.constant.get(value))
    return torch.tensor(value) if isinstance(value, bool | int | float) else None


def _moved(node: fx.Node, record: ScanRecord) -> StepValue | None:
    source = node.all_input_nodes[0]
    value = record.known.get(source)
    if any(n in record.known for n in node.all_input_nodes if n is not source):
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


def _exact(value: Separable, node: fx.Node) -> Separable | None:
    """The value, unless the integers of the node are too narrow for it."""
    info = torch.iinfo(example(node).dtype) if not example(node).dtype.is_floating_point else None
    if info is None or value.rows.numel() == 0:
        return None
    low = int(value.steps.min()) + int(value.rows.min())
    high = int(value.steps.max()) + int(value.rows.max())
    return value if info.min <= low and high <= info.max else None


def _scaled(a: StepValue | Tensor | None, b: StepValue | Tensor | None) -> Separable | None:
    """A separable value times one constant integer."""
    if isinstance(a, Tensor):
        a, b = b, a
    if not isinstance(a, Separable) or not isinstance(b, Tensor) or b.numel() != 1 or b.dtype.is_floating_point:
        return None
    return Separable(a.steps * int(b), a.rows * int(b))


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
    sides = [_call(node, {**record.constant, choices[0]: side}) for side in (value.if_true, value.if_false)]
    return _as_mask_if_boolean(Choice(value.mask, *sides))


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
        if value is not None and updates[i] is not carries[i] and value.numel() * record.length <= 2**16
    }
    while True:
        roots = {carries[i] for i in candidates} | record.known.keys() | record.constant.keys()
        failing = {i for i in candidates if not _depends_only_on(updates[i], roots)}
        if not failing:
            break
        candidates -= failing
    if not candidates:
        return
    needed: list[fx.Node] = []
    for node in site.body.graph.nodes:  # graph order is a valid evaluation order
        if node.op == "call_function" and any(_reaches(node, updates[i]) for i in candidates):
            needed.append(node)
    state = {carries[i]: init[i] for i in candidates}
    history: dict[fx.Node, list[Any]] = {carries[i]: [] for i in candidates}
    inputs = {n: value.table() for n, value in record.known.items()}  # the xs, so far
    for t in range(record.length):
        env = dict(record.constant) | state | {n: rows[t] for n, rows in inputs.items()}
        for i in candidates:
            history[carries[i]].append(env[carries[i]])
        for node in needed:
            env[node] = _call(node, env)
        state = {carries[i]: env[updates[i]] for i in candidates}
    for i in candidates:
        record.known[carries[i]] = Table(torch.stack(history[carries[i]]))


def _depends_only_on(node: fx.Node, roots: set[fx.Node]) -> bool:
    if node in roots:
        return True
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    return all(_depends_only_on(n, roots) for n in node.all_input_nodes)


def _reaches(node: fx.Node, target: fx.Node) -> bool:
    return node is target or any(_reaches(user, target) for user in node.users if user.op != "output")
