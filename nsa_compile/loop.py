"""The one loop of the project: `scan(step, init, xs)`.

Eagerly it is a plain Python loop over the sequence: slow, readable, and what every compiled form is judged against.
Under `torch.compile` it becomes a single graph node with a body, whatever the sequence length, and the compiler's
passes take it from there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch.utils import _pytree as pytree

log = logging.getLogger("nsa_compile")

Carry = TypeVar("Carry")

__all__ = ["scan"]


def scan(step: Callable[[Carry, Any], tuple[Carry, Any]], init: Carry, xs: Any) -> tuple[Carry, Any]:
    """Run `step` over the leading dimension of `xs`, threading a carry through.

    Args:
        step: `step(carry, x) -> (carry, y)`. `carry` keeps its structure, shapes and dtypes; `x` is one row of `xs`;
            `y` is a tensor or a nested tuple, list or dict of tensors. Plain tensor operations, no data-dependent
            Python control flow.
        init: the first carry, a pytree of tensors.
        xs: a pytree of tensors of shape `[S, ...]`. The index of the step, where it is needed, is an input like any
            other: put `torch.arange(S)` into it.

    Returns:
        `(carry, ys)`: the carry after the last step, and the outputs stacked to `[S, ...]`.

    Raises:
        ValueError: `xs` holds no tensor, its leaves disagree on S, S is 0, a leaf is no tensor, or the step changes the
            carry's structure. Under `torch.compile`, where it is one too, it also says what cannot be captured.
    """
    _require_tensors("xs", xs)
    _require_tensors("init", init)
    length = _sequence_length(_tensors(xs))
    if not torch.compiler.is_dynamo_compiling():
        _say_if_left_uncompiled()
    elif _becomes_a_node():
        return _captured_scan(step, init, xs, length)
    return _loop(step, init, xs, length)


def _loop(step, init, xs, length):
    carry = init
    rows: list[list[torch.Tensor]] = []
    y_spec = None
    for t in range(length):
        carry, y = step(carry, _with_tensors(xs, [leaf[t] for leaf in _tensors(xs)]))
        leaves, y_spec = pytree.tree_flatten(y)
        if t == 0:
            _require_tensors("an output of the step", leaves, none=False)
        rows.append(leaves)
    carry = _in_order(init, carry)
    _check_carry(init, carry)
    assert y_spec is not None
    return carry, pytree.tree_unflatten([torch.stack(column) for column in zip(*rows, strict=True)], y_spec)


_said: set[str] = set()


def _say_if_left_uncompiled() -> None:
    """Warn, once a place, of a loop that runs within a compiled function.

    Without `fullgraph=True`, torch runs a function as it is where it cannot compile it or has compiled it too often.
    """
    if "torch._dynamo" not in sys.modules or not torch._C._dynamo.eval_frame.get_eval_frame_callback():
        return
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if place not in _said:
        _said.add(place)
        log.warning("scan at %s runs step by step, as torch.compile left it uncompiled; fullgraph=True says why", place)


def _sequence_length(leaves: list[torch.Tensor]) -> int:
    if not leaves:
        _refuse("scan: xs holds no tensor, so the number of steps is unknown; put torch.arange(S) into it")
    lengths = [leaf.shape[0] if leaf.dim() else -1 for leaf in leaves]
    if -1 in lengths or len(set(lengths)) != 1:
        _refuse(f"scan: every leaf of xs needs the sequence as its first dimension, got lengths {lengths}")
    if lengths[0] == 0:
        _refuse("scan: xs have length 0 and the outputs of no step have no shape; pass at least one row")
    return lengths[0]


def _require_tensors(what: str, tree: Any, *, none: bool = True) -> None:
    for leaf in pytree.tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor) and not (leaf is None and none):
            _refuse(f"scan: {what} holds something that is no tensor; make it one, as torch.tensor(0) is of 0")


def _refuse(message: str) -> NoReturn:
    if torch.compiler.is_dynamo_compiling():
        _refuse_capture(message)
    raise ValueError(message)


def _tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors of a pytree. None marks what is absent: it stays in its place and takes no part."""
    return [leaf for leaf in pytree.tree_leaves(tree) if leaf is not None]


