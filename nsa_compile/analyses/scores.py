"""Scores as a program: what a softmax reads, taken apart into products of queries and keys and what is made of them.

Each score is followed up from the softmax, element by element: operators on single elements become instructions,
movement is run on element numbers, and what cannot be followed, or need not be, becomes a leaf. Scores that were put
side by side fall into several sets of keys.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from nsa_compile.analyses.distances import elements_by_distance, numbers_spread, traced_back
from nsa_compile.analyses.magnitudes import floor_level
from nsa_compile.analyses.masks import (
    MOVES,
    Condition,
    Mask,
    Unrecognised,
    conjunction,
    constant,
    is_float_cast,
    keeps_one,
    moved,
    same_mask,
    side_of_where,
)
from nsa_compile.analyses.softmax import NONE_KEPT, TRACE_LIMIT, Product, check_plain, weights_below
from nsa_compile.ir.aten import COPIED, DIV, FILLED, JUMPS, MATMUL, MUL, arguments, aten, operand
from nsa_compile.ir.attention import SCORED
from nsa_compile.ir.carries import Invariant, Rows
from nsa_compile.ir.rewriting import NodeBuilder, constant_node
from nsa_compile.ir.scans import ScanRecord, Step, ancestors, example
from nsa_compile.ir.step_values import Choice, StepValue, Table
from nsa_compile.ops.scored.program import OPERATORS, SPELLED, Instruction, Program, derivative, spelled_out

# In the meta of a node of scored_attention, weighted_sum or scored_places: the `Mask` that is known of it.
MASK = "nsa_known_mask"
# Instructions of a program; more are no scores of attention.
LENGTH_LIMIT = 200
# Operators that put a number in the place of an element, or beside it.
STORED = frozenset({"masked_fill", "where", "clamp", "clamp_min", "clamp_max"})


@dataclass(frozen=True)
class Leaf:
    """A node that scores read, and which of its elements: `[N|1, 1, m|1, T|1]`; or of which table, by distance."""

    node: fx.Node
    elements: Tensor
    by_distance: tuple[fx.Node, Tensor] | None = None

    def build(self, build: NodeBuilder) -> fx.Node:
        """These elements, as integers of 64 bits where they are integers."""
        node, shape = self.node, list(self.elements.shape)
        value = example(node)
        if value.dtype not in (torch.bool, torch.int64) and not value.dtype.is_floating_point:
            node = build(aten._to_copy.default, node, dtype=torch.int64)
        flat = build(aten.reshape.default, node, [value.numel()])
        times = _repeated(self.elements)
        different = self.elements[..., ::times]
        if not torch.equal(different.flatten(), torch.arange(value.numel())):
            flat = build(aten.index_select.default, flat, 0, constant_node(build, different.flatten(), value.device))
        if times > 1:  # to repeat what is there is faster than to look up each element
            flat = build(aten.reshape.default, flat, [*different.shape, 1])
            flat = build(aten.expand.default, flat, [*different.shape, times])
        return build(aten.reshape.default, flat, shape)


def _repeated(elements: Tensor) -> int:
    """How many times each element stands along the last dimension, one after the other: of a block, all its keys."""
    changes = (elements[..., 1:] != elements[..., :-1]).flatten(0, -2).any(0).nonzero()
    times = int(changes[0]) + 1 if len(changes) else 1
    if elements.shape[-1] % times:
        return 1
    return times if torch.equal(elements, elements[..., ::times].repeat_interleave(times, -1)) else 1


@dataclass(frozen=True)
class Side:
    """A product of queries and keys in the order of the scores: `rows[r]` of its rows, by its keys `sequence[n]`."""

    product: Product
    rows: Tensor  # [N * m], of n2 * m2
    sequence: Tensor  # [N], of n2

    def build(self, build: NodeBuilder, shape: tuple[int, int]) -> tuple[fx.Node, fx.Node]:
        """Queries `[N, 1, m, D]` and keys `[N, T, D]`."""
        q, k = self.product.operands(build)  # [n2, m2, D], [n2, D, T]
        n, m, _ = self.product.shape
        width = example(q).shape[2]
        q = build(aten.reshape.default, q, [n * m, width])
        k = build(aten.transpose.int, k, 1, 2)
        q, k = (_chosen(build, x, rows) for x, rows in ((q, self.rows), (k, self.sequence)))
        return build(aten.reshape.default, q, [shape[0], 1, shape[1], width]), k


def _chosen(build: NodeBuilder, x: fx.Node, rows: Tensor) -> fx.Node:
    if torch.equal(rows, torch.arange(example(x).shape[0])):
        return x
    return build(aten.index_select.default, x, 0, constant_node(build, rows, example(x).device))


@dataclass
class KeySet:
    """Scores of some columns of a softmax: those of `T` keys.

    A set without products is one of logits, which only take their share of the weights, unless these meet values.
    """

    columns: range
    shape: tuple[int, int, int]  # [N, m, T]
    products: list[Side]
    leaves: list[Leaf]
    program: Program
    mask: Mask  # what is known of the scores that are set to -inf
    filled: Mask  # the same of those that are set to -inf or to the lowest number

    def by_distance(self, record: ScanRecord) -> KeySet:
        """The same, whose leaves know of which table they are read by distance."""
        leaves = [replace(x, by_distance=elements_by_distance(x.node, x.elements, record)) for x in self.leaves]
        return replace(self, leaves=leaves)


@dataclass
class Follower:
    """Collects products, leaves and instructions on the way up."""

    record: ScanRecord
    changing: Changing
    rows: int  # N * m
    products: list[tuple[Product, Tensor]] = field(default_factory=list)  # with the elements that scores read
    leaves: list[tuple[fx.Node, Tensor]] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    names: dict[tuple[fx.Node, bytes], Any] = field(default_factory=dict)
    reads: dict[Any, frozenset[str]] = field(default_factory=dict)  # of an instruction: the products and leaves
    whole: bool = False  # take the scores for a leaf, as they are: those of no product
    shared: bool = False  # take a product for a leaf, if its keys are others at each step
    precise: bool = False  # whether the softmax is one of numbers of 64 bits
    wide: bool = False  # whether some numbers are

    def follow(self, node: Any, elements: Tensor) -> Any:
        """The name or number of what scores `[R, T]` read of a node: its elements `[R, T]`.

        Raises:
            Unrecognised: it is made in a way that no program has.
        """
        if not isinstance(node, fx.Node):
            return node
        node, elements = traced_back(node, elements, self.record)
        key = (node, elements.numpy().tobytes())
        if key not in self.names:
            self.names[key] = self._follow(node, elements)
        return self.names[key]

    def _follow(self, node: fx.Node, elements: Tensor) -> Any:
        if (number := constant(node, self.record)) is not None and example(node).dtype.is_floating_point:
            return number
        if node.target in (aten.cat.default, aten.constant_pad_nd.default):
            return self._of_parts(node, elements)
        same_for_all_keys = bool((elements == elements[:, :1]).all())
        if node.target in MATMUL and not same_for_all_keys and example(node).dtype.is_floating_point:
            return self._product(node, elements)
        if same_for_all_keys or node not in self.changing:
            return self._leaf(node, elements)
        name = _name(node)
        dtype = example(node).dtype
        if dtype.is_floating_point and dtype != torch.float64 and self.precise:
            return self._leaf(node, elements)  # numbers of fewer bits than the program's, rounded as they are
        quantized = name == "to" and dtype.is_floating_point and not is_float_cast(node)
        if self.whole or quantized:
            return self._leaf(node, elements)
        if node.target in SPELLED and dtype.is_floating_point:
            return self._spelled_out(node, elements)
        is_power_of_integers = name in ("pow.Tensor_Tensor", "pow.Scalar") and not dtype.is_floating_point
        kinds = dtype.is_floating_point or dtype in (torch.bool, torch.int64)
        if name in OPERATORS and kinds and not is_power_of_integers:
            products, leaves, instructions = len(self.products), len(self.leaves), len(self.instructions)
            names = dict(self.names)
            try:
                value = self._instruction(name, node, elements)
                if not self._jumps(name) or not self._meets_itself(value):
                    return value
            except OtherKeys:
                if dtype != torch.bool:  # a mask by the scores of blocks, say, is there as it is
                    raise
            del self.products[products:], self.leaves[leaves:], self.instructions[instructions:]
            self.names = names
        return self._leaf(node, elements)

    def _jumps(self, name: str) -> bool:
        """Whether a small change of what the latest instruction reads may be a large one of its result. Not of what is
        divided by something that is read as it is."""
        if name.partition(".")[0] != "div":
            return name.partition(".")[0] in JUMPS
        divisor = self.instructions[-1].operands[-1]
        return not (isinstance(divisor, str) and divisor[0] == "x")

    def _meets_itself(self, value: Any) -> bool:
        """Whether an instruction reads a product beside something that is made of its queries or keys.

        An operator computes products again, rounded in another way, so that a score may be less than itself.
        """
        read = self.reads.get(value, frozenset())
        products = [self.products[int(name[1:])][0].node for name in read if name[0] == "s"]
        leaves = [self.leaves[int(name[1:])][0] for name in read if name[0] == "x"]
        operands = {_origin(x) for product in products for x in product.all_input_nodes}
        return len(products) > 1 or (bool(products) and not operands.isdisjoint(ancestors(leaves)))

    def _of_parts(self, node: fx.Node, elements: Tensor) -> Any:
        """What scores read of tensors put side by side: of one of them alone, or the set has to be divided."""
        parts, owner, within = _parts(node)
        which = owner.flatten()[elements]
        first = int(which.flatten()[0])
        if bool((which == first).all()):
            part = parts[first]
            return self.follow(part, within.flatten()[elements]) if isinstance(part, fx.Node) else part
        by_column = which[0]
        if not bool((which == by_column).all()):
            raise Unrecognised("its scores are put together row by row", node)
        raise Divided([int(c) for c in (by_column[1:] != by_column[:-1]).nonzero().flatten() + 1])

    def _product(self, node: fx.Node, elements: Tensor) -> str:
        check_plain(node, self.record)
        for flipped in (False, True):
            product = Product(node, flipped)
            numbers = product.numbers().flatten()[elements]
            if bool((numbers % product.shape[2] == torch.arange(elements.shape[1])).all()):
                if product.shape[2] != elements.shape[1]:
                    break
                keys: Any = node.args[0 if flipped else 1]
                if self.shared and keys in self.changing:
                    return self._leaf(node, elements)
                self.products.append((product, numbers[:, 0] // product.shape[2]))
                return f"s{len(self.products) - 1}"
        raise OtherKeys("its scores do not run over the keys of its products", node)

    def _leaf(self, node: fx.Node, elements: Tensor) -> str:
        if example(node).dtype.is_complex:
            raise Unrecognised("its scores are made of complex numbers", node)
        self.leaves.append((node, elements))
        return f"x{len(self.leaves) - 1}"

    def _instruction(self, name: str, node: fx.Node, elements: Tensor) -> Any:
        dtype = example(node).dtype
        self.wide |= dtype == torch.float64
        if node.kwargs.get("alpha", 1) != 1 or set(node.kwargs) - {"alpha", "dtype", "device", "layout"}:
            raise Unrecognised(f"its scores are made with {node.target} and {sorted(node.kwargs)}", node)
        given = [self.follow(x, elements_read(x, node, elements)) for x in node.args]
        if name.partition(".")[0] in STORED:
            given = [rounded(x, dtype) for x in given]
        if name == "to":
            if is_float_cast(node):
                return given[0]
            given = [given[0], "bool" if dtype == torch.bool else "float" if dtype.is_floating_point else "int"]
        return self.add(name, given, node)

    def _spelled_out(self, node: fx.Node, elements: Tensor) -> Any:
        """What a function of one number is made of."""
        self.wide |= example(node).dtype == torch.float64
        program = spelled_out(node.target, node.args[1:], node.kwargs)
        names: dict[Any, Any] = {"x": self.follow(node.args[0], elements)}
        for i, instruction in enumerate(program.instructions):
            names[f"v{i}"] = self.add(instruction.operator, [names.get(x, x) for x in instruction.operands], node)
        return names[program.results[0]]

    def add(self, name: str, given: Sequence[Any], node: fx.Node) -> str:
        """The name of the result of one more instruction, which a node needs."""
        if len(self.instructions) >= LENGTH_LIMIT:
            raise Unrecognised(f"its scores are made in more than {LENGTH_LIMIT} steps", node)
        self.instructions.append(Instruction(name, tuple(given)))
        value = f"v{len(self.instructions) - 1}"
        read = [self.reads.get(x, frozenset([x])) for x in given if isinstance(x, str) and x[0] in "sxv"]
        self.reads[value] = frozenset[str]().union(*read)
        return value


class OtherKeys(Unrecognised):
    """Scores are made of a product with something else than the keys."""


class Divided(Exception):
    """Scores of several sets of keys side by side, and the columns at which each but the first begins."""

    def __init__(self, columns: list[int]) -> None:
        super().__init__(columns)
        self.columns = columns


def rounded(x: Any, dtype: torch.dtype) -> Any:
    """A number as a tensor holds it: -1e9 is -999292928 in bfloat16, and no floor beside those that a mask adds."""
    is_number = isinstance(x, int | float) and not isinstance(x, bool)
    return float(torch.tensor(x, dtype=dtype)) if is_number and dtype.is_floating_point else x


def _origin(node: fx.Node) -> fx.Node:
    """What a tensor was before it was moved and cast."""
    while node.target in MOVES or node.target in COPIED or is_float_cast(node):
        node = operand(node)
    return node


def elements_read(x: Any, node: fx.Node, elements: Tensor) -> Tensor:
    """Which elements of an operand are read for elements of a pointwise node."""
    if not isinstance(x, fx.Node):
        return elements
    return numbers_spread(x, example(node).shape).flatten()[elements]


def _name(node: fx.Node) -> str:
    """The operator of a node, as programs name it."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or node.target in FILLED:
        return ""
    target: Any = node.target
    name = f"{schema.name.removeprefix('aten::')}.{target._overloadname}"
    others = {"_to_copy.default": "to", "masked_fill.Tensor": "masked_fill.Scalar"}
    return others.get(name, name)


