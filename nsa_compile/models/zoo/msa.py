"""MiniMax sparse attention (MSA of MiniMax-M3, arXiv 2606.13392).

Keys lie in blocks of `B` tokens. An index branch has one query for each group of heads, one key for all, and scores a
block by its best token; the group attends to the tokens of the `k` best blocks, its own always among them:

    I[t, s] = q_I[t] · k_I[s] / √d_I        score of block j = max of I[t, s] over its tokens s ≤ t
    o_t = softmax over the tokens s ≤ t of the k best blocks (q_t · k_s / √D) v_s

A choice has no gradient. The index branch learns by the divergence of its softmax over the tokens attended from the
weights of attention, averaged over the heads of the group; its input is detached. q_I and k_I are normalised and
rotated, as in the released model.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.zoo.grouped import GroupedAttention, attend, put, rope
from nsa_compile.models.zoo.indexed import indexer_loss


class IndexedCache(NamedTuple):
    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, Dv]
    k_index: Tensor  # [B, S, d_I], the index branch's keys


class MSAttention(GroupedAttention):
    """Attention to the blocks of tokens that an index branch ranks best; sizes are an `MSAPattern`."""

    auxiliary = True

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        width = model.pattern.index_dim
        self.index_q = nn.Linear(model.dim, model.n_kv_heads * width, bias=False)
        self.index_k = nn.Linear(model.dim, width, bias=False)
        self.index_q_norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.index_k_norm = nn.RMSNorm(width, eps=model.norm_eps)

    def init_state(self, batch_size: int, max_len: int) -> IndexedCache:
        k, v = super().init_state(batch_size, max_len)
        return IndexedCache(k, v, k.new_zeros(batch_size, k.shape[1], self.config.pattern.index_dim))

    def step(self, state: IndexedCache, x: Tensor, t: Tensor) -> tuple[IndexedCache, Tensor, Tensor]:
        p, theta, groups = self.config.pattern, self.config.rope_theta, self.config.n_kv_heads
        q, k, v = self.append(state, x, t)
        q_index = rope(self.index_q_norm(self.index_q(x.detach()).unflatten(-1, (groups, -1))), t, theta)
        k_index = rope(self.index_k_norm(self.index_k(x.detach()))[:, None], t, theta)[:, 0]
        k_index = put(state.k_index, k_index, t)

        index = torch.einsum("bgd,bsd->bgs", q_index, k_index) * p.index_dim**-0.5
        past = (torch.arange(k.shape[1], device=x.device) <= t[..., None])[..., None, :]  # [1, S], or [B, 1, S]
        index = index.masked_fill(~past, -torch.inf)
        score = index.unflatten(-1, (-1, self.block)).amax(-1)  # [B, G, N]
        number, own = torch.arange(score.shape[-1], device=x.device), (t // self.block)[..., None, None]
        best = score.masked_fill(number == own, torch.inf).topk(min(p.num_selected, len(number))).indices
        chosen = torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)
        seen = chosen.repeat_interleave(self.block, -1) & past  # [B, G, S]

        o, weights = attend(q, k, v, seen[:, :, None])
        loss = indexer_loss(weights.mean(2), index, seen).mean(1)
        return IndexedCache(k, v, k_index), self.out(o.flatten(1)), loss
