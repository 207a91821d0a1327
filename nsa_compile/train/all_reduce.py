"""DDP's all-reduce of gradients: in few bytes, and observed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

COMPRESSED = {"bf16": torch.bfloat16, "fp16": torch.float16, "none": None}


@dataclass(frozen=True)
class Overlap:
    """When the gradients of one backward pass were sent.

    Attributes:
        first: when the first all-reduce started, as a fraction of the time from the start of the backward pass until
            the last gradient was there.
        exposed_s: seconds that the backward pass waited at its end for the all-reduces still under way.
        sent_bytes: size of the gradients as this process handed them over.
    """

    first: float
    exposed_s: float
    sent_bytes: int


class AllReduceHook:
    """A communication hook for DDP: the mean of the gradients over all processes.

    Runs on gloo and NCCL alike, where torch's own compression hooks take tensors on a GPU only. Times are those at
    which the backward pass hands buckets over: on a GPU that is when the work is queued, not when it is done.

    Args:
        compress: type in which gradients are sent, ``bf16``, ``fp16`` or ``none``. They are divided before they are
            added up, so that a sum in fp16 overflows no sooner than its mean.
        waiting: called when all gradients are there, and only the all-reduces are still under way.
    """

    def __init__(self, compress: str, waiting: Callable[[], None] = lambda: None) -> None:
        self.dtype = COMPRESSED[compress]
        self._waiting = waiting
        self._start = 0.0
        self._handed_over: list[float] = []
        self._bytes = 0

    def begin(self) -> None:
        """A backward pass that ends with an all-reduce starts now."""
        self._start = time.perf_counter()
        self._handed_over, self._bytes = [], 0

    def end(self) -> Overlap:
        """The backward pass is over."""
        end = time.perf_counter()
        first, last = self._handed_over[0], self._handed_over[-1]
        return Overlap((first - self._start) / (last - self._start), end - last, self._bytes)

    def __call__(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer()
        sent = gradients if self.dtype is None else gradients.to(self.dtype)
        sent.div_(dist.get_world_size(group))
        self._bytes += sent.nbytes
        self._handed_over.append(time.perf_counter())
        future = dist.all_reduce(sent, group=group, async_op=True).get_future()
        if bucket.is_last():
            self._waiting()

        def unpack(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            (total,) = done.value()
            return gradients if total is gradients else gradients.copy_(total)

        return future.then(unpack)
