"""Dense masked attention, the readable core of the references."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["masked_attention"]


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of q `[B, S, Hq, D]` over k `[B, T, G, D]` and v `[B, T, G, Dv]`.

    `visible` is boolean and broadcasts to `[B, S, G, h, T]`. A query that sees nothing gets weights and an output of
    zero. Returns the output `[B, S, Hq, Dv]`, the log-sum-exp of the scores `[B, S, Hq]` and the weights
    `[B, S, G, h, T]`. Products are in the dtype of the inputs, the softmax in at least float32.
    """
    grouped = q.unflatten(2, (k.shape[2], -1))  # [B, S, G, h, D]
    scores = torch.einsum("bsgid,btgd->bsgit", grouped, k) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    visible = visible.expand(scores.shape)
    # The smallest finite score, not -inf: it keeps NaN out of the gradients of rows that see nothing.
    weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~visible, 0.0)
    out = torch.einsum("bsgit,btge->bsgie", weights.to(v.dtype), v).flatten(2, 3)
    blind = ~visible.any(-1)
    # Rows that see nothing are kept away from the log-sum-exp, whose gradient at -inf alone is NaN.
    seen = scores.masked_fill(~visible & ~blind.unsqueeze(-1), -torch.inf)
    lse = seen.logsumexp(-1).masked_fill(blind, -torch.inf).flatten(2, 3)
    return out, lse, weights
