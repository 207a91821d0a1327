"""The loop order of selected attention, measured before whatever depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.gpu.contenders import NotAvailable

# Heads a group, width and length: those of the cells, and those of the presets.
SHAPES = (
    *((heads, 128, length) for heads in (16, 4, 1) for length in (8192, 65536)),
    *((6, 64, length) for length in (2048, 8192, 65536)),
)
TOKENS = 16384  # at least, of as many sequences as that takes


def shapes(smoke: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names of the cells, and what they measure."""
    for heads, dim, length in ((2, 16, 32),) if smoke else SHAPES:
        batch_size, repeats = (1, 1) if smoke else (max(1, TOKENS // length), 10)
        shape = {"heads": heads, "dim": dim, "seq_len": length, "batch_size": batch_size, "repeats": repeats}
        yield f"S={length} h={heads} D={dim}", shape


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
