"""Rows of a cache that a step picks by numbers that depend on data, such as those of a ranking, guarded one by one.

Before, `cache` is the buffer as step t sees it, which holds zeros in the rows that are not written yet:

    rows = gather(cache, index)                                  # [n, D] of [S, D]

After, the same rows, whatever the index:

    index = masked_fill(index, written_at[index] > t, S)
    rows  = gather(pad(cache, one row of zeros), index)

So the guard stands where n rows are read, and the buffer needs none of S rows for each step. The zeros get the gradient
of what is not written yet, and nobody reads it: no proof that a mask hides these rows is asked for. Where rows of one
pick are written at several steps, as those of blocks are, they are set to zero by `masked_fill`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from nsa_compile.analyses.known import LIMIT
from nsa_compile.analyses.selection import position_node
from nsa_compile.ir.aten import COPIED, PICKED, REARRANGED, arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder, constant_node
from nsa_compile.ir.scans import ScanRecord, example

__all__ = ["guard_picks", "take_back"]

_ALONG = {aten.gather.default, aten.index_select.default}

View = tuple[fx.Node, Tensor, int]  # node, step from which each row is written, dimension of the rows


def guard_picks(body: fx.GraphModule, record: ScanRecord, views: Mapping[str, View]) -> dict[fx.Node, fx.Node]:
    """Guard what a step picks by data from views of buffers that hold zeros at first.

    Returns:
        Of each pick the node that has taken its place; it is in `record.guarded_picks` as well.
    """
    step = position_node(body, record)
    if step is None:
        return {}
    guarded = {}
    for node, ready, dim in views.values():
        shape = [1] * example(node).dim()
        shape[dim] = len(ready)
        for pick, steps in _picks(node, ready.reshape(shape), record).items():
            guarded[pick] = _guarded(NodeBuilder(body, pick.next), pick, steps, step)
    record.guarded_picks |= set(guarded.values())
    return guarded


def take_back(guarded: Mapping[fx.Node, fx.Node], record: ScanRecord) -> None:
    """Let the picks stand as they did; what has been added to the body is left to be eliminated as dead code."""
    for pick, filled in guarded.items():
        filled.replace_all_uses_with(pick)
    record.guarded_picks -= set(guarded.values())


def _picks(view: fx.Node, ready: Tensor, record: ScanRecord) -> dict[fx.Node, Tensor]:
    """What is picked by data from a view, or from what its elements are moved to; with the steps from which each
    element of that is written, in its layout, of size 1 where all agree."""
    found = {}
    todo = [(view, ready)]
    while todo:
        node, steps = todo.pop()
        for user in node.users:
            if node.meta["val"].numel() > LIMIT or operand(user) is not node:
                continue
            if user.target in REARRANGED | COPIED:
                todo.append((user, _shrunk(_moved(user, steps.expand(example(node).shape)))))
            elif user.target in PICKED and not all(_is_known(n, record) for n in user.all_input_nodes[1:]):
                found[user] = steps
    return found


def _is_known(node: fx.Node, record: ScanRecord) -> bool:
    return node in record.known or node in record.constant


def _moved(node: fx.Node, steps: Tensor) -> Tensor:
    if node.target in COPIED:
        return steps
    if node.target in (aten.view.default, aten._unsafe_view.default):
        return steps.reshape(node.args[1])  # pyrefly: ignore[no-matching-overload]
    target = node.target
    return target(steps, *node.args[1:], **node.kwargs)  # pyrefly: ignore[not-callable]


def _shrunk(steps: Tensor) -> Tensor:
    for dim in range(steps.dim()):
        first = steps.narrow(dim, 0, min(1, steps.shape[dim]))
        if bool((steps == first).all()):
            steps = first
    return steps


def _guarded(build: NodeBuilder, pick: fx.Node, steps: Tensor, step: fx.Node) -> fx.Node:
    """The pick with zeros for rows that are not written yet."""
    source = operand(pick)
    dim = arguments(pick).dim % example(source).dim() if pick.target in _ALONG else 0
    if pick.target in _ALONG and all(n == 1 for d, n in enumerate(steps.shape) if d != dim):
        filled = _redirected(build, pick, steps.flatten().expand(example(source).shape[dim]), step, dim)
    else:
        written = build(aten.expand.default, constant_node(build, steps, build.device), list(example(source).shape))
        late = build(aten.gt.Tensor, build(pick.target, written, *pick.args[1:]), step)
        filled = build(aten.masked_fill.Scalar, pick, late, 0)
    pick.replace_all_uses_with(filled, delete_user_cb=lambda user: user is not filled)
    return filled


def _redirected(build: NodeBuilder, pick: fx.Node, steps: Tensor, step: fx.Node, dim: int) -> fx.Node:
    """The pick from the buffer with a row of zeros behind it, which takes the place of each row not written yet."""
    source, index = operand(pick), arguments(pick).index
    rank, shape = example(source).dim(), list(example(index).shape)
    narrow = operand(index) if index.target is aten.expand.default else index
    if example(narrow).dim() != len(shape):
        narrow = index
    with_zeros = build(aten.constant_pad_nd.default, source, [0, 0] * (rank - 1 - dim) + [0, 1], 0)
    flat = build(aten.reshape.default, narrow, [-1])
    written = build(aten.index_select.default, constant_node(build, steps, build.device), 0, flat)
    late = build(aten.reshape.default, build(aten.gt.Tensor, written, step), list(example(narrow).shape))
    index = build(aten.masked_fill.Scalar, narrow, late, len(steps))
    return build(pick.target, with_zeros, dim, build(aten.expand.default, index, shape))
