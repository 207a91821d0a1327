"""KDA, Kimi delta attention: the delta rule on a state whose channels fade each at its pace (arXiv 2510.26692).

The decay is a vector over the channels of a key, from a projection of low rank (eq. 1, section 4):

    α_t = exp(−A softplus(W↑_α W↓_α x_t + b))        S̃ = Diag(α_t) S_{t−1}
    S_t = S̃ + β_t k_t (v_t − S̃ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √K

which is (I − β k kᵀ) Diag(α) S + β k vᵀ. q, k, v and β are those of DeltaNet. Each head's output is normalised and
gated by a sigmoid: W_O (RMSNorm(o_t) ⊙ σ(W↑_G W↓_G x_t)).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.zoo.delta_net import delta_rule
from nsa_compile.models.zoo.recurrent import ConvolvedMemory, DeltaAttention, in_sums, initial_bias, initial_rate


def kimi_delta_rule(s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A token's `q`, `k` and `g` = log α `[B, H, K]`, `v` `[B, H, V]` and β `[B, H]`: the new state, and the output
    `[B, H, V]`."""
    return delta_rule(s * g.exp()[..., None], q, k, v, beta)


class KimiDeltaAttention(DeltaAttention):
    """The delta rule with a decay of each channel; sizes are a `KDAPattern`."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        rank = model.pattern.gate_rank or model.value_dim
        self.alpha_down = nn.Linear(model.dim, rank, bias=False)
        self.alpha_up = nn.Linear(rank, model.n_heads * model.head_dim, bias=False)
        self.a_log = initial_rate(model.n_heads)
        self.dt_bias = initial_bias(model.n_heads * model.head_dim)
        self.gate_down = nn.Linear(model.dim, rank, bias=False)
        self.gate_up = nn.Linear(rank, model.n_heads * model.value_dim)

    def step(self, state: ConvolvedMemory, x: Tensor, t: Tensor) -> tuple[ConvolvedMemory, Tensor]:
        recent, q, k, v, beta = self.project(state.recent, x)
        dt = F.softplus(in_sums(self.alpha_up(self.alpha_down(x))) + self.dt_bias)
        g = -self.a_log.exp()[:, None] * dt.unflatten(-1, (self.config.n_heads, -1))
        s, o = kimi_delta_rule(state.s, q, k, v, beta, g)
        o = self.norm(o.to(x.dtype)).flatten(1) * self.gate_up(self.gate_down(x)).sigmoid()
        return ConvolvedMemory(s, recent), self.out(o)
