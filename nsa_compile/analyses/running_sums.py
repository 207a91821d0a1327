"""Sums over the rows of a buffer up to the step's own, which run on from step to step.

`Σ_{j < n[t]} rows[j]` is spelled as a sum of rows under a known mask, or as a product with that mask as numbers: a pass
over all rows for each step. It is row `n[t] - 1` of all sums of first rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from nsa_compile.ir.aten import MASKED_FILL, MATMUL, MUL, SUMS, WHERE, aten, operand
from nsa_compile.ir.scans import ScanRecord, example
from nsa_compile.ir.step_values import Choice, StepMask, StepValue, Table, step_mask

__all__ = ["RunningRows", "running_rows"]


@dataclass(frozen=True)
class RunningRows:
    """A node that sums, at each step, the first rows of another one.

    Attributes:
        rows: the node whose rows are summed.
        dim: the dimension that they lie along.
        counts: how many of them, at each step.
        factor: what the sum is multiplied with, at each step; None where it is 1.
        divisor: what it is divided by.
    """

    rows: fx.Node
    dim: int
    counts: np.ndarray
    factor: Tensor | None = None
    divisor: int = 1


def running_rows(record: ScanRecord, body: fx.GraphModule) -> dict[fx.Node, RunningRows]:
    """The nodes of a body that are such sums. To be asked before anybody traces."""
    found = {}
    for node in body.graph.nodes:
        if node.target in SUMS | MATMUL and example(node).is_floating_point():
            sums = _of_sum(node, record) if node.target in SUMS else _of_product(node, record)
            if sums is not None:
                found[node] = sums
    return found


def _of_sum(node: fx.Node, record: ScanRecord) -> RunningRows | None:
    given: Any = node.args[1] or ()
    if len(given) != 1 or node.kwargs.get("dtype") is not None or operand(node).op != "call_function":
        return None
    x = operand(node)
    if not example(x).dim():
        return None
    dim = given[0] % example(x).dim()
    if (first := record.hidden.get((node, 0))) is not None:
        rows, mask = x, StepMask.inside(first, torch.full_like(first, record.length), record.length)
    else:
        rows, mask = _masked(x, record)
    if mask is None or rows is None or example(rows).shape != example(x).shape:
        return None
    size = example(x).shape[dim]
    counts = _counts(mask, dim - example(rows).dim(), size)
    divisor = size if node.target is aten.mean.dim else 1
    return None if counts is None else RunningRows(rows, dim, counts, divisor=divisor)


def _masked(x: fx.Node, record: ScanRecord) -> tuple[fx.Node | None, StepMask | None]:
    """What is zero where a mask is false, and the mask."""
    parts: Any = x.args
    if x.target in WHERE:
        condition, if_true, if_false = parts
        if _is_zero(if_false, record):
            return if_true, _mask(condition, record)
        mask = _mask(condition, record) if _is_zero(if_true, record) else None
        return if_false, None if mask is None else ~mask
    if x.target in MASKED_FILL and _is_zero(parts[2], record):
        mask = _mask(parts[1], record)
        return parts[0], None if mask is None else ~mask
    if x.target in MUL and all(isinstance(part, fx.Node) for part in parts):
        for rows, flag in (parts, reversed(parts)):
            if (mask := _ones_and_zeros(record.known.get(flag))) is not None:
                return rows, mask
    return None, None


def _of_product(node: fx.Node, record: ScanRecord) -> RunningRows | None:
    if node.target not in MATMUL or any((node, place) in record.hidden for place in (0, 1)):
        return None
    a, b = operand(node), operand(node, 1)
    rank_a, rank_b, size = example(a).dim(), example(b).dim(), example(a).shape[-1]
    if rank_a > 1 and example(a).shape[-2] == 1 and (weights := _weights(record.known.get(a), -1, size)) is not None:
        return RunningRows(b, rank_b - 2, *weights)
    if (rank_b == 1 or example(b).shape[-1] == 1) and (weights := _weights(record.known.get(b), -min(rank_b, 2), size)):
        return RunningRows(a, rank_a - 1, *weights)
    return None


def _weights(value: StepValue | None, dim: int, size: int) -> tuple[np.ndarray, Tensor | None] | None:
    """How many of the first elements along a dimension, counted from the end, have one weight at each step, and which;
    None if others have one. `size` is that of the dimension, where one value may stand for all."""
    if (mask := _ones_and_zeros(value)) is not None:
        found = _counts(mask, dim, size)
        return None if found is None else (found, None)
    if not isinstance(value, Table):
        return None
    table = value.narrowed().values
    if table.dim() <= -dim or table.numel() != len(table) * table.shape[dim]:
        return None
    if not size:
        return None
    rows = table.reshape(len(table), -1).expand(-1, size)
    factor, counts = rows[:, 0], (rows != 0).sum(1)
    is_first = torch.arange(rows.shape[1]) < counts[:, None]
    same = torch.equal(rows, torch.where(is_first, factor[:, None], torch.zeros_like(rows)))
    return (counts.numpy(), factor) if same and bool(rows.isfinite().all()) else None


def _counts(mask: StepMask, dim: int, size: int) -> np.ndarray | None:
    """How many elements along a dimension are true at each step, if these are the first ones, and nothing else differs.

    `dim` counts from the end; `size` is that of the dimension, where one element of the mask may stand for all.
    """
    mask = mask.narrowed()
    along = mask.start.shape[dim] if -dim <= mask.start.dim() else 1
    if mask.start.numel() != along or bool(mask.outside.any()):
        return None
    start, stop = mask.start.flatten().expand(size), mask.stop.flatten().expand(size)
    never = stop <= start
    start = torch.where(never, mask.length, start)
    if bool(((stop != mask.length) & ~never).any()) or bool((start.diff() < 0).any()):
        return None
    return (start <= torch.arange(mask.length)[:, None]).sum(1).numpy()


def _ones_and_zeros(value: StepValue | None) -> StepMask | None:
    """Where a value is one, if it is zero everywhere else."""
    if isinstance(value, StepMask):
        return value
    if isinstance(value, Choice) and bool(((value.if_true == 1) | (value.if_true == 0)).all()):
        return value.where(lambda x: x == 1) if bool(((value.if_false == 1) | (value.if_false == 0)).all()) else None
    return None


def _mask(node: Any, record: ScanRecord) -> StepMask | None:
    value = record.known.get(node)
    return None if value is None else step_mask(value, record.length)


def _is_zero(value: Any, record: ScanRecord) -> bool:
    if isinstance(value, fx.Node):
        held = record.constant.get(value)
        return held is not None and not bool(held.count_nonzero())
    return isinstance(value, int | float) and value == 0