def _by_constants(node: fx.Node, record: ScanRecord) -> bool:
    return all(n is node.args[0] or n in record.constant for n in node.all_input_nodes)


def _parts(node: fx.Node) -> tuple[list[Any], Tensor, Tensor]:
    """Of a cat or a padding: the operands, and for each element the operand it comes from and its number there."""

    def numbers(x: fx.Node) -> Tensor:
        return torch.arange(example(x).numel()).reshape(example(x).shape)

    if node.target is aten.constant_pad_nd.default:
        given = arguments(node)
        owner = aten.constant_pad_nd.default(torch.zeros_like(numbers(given.self)), given.pad, 1)
        value = rounded(float(given.value), example(node).dtype)
        return [given.self, value], owner, aten.constant_pad_nd.default(numbers(given.self), given.pad, 0)
    tensors: Any = operand(node)
    dim = arguments(node).dim
    owner = torch.cat([torch.full_like(numbers(x), i) for i, x in enumerate(tensors)], dim)
    return list(tensors), owner, torch.cat([numbers(x) for x in tensors], dim)


class Changing:
    """Whether a node may differ from step to step, as the batched body has it."""

    def __init__(self, body: fx.GraphModule, record: ScanRecord, xs: int) -> None:
        self.record = record
        placeholders = body.graph.find_nodes(op="placeholder")
        count = len(record.carries)
        same = {
            p
            for p, kind in zip(placeholders, record.carries, strict=False)
            if isinstance(kind, Invariant) or f"{p.name}.before" in record.guards_dropped
        }
        for p, update, kind in zip(placeholders, _updates(body, count), record.carries, strict=False):
            if isinstance(kind, Rows) and kind.write_once and p.name in record.guards_dropped:
                same.add(update)
        self.found: dict[fx.Node, bool] = dict.fromkeys(same, False)
        self.inputs = {p: i for i, p in enumerate(placeholders)}
        self.varying = count + xs

    def __contains__(self, node: fx.Node) -> bool:
        todo = [node]
        while todo:
            n = todo[-1]
            missing = [] if n in self.found else [x for x in n.all_input_nodes if x not in self.found]
            if missing and n not in self.record.constant:
                todo += missing
                continue
            todo.pop()
            if n not in self.found:
                self.found[n] = self._changes(n)
        return self.found[node]

    def _changes(self, node: fx.Node) -> bool:
        if node in self.record.constant or node.op == "get_attr":
            return False
        if node in self.inputs:
            return self.inputs[node] < self.varying
        return any(self.found[x] for x in node.all_input_nodes)


