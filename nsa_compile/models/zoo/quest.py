"""Quest, query-aware sparsity (arXiv 2406.10774).

Keys lie in pages of `B` tokens, each with the least and the greatest value `m_i`, `M_i` of every channel among its
keys. No key of a page can score more than (algorithm 1)

    bound = Σ_i max(q_i · m_i, q_i · M_i)

so a query head attends to the tokens of the pages of highest bound, `k` with its own, which is always taken up to the
query itself. The paper does so when a model writes, in all layers but the first two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention


class QuestAttention(GroupedAttention):
    """Attention to the pages of keys that may score highest; sizes are a `QuestPattern`."""

    def seen(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        pages = k.detach().unflatten(1, (-1, self.block)).transpose(1, 3)  # [B, G, B, N, D]
        least, greatest = pages.amin(2), pages.amax(2)  # [B, G, N, D]
        each = q.detach()[:, :, :, None]
        bound = torch.maximum(each * least[:, :, None], each * greatest[:, :, None]).sum(-1)  # [B, G, h, N]
        return self.in_best_blocks(bound, k, t)
