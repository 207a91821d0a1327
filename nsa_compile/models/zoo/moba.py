"""MoBA, mixture of block attention (arXiv 2502.13189).

Keys and values are cut into blocks of `B` tokens. Each query head scores a block by its product with the mean of the
block's keys and attends to the tokens of the `k` best (eq. 2 to 5):

    s_i = ⟨q, mean(K[I_i])⟩        g_i = 1 if s_i is among the k highest, else 0
    MoBA(q, K, V) = softmax(q K[I]ᵀ) V[I]        I = ∪ of I_i with g_i = 1

Blocks after the query's own have s_i = −∞; its own is always taken, up to the query itself, and counts towards k
(section 2.2). There are no parameters beside those of attention, and no gradient goes through g.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention


class MoBAttention(GroupedAttention):
    """Attention to the blocks of tokens whose mean keys suit a query best; sizes are a `MoBAPattern`."""

    def seen(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        means = k.unflatten(1, (-1, self.block)).mean(2)  # [B, N, G, D]
        return self.in_best_blocks(torch.einsum("bghd,bngd->bghn", q, means), k, t)
