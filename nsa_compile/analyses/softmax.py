"""A softmax as attention: up from it to the product of queries and keys, down to the product with the values.

Which element of which value is which is not guessed from reshapes and permutations but computed, by running them on
element numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

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
from nsa_compile.analyses.nan_rows import keeps_what_is_there, keys_there
from nsa_compile.ir.aten import FILLED, MASKED_FILL, MATMUL, SORTED, WHERE, arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder
from nsa_compile.ir.scans import ScanRecord, example

# Elements of a tensor of element numbers.
TRACE_LIMIT = 2**25


@dataclass(frozen=True)
class Product:
    """Rows `[N, m, ·]` times columns `[N, ·, T]`, as a node has it: the other way round, if `flipped`."""

    node: fx.Node
    flipped: bool

    @property
    def written(self) -> tuple[int, int, int]:
        """The shape as it is written, with all three dimensions; mv has a matrix of one column."""
        *batch, rows, columns = *example(self.node).shape, *([1] if self.node.target is aten.mv.default else [])
        return math.prod(batch), rows, columns

    @property
    def shape(self) -> tuple[int, int, int]:
        """`[N, m, T]`."""
        n, a, b = self.written
        return (n, b, a) if self.flipped else (n, a, b)

    def numbers(self) -> Tensor:
        """For each element of the node, its number in `[N, m, T]`."""
        numbers = torch.arange(example(self.node).numel()).reshape(self.shape)
        return (numbers.transpose(1, 2) if self.flipped else numbers).reshape(example(self.node).shape)

    @property
    def values(self) -> tuple[fx.Node, int]:
        """The operand that holds the columns, and its dimension of `T`; of weights and values, these values' rows."""
        value = operand(self.node, 0 if self.flipped else 1)
        return value, example(value).dim() - (1 if self.flipped else 2)

    def operands(self, build: NodeBuilder) -> tuple[fx.Node, fx.Node]:
        """`[N, m, ·]` and `[N, ·, T]`."""
        factors: Any = self.node.args[:2]
        a, b = factors
        if self.node.target is aten.mv.default:
            b = build(aten.unsqueeze.default, b, 1)
        if example(a).dim() == 2:  # one sequence
            a, b = (build(aten.unsqueeze.default, x, 0) for x in (a, b))
        if self.flipped:
            a, b = (build(aten.transpose.int, x, 1, 2) for x in (b, a))
        return a, b


@dataclass
class Scores:
    """The way from the product of queries and keys to a softmax."""

    product: Product
    scale: float = 1.0
    conditions: list[Condition] = field(default_factory=list)
    infinite: bool = True  # everything removed was set to -inf, not to the lowest number
    never_nan: bool = True  # for all that is known, no query is left with nothing but -inf
    keeps_one: bool = False  # its mask depends on data, but keeps a key for every query


@dataclass(frozen=True)
class Output:
    """The product of the weights of a softmax with values."""

    product: Product
    nan_from: tuple[int, ...]  # what a query gets that keeps no key, see `AttentionCall`


@dataclass(frozen=True)
class AttentionRecord:
    """What the passes know of an attention node; it lives in the node's meta: see `raised`."""

    softmax: fx.Node
    scores: Scores
    mask: Mask


_RECORD = "nsa_attention"


def raised(node: fx.Node) -> AttentionRecord | None:
    """What is known of an attention node that `raise_attention` has made."""
    return node.meta.get(_RECORD)


def remember(node: fx.Node, record: AttentionRecord) -> None:
    """Let an attention node carry what is known of it."""
    node.meta[_RECORD] = record


