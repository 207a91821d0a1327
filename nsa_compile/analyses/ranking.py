"""How the blocks of a selection were ranked: whether by eq. 8 to 11 of arXiv 2502.11089.

What each element of the mask and of the scores comes from is computed by running the operators between on element
numbers.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from nsa_compile.analyses.masks import MOVES, Unrecognised, constant, moved, side_of_where
from nsa_compile.analyses.selection import Selection
from nsa_compile.analyses.softmax import AttentionRecord, raised, weights_from
from nsa_compile.ir.aten import arguments, aten, operand
from nsa_compile.ir.attention import AttentionCall, Blocks
from nsa_compile.ir.scans import ScanRecord, ancestors, example
from nsa_compile.ir.step_values import StepMask, step_mask


@dataclass(frozen=True)
class Ranking:
    """Scores that are those of eq. 8 to 11."""

    source: AttentionCall[fx.Node]  # the compressed attention
    blocks: int
    kind: Blocks  # of its mask; of a step by itself one of rows
    ratio: int  # rows from one block to the next
    allowed: tuple[fx.Node, bool]  # a condition, and whether it is negated
    forced: tuple[fx.Node, bool] | None
    offsets: tuple[int, ...]
    factors: tuple[int, ...]
    num_initial: int
    num_local: int


def find_ranking(selection: Selection, body: fx.GraphModule, record: ScanRecord, *, by_itself: bool) -> Ranking:
    """How the indices of a selection were ranked.

    In a step `by_itself` conditions on the blocks are what they are at its position, and no rule is asked of them.

    Raises:
        Unrecognised: in another way than eq. 8 to 11.
    """
    sort, count = _sorted_scores(selection)
    score = sorted_score = operand(sort)
    rows, blocks = len(selection.rows), example(score).shape[-1]
    if not torch.equal(selection.rows, torch.arange(rows)[:, None].expand_as(selection.rows)):
        raise Unrecognised("it is not one for each group of heads", sort)
    if selection.limits is not None or selection.always is not None:
        raise Unrecognised("its mask keeps other blocks than those that are ranked best", sort)
    _check_taken(selection, sort, count)
    allowed, score = _bounded(score, -math.inf, record)
    if allowed is None:
        raise Unrecognised("no mask keeps blocks of the future out", sort)
    forced, score = _bounded(score, math.inf, record)
    source, known = _attention_behind(score, body)
    if by_itself:
        num_initial, num_local = 0, 0
    else:
        shape = example(sorted_score).shape
        num_initial, num_local = _counts_by_position(allowed, forced, shape, selection.block, sort, record)
        if not isinstance(source.kind, Blocks) or known.mask.data or selection.block % source.kind.stride:
            raise Unrecognised("its scores do not come from attention to compressed blocks", score)
    terms = _linear(score, weights_from(known.softmax, known.scores, record), record)
    kind = source.kind if isinstance(source.kind, Blocks) else Blocks(1, 1)
    ratio = _ratio(terms, source, blocks, score) if by_itself else selection.block // kind.stride
    offsets, factors = _stencil(terms, source, rows, blocks, ratio, score)
    return Ranking(source, blocks, kind, ratio, allowed, forced, offsets, factors, num_initial, num_local)


def _counts_by_position(
    allowed: tuple[fx.Node, bool],
    forced: tuple[fx.Node, bool] | None,
    shape: torch.Size,
    block: int,
    sort: fx.Node,
    record: ScanRecord,
) -> tuple[int, int]:
    """How many first and last blocks are always taken, of those up to the current one, at every step."""
    allowed_steps = _by_block(*allowed, shape, record)
    forced_steps = None if forced is None else _by_block(*forced, shape, record)
    counts = _forced_counts(allowed_steps, forced_steps, block, sort)
    for condition in (allowed, forced):
        if condition is not None and example(condition[0]).numel() != shape[-1]:
            raise Unrecognised("the conditions on its blocks are not written as one boolean a block", sort)
    return counts


def _sorted_scores(selection: Selection) -> tuple[fx.Node, int]:
    """The sort behind the indices, and how many of them it keeps."""
    node: Any = selection.indices
    if node is None:
        raise Unrecognised("it takes all that reach the n-th best score, not n blocks", selection.members.node)
    count = example(node).shape[-1]
    if node.target is aten.slice.Tensor:
        if not _takes_first(node):
            raise Unrecognised("it takes other blocks than the first of the sorted ones", node)
        node = node.args[0]
    if node.target is not operator.getitem or node.args[1] != 1 or node.args[0].target is not aten.sort.stable:
        raise Unrecognised("it does not take the order of a stable sort, so ties are open", node)
    sort, how = node.args[0], arguments(node.args[0])
    rank = example(how.self).dim()
    if not how.stable or not how.descending or how.dim % rank != rank - 1:
        raise Unrecognised("it does not sort the blocks of a row stably, the best first", sort)
    return sort, count


def _takes_first(node: fx.Node) -> bool:
    """Whether a slice takes the first elements of each row, one after the other."""
    part, rank = arguments(node), example(operand(node)).dim()
    return bool(part.dim % rank == rank - 1 and part.start in (0, None) and part.step == 1)


def _check_taken(selection: Selection, sort: fx.Node, count: int) -> None:
    """That exactly the blocks with a score above -inf are taken."""
    taken = selection.taken
    if taken is None:
        raise Unrecognised("it takes n blocks even where fewer are allowed", selection.members.node)
    values: Any = taken.args[0] if taken.target is aten.gt.Scalar and taken.args[1] == -math.inf else None
    if isinstance(values, fx.Node) and values.target is aten.slice.Tensor and _takes_first(values):
        values = values.args[0] if example(values).shape[-1] == count else None
    if not isinstance(values, fx.Node) or values.target is not operator.getitem or values.args != (sort, 0):
        raise Unrecognised("which blocks are taken depends on something else than their scores", selection.members.node)


def _bounded(score: fx.Node, bound: float, record: ScanRecord) -> tuple[tuple[fx.Node, bool] | None, fx.Node]:
    """`(condition, negated)` under which a score is kept (bound -inf) or set (bound inf), and the score inside."""
    found = side_of_where(score, record)
    if found is None or found.constant != bound:
        return None, score
    # The condition of the constant; for -inf, the opposite one is that of what is kept.
    negated = found.constant_if_true == (bound < 0)
    return (found.condition, negated), found.value


def _by_block(condition: fx.Node, negated: bool, shape: torch.Size, record: ScanRecord) -> StepMask:
    value: Any = record.known.get(condition, record.constant.get(condition))
    mask = None if value is None else step_mask(value, record.length)
    if mask is None:
        raise Unrecognised("a condition on its blocks is not known at every step", condition)
    spread = (~mask if negated else mask).map(lambda x: x.expand(shape).reshape(-1, shape[-1]))
    return spread.map(lambda x: x[0]) if bool((spread.start == spread.start[:1]).all()) else spread


def _forced_counts(allowed: StepMask, forced: StepMask | None, block: int, sort: fx.Node) -> tuple[int, int]:
    """How many first and last blocks are always taken."""
    j = torch.arange(allowed.shape[-1])
    length = allowed.length
    expected = StepMask.inside(j * block, torch.full_like(j, length), length)
    if len(j) * block < length:
        raise Unrecognised("some steps lie behind the last of its blocks", sort)
    if allowed.start.dim() != 1 or not _equal(allowed, expected):
        raise Unrecognised("the blocks that are allowed are not those up to the current one", sort)
    if forced is None:
        return 0, 0
    both = allowed & forced
    if both is None or both.start.dim() != 1 or bool(both.outside.any()):
        raise Unrecognised("the blocks that are always taken are not the first and the last ones", sort)
    ends = [
        (int(b) - int(i) * block) // block for i, a, b in zip(j, both.start, both.stop, strict=True) if a < b < length
    ]
    candidates = {ends[-1]} if ends else {0, len(j)}
    for num_local in sorted(candidates):
        for num_initial in range(min(len(j), 64) + 1):
            stop = torch.where(j < num_initial, length, (j + num_local) * block)
            if _equal(both, StepMask.inside(j * block, stop, length)):
                return num_initial, num_local
    raise Unrecognised("the blocks that are always taken are not the first and the last ones", sort)


def _equal(a: StepMask, b: StepMask) -> bool:
    return all(torch.equal(getattr(a, x), getattr(b, x)) for x in ("start", "stop", "outside"))


def _attention_behind(score: fx.Node, body: fx.GraphModule) -> tuple[AttentionCall[fx.Node], AttentionRecord]:
    """The one attention whose weights a score is computed from."""
    inputs = ancestors([score])
    for node in body.graph.nodes:
        known = raised(node)
        if known is not None and known.softmax in inputs:
            call = AttentionCall.of(node)
            computed = torch.promote_types(example(call.q).dtype, torch.float32)
            if example(known.softmax).dtype != computed:
                raise Unrecognised(f"its weights are rounded, and those of an attention node are {computed}", score)
            return call, known
    raise Unrecognised("its scores are not computed from the weights of an attention", score)


# A linear combination of weights: factors, and for each element the number of the weight it takes, -1 for none.
Terms = list[tuple[float, Tensor]]


def _linear(node: Any, leaves: dict[fx.Node, Tensor], record: ScanRecord) -> Terms:
    """A value as a linear combination of attention weights.

    Raises:
        Unrecognised: it is none, or not evidently.
    """
    if constant(node, record) == 0.0:
        return []
    if not isinstance(node, fx.Node):
        raise Unrecognised("a number is added to its scores", next(iter(leaves)))
    if node in leaves:
        return [(1.0, leaves[node])]
    if example(node).dtype != example(next(iter(leaves))).dtype:
        raise Unrecognised("its scores are rounded on their way", node)
    target = node.target
    if target is aten.zeros_like.default:
        return []
    if target is aten.detach.default:
        return _linear(node.args[0], leaves, record)
    if target is aten._to_copy.default:
        return _linear(node.args[0], leaves, record)
    if target in MOVES:
        return [(c, moved(node, x, record)) for c, x in _linear(node.args[0], leaves, record)]
    if target is aten.constant_pad_nd.default and constant(arguments(node).value, record) == 0.0:
        padding = arguments(node).pad
        return [(c, torch.nn.functional.pad(x, padding, value=-1)) for c, x in _linear(node.args[0], leaves, record)]
    if target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
        shape = example(node).shape
        terms = _linear(node.args[0], leaves, record) + _linear(node.args[1], leaves, record)
        return [(c, x.expand(shape)) for c, x in terms]
    if target in (aten.mul.Tensor, aten.mul.Scalar):
        a, b = node.args
        factor, value = (constant(a, record), b) if constant(b, record) is None else (constant(b, record), a)
        if factor is not None:
            return [(c * factor, x) for c, x in _linear(value, leaves, record)]
    if target is aten.sum.dim_IntList:
        return _summed(node, leaves, record)
    raise Unrecognised(f"its scores are computed with {target}, which is not taken for a sum of weights", node)


def _summed(node: fx.Node, leaves: dict[fx.Node, Tensor], record: ScanRecord) -> Terms:
    total = arguments(node)
    dims = sorted({d % example(total.self).dim() for d in total.dim}, reverse=True)
    keepdim = total.keepdim
    terms = _linear(total.self, leaves, record)
    for dim in dims:
        terms = [
            (c, x.narrow(dim, i, 1) if keepdim else x.select(dim, i)) for c, x in terms for i in range(x.shape[dim])
        ]
    return terms


def _ratio(terms: Terms, source: AttentionCall[fx.Node], blocks: int, score: fx.Node) -> int:
    """How many compressed blocks lie between those that neighbouring blocks weigh."""
    for _, numbers in terms:
        first, second = numbers.reshape(-1, blocks)[:, :-1], numbers.reshape(-1, blocks)[:, 1:]
        both = (first >= 0) & (second >= 0)
        if bool(both.any()) and (ratio := int((second - first)[both][0])) > 0:
            return ratio
    raise Unrecognised("its scores do not weigh the compressed blocks around each block alike", score)


def _stencil(
    terms: Terms, source: AttentionCall[fx.Node], rows: int, blocks: int, ratio: int, score: fx.Node
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The offsets and factors with which block j weighs the compressed blocks around `j * ratio`, over all heads."""
    heads, keys = example(source.q).shape[2], example(source.k).shape[1]
    own_row = torch.arange(rows)[:, None]
    j = torch.arange(blocks)
    factors: dict[int, list[float]] = {}
    for factor, numbers in terms:
        numbers = numbers.reshape(rows, blocks)
        there = numbers >= 0
        if not bool(there.any()):
            continue
        key, line = numbers % keys, numbers // keys
        offset, head = int((key - j * ratio)[there][0]), int((line % heads)[there][0])
        expected = j * ratio + offset
        inside = ((expected >= 0) & (expected < keys)).expand_as(there)
        right = (key == expected) & (line == own_row * heads + head)
        if not torch.equal(there, inside) or not bool(right[there].all()):
            raise Unrecognised("its scores do not weigh the compressed blocks around each block alike", score)
        factors.setdefault(offset, [0.0] * heads)[head] += factor
    for values in factors.values():
        if any(v != values[0] for v in values) or values[0] != int(values[0]) or values[0] <= 0:
            raise Unrecognised("its scores do not weigh all heads alike, by positive whole numbers", score)
    if not factors:
        raise Unrecognised("its scores weigh no compressed block", score)
    offsets = tuple(sorted(factors))
    return offsets, tuple(int(factors[o][0]) for o in offsets)
