"""DeltaNet, described: its sizes and its useful work. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_compile.models.zoo.recurrent_variant import Delta

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


class DeltaNet(Delta):
    """Linear attention by the delta rule (arXiv 2406.06484)."""

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.zoo.delta_net import DeltaNetAttention

        return DeltaNetAttention(model)
