"""Selected blocks that outlive a checkpointed forward pass, so that its recomputation need not select again.

The choice of blocks is the dearest part of compressed attention at long sequences, and the smallest to keep: n numbers
for each query and group. The operator asks here when it runs, wherever it is called from; a policy of torch's selective
checkpointing would not see it inside a compiled block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["keep_selection", "select_once"]

Outputs = tuple[Tensor, Tensor, Tensor]
# The backward pass, and with it the recomputation, runs in a thread of its own on CUDA.
_current = threading.local()


class _Pass(AbstractContextManager["_Pass"]):
    """A forward pass or its recomputation: what the operators in it keep, or are given back, in their order.

    A recomputation is entered once more for every further backward pass through a graph that was retained.
    """

    def __init__(self, kept: list[Tensor | None], again: bool) -> None:
        self.kept, self.again = kept, again

    def __enter__(self) -> _Pass:
        self.place = 0
        self.outer = getattr(_current, "call", None)
        _current.call = self
        return self

    def __exit__(self, *_: Any) -> None:
        _current.call = self.outer


def keep_selection() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of the forward pass and of its recomputation."""
    kept: list[Tensor | None] = []
    return _Pass(kept, again=False), _Pass(kept, again=True)


def select_once(attend: Callable[[], tuple[Tensor, Tensor]], select: Callable[[], Outputs]) -> Outputs:
    """Output, log-sum-exp and indices of `select`, or, where the indices were kept, the first two of `attend`.

    A CUDA graph that is being recorded runs for more than one call, so nothing is kept or given back then.
    """
    call: _Pass | None = getattr(_current, "call", None)
    if call is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return select()
    place = call.place
    call.place += 1
    if not call.again:
        out, lse, indices = select()
        # A copy: the caller may write over what it was given once it has used it.
        call.kept.append(indices.clone())
        return out, lse, indices
    kept = call.kept[place] if place < len(call.kept) else None
    if kept is None:  # given back already, or the forward pass ran inside a CUDA graph
        return select()
    call.kept[place] = None
    return *attend(), kept
