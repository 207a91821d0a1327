"""The layer of dense attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.nsa import empty_cache, group_after_group
from nsa_compile.models.transformer import AttentionLayer, apply_rope, check_prompts, check_token


class KVCache(NamedTuple):
    """The cache of one dense attention layer."""

    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, Dv]


class DenseAttention(AttentionLayer):
    """Causal grouped-query attention over everything: the baseline of every comparison."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        value_dim = config.value_dim
        self.q = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.n_kv_heads * value_dim, bias=False)
        self.out = nn.Linear(config.n_heads * value_dim, config.dim, bias=False)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        q = apply_rope(self.q(x).unflatten(-1, (config.n_heads, -1)), position, config.rope_theta)
        k = apply_rope(self.k(x).unflatten(-1, (config.n_kv_heads, -1)), position, config.rope_theta)
        return q, k, self.v(x).unflatten(-1, (config.n_kv_heads, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self._attend(*self._project(x, torch.arange(x.shape[1], device=x.device)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The layer's output of heads `[B, S, H, D]`."""
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(-2))

    def prefill(self, x: Tensor, lengths: Tensor, max_len: int) -> tuple[KVCache, Tensor]:
        check_prompts(lengths, x.shape[:2], max_len)
        q, k, v = self._project(x, torch.arange(x.shape[1], device=x.device))
        room = (0, 0, 0, 0, 0, max_len - x.shape[1])
        return KVCache(*(group_after_group(F.pad(x, room)) for x in (k, v))), self._attend(q, k, v)

    def init_state(self, batch_size: int, max_len: int) -> KVCache:
        c = self.config
        return KVCache(
            *(empty_cache(self.q.weight, batch_size, max_len, c.n_kv_heads, w) for w in (c.head_dim, c.value_dim))
        )

    def room(self, state: KVCache) -> int:
        return state.k.shape[1]

    def decode_step(self, state: KVCache, x: Tensor, t: Tensor) -> tuple[KVCache, Tensor]:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`."""
        check_token(state, x, t, self.room(state))
        q, k, v = self._project(x[:, None], t[..., None])
        position = torch.arange(state.k.shape[1], device=x.device)
        each = t[..., None]  # [1], or [B, 1]
        here = (position == each)[..., None, None]
        state = KVCache(torch.where(here, k, state.k), torch.where(here, v, state.v))
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            state.k.transpose(1, 2),
            state.v.transpose(1, 2),
            attn_mask=(position <= each)[..., None, None, :],
            enable_gqa=True,
        )
        return state, self.out(o.transpose(1, 2)[:, 0].flatten(-2))
