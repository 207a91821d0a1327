"""Native Sparse Attention, read off the paper and judged by nothing else.

Float64, a Python loop over tokens, one explicit boolean mask per branch. It shares no code with `nsa_compile` and is
meant to be checked against arXiv 2502.11089 with a finger on the page; speed is no concern. Everything else in the
project that computes attention is compared with this file.

Shapes: q [B, S, Hq, D]; k_* [B, S, G, D]; v_* [B, S, G, Dv]; gates [B, S, Hq, 3], already activated, in the order
compressed, selected, window. Head g·h + i belongs to group g, with h = Hq / G.
"""

# ruff: noqa: E741  (l is the paper's name for the block size)
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# A block of l tokens, [..., l, D], becomes one key or value, [..., D].
Phi = Callable[[Tensor], Tensor]

FORCED = math.inf  # importance of a block that is always selected


def num_compressed_blocks(S: int, l: int, d: int) -> int:
    """Blocks of `l` tokens at stride `d` that fit into `S` tokens."""
    return (S - l) // d + 1 if l <= S else 0


def masked_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Softmax over the last dimension under a mask [columns]; no column kept means no probability, not NaN."""
    if not mask.any():
        return torch.zeros_like(scores)
    return torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """q [h, D], k [N, D], v [N, Dv], mask [N] -> output [h, Dv] and probabilities [h, N]; scale 1/sqrt(D)."""
    p = masked_softmax(q @ k.T / math.sqrt(q.shape[-1]), mask)
    return p @ v, p


def compress(x: Tensor, l: int, d: int, phi: Phi | str) -> Tensor:
    """Eq. 7: x [S, D] -> one row for each block, [num_blocks, D]."""
    blocks = [x[j * d : j * d + l] for j in range(num_compressed_blocks(x.shape[0], l, d))]
    rows = [block.mean(0) if isinstance(phi, str) else phi(block) for block in blocks]
    return torch.stack(rows) if rows else x.new_zeros(0, x.shape[-1])


def importance(p_cmp: Tensor, num_blocks: int, l: int, d: int, l_sel: int, index_convention: str) -> Tensor:
    """Eq. 9 and 10: probabilities of the heads of one group, [h, N], to scores of selection blocks, [num_blocks]."""
    sign = {"minus": +1, "paper_v2": -1}[index_convention]
    scores = []
    for j in range(num_blocks):
        score = p_cmp.new_zeros(())
        for m in range(l_sel // d):
            for n in range(l // d):
                i = (l_sel // d) * j + sign * m - n
                if 0 <= i < p_cmp.shape[-1]:
                    score = score + p_cmp[:, i].sum()
        scores.append(score)
    return torch.stack(scores)


def select(scores: list[float], t: int, l_sel: int, n: int, num_initial: int, num_local: int) -> list[int]:
    """Eq. 11: the `n` best blocks up to the one that holds token `t`, ascending; ties go to the lower index."""
    current = t // l_sel
    rank = {j: scores[j] for j in range(current + 1)}
    for j in rank:
        if j < num_initial or j > current - num_local:
            rank[j] = FORCED
    return sorted(sorted(rank, key=lambda j: (-rank[j], j))[:n])


def nsa_attention_oracle(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, **sizes: Any) -> tuple[Tensor, Tensor]:
    """Eq. 5: the gated sum of the three branches; `sizes` are those of `nsa_branches_oracle`.

    Returns:
        The output [B, S, Hq, Dv], differentiable, and the selected blocks [B, S, G, n], ascending, padded with -1
        where fewer than `n` blocks are visible.
    """
    branches, indices = nsa_branches_oracle(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, **sizes)
    gated = [gates.double()[..., c, None] * branch for c, branch in enumerate(branches)]
    return torch.stack(gated).sum(0), indices


def nsa_branches_oracle(
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win,
    *, l, d, l_sel, n, w, num_initial=1, num_local=2, phi_k="mean", phi_v="mean", index_convention="minus",
    selection=None,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:  # fmt: skip
    """The three branches before the gates, each [B, S, Hq, Dv], and the selected blocks [B, S, G, n].

    `phi_k` and `phi_v` are a `Phi` each, or "mean"; `index_convention` is "minus" or "paper_v2". `selection`, integers
    [B, S, G, any], has the blocks of each query in the place of eq. 11; the blocks returned are then those of eq. 11.
    """
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = (x.double() for x in (q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win))
    B, S, Hq, _ = q.shape
    G = k_cmp.shape[2]
    h = Hq // G
    assert Hq == G * h
    assert l % d == 0
    assert l_sel % d == 0
    assert n >= 1
    assert w >= 1

    pos = torch.arange(S)
    block_end = torch.arange(num_compressed_blocks(S, l, d)) * d + l - 1
    num_selection_blocks = -(-S // l_sel)
    indices = torch.full((B, S, G, n), -1, dtype=torch.int64)
    outputs: list[list[Tensor]] = [[], [], []]  # for each branch: [h, Dv], in the order batch, token, group

    for b in range(B):
        compressed = [(compress(k_cmp[b, :, g], l, d, phi_k), compress(v_cmp[b, :, g], l, d, phi_v)) for g in range(G)]
        for t in range(S):
            for g in range(G):
                q_t = q[b, t, g * h : (g + 1) * h]

                o_cmp, p_cmp = attend(q_t, *compressed[g], block_end <= t)

                # The choice of blocks is discrete: it carries no gradient.
                scores = importance(p_cmp.detach(), num_selection_blocks, l, d, l_sel, index_convention)
                chosen = select(scores.tolist(), t, l_sel, n, num_initial, num_local)
                indices[b, t, g, : len(chosen)] = torch.tensor(chosen)
                read = torch.tensor(chosen) if selection is None else selection[b, t, g]
                in_selected_block = torch.isin(pos // l_sel, read)
                o_slc, _ = attend(q_t, k_slc[b, :, g], v_slc[b, :, g], in_selected_block & (pos <= t))

                o_win, _ = attend(q_t, k_win[b, :, g], v_win[b, :, g], (t - w < pos) & (pos <= t))

                for branch, o in zip(outputs, (o_cmp, o_slc, o_win), strict=True):
                    branch.append(o)

    cmp, slc, win = (torch.stack(branch).view(B, S, Hq, -1) for branch in outputs)
    return (cmp, slc, win), indices


def selection_margin(q, k_cmp, *, l, d, l_sel, n, num_initial=1, num_local=2, phi_k="mean", index_convention="minus"):
    """How far every choice of blocks is from going the other way: the smallest gap between the worst chosen score
    and the best rejected one, over all tokens and groups; infinity where nothing competes.

    A gap of rounding size, zero included, means that float32 may rightly choose differently from float64.
    """
    q, k_cmp = q.detach().double(), k_cmp.detach().double()
    B, S, Hq, _ = q.shape
    G = k_cmp.shape[2]
    h = Hq // G
    block_end = torch.arange(num_compressed_blocks(S, l, d)) * d + l - 1
    margin = math.inf
    for b in range(B):
        for g in range(G):
            keys = compress(k_cmp[b, :, g], l, d, phi_k)
            for t in range(S):
                _, p = attend(q[b, t, g * h : (g + 1) * h], keys, keys, block_end <= t)
                scores = importance(p, -(-S // l_sel), l, d, l_sel, index_convention).tolist()
                current = t // l_sel
                free = list(range(num_initial, current - num_local + 1))
                chosen = set(select(scores, t, l_sel, n, num_initial, num_local))
                kept = [scores[j] for j in free if j in chosen]
                rejected = [scores[j] for j in free if j not in chosen]
                if kept and rejected:
                    margin = min(margin, min(kept) - max(rejected))
    return margin
