"""A decoder-only transformer around Native Sparse Attention: RMSNorm, RoPE, SwiGLU."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from nsa_compile.models.config import BRANCHES, NSAConfig
from nsa_compile.models.nsa import CompressionMLP, NSAState, NSAToken, decode_step, init_state, mean_phi, nsa_attention
from nsa_compile.ops.keeping import keep_selection

__all__ = ["ModelState", "NSATransformer", "apply_rope"]


def apply_rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate each head of `x` `[..., S, H, D]` by its position `[S]` (RoPE, arXiv 2104.09864), halves paired.

    The rotation acts within one head's D channels, never across heads, so scores depend on relative position only.
    Angles are computed in at least float32.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = position.to(dtype)[:, None] * frequency  # [S, D/2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]  # [S, 1, D/2]
    a, b = x.to(dtype).split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class KVCache(NamedTuple):
    """The cache of one dense attention layer."""

    k: Tensor  # [B, S, G, D]
    v: Tensor  # [B, S, G, Dv]


class ModelState(NamedTuple):
    """Everything generation carries from token to token."""

    t: Tensor  # [] int64, the next position
    layers: list[NSAState | KVCache]


class NSAttention(nn.Module):
    """Multi-head NSA with its projections and gates: `[B, S, dim] -> [B, S, dim]`.

    Keys and values have a projection for each branch (the paper's choice) or one shared by all. A branch that
    `config.branches` lacks has neither projection nor gate. Gates are a sigmoid
    per branch and head of the layer's input. RoPE turns queries and keys of the selected and the window branch;
    compression happens on keys before RoPE, so the compressed branch reads with an unrotated query.
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        heads, groups, dim = config.n_heads, config.n_kv_heads, config.dim
        key_dim, value_dim = config.head_dim, config.value_dim
        kv_sets = 1 if config.shared_kv else len(config.branches)
        self.q = nn.Linear(dim, heads * key_dim, bias=False)
        self.k = nn.Linear(dim, kv_sets * groups * key_dim, bias=False)
        self.v = nn.Linear(dim, kv_sets * groups * value_dim, bias=False)
        self.gate = nn.Linear(dim, heads * len(config.branches))
        self.out = nn.Linear(heads * value_dim, dim, bias=False)
        if config.phi == "mlp" and "compressed" in config.branches:
            block = config.pattern.compress_block
            self.phi_k: nn.Module | None = CompressionMLP(block, key_dim, config.phi_hidden)
            self.phi_v: nn.Module | None = CompressionMLP(block, value_dim, config.phi_hidden)
        else:
            self.phi_k = self.phi_v = None

    @property
    def _phi(self):
        return (mean_phi, mean_phi) if self.phi_k is None else (self.phi_k, self.phi_v)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor | None, ...]:
        """q, q_cmp, then keys and values of each branch, and gates, of `x` `[B, S, dim]` at `position` `[S]`."""
        config = self.config
        groups = config.n_kv_heads
        q_cmp = self.q(x).unflatten(-1, (config.n_heads, -1))
        gates = self.gate(x).sigmoid().unflatten(-1, (config.n_heads, -1))
        keys = self.k(x).unflatten(-1, (-1, groups, config.head_dim)).unbind(-3)
        values = self.v(x).unflatten(-1, (-1, groups, config.value_dim)).unbind(-3)

        def rope(y: Tensor) -> Tensor:
            return apply_rope(y, position, config.rope_theta)

        q = rope(q_cmp)
        if config.shared_kv:
            return q, q_cmp, keys[0], values[0], rope(keys[0]), values[0], None, None, gates
        # A branch that is not there is handed the first one's, which it does not read.
        cmp, slc, win = (config.branches.index(b) if b in config.branches else 0 for b in BRANCHES)
        return q, q_cmp, keys[cmp], values[cmp], rope(keys[slc]), values[slc], rope(keys[win]), values[win], gates

    def forward(self, x: Tensor) -> Tensor:
        return self.merge_heads(nsa_attention(**self.attention_inputs(x)))

    def attention_inputs(self, x: Tensor) -> dict[str, Any]:
        """What `nsa_attention` takes, by name, of the layer's input."""
        position = torch.arange(x.shape[1], device=x.device)
        q, q_cmp, *kv, gates = self._project(x, position)
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = kv
        return {
            "q": q, "k_cmp": k_cmp, "v_cmp": v_cmp, "k_slc": k_slc, "v_slc": v_slc, "k_win": k_win, "v_win": v_win,
            "gates": gates, "pattern": self.config.pattern, "phi": self._phi, "q_cmp": q_cmp,
            "branches": self.config.branches,
        }  # fmt: skip

    def merge_heads(self, o: Tensor) -> Tensor:
        """The layer's output of that of its heads, `[..., Hq, Dv] -> [..., dim]`."""
        return self.out(o.flatten(-2))

    def init_state(self, batch_size: int, max_len: int) -> NSAState:
        config, weight = self.config, self.q.weight
        key = weight.new_empty(config.n_kv_heads, config.head_dim)
        value = weight.new_empty(config.n_kv_heads, config.value_dim)
        return init_state(batch_size, max_len, key, value, pattern=config.pattern, shared_kv=config.shared_kv)

    def decode_step(self, state: NSAState, x: Tensor, t: Tensor) -> tuple[NSAState, Tensor]:
        """One token `x` `[B, dim]` at position `t`."""
        projected = (None if y is None else y[:, 0] for y in self._project(x[:, None], t[None]))
        phi_k, phi_v = self._phi
        pattern, branches = self.config.pattern, self.config.branches
        state, o = decode_step(
            state, NSAToken(t, *projected), pattern=pattern, phi_k=phi_k, phi_v=phi_v, branches=branches
        )
        return state, self.merge_heads(o)


