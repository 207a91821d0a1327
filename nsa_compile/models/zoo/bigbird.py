"""BigBird's attention (arXiv 2007.14062, section 2 and appendix D), as a decoder can have it: nothing later is seen.

Tokens lie in blocks of `b`. A query in block `i` attends to
- the last `w` blocks up to its own, itself the last token of it;
- the first `g` blocks, which are global;
- `r` blocks before its own, drawn once and for all for each block and head; see `drawn_block`.

The paper's encoder sees as many blocks after the query's own, and its global blocks see all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention
from nsa_compile.models.zoo.masked_variants import drawn_block


class BigBirdAttention(GroupedAttention):
    """Attention to a window, global and drawn blocks; sizes are a `BigBirdPattern`."""

    def seen(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        pattern, heads = self.config.pattern, self.config.n_heads
        position = torch.arange(k.shape[1], device=k.device)
        number, own = position // self.block, t // self.block
        own = own[..., None, None]  # [1, 1], or [B, 1, 1]
        head, draw = torch.arange(heads, device=k.device)[:, None], torch.arange(pattern.num_random, device=k.device)
        drawn = drawn_block(own, head, draw)  # [Hq, r], or [B, Hq, r]
        drawn = (drawn[..., None] == number).any(-2)  # [Hq, S], or [B, Hq, S]
        seen = (number > own - pattern.num_window) | (number < pattern.num_global) | drawn
        return (seen & (position <= t[..., None, None])).unflatten(-2, q.shape[1:3])
