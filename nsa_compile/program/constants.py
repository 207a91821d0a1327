"""Tensors that a program holds, not those that it is given: constants, as long as nothing writes to them.

Positions and masks are often made once: as a buffer of a module, or outside the compiled function. For Dynamo they are
inputs like any others. Here their values are marked on these inputs, so that the passes know them, and each call first
sees whether the program still holds what it was compiled for. Where it does not, the program is compiled once more,
with what has changed as data.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.source import GlobalSource, LocalSource
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from nsa_compile.analyses.magnitudes import floor_level
from nsa_compile.ir.scans import VALUE, WRITTEN, ancestors, find_scans

log = logging.getLogger("nsa_compile")

__all__ = ["Guarded", "mark_constants", "mark_pattern", "marked"]

# Elements of a tensor that is taken for a constant.
LIMIT = 2**26
# An input's name in the program, where Dynamo knows none.
NAME = "nsa_name"


@dataclass
class Held:
    """A tensor that a program holds: which input it is, its name in the program, and its value when compiled."""

    place: int
    name: str
    value: Tensor
    by_pattern: bool  # an input of a loop, taken for what the program makes itself because of its numbers
    # Tensors that were seen to have this value, and their version and memory then.
    seen: WeakIdKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def is_what(self, x: Tensor) -> bool:
        """Whether a tensor has this value. Of one on a device, which would have to be waited for, and which was seen
        before: whether it was written to since; a write through `.data` is not seen then."""
        mark = None if x.is_inference() or x.device.type == "cpu" else (x._version, x.data_ptr())
        if mark is not None and self.seen.get(x) == mark:
            return True
        if x.shape != self.value.shape or x.dtype != self.value.dtype or not torch.equal(x.detach().cpu(), self.value):
            return False
        self.seen[x] = mark
        return True


def mark_constants(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Mark the values of integers, booleans, and masks of zeros and floors that a program holds and scans read."""
    inputs = gm.graph.find_nodes(op="placeholder")
    read = ancestors([x for site in find_scans(gm) if site.owner is gm for x in site.node.all_input_nodes])
    for node, value in zip(inputs, example_inputs, strict=True):
        if node in read and _is_held(node) and _says_something(value):
            node.meta[VALUE] = value.detach().cpu().clone()


_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def mark_pattern(node: fx.Node, name: str, value: Any) -> None:
    """Mark the value of an input that is made in one way, most likely: positions one after the other, or an identity or
    a mask, in which an element depends on its distance from the diagonal. Other numbers may be data."""
    if _is_plain(value) and value.dtype in {torch.bool, *_INTEGERS, *_FLOATS}:
        x = value.detach().cpu()
        if _is_pattern(x.squeeze()):
            node.meta[VALUE], node.meta[NAME] = x.clone(), name


def _is_pattern(x: Tensor) -> bool:
    if x.dim() == 1 and len(x) > 1 and x.dtype in _INTEGERS:
        steps = x.long().diff()
        return bool((steps == steps[0]).all()) and bool(steps[0] != 0)
    if x.dim() != 2 or min(x.shape) < 2 or not torch.equal(x[1:, 1:], x[:-1, :-1]) or bool((x == x[0, 0]).all()):
        return False
    return x.dtype not in _FLOATS or _says_something(x) or torch.equal(x, torch.eye(*x.shape, dtype=x.dtype))


def marked(gm: fx.GraphModule, written: Sequence[int]) -> list[Held]:
    """The inputs that are marked, but for those that the program writes to, which are marked no longer."""
    found = []
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if WRITTEN in node.meta or place in written:
            node.meta.pop(VALUE, None)
        elif VALUE in node.meta:
            source = getattr(node, "_dynamo_source", None)
            name = node.meta.get(NAME, node.name) if source is None else _as_written(str(source.name))
            found.append(Held(place, name, node.meta[VALUE], NAME in node.meta))
    return found


def _is_held(node: fx.Node) -> bool:
    """Whether an input is an attribute of a module, a global, or a variable of an outer function."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        return False
    if source.guard_source.is_unspecialized_nn_module() or source.guard_source.is_specialized_nn_module():
        return True
    while hasattr(source, "base"):
        source = source.base
    return isinstance(source, GlobalSource) or (isinstance(source, LocalSource) and not source.is_input)


def _as_written(name: str) -> str:
    """Dynamo's name of a tensor, `G['mask']`, `L['self']._buffers['mask']`, as its author would write it."""
    name = re.sub(r"^[GL]\['(\w+)'\]", r"\1", name)
    return re.sub(r"\._(?:buffers|parameters|modules)\['(\w+)'\]", r".\1", name)


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor of numbers that may be constant."""
    plain = type(value) in (Tensor, torch.nn.Buffer) and not isinstance(value, FakeTensor)
    if not plain or value.requires_grad or value.layout != torch.strided or not 0 < value.numel() <= LIMIT:
        return False
    return not (value.is_meta or value.is_quantized or value.dtype.is_complex)


def _says_something(value: Any) -> bool:
    if not _is_plain(value):
        return False
    if not value.dtype.is_floating_point:
        return True
    is_low = value <= floor_level(value.dtype)
    return bool(is_low.any()) and bool((is_low | (value == 0)).all())


class Guarded:
    """A compiled program, run as long as it holds what it was compiled for.

    Args:
        run: the program.
        held: what it was compiled for.
        compile_again: compiles it without the values of some inputs, for the inputs of a call.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        held: list[Held],
        compile_again: Callable[[set[int], Sequence[Any]], Callable[..., Any]],
    ) -> None:
        self.run, self.held, self.compile_again = run, held, compile_again
        self.other: Callable[..., Any] | None = None  # without the values of what has changed

    def __call__(self, *inputs: Any) -> Any:
        changed = [held for held in self.held if not held.is_what(inputs[held.place])]
        if not changed:
            return self.run(*inputs)
        if self.other is None:
            log.warning(
                "%s changed since the %s was compiled for %s, so it is compiled once more, with that as data%s",
                " and ".join(held.name for held in changed),
                "loop" if changed[0].by_pattern else "function",
                "its value" if len(changed) == 1 else "their values",
                "" if changed[0].by_pattern else "; give what changes to the function as an argument",
            )
            self.other = self.compile_again({held.place for held in changed}, inputs)
        return self.other(*inputs)
