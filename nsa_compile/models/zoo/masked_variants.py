"""Attentions to tokens or blocks that positions or scores choose, described: their sizes and their useful work.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nsa_compile.models.pattern import Pattern
from nsa_compile.models.zoo.zoo_variant import ZooVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig


@dataclass(frozen=True)
class GQAPattern(Pattern):
    """Nothing: every token attends to all before it."""


class GQA(ZooVariant):
    """Grouped-query attention (arXiv 2305.13245) as a decode step."""

    pattern = GQAPattern
    layer_class = "gqa:GroupedQueryAttention"

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import causal_pairs

        return causal_pairs(seq_len, seq_len)


@dataclass(frozen=True)
class StreamingPattern(Pattern):
    """Tokens that a query of StreamingLLM sees, 1,024 by default."""

    from_zero = ("num_sinks",)

    window: int = 1020
    """Tokens of the sliding window, ``w``, the query's own included."""
    num_sinks: int = 4
    """Tokens at the start of the sequence that every query sees, ``s``."""


class Streaming(ZooVariant):
    """A sliding window and the first tokens (StreamingLLM, arXiv 2309.17453)."""

    pattern = StreamingPattern
    layer_class = "streaming:StreamingAttention"
    shown_sizes: ClassVar = {"w": "window"}

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import causal_pairs, window_pairs

        window, sinks = model.pattern.window, model.pattern.num_sinks
        # Of what a query does not see through the window, the last token is w before its own.
        return window_pairs(seq_len, seq_len, window) + causal_pairs(seq_len - window, sinks)


@dataclass(frozen=True)
class GptOssPattern(Pattern):
    """The window of gpt-oss."""

    window: int = 128
    """Tokens of the sliding window, ``w``, the query's own included."""


class GptOss(ZooVariant):
    """A sliding window with a learned logit in the denominator of each head (gpt-oss, arXiv 2508.10925)."""

    pattern = GptOssPattern
    layer_class = "gpt_oss:SinkLogitAttention"
    shown_sizes: ClassVar = {"w": "window"}

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import window_pairs

        return window_pairs(seq_len, seq_len, model.pattern.window)


@dataclass(frozen=True)
class LongformerPattern(Pattern):
    """Windows of Longformer; two heads are dilated, as in the upper layers of the paper's language models."""

    from_zero = ("num_dilated",)

    window: int = 512
    """Tokens that a query sees, ``w``, its own included."""
    dilation: int = 2
    """Distance between the tokens that a dilated head sees, ``d``."""
    num_dilated: int = 2
    """Heads that are dilated, the last ones."""


class Longformer(ZooVariant):
    """Sliding windows, dilated in a few heads (arXiv 2004.05150)."""

    pattern = LongformerPattern
    layer_class = "longformer:LongformerAttention"
    shown_sizes: ClassVar = {"w": "window"}

    def mistake(self, model: NSAConfig) -> str | None:
        if model.pattern.num_dilated <= model.n_heads:
            return None
        return f"pattern.num_dilated = {model.pattern.num_dilated} must be at most n_heads = {model.n_heads}"

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        """The mean of the heads, rounded down."""
        from nsa_compile.ops.flops import window_pairs

        pattern = model.pattern
        # A dilated head sees every d-th token: d sequences of their own.
        dilated = sum(
            window_pairs(length, length, pattern.window)
            for length in (len(range(first, seq_len, pattern.dilation)) for first in range(pattern.dilation))
        )
        plain = window_pairs(seq_len, seq_len, pattern.window)
        return (pattern.num_dilated * dilated + (model.n_heads - pattern.num_dilated) * plain) // model.n_heads


@dataclass(frozen=True)
class BigBirdPattern(Pattern):
    """Blocks that a query of BigBird sees."""

    from_zero = ("num_global", "num_random")

    block: int = 64
    """Tokens of a block, ``b``."""
    num_window: int = 3
    """Blocks up to the query's own, ``w``, that it sees."""
    num_global: int = 2
    """Blocks at the start of the sequence, ``g``, that every query sees."""
    num_random: int = 3
    """Blocks before the query's own, ``r``, that are drawn for it once and for all, some perhaps twice."""


def drawn_block(block: Any, head: Any, draw: Any) -> Any:
    """The number of a block before `block`, 0 if there is none, that the `draw`-th draw of a `head` gives its queries.

    Of integers, or of tensors of them. Large primes stand for chance.
    """
    return (block * 7919 + head * 104729 + draw * 1299709) % 1000003 % (block + (block == 0))


