"""Recurrences over whole sequences `[B, S, H, width]`, each twice: over explicit time, as the papers print them, and in
closed form, as attention with a matrix `[S, S]`. They share no code with the package or with each other.

Decays are logarithms `[B, S, H, K]`, of width 1 where a head has one decay.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A causal depthwise convolution of `x` `[B, S, C]`, by `weight` `[C, w]`, and SiLU."""
    channels, width = weight.shape
    y = F.conv1d(F.pad(x.mT, (width - 1, 0)), weight[:, None], bias, groups=channels).mT
    return y * y.sigmoid()


def decayed_over_time(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """S_t = Diag(e^{g_t}) S_{t−1} + k_t v_tᵀ, o_t = q_tᵀ S_t, head after head."""
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            state = torch.zeros(q.shape[-1], v.shape[-1], dtype=q.dtype)
            for t in range(q.shape[1]):
                decay = g[b, t, h].exp().expand(q.shape[-1])
                state = torch.diag(decay) @ state + torch.outer(k[b, t, h], v[b, t, h])
                rows.append(q[b, t, h] @ state)
    return torch.stack(rows).reshape(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


def products(q: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """Σ_c q_tc k_sc e^{g_{s+1,c} + … + g_tc} of each pair of tokens s ≤ t, 0 elsewhere: `[B, H, S, S]`."""
    length = q.shape[1]
    pairs = torch.zeros(q.shape[0], q.shape[2], length, length, dtype=q.dtype)
    for t in range(length):
        for s in range(t + 1):
            between = g[:, s + 1 : t + 1].sum(1).exp()  # [B, H, K]
            here = torch.zeros_like(pairs)
            here[:, :, t, s] = 1
            pairs = pairs + here * (q[:, t] * k[:, s] * between).sum(-1)[..., None, None]
    return pairs


def decayed_closed(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """The same as attention without a softmax."""
    return torch.einsum("bhts,bshv->bthv", products(q, k, g), v)


def delta_over_time(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """S_t = (I − β_t k_t k_tᵀ) Diag(e^{g_t}) S_{t−1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t, with β `[B, S, H]`."""
    rows = []
    identity = torch.eye(q.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            state = torch.zeros(q.shape[-1], v.shape[-1], dtype=q.dtype)
            for t in range(q.shape[1]):
                key, strength = k[b, t, h], beta[b, t, h]
                decay = torch.diag(g[b, t, h].exp().expand(q.shape[-1]))
                state = (identity - strength * torch.outer(key, key)) @ decay @ state
                state = state + strength * torch.outer(key, v[b, t, h])
                rows.append(state.T @ q[b, t, h])
    return torch.stack(rows).reshape(q.shape[0], q.shape[2], q.shape[1], -1).transpose(1, 2)


def delta_closed(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
    """The same by one triangular system over the sequence: what is written, U, solves
    (I + Diag(β) tril(products(K, K), −1)) U = Diag(β) V, and is read as values are."""
    strength = beta.transpose(1, 2)[..., None]  # [B, H, S, 1]
    among = torch.eye(q.shape[1], dtype=q.dtype) + strength * products(k, k, g).tril(-1)
    written = torch.linalg.solve(among, strength * v.transpose(1, 2))
    return torch.einsum("bhts,bhsv->bthv", products(q, k, g), written)