def walk_up(softmax: fx.Node, record: ScanRecord) -> Scores:
    """From a softmax up to the product of queries and keys.

    Raises:
        Unrecognised: there is something on the way that is no part of attention.
    """
    inputs: Any = softmax.args[:2]
    value, dim = inputs
    masked: list[tuple[fx.Node, fx.Node, bool, bool]] = []  # scores, condition, negated, additive
    result = Scores(Product(softmax, False))
    while value.target not in MATMUL:
        target = value.target
        floor: Any = -math.inf
        if target in MOVES or is_float_cast(value):
            value = operand(value)
        elif target in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar):
            value = _scaled(value, result, record)
        elif (side := side_of_where(value, record)) is not None:
            masked.append((side.value, side.condition, side.constant_if_true, False))
            value, floor = side.value, side.constant
        elif target is aten.add.Tensor and value.kwargs.get("alpha", 1) == 1:
            scores, condition = _additive(value, record)
            masked.append((scores, condition, False, True))
            value = scores
        else:
            raise Unrecognised(f"its scores come from {target}", value if isinstance(value, fx.Node) else softmax)
        if not isinstance(value, fx.Node):
            raise Unrecognised("its scores are a constant", softmax)
        level = _floor_of(floor, example(value).dtype, record)
        if level is None:
            raise Unrecognised("masked scores are set to something else than -inf or the lowest number", value)
        result.infinite &= level == -math.inf
        if level != -math.inf and result.scale != 1:
            raise Unrecognised("its scores are scaled after they were masked with the lowest number", value)
    if example(value).numel() == 0:
        raise Unrecognised("there are no keys to attend to", value)
    check_plain(value, record)
    if example(value).numel() > TRACE_LIMIT:
        raise Unrecognised(f"a step has more than {TRACE_LIMIT} scores", value)
    if example(softmax).dtype == torch.float64 and example(value).dtype != torch.float64:
        raise Unrecognised("its softmax is more precise than float32, its scores are not", softmax)
    for flipped in (False, True):  # queries times keys, or keys times queries
        result.product = Product(value, flipped)
        numbers = {value: result.product.numbers()}
        last = _number(numbers, operand(softmax), record).movedim(dim, -1)
        if any(n.numel() != example(value).numel() for n in numbers.values()):
            raise Unrecognised("scores are dropped or repeated on the way to its softmax", softmax)
        if last.shape[-1] == result.product.shape[-1] and torch.equal(last.flatten(), torch.arange(last.numel())):
            break
    else:
        raise Unrecognised("its softmax does not run over the keys, one query after the other", softmax)
    if any(not torch.equal(numbers[x].flatten(), torch.arange(numbers[x].numel())) for x, *_ in masked):
        raise Unrecognised("its scores are masked in another layout than that of keys by queries", softmax)
    result.conditions = [
        Condition(condition, negated, numbers[scores], last.shape[-1], additive)
        for scores, condition, negated, additive in masked
    ]
    return result


def _number(numbers: dict[fx.Node, Tensor], node: fx.Node, record: ScanRecord) -> Tensor:
    """For each element of a node on the way, its number in the product."""
    chain = []
    while node not in numbers:
        chain.append(node)
        node = _scores_operand(node, record)
    value = numbers[node]
    for step in reversed(chain):
        if step.target in MOVES:
            value = moved(step, value, record)
        numbers[step] = value
    return value


def _scores_operand(node: fx.Node, record: ScanRecord) -> fx.Node:
    """The operand of a node on the way that is the scores."""
    if (side := side_of_where(node, record)) is not None:
        return side.value
    if node.target is aten.add.Tensor:
        return _additive(node, record)[0]
    if node.target in (aten.mul.Tensor, aten.mul.Scalar) and constant(node.args[0], record) is not None:
        return cast(fx.Node, node.args[1])
    return cast(fx.Node, node.args[0])


def _scaled(node: fx.Node, result: Scores, record: ScanRecord) -> fx.Node:
    factors: Any = node.args[:2]
    a, b = factors
    if node.target in (aten.mul.Tensor, aten.mul.Scalar) and constant(a, record) is not None:
        a, b = b, a
    factor = constant(b, record)
    if factor is None or not 0 < factor < math.inf:
        raise Unrecognised("its scores are multiplied by something else than a positive number", node)
    result.scale = result.scale / factor if "div" in str(node.target) else result.scale * factor
    return a


def _floor_of(value: Any, dtype: torch.dtype, record: ScanRecord) -> float | None:
    """-inf or the lowest number of a dtype, if that is what a value is."""
    number = constant(value, record)
    if number == -math.inf:
        return number
    lowest = torch.finfo(dtype).min if dtype.is_floating_point else None
    return number if lowest is not None and number is not None and number <= lowest else None


def _additive(node: fx.Node, record: ScanRecord) -> tuple[fx.Node, fx.Node]:
    """`(scores, mask)` of a sum with a mask of zeros and -inf."""
    for scores, mask in (node.args[:2], node.args[1::-1]):
        if isinstance(mask, fx.Node) and isinstance(scores, fx.Node) and _is_additive_mask(mask, record):
            return scores, mask
    raise Unrecognised("something else than a mask of zeros and -inf is added to its scores", node)


