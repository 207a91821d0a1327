"""Grouped-query attention (arXiv 2305.13245), written as its decode step.

Each of `G` heads of keys and values serves `h = Hq / G` query heads; a token attends to itself and all before it:

    o_t = softmax(q_t K[:t]ᵀ / √D) V[:t]
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention, KVCache, attend, put


class GroupedQueryAttention(GroupedAttention):
    """Attention to all tokens, whatever `dense` computes by SDPA."""

    def step(self, state: KVCache, x: Tensor, t: Tensor) -> tuple[KVCache, Tensor]:
        q, k, v = self.project(x, t)
        k, v = put(state.k, k, t), put(state.v, v, t)
        seen = torch.arange(k.shape[1], device=x.device) <= t[..., None]
        return KVCache(k, v), self.out(attend(q, k, v, seen[..., None, None, :]).flatten(1))
