"""Qwen sparse attention (QSA of Qwen3.8-Flash-Next), as its released code has it; there is no paper.

The indexer's keys are means over `c` tokens, made when a block of them is complete; a query sees its best blocks:

    k_I[j] = RoPE(RMSNorm(mean of W_K h_s over the c tokens s of block j)), rotated as its first token
    score of block j = Σ_i ReLU(q_I[t, i] · k_I[j]) / √d_I        for the blocks complete at t
    o_t = softmax over the tokens of the k best blocks, and of the block that is not yet complete (q_t · k_s / √D) v_s

The released code does not train the indexer. Here it learns as that of DSA does (arXiv 2512.02556, eq. 4), by blocks:
the divergence of the softmax of its scores from the weights of attention, summed over heads and tokens of a block, over
the chosen blocks; its input is detached.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.zoo.grouped import GroupedAttention, attend, rope
from nsa_compile.models.zoo.indexed import first_best, indexer_loss


class PooledCache(NamedTuple):
    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, Dv]
    recent: Tensor  # [B, c, d_I], what the last c tokens bring to a key of the indexer
    k_index: Tensor  # [B, N, d_I], the indexer's keys of complete blocks


class QSAttention(GroupedAttention):
    """Attention to the blocks of tokens that an indexer chooses; sizes are a `QSAPattern`."""

    auxiliary = True

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        p = model.pattern
        self.index_q = nn.Linear(model.dim, p.index_heads * p.index_dim, bias=False)
        self.index_k = nn.Linear(model.dim, p.index_dim, bias=False)
        self.index_q_norm = nn.RMSNorm(p.index_dim, eps=model.norm_eps)
        self.index_k_norm = nn.RMSNorm(p.index_dim, eps=model.norm_eps)

    def init_state(self, batch_size: int, max_len: int) -> PooledCache:
        k, v = super().init_state(batch_size, max_len)
        width = self.config.pattern.index_dim
        recent, k_index = (k.new_zeros(batch_size, rows, width) for rows in (self.block, k.shape[1] // self.block))
        return PooledCache(k, v, recent, k_index)

    def step(self, state: PooledCache, x: Tensor, t: Tensor) -> tuple[PooledCache, Tensor, Tensor]:
        p, theta, each = self.config.pattern, self.config.rope_theta, t[..., None]
        q, k, v = self.append(state, x, t)
        q_index = rope(self.index_q_norm(self.index_q(x.detach()).unflatten(-1, (p.index_heads, -1))), t, theta)
        recent = torch.cat([state.recent[:, 1:], self.index_k(x.detach())[:, None]], dim=1)
        pooled = rope(self.index_k_norm(recent.mean(1))[:, None], t - (self.block - 1), theta)
        last = torch.arange(state.k_index.shape[1], device=x.device) * self.block + self.block - 1  # of each block
        k_index = torch.where((last == each)[..., None], pooled, state.k_index)

        index = torch.einsum("bjd,bnd->bjn", q_index, k_index).relu().sum(1) * p.index_dim**-0.5
        complete = last <= each  # [N], or [B, N]
        chosen = first_best(index.masked_fill(~complete, -torch.inf), p.num_selected) & complete  # [B, N]
        position = torch.arange(k.shape[1], device=x.device)
        tail = (position >= (each + 1) // self.block * self.block) & (position <= each)
        seen = (chosen.repeat_interleave(self.block, -1) | tail)[:, None, None]

        o, weights = attend(q, k, v, seen)
        mass = weights.sum((1, 2)).unflatten(-1, (-1, self.block)).sum(-1)  # [B, N]
        return PooledCache(k, v, recent, k_index), self.out(o.flatten(1)), indexer_loss(mass, index, chosen)
