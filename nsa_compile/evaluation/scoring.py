"""How probable a model finds each token of a sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

import nsa_compile
from nsa_compile.models import NSATransformer

Tokens = npt.NDArray[np.integer] | Sequence[int]
# Tokens that are scored at once, at the least those of one sequence.
BATCH_TOKENS = 4096
# The shortest sequence that something is compiled for; longer ones double.
LEAST_LENGTH = 64


class Scores(NamedTuple):
    """Of each token of a sequence but the first, given those before it, `[N - 1]` each."""

    log_probs: npt.NDArray[np.float64]  # in nats
    top: npt.NDArray[np.bool_]  # whether no token was more probable


class Scorer:
    """A model that says how probable sequences are, compiled if asked for.

    A compiled program belongs to a length, so sequences are filled up at the end, where nothing that is scored sees it.

    Args:
        model: in the dtype and on the device in which it is to run.
        compiled: whether to compile its blocks, in place.
        options: of the compiler, `passes.pipeline.Options`.
    """

    def __init__(self, model: NSATransformer, *, compiled: bool = True, **options: Any) -> None:
        self.model, self.compiled = model, compiled
        if compiled:
            nsa_compile.compile_blocks(model, **options)

    def length_for(self, tokens: int) -> int:
        """The length to score sequences of so many tokens at, such that few programs are compiled."""
        return max(LEAST_LENGTH, 1 << (tokens - 1).bit_length()) if self.compiled else tokens

    @torch.no_grad()
    def score(self, sequences: Iterator[Tokens] | Sequence[Tokens], length: int) -> Iterator[Scores]:
        """Score sequences of 2 to `length + 1` tokens, of which the model reads all but the last."""
        size, device = max(1, BATCH_TOKENS // length), self.model.embedding.weight.device
        rest = iter(sequences)
        while part := list(islice(rest, size)):
            rows = torch.zeros(size if self.compiled else len(part), length + 1, dtype=torch.int64)
            for row, sequence in zip(rows, part, strict=False):
                row[: len(sequence)] = torch.from_numpy(np.asarray(sequence, dtype=np.int64))
            rows = rows.to(device)
            logits = self.model(rows[:, :-1]).float()
            chosen = -F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none").double()
            top = logits.argmax(-1) == rows[:, 1:]
            for sequence, log_probs, firsts in zip(part, chosen.cpu().numpy(), top.cpu().numpy(), strict=False):
                yield Scores(log_probs[: len(sequence) - 1], firsts[: len(sequence) - 1])
