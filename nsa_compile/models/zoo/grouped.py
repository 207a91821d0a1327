"""What the attentions of this folder have in common: caches by position, grouped queries, rotary positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.nsa import empty_cache
from nsa_compile.models.transformer import ScannedAttention, apply_rope


def put(cache: Tensor, row: Tensor, t: Tensor) -> Tensor:
    """The cache `[B, S, ...]` with `row` `[B, ...]` at position `t`, `[]` or, of each sequence, `[B]`."""
    here = torch.arange(cache.shape[1], device=t.device) == t[..., None]
    return torch.where(here.reshape(*here.shape, *[1] * (cache.dim() - 2)), row[:, None], cache)


def rope(x: Tensor, t: Tensor, theta: float) -> Tensor:
    """The heads of a token, `[B, H, D]`, turned by its position `t`."""
    return apply_rope(x[:, None], t[..., None], theta)[:, 0]


def rope_pairs(x: Tensor, t: Tensor, theta: float, width: int | None = None) -> Tensor:
    """The heads of a token, `[B, H, D]`, whose last `width` channels, or all, are turned by its position, each with its
    neighbour: 0 with 1, 2 with 3."""
    kept, turned = x.split([x.shape[-1] - (width or x.shape[-1]), width or x.shape[-1]], dim=-1)
    turned = rope(turned.unflatten(-1, (-1, 2)).mT.flatten(-2), t, theta)
    return torch.cat([kept, turned.unflatten(-1, (2, -1)).mT.flatten(-2)], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q kᵀ / √D) v of grouped queries `[B, G, h, D]` over the keys `[B, S, G, D]` that `seen` keeps, and this
    softmax, `[B, G, h, S]`.

    `seen` is bool and broadcasts to `[B, G, h, S]`; some key must be seen.
    """
    scores = torch.einsum("bghd,bsgd->bghs", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("bghs,bsge->bghe", weights, v), weights


class KVCache(NamedTuple):
    """Keys, after RoPE, and values of the tokens before."""

    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, Dv]


class GroupedAttention(ScannedAttention):
    """Projections of grouped queries, `G` heads of keys and values each of which serves `h = Hq / G` queries, and
    caches with room for whole blocks of `block` tokens, where the pattern has blocks.

    A subclass says which keys are `seen`, or has a `step` of its own.
    """

    def __init__(self, model: NSAConfig) -> None:
        super().__init__()
        self.config = model
        self.block = getattr(model.pattern, "block", 1)
        self.q = nn.Linear(model.dim, model.n_heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.dim, model.n_kv_heads * model.head_dim, bias=False)
        self.v = nn.Linear(model.dim, model.n_kv_heads * model.value_dim, bias=False)
        self.out = nn.Linear(model.n_heads * model.value_dim, model.dim, bias=False)

    def project(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, G, h, D]`, keys `[B, G, D]` and values `[B, G, Dv]` of a token `[B, dim]` at position `t`."""
        groups, theta = self.config.n_kv_heads, self.config.rope_theta
        q = rope(self.q(x).unflatten(-1, (self.config.n_heads, -1)), t, theta)
        k = rope(self.k(x).unflatten(-1, (groups, -1)), t, theta)
        return q.unflatten(1, (groups, -1)), k, self.v(x).unflatten(-1, (groups, -1))

    def append(self, state: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries of a token, and the caches of keys and values with its own."""
        q, k, v = self.project(x, t)
        return q, put(state.k, k, t), put(state.v, v, t)

    def seen(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        """Which of the cached keys the queries of the token at `t` attend to, as `attend` takes it."""
        raise NotImplementedError

    def step(self, state: Any, x: Tensor, t: Tensor) -> tuple[Any, ...]:
        q, k, v = self.append(state, x, t)
        o, _ = attend(q, k, v, self.seen(q, k, t))
        return KVCache(k, v), self.out(o.flatten(1))

    def in_best_blocks(self, score: Tensor, k: Tensor, t: Tensor) -> Tensor:
        """`seen` of the `num_selected` blocks of highest `score` `[B, G, h, N]`, with the query's own up to itself."""
        number, own = torch.arange(score.shape[-1], device=k.device), (t // self.block)[..., None, None, None]
        score = score.masked_fill(number > own, -torch.inf).masked_fill(number == own, torch.inf)
        best = score.topk(min(self.config.pattern.num_selected, len(number))).indices
        chosen = torch.zeros_like(score, dtype=torch.bool).scatter(-1, best, True)
        past = torch.arange(k.shape[1], device=k.device) <= t[..., None]
        return chosen.repeat_interleave(self.block, -1) & past[..., None, None, :]

    def init_state(self, batch_size: int, max_len: int) -> Any:
        config, rows = self.config, -(-max_len // self.block) * self.block
        shape = (batch_size, rows, config.n_kv_heads)
        widths = (config.head_dim, config.value_dim)
        return KVCache(*(empty_cache(self.out.weight, *shape, width) for width in widths))

    def room(self, state: Any) -> int:
        return state.k.shape[1]
