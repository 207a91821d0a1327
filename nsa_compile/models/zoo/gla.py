"""Gated linear attention, GLA (arXiv 2312.06635).

Each channel of a key forgets at a rate that the token decides, from a projection of low rank (eq. 3, section 4.4):

    α_t = σ(W_α² W_α¹ x_t + b_α)^(1/τ)        S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ        o_t = S_tᵀ q_t / √K

Each head's output is normalised by itself, gated, and projected:

    r_t = swish(W_r x_t + b_r)        y_t = W_O (r_t ⊙ LayerNorm(o_t))
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.zoo.recurrent import Memory, RecurrentAttention


def gated_linear_attention(s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A token's `q`, `k` and `g` = log α `[B, H, K]` and `v` `[B, H, V]`: the new state, and the output `[B, H, V]`."""
    s = s * g.exp()[..., None] + k[..., None] * v[..., None, :]
    return s, torch.einsum("bhk,bhkv->bhv", q, s)


class GatedLinearAttention(RecurrentAttention):
    """Linear attention that forgets channel by channel; sizes are a `GLAPattern`."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        rank = model.pattern.gate_rank
        self.decay_down = nn.Linear(model.dim, rank, bias=False)
        self.decay_up = nn.Linear(rank, model.n_kv_heads * model.head_dim)
        self.gate = nn.Linear(model.dim, model.n_heads * model.value_dim)
        self.norm = nn.LayerNorm(model.value_dim, eps=model.norm_eps)

    def step(self, state: Memory, x: Tensor, t: Tensor) -> tuple[Memory, Tensor]:
        q, k, v = self.heads(self.q(x), self.k(x), self.v(x))
        g = F.logsigmoid(self.repeated(self.decay_up(self.decay_down(x)))) / self.config.pattern.gate_temperature
        s, o = gated_linear_attention(state.s, q * self.config.head_dim**-0.5, k, v, g)
        o = self.norm(o.to(x.dtype)).flatten(1) * F.silu(self.gate(x))
        return Memory(s), self.out(o)
