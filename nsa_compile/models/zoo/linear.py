"""Linear attention (arXiv 2006.16236).

The softmax's exp(q · k) gives way to a product of features, φ(q) · φ(k) with φ(x) = elu(x) + 1, which are positive. A
sum over the tokens then splits into sums that a state can hold (eq. 16 to 20):

    S_t = S_{t−1} + φ(k_t) v_tᵀ        z_t = z_{t−1} + φ(k_t)        o_t = S_tᵀ φ(q_t) / (z_t · φ(q_t))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.models.zoo.recurrent import RecurrentAttention


class LinearState(NamedTuple):
    s: Tensor  # [B, H, K, V]
    z: Tensor  # [B, H, K]


def linear_attention(s: Tensor, z: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A token of features `[B, H, K]` and values `[B, H, V]`: the new sums, and the output `[B, H, V]`."""
    s = s + k[..., None] * v[..., None, :]
    z = z + k
    return s, z, torch.einsum("bhk,bhkv->bhv", q, s) / ((q * z).sum(-1, keepdim=True) + 1e-6)


class LinearAttention(RecurrentAttention):
    """Attention whose scores are products of features."""

    def init_state(self, batch_size: int, max_len: int) -> LinearState:
        s = self.empty(batch_size)
        return LinearState(s, torch.zeros_like(s[..., 0]))

    def step(self, state: LinearState, x: Tensor, t: Tensor) -> tuple[LinearState, Tensor]:
        q, k, v = self.heads(self.q(x), self.k(x), self.v(x))
        s, z, o = linear_attention(state.s, state.z, F.elu(q) + 1, F.elu(k) + 1, v)
        return LinearState(s, z), self.out(o.flatten(1).to(x.dtype))