class DenseAttention(nn.Module):
    """Causal grouped-query attention over everything: the baseline of every comparison."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        value_dim = config.value_dim
        self.q = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.k = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.v = nn.Linear(config.dim, config.n_kv_heads * value_dim, bias=False)
        self.out = nn.Linear(config.n_heads * value_dim, config.dim, bias=False)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        q = apply_rope(self.q(x).unflatten(-1, (config.n_heads, -1)), position, config.rope_theta)
        k = apply_rope(self.k(x).unflatten(-1, (config.n_kv_heads, -1)), position, config.rope_theta)
        return q, k, self.v(x).unflatten(-1, (config.n_kv_heads, -1))

    def forward(self, x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1], device=x.device)
        q, k, v = (y.transpose(1, 2) for y in self._project(x, position))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(-2))

    def init_state(self, batch_size: int, max_len: int) -> KVCache:
        config, weight = self.config, self.q.weight
        value_dim = config.value_dim
        return KVCache(
            weight.new_zeros(batch_size, max_len, config.n_kv_heads, config.head_dim),
            weight.new_zeros(batch_size, max_len, config.n_kv_heads, value_dim),
        )

    def decode_step(self, state: KVCache, x: Tensor, t: Tensor) -> tuple[KVCache, Tensor]:
        """One token `x` `[B, dim]` at position `t`."""
        q, k, v = self._project(x[:, None], t[None])
        position = torch.arange(state.k.shape[1], device=x.device)
        here = (position == t)[:, None, None]
        state = KVCache(torch.where(here, k, state.k), torch.where(here, v, state.v))
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            state.k.transpose(1, 2),
            state.v.transpose(1, 2),
            attn_mask=(position <= t)[None, None, None],
            enable_gqa=True,
        )
        return state, self.out(o.transpose(1, 2)[:, 0].flatten(-2))


class SwiGLU(nn.Module):
    """The feed-forward layer of arXiv 2002.05202: `down(silu(gate(x)) · up(x))`."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer, `[B, S, dim] -> [B, S, dim]`: the unit that is compiled, so equal layers compile once."""

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = NSAttention(config) if config.attention == "nsa" else DenseAttention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_attention(x, self.attention(self.attention_norm(x)))

    def after_attention(self, x: Tensor, o: Tensor) -> Tensor:
        """The rest of the layer: its input and the output of its attention, and the feed-forward layer on both."""
        x = x + o
        return x + self.mlp(self.mlp_norm(x))

    def decode_step(self, state: NSAState | KVCache, x: Tensor, t: Tensor) -> tuple[NSAState | KVCache, Tensor]:
        """One token `x` `[B, dim]` at position `t`."""
        state, o = self.attention.decode_step(state, self.attention_norm(x), t)
        return state, self.after_attention(x, o)


class NSATransformer(nn.Module):
    """A language model: tokens `[B, S]` int64 to logits `[B, S, V]`.

    Eagerly each attention layer is a loop over the tokens (`nsa_compile.scan`); `torch.compile(model,
    backend="nsa_compile")` turns it into batched operators. Generation is the same step without the loop:
    `init_state` and `decode_step`.
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.checkpointed: frozenset[int] = frozenset()
        self._init_weights()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def _init_weights(self) -> None:
        """Normal weights of std 0.02; layers that write to the residual stream are scaled down by depth (GPT-2)."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, CompressionMLP):
                # φ starts as strong as a mean over the block, or the compressed branch would start silent.
                nn.init.normal_(module.up.weight, std=module.up.in_features**-0.5)
                nn.init.normal_(module.down.weight, std=module.down.in_features**-0.5)
        for block in self.blocks:
            for layer in (block.attention.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=0.02 / (2 * self.config.n_layers) ** 0.5)

    def checkpoint_blocks(self, blocks: Collection[int]) -> None:
        """Keep only the inputs of these blocks for the backward pass, which computes the rest of them again.

        Compiled blocks also keep which blocks of keys they selected, and do not select again.
        """
        self.checkpointed = frozenset(blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if index in self.checkpointed:
                # Inside a graph that is being captured the whole of a block is computed again.
                context = noop_context_fn if torch.compiler.is_compiling() else keep_selection
                # No generator's state to restore: a block draws no random numbers.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=context)
            else:
                x = block(x)
        return self.head(self.norm(x))

    def init_state(self, batch_size: int, max_len: int) -> ModelState:
        """Empty caches for generating up to `max_len` tokens."""
        t = torch.zeros((), dtype=torch.int64, device=self.embedding.weight.device)
        return ModelState(t, [block.attention.init_state(batch_size, max_len) for block in self.blocks])

    def decode_step(self, state: ModelState, tokens: Tensor) -> tuple[ModelState, Tensor]:
        """The next token of each sequence, `[B]` int64, to the new state and the logits `[B, V]` after it."""
        x = self.embedding(tokens)
        layers = []
        for block, layer in zip(self.blocks, state.layers, strict=True):
            layer, x = block.decode_step(layer, x, state.t)
            layers.append(layer)
        return ModelState(state.t + 1, layers), self.head(self.norm(x))
