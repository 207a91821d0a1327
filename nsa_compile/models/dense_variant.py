"""Dense causal attention, described: the baseline of every comparison. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_compile.models.variant import AttentionVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


class Dense(AttentionVariant):
    """Each query attends to all tokens up to its own, by SDPA."""

    scanned = False

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.dense_layer import DenseAttention

        return DenseAttention(model)

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.ops.flops import causal_pairs

        return causal_pairs(seq_len, seq_len)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        return [projections(model, kv_sets=1)]
