"""DDP's all-reduce of gradients: compressed, and timed."""

# No postponed annotations here: DDP compares those of a hook with the types themselves.
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
        sent_bytes: size of the gradients as this process handed them over.
    """

    first: float
    sent_bytes: int


class AllReduceHook:
    """A communication hook for DDP: the mean of the gradients over all processes.

    Runs on gloo and NCCL alike, where torch's own compression hooks take tensors on a GPU only. Times are those at
    which the backward pass hands buckets over: on a GPU that is when the work is queued, not when it is done.

    Args:
        compress: type in which gradients are sent, ``bf16``, ``fp16`` or ``none``. They are divided before they are
            added up, so that a sum in fp16 overflows no sooner than its mean.
        on_last: called when the last gradients have been handed over: from then on the backward pass only waits.
    """

    def __init__(self, compress: str, on_last: Callable[[], None] = lambda: None) -> None:
        self.dtype = COMPRESSED[compress]
        self._on_last = on_last
        self._start = 0.0
        self._handed_over: list[float] = []
        self._bytes = 0

    def begin(self) -> None:
        """A backward pass that ends with an all-reduce starts now."""
        self._start = time.perf_counter()
        self._handed_over, self._bytes = [], 0

    def end(self) -> Overlap:
        """The backward pass is over."""
        first, last = self._handed_over[0], self._handed_over[-1]
        return Overlap((first - self._start) / (last - self._start), self._bytes)

    def reduce(self, group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """What DDP calls when all gradients of a bucket are there."""
        gradients = bucket.buffer()
        sent = gradients if self.dtype is None else gradients.to(self.dtype)
        sent.div_(dist.get_world_size(group))
        self._bytes += sent.nbytes
        self._handed_over.append(time.perf_counter())
        future = dist.all_reduce(sent, group=group, async_op=True).get_future()
        if bucket.is_last():
            self._on_last()

        def unpack(done: torch.futures.Future[list[Tensor]]) -> Tensor:
            (total,) = done.value()
            return gradients if total is gradients else gradients.copy_(total)

        return future.then(unpack)
