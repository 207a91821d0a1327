"""A sliding window with attention sinks, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nsa_compile.models.pattern import Pattern, require_int
from nsa_compile.models.variant import AttentionVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


@dataclass(frozen=True)
class StreamingPattern(Pattern):
    """Tokens that a query of StreamingLLM sees, 1,024 by default.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    window: int = 1020
    """Tokens of the sliding window, ``w``, the query's own included."""
    num_sinks: int = 4
    """Tokens at the start of the sequence that every query sees, ``s``."""

    def __post_init__(self) -> None:
        require_int(self, "window", 1)
        require_int(self, "num_sinks", 0)


class Streaming(AttentionVariant):
    """A sliding window and the first tokens (StreamingLLM, arXiv 2309.17453)."""

    pattern = StreamingPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.streaming import StreamingAttention

        return StreamingAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import causal_pairs, window_pairs

        window, sinks = model.pattern.window, model.pattern.num_sinks
        # Of what a query does not see through the window, the last token is w before its own.
        return window_pairs(seq_len, seq_len, window) + causal_pairs(seq_len - window, sinks)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        return [projections(model, kv_sets=1)]

    def sizes(self, settings: Mapping[str, Any]) -> str:
        return f", w = {settings['window']}"
