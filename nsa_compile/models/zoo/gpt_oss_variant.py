"""A sliding window with a learned sink, described: its sizes and its useful work. Imports no torch."""

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
class GptOssPattern(Pattern):
    """The window of gpt-oss.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    window: int = 128
    """Tokens of the sliding window, ``w``, the query's own included."""

    def __post_init__(self) -> None:
        require_int(self, "window", 1)


class GptOss(AttentionVariant):
    """A sliding window with a learned logit in the denominator of each head (gpt-oss, arXiv 2508.10925)."""

    pattern = GptOssPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.gpt_oss import SinkLogitAttention

        return SinkLogitAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import window_pairs

        return window_pairs(seq_len, seq_len, model.pattern.window)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        return [projections(model, kv_sets=1)]

    def sizes(self, settings: Mapping[str, Any]) -> str:
        return f", w = {settings['window']}"
