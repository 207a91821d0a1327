"""Who lies in the same memory. Two storages may be one piece of it, as those of two calls of `torch.from_numpy`, and an
array may show it, too."""

from __future__ import annotations

import array
import ctypes
import itertools
from collections.abc import Collection, Iterable
from typing import Any

import numpy
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

__all__ = ["ARRAYS", "memories", "memory", "overlaps_itself", "share_memory", "written_by"]

ARRAYS = (numpy.ndarray, bytearray, array.array, memoryview, ctypes._SimpleCData)


def memory(x: Tensor) -> int:
    """What two tensors have in common if one is a view of the other."""
    return x.untyped_storage()._cdata


def written_by(func: OpOverload, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors an operator writes to, by its schema."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    return found


def memories(values: Iterable[Any]) -> list[int]:
    """A number for each tensor or array, which those have in common whose memory is in one piece; numbered by who comes
    first."""
    spans = [(*_span(x), i) for i, x in enumerate(values)]
    joined = [0] * len(spans)  # the first of those in one piece, by place
    of, reach, first = "", 0, 0
    for device, start, stop, i in sorted(spans):
        if start >= reach or device != of:
            of, reach, first = device, stop, i
        elif stop > reach:
            reach = stop
        joined[i] = first
    numbers: dict[int, int] = {}
    return [numbers.setdefault(first, len(numbers)) for first in joined]


def share_memory(x: Tensor, others: Collection[Any]) -> list[int]:
    """The places among tensors and arrays of those whose memory is in one piece with that of `x`."""
    own, *found = memories([x, *others])
    return [i for i, number in enumerate(found) if number == own]


def overlaps_itself(x: Tensor) -> bool:
    """Whether two elements may be one, as those of an expanded tensor or of `x.unfold(…)`."""
    dims = sorted((step, n) for n, step in zip(x.shape, x.stride(), strict=True) if n > 1)
    ends = itertools.accumulate((n - 1) * step for step, n in dims)
    return x.numel() > 0 and any(step <= end for (step, _), end in zip(dims, (0, *ends), strict=False))


def _span(x: Any) -> tuple[str, int, int]:
    """Where the memory of a tensor or an array begins and ends; a piece of its own for what has no address."""
    if not isinstance(x, Tensor):
        found: Any = numpy.frombuffer(x, numpy.uint8) if isinstance(x, _BYTES) else numpy.asarray(x)
        steps = [(n - 1) * step for n, step in zip(found.shape, found.strides, strict=True)] if found.size else []
        start = int(found.__array_interface__["data"][0])
        return "cpu", start + sum(min(s, 0) for s in steps), start + sum(max(s, 0) for s in steps) + found.itemsize
    storage = x.untyped_storage()
    try:
        start = 0 if x.is_meta else storage.data_ptr()
    except RuntimeError:  # of a stand-in without memory
        start = 0
    if not start:
        return "none", storage._cdata, storage._cdata + 1
    return "cpu" if x.is_cpu else str(x.device), start, start + storage.nbytes()


_BYTES: Any = (bytearray, ctypes._SimpleCData)