def _updates(body: fx.GraphModule, count: int) -> list[fx.Node]:
    outputs: Any = body.graph.output_node().args[0]
    return [operand(u) if u.target is aten.clone.default else u for u in outputs[:count]]


def key_sets(step: Step, softmax: fx.Node, xs: int, *, floors_vanish: bool) -> list[KeySet]:
    """The sets of keys over which a softmax runs, in the order of its columns.

    Args:
        xs: how many tensors a step gets one row of.
        floors_vanish: whether weights are zero wherever scores are set to the lowest number.

    Raises:
        Unrecognised: there is no product of queries and keys, or its scores are none that a program has.
    """
    value = operand(softmax)
    shape, dim = example(value).shape, arguments(softmax).dim
    floor = torch.finfo(example(value).dtype).min if floors_vanish else -math.inf
    if not shape or shape.numel() > TRACE_LIMIT or not shape.numel():
        raise Unrecognised(f"a step has no scores, or more than {TRACE_LIMIT}", softmax)
    if example(softmax).dtype == torch.float64 and example(value).dtype != torch.float64:
        raise Unrecognised("its softmax is more precise than float32, its scores are not", softmax)
    elements = torch.arange(shape.numel()).reshape(shape).movedim(dim, -1).reshape(-1, shape[dim])
    record = step.record
    changing = Changing(step.body, record, xs)
    todo = [range(elements.shape[1])]
    found: list[KeySet] = []
    while todo:
        columns = todo.pop(0)
        part = elements[:, columns.start : columns.stop].contiguous()
        try:
            for shared, whole in ((True, False), (False, False), (False, True)):
                precise = example(value).dtype == torch.float64
                follower = Follower(record, changing, elements.shape[0], whole=whole, precise=precise, shared=shared)
                score = follower.follow(value, part)
                if follower.products or (not shared and not follower.instructions):
                    break
        except Divided as divided:
            ends = itertools.pairwise([0, *divided.columns, len(columns)])
            todo = [columns[a:b] for a, b in ends] + todo
            continue
        if follower.wide and any(example(p.node).dtype != torch.float64 for p, _ in follower.products):
            raise Unrecognised("its scores are more precise than its products", softmax)
        masks = [known_mask(value, part, record, level) for level in (floor, floor_level(example(value).dtype))]
        found.append(key_set(follower, score, columns, *masks))
        if why := not_differentiable(found[-1]):
            raise Unrecognised(why, value)
    if not any(keys.products for keys in found):
        raise Unrecognised("its scores come from no product of queries and keys", softmax)
    return found


