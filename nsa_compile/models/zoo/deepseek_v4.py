"""The two compressed attentions of DeepSeek-V4 (arXiv 2606.19348, section 2.3): CSA and HCA.

Both read, in one softmax with a learned sink for each head, the last `w` tokens and entries that stand for `m` tokens
each. Keys are values: one head of them for all queries, whose last channels are rotated, and an output is rotated back
by its query's position:

    c_Q = RMSNorm(W_DQ h_t)      q = RMSNorm(W_UQ c_Q), by head, rotated      k_s = v_s = RMSNorm(W_KV h_s), rotated
    o = RoPE_{−t}(Σ exp(q·k_s / √D) k_s / (exp(b) + Σ exp(q·k_s / √D)))        s over window and entries

HCA makes an entry of `m'` = 128 tokens, all of which a query sees once they are complete (eq. 20 to 23). Channel by
channel, with a learned bias for each place in the block:

    C_i = RMSNorm(Σ_j softmax_j(Z_j + B_j) ⊙ (W_C h_j)), rotated by the position of the block's first token

CSA makes one of every `m` = 4 tokens, which overlap: softmax and sum are over 2m rows, the previous block's by one half
of the projections and this block's by the other (eq. 9 to 12). An indexer with entries of its own, made likewise, ranks
them, and a query sees the `k` best that are complete (eq. 13 to 17):

    I[t, i] = Σ_j w[t, j] · ReLU(q_I[t, j] · C_I[i]),  q_I made of c_Q

The indexer learns as that of DSA does (arXiv 2512.02556, eq. 4), by entries: the divergence of the softmax of I from
the weights that attention gives the chosen entries, summed over heads and normalised; window and sink are in the
denominator of these weights. Its inputs are detached. The output projection is of low rank, by groups of heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.transformer import ScannedAttention
from nsa_compile.models.zoo.grouped import put, rope_pairs
from nsa_compile.models.zoo.indexed import first_best, index_scores, indexer_loss


class EntryCache(NamedTuple):
    kv: Tensor  # [B, S, D]
    recent: Tensor  # [B, rows, 2, width], values and gates of the tokens of an entry
    entries: Tensor  # [B, N, D]


class IndexedEntryCache(NamedTuple):
    kv: Tensor  # [B, S, D]
    recent: Tensor  # [B, 2 m, 2, 2 D]
    entries: Tensor  # [B, N, D]
    recent_index: Tensor  # [B, 2 m, 2, 2 d_I]
    index_entries: Tensor  # [B, N, d_I]


class Compressor(nn.Module):
    """Entries of `width` channels for `block` tokens each; overlapping ones are made of twice as many."""

    def __init__(self, dim: int, width: int, block: int, overlap: bool, eps: float) -> None:
        super().__init__()
        self.block, self.overlap, self.width = block, overlap, width
        self.rows = block * (1 + overlap)
        self.value = nn.Linear(dim, width * (1 + overlap), bias=False)
        self.gate = nn.Linear(dim, width * (1 + overlap), bias=False)
        self.bias = nn.Parameter(torch.zeros(block, width * (1 + overlap)))
        self.norm = nn.RMSNorm(width, eps=eps)

    def empty(self, batch_size: int, max_len: int) -> tuple[Tensor, Tensor]:
        """No recent tokens, and no entries."""
        recent = self.bias.new_zeros(batch_size, self.rows, 2, self.bias.shape[-1])
        return recent, self.bias.new_zeros(batch_size, max_len // self.block, self.width)

    def step(
        self, recent: Tensor, entries: Tensor, x: Tensor, t: Tensor, rope_dim: int, theta: float
    ) -> tuple[Tensor, Tensor]:
        """The recent tokens with `x` `[B, dim]`, and the entries with the one that it completes."""
        recent = torch.cat([recent[:, 1:], torch.stack([self.value(x), self.gate(x)], dim=1)[:, None]], dim=1)
        value, gate = recent.unbind(2)
        if self.overlap:  # the previous block by the first half of the channels, this one by the second
            (value, this), (before, gate) = ((y[:, : self.block], y[:, self.block :]) for y in (value, gate))
            bias = self.bias.split(self.width, -1)
            none = (t < self.rows - 1)[..., None, None]  # there is no block before the first one
            before = (before[..., : self.width] + bias[0]).masked_fill(none, -torch.inf)
            value = torch.cat([value[..., : self.width], this[..., self.width :]], dim=1)
            gate = torch.cat([before, gate[..., self.width :] + bias[1]], dim=1)
        else:
            gate = gate + self.bias
        entry = self.norm((value * gate.softmax(1)).sum(1, keepdim=True))
        entry = rope_pairs(entry, t - (self.block - 1), theta, rope_dim)
        here = torch.arange(entries.shape[1], device=x.device) * self.block + self.block - 1 == t[..., None]
        return recent, torch.where(here[..., None], entry, entries)

    def complete(self, entries: Tensor, t: Tensor) -> Tensor:
        """Which entries are complete at t, `[N]` or `[B, N]`."""
        return torch.arange(entries.shape[1], device=t.device) < (t[..., None] + 1) // self.block


class _EntryAttention(ScannedAttention):
    """What CSA and HCA share: queries, the window, the softmax over both, the output."""

    def __init__(self, model: NSAConfig, overlap: bool) -> None:
        super().__init__()
        p, heads, width = model.pattern, model.n_heads, model.head_dim
        self.config = model
        self.q_down = nn.Linear(model.dim, p.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(p.q_rank, eps=model.norm_eps)
        self.q_up = nn.Linear(p.q_rank, heads * width, bias=False)
        self.kv = nn.Linear(model.dim, width, bias=False)
        self.kv_norm = nn.RMSNorm(width, eps=model.norm_eps)
        self.compressor = Compressor(model.dim, width, p.block, overlap, model.norm_eps)
        self.sinks = nn.Parameter(torch.zeros(heads))
        self.out_down = nn.Linear(heads * width // p.out_groups, p.out_groups * p.out_rank, bias=False)
        self.out = nn.Linear(p.out_groups * p.out_rank, model.dim, bias=False)

    def room(self, state: Any) -> int:
        return state.kv.shape[1]

    def project(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The latent of queries `[B, r]`, queries `[B, Hq, D]`, and the key that is the value, `[B, D]`."""
        p, theta = self.config.pattern, self.config.rope_theta
        c_q = self.q_norm(self.q_down(x))
        q = self.q_up(c_q).unflatten(-1, (self.config.n_heads, -1))
        q = F.rms_norm(q, q.shape[-1:], eps=self.config.norm_eps)
        kv = rope_pairs(self.kv_norm(self.kv(x))[:, None], t, theta, p.rope_dim)[:, 0]
        return c_q, rope_pairs(q, t, theta, p.rope_dim), kv

    def attend(self, q: Tensor, kv: Tensor, entries: Tensor, seen: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output, and the weights `[B, Hq, N]` of entries, which `seen` `[B, N]` or `[N]` keeps."""
        p, position = self.config.pattern, torch.arange(kv.shape[1], device=q.device)
        window = (position <= t[..., None]) & (position > t[..., None] - p.window)
        near = torch.einsum("bhd,bsd->bhs", q, kv).masked_fill(~window[..., None, :], -torch.inf)
        far = torch.einsum("bhd,bnd->bhn", q, entries).masked_fill(~seen[..., None, :], -torch.inf)
        sinks = self.sinks.to(q.dtype)[:, None].expand(q.shape[0], -1, -1)
        weights = torch.cat([torch.cat([near, far], dim=-1) * q.shape[-1] ** -0.5, sinks], dim=-1).softmax(-1)
        near, far, _ = weights.split([kv.shape[1], entries.shape[1], 1], dim=-1)
        o = torch.einsum("bhs,bsd->bhd", near.to(kv.dtype), kv) + torch.einsum(
            "bhn,bnd->bhd", far.to(kv.dtype), entries
        )
        o = rope_pairs(o, -t, self.config.rope_theta, p.rope_dim)
        down = self.out_down.weight.unflatten(0, (p.out_groups, -1))
        o = torch.einsum("bgi,goi->bgo", o.flatten(1).unflatten(-1, (p.out_groups, -1)), down)
        return self.out(o.flatten(1)), far


class HCAttention(_EntryAttention):
    """Heavily compressed attention: a window and all entries of many tokens each; sizes are an `HCAPattern`."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model, overlap=False)

    def init_state(self, batch_size: int, max_len: int) -> EntryCache:
        kv = self.sinks.new_zeros(batch_size, max_len, self.config.head_dim)
        return EntryCache(kv, *self.compressor.empty(batch_size, max_len))

    def step(self, state: EntryCache, x: Tensor, t: Tensor) -> tuple[EntryCache, Tensor]:
        rope = (self.config.pattern.rope_dim, self.config.rope_theta)
        _, q, kv = self.project(x, t)
        kv = put(state.kv, kv, t)
        recent, entries = self.compressor.step(state.recent, state.entries, x, t, *rope)
        o, _ = self.attend(q, kv, entries, self.compressor.complete(entries, t), t)
        return EntryCache(kv, recent, entries), o


class CSAttention(_EntryAttention):
    """Compressed sparse attention: a window and the entries that an indexer chooses; sizes are a `CSAPattern`."""

    auxiliary = True

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model, overlap=True)
        p = model.pattern
        self.index_compressor = Compressor(model.dim, p.index_dim, p.block, True, model.norm_eps)
        self.index_q = nn.Linear(p.q_rank, p.index_heads * p.index_dim, bias=False)
        self.index_weight = nn.Linear(model.dim, p.index_heads, bias=False)

    def init_state(self, batch_size: int, max_len: int) -> IndexedEntryCache:
        kv = self.sinks.new_zeros(batch_size, max_len, self.config.head_dim)
        own = self.compressor.empty(batch_size, max_len)
        return IndexedEntryCache(kv, *own, *self.index_compressor.empty(batch_size, max_len))

    def step(self, state: IndexedEntryCache, x: Tensor, t: Tensor) -> tuple[IndexedEntryCache, Tensor, Tensor]:
        p, rope = self.config.pattern, (self.config.pattern.rope_dim, self.config.rope_theta)
        c_q, q, kv = self.project(x, t)
        kv = put(state.kv, kv, t)
        recent, entries = self.compressor.step(state.recent, state.entries, x, t, *rope)

        recent_index, keys = self.index_compressor.step(state.recent_index, state.index_entries, x.detach(), t, *rope)
        q_index = self.index_q(c_q.detach()).unflatten(-1, (p.index_heads, -1))
        q_index = rope_pairs(q_index, t, self.config.rope_theta, p.rope_dim)
        weight = self.index_weight(x.detach()) * (p.index_heads * p.index_dim) ** -0.5
        index = index_scores(weight, q_index, keys)
        complete = self.compressor.complete(entries, t)
        chosen = first_best(index.masked_fill(~complete, -torch.inf), p.num_selected) & complete  # [B, N]

        o, weights = self.attend(q, kv, entries, chosen, t)
        state = IndexedEntryCache(kv, recent, entries, recent_index, keys)
        return state, o, indexer_loss(weights.sum(1), index, chosen)
