"""The one loop of the project: `scan(step, init, xs)`.

Eagerly it is a plain Python loop over the sequence: slow, readable, and what every compiled form is judged against.
Under `torch.compile` it becomes a single graph node with a body, whatever the sequence length, and the compiler's
passes take it from there.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch

from nsa_compile.trees import Structure, leaves_like, put_together, taken_apart

log = logging.getLogger("nsa_compile")

Carry = TypeVar("Carry")

__all__ = ["scan"]


def scan(step: Callable[[Carry, Any], tuple[Carry, Any]], init: Carry, xs: Any) -> tuple[Carry, Any]:
    """Run `step` over the leading dimension of `xs`, threading a carry through.

    Args:
        step: `step(carry, x) -> (carry, y)`. `carry` keeps its structure, shapes and dtypes, and each step finds its
            keys in the order of `init`; `x` is one row of `xs`; `y` is a tensor or a nested tuple, list or dict of
            tensors. Plain tensor operations, no data-dependent Python control flow.
        init: the first carry, a pytree of tensors.
        xs: a pytree of tensors of shape `[S, ...]`. The index of the step, where it is needed, is an input like any
            other: put `torch.arange(S)` into it.

    Returns:
        `(carry, ys)`: the carry after the last step, and the outputs stacked to `[S, ...]`.

    Raises:
        ValueError: `xs` holds no tensor, its leaves disagree on S, S is 0, a leaf is no tensor, or the step changes the
            carry's structure. Under `torch.compile`, where it is one too, it also says what cannot be captured.
    """
    if not torch.compiler.is_dynamo_compiling():
        _say_if_left_uncompiled()
    elif _becomes_a_node():
        return _captured_scan(step, init, xs)
    return _loop(step, init, xs)


def _loop(step, init, xs):
    first, state, inputs, row = _arguments(init, xs)
    carry = init
    rows: list[list[torch.Tensor]] = []
    structure = None
    for t in range(inputs[0].shape[0]):
        carry, y = step(carry, put_together([leaf[t] for leaf in inputs], row))
        # As the next step finds it compiled: with the keys of a dict in the order of the first.
        last = _carry_like(state, carry)
        carry = put_together(last, state)
        leaves, structure = taken_apart(y, none_is_a_leaf=True)
        if t == 0:
            _require_tensors(_AN_OUTPUT, leaves)
        rows.append(leaves)
    _check_carry(first, last)
    ys = [torch.stack(column) for column in zip(*rows, strict=True)]
    return put_together(last, state), put_together(ys, structure)


def _arguments(init, xs):
    first, state = _tensors("init", init)
    inputs, row = _tensors("xs", xs)
    _require_rows(inputs)
    return first, state, inputs, row


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


def _require_rows(leaves: list[torch.Tensor]) -> None:
    if not leaves:
        _refuse("scan: xs holds no tensor, so the number of steps is unknown; put torch.arange(S) into it")
    lengths = [leaf.shape[0] if leaf.dim() else -1 for leaf in leaves]
    if -1 in lengths or lengths != lengths[:1] * len(lengths):
        _refuse(f"scan: every leaf of xs needs the sequence as its first dimension, got lengths {lengths}")
    if lengths[0] == 0:
        _refuse("scan: xs have length 0 and the outputs of no step have no shape; pass at least one row")


_AN_OUTPUT = "an output of the step"


def _require_tensors(what: str, leaves: list[Any]) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            _refuse(f"scan: {what} holds a value of type {type(leaf).__name__}, not a tensor; make a number one, as "
                    "torch.tensor(0) is of 0, and a class of your own a tuple or dict of tensors")  # fmt: skip


def _refuse(message: str) -> NoReturn:
    if torch.compiler.is_dynamo_compiling():
        _refuse_capture(message)
    raise ValueError(message)


def _tensors(what: str, tree: Any) -> tuple[list[torch.Tensor], Structure]:
    """The tensors of a pytree, and its structure. None marks what is absent: it stays and takes no part."""
    tensors, structure = taken_apart(tree)
    _require_tensors(what, tensors)
    return tensors, structure


def _carry_like(state: Structure, carry: Any) -> list[torch.Tensor]:
    """The tensors of a carry that has the structure of the first one, which is `state`."""
    tensors = leaves_like(state, carry)
    if tensors is None:
        _tensors("the carry that the step returns", carry)
        _refuse("scan: the step returned a carry of another structure than it was given; a carry keeps its keys, "
                "its length and what is None")  # fmt: skip
    return tensors


def _check_carry(first: list[torch.Tensor], last: list[torch.Tensor]) -> None:
    for i, (a, b) in enumerate(zip(first, last, strict=True)):
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
    from nsa_compile.capture import mend_dynamo
    from nsa_compile.capture.refusals import becomes_a_node

    mend_dynamo()

    for function in (_captured_scan, _say_if_left_uncompiled):  # run for themselves, they are run as they are
        torch._dynamo.eval_frame.skip_code(function.__code__)
    return becomes_a_node()


def _refuse_capture(message: str) -> None:
    from nsa_compile.capture.refusals import ScanRefused

    raise ScanRefused(message)


_becomes_a_node._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]
_refuse_capture._dynamo_marked_constant = True  # pyrefly: ignore[missing-attribute]


def _captured_scan(step, init, xs):
    """The same loop as one node of torch's `scan` operator.

    The operator takes carries and inputs as plain lists, one carry at least, and refuses outputs that alias its
    inputs, so every output is cloned; the passes drop the clones again. It is called without the function of torch
    around it: Dynamo takes longer to trace that than to trace a step.
    """
    if not torch.compiler.is_dynamo_compiling():
        # Dynamo broke the graph in here and calls it as it is: torch's own loop must not run then.
        _say_if_left_uncompiled()
        return _loop(step, init, xs)
    from torch._higher_order_ops.scan import scan_op

    first, state, inputs, row = _arguments(init, xs)
    n = len(first)

    def flat_step(*tensors):
        # The body must not touch the outer tensors, or it would take them as inputs: their structure has none.
        carry, y = step(put_together(tensors[:n], state), put_together(tensors[n:] if n else tensors[1:], row))
        flat = _carry_like(state, carry)
        rows, structure = taken_apart(y, none_is_a_leaf=True)
        _require_tensors(_AN_OUTPUT, rows)
        ys = put_together([_own(leaf) for leaf in rows], structure)
        return [_own(leaf) for leaf in flat or tensors[:1]], ys

    start = [_own(leaf) for leaf in first or [torch.zeros((), device=inputs[0].device)]]
    combine = functools.partial(_called, combine_fn=flat_step)  # the form that Dynamo asks for
    last, ys = scan_op(combine, start, inputs, additional_inputs=())
    return put_together(last, state), ys


def _called(*tensors, combine_fn):
    return combine_fn(*tensors)


def _own(x: torch.Tensor) -> torch.Tensor:
    """A copy in the standard layout: a carry must keep its strides from step to step."""
    return x.clone(memory_format=torch.contiguous_format)
