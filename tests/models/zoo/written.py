"""Parts of the references: attention over a whole sequence with explicit masks. They share no code with the package."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models import NSAConfig


def turned(x: Tensor, theta: float) -> Tensor:
    """RoPE (arXiv 2104.09864) of heads `[B, S, H, D]` as complex numbers: channel i is paired with i + D/2."""
    half = x.shape[-1] // 2
    numbers = torch.complex(x[..., :half], x[..., half:])
    frequency = torch.tensor([theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequency
    numbers = numbers * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([numbers.real, numbers.imag], -1)


def linear(p: dict[str, Tensor], name: str, x: Tensor, heads: int | None = None) -> Tensor:
    """`x W^T` of the layer called `name`, split into heads where there are some."""
    y = x @ p[f"{name}.weight"].T
    if f"{name}.bias" in p:
        y = y + p[f"{name}.bias"]
    return y if heads is None else y.reshape(*y.shape[:-1], heads, -1)


def projected(c: NSAConfig, p: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values repeated for the queries of their group: each `[B, S, Hq, width]`."""
    h = c.n_heads // c.n_kv_heads
    q, k = turned(linear(p, "q", x, c.n_heads), c.rope_theta), turned(linear(p, "k", x, c.n_kv_heads), c.rope_theta)
    return q, k.repeat_interleave(h, 2), linear(p, "v", x, c.n_kv_heads).repeat_interleave(h, 2)


def causal(length: int) -> Tensor:
    """`[S, S]`: which keys are not after the query."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Weights by exponentials over the keys that are seen."""
    largest = torch.where(seen, scores, torch.tensor(float("-inf"), dtype=scores.dtype)).amax(-1, keepdim=True).detach()
    powers = torch.where(seen, (torch.where(seen, scores, largest) - largest).exp(), 0)
    return powers / powers.sum(-1, keepdim=True)


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Heads `[B, S, H, D]` over keys `[B, T, H, D]` that are `seen`, `[B, H, S, T]` or less: `[B, S, H * Dv]`."""
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("bhst,bthe->bshe", softmax(scores, seen), v).flatten(2)


def best(scores: Tensor, count: int) -> Tensor:
    """A mask of the `count` highest of the last dimension, -inf never among them, ties to the lower index."""
    place = scores.detach().sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    return (place < count) & (scores > float("-inf"))
