"""A decoder-only transformer around an attention: RMSNorm, RoPE, SwiGLU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.nsa import CompressionMLP, check_selecting, check_selection
from nsa_compile.ops.keeping import keep_selection
from nsa_compile.scanning import scan

__all__ = ["AttentionLayer", "ModelState", "NSATransformer", "ScannedAttention", "apply_rope"]

log = logging.getLogger("nsa_compile")
_said: set[str] = set()


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

    def caches(self) -> list[Tensor]:
        """The tensors `[B, ...]` of all layers, without those that a layer does not have."""
        return [cache for layer in self.layers for cache in layer if cache is not None]

    def with_caches(self, t: Tensor, caches: Iterable[Tensor]) -> ModelState:
        """The state of the same layers with other positions and tensors, as `caches` orders them."""
        rest = iter(caches)
        return ModelState(t, [type(layer)(*(x if x is None else next(rest) for x in layer)) for layer in self.layers])


def check_prompts(lengths: Tensor, shape: Sequence[int], max_len: int) -> None:
    """Refuse lengths that are not those of prompts `shape` = `[B, S]`, and caches that have no room for them.

    Not while a graph is captured. A CUDA device is not waited for: it checks by itself, see `_assert_on_cuda`.

    Raises:
        ValueError: one line that names the value and the rule.
    """
    batch, length = shape
    if not isinstance(lengths, Tensor):
        raise ValueError(f"lengths is a {type(lengths).__name__}; it must be a tensor torch.int64 [{batch}]")
    if max_len < length:
        raise ValueError(f"max_len = {max_len} must be at least {length}, the tokens that are read")
    if lengths.shape != (batch,) or lengths.dtype != torch.int64:
        raise ValueError(f"lengths is {lengths.dtype} {list(lengths.shape)}; it must be torch.int64 [{batch}]")
    if torch.compiler.is_compiling() or not batch:
        return
    if not lengths.is_cpu:
        _assert_on_cuda((lengths >= 1) & (lengths <= length), f"lengths must be from 1 to {length}")
        return
    least, most = int(lengths.min()), int(lengths.max())
    if least < 1 or most > length:
        raise ValueError(f"a length of {least if least < 1 else most} must be from 1 to {length}, the tokens of a row")


def check_room(t: Tensor, room: int | None) -> None:
    """Refuse a token behind the end of the caches, where the step would go on without its row. As `check_prompts`.

    Raises:
        ValueError: one line that names the position and the room.
    """
    if not isinstance(t, Tensor) or t.is_floating_point() or t.dtype == torch.bool:
        kind = t.dtype if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"t is a {kind}; it must be a tensor torch.int64, [] or [B]")
    if room is None or torch.compiler.is_compiling() or not t.numel():
        return
    if not t.is_cpu:
        _assert_on_cuda((t >= 0) & (t < room), f"a token has no row in caches for {room} tokens")
        return
    first, last = int(t.min()), int(t.max())
    if first < 0 or last >= room:
        where = first if first < 0 else last
        raise ValueError(f"a token at position {where} has no row in caches for {room} tokens; make a state for more")


def check_token(state: Sequence[Tensor | None], x: Tensor, t: Tensor, room: int | None) -> None:
    """Refuse a token `x` `[B, dim]` at a position `t` that does not go with a layer's state. As `check_room`.

    Raises:
        ValueError: one line that names the shape, or the position, and what it must be.
    """
    check_room(t, room)
    if torch.compiler.is_compiling():
        return
    rows = next(len(cache) for cache in state if cache is not None)
    if x.dim() != 2 or len(x) != rows:
        raise ValueError(f"x has shape {list(x.shape)}; with this state it must be [{rows}, dim]")
    if t.shape not in ((), (rows,)):
        raise ValueError(f"t has shape {list(t.shape)}; with this state it must be [] or [{rows}]")


def _assert_on_cuda(right: Tensor, message: str) -> None:
    """Let a CUDA device fail, when it comes to it, where not all are right; the host goes on."""
    if right.is_cuda:
        torch.ops.aten._assert_async.msg(right.all(), message)


class AttentionLayer(nn.Module):
    """What a block needs of an attention: `[B, S, dim] -> [B, S, dim]`, and the same token by token.

    A subclass ends in `out`, which writes to the residual stream. A state is a NamedTuple of caches; one that the layer
    does not have is None. What names no range of its own, such as a projection, belongs to the layer's, `nsa_range`.
    """

    nsa_range = "nsa.proj"
    out: nn.Linear
    # Whether the three methods take `selection` and `return_selection`: blocks of keys that are chosen for each token.
    selects = False
    # Whether `forward` takes `return_auxiliary`: the output and a loss of the layer's own, [], that training adds, the
    # mean over the tokens, or over those that are true in `counted`, bool [B, S].
    auxiliary = False
    # Whether a layer that is a loop over the tokens says so once where it runs uncompiled. What runs a whole model
    # uncompiled does so on purpose, or says so itself.
    says_uncompiled = True

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def init_state(self, batch_size: int, max_len: int) -> Any:
        """Empty caches for `max_len` tokens."""
        raise NotImplementedError

    def room(self, state: Any) -> int | None:
        """Tokens that a state's caches have room for; None for as many as you like."""
        return None

    def prefill(self, x: Tensor, lengths: Tensor, max_len: int) -> Any:
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

    def decode_step(self, state: Any, x: Tensor, t: Tensor) -> Any:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`."""
        raise NotImplementedError

    def say_uncompiled(self) -> None:
        """Warn once of such a layer, where nothing is being compiled."""
        if torch.compiler.is_compiling():
            return
        name = type(self).__name__
        if self.says_uncompiled and name not in _said:
            _said.add(name)
            log.warning(
                "%s runs uncompiled, as a slow loop over the tokens; nsa_compile.compile_block(layer) compiles it", name
            )


class ScannedAttention(AttentionLayer):
    """An attention that is all in its `step`: a sequence is :func:`nsa_compile.scan` of it, from an empty state.

    A subclass makes its projections, `out` among them, from a model's configuration, and has `init_state`, `step` and,
    where its caches have a row for each token, `room`. Uncompiled it is the loop over the tokens, and says so once.
    """

    def step(self, state: Any, x: Tensor, t: Tensor) -> tuple[Any, ...]:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`: the new state, the output
        `[B, dim]` and, of a layer with an `auxiliary` loss, that of the token, `[B]`."""
        raise NotImplementedError

    def forward(self, x: Tensor, return_auxiliary: bool = False, counted: Tensor | None = None) -> Any:
        """Attention of each token to those before it, `[B, S, dim]` to the same; with `return_auxiliary` a pair of it
        and the mean of the tokens' own losses, or of those `counted`."""
        self.say_uncompiled()

        def step(state: Any, token: tuple[Tensor, Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
            state, *outputs = self.step(state, token[1], token[0])
            return state, tuple(outputs if return_auxiliary else outputs[:1])

        rows = (torch.arange(x.shape[1], device=x.device), x.transpose(0, 1))
        _, (o, *losses) = scan(step, self.init_state(*x.shape[:2]), rows)
        if not return_auxiliary:
            return o.transpose(0, 1)
        own = losses[0]
        mean = own.mean() if counted is None else own.where(counted.T, 0.0).sum() / counted.sum()
        return o.transpose(0, 1), mean

    def decode_step(self, state: Any, x: Tensor, t: Tensor) -> tuple[Any, Tensor]:
        """The state and the output of `step`.

        Raises:
            ValueError: the caches have no room at that position, or `x` or `t` does not go with the state.
        """
        check_token(state, x, t, self.room(state))
        state, o, *_ = self.step(state, x, t)
        return state, o


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
        self.attention.says_uncompiled = False
        self.mlp_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.mlp = SwiGLU(config.dim, config.hidden_dim)

    def forward(self, x: Tensor, **asked: Any) -> Any:
        """The output; with `return_selection` or `return_auxiliary` a pair of it and the selection or the loss.

        `asked` is `selection` or `return_selection`, for an attention that `selects`, also below; or
        `return_auxiliary` and `counted`.
        """
        attended = self.attention(self.attention_norm(x), **asked)
        if not (asked.get("return_selection") or asked.get("return_auxiliary")):
            return self.after_attention(x, attended)
        o, further = attended
        return self.after_attention(x, o), further

    def after_attention(self, x: Tensor, o: Tensor) -> Tensor:
        """The rest of the layer: its input and the output of its attention, and the feed-forward layer on both."""
        x = x + o
        return x + self.mlp(self.mlp_norm(x))

    def prefill(self, x: Tensor, lengths: Tensor, max_len: int, **selecting: Any) -> tuple[Any, ...]:
        """The state of the attention after the first `lengths` `[B]` tokens of `x` `[B, S, dim]`, and the output; third
        the selection, if asked for."""
        state, o, *chosen = self.attention.prefill(self.attention_norm(x), lengths, max_len, **selecting)
        return (state, self.after_attention(x, o), *chosen)

    def decode_step(self, state: Any, x: Tensor, t: Tensor, **selecting: Any) -> tuple[Any, ...]:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`."""
        state, o, *chosen = self.attention.decode_step(state, self.attention_norm(x), t, **selecting)
        return (state, self.after_attention(x, o), *chosen)


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
        self.blocks = nn.ModuleList(Block(layer) for layer in config.layers())
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
            for layer in (block.attention.out, block.mlp.down):  # pyrefly: ignore[missing-attribute]
                nn.init.normal_(layer.weight, std=0.02 / (2 * self.config.n_layers) ** 0.5)

    def checkpoint_blocks(self, blocks: Collection[int]) -> None:
        """Keep only the inputs of these blocks for the backward pass, which computes the rest of them again.

        Compiled blocks also keep which blocks of keys they selected, and do not select again.
        """
        self.checkpointed = frozenset(blocks)

    def forward(
        self,
        tokens: Tensor,
        selection: Tensor | None = None,
        return_selection: bool = False,
        return_auxiliary: bool = False,
        counted: Tensor | None = None,
    ) -> Any:
        """Logits `[B, S, V]` of tokens `[B, S]` int64.

        Args:
            tokens: ids.
            selection: `[B, S, layers, G, n]` int32 or int64: the blocks of keys that each token reads in each layer,
                instead of those that it would rank best. A number that is no block's, such as -1, stands for none; one
                that comes twice counts once; a block after the token's own gives it nothing.
            return_selection: return the blocks that each token read, too, in this form.
            return_auxiliary: return the sum of the losses that layers have of their own, too, `[]`; see
                `AttentionVariant.auxiliary`.
            counted: `[B, S]` bool, the tokens whose such losses count, as those that are no padding; all by default.

        Returns:
            The logits, or a pair of them and what was asked for: the selection, int32, -1 where a token has fewer than
            n blocks; or the auxiliary loss.

        Raises:
            ValueError: the selection is of another shape or dtype, or the attention selects no blocks, or no layer has
                a loss of its own.
        """
        x = self.embedding(tokens)
        chosen: list[Tensor] = []
        asked = self._asked_of_layers(selection, return_selection, tokens.shape)
        losses = [False] * len(self.blocks)
        if return_auxiliary:
            losses = [bool(block.attention.auxiliary) for block in self.blocks]  # pyrefly: ignore[missing-attribute]
            if return_selection or not any(losses):
                raise ValueError(
                    "return_auxiliary = True needs a layer with a loss of its own, and no return_selection"
                )
        auxiliary: list[Tensor] = []
        for index, (block, selecting) in enumerate(zip(self.blocks, asked, strict=True)):
            if losses[index]:
                selecting = {**selecting, "return_auxiliary": True}
                selecting |= {} if counted is None else {"counted": counted}
            if index in self.checkpointed:
                # Inside a graph that is being captured the whole of a block is computed again.
                context = noop_context_fn if torch.compiler.is_compiling() else keep_selection
                # No generator's state to restore: a block draws no random numbers.
                options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": context}
                given = checkpoint(block, x, **options, **selecting)  # pyrefly: ignore[bad-argument-type]
            else:
                given = block(x, **selecting)
            x, *of_layer = given if return_selection or losses[index] else (given,)
            (auxiliary if losses[index] else chosen).extend(of_layer)
        logits = self.logits(x)
        if return_auxiliary:
            return logits, torch.stack(auxiliary).sum()
        return (logits, torch.stack(chosen, dim=2)) if return_selection else logits

    def logits(self, x: Tensor) -> Tensor:
        """`[..., V]` of what the last block gives, `[..., dim]`."""
        return self.head(self.norm(x))

    def _asked_of_layers(
        self, selection: Tensor | None, return_selection: bool, rows: torch.Size
    ) -> list[dict[str, Any]]:
        """What each block is given beside its input, of a selection `[*rows, layers, G, n]`: nothing, as a rule."""
        count = len(self.blocks)
        if selection is None and not return_selection:
            return [{}] * count
        check_selecting(all(block.attention.selects for block in self.blocks))  # pyrefly: ignore[missing-attribute]
        asked = {"return_selection": True} if return_selection else {}
        if selection is None:
            return [asked] * count
        check_selection(selection, [*rows, count, self.config.n_kv_heads])
        return [{"selection": of_layer, **asked} for of_layer in selection.unbind(len(rows))]

    def init_state(self, batch_size: int, max_len: int) -> ModelState:
        """Empty caches for generating up to `max_len` tokens."""
        t = torch.zeros(batch_size, dtype=torch.int64, device=self.embedding.weight.device)
        # pyrefly: ignore[missing-attribute]
        return ModelState(t, [block.attention.init_state(batch_size, max_len) for block in self.blocks])

    def prefill(
        self,
        tokens: Tensor,
        lengths: Tensor | None = None,
        max_len: int | None = None,
        *,
        every: bool = False,
        selection: Tensor | None = None,
        return_selection: bool = False,
        block: Callable[..., tuple[Any, ...]] = Block.prefill,
    ) -> Any:
        """Read prompts in one go: what `decode_step` makes of their tokens, one after the other.

        Args:
            tokens: `[B, S]` int64. Shorter prompts are filled up at the end, with any token.
            lengths: `[B]` int64, tokens of each prompt, from 1 to S; S by default.
            max_len: tokens that the caches have room for, S at least and by default.
            every: give the logits after every token, not only after the last one of each prompt.
            selection: `[B, S, layers, G, n]`, as `forward` takes it.
            return_selection: return the selection, too.
            block: runs one block, `(block, x, lengths, max_len) -> (state, x)`.

        Returns:
            The state after the prompts, and the logits `[B, V]` after the last token of each, or `[B, S, V]`; third the
            selection `[B, S, layers, G, n]`, if asked for.
        """
        batch, length = tokens.shape
        if lengths is None:
            lengths = torch.full((batch,), length, dtype=torch.int64, device=tokens.device)
        max_len = length if max_len is None else max_len
        check_prompts(lengths, tokens.shape, max_len)
        x = self.embedding(tokens)
        layers: list[Any] = []
        chosen: list[Tensor] = []
        asked = self._asked_of_layers(selection, return_selection, tokens.shape)
        for module, selecting in zip(self.blocks, asked, strict=True):
            layer, x, *of_layer = block(module, x, lengths, max_len, **selecting)
            layers.append(layer)
            chosen += of_layer
        read = x if every else x[torch.arange(batch, device=x.device), lengths - 1]
        return _with_selection(ModelState(lengths.clone(), layers), self.logits(read), chosen)

    def decode_step(
        self,
        state: ModelState,
        tokens: Tensor,
        *,
        selection: Tensor | None = None,
        return_selection: bool = False,
        block: Callable[..., tuple[Any, ...]] = Block.decode_step,
        logits: Callable[[NSATransformer, Tensor], Tensor] = logits,  # pyrefly: ignore[bad-function-definition]
    ) -> Any:
        """The next token of each sequence, `[B]` int64, to the new state and the logits `[B, V]` after it.

        `selection`, and what comes third with `return_selection`, are the blocks that the token reads in each layer,
        `[B, layers, G, n]`, as those of `forward`. `block` runs one block, `(block, state, x, t) -> (state, x)`, and
        `logits` what is after the last, `(model, x) -> logits`.

        Raises:
            ValueError: the caches have no room for a token more.
        """
        # pyrefly: ignore[missing-attribute]
        rooms = [module.attention.room(layer) for module, layer in zip(self.blocks, state.layers, strict=True)]
        limits = [room for room in rooms if room is not None]
        check_room(state.t, min(limits) if limits else None)
        x = self.embedding(tokens)
        layers: list[Any] = []
        chosen: list[Tensor] = []
        asked = self._asked_of_layers(selection, return_selection, tokens.shape)
        for module, layer, selecting in zip(self.blocks, state.layers, asked, strict=True):
            layer, x, *of_layer = block(module, layer, x, state.t, **selecting)
            layers.append(layer)
            chosen += of_layer
        return _with_selection(ModelState(state.t + 1, layers), logits(self, x), chosen)


def _with_selection(state: ModelState, logits: Tensor, chosen: list[Tensor]) -> tuple[Any, ...]:
    """State and logits, and the selections of the layers as one, `[..., layers, G, n]`, where there are any."""
    return (state, logits, torch.stack(chosen, dim=-3)) if chosen else (state, logits)
