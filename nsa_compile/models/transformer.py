"""A decoder-only transformer around an attention: RMSNorm, RoPE, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from nsa_compile.loop import scan
from nsa_compile.models.config import NSAConfig
from nsa_compile.models.nsa import CompressionMLP
from nsa_compile.ops.keeping import keep_selection

__all__ = ["AttentionLayer", "ModelState", "NSATransformer", "apply_rope"]


def apply_rope(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate each head of `x` `[B, S, H, D]` by its position `[S]` or `[B, S]` (RoPE, arXiv 2104.09864), halves paired.

    The rotation acts within one head's D channels, never across heads, so scores depend on relative position only.
    Angles are computed in at least float32.
    """
    half = x.shape[-1] // 2
    dtype = torch.promote_types(x.dtype, torch.float32)
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = position.to(dtype)[..., None, None] * frequency  # [S, 1, D/2], or [B, S, 1, D/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x.to(dtype).split(half, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class ModelState(NamedTuple):
    """Everything generation carries from token to token."""

    t: Tensor  # [B] int64, the next position of each sequence
    layers: list[Any]  # of each block its attention's


class AttentionLayer(nn.Module):
    """What a block needs of an attention: `[B, S, dim] -> [B, S, dim]`, and the same token by token.

    A subclass ends in `out`, which writes to the residual stream. A state is a NamedTuple of caches; one that the layer
    does not have is None. What names no range of its own, such as a projection, belongs to the layer's, `nsa_range`.
    """

    nsa_range = "nsa.proj"
    out: nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def init_state(self, batch_size: int, max_len: int) -> Any:
        """Empty caches for `max_len` tokens."""
        raise NotImplementedError

    def prefill(self, x: Tensor, lengths: Tensor, max_len: int) -> tuple[Any, Tensor]:
        """A sequence in one go: the state after the first `lengths` `[B]` tokens of `x` `[B, S, dim]`, with room for
        `max_len`, and the output `[B, S, dim]`. What a state holds of later tokens is written before it is read.

        This one is a loop of `decode_step` for states of tensors `[B, ...]`, and stays one where it is compiled, as the
        lengths are data. A layer that knows which state its sequence leaves does without.
        """

        def step(state: Any, token: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
            t, row = token
            after, o = self.decode_step(state, row, t)
            there = t < lengths
            kept = (
                None if old is None else torch.where(there.reshape(-1, *[1] * (old.dim() - 1)), new, old)
                for new, old in zip(after, state, strict=True)
            )
            return type(state)(*kept), o

        rows = (torch.arange(x.shape[1], device=x.device), x.transpose(0, 1))
        state, o = scan(step, self.init_state(x.shape[0], max_len), rows)
        return state, o.transpose(0, 1)

    def decode_step(self, state: Any, x: Tensor, t: Tensor) -> tuple[Any, Tensor]:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`."""
        raise NotImplementedError


class SwiGLU(nn.Module):
    """The feed-forward layer of arXiv 2002.05202: `down(silu(gate(x)) · up(x))`."""

    nsa_range = "nsa.mlp"

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
        self.attention = config.variant.layer(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.after_attention(x, self.attention(self.attention_norm(x)))

    def after_attention(self, x: Tensor, o: Tensor) -> Tensor:
        """The rest of the layer: its input and the output of its attention, and the feed-forward layer on both."""
        x = x + o
        return x + self.mlp(self.mlp_norm(x))

    def prefill(self, x: Tensor, lengths: Tensor, max_len: int) -> tuple[Any, Tensor]:
        """The state of the attention after the first `lengths` `[B]` tokens of `x` `[B, S, dim]`, and the output."""
        state, o = self.attention.prefill(self.attention_norm(x), lengths, max_len)
        return state, self.after_attention(x, o)

    def decode_step(self, state: Any, x: Tensor, t: Tensor) -> tuple[Any, Tensor]:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`."""
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
        t = torch.zeros(batch_size, dtype=torch.int64, device=self.embedding.weight.device)
        return ModelState(t, [block.attention.init_state(batch_size, max_len) for block in self.blocks])

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        max_len: int | None = None,
        *,
        every: bool = False,
        block: Callable[..., tuple[Any, Tensor]] = Block.prefill,
    ) -> tuple[ModelState, Tensor]:
        """Read prompts in one go: what `decode_step` makes of their tokens, one after the other.

        Args:
            tokens: `[B, S]` int64. Shorter prompts are filled up at the end, with any token.
            lengths: `[B]` int64, tokens of each prompt, from 1 to S; S by default.
            max_len: tokens that the caches have room for, S at least and by default.
            every: give the logits after every token, not only after the last one of each prompt.
            block: runs one block, `(block, x, lengths, max_len) -> (state, x)`.

        Returns:
            The state after the prompts, and the logits `[B, V]` after the last token of each, or `[B, S, V]`.
        """
        batch, length = tokens.shape
        if lengths is None:
            lengths = torch.full((batch,), length, dtype=torch.int64, device=tokens.device)
        x = self.embedding(tokens)
        layers = []
        for module in self.blocks:
            layer, x = block(module, x, lengths, length if max_len is None else max_len)
            layers.append(layer)
        read = x if every else x[torch.arange(batch, device=x.device), lengths - 1]
        return ModelState(lengths.clone(), layers), self.head(self.norm(read))

    def decode_step(
        self, state: ModelState, tokens: Tensor, *, block: Callable[..., tuple[Any, Tensor]] = Block.decode_step
    ) -> tuple[ModelState, Tensor]:
        """The next token of each sequence, `[B]` int64, to the new state and the logits `[B, V]` after it.

        `block` runs one block, `(block, state, x, t) -> (state, x)`.
        """
        x = self.embedding(tokens)
        layers = []
        for module, layer in zip(self.blocks, state.layers, strict=True):
            layer, x = block(module, layer, x, state.t)
            layers.append(layer)
        return ModelState(state.t + 1, layers), self.head(self.norm(x))
