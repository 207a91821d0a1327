"""Rows of a cache that a step picks by numbers that depend on data, such as those of a ranking, guarded one by one.

Before, `cache` is the buffer as step t sees it, which holds zeros in the rows that are not written yet:

    rows = gather(cache, index)                                  # [n, D] of [S, D]

After, the same rows, whatever the index:

    rows = masked_fill(gather(cache, index), gather(written_at, index) > t, 0)

So the guard stands where n rows are read, and the buffer needs none of S rows for each step. It hides what it has to
by `masked_fill`, whose gradient is an exact zero there: no proof that a mask hides these rows is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, fx

from nsa_compile.analyses.known import LIMIT
from nsa_compile.analyses.selection import position_node
from nsa_compile.ir.aten import COPIED, PICKED, REARRANGED, arguments, aten, operand
from nsa_compile.ir.rewriting import NodeBuilder, constant_node, inherit_meta
from nsa_compile.ir.scans import ScanRecord, example

__all__ = ["guard_picks", "take_back"]

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
        return steps.reshape(node.args[1])  # type: ignore[arg-type]
    target = node.target
    return target(steps, *node.args[1:], **node.kwargs)  # type: ignore[operator]


def _shrunk(steps: Tensor) -> Tensor:
    for dim in range(steps.dim()):
        first = steps.narrow(dim, 0, min(1, steps.shape[dim]))
        if bool((steps == first).all()):
            steps = first
    return steps


def _guarded(build: NodeBuilder, pick: fx.Node, steps: Tensor, step: fx.Node) -> fx.Node:
    """The pick with zeros for rows that are not written yet."""
    source, device = operand(pick), example(pick).device
    rest, shape = list(pick.args[1:]), list(example(source).shape)
    if pick.target is aten.gather.default and (index := _one_of_each(pick, steps)) is not None:
        dim = arguments(pick).dim % len(shape)
        rest[1] = index
        shape = [n if d == dim else m for d, (n, m) in enumerate(zip(shape, example(index).shape, strict=True))]
    written = build(aten.expand.default, constant_node(build, steps, device), shape)
    late = build(aten.gt.Tensor, build(pick.target, written, *rest), step)
    filled = build(aten.masked_fill.Scalar, pick, late, 0)
    for node in (written, late, filled):
        inherit_meta(node, pick)
    pick.replace_all_uses_with(filled, delete_user_cb=lambda user: user is not filled)
    return filled


def _one_of_each(pick: fx.Node, steps: Tensor) -> fx.Node | None:
    """The index of a gather without the dimensions along which it is repeated, and the steps are the same."""
    index = operand(pick, 2)
    if index.target is not aten.expand.default or example(operand(index)).dim() != example(index).dim():
        return None
    narrow = operand(index)
    sizes = zip(example(narrow).shape, example(index).shape, steps.shape, strict=True)
    dim = arguments(pick).dim % example(index).dim()
    fits = all(n == m or (n == 1 and k == 1) for d, (n, m, k) in enumerate(sizes) if d != dim)
    return narrow if fits else None
