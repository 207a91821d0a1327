"""The loop order of selected attention, measured before whatever depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.gpu.contenders import NotAvailable

# Heads a group and width: those of the cells, and those of the presets.
SHAPES = ((16, 128), (4, 128), (1, 128), (6, 64))
SEQ_LEN = 16384


def shapes(smoke: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of the cells, and what they measure."""
    for heads, dim in ((2, 16),) if smoke else SHAPES:
        length, repeats = (32, 1) if smoke else (SEQ_LEN, 10)
        yield f"h={heads} D={dim}", {"heads": heads, "dim": dim, "seq_len": length, "repeats": repeats}


def measure_order(shape: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """A row of the table by which `choose_order` chooses."""
    try:
        import triton
    except ImportError as error:
        raise NotAvailable("Triton is not installed") from error
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise NotAvailable("runs on CUDA, or with TRITON_INTERPRET=1")
    from benchmarks.selected_orders import measure

    return measure(**shape, block_size=64, dtype="bfloat16", device=device)


def keep_orders(cells: Mapping[str, Mapping[str, Any]], device: torch.device) -> None:
    """Let the operators choose by what was measured, in this process and, if the table is kept, in others."""
    rows = [cell for cell in cells.values() if "major" in cell]
    if rows:
        from benchmarks.selected_orders import keep
        from nsa_compile.ops.selected.triton import arch_of

        for row in rows:
            keep(row, arch_of(device))
