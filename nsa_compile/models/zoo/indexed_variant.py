"""Attentions with an indexer, described: its loss, which is their statistic. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from nsa_compile.models.variant import AttentionVariant, LayerRow, Panel, Picture

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from nsa_compile.models.transformer import NSATransformer


@dataclass(frozen=True)
class IndexerRow(LayerRow):
    """How well the indexer of one layer foretells its attention.

    Attributes:
        layer: counted from 0.
        indexer_loss: its mean loss over the tokens, in nats.
    """

    indexer_loss: float


class Indexed(AttentionVariant):
    """Base of the attentions whose layers have an indexer, and its loss for one of their own."""

    auxiliary = True
    row = IndexerRow
    columns: ClassVar = {"layer": "layer", "indexer_loss": "indexer's loss"}
    legend = "KL divergence of the indexer's ranking from what attention gives the keys, in nats."
    pictures = (
        Picture("indexer", "Loss of each layer's indexer.", [[Panel("indexer_loss", share=False, label="nats")]]),
    )

    def sizes(self, settings: Mapping[str, Any]) -> str:
        return f", k = {settings['num_selected']}"

    def statistics(self, model: NSATransformer, tokens: Tensor) -> list[Any]:
        import torch

        rows = []
        with torch.no_grad():
            x = model.embedding(tokens)
            for number, block in enumerate(model.blocks):
                x, loss = block(x, return_auxiliary=True)
                rows.append(IndexerRow(number, loss.item()))
        return rows
