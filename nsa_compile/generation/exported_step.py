"""The decode step as a program of `torch.export` or of ONNX, which runs without this package."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from nsa_compile.models.transformer import ModelState, NSATransformer

PROGRAM, ONNX = "decode_step.pt2", "decode_step.onnx"


class FlatStep(nn.Module):
    """`NSATransformer.decode_step` with a state of plain tensors: `t` `[B]` and the caches of all layers in one list.

    Its methods are programs; each refuses a position that the caches have no row for.
    """

    def __init__(self, model: NSATransformer, max_len: int) -> None:
        super().__init__()
        self.model = model
        self.empty, self.max_len = model.init_state(1, max_len), max_len
        # What a cache holds of an earlier text is written before it is read; a state of a fixed size goes on from it.
        longer = model.init_state(1, 2 * max_len).caches()
        self.begins = [a if a.shape == b.shape else None for a, b in zip(self.empty.caches(), longer, strict=True)]

    def after(self, tokens: Tensor, t: Tensor, caches: list[Tensor]) -> tuple[ModelState, Tensor]:
        """The state after the next token `[B]` of each sequence, at its position, and the logits `[B, V]`. At position
        0 a text begins, whatever the row held before."""
        state = self.empty.with_caches(t, map(partial(_begun, t == 0), self.begins, caches))
        return self.model.decode_step(state, tokens)


def _begun(is_first: Tensor, begin: Tensor | None, cache: Tensor) -> Tensor:
    """A state in the rows `[B]` whose text goes on, and the one before the first token in the others."""
    return cache if begin is None else torch.where(is_first.view(-1, *[1] * (cache.dim() - 1)), begin, cache)


class InPlaceStep(FlatStep):
    """The step that updates `t` and the caches in place."""

    def forward(self, tokens: Tensor, t: Tensor, caches: list[Tensor]) -> Tensor:
        there = ((t >= 0) & (t < self.max_len)).all()
        torch.ops.aten._assert_async.msg(
            there, f"t must be from 0 to {self.max_len - 1}: the caches have no other rows"
        )
        after, logits = self.after(tokens, t, caches)
        t.copy_(after.t)
        for cache, new in zip(caches, after.caches(), strict=True):
            cache.copy_(new)
        return logits


class FunctionalStep(FlatStep):
    """The step that returns `t` and the caches anew: ONNX knows no writes."""

    def forward(self, tokens: Tensor, t: Tensor, caches: list[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
        # ONNX has no assertion either, but a runtime refuses to read beyond the end of a table.
        following = torch.arange(1, self.max_len + 1, device=t.device)
        t_next = following[torch.where(t < 0, self.max_len, t)]
        after, logits = self.after(tokens, t, caches)
        return logits, t_next, list(after.caches())


def export_step(step: FlatStep) -> ExportedProgram:
    """The step for any batch. Its example inputs are an empty state of two sequences."""
    state = step.model.init_state(2, step.max_len)
    caches = state.caches()
    batch = {0: Dim("batch", min=1)}
    with torch.no_grad():
        return torch.export.export(
            step,
            (torch.zeros_like(state.t), state.t, caches),
            dynamic_shapes=(batch, batch, [batch] * len(caches)),
        )


def write_step(folder: Path, model: NSATransformer, max_len: int) -> None:
    """Write the program of `torch.export` into a folder that exists."""
    program = io.BytesIO()  # on a full disk, torch's own writer of files aborts the process
    torch.export.save(export_step(InPlaceStep(model, max_len)), program)
    (folder / PROGRAM).write_bytes(program.getbuffer())


def write_onnx_step(folder: Path, model: NSATransformer, max_len: int) -> None:
    """Write the program of ONNX into a folder that exists, with its weights beside it where they exceed 2 GB.

    Inputs are `tokens`, `t` and `cache_0`, `cache_1`, ...; outputs `logits`, `t_next` and `cache_0_next`, ... An empty
    state is zeros.
    """
    program = export_step(FunctionalStep(model, max_len))
    numbers = range(len(program.example_inputs[0][2]))  # pyrefly: ignore[unsupported-operation]
    with _only_errors():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            input_names=["tokens", "t", *(f"cache_{i}" for i in numbers)],
            output_names=["logits", "t_next", *(f"cache_{i}_next" for i in numbers)],
            custom_translation_table={torch.ops.aten.sort.stable: _stable_sort()},
        )
    assert exported is not None
    exported.save(folder / ONNX)


@contextmanager
def _only_errors() -> Iterator[None]:
    """Without what the exporter tells its developers: that torchvision is not installed, what it did not fold."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx._internal.exporter._registration", "onnxscript")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own use of pytrees
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _stable_sort() -> Callable[..., Any]:
    """`aten.sort.stable` for ONNX, which torch 2.13 does not translate: a TopK of all, whose ties keep their order."""
    import onnxscript

    op: Any = onnxscript.opset18

    def sort(self: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        size = op.Gather(op.Shape(self), [dim])
        return op.TopK(self, size, axis=dim, largest=int(descending), sorted=1)

    return sort
