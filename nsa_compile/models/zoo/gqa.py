"""Grouped-query attention (arXiv 2305.13245), written as its decode step.

Each of `G` heads of keys and values serves `h = Hq / G` query heads; a token attends to itself and all before it:

    o_t = softmax(q_t K[:t]ᵀ / √D) V[:t]
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention


class GroupedQueryAttention(GroupedAttention):
    """Attention to all tokens, whatever `dense` computes by SDPA."""

    def seen(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        return (torch.arange(k.shape[1], device=k.device) <= t[..., None])[..., None, None, :]
