"""What the attention of each layer does: how its gates weigh the branches, and how far back its selection reaches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nsa_compile.models.config import BRANCHES, SparsePattern
from nsa_compile.models.nsa import Phi, block_weights
from nsa_compile.models.transformer import NSATransformer, NSAttention
from nsa_compile.ops import compressed_attention, selected_attention, window_attention
from nsa_compile.train.records.rows import LayerStatistics

# Of the distances: distance_p10, distance_p50, distance_p90.
QUANTILES = (0.1, 0.5, 0.9)


@torch.no_grad()
def attention_statistics(model: NSATransformer, tokens: Tensor) -> list[LayerStatistics]:
    """Statistics of every layer of ``model`` on ``tokens`` ``[B, S]`` int64; an empty list for dense attention, and
    where ``model.branches`` leaves a branch out, because then there are no three to weigh.

    The layers are run on the operators that the compiler lowers them to, in memory linear in S, by the model's own
    projections, norms and feed-forward. The blocks themselves are not called, so nothing is compiled; neither gradients
    nor random numbers are involved. An autocast around the call holds inside.
    """
    if model.config.attention != "nsa" or model.config.branches != BRANCHES:
        return []
    statistics = []
    x = model.embedding(tokens)
    blocks: Any = model.blocks
    for layer, block in enumerate(blocks):
        gates, outputs, indices = _branches(block.attention, block.attention_norm(x))
        gated = gates[..., None] * torch.stack(outputs, dim=-2)  # [B, S, Hq, 3, Dv]
        statistics.append(_summarize(layer, gates, gated, indices, model.config.pattern))
        x = x + block.attention.out(gated.sum(dim=-2).to(outputs[0].dtype).flatten(-2))
        x = x + block.mlp(block.mlp_norm(x))
    return statistics


def _branches(attention: NSAttention, x: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """Of the layer's input `[B, S, dim]`: gates `[B, S, Hq, 3]`, the output of each branch `[B, S, Hq, Dv]`, and the
    selected blocks `[B, S, G, n]`, -1 where there are fewer."""
    pattern = attention.config.pattern
    position = torch.arange(x.shape[1], device=x.device)
    projected: Any = attention._project(x, position)
    q, q_cmp, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates = projected
    phi_k, phi_v = attention._phi
    weights = block_weights(pattern)
    compressed, _, indices = compressed_attention(
        q_cmp,
        _compress(phi_k, k_cmp, pattern),
        _compress(phi_v, v_cmp, pattern),
        block_size=pattern.compress_block,
        stride=pattern.compress_stride,
        select_block=pattern.select_block,
        offsets=list(weights),
        weights=list(weights.values()),
        num_selected=pattern.num_selected,
        num_initial=pattern.num_initial,
        num_local=pattern.num_local,
    )
    selected, _ = selected_attention(q, k_slc, v_slc, indices, block_size=pattern.select_block)
    # With shared keys and values the window branch reads those of the selected one.
    k_win, v_win = (k_slc, v_slc) if k_win is None else (k_win, v_win)
    window, _ = window_attention(q, k_win, v_win, window=pattern.window)
    return gates, [compressed, selected, window], indices


def _compress(phi: Phi, x: Tensor, pattern: SparsePattern) -> Tensor:
    """eq. 7 for all blocks: `[B, S, G, D] -> [B, N, G, D]`."""
    if x.shape[1] < pattern.compress_block:
        return x[:, :0]
    blocks = x.unfold(1, pattern.compress_block, pattern.compress_stride)  # [B, N, G, D, l]
    return phi(blocks.transpose(-1, -2)).to(x.dtype)


def _summarize(layer: int, gates: Tensor, gated: Tensor, indices: Tensor, pattern: SparsePattern) -> LayerStatistics:
    gates = gates.float().flatten(0, -2)  # [queries, 3]
    norms = gated.float().norm(dim=-1).flatten(0, -2)
    gate_entropy = _entropy(_normalized(gates)).mean().item() / math.log(3)
    means = [*gates.mean(dim=0).tolist(), *_normalized(norms).mean(dim=0).tolist()]
    values: list[Any] = [layer, *means, gate_entropy, *_selection(indices, pattern)]
    return LayerStatistics(*values)


def _selection(indices: Tensor, pattern: SparsePattern) -> list[Any]:
    """The statistics of the selected blocks `[B, S, G, n]`, from ``selection_entropy`` on."""
    length = indices.shape[1]
    position = torch.arange(length, device=indices.device)[:, None, None]
    current = position // pattern.select_block
    first_local = current - pattern.num_local + 1
    free = (indices >= pattern.num_initial) & (indices < first_local)
    if not free.any():
        return [None] * 6
    distance = position - ((indices + 1) * pattern.select_block - 1)
    choosing = free.any(dim=-1)
    leaving = (free & (distance >= pattern.window)).any(dim=-1)
    # Sorted once for every quantile; torch.quantile takes no more than 16 million values.
    distances = distance[free].sort().values
    last = distances.shape[0] - 1
    quantiles = (float(distances[round(quantile * last)]) for quantile in QUANTILES)

    candidates = (length - 1) // pattern.select_block - pattern.num_local + 1 - pattern.num_initial
    counts = torch.bincount(indices[free].long()).float()
    entropy = _entropy(counts / counts.sum()).item() / math.log(candidates) if candidates > 1 else None
    return [entropy, distances.double().mean().item(), *quantiles, (leaving.sum() / choosing.sum()).item()]


def _normalized(x: Tensor) -> Tensor:
    """Rows that add up to 1; equal entries for a row of zeros."""
    total = x.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, x / total, 1 / x.shape[-1])


def _entropy(p: Tensor) -> Tensor:
    """Of probabilities along the last dimension, in nats."""
    return -torch.xlogy(p, p).sum(dim=-1)
