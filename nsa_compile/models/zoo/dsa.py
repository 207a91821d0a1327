"""DeepSeek sparse attention on latent caches (DSA of DeepSeek-V3.2, arXiv 2512.02556, on MLA, arXiv 2405.04434).

A lightning indexer scores each token s for the query of token t, and t attends to the `k` best (eq. 1 and 2):

    I[t, s] = Σ_j w[t, j] · ReLU(q_I[t, j] · k_I[s])
    u_t = Attn(h_t, {c_s : I[t, s] among the k highest of s ≤ t})

Attention is MLA read as multi-query attention. Cached are a latent c_s, shared by all heads, and one rotated key:

    c_s = RMSNorm(W_DKV h_s)      k_R[s] = RoPE(W_KR h_s)      c_Q = RMSNorm(W_DQ h_t)
    [q_C; q_R] = W_UQ c_Q, q_R rotated      score = (W_UKᵀ q_C · c_s + q_R · k_R[s]) / √(d_C + d_R)
    o = W_UV Σ_s softmax(score)_s c_s, by head

A choice has no gradient, so the indexer learns by a loss of its own (eq. 4): the divergence of softmax(I) from the
weights of attention, summed over heads and normalised, over the tokens chosen. Its inputs are detached, and nothing of
this loss reaches the model. RoPE pairs neighbouring channels in MLA, and halves in the indexer, as in the released
code; q_I · k_I and w are scaled there by the roots of their widths, which the equations leave out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.transformer import ScannedAttention
from nsa_compile.models.zoo.grouped import put, rope, rope_pairs
from nsa_compile.models.zoo.indexed import first_places, index_scores, indexer_loss


class LatentCache(NamedTuple):
    latent: Tensor  # [B, S, r + d_R], the latents, and behind them the rotated part of keys
    k_index: Tensor  # [B, S, d_I], the indexer's keys


class DSAttention(ScannedAttention):
    """Multi-head latent attention to the tokens that an indexer chooses; sizes are a `DSAPattern`."""

    auxiliary = True

    def __init__(self, model: NSAConfig) -> None:
        super().__init__()
        p, heads = model.pattern, model.n_heads
        self.config = model
        self.content = model.head_dim - p.rope_dim  # d_C
        self.q_down = nn.Linear(model.dim, p.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(p.q_rank, eps=model.norm_eps)
        self.q_up = nn.Linear(p.q_rank, heads * model.head_dim, bias=False)
        self.kv_down = nn.Linear(model.dim, p.kv_rank + p.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(p.kv_rank, eps=model.norm_eps)
        self.kv_up = nn.Linear(p.kv_rank, heads * (self.content + model.value_dim), bias=False)
        self.out = nn.Linear(heads * model.value_dim, model.dim, bias=False)
        self.index_q = nn.Linear(p.q_rank, p.index_heads * p.index_dim, bias=False)
        self.index_k = nn.Linear(model.dim, p.index_dim, bias=False)
        self.index_norm = nn.LayerNorm(p.index_dim, eps=model.norm_eps)
        self.index_weight = nn.Linear(model.dim, p.index_heads, bias=False)

    def init_state(self, batch_size: int, max_len: int) -> LatentCache:
        p = self.config.pattern
        widths = p.kv_rank + p.rope_dim, p.index_dim
        return LatentCache(*(self.out.weight.new_zeros(batch_size, max_len, width) for width in widths))

    def room(self, state: LatentCache) -> int:
        return state.latent.shape[1]

    def step(self, state: LatentCache, x: Tensor, t: Tensor) -> tuple[LatentCache, Tensor, Tensor]:
        p, theta, heads = self.config.pattern, self.config.rope_theta, self.config.n_heads
        c_q = self.q_norm(self.q_down(x))
        q, q_rope = self.q_up(c_q).unflatten(-1, (heads, -1)).split([self.content, p.rope_dim], -1)
        c, k_rope = self.kv_down(x).split([p.kv_rank, p.rope_dim], -1)
        row = torch.cat([self.kv_norm(c), rope_pairs(k_rope[:, None], t, theta)[:, 0]], -1)
        latent = put(state.latent, row, t)

        # The indexer, which sees the model and is not seen by it.
        q_index = self._index_rope(self.index_q(c_q.detach()).unflatten(-1, (p.index_heads, -1)), t)
        k_index = self._index_rope(self.index_norm(self.index_k(x.detach()))[:, None], t)[:, 0]
        k_index = put(state.k_index, k_index, t)
        weight = self.index_weight(x.detach()) * (p.index_heads * p.index_dim) ** -0.5
        past = torch.arange(latent.shape[1], device=x.device) <= t[..., None]
        index = index_scores(weight, q_index, k_index).detach()
        best = first_places(index.masked_fill(~past, -torch.inf), p.num_selected)  # [B, n]
        seen = best <= t[..., None]

        # All heads read the latents: keys and values of a head are never made.
        up_k, up_v = self.kv_up.weight.unflatten(0, (heads, -1)).split([self.content, self.config.value_dim], 1)
        q = torch.cat([torch.einsum("bhd,hdr->bhr", q, up_k), rope_pairs(q_rope, t, theta)], -1)
        rows = gather_rows(latent, best)
        scores = torch.einsum("bhr,bnr->bhn", q, rows) * self.config.head_dim**-0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        o = torch.einsum("bhn,bnr->bhr", weights, rows[..., : p.kv_rank])
        loss = indexer_loss(weights.sum(1), index_scores(weight, q_index, gather_rows(k_index, best)), seen)
        return LatentCache(latent, k_index), self.out(torch.einsum("bhr,her->bhe", o, up_v).flatten(1)), loss

    def _index_rope(self, x: Tensor, t: Tensor) -> Tensor:
        """Heads of the indexer, whose first channels are turned."""
        width = self.config.pattern.rope_dim
        return torch.cat([rope(x[..., :width], t, self.config.rope_theta), x[..., width:]], dim=-1)


def gather_rows(cache: Tensor, index: Tensor) -> Tensor:
    """Rows `[B, n, d]` of a cache `[B, S, d]` at `[B, n]`."""
    return cache.gather(1, index[..., None].expand(-1, -1, cache.shape[-1]))
