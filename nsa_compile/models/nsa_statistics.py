"""What the attention of each layer does: how its gates weigh the branches, and how far back its selection reaches."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_compile.backend import compile_nested, optimize, parse_options, specialize_shapes
from nsa_compile.models.config import SparsePattern
from nsa_compile.models.nsa import observed_nsa_attention
from nsa_compile.models.nsa_variant import LayerStatistics
from nsa_compile.models.transformer import NSATransformer

log = logging.getLogger("nsa_compile")

# So that the selected branch is the operator that is given its blocks, at any length.
_OPTIONS = {"attention": "sparse"}

# Of the distances: distance_p10, distance_p50, distance_p90.
QUANTILES = (0.1, 0.5, 0.9)


@torch.no_grad()
def attention_statistics(model: NSATransformer, tokens: Tensor) -> list[LayerStatistics]:
    """Statistics of every layer of ``model``, which has all three branches, on ``tokens`` ``[B, S]`` int64; an empty
    list, and a warning, where they cannot be observed.

    Nothing of NSA is computed here: the layers' own attention runs, compiled onto the operators that follow its masks,
    in memory linear in S. What each branch gave comes out of the decode step itself; the selected blocks are read off
    the operator that attends to them. Compiled once for all layers and all calls of one length, without Inductor, as is
    nothing else: the blocks themselves are not called. Neither gradients nor random numbers are involved. An autocast
    around the call holds inside.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    statistics = []
    x = model.embedding(tokens)
    blocks: Any = model.blocks
    try:
        for layer, block in enumerate(blocks):
            inputs = block.attention.attention_inputs(block.attention_norm(x))
            with _selections.collected() as selections:
                output, gated = _observed()(**inputs)
            indices = _selected_blocks(selections, model.config.pattern, tokens)
            statistics.append(_summarize(layer, inputs["gates"], gated, indices, model.config.pattern))
            x = block.after_attention(x, block.attention.merge_heads(output))
    except (_Unobserved, BackendCompilerFailed) as error:
        log.warning("no statistics of the attention: %s", getattr(error, "inner_exception", error))
        return []
    return statistics


class _Unobserved(Exception):
    """The compiled attention has no form whose selection can be observed."""


class _Selections(TorchDispatchMode):
    """While it is on, keeps the indices of blocks that selected attention is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    @contextlib.contextmanager
    def collected(self) -> Iterator[list[Tensor]]:
        """What is found within; nothing of it is kept afterwards."""
        self.found = []
        try:
            yield self.found
        finally:
            self.found = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.nsa_compile.selected_attention.default:
            self.found.append(args[3])
        return func(*args, **(kwargs or {}))


_selections = _Selections()


def _watched(gm: fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """A backend: this compiler's passes, and the batched operators one by one, with the selection looked at.

    Dynamo compiles nothing under a dispatch mode, so the mode is on within what is compiled.
    """
    inputs = specialize_shapes(gm, inputs)
    # Not by way of the backend itself, whose latest report is to stay that of the training.
    report, written = optimize(gm, parse_options(_OPTIONS), inputs)
    if not all(scan.batched for scan in report.scans):
        raise _Unobserved("the compiler left the loop over the tokens in place; nsa-compile passes explain tells why")
    run = written.around(compile_nested(gm, inputs, "eager"))

    def watched(*values: Tensor) -> Any:
        with _selections:
            return run(*values)

    return watched


@cache
def _observed() -> Any:
    return torch.compile(observed_nsa_attention, backend=_watched, fullgraph=True, dynamic=False)


def _selected_blocks(found: list[Tensor], pattern: SparsePattern, tokens: Tensor) -> Tensor:
    """The selected blocks ``[N, S, ., n]``, -1 where there are fewer, of what selected attention was given."""
    if found:
        return found[-1]
    blocks = -(-tokens.shape[1] // pattern.select_block)
    if pattern.num_selected < blocks:
        raise _Unobserved("the compiler put in no operator for the selected branch")
    # There is room for every block, so the indices were left out: each query has all blocks up to its own.
    block, position = (torch.arange(count, device=tokens.device) for count in (blocks, tokens.shape[1]))
    return torch.where(block <= position[:, None] // pattern.select_block, block, -1)[None, :, None]


def _summarize(layer: int, gates: Tensor, gated: Tensor, indices: Tensor, pattern: SparsePattern) -> LayerStatistics:
    gates = gates.float().flatten(0, -2)  # [queries, 3]
    norms = gated.float().norm(dim=-1).flatten(0, -2)
    gate_entropy = _entropy(_normalized(gates)).mean().item() / math.log(3)
    means = [*gates.mean(dim=0).tolist(), *_normalized(norms).mean(dim=0).tolist()]
    values: list[Any] = [layer, *means, gate_entropy, *_selection(indices, pattern)]
    return LayerStatistics(*values)


def _selection(indices: Tensor, pattern: SparsePattern) -> list[Any]:
    """The statistics of the selected blocks `[B, S, G, n]`, from ``selection_entropy`` on."""
    length = indices.shape[1]
    position = torch.arange(length, device=indices.device)[:, None, None]
    current = position // pattern.select_block
    first_local = current - pattern.num_local + 1
    free = (indices >= pattern.num_initial) & (indices < first_local)
    if not free.any():
        return [None] * 6
    distance = position - ((indices + 1) * pattern.select_block - 1)
    choosing = free.any(dim=-1)
    leaving = (free & (distance >= pattern.window)).any(dim=-1)
    # Sorted once for every quantile; torch.quantile takes no more than 16 million values.
    distances = distance[free].sort().values
    last = distances.shape[0] - 1
    quantiles = (float(distances[round(quantile * last)]) for quantile in QUANTILES)

    candidates = (length - 1) // pattern.select_block - pattern.num_local + 1 - pattern.num_initial
    counts = torch.bincount(indices[free].long()).float()
    entropy = _entropy(counts / counts.sum()).item() / math.log(candidates) if candidates > 1 else None
    return [entropy, distances.double().mean().item(), *quantiles, (leaving.sum() / choosing.sum()).item()]


def _normalized(x: Tensor) -> Tensor:
    """Rows that add up to 1; equal entries for a row of zeros."""
    total = x.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, x / total, 1 / x.shape[-1])


def _entropy(p: Tensor) -> Tensor:
    """Of probabilities along the last dimension, in nats."""
    return -torch.xlogy(p, p).sum(dim=-1)
