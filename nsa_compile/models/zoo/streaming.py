"""A sliding window with attention sinks (StreamingLLM, arXiv 2309.17453).

A token attends to the last `w` tokens, itself included, and to the first `s`, on which a softmax drops what it has no
other use for (section 3.2). Positions are those of the text; the paper's, counted within its cache, are for texts
longer than a model was trained on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_compile.models.zoo.grouped import GroupedAttention


class StreamingAttention(GroupedAttention):
    """Attention to a window and the first tokens; sizes are a `StreamingPattern`."""

    def seen(self, q: Tensor, k: Tensor, t: Tensor) -> Tensor:
        pattern, position, t = self.config.pattern, torch.arange(k.shape[1], device=k.device), t[..., None]
        seen = (position <= t) & ((position > t - pattern.window) | (position < pattern.num_sinks))
        return seen[..., None, None, :]
