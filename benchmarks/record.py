"""What every benchmark shares: its model, timing, and a record that says where and with what it was measured."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.train.environment import describe_environment

RESULTS = Path(__file__).parent / "results"
SEED = 1337


def model_config(layers: int, dim: int, head_dim: int) -> NSAConfig:
    """The model of the measurements: 4 heads in 2 groups and the paper's pattern, 32/16/64/16/512."""
    pattern = SparsePattern(compress_block=32, compress_stride=16, select_block=64, num_selected=16, window=512)
    return NSAConfig(
        vocab_size=256, dim=dim, n_layers=layers, n_heads=4, n_kv_heads=2, head_dim=head_dim, pattern=pattern
    )


def build(config: NSAConfig) -> NSATransformer:
    """The same weights at every call."""
    torch.manual_seed(SEED)
    return NSATransformer(config)


def random_tokens(config: NSAConfig, seq_len: int) -> torch.Tensor:
    """One sequence of random tokens, `[1, S]`."""
    return torch.randint(config.vocab_size, (1, seq_len), generator=torch.Generator().manual_seed(SEED))


def forward_backward(model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """The work of a training step without the optimizer, with fresh gradients."""
    model.zero_grad(set_to_none=True)
    model(tokens).square().mean().backward()


def seconds_of(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def summarize(samples: Sequence[float]) -> dict[str, Any]:
    """Median and spread of repeated measurements, with the measurements themselves."""
    return {
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "max_s": max(samples),
        "samples_s": list(samples),
    }


def show(timing: dict[str, Any] | None, unit: float = 1e3) -> str:
    """A timing for a table: median and range, in milliseconds unless told otherwise."""
    if timing is None or "median_s" not in timing:
        return "not measured"
    median, low, high = (timing[key] * unit for key in ("median_s", "min_s", "max_s"))
    return f"{median:,.1f} ({low:,.1f}–{high:,.1f})"


def write(name: str, out: str | None, config: NSAConfig, settings: dict[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Write the record as JSON and return its path. Called after each row: an interruption loses one at most."""
    path = Path(out) if out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": name,
        "environment": describe_environment(torch.device("cpu")),
        "settings": {**settings, "batch_size": 1, "dtype": "float32", "device": "cpu"},
        "model": asdict(config),
        "results": rows,
    }
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def print_table(rows: list[Sequence[Any]], headers: Sequence[str]) -> None:
    print(tabulate(rows, headers=headers, disable_numparse=True))
