"""InfLLM-V2, attention that is dense for short texts and sparse for long ones (arXiv 2509.24663).

It has no parameters beside those of attention. Keys are pooled over `l` tokens every `d` tokens; a group of heads adds
up what its queries make of them, and a block of `B` tokens is worth its best pooled key (section 3.2):

    K_c[j] = mean of K[j·d : j·d + l]        a = Σ over the heads of softmax(q_t K_cᵀ / √D), over those complete at t
    score of block i = max of a[j] over the pooled keys j that share a token with block i

A token attends to the first blocks, to the `k` best with these counted, and to the last blocks, which are a window.
Before position `dense_len` it attends to all; the paper switches whole sequences of such a length.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention, attend, put
from nsa_compile.models.zoo.indexed import first_best


class PooledKVCache(NamedTuple):
    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, Dv]
    recent: Tensor  # [B, l, G, D], the last l keys
    pooled: Tensor  # [B, N, G, D], pooled keys of complete blocks


class InfLLMAttention(GroupedAttention):
    """Attention to first, last and best blocks; sizes are an `InfLLMPattern`."""

    def init_state(self, batch_size: int, max_len: int) -> PooledKVCache:
        p = self.config.pattern
        k, v = super().init_state(batch_size, max_len)
        complete = max(0, (max_len - p.pool_block) // p.pool_stride + 1)
        recent, pooled = (k.new_zeros(batch_size, rows, *k.shape[2:]) for rows in (p.pool_block, complete))
        return PooledKVCache(k, v, recent, pooled)

    def step(self, state: PooledKVCache, x: Tensor, t: Tensor) -> tuple[PooledKVCache, Tensor]:
        p, each = self.config.pattern, t[..., None]
        q, k, v = self.project(x, t)
        recent = torch.cat([state.recent[:, 1:], k[:, None]], dim=1)
        k, v = put(state.k, k, t), put(state.v, v, t)
        last = torch.arange(state.pooled.shape[1], device=x.device) * p.pool_stride + p.pool_block - 1
        pooled = torch.where((last == each)[..., None, None], recent.mean(1, keepdim=True), state.pooled)

        # What each block is worth: there may be no pooled key yet, so the lowest number instead of -inf.
        complete = (last <= each)[..., None, None, :]
        scores = torch.einsum("bghd,bngd->bghn", q, pooled) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~complete, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~complete, 0)
        before, within = p.pool_block // p.pool_stride - 1, self.block // p.pool_stride
        number = torch.arange(k.shape[1] // self.block, device=x.device)
        room = max(0, within * len(number) - weights.shape[-1])  # pooled keys that would begin in the last blocks
        shared = F.pad(weights.sum(2).detach(), (before, room))
        score = shared.unfold(-1, before + within, within).amax(-1)  # [B, G, Nb]

        own = (t // self.block)[..., None, None]
        local = number > own - p.window // self.block
        score = score.masked_fill(number < p.num_initial, torch.inf).masked_fill(local, -torch.inf)
        seen = (first_best(score, p.num_selected) | local).repeat_interleave(self.block, -1)  # [B, G, S]
        past = (torch.arange(k.shape[1], device=x.device) <= each)[..., None, :]  # [1, S], or [B, 1, S]
        seen = (seen | (t < p.dense_len)[..., None, None]) & past
        o, _ = attend(q, k, v, seen[:, :, None])
        return PooledKVCache(k, v, recent, pooled), self.out(o.flatten(1))
