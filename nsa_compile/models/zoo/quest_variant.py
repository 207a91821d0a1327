"""Quest, described: its sizes and its useful work. Imports no torch."""

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
class QuestPattern(Pattern):
    """Pages of Quest: 1,024 tokens of a query by default.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    block: int = 16
    """Tokens of a page, ``B``."""
    num_selected: int = 64
    """Pages that a query attends to, ``k``, its own included."""

    def __post_init__(self) -> None:
        require_int(self, "block", 1)
        require_int(self, "num_selected", 1)


class Quest(AttentionVariant):
    """Pages ranked by a bound of their keys' scores (arXiv 2406.10774)."""

    pattern = QuestPattern

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.quest import QuestAttention

        return QuestAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import selected_pairs

        return selected_pairs(seq_len, seq_len, model.pattern.num_selected, model.pattern.block)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import blocks_before, projections

        # A bound multiplies a query with both ends of each channel.
        bounds = 2 * blocks_before(model.pattern.block, seq_len) / seq_len * model.n_heads * model.head_dim
        return [projections(model, kv_sets=1), bounds]

    def sizes(self, settings: Mapping[str, Any]) -> str:
        return f", k = {settings['num_selected']}"
