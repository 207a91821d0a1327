"""vmap for the attention operators: the mapped dimension becomes a part of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import CustomOpDef

__all__ = ["register_batched"]


def register_batched(op: CustomOpDef, num_tensors: int) -> None:
    """Register vmap for `op`, whose first `num_tensors` arguments, all tensors, and whose outputs begin with B."""

    def batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[tuple, tuple[int, ...]]:
        size = info.batch_size
        tensors = [
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip(args[:num_tensors], in_dims, strict=False)
        ]
        batch = tensors[0].shape[1]
        outputs = op(*(x.flatten(0, 1) for x in tensors), *args[num_tensors:])
        return tuple(x.unflatten(0, (size, batch)) for x in outputs), (0,) * len(outputs)

    torch.library.register_vmap(op, batched)
