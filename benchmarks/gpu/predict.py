"""Times of the attention kernels on an H200 and an A100, predicted from bytes and operations; nothing is measured.

    python -m benchmarks.gpu.predict

Each kernel takes as long as the slowest of its matrix products, its exponentials and sorts, and its reads from L2 and
from memory, plus a launch. How much a kernel reads and multiplies is counted from its loops: whole tiles, also where
half of one is masked, and every pass over the keys again. Two sets of efficiencies bound what such kernels reach. What
dense attention and other NSA kernels take is not predicted but published.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.gpu.bars import AGAINST_PUBLIC, MFU, SMALL_GROUPS, SPEEDUPS, TOKENS_PER_S
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.tables import table
from benchmarks.gpu.training import TOKENS
from nsa_compile.config import load_config
from nsa_compile.estimation.estimate import count_parameters
from nsa_compile.models.config import NSAConfig, SparsePattern
from nsa_compile.models.flops import (
    training_flops_per_token,
    visible_compressed,
    visible_selected,
    visible_window,
)
from nsa_compile.ops.selected.triton import choose_order
from nsa_compile.ops.selected.triton_block_major import MAX_PART_BYTES
from nsa_compile.ops.triton_common import tile_sizes

RECORD = Path(__file__).parents[1] / "results" / "gpu_prediction.json"
BYTES = 2  # of a bf16


@dataclass(frozen=True)
class Machine:
    """Rates: bf16 FLOP/s, bytes/s of memory and of L2, exponentials/s, 32-bit integer operations/s.

    No sheet has the rate of L2. It is set so that the good share of it is what a published query-major kernel draws:
    137 GB of selected blocks at S = 65,536 in 24.5 ms on an H100 and 31.0 ms on an A100 (README of
    native-sparse-attention-triton, forward with 16 blocks).
    """

    arch: str
    flops: float
    memory: float
    l2: float
    exponentials: float
    integers: float


def _machine(arch: str, flops: float, memory: float, l2: float, multiprocessors: int, clock: float) -> Machine:
    return Machine(arch, flops, memory, l2, 16 * multiprocessors * clock, 64 * multiprocessors * clock)


MACHINES = {
    "H200": _machine("sm_90", 989e12, 4.8e12, 7.0e12, 132, 1.755e9),
    "A100": _machine("sm_80", 312e12, 2.0e12, 5.5e12, 108, 1.41e9),
}


@dataclass(frozen=True)
class Efficiency:
    """Shares of the rates: matrix products on tiles of at least 64 rows and on fewer, and everything else."""

    dots: float
    small_dots: float
    bandwidth: float
    scalar: float


# 60 % of the products and 80 % of the bandwidth is what well-tuned Triton kernels reach; 40 and 65 % are usual.
EFFICIENCIES = {"good": Efficiency(0.60, 0.30, 0.80, 0.80), "usual": Efficiency(0.40, 0.20, 0.65, 0.50)}
LAUNCH = 5e-6
# What `block_lists.py` does in torch: launches, and bytes they read and write for each place of the indices.
DISTINCT, TILED, INVERTED = (9, 50), (26, 140), (27, 170)
# Norms, RoPE, gates, SwiGLU and residuals of a block, fused: reads and writes of a bf16 [B, S, dim], both directions.
ACTIVATIONS = 60
LOGIT_BYTES = 20  # logits in bf16 and float32, softmax and its gradient
SEQUENCES = TOKENS // 2048
PRESET = Path(__file__).parents[2] / "configs" / "nsa_125m_gpt2.yaml"

# Milliseconds by sequence length, H = 64, G = 4, D = 128, bf16, forward and backward.
PUBLISHED: dict[str, dict[str, Any]] = {
    "H200": {
        "source": "README of github.com/mdy666/Scalable-Flash-Native-Sparse-Attention, on an H800, whose bf16 rate is "
        "that of an H200; its FlashAttention-2 and -3 stand for SDPA's flash and cuDNN",
        "SDPA flash": {8192: (3.05, 9.01), 32768: (46.9, 131.6), 65536: (182.9, 523.7), 131072: (774.3, 2068.5)},
        "SDPA cuDNN": {8192: (1.69, 5.01), 32768: (26.7, 74.8), 65536: (105.5, 292.3), 131072: (431.0, 1169.1)},
        "public NSA": {8192: (2.63, 5.57), 32768: (13.2, 29.0), 65536: (34.2, 73.7), 131072: (101.1, 213.9)},
    },
    "A100": {
        "source": "README of github.com/XunhaoLai/native-sparse-attention-triton: an A100; there is no cuDNN of this "
        "class for it, and the public NSA is the sum of its compressed and selected attention, without a window",
        "SDPA flash": {8192: (5.22, 15.3), 32768: (79.6, 227.8), 65536: (321.2, 899.2), 131072: (1349.8, 3587.9)},
        "public NSA": {8192: (6.60, 11.67), 32768: (44.4, 64.8), 65536: (143.3, 189.8), 131072: (491.0, 622.6)},
    },
}


@dataclass(frozen=True)
class Work:
    """What a kernel does: FLOPs of matrix products on tiles of `rows`, bytes from memory and L2, and scalar work."""

    name: str
    direction: str
    flops: float
    rows: int
    memory: float
    l2: float = 0.0
    exponentials: float = 0.0
    integers: float = 0.0
    launches: int = 1

    def seconds(self, machine: Machine, share: Efficiency) -> tuple[float, str]:
        """How long it takes, and what that is bound by."""
        dots = share.dots if self.rows >= 64 else share.small_dots
        times = {
            "products": self.flops / (dots * machine.flops),
            "memory": self.memory / (share.bandwidth * machine.memory),
            "L2": self.l2 / (share.bandwidth * machine.l2),
            "exponentials": self.exponentials / (share.scalar * machine.exponentials),
            "sorting": self.integers / (share.scalar * machine.integers),
        }
        bound = max(times, key=lambda name: times[name])
        return times[bound] + self.launches * LAUNCH, bound


def kernels(problem: Problem, arch: str) -> Iterator[Work]:
    """The kernels of whole NSA as `ops/*/triton.py` writes them."""
    p, tokens, width = problem.pattern, problem.batch_size * problem.seq_len, problem.head_dim
    heads_per_group = problem.heads // problem.groups
    q_bytes = tokens * problem.heads * width * BYTES
    k_bytes = tokens * problem.groups * width * BYTES
    rows = tokens * problem.heads

    def band(name: str, visible: int, tokens_of_keys: float, keys: int) -> Iterator[Work]:
        """`triton_common.py`; `keys` a query sees, of those that `tokens_of_keys` bytes hold."""
        x = torch.empty(1, 1, 1, width, dtype=torch.bfloat16, device="meta")
        for kernel, flops, memory in (
            ("forward", 4, 2 * q_bytes + 2 * tokens_of_keys),
            ("dq", 6, 4 * q_bytes + 2 * tokens_of_keys),
            ("dkdv", 8, 2 * q_bytes + 4 * tokens_of_keys),
        ):
            tile = tile_sizes(x, x, kernel)
            # The last tile of keys of a query tile is half masked, and one more is begun.
            masked = (tile.rows / heads_per_group + tile.keys) / 2
            pairs = problem.batch_size * problem.heads * (visible + problem.seq_len * masked)
            read = rows / tile.rows * min(keys, visible / problem.seq_len + tile.keys) * 2 * width * BYTES
            if kernel == "dkdv":  # a tile of keys reads q and grad_out of all queries that see it
                read = pairs / tile.keys * 2 * width * BYTES
            direction = "forward" if kernel == "forward" else "backward"
            yield Work(f"{name}: {kernel}", direction, flops * width * pairs, tile.rows, memory, read, pairs)

    compressed = visible_compressed(p, problem.seq_len)
    blocks = problem.seq_len // p.compress_stride
    yield Work(
        "compression: mean of keys and values",
        "forward",
        0,
        64,
        2 * (1 + p.compress_block / p.compress_stride) * k_bytes,
    )
    yield from band("compressed", compressed, k_bytes / p.compress_stride, blocks)

    # `_select_kernel`: for each of the terms of a score one product with its keys; n best kept in sorted int64 keys.
    ratio = p.select_block // p.compress_stride
    terms = ratio + p.compress_block // p.compress_stride - 1
    pairs = problem.batch_size * problem.heads * compressed * terms / ratio
    tile = 64
    scored = problem.batch_size * problem.groups * compressed / ratio  # scores of selection blocks
    best = max(2, 2 ** math.ceil(math.log2(p.num_selected)))
    stages = int(math.log2(tile) * (math.log2(tile) + 1) / 2) + int(math.log2(2 * best))
    yield Work(
        "selection",
        "forward",
        2 * width * pairs,
        tile,
        q_bytes,
        pairs / tile * width * BYTES,
        pairs,
        scored * stages * 4,
    )  # a comparison and exchange of 64-bit keys is about 4 operations an element

    # The query's own block is read whole; early queries have fewer blocks than n.
    seen = problem.batch_size * (visible_selected(p, problem.seq_len) + problem.seq_len * p.select_block / 2)
    order = choose_order(
        heads_per_group, width, width, torch.bfloat16, p.select_block, p.num_selected, problem.seq_len, arch
    )
    if order.major == "query":
        # `triton_query_major.py`: a power of two of rows, at least 16. Neighbours share the forced blocks, and of the
        # others as many as by chance.
        padded = max(16, 2 ** math.ceil(math.log2(heads_per_group * order.queries)))
        blocks = math.ceil(problem.seq_len / p.select_block)
        seen_once = tokens * p.select_block * sum(_union(p, v + 1, order.queries) for v in range(blocks)) / blocks
        seen_once /= order.queries
        query_pairs = problem.groups * padded * seen_once
        read = problem.groups * seen_once * 2 * width * BYTES
        steps = {"forward": (DISTINCT, TILED), "backward": (DISTINCT, TILED, INVERTED)}
        forward = Work("selected: forward", "forward", 4 * width * query_pairs, padded, 2 * q_bytes + 2 * k_bytes, read,
                       query_pairs)  # fmt: skip
        dq = Work("selected: dq", "backward", 6 * width * query_pairs, padded, 4 * q_bytes + 2 * k_bytes, read,
                  query_pairs)  # fmt: skip
    else:
        # `triton_block_major.py`: full tiles; q, and in backward its gradient, are read once for each block of theirs,
        # and a float32 part is written and read back.
        pairs = problem.heads * seen
        gathered = pairs / p.select_block * width * BYTES
        parts = 2 * pairs / p.select_block * width * 4
        forward = Work("selected: forward", "forward", 4 * width * pairs, 64, q_bytes + 2 * k_bytes + parts, gathered,
                       pairs)  # fmt: skip
        dq = Work("selected: dq", "backward", 6 * width * pairs, 64, q_bytes + 2 * k_bytes + parts, 2 * gathered,
                  pairs)  # fmt: skip
        chunks = math.ceil(tokens * problem.heads * p.num_selected * width * 4 / MAX_PART_BYTES)
        chunk_wise = (chunks * (INVERTED[0] + 1), INVERTED[1])  # and a kernel more that merges
        steps = {"forward": (DISTINCT, chunk_wise), "backward": (DISTINCT, chunk_wise, INVERTED)}
    yield from (forward, dq)
    for direction, made in steps.items():
        launches, moved = (sum(column) for column in zip(*made, strict=True))
        moved *= tokens * problem.groups * p.num_selected
        yield Work(f"selected: lists, {direction}", direction, 0, 64, moved, launches=launches)
    yield Work("selected: delta", "backward", 0, 64, 2 * q_bytes)
    listed = problem.heads * seen  # here the queries of a block fill the tiles
    yield Work("selected: dkdv", "backward", 8 * width * listed, 64, 2 * q_bytes + 8 * k_bytes,
               listed / p.select_block * 2 * width * BYTES, listed)  # fmt: skip

    yield from band("window", visible_window(p, problem.seq_len), k_bytes, p.window)
    yield Work("gates", "forward", 0, 64, 5 * q_bytes)
    yield Work("gates, backward", "backward", 0, 64, 8 * q_bytes)


def _union(pattern: SparsePattern, visible: int, queries: int) -> float:
    """Blocks that any of so many neighbouring queries selects of those `visible`."""
    forced = min(pattern.num_initial + pattern.num_local, visible)
    rest = visible - forced
    if rest == 0:
        return forced
    chosen = min(pattern.num_selected, visible) - forced
    return forced + rest * (1 - (1 - chosen / rest) ** queries)


def predict(problem: Problem, machine: Machine, share: Efficiency) -> dict[str, Any]:
    """Seconds of every kernel, and of forward, backward and both."""
    rows = []
    for work in kernels(problem, machine.arch):
        seconds, bound = work.seconds(machine, share)
        rows.append({"kernel": work.name, "direction": work.direction, "seconds": seconds, "bound_by": bound})
    total = {d: sum(row["seconds"] for row in rows if row["direction"] == d) for d in ("forward", "backward")}
    return {"kernels": rows, **total, "both": sum(total.values())}


def predict_step(model: NSAConfig, seq_len: int, sequences: int, machine: Machine, share: Efficiency) -> dict[str, Any]:
    """Seconds of an optimizer step in bf16 by what takes them, tokens/s and MFU."""
    tokens = seq_len * sequences
    problem = Problem(seq_len, model.n_kv_heads, model.n_heads, model.head_dim, sequences, model.pattern)
    useful = training_flops_per_token(model, seq_len) * tokens
    pairs = model.n_layers * model.n_heads * model.variant.pairs(model, seq_len) * sequences
    attention_flops = 3 * 2 * pairs * (model.head_dim + model.value_dim)
    weights = count_parameters(model)  # AdamW reads and writes 7 float32 for each
    moved = model.n_layers * ACTIVATIONS * tokens * model.dim * BYTES + LOGIT_BYTES * tokens * model.vocab_size
    parts = {
        "linear layers": (useful - attention_flops) / (share.dots * machine.flops),
        "attention": model.n_layers * predict(problem, machine, share)["both"],
        "everything between them": moved / (share.bandwidth * machine.memory),
        "optimizer": 7 * 4 * weights / (share.bandwidth * machine.memory),
    }
    seconds = sum(parts.values())
    return {"seconds": parts, "tokens_per_s": tokens / seconds, "mfu": useful / seconds / machine.flops}


def make_prediction() -> dict[str, Any]:
    """All machines, lengths and group sizes, and what each bar would come to."""
    record: dict[str, Any] = {"benchmark": "gpu_prediction", "measured": False, "machines": {}}
    for name, machine in MACHINES.items():
        cells = {
            f"S={length} h={heads}": {
                assumption: predict(Problem(length, 64 // heads), machine, share)
                for assumption, share in EFFICIENCIES.items()
            }
            for heads in (16, 4, 1)
            for length in (4096, 8192, 16384, 32768, 65536, 131072)
        }
        published = PUBLISHED[name]
        record["machines"][name] = {"rates": vars(machine), "published": published, "cells": cells}
        model = load_config(str(PRESET)).model
        steps = {a: predict_step(model, 2048, SEQUENCES, machine, share) for a, share in EFFICIENCIES.items()}
        record["machines"][name] |= {"step": steps, "bars": list(_bars(cells, published, steps))}
    record["efficiencies"] = {name: vars(share) for name, share in EFFICIENCIES.items()}
    return record


def _bars(cells: dict[str, Any], published: dict[str, Any], steps: dict[str, Any]) -> Iterator[dict[str, Any]]:
    def bar(what: str, target: str, good: float, usual: float, holds: Any) -> dict[str, Any]:
        verdicts = {holds(good), holds(usual)}
        verdict = "open" if len(verdicts) == 2 else "would be met" if verdicts.pop() else "would be missed"
        return {"bar": what, "target": target, "good": good, "usual": usual, "verdict": verdict}

    def against(length: int, who: str, target: float) -> dict[str, Any]:
        theirs = sum(published[who][length]) / 1e3
        values = [theirs / cells[f"S={length} h=16"][assumption]["both"] for assumption in EFFICIENCIES]
        return bar(f"{length}: against {who}", f"≥ {target} ×", *values, lambda value: value >= target)

    for who, length, target in SPEEDUPS:
        if who in published:
            yield against(length, who, target)
    for length in published["public NSA"]:
        yield against(length, "public NSA", AGAINST_PUBLIC)
    ratios = [cells["S=65536 h=4"][a]["both"] / cells["S=65536 h=16"][a]["both"] for a in EFFICIENCIES]
    yield bar("4 heads a group over 16, per useful FLOP, S = 65536", f"≤ {SMALL_GROUPS} ×", *ratios,
              lambda value: value <= SMALL_GROUPS)  # fmt: skip
    rates, shares = ([step[name] for step in steps.values()] for name in ("tokens_per_s", "mfu"))
    what = f"125 M preset, S = 2048, {SEQUENCES} sequences"
    yield bar(f"{what}: tokens/s", f"≥ {TOKENS_PER_S:,}", *rates, lambda value: value >= TOKENS_PER_S)
    yield bar(f"{what}: MFU", f"≥ {MFU}", *shares, lambda value: value >= MFU)


def render(record: dict[str, Any]) -> str:
    """The prediction as Markdown."""
    parts = [
        "# NSA on the GPU: predicted, not measured",
        "From the bytes and operations of the Triton kernels, by `benchmarks/gpu/predict.py`, which states every "
        "assumption. Selected attention goes in the loop order that `choose_order` takes. H 64, G 4 unless a row says "
        "otherwise, D 128, bf16, 32/16/64/16/512, whole NSA with selection. Shares of the machines' rates: "
        + "; ".join(f"{name}: {share}" for name, share in record["efficiencies"].items())
        + ".",
    ]
    for name, machine in record["machines"].items():
        bars = [
            (
                b["bar"],
                b["target"],
                *(f"{b[a]:,.2f}" if b[a] < 1e3 else f"{b[a]:,.0f}" for a in EFFICIENCIES),
                b["verdict"],
            )
            for b in machine["bars"]
        ]
        cells = [
            (cell, *(f"{values[a][d] * 1e3:,.2f}" for d in ("forward", "backward", "both") for a in EFFICIENCIES))
            for cell, values in machine["cells"].items()
        ]
        longest = machine["cells"]["S=65536 h=16"]
        times = [
            (row["kernel"], f"{row['seconds'] * 1e3:.2f}", row["bound_by"], f"{other['seconds'] * 1e3:.2f}")
            for row, other in zip(longest["good"]["kernels"], longest["usual"]["kernels"], strict=True)
        ]
        good, usual = (machine["step"][a]["seconds"] for a in EFFICIENCIES)
        steps = [(part, f"{good[part] * 1e3:.1f}", f"{usual[part] * 1e3:.1f}") for part in good]
        columns = tuple(f"{d}, {a}" for d in ("forward", "backward", "both") for a in EFFICIENCIES)
        parts += [
            f"## {name}",
            f"Others' times are published ones: {machine['published']['source']}.",
            table(("bar", "target", "good", "usual", "verdict"), bars),
            "Milliseconds:",
            table(("", *columns), cells),
            "Kernels at S = 65,536 and h = 16, in ms:",
            table(("kernel", "good", "bound by", "usual"), times),
            f"The training step of the 125 M preset, S = 2,048, {SEQUENCES} sequences, in ms:",
            table(("", "good", "usual"), steps),
        ]
    return "\n\n".join(parts) + "\n"


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
def main(out: Path) -> None:
    """Predict, and write OUT and its Markdown."""
    record = make_prediction()
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(render(record), encoding="utf-8")
    click.echo(render(record))


if __name__ == "__main__":
    main()
