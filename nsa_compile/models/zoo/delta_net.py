"""DeltaNet, linear attention that writes what its state does not say yet (arXiv 2406.06484, after 2102.11174).

A key reads the state before it writes, and only the difference is written, as far as β says (section 2.2):

    β_t = σ(W_β x_t)        S_t = S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ        o_t = S_tᵀ q_t / √K

which is S (I − β k kᵀ) + β v kᵀ for the transposed state. q, k and v come from a short convolution and SiLU; q and k
have length 1. Each head's output goes through an RMSNorm, and is projected.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.recurrent import ConvolvedMemory, DeltaAttention


def delta_rule(s: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """A token's `q` and `k` `[B, H, K]`, `v` `[B, H, V]` and β `[B, H]`: the new state, and the output `[B, H, V]`."""
    error = v - torch.einsum("bhk,bhkv->bhv", k, s)
    s = s + k[..., None] * (beta[..., None] * error)[..., None, :]
    return s, torch.einsum("bhk,bhkv->bhv", q, s)


class DeltaNetAttention(DeltaAttention):
    """Linear attention by the delta rule; sizes are a `ConvolvedPattern`."""

    def step(self, state: ConvolvedMemory, x: Tensor, t: Tensor) -> tuple[ConvolvedMemory, Tensor]:
        recent, q, k, v, beta = self.project(state.recent, x)
        s, o = delta_rule(state.s, q, k, v, beta)
        return ConvolvedMemory(s, recent), self.out(self.norm(o.to(x.dtype)).flatten(1))
