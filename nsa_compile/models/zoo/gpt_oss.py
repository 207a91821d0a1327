"""A sliding window with a learned sink, as in gpt-oss (arXiv 2508.10925, section 2.2).

A token attends to the last `w` tokens, itself included. Each head has one learned logit `b` in the denominator, so that
its weights may add up to less than 1:

    o_t = Σ_s exp(q_t·k_s / √D) v_s / (exp(b) + Σ_s exp(q_t·k_s / √D))        s from t − w + 1 to t

gpt-oss has such layers in turns with layers that attend to all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.zoo.grouped import GroupedAttention, KVCache


class SinkLogitAttention(GroupedAttention):
    """Attention to a window, with a learned logit for each head; sizes are a `GptOssPattern`."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__(model)
        self.sinks = nn.Parameter(torch.zeros(model.n_heads))

    def step(self, state: KVCache, x: Tensor, t: Tensor) -> tuple[KVCache, Tensor]:
        q, k, v = self.append(state, x, t)
        position, t = torch.arange(k.shape[1], device=x.device), t[..., None]
        seen = (position <= t) & (position > t - self.config.pattern.window)
        scores = torch.einsum("bghd,bsgd->bghs", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen[..., None, None, :], -torch.inf)
        sinks = self.sinks.to(scores.dtype).view(1, *scores.shape[1:3], 1).expand(x.shape[0], -1, -1, -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        o = torch.einsum("bghs,bsge->bghe", weights.to(v.dtype), v)
        return KVCache(k, v), self.out(o.flatten(1))