def _with_tensors(tree: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A pytree like `tree` that holds other tensors."""
    leaves, spec = pytree.tree_flatten(tree)
    rest = list(tensors)
    return pytree.tree_unflatten([None if leaf is None else rest.pop(0) for leaf in leaves], spec)


def _in_order(like: Any, tree: Any) -> Any:
    """A carry with its keys in the order of another's: a step may write them down in any."""
    if type(like) is dict and type(tree) is dict and like.keys() == tree.keys():
        return {key: _in_order(like[key], tree[key]) for key in like}
    if type(like) is type(tree) and type(like) in (list, tuple) and len(like) == len(tree):
        return type(like)([_in_order(a, b) for a, b in zip(like, tree, strict=True)])
    return tree


def _check_structure(init: Any, carry: Any) -> None:
    _require_tensors("the carry that the step returns", carry)
    if pytree.tree_structure(init) != pytree.tree_structure(carry) or _absent(init) != _absent(carry):
        _refuse("scan: the step returned a carry of another structure than it was given; a carry keeps its keys, "
                "its length and what is None")  # fmt: skip


def _absent(tree: Any) -> list[bool]:
    return [leaf is None for leaf in pytree.tree_leaves(tree)]


def _check_carry(init: Any, carry: Any) -> None:
    _check_structure(init, carry)
    for i, (a, b) in enumerate(zip(_tensors(init), _tensors(carry), strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(
                f"scan: the step changed carry leaf {i} from {a.dtype}{list(a.shape)} to {b.dtype}{list(b.shape)}; "
                "a carry keeps its shape and dtype"
            )


# Dynamo runs these two while it traces, and takes what they return for a constant. The mark is that of
# `torch.compiler.assume_constant_result`, which would import all of Dynamo with the package.


def _becomes_a_node() -> bool:
    """Whether the loop becomes one node of the graph under capture; where it does not, it is unrolled.

    Raises:
        ScanRefused: the graph is for a backend that would leave the node to torch.
    """
    from nsa_compile.workarounds import becomes_a_node, mend_dynamo

    mend_dynamo()

    for function in (_captured_scan, _say_if_left_uncompiled):  # run for themselves, they are run as they are
        torch._dynamo.eval_frame.skip_code(function.__code__)
    return becomes_a_node()


def _refuse_capture(message: str) -> None:
    from nsa_compile.workarounds import ScanRefused

    raise ScanRefused(message)


_becomes_a_node._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_capture._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _captured_scan(step, init, xs, length):
    """The same loop as one `scan` node.

    The higher-order operator takes carries and inputs as plain lists, one carry at least, and refuses outputs that
    alias its inputs, so the structure is taken apart here and every output cloned; the passes drop the clones again.
    """
    if not torch.compiler.is_dynamo_compiling():
        # Dynamo broke the graph in here and calls it as it is: torch's own loop must not run then.
        _say_if_left_uncompiled()
        return _loop(step, init, xs, length)
    from torch._higher_order_ops.scan import scan as scan_op

    tensors = _tensors(xs)
    first = _tensors(init) or [torch.zeros((), device=tensors[0].device)]
    stateless = not _tensors(init)
    # The body must not touch the outer tensors, or it would take them as inputs: give it their structure alone.
    carry_like, x_like = (pytree.tree_map(lambda leaf: None if leaf is None else 0, tree) for tree in (init, xs))

    def flat_step(carry_flat, x_flat):
        carry, y = step(_with_tensors(carry_like, carry_flat), _with_tensors(x_like, x_flat))
        carry = _in_order(carry_like, carry)
        _check_structure(carry_like, carry)
        _require_tensors("an output of the step", y, none=False)
        return [_own(leaf) for leaf in (carry_flat if stateless else _tensors(carry))], pytree.tree_map(_own, y)

    carry, ys = scan_op(flat_step, [_own(leaf) for leaf in first], tensors)
    return _with_tensors(carry_like, carry), ys


def _own(x: torch.Tensor) -> torch.Tensor:
    """A copy in the standard layout: a carry must keep its strides from step to step."""
    return x.clone(memory_format=torch.contiguous_format)
