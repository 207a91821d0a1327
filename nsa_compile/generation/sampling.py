"""Which token comes next."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits.

    Attributes:
        temperature: divides the logits; greater is more random, 0 takes the most probable token.
        top_k: only the k most probable tokens; None for all.
        top_p: only the most probable tokens whose probabilities add up to p, the one that reaches it included (nucleus
            sampling, arXiv 1904.09751).
        repetition_penalty: divides positive and multiplies negative logits of tokens that are there already (CTRL,
            arXiv 1909.05858); 1 changes nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, right, rule in (
            ("temperature", math.isfinite(self.temperature) and self.temperature >= 0, "a finite number from 0 on"),
            (
                "top_k",
                self.top_k is None or (isinstance(self.top_k, int) and self.top_k >= 1),
                "a whole number from 1 on",
            ),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            (
                "repetition_penalty",
                math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
                "a finite number above 0",
            ),
        ):
            if not right:
                raise ValueError(f"{name} = {getattr(self, name)} must be {rule}")

    def probabilities(self, logits: Tensor, before: Tensor) -> Tensor:
        """Of each token `[V]`, from the logits `[V]` and the tokens `[T]` int64 of the sequence so far.

        Tokens that tie with the k-th are kept. At a temperature of 0 the first of the most probable has all.
        """
        logits = logits.double()  # extreme settings neither overflow nor vanish
        if self.repetition_penalty != 1:
            there, penalty = logits[before], self.repetition_penalty
            penalised = torch.where(there > 0, there / penalty, there * penalty)
            greatest = torch.finfo(logits.dtype).max
            logits = logits.index_put((before,), penalised.clamp(-greatest, greatest))
        if self.temperature == 0:
            return torch.zeros_like(logits, dtype=torch.float32).index_fill(0, logits.argmax(), 1)
        logits = (logits - logits.max()) / self.temperature
        if self.top_k is not None and self.top_k < len(logits):
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[-1], -math.inf)
        probabilities = logits.softmax(dim=-1)
        if self.top_p < 1:
            ordered, index = probabilities.sort(descending=True, stable=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p
            beyond[0] = False
            probabilities = probabilities.index_fill(0, index[beyond], 0)
        return (probabilities / probabilities.sum()).float()

    def draw(self, logits: Tensor, before: Tensor, generator: torch.Generator) -> Tensor:
        """The next token `[1]` int64; `generator` is on the device of the logits."""
        return torch.multinomial(self.probabilities(logits, before), 1, generator=generator)
