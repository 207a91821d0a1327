"""`nsa_compile::copied`: a copy that no compiler takes away.

What a compiled program returns may be written to before gradients are asked for, so it must not be what the backward
pass keeps. Inductor removes an `aten.clone` behind a view of a tensor that is kept (torch 2.13), and the gradients come
out wrong without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["COPIED"]


@torch.library.custom_op("nsa_compile::copied", mutates_args=())
def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_copied.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_copied.register_vmap
def _(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return COPIED(x), in_dims[0]


_copied.register_autograd(lambda ctx, gradient: gradient)

COPIED = torch.ops.nsa_compile.copied.default