def key_set(follower: Follower, score: Any, columns: range, mask: Mask, filled: Mask) -> KeySet:
    rows, keys = follower.rows, len(columns)
    # As many sequences as the product with the most of them has: the others' keys are repeated.
    n = max((product.shape[0] for product, _ in follower.products), default=rows)
    m = rows // n
    sides = [_side(product, which, n, m) for product, which in follower.products]
    leaves = [Leaf(node, _reduced(read.reshape(n, 1, m, keys))) for node, read in follower.leaves]
    program = Program(tuple(follower.instructions), (score,))
    return KeySet(columns, (n, m, keys), sides, leaves, program, mask, filled)


def made_of(keys: KeySet, result: fx.Node) -> set[fx.Node]:
    """The products of a set, and what is made of them on the way to a result, this included."""
    inside = {side.product.node for side in keys.products}
    between = ancestors([result]) | {result}
    for node in result.graph.nodes:
        if node in between and not inside.isdisjoint(node.all_input_nodes):
            inside.add(node)
    return inside


def not_differentiable(keys: KeySet) -> str:
    """Why the program of a set cannot be differentiated by all that it reads; empty where it can."""
    kinds = {f"x{i}": example(leaf.node).dtype for i, leaf in enumerate(keys.leaves)}
    floating = [f"s{i}" for i in range(len(keys.products))] + [x for x, kind in kinds.items() if kind.is_floating_point]
    booleans = [x for x, kind in kinds.items() if kind == torch.bool]
    integers = [x for x in kinds if x not in floating and x not in booleans]
    try:
        derivative(str(keys.program), tuple(floating), tuple(integers), tuple(booleans))
    except ValueError as error:
        return f"of the derivatives of its scores, {error}"
    return ""


