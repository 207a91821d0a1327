"""Training steps of the presets with NSA and with dense attention: tokens/s, MFU and memory."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.production import one_process

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = (CONFIGS / "nsa_125m_gpt2.yaml", CONFIGS / "m7c_125m_2xa100_production.yaml")
SEQ_LENS = (2048, 8192, 32768, 65536)
TOKENS = 65536  # of a micro batch, at any length: one sequence of the longest


def measure_training(preset: Path, seq_len: int, device: torch.device, smoke: bool = False) -> dict[str, Any]:
    """Steps of a preset at a length, dense attention being SDPA's flash.

    MFU relates to the matrix products measured, `mfu_nominal` to the data sheet.
    """
    torch._dynamo.reset()
    overrides = SMOKE if smoke else []
    batch_size = 1 if smoke else max(1, TOKENS // seq_len)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device.type == "cuda" else nullcontext():
        row = one_process(preset, seq_len, 2 if smoke else 5, device, batch_size, overrides)
    peak = nominal_peak(device)
    for name in ("nsa", "dense"):
        if peak and "model_flops_per_s" in row[name]:
            row[name]["mfu_nominal"] = row[name]["model_flops_per_s"] / peak
    return row


def nominal_peak(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of the data sheet, where the GPU is one of those known here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in NOMINAL.items() if known in name), None)


NOMINAL = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "H800": 989e12, "A100": 312e12}

SMOKE = [
    "model.dim=32", "model.n_layers=1", "model.n_heads=2", "model.n_kv_heads=1", "model.head_dim=16",
    "model.mlp_hidden=32", "model.vocab_size=256", "model.pattern.compress_block=8", "model.pattern.compress_stride=4",
    "model.pattern.select_block=8", "model.pattern.num_selected=3", "model.pattern.window=8",
    "data.name=shakespeare", "data.tokenizer=byte", "compile.nested=aot_eager", "train.dtype=float32",
]  # fmt: skip
