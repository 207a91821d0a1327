"""Longformer's attention of a language model (arXiv 2004.05150, sections 3.1 and 4.1): windows, some of them dilated.

Head `i` attends to `w` tokens up to the query's own, `d_i` tokens apart:

    o_t = softmax over s of t, t − d_i, t − 2 d_i, …, t − (w − 1) d_i that are not below 0

`d_i` is 1 but for a few heads, which see further. There are no global tokens: nothing later may be seen by them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention


class LongformerAttention(GroupedAttention):
    """Attention to windows, dilated in the last heads; sizes are a `LongformerPattern`."""

    def seen(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        pattern, heads = self.config.pattern, self.config.n_heads
        dilated = torch.arange(heads, device=k.device) >= heads - pattern.num_dilated
        dilation = torch.where(dilated, pattern.dilation, 1)[:, None]  # [Hq, 1]
        back = t[..., None, None] - torch.arange(k.shape[1], device=k.device)  # [1, S], or [B, 1, S]
        seen = (back >= 0) & (back < pattern.window * dilation) & (back % dilation == 0)  # [Hq, S], or [B, Hq, S]
        return seen.unflatten(-2, q.shape[1:3])
