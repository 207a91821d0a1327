"""Workarounds for defects of torch, each with its cause, its scope and the versions it is for."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class HonestBatchNorm(TorchFunctionMode):
    """Batch normalization by the operators that say what they write.

    `native_batch_norm` and its kin update the running statistics, and their schemas do not say so (torch 2.13).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (names := self._ARGUMENTS.get(func)) is not None:
            given = {"momentum": 0.1, "eps": 1e-5, **dict(zip(names, args, strict=False)), **(kwargs or {})}
            inputs: list[Any] = [given.get(name) for name in ("input", "weight", "bias", "running_mean", "running_var")]
            empty = inputs[0].numel() == 0  # changes no statistics, and the operator refuses it
            if given.get("training") and inputs[3] is not None and inputs[4] is not None and not empty:
                numbers = (True, given["momentum"], given["eps"])
                return torch.ops.aten._native_batch_norm_legit.default(*inputs, *numbers)[0]
        return func(*args, **(kwargs or {}))

    _ARGUMENTS: ClassVar[dict[Any, tuple[str, ...]]] = {
        F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
    }


# `x.data` in a captured graph. Traced as it is, it leaves no node behind, and gradients flow through (torch 2.13).
DATA = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]


@cache
def let_inductor_read_what_was_written() -> None:
    """Keep the order of a write and its reader where Inductor lays out the reader's loops anew to fuse them on the CPU.

    It takes down what the reader reads again, by the name that the tensor had before it was written to, unless the
    reader is tied to another kernel as well. The reader may then run first: the gradient of rows taken from a
    concatenation by `index_select` came out without what the rows add to it (torch 2.13).
    """
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    def recompute(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute  # type: ignore[method-assign]