def _is_additive_mask(mask: Any, record: ScanRecord) -> bool:
    while mask.target in MOVES or mask.target is aten._to_copy.default:
        mask = mask.args[0]
    if mask.target in WHERE:
        return {constant(x, record) for x in mask.args[1:3]} == {-math.inf, 0.0}
    if mask.target in MASKED_FILL:
        kept = mask.args[0]
        zeros = constant(kept, record) == 0.0 or (isinstance(kept, fx.Node) and _is_additive_mask(kept, record))
        return zeros and constant(mask.args[2], record) == -math.inf
    if mask.target is aten.scatter.value:
        return constant(mask.args[0], record) == -math.inf and mask.args[3] == 0
    if mask.target is aten.add.Tensor and mask.kwargs.get("alpha", 1) == 1:
        return all(isinstance(x, fx.Node) and _is_additive_mask(x, record) for x in mask.args[:2])
    return False


# Of weights that meet rows which are not written yet.
NONE_KEPT = (
    "its weights may not be zero for rows that are not written yet: where a mask keeps no key, all weigh the same, and "
    "values may be in another order than keys; setting the masked weights to zero behind the softmax, or filling with "
    "-inf, says that they are"
)


def check_plain(product: fx.Node, record: ScanRecord) -> None:
    """Raise Unrecognised if something else than the operands of a product is multiplied."""
    if any((product, place) in record.hidden for place in range(len(product.args))):
        raise Unrecognised("its scores are products with rows that are not written yet", product)


def walk_down(softmax: fx.Node, scores: Scores, mask: Mask, record: ScanRecord) -> list[Output]:
    """The products of the weights of a softmax with values.

    Raises:
        Unrecognised: there is none, or the weights are changed on the way.
    """
    found: list[Output] = []
    problem = Unrecognised("its weights are not multiplied with values", softmax)
    for weights in weights_below(softmax, record):
        for user in weights.node.users:
            if user.target not in MATMUL:
                continue
            if any((user, place) in record.hidden for place in (0, 1)):
                problem = Unrecognised(NONE_KEPT, user)
                continue
            product = Product(user, flipped=user.args[1] is weights.node)
            try:
                _check_order(product, weights, scores)
                may_be_nan = _may_be_nan(softmax, scores, weights, record)
                nan_from = _keys_there(product, scores, mask, record) if may_be_nan else ()
                found.append(Output(product, nan_from))
            except Unrecognised as why:
                problem = why
    if not found:
        raise problem
    return found


def check_read_by(outputs: list[Output], softmax: fx.Node, record: ScanRecord, *, may_rank: bool) -> None:
    """That nothing but the outputs, or a ranking if it may, reads the weights: scores that stay for others would be
    computed twice."""
    names = {weights.node for weights in weights_below(softmax, record)}
    readers = {output.product.node for output in outputs} | names
    others = {user for name in names for user in name.users if user not in readers}
    if others and not (may_rank and _only_ranked(others)):
        raise Unrecognised("its weights are used by something else as well", softmax)


def _only_ranked(nodes: set[fx.Node]) -> bool:
    """Whether all that is computed from the values of nodes goes through a sort."""
    found, todo = set(nodes), list(nodes)
    while todo:
        node = todo.pop()
        if node.op == "output":
            return False
        following = () if node.target in SORTED or node.target in FILLED else node.users
        todo += [user for user in following if user not in found]
        found.update(following)
    return True


@dataclass(frozen=True)
class Weights:
    """The weights of a softmax under one of their names: moved, cast, masked once more."""

    node: fx.Node
    numbers: Tensor  # for each element, its number in the product of queries and keys
    masked: tuple[Condition, ...] = ()  # under which it was not set to zero
    without_nan: bool = False  # NaN has become zero on the way


def weights_below(softmax: fx.Node, record: ScanRecord) -> list[Weights]:
    """The weights of a softmax under all their names."""
    shape = example(softmax).shape
    dim = arguments(softmax).dim % len(shape)
    order = torch.arange(shape.numel()).reshape(*[s for i, s in enumerate(shape) if i != dim], shape[dim])
    found = [Weights(softmax, order.movedim(-1, dim))]
    for weights in found:  # grows while it is walked
        for user in weights.node.users:
            if is_float_cast(user):
                found.append(replace(weights, node=user))
            elif user.target is aten.nan_to_num.default and arguments(user).nan in (None, 0.0):
                found.append(replace(weights, node=user, without_nan=True))
            elif keeps_what_is_there(user, record) and user.args[0] is weights.node:
                found.append(replace(weights, node=user))
            elif user.target in MOVES and user.args[0] is weights.node and len(user.all_input_nodes) == 1:
                found.append(replace(weights, node=user, numbers=moved(user, weights.numbers, record)))
            elif (masked := _masked(user, weights, shape[dim], record)) is not None:
                found.append(masked)
    return found


