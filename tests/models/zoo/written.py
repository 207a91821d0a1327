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


def turned_pairs(x: Tensor, theta: float, width: int, sign: int = 1, at: Tensor | None = None) -> Tensor:
    """RoPE of the last `width` channels of `[B, S, H, D]`, neighbours paired, at positions 0, 1, … or `at` `[S]`."""
    kept, last = x[..., : x.shape[-1] - width], x[..., x.shape[-1] - width :]
    frequency = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)], dtype=torch.float64)
    positions = torch.arange(x.shape[1]) if at is None else at
    angle = sign * positions.double()[:, None] * frequency
    numbers = (
        torch.view_as_complex(last.unflatten(-1, (-1, 2)).contiguous())
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.cat([kept, torch.view_as_real(numbers).flatten(-2)], -1)


def turned_halves(x: Tensor, theta: float, width: int) -> Tensor:
    """RoPE of the first `width` channels, channel i paired with i + width/2."""
    return torch.cat([turned(x[..., :width], theta), x[..., width:]], -1)


def rms_norm(x: Tensor, eps: float, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def divergence(mass: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """KL of softmax(scores) from the share of `mass` over what is seen, 0 where nothing is: the mean of the rows."""
    rows = []
    for m, s, keep in zip(mass.detach().flatten(0, -2), scores.flatten(0, -2), seen.flatten(0, -2), strict=True):
        p, q = m[keep] / m[keep].sum(), s[keep].softmax(-1)
        rows.append(sum((p[i] * (p[i].log() - q[i].log()) for i in range(len(p)) if p[i] > 0), start=s.new_zeros(())))
    return torch.stack(rows).mean()