class BigBird(ZooVariant):
    """A window of blocks, global blocks and drawn blocks (arXiv 2007.14062), without what is later than the query."""

    pattern = BigBirdPattern
    layer_class = "bigbird:BigBirdAttention"

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        """The mean of the heads, rounded down."""
        p = model.pattern
        total = 0
        for own in range(-(-seq_len // p.block)):
            queries = min(p.block, seq_len - own * p.block)
            near = {*range(min(p.num_global, own)), *range(max(0, own - p.num_window + 1), own)}
            for head in range(model.n_heads):
                others = near | {drawn_block(own, head, draw) for draw in range(p.num_random)} - {own}
                total += queries * len(others) * p.block + queries * (queries + 1) // 2
        return total // model.n_heads


class _BestBlocks(ZooVariant):
    """What attentions to the ``num_selected`` best of all blocks share, the query's own among them."""

    shown_sizes: ClassVar = {"k": "num_selected"}

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import selected_pairs

        return selected_pairs(seq_len, seq_len, model.pattern.num_selected, model.pattern.block)


@dataclass(frozen=True)
class MoBAPattern(Pattern):
    """Blocks of MoBA, as the paper has them for sequences of 8,192 tokens."""

    block: int = 512
    """Tokens of a block, ``B``."""
    num_selected: int = 3
    """Blocks that a query attends to, ``k``, its own included."""


class MoBA(_BestBlocks):
    """Mixture of block attention (arXiv 2502.13189)."""

    pattern = MoBAPattern
    layer_class = "moba:MoBAttention"

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import blocks_before

        gate = blocks_before(model.pattern.block, seq_len) / seq_len * model.n_heads * model.head_dim
        return [*super().multiplies(model, seq_len), gate]


@dataclass(frozen=True)
class QuestPattern(Pattern):
    """Pages of Quest: 1,024 tokens of a query by default."""

    block: int = 16
    """Tokens of a page, ``B``."""
    num_selected: int = 64
    """Pages that a query attends to, ``k``, its own included."""


class Quest(_BestBlocks):
    """Pages ranked by a bound of their keys' scores (arXiv 2406.10774)."""

    pattern = QuestPattern
    layer_class = "quest:QuestAttention"

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import blocks_before

        # A bound multiplies a query with both ends of each channel.
        bounds = 2 * blocks_before(model.pattern.block, seq_len) / seq_len * model.n_heads * model.head_dim
        return [*super().multiplies(model, seq_len), bounds]


@dataclass(frozen=True)
class InfLLMPattern(Pattern):
    """Blocks of InfLLM-V2 as in MiniCPM4.1: 96 of 64 tokens."""

    from_zero = ("num_initial", "dense_len")

    pool_block: int = 32
    """Tokens pooled into one key, ``l``."""
    pool_stride: int = 16
    """Tokens between the starts of neighbouring pooled keys, ``d``; divides ``l`` and ``B``."""
    block: int = 64
    """Tokens of a block, ``B``."""
    num_selected: int = 64
    """Blocks that a group of heads attends to, ``k``, the first ones included, beside the window."""
    num_initial: int = 1
    """Blocks at the start of the sequence that are always selected; they count towards ``k``."""
    window: int = 2048
    """Tokens of the last blocks, the query's own counted as whole; a multiple of ``B``."""
    dense_len: int = 8192
    """Position from which a query no longer sees all tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pool_block", "block"):
            if getattr(self, name) % self.pool_stride:
                raise ValueError(
                    f"{name} = {getattr(self, name)} must be a multiple of pool_stride = {self.pool_stride}"
                )
        if self.window % self.block:
            raise ValueError(f"window = {self.window} must be a multiple of block = {self.block}")
        if self.num_initial > self.num_selected:
            raise ValueError(
                f"num_initial = {self.num_initial} must be at most num_selected = {self.num_selected}, towards which "
                "the first blocks count"
            )


class InfLLM(ZooVariant):
    """First, last and best blocks by pooled keys, dense at first (arXiv 2509.24663)."""

    pattern = InfLLMPattern
    layer_class = "infllm_v2:InfLLMAttention"
    shown_sizes: ClassVar = {"k": "num_selected", "w": "window"}

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import causal_pairs, selected_pairs

        p = model.pattern
        dense = min(seq_len, p.dense_len)
        sparse = [
            selected_pairs(length, length, p.num_selected + p.window // p.block, p.block) for length in (seq_len, dense)
        ]
        return causal_pairs(dense, dense) + sparse[0] - sparse[1]

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.ops.flops import compressed_pairs

        p = model.pattern
        blocks = max(0, (seq_len - p.pool_block) // p.pool_stride + 1)
        # Queries that see all rank nothing.
        ranking = sum(
            sign * compressed_pairs(length, blocks, p.pool_block, p.pool_stride)
            for sign, length in ((1, seq_len), (-1, min(seq_len, p.dense_len)))
        )
        return [*super().multiplies(model, seq_len), ranking / seq_len * model.n_heads * model.head_dim]