def _side(product: Product, rows: Tensor, n: int, m: int) -> Side:
    sequence = (rows // product.shape[1]).reshape(n, m)
    if not bool((sequence == sequence[:, :1]).all()):
        raise Unrecognised("its queries meet keys of several sequences", product.node)
    return Side(product, rows, sequence[:, 0])


def _reduced(elements: Tensor) -> Tensor:
    """Without the dimensions along which all elements are the same."""
    for dim in range(elements.dim()):
        first = elements.narrow(dim, 0, 1)
        if bool((elements == first).all()):
            elements = first
    return elements


def known_mask(value: fx.Node, elements: Tensor, record: ScanRecord, floor: float) -> Mask:
    """What is known of the conditions under which scores are not set to a floor, as far up as nothing but movement and
    other masks comes between them and the softmax."""
    conditions: list[Condition] = []
    keys = elements.shape[1]
    node: Any = value
    while isinstance(node, fx.Node):
        if node.target in MOVES and _by_constants(node, record):
            source = operand(node)
            numbers = torch.arange(example(source).numel()).reshape(example(source).shape)
            elements = moved(node, numbers, record).flatten()[elements]
            node = source
        elif is_float_cast(node):
            node = operand(node)
        elif (scaled := _scaled(node, record)) is not None:
            elements, node, floor = (
                elements_read(scaled, node, elements),
                scaled,
                -math.inf,
            )  # other numbers become others
        elif node.target is aten.cat.default or node.target is aten.constant_pad_nd.default:
            parts, owner, within = _parts(node)
            node, elements = parts[int(owner.flatten()[elements[0, 0]])], within.flatten()[elements]
        elif (side := side_of_where(node, record)) is not None and side.constant <= floor:
            numbers = torch.full((example(node).numel(),), -1)
            numbers[elements.flatten()] = torch.arange(elements.numel())
            if int((numbers >= 0).sum()) != elements.numel():
                break  # scores are repeated
            numbers = numbers.reshape(example(node).shape)
            conditions.append(Condition(side.condition, side.constant_if_true, numbers, keys))
            elements, node = elements_read(side.value, node, elements), side.value
        elif (added := _added_mask(node, record, floor)) is not None:
            mask, scores = added
            numbers = torch.full((example(node).numel(),), -1)
            numbers[elements.flatten()] = torch.arange(elements.numel())
            if bool((numbers >= 0).all()) and numbers.numel() == elements.numel():
                conditions.append(Condition(mask, False, numbers.reshape(example(node).shape), keys, additive=True))
            elements, node = elements_read(scores, node, elements), scores
        else:
            break
    return conjunction(conditions, record)


def _scaled(node: fx.Node, record: ScanRecord) -> fx.Node | None:
    """What a node multiplies with, or divides by, a positive number."""
    if node.target not in MUL | DIV or len(node.args) > 2 or node.kwargs:
        return None
    for value, factor in (node.args[:2], node.args[1::-1] if node.target in MUL else (None, None)):
        number = None if isinstance(factor, fx.Node) and factor is value else constant(factor, record)
        if isinstance(value, fx.Node) and number is not None and 0 < number < math.inf:
            return value
    return None


def _added_mask(node: fx.Node, record: ScanRecord, floor: float) -> tuple[fx.Node, fx.Node] | None:
    """The mask of zeros and floors, known at every step, and the scores of a sum of the two."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return None
    for mask, scores in (node.args[:2], node.args[1::-1]):
        value = record.known.get(mask, record.constant.get(mask)) if isinstance(mask, fx.Node) else None
        if value is None or not isinstance(scores, fx.Node) or not example(node).dtype.is_floating_point:
            continue
        ends = value if isinstance(value, Tensor) else value.table() if isinstance(value, Table) else _sides(value)
        if ends is not None and ends.is_floating_point() and bool(((ends == 0) | (ends <= floor)).all()):
            return cast(fx.Node, mask), scores
    return None


def _sides(value: StepValue) -> Tensor | None:
    return torch.cat([value.if_true.flatten(), value.if_false.flatten()]) if isinstance(value, Choice) else None


def used_tiles(mask: Mask, steps: int, keys: int, size: int) -> Tensor:
    """uint8 `[ceil(steps / size), ceil(keys / size)]`: 0 for the tiles of which a known mask keeps nothing."""
    shape = -(-steps // size), -(-keys // size)
    if mask.known is None:
        return torch.ones(shape, dtype=torch.uint8)
    known = mask.known
    start, stop, outside = (x.reshape(-1, keys) for x in (known.start, known.stop, known.outside))
    first = torch.arange(shape[0])[:, None, None] * size
    last = (first + size).clamp(max=steps)
    inside = (start < last) & (stop > first)
    beyond = (start > first) | (stop < last)
    kept = torch.where(outside, beyond, inside).any(1)  # [tiles, T]
    padded = torch.nn.functional.pad(kept, (0, shape[1] * size - keys))
    return padded.unflatten(1, (shape[1], size)).any(-1).to(torch.uint8)


@dataclass(frozen=True)
class Read:
    """The product of the weights of one set of keys with values."""

    keys: int  # which set
    product: Product
    without_nan: bool
    masked: bool  # whether weights are zero where scores are set to -inf or the lowest number
    nan_from: tuple[int, ...] = ()  # what a query gets that keeps no key, see `AttentionCall`


def weighted_values(
    softmax: fx.Node, sets: list[KeySet], record: ScanRecord, *, never_nan: bool, may_be_removed: bool
) -> list[Read]:
    """The products of the weights of a softmax with values, each of the weights of one set of keys.

    Args:
        never_nan: whether the weights are no NaN, whatever is kept.
        may_be_removed: whether scores that masks keep may be -inf, as something given is added to them.

    Raises:
        Unrecognised: there is none.
    """
    total = sum(len(keys.columns) for keys in sets)
    found = []
    why = "its weights are not multiplied with values, as they come from the softmax"
    for weights in weights_below(softmax, record):
        masked = list(weights.masked)
        if masked and may_be_removed:
            why = "its weights are masked once more, and scores that are kept may be -inf"
            continue
        if masked and not _masked_alike(masked, never_nan or weights.without_nan, sets, record):
            continue
        for user in weights.node.users:
            if user.target not in MATMUL or user.args.count(weights.node) != 1:
                continue
            if any((user, place) in record.hidden for place in (0, 1)):
                why = NONE_KEPT
                continue
            product = Product(user, flipped=user.args[1] is weights.node)
            n, m, _ = product.shape
            for i, keys in enumerate(sets):
                if n * m * total != example(softmax).numel():
                    continue
                expected = torch.arange(n * m * total).reshape(n, m, total)[
                    :, :, keys.columns.start : keys.columns.stop
                ]
                expected = expected.transpose(1, 2) if product.flipped else expected
                if torch.equal(weights.numbers.flatten(), expected.flatten()):
                    found.append(Read(i, product, weights.without_nan, bool(masked)))
    if not found:
        raise Unrecognised(why, softmax)
    return found


def _masked_alike(masked: list[Condition], no_nan: bool, sets: list[KeySet], record: ScanRecord) -> bool:
    """Whether weights are zero just where the scores of the only set are removed, also where all are."""
    if len(sets) > 1 or not same_mask(conjunction(masked, record), sets[0].filled, record):
        return False
    return no_nan or (not sets[0].filled.data and keeps_one(sets[0].filled.known, record))


def regrouped(keys: KeySet, n: int) -> KeySet:
    """The same scores as those of `n` sequences, which are more.

    Raises:
        Unrecognised: that cannot be.
    """
    old, m, count = keys.shape
    if n == old:
        return keys
    if n % old or (old * m) % n:
        raise Unrecognised(
            "its weights meet values of other sequences than its scores met keys of", keys.products[0].product.node
        )
    shape = (n, old * m // n, count)
    sides = [Side(s.product, s.rows, s.sequence.repeat_interleave(n // old)) for s in keys.products]
    leaves = []
    for leaf in keys.leaves:
        full = leaf.elements.expand(old, 1, m, leaf.elements.shape[3]).reshape(n, 1, shape[1], -1)
        leaves.append(Leaf(leaf.node, _reduced(full)))
    return KeySet(keys.columns, shape, sides, leaves, keys.program, keys.mask, keys.filled)


def values_of(read: Read, n: int, build: NodeBuilder) -> fx.Node:
    """The values `[N, T, Dv]` that weights of `n` sequences meet."""
    _, v = read.product.operands(build)
    given = example(v).shape[0]
    return _chosen(build, v, torch.arange(given).repeat_interleave(n // given))


@dataclass(frozen=True)
class Mass:
    """How much a set of keys weighs in a softmax over several: `[R]` each.

    Among scores as low as masks make them, a log-sum-exp does not tell how many there are: with 10^9 beside it, the
    logarithm of a sum is lost. So the largest score and the sum are apart.
    """

    lse: fx.Node  # passes gradients on
    largest: fx.Node
    total: fx.Node  # of exp of the scores less the largest


def build_shares(masses: list[Mass], build: NodeBuilder) -> fx.Node:
    """The part of the weights that each of several sets gets, `[sets, R]`; zeros where all scores are -inf."""
    largest = build(aten.stack.default, [mass.largest for mass in masses])
    most = build(aten.amax.default, largest, [0])
    logits = []
    for mass in masses:
        none = build(aten.eq.Scalar, mass.largest, -math.inf)
        value = build(aten.add.Tensor, build(aten.sub.Tensor, mass.largest, most), build(aten.log.default, mass.total))
        # Zero, with the gradient of the log-sum-exp.
        zero = build(aten.sub.Tensor, mass.lse, build(aten.detach.default, mass.lse))
        logits.append(build(aten.where.ScalarSelf, none, -math.inf, build(aten.add.Tensor, value, zero)))
    return build(aten._safe_softmax.default, build(aten.stack.default, logits), 0)


def build_operands(
    keys: KeySet, record: ScanRecord, build: NodeBuilder
) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """Queries, keys and leaves of a call of an operator that computes a program, at one step."""
    sides = [side.build(build, keys.shape[:2]) for side in keys.products]
    leaves = [leaf.build(build) for leaf in keys.leaves]
    for leaf, built in zip(keys.leaves, leaves, strict=True):
        if leaf.by_distance is not None:
            record.by_distance[built] = leaf.by_distance
    return [q for q, _ in sides], [k for _, k in sides], leaves


def build_call(operator: Any, keys: KeySet, values: fx.Node, record: ScanRecord, build: NodeBuilder) -> fx.Node:
    """A call of an operator that reads values, at one step."""
    q, k, leaves = build_operands(keys, record, build)
    # What is only compared has no gradient.
    for i in (i for i in range(len(q)) if not keys.program.passes_on(f"s{i}")):
        q[i], k[i] = (build(aten.detach.default, x) for x in (q[i], k[i]))
    node = build(operator, q, k, values, leaves, str(keys.program), None)
    node.meta[MASK] = keys.mask
    return node


def build_scored(keys: KeySet, values: fx.Node, record: ScanRecord, build: NodeBuilder) -> tuple[fx.Node, Mass]:
    """A node of `scored_attention` at one step; its output and what its keys weigh."""
    node = build_call(SCORED, keys, values, record, build)
    out, lse, total = (build(operator.getitem, node, i) for i in range(3))
    rows = [keys.shape[0] * keys.shape[1]]
    lse, total = (build(aten.reshape.default, x, rows) for x in (lse, total))
    # Also of scores so low that the log-sum-exp is the largest of them: then nothing is taken off.
    largest = build(aten.sub.Tensor, build(aten.detach.default, lse), build(aten.log.default, total))
    removed = build(aten.eq.Scalar, lse, -math.inf)
    return out, Mass(lse, build(aten.where.ScalarSelf, removed, -math.inf, largest), total)


def build_logits(keys: KeySet, rows: int, build: NodeBuilder) -> Mass:
    """What a set without products weighs, in float32 at least."""
    n, m, count = keys.shape
    (result,) = keys.program.results
    if isinstance(result, int | float):
        kind = {"dtype": torch.float32, "device": build.device}
        lse, largest, total = (
            build(aten.full.default, [rows], x, **kind) for x in (float(result) + math.log(count), float(result), count)
        )
        return Mass(lse, largest, total)
    (leaf,) = keys.leaves
    logits = build(aten.expand.default, leaf.build(build), [n, 1, m, count])
    if example(logits).dtype not in (torch.float32, torch.float64):
        logits = build(aten._to_copy.default, logits, dtype=torch.float32)
    largest = build(aten.amax.default, build(aten.detach.default, logits), [-1], True)
    removed = build(aten.eq.Scalar, largest, -math.inf)
    without = build(aten.sub.Tensor, logits, build(aten.where.ScalarSelf, removed, 0.0, largest))
    total = build(aten.sum.dim_IntList, build(aten.exp.default, build(aten.detach.default, without)), [-1])
    lse = build(aten.logsumexp.default, logits, [-1])
    return Mass(*(build(aten.reshape.default, x, [rows]) for x in (lse, largest, total)))
