"""A mask that is a set of blocks chosen by index: where its indices are, and which of them count for which query.

What each element of the mask comes from is computed by running the operators between on element numbers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from nsa_compile.analyses.integers import bounds, fits
from nsa_compile.analyses.magnitudes import Magnitudes
from nsa_compile.analyses.masks import (
    MOVES,
    Condition,
    Mask,
    Unrecognised,
    conjunction,
    constant,
    keeps_one,
    moved,
    parts,
    side_of_where,
)
from nsa_compile.ir.aten import ADD, AND, COMPARISONS, NOT, OR, SORTED, arguments, aten, operand
from nsa_compile.ir.scans import ScanRecord, Step, example
from nsa_compile.ir.step_values import StepMask, Table, step_mask

# Tokens of a block below which a list of all blocks, chosen or not, takes longer to read than the blocks that are.
LEAST_LISTED = 4

SCATTERS = (aten.scatter.src, aten.scatter.value)
# What finds one of the best scores of each row, or takes it from all of them.
RANKED = SORTED | {aten.kthvalue.default}
PICKS = {aten.slice.Tensor, aten.select.int, aten.unsqueeze.default, aten.detach.default}


@dataclass(frozen=True)
class Members:
    """A node that says of each of its columns whether an index of their row is theirs."""

    node: fx.Node  # [..., C]: booleans, or numbers to be added to scores, 0 and -inf
    indices: fx.Node | None  # [..., n]; None: those of the columns, of which the node itself says which count
    columns: Tensor  # [C], the index that each column is about
    taken: fx.Node | None = None  # [..., n], which of the indices count; None: all


@dataclass(frozen=True)
class Selection:
    """A mask of blocks chosen by index, of which none that counts comes twice unless they are `given`."""

    members: Members
    indices: fx.Node | None  # [..., n]; None: every block's own
    taken: fx.Node | None  # [..., n], which of the indices count; None: all
    marked: fx.Node | None  # [..., n], the indices with a number below 0 for those that do not count, if it is there
    given: bool  # whether nothing is known of the indices but that their mask has columns for them
    first: int  # the index of block 0
    block: int  # tokens a block
    rows: Tensor  # [N, m], the row of indices that narrows the keys of a query
    others: tuple[Condition, ...]  # the rest of the mask
    limits: StepMask | None = None  # [blocks], the steps at which a chosen block counts, if not all
    always: StepMask | None = None  # [blocks], the steps at which a block counts that is not chosen

    @property
    def by_group(self) -> bool:
        """Whether all queries that share keys share indices, too."""
        return bool((self.rows == self.rows[:, :1]).all())

    @property
    def blocks(self) -> int:
        """As many as the mask has columns for."""
        return len(self.members.columns)


def is_chosen(condition: Condition, record: ScanRecord) -> bool:
    """Whether a condition of a mask may be about blocks that are chosen by index."""
    return any(_members(part.node, part.additive, record) is not None for part in _leaves(condition, record))


def _leaves(condition: Condition, record: ScanRecord) -> Iterator[Condition]:
    """What a condition is made of by conjunctions and disjunctions."""
    todo = [condition]
    while todo:
        part = todo.pop()
        inner = parts(part, record) or _either(part)
        if inner:
            todo += inner
        elif not part.negated:
            yield part


def _either(condition: Condition) -> list[Condition]:
    """The conditions one of which is enough."""
    node = condition.node
    if condition.additive or node.target not in (AND if condition.negated else OR):
        return []
    here = (example(node).shape, None)
    return [replace(condition, node=x, moves=(here, *condition.moves)) for x in node.args[:2] if isinstance(x, fx.Node)]


def _alternatives(condition: Condition, record: ScanRecord) -> list[Condition]:
    """The conditions one of which is enough, as far as a condition is taken apart into them."""
    found, todo = [], [condition]
    while todo:
        part = todo.pop()
        inner = _either(part)
        if not inner and len(only := parts(part, record)) == 1:
            inner = only
        todo += inner
        found += [] if inner else [part]
    return found


# -- sets of indices


def _members(node: fx.Node, additive: bool, record: ScanRecord) -> Members | None:
    """A node as a set of indices, if it is one."""
    if node.target in SCATTERS:
        return _scattered(node, additive, record)
    if node.target in (aten.any.dim, aten.any.dims):
        return _compared(node, node, record)
    is_bool = node.target is aten._to_copy.default and example(node).dtype == torch.bool
    if is_bool and operand(node).target is aten.sum.dim_IntList:
        return _compared(node, operand(node), record)
    if _is_not_below_one_of_the_best(node):
        return Members(node, None, torch.arange(example(node).shape[-1]), node)
    return None


def _scattered(node: fx.Node, additive: bool, record: ScanRecord) -> Members | None:
    """`zeros.scatter(-1, indices, taken)`; or `full(-inf).scatter(-1, indices, 0)`, to be added."""
    base, dim, indices, source = cast(Any, node.args)
    shape = example(node).shape
    if constant(base, record) != (-math.inf if additive else 0.0) or dim % len(shape) != len(shape) - 1:
        return None
    if not isinstance(indices, fx.Node) or example(indices).shape[:-1] != shape[:-1]:
        return None
    columns = torch.arange(shape[-1])
    if constant(source, record) is not None:
        takes = constant(source, record) == 0.0 if additive else bool(constant(source, record))
        return Members(node, indices, columns) if takes else None
    return None if additive else Members(node, indices, columns, source)


def _compared(node: fx.Node, reduced: fx.Node, record: ScanRecord) -> Members | None:
    """`(indices[..., None] == columns).any(-2)`, or `one_hot(indices).sum(-2).bool()`."""
    equal, how = operand(reduced), arguments(reduced)
    while equal.target is aten._to_copy.default:
        equal = operand(equal)
    dims = how.dim if isinstance(how.dim, list | tuple) else [how.dim]
    shape = example(equal).shape
    if COMPARISONS.get(equal.target) != "eq" or len(dims) != 1 or how.keepdim or len(shape) < 2:
        return None
    for found, other in (equal.args[:2], equal.args[1::-1]):
        value = record.constant.get(other) if isinstance(other, fx.Node) else None
        if value is None or value.dtype.is_floating_point or not isinstance(found, fx.Node):
            continue
        source, chain = found, []
        while source.target in MOVES or _is_wide(source):
            chain.append(source)
            source = operand(source)
        count, numbers = example(source).shape[-1], torch.arange(example(source).numel()).reshape(example(source).shape)
        for move in reversed(chain):
            numbers = numbers if _is_wide(move) else moved(move, numbers, record)
        numbers, value = (x.expand(shape).movedim(dims[0], -1) for x in (numbers, value))  # [..., C, n]
        expected = torch.arange(example(source).numel()).reshape(*numbers.shape[:-2], 1, count)
        columns = value.flatten(0, -3)[0, :, :1] if value.dim() > 2 else value[:, :1]
        if torch.equal(numbers, expected.expand_as(numbers)) and torch.equal(value, columns.expand_as(value)):
            return Members(node, source, columns.flatten())
    return None


def _is_not_below_one_of_the_best(node: fx.Node) -> bool:
    """Whether a node says of each score of a row if it reaches the n-th best one, as a sort or top-k of them found it.

    More than n do where some are equal.
    """
    compares = COMPARISONS.get(node.target)
    if compares not in ("ge", "le") or not all(isinstance(x, fx.Node) for x in node.args[:2]):
        return False
    scores, bound = cast(Any, node.args[:2] if compares == "ge" else node.args[1::-1])
    shape = example(bound).shape
    if example(scores).shape != example(node).shape or len(shape) != example(node).dim() or shape[-1] != 1:
        return False
    while bound.target in PICKS:
        bound = operand(bound)
    if bound.target is not operator.getitem or bound.args[1] != 0 or operand(bound).target not in RANKED:
        return False
    ranked, last = operand(operand(bound)), example(node).dim() - 1
    return _undetached(ranked) is _undetached(scores) and arguments(operand(bound)).dim % (last + 1) == last


def _undetached(node: fx.Node) -> fx.Node:
    while node.target is aten.detach.default:
        node = operand(node)
    return node


def keeps_best(mask: Mask, shape: tuple[int, int, int], record: ScanRecord, magnitudes: Magnitudes) -> bool:
    """Whether a mask keeps a key of the best block of each query `[N, m]`, of T keys, at every step.

    It does if some score of the blocks is surely at no floor, and a key of whatever block is not at one is seen.
    """
    n, m, keys = shape
    if len(mask.data) != 1 or not is_chosen(mask.data[0], record):
        return False
    members = _members(mask.data[0].node, mask.data[0].additive, record)
    if members is None or members.indices is None or mask.data[0].negated or members.taken is not None:
        return False
    if not _is_best_first(members.indices):
        return False
    try:
        first, block, _ = spread_over(mask.data[0], members, (n, m, keys), record)
    except Unrecognised:
        return False
    count = len(members.columns)
    ranked = operand(_sort_of(members.indices))
    eligible = _eligible(ranked, record, magnitudes)
    if eligible is None or first or example(ranked).shape[-1] != count or count * block < keys:
        return False
    eligible = eligible.map(lambda x: x.expand(example(ranked).shape).reshape(-1, count))
    seen = StepMask.inside(torch.zeros(1, keys), torch.full((1, keys), record.length), record.length)
    seen = seen if mask.known is None else mask.known
    if bool(seen.outside.any()) or bool((seen.stop < record.length).any()):
        return False
    # The step from which on a key of a block is seen; blocks without keys never are.
    padded = torch.nn.functional.pad(seen.start.expand(-1, keys), (0, count * block - keys), value=record.length)
    start = padded.unflatten(1, (count, block)).amin(2).amax(0)
    unseen = eligible & StepMask.inside(torch.zeros_like(start), start, record.length)
    return unseen is not None and unseen.count == 0 and keeps_one(eligible, record)


def _eligible(scores: fx.Node, record: ScanRecord, magnitudes: Magnitudes) -> StepMask | None:
    """The blocks, at each step, whose scores are not -inf; None if that is not known."""
    fills: list[tuple[StepMask, bool]] = []
    while True:
        side = side_of_where(scores, record)
        if side is None or not math.isinf(side.constant):
            break
        value: Any = record.known.get(side.condition, record.constant.get(side.condition))
        condition = None if value is None else step_mask(value, record.length)
        if condition is None:
            return None
        fills.append((condition if side.constant_if_true else ~condition, side.constant > 0))
        scores = side.value
    magnitude = magnitudes.of(scores)
    if magnitude is None or magnitude.floors is not None:
        return None
    everywhere = torch.tensor(True)
    eligible: StepMask | None = step_mask(everywhere, record.length)
    for condition, is_best in reversed(fills):
        assert eligible is not None
        eligible = eligible | condition if is_best else eligible & ~condition
        if eligible is None:
            return None
    return eligible


def _sort_of(indices: Any) -> fx.Node:
    while indices.target is not operator.getitem:
        indices = indices.args[0]
    return operand(indices)


def _is_best_first(indices: Any) -> bool:
    """Whether indices are those of a sort, or of top-k, from the best one on."""
    if not _unique(indices):
        return False
    while indices.target is not operator.getitem:
        how = arguments(indices)
        if indices.target is aten.slice.Tensor and how.start not in (0, None):
            return False
        indices = how.self
    how = arguments(operand(indices))
    return bool(getattr(how, "largest" if operand(indices).target is aten.topk.default else "descending"))


# -- the selection of an attention


def find_selection(node: fx.Node, masked: Mask, shape: tuple[int, int, int], step: Step) -> Selection:
    """The indices behind the mask of an attention of queries `[N, m]` to T keys.

    Raises:
        Unrecognised: the mask is no set of whole blocks chosen by index.
    """
    record = step.record
    chosen = [f for f in masked.data if is_chosen(f, record)]
    if not chosen:
        raise Unrecognised("its mask depends on data, and is no scatter of block indices", node)
    if len(chosen) > 1:
        raise Unrecognised("its mask is that of several scatters of block indices", node)
    others = (*masked.known_conditions, *(f for f in masked.data if f is not chosen[0]))
    members, condition, limit, always = _apart(chosen[0], record)
    mask = members.node
    first, block, rows = spread_over(condition, members, shape, record)
    if members.indices is None and block < LEAST_LISTED:
        raise Unrecognised(f"it lists all blocks, and they have fewer than {LEAST_LISTED} tokens", mask)
    if members.indices is None and first:
        raise Unrecognised("it lists all blocks, and the first of them is another one", mask)
    indices, taken, marked, given = members.indices, members.taken, None, False
    if indices is not None and (not _unique(indices) or first):
        if taken is not None:
            raise Unrecognised("its block indices are not those of a sort or of top-k, so one may come twice", mask)
        if (found_marked := _marked(indices, first, members.columns, record)) is not None:
            marked, taken, indices, first = *found_marked, 0
        elif mask.target not in SCATTERS or fits(bounds(indices, record), (0, len(members.columns) - 1)):
            given = True
        else:
            raise Unrecognised("its block indices may lie outside of its block mask; clamp them", mask)
    causal = masked.known

    def by_block(part: StepMask | None) -> StepMask | None:
        return None if part is None else blocks_of_steps(part, causal, block, mask)

    limits = None if limit is None or _implies(causal, limit) else by_block(limit)
    if (limits is not None or always is not None) and position_node(step.body, record) is None:
        raise Unrecognised("some of its blocks are known, but no number of the step is at hand", mask)
    return Selection(members, indices, taken, marked, given, first, block, rows, others, limits, by_block(always))


def _apart(condition: Condition, record: ScanRecord) -> tuple[Members, Condition, StepMask | None, StepMask | None]:
    """A condition as `(chosen & limit) | always`: what is chosen, as a condition of its own, and what is known.

    Raises:
        Unrecognised: it is something else.
    """
    always: StepMask | None = None
    found: list[tuple[Members, Condition, StepMask | None]] = []
    for part in _alternatives(condition, record):
        mask = conjunction([part], record)
        if not mask.data and mask.known is not None:
            always = mask.known if always is None else always | mask.known
            if always is None:
                raise Unrecognised("what its mask keeps beside chosen blocks is kept now and then", part.node)
            continue
        members = None if len(mask.data) != 1 else _members(mask.data[0].node, mask.data[0].additive, record)
        if members is None or mask.data[0].negated:
            raise Unrecognised("its mask depends on data in another way than by indices of blocks", part.node)
        found.append((members, mask.data[0], mask.known))
    if len(found) != 1:
        raise Unrecognised("its mask is that of several scatters of block indices", condition.node)
    return (*found[0], always)


def _implies(mask: StepMask | None, other: StepMask) -> bool:
    """Whether what one mask keeps another one keeps, too."""
    if mask is None:
        return False
    both = mask & other
    if both is None:
        return False
    pairs = ((getattr(both, x), getattr(mask, x)) for x in ("start", "stop", "outside"))
    return all(bool((a == b).all()) for a, b in pairs)


def blocks_of_steps(mask: StepMask, causal: StepMask | None, block: int, node: fx.Node) -> StepMask:
    """A mask `[1, T]` of single tokens as one of whole blocks, of which `causal` keeps a part.

    Raises:
        Unrecognised: it keeps other tokens than those that `causal` keeps of blocks.
    """
    problem = Unrecognised("what is known of its mask does not keep whole blocks", node)
    kept = mask if causal is None else mask & causal
    one_row = kept is not None and kept.start.shape[0] == 1 and (causal is None or len(causal.start) == 1)
    if kept is None or not one_row or bool(kept.outside.any()):
        raise problem
    length, keys = mask.length, kept.shape[-1]
    count = -(-keys // block)
    none = kept.stop[0] <= kept.start[0]

    def blocks(x: Tensor, fill: int) -> Tensor:
        x = torch.where(none, fill, x)
        return torch.nn.functional.pad(x, (0, count * block - keys), value=fill).unflatten(0, (count, block))

    first, last = blocks(kept.start[0], length).amin(1), blocks(kept.stop[0], 0).amax(1)
    whole = StepMask.inside(first, last, length)
    tokens = whole.map(lambda x: x.repeat_interleave(block)[:keys][None])
    seen = tokens if causal is None else tokens & causal
    if seen is None or any(not torch.equal(getattr(seen, x), getattr(kept, x)) for x in ("start", "stop", "outside")):
        raise problem
    return whole


def table_of(mask: StepMask) -> Tensor:
    """The blocks that a mask keeps at each step, `[S, most]`, -1 where there are fewer."""
    t, block = mask.true_entries()
    counts = torch.bincount(t, minlength=mask.length)
    place = torch.arange(len(t)) - (counts.cumsum(0) - counts)[t]
    table = torch.full((mask.length, int(counts.max()) if len(t) else 0), -1)
    table[t, place] = block
    return table


def position_node(body: fx.GraphModule, record: ScanRecord) -> fx.Node | None:
    """A node that is the number of the step."""
    for node in body.graph.nodes:
        value = record.known.get(node)
        if not isinstance(value, Table) or value.shape or value.values.dtype != torch.int64:
            continue
        if torch.equal(value.values, torch.arange(record.length)):
            return node
    return None


def _marked(
    columns: fx.Node, first: int, of_columns: Tensor, record: ScanRecord
) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """`where(taken, indices, -1)`, `taken` and `indices`, where a scatter's columns are those of indices of a sort, or
    of top-k: index 0 in column `first`, and so on, and the -1 in a column before them."""
    count = len(of_columns)
    between = []
    while columns.target in (*ADD, aten.clamp.default, aten._to_copy.default):
        if any(isinstance(x, fx.Node) and constant(x, record) is None for x in columns.args[1:]):
            return None
        between.append(columns)
        columns = operand(columns)
    side = side_of_where(columns, record)
    if side is None or side.constant >= 0 or not _unique(side.value):
        return None
    taken, if_not = side.condition, side.constant_if_true
    while taken.target in NOT:
        taken, if_not = operand(taken), not if_not
    if if_not or any(example(x).shape != example(columns).shape for x in (taken, side.value)):
        return None
    last = bounds(side.value, record)[1]
    numbers = x = torch.cat([torch.tensor([int(side.constant)]), torch.arange(last + 1)])
    for node in reversed(between):
        x = _at(node, x, record)
    if not torch.equal(x[1:], numbers[1:] + first) or not 0 <= int(x[0]) < first or first + last >= count:
        return None
    return columns, taken, side.value


def _at(node: fx.Node, x: Tensor, record: ScanRecord) -> Tensor:
    """An operator on other integers than those of its first operand."""
    others = [constant(a, record) if isinstance(a, fx.Node) else a for a in node.args[1:]]
    if node.target is aten._to_copy.default:
        return x.to(example(node).dtype)
    target: Any = node.target
    return target(x.to(example(operand(node)).dtype), *others, **node.kwargs)


def _unique(indices: Any) -> bool:
    """Whether no index comes twice in a row."""
    while indices.target in (aten.slice.Tensor, aten.detach.default) or _is_wide(indices):
        indices = indices.args[0]
    if indices.target is not operator.getitem or indices.args[1] != 1 or indices.args[0].target not in SORTED:
        return False
    how = arguments(indices.args[0])
    return how.dim % example(how.self).dim() == example(how.self).dim() - 1


def _is_wide(node: fx.Node) -> bool:
    """Whether a node is a cast to integers that hold every index there can be."""
    return node.target is aten._to_copy.default and example(node).dtype in (torch.int32, torch.int64)


def spread_over(
    condition: Condition, members: Members, shape: tuple[int, int, int], record: ScanRecord
) -> tuple[int, int, Tensor]:
    """A block's first index, tokens a block, and the row of each query `[N, m]`: token p of query r sees what is said
    of block `first + p // size` in that row.

    Raises:
        Unrecognised: it is not so.
    """
    nodes = example(members.node).shape
    numbers = condition.spread(torch.arange(nodes.numel()).reshape(nodes), record).reshape(shape)
    line, column = numbers // nodes[-1], members.columns[numbers % nodes[-1]]
    row = column[0, 0]
    first, size = int(row[0]), int((row == row[0]).sum())
    expected = first + torch.arange(shape[2]) // size
    if not torch.equal(column, expected.expand_as(column)) or not torch.equal(line, line[..., :1].expand_as(line)):
        raise Unrecognised("its block mask is not spread over the tokens in blocks of one size", members.node)
    return first, size, line[..., 0]
