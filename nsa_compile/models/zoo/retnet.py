"""RetNet, multi-scale retention (arXiv 2307.08621).

A head forgets at a rate of its own, γ = 1 − 2^(−5 − i) for head i, and positions are rotations of q and k (eq. 6, 8):

    S_t = γ S_{t−1} + k_t v_tᵀ        o_t = S_tᵀ q_t        k scaled by 1 / √K

Each head's output is normalised by itself, gated, and projected:

    y_t = W_O (swish(W_G x_t) ⊙ GroupNorm(o_t))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.zoo.grouped import rope
from nsa_compile.models.zoo.recurrent import Memory, RecurrentAttention


def retention(s: Tensor, q: Tensor, k: Tensor, v: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """A token's `q` and `k` `[B, H, K]` and `v` `[B, H, V]` with γ `[H]`: the new state, and the output `[B, H, V]`."""
    s = gamma[:, None, None] * s + k[..., None] * v[..., None, :]
    return s, torch.einsum("bhk,bhkv->bhv", q, s)


class Retention(RecurrentAttention):
    """Attention that fades with distance, in each head at another pace."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        self.gate = nn.Linear(model.dim, model.n_heads * model.value_dim, bias=False)
        self.norm = nn.GroupNorm(model.n_heads, model.n_heads * model.value_dim, eps=model.norm_eps)

    def step(self, state: Memory, x: Tensor, t: Tensor) -> tuple[Memory, Tensor]:
        q, k, v = self.heads(self.q(x), self.k(x), self.v(x))
        q, k = (rope(y, t, self.config.rope_theta) for y in (q, k))
        # No buffer: a model that is cast would round it, and a γ that rounds to 1 forgets nothing.
        gamma = 1 - 2.0 ** (-5 - torch.arange(self.config.n_heads, dtype=state.s.dtype, device=state.s.device))
        s, o = retention(state.s, q, k * self.config.head_dim**-0.5, v, gamma)
        o = self.norm(o.flatten(1).to(x.dtype)) * F.silu(self.gate(x))
        return Memory(s), self.out(o)
