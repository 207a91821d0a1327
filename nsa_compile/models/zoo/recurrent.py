"""What the recurrent attentions of this folder have in common: heads, short convolutions, how decays begin."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.transformer import ScannedAttention


class Memory(NamedTuple):
    """What a head has written: a matrix that turns a key into a value."""

    s: Tensor  # [B, H, K, V]


class ConvolvedMemory(NamedTuple):
    s: Tensor  # [B, H, K, V]
    recent: Tensor  # [B, w, C], the inputs of the short convolution at the last w tokens


class RecurrentAttention(ScannedAttention):
    """Projections of queries, keys and values, and a state whose size does not grow with the tokens.

    A head of keys and values serves `Hq / G` heads of queries, each of which has a state of its own. A subclass adds
    `step`, and `init_state` where the state is more than a `Memory`.
    """

    def __init__(self, model: NSAConfig) -> None:
        super().__init__()
        self.config = model
        self.q = nn.Linear(model.dim, model.n_heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.dim, model.n_kv_heads * model.head_dim, bias=False)
        self.v = nn.Linear(model.dim, model.n_kv_heads * model.value_dim, bias=False)
        self.out = nn.Linear(model.n_heads * model.value_dim, model.dim, bias=False)

    def heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads, `[B, H, K]` twice and `[B, H, V]`, of queries, keys and values as they are projected."""
        return in_sums(q.unflatten(-1, (self.config.n_heads, -1))), self.repeated(k), self.repeated(v)

    def repeated(self, x: Tensor) -> Tensor:
        """What each head of keys and values has, `[B, G * width]`, for each head of queries, `[B, H, width]`."""
        groups = self.config.n_kv_heads
        return in_sums(x.unflatten(-1, (groups, -1)).repeat_interleave(self.config.n_heads // groups, dim=1))

    def empty(self, batch_size: int) -> Tensor:
        """The state `[B, H, K, V]` before the first token."""
        c = self.config
        return in_sums(self.out.weight.new_zeros(batch_size, c.n_heads, c.head_dim, c.value_dim))

    def init_state(self, batch_size: int, max_len: int) -> Any:
        return Memory(self.empty(batch_size))


class DeltaAttention(RecurrentAttention):
    """What the delta rules share: a short convolution, queries and keys of length 1, and a strength of writing, β."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        self.widths = [self.q.out_features, self.k.out_features, self.v.out_features]
        self.conv = ShortConvolution(sum(self.widths), model.pattern.conv)
        self.beta = nn.Linear(model.dim, model.n_heads, bias=False)
        self.norm = nn.RMSNorm(model.value_dim, eps=model.norm_eps)

    def init_state(self, batch_size: int, max_len: int) -> ConvolvedMemory:
        return ConvolvedMemory(self.empty(batch_size), self.conv.empty(batch_size))

    def project(self, recent: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """The inputs of the convolution with those of a token `[B, dim]`, and its q and k `[B, H, K]`, v `[B, H, V]`
        and β `[B, H]`."""
        recent, y = self.conv(recent, torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1))
        q, k, v = self.heads(*y.split(self.widths, dim=-1))
        return recent, unit(q) * self.config.head_dim**-0.5, unit(k), v, in_sums(self.beta(x)).sigmoid()


class ShortConvolution(nn.Module):
    """A convolution over the last `width` tokens, each channel by itself, and SiLU."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        # As `nn.Conv1d` begins.
        bound = width**-0.5
        self.weight = nn.Parameter(torch.empty(channels, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None

    def empty(self, batch_size: int) -> Tensor:
        """The inputs `[B, width, C]` before the first token."""
        return self.weight.new_zeros(batch_size, *self.weight.T.shape)

    def forward(self, recent: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The last inputs `[B, width, C]` with that of a token, `[B, C]`, and what comes of them, `[B, C]`."""
        recent = torch.cat([recent[:, 1:], x[:, None].to(recent.dtype)], dim=1)
        y = (recent * self.weight.T).sum(1)
        return recent, F.silu(y if self.bias is None else y + self.bias)


def in_sums(x: Tensor) -> Tensor:
    """In the precision in which a state is summed up over a sequence, float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """Heads of length 1, or 0 where they were 0."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def initial_rate(count: int) -> nn.Parameter:
    """log A for A from 1 to 16, as Mamba-2 begins: a decay is exp(−A Δ)."""
    return nn.Parameter(torch.empty(count).uniform_(1, 16).log())


def initial_bias(count: int) -> nn.Parameter:
    """The bias b for which Δ = softplus(b) is from 0.001 to 0.1, its logarithm evenly so, as Mamba begins."""
    delta = torch.empty(count).uniform_(math.log(0.001), math.log(0.1)).exp()
    return nn.Parameter(delta + (-torch.expm1(-delta)).log())
