"""Native Sparse Attention, described: sizes, useful work, statistics and what is shown of them. Imports no torch.

The step is in ``nsa.py``, its layer in ``nsa_layer.py``, what measures a layer in ``nsa_statistics.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from nsa_compile.branches import BRANCHES
from nsa_compile.models.variant import AttentionVariant, LayerRow, Panel, Picture

if TYPE_CHECKING:
    from torch import Tensor

    from nsa_compile.models.config import NSAConfig
    from nsa_compile.models.transformer import AttentionLayer, NSATransformer


@dataclass(frozen=True)
class LayerStatistics(LayerRow):
    """What the attention of one layer does, over the tokens, heads and sequences of a batch.

    A block is chosen freely where it is neither one of the first nor one of the local blocks, which every query gets.
    ``None`` stands for what the sequences are too short for.

    Attributes:
        layer: counted from 0.
        gate_compressed, gate_selected, gate_window: mean gate, in [0, 1].
        share_compressed, share_selected, share_window: mean share of each branch in the sum of the norms of the gated
            outputs, so that the three add up to 1.
        gate_entropy: mean entropy of a query's gates, made to add up to 1, as a fraction of its maximum, ln 3:
            1 where the gates are equal, 0 where one is alone.
        selection_entropy: entropy of the free choices over the blocks that could be chosen, as a fraction of its
            maximum: 0 where every query chooses the same block.
        distance_mean, distance_p10, distance_p50, distance_p90: tokens from the last token of a freely chosen block
            to its query: mean and quantiles.
        beyond_window: share of the queries with free choices of which one lies outside of the window as a whole.
    """

    gate_compressed: float
    gate_selected: float
    gate_window: float
    share_compressed: float
    share_selected: float
    share_window: float
    gate_entropy: float
    selection_entropy: float | None
    distance_mean: float | None
    distance_p10: float | None
    distance_p50: float | None
    distance_p90: float | None
    beyond_window: float | None


class NSA(AttentionVariant):
    """Native Sparse Attention (arXiv 2502.11089): compressed blocks, selected blocks and a window, each with a gate."""

    shown_sizes: ClassVar = {"n": "num_selected", "w": "window"}
    verified = True
    ranges_expected: ClassVar = {"nsa.sel.ranges_v2": "selected attention did not run on token ranges"}
    row = LayerStatistics
    gated = True
    columns: ClassVar = {
        "layer": "layer",
        "gate_compressed": "gate: cmp",
        "gate_selected": "slc",
        "gate_window": "win",
        "share_compressed": "share: cmp",
        "share_selected": "slc",
        "share_window": "win",
        "gate_entropy": "entropy: gates",
        "selection_entropy": "selection",
        "distance_mean": "distance: mean",
        "distance_p10": "10 %",
        "distance_p50": "50 %",
        "distance_p90": "90 %",
        "beyond_window": "beyond window",
    }
    legend = (
        "mean gates and shares of the output's norm by branch. Entropies are fractions of their maximum; distances are "
        "in tokens, of blocks chosen freely."
    )
    pictures = (
        Picture(
            "gates",
            "Mean gate of each branch by layer, and its share of the output's norm.",
            [
                (
                    Panel(f"gate_{branch}", label=branch, title="" if line else "mean gate"),
                    Panel(f"share_{branch}", title="" if line else "share of the output"),
                )
                for line, branch in enumerate(BRANCHES)
            ],
        ),
        Picture(
            "selection",
            "Blocks chosen freely, by layer: their distance, how they spread, how often they leave the window.",
            [
                [Panel("distance_p50", share=False, label="distance, tokens")],
                [Panel("selection_entropy", label="entropy / max.")],
                [Panel("beyond_window", label="beyond window")],
            ],
        ),
    )

    def layer(self, model: NSAConfig) -> AttentionLayer:
        from nsa_compile.models.nsa_layer import NSAttention

        fields = (
            "dim", "n_heads", "n_kv_heads", "head_dim", "v_head_dim", "pattern", "phi", "phi_hidden", "shared_kv",
            "compress_rotated", "branches", "rope_theta",
        )  # fmt: skip
        return NSAttention(**{name: getattr(model, name) for name in fields})

    def min_seq_len(self, model: NSAConfig) -> tuple[int, str]:
        least = model.pattern.compress_block
        return least, f"model.pattern.compress_block = {least}, or no query ever sees a compressed block"

    def pairs(self, model: NSAConfig, seq_len: int) -> int:
        from nsa_compile.models.flops import visible_compressed, visible_selected, visible_window

        visible = {"compressed": visible_compressed, "selected": visible_selected, "window": visible_window}
        return sum(visible[branch](model.pattern, seq_len) for branch in model.branches)

    def multiplies(self, model: NSAConfig, seq_len: int) -> list[float]:
        from nsa_compile.models.flops import compressed_blocks, projections

        gates = model.dim * model.n_heads * len(model.branches)
        parts: list[float] = [projections(model, 1 if model.shared_kv else len(model.branches)), gates]
        if model.phi == "mlp" and "compressed" in model.branches:
            blocks_per_token = compressed_blocks(model.pattern, seq_len) / seq_len
            phi = sum(_phi(model, width) for width in (model.head_dim, model.value_dim))
            parts.append(blocks_per_token * model.n_kv_heads * phi)
        return parts

    def statistics(self, model: NSATransformer, tokens: Tensor) -> list[LayerStatistics]:
        """None where ``model.branches`` leaves a branch out, because then there are no three to weigh."""
        if model.config.branches != BRANCHES:
            return []
        from nsa_compile.models.nsa_statistics import attention_statistics

        return attention_statistics(model, tokens)


def _phi(model: NSAConfig, width: int) -> int:
    """Multiplies of the compression MLP for one block of keys or values, ``[l, width] -> [width]``."""
    return (model.pattern.compress_block + 1) * width * (model.phi_hidden or 2 * width)
