"""Gated DeltaNet, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_compile.models.zoo.recurrent_variant import Delta

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


class GatedDeltaNet(Delta):
    """The delta rule with a decay of each head (arXiv 2412.06464)."""

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.gated_delta_net import GatedDeltaNetAttention

        return GatedDeltaNetAttention(model)

    def beside(self, model: NSAConfig) -> int:
        return super().beside(model) + model.dim * model.n_heads * (1 + model.value_dim)
