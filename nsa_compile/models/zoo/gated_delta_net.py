"""Gated DeltaNet, the delta rule on a state that fades (arXiv 2412.06464).

A head forgets by a factor that the token decides, parametrised as in Mamba-2, before the delta rule reads (eq. 10):

    α_t = exp(−A softplus(W_α x_t + b))        S̃ = α_t S_{t−1}
    S_t = S̃ + β_t k_t (v_t − S̃ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √K

q, k, v and β are those of DeltaNet. Each head's output is normalised and gated: W_O (RMSNorm(o_t) ⊙ swish(W_G x_t)).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.zoo.delta_net import delta_rule
from nsa_compile.models.zoo.recurrent import ConvolvedMemory, DeltaAttention, in_sums, initial_bias, initial_rate


def gated_delta_rule(s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A token's `q` and `k` `[B, H, K]`, `v` `[B, H, V]`, β and `g` = log α `[B, H]`: the new state, and the output
    `[B, H, V]`."""
    return delta_rule(s * g.exp()[..., None, None], q, k, v, beta)


class GatedDeltaNetAttention(DeltaAttention):
    """The delta rule with a decay of each head; sizes are a `ConvolvedPattern`."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        self.alpha = nn.Linear(model.dim, model.n_heads, bias=False)
        self.a_log = initial_rate(model.n_heads)
        self.dt_bias = initial_bias(model.n_heads)
        self.gate = nn.Linear(model.dim, model.n_heads * model.value_dim, bias=False)

    def step(self, state: ConvolvedMemory, x: Tensor, t: Tensor) -> tuple[ConvolvedMemory, Tensor]:
        recent, q, k, v, beta = self.project(state.recent, x)
        g = -self.a_log.exp() * F.softplus(in_sums(self.alpha(x)) + self.dt_bias)
        s, o = gated_delta_rule(state.s, q, k, v, beta, g)
        o = self.norm(o.to(x.dtype)).flatten(1) * F.silu(self.gate(x))
        return ConvolvedMemory(s, recent), self.out(o)
