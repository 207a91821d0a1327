"""Longformer's attention, described: its sizes and its useful work. Imports no torch."""

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
class LongformerPattern(Pattern):
    """Windows of Longformer; two heads are dilated, as in the upper layers of the paper's language models.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    window: int = 512
    """Tokens that a query sees, ``w``, its own included."""
    dilation: int = 2
    """Distance between the tokens that a dilated head sees, ``d``."""
    num_dilated: int = 2
    """Heads that are dilated, the last ones."""

    def __post_init__(self) -> None:
        require_int(self, "window", 1)
        require_int(self, "dilation", 1)
        require_int(self, "num_dilated", 0)


class Longformer(AttentionVariant):
    """Sliding windows, dilated in a few heads (arXiv 2004.05150)."""

    pattern = LongformerPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.longformer import LongformerAttention

        return LongformerAttention(model)

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

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        return [projections(model, kv_sets=1)]

    def sizes(self, settings: Mapping[str, Any]) -> str:
        return f", w = {settings['window']}"
