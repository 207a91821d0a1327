"""What the descriptions of the attentions of this folder have in common. Imports no torch."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING, ClassVar

from nsa_compile.models.variant import AttentionVariant

if TYPE_CHECKING:
    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer


class ZooVariant(AttentionVariant):
    """An attention whose layer lies in a file of its own, with the projections of grouped queries if nothing else is
    said.

    Attributes:
        layer_class: the layer, as ``module:class`` of this folder.
    """

    layer_class: ClassVar[str]

    def layer(self, model: NSAConfig) -> AttentionLayer:
        layer: AttentionLayer = pkgutil.resolve_name(f"{__package__}.{self.layer_class}")(model)
        return layer

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import projections

        return [projections(model, kv_sets=1)]