def weights_from(softmax: fx.Node, scores: Scores, record: ScanRecord) -> dict[fx.Node, Tensor]:
    """The names of the weights under which they are zero where nothing is kept, with the numbers of their elements.

    Weights that were cast belong to them only as long as they keep their dtype: rounded ones may rank differently.
    """
    final = {}
    rounded: set[fx.Node] = set()
    for weights in weights_below(softmax, record):
        node = weights.node
        if example(node).dtype != example(softmax).dtype or any(n in rounded for n in node.all_input_nodes):
            rounded.add(node)
            continue
        try:
            if _may_be_nan(softmax, scores, weights, record):
                continue
        except Unrecognised:
            continue
        final[node] = weights.numbers
    return final


def _masked(user: fx.Node, weights: Weights, keys: int, record: ScanRecord) -> Weights | None:
    """What a user of weights makes of them, if it sets some of them to zero."""
    side = side_of_where(user, record)
    if side is not None and side.value is weights.node and side.constant == 0.0:
        condition = Condition(side.condition, side.constant_if_true, weights.numbers, keys)
        return replace(weights, node=user, masked=(*weights.masked, condition), without_nan=True)
    if user.target is aten.mul.Tensor:
        (other,) = [x for x in user.args if x is not weights.node] or [None]
        if isinstance(other, fx.Node) and (source := _as_condition(other)) is not None:
            condition = Condition(source, False, weights.numbers, keys)
            return replace(weights, node=user, masked=(*weights.masked, condition))
    return None


def _as_condition(node: fx.Node) -> fx.Node | None:
    """The boolean behind a mask that weights are multiplied with."""
    if example(node).dtype == torch.bool:
        return node
    if node.target is aten._to_copy.default and example(operand(node)).dtype == torch.bool:
        return operand(node)
    return None


def _check_order(output: Product, weights: Weights, scores: Scores) -> None:
    """That weights meet the values in the order in which scores met the keys."""
    n, m, keys = scores.product.shape
    expected = torch.arange(n * m * keys).reshape(n, m, keys)
    if output.flipped:
        expected = expected.transpose(1, 2)
    same_shape = output.shape[:2] == (n, m) and output.node.args.count(weights.node) == 1
    if not same_shape or not torch.equal(weights.numbers.flatten(), expected.flatten()):
        raise Unrecognised("its weights meet the values in another order than its scores met the keys", output.node)


def _may_be_nan(softmax: fx.Node, scores: Scores, weights: Weights, record: ScanRecord) -> bool:
    """Whether weights are NaN where nothing is kept, or zeros, or something is always kept.

    Raises:
        Unrecognised: they are masked differently from the scores, or neither of the two.
    """
    keep = conjunction(scores.conditions, record)
    some_is_kept = scores.keeps_one or (not keep.data and keeps_one(keep.known, record))
    if weights.masked and not same_mask(conjunction(list(weights.masked), record), keep, record):
        both = conjunction([*scores.conditions, *weights.masked], record)
        # Part of its scores' mask once more removes nothing else, where that keeps a key.
        if not some_is_kept or not same_mask(both, keep, record):
            raise Unrecognised("its weights are masked differently from its scores", softmax)
    if some_is_kept:
        return False
    if weights.masked and (scores.never_nan or weights.without_nan):
        return False
    if not scores.infinite:
        raise Unrecognised("at some step no key may be left, and what its softmax makes of that is not zero", softmax)
    return not weights.without_nan and softmax.target is not aten._safe_softmax.default


def _keys_there(output: Product, scores: Scores, mask: Mask, record: ScanRecord) -> tuple[int, ...]:
    """When each key is there, where a query may keep none.

    Raises:
        Unrecognised: this is not known, or the gradient of a row that is NaN goes on to queries and keys.
    """
    if any(condition.additive for condition in scores.conditions):
        raise Unrecognised("at some step no key may be left, and its mask is added to its scores", output.node)
    return keys_there(output.values, mask, record)
