"""The decode step as a program of `torch.export`, which runs without this package."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim

from nsa_compile.models.transformer import ModelState, NSATransformer

PROGRAM = "decode_step.pt2"


class FlatStep(nn.Module):
    """`NSATransformer.decode_step` with a state of plain tensors, which it updates in place."""

    def __init__(self, model: NSATransformer, max_len: int) -> None:
        super().__init__()
        self.model = model
        self.layers, self.max_len = model.init_state(1, max_len).layers, max_len

    def forward(self, tokens: Tensor, t: Tensor, caches: list[Tensor]) -> Tensor:
        """Logits `[B, V]` after the next token `[B]` of each sequence, at its position `t` `[B]`."""
        there = ((t >= 0) & (t < self.max_len)).all()
        torch.ops.aten._assert_async.msg(
            there, f"t must be from 0 to {self.max_len - 1}: the caches have no other rows"
        )
        rest = iter(caches)
        layers = [type(layer)(*(None if x is None else next(rest) for x in layer)) for layer in self.layers]
        after, logits = self.model.decode_step(ModelState(t, layers), tokens)
        t.copy_(after.t)
        for cache, new in zip(caches, after.caches(), strict=True):
            cache.copy_(new)
        return logits


def export_step(model: NSATransformer, max_len: int) -> torch.export.ExportedProgram:
    """The step for any batch, with room for `max_len` tokens.

    Its example inputs are an empty state of two sequences.
    """
    state = model.init_state(2, max_len)
    caches = state.caches()
    batch = {0: Dim("batch", min=1)}
    with torch.no_grad():
        return torch.export.export(
            FlatStep(model, max_len),
            (torch.zeros_like(state.t), state.t, caches),
            dynamic_shapes=(batch, batch, [batch] * len(caches)),
        )


def write_step(folder: Path, model: NSATransformer, max_len: int) -> None:
    """Write the program into a folder that exists."""
    torch.export.save(export_step(model, max_len), folder / PROGRAM)
