"""A compiled decode step of NSA, its dense twin and the time that reading its bytes takes, by context and batch.

    python benchmarks/decode.py
    python benchmarks/decode.py --models small --contexts 4096 --batches 1 --tokens 50

On the CPU. One token of each sequence goes through a model: `small` has two layers of width 256, 4 heads in 2 groups,
`large` eight of width 1,024, 16 heads in 4 groups. The caches are full of random rows, and the tokens stand at their
end. Bytes are those a step has to read: all weights, and of the caches what its attention reads, for NSA the compressed
rows, those of the n selected blocks and of the window. Their floor is the time in which this machine reads as many, by
the fastest of several sums over a large tensor, on the same threads, in the same run.
"""

from __future__ import annotations

import gc
import math
import time
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch.utils._pytree import tree_leaves

import nsa_compile
from nsa_compile.models import NSAConfig, NSATransformer
from nsa_compile.profiles.measure import (
    CPU,
    build,
    interleave,
    make_record,
    model_config,
    ratio,
    show,
    write_record,
)

RECORD = Path(__file__).parent / "results" / "decode.json"
FLOATS_READ = 2**26  # 256 MiB: more than caches hold
MODELS = {
    "small": model_config(layers=2, dim=256, head_dim=64),
    "large": replace(model_config(layers=8, dim=1024, head_dim=64), n_heads=16, n_kv_heads=4),
}
MOST_CACHES = 14 * 2**30  # bytes, of both attentions; what needs more is left out


def bytes_read(model: NSATransformer, context: int, batch: int) -> int:
    """What one step reads of weights and caches, in float32."""
    config, pattern = model.config, model.config.pattern
    # An embedding is read by one row a token.
    weights = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel() + batch * config.dim
    if config.attention == "dense":
        rows = context
    else:
        compressed = (context - pattern.compress_block) // pattern.compress_stride + 1
        selected = min(pattern.num_selected * pattern.select_block, context)
        rows = compressed + selected + min(pattern.window, context)
    row = config.n_kv_heads * (config.head_dim + config.value_dim)
    return 4 * (weights + batch * config.n_layers * rows * row)


def seconds_per_byte() -> float:
    """By the fastest of several sums over more memory than caches hold."""
    numbers = torch.ones(FLOATS_READ)
    samples = []
    for _ in range(8):
        begun = time.perf_counter()
        numbers.sum()
        samples.append(time.perf_counter() - begun)
    return min(samples) / numbers.nbytes


def stepped(config: NSAConfig, context: int, batch: int) -> tuple[NSATransformer, Any]:
    """A model, and a function that decodes one token of each sequence at the end of full caches."""
    model = build(config)
    step = nsa_compile.compile_decode_step(model)
    state = model.init_state(batch, context)
    for leaf in tree_leaves(state):
        if leaf is not None and leaf.is_floating_point():
            leaf.normal_()
    tokens = torch.zeros(batch, dtype=torch.int64)

    def decode() -> None:
        state.t.fill_(context - 1)  # the step counts on
        step(state, tokens)

    return model, decode


def cache_bytes(config: NSAConfig, context: int, batch: int) -> int:
    """Of NSA, which has two sets of keys and values, and of its dense twin."""
    return 3 * 4 * batch * config.n_layers * context * config.n_kv_heads * (config.head_dim + config.value_dim)


def compared(config: NSAConfig, context: int, batch: int, tokens: int) -> dict[str, Any]:
    """Steps of NSA and of its dense twin, in turns."""
    made = {name: stepped(replace(config, attention=name), context, batch) for name in ("nsa", "dense")}
    timings = interleave({name: decode for name, (_, decode) in made.items()}, tokens, CPU)
    row: dict[str, Any] = {"dense_over_nsa": ratio(timings["dense"], timings["nsa"])}
    for name, (model, _) in made.items():
        row[name] = {
            **timings[name],
            "tokens_per_s": batch / timings[name]["median_s"],
            "bytes_per_token": bytes_read(model, context, batch) / batch,
        }
    return row


@click.command()
@click.option("--models", default="small,large", show_default=True, help="Which models.")
@click.option("--contexts", default="2048,8192,32768,131072", show_default=True, help="Tokens in the caches.")
@click.option("--batches", default="1,8", show_default=True, help="Sequences decoded side by side.")
@click.option("--tokens", default=30, show_default=True, type=click.IntRange(min=1), help="Timed steps, in turns.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
@torch.no_grad()
def main(models, contexts, batches, tokens, out) -> None:
    """Time decode steps of NSA and of its dense twin."""
    rows: list[dict[str, Any]] = []
    per_byte = math.inf
    sizes = product(models.split(","), map(int, contexts.split(",")), map(int, batches.split(",")))
    for name, context, batch in sizes:
        if cache_bytes(MODELS[name], context, batch) > MOST_CACHES:
            continue
        gc.collect()
        torch._dynamo.reset()
        per_byte = min(per_byte, seconds_per_byte())
        rows.append(
            {"model": name, "context": context, "batch": batch, **compared(MODELS[name], context, batch, tokens)}
        )
        of_models = {name: asdict(config) for name, config in MODELS.items()}
        settings = {"tokens": tokens, "models": of_models, "dtype": "float32", "bytes_per_s": 1 / per_byte}
        for row in rows:
            for attention in ("nsa", "dense"):
                seconds = row[attention]["bytes_per_token"] * row["batch"] * per_byte
                row[attention]["over_floor"] = row[attention]["median_s"] / seconds
        write_record(out, make_record("decode", settings, rows))
    table = [
        (
            *(r["model"], r["context"], r["batch"]),
            *(show(r[name]) for name in ("nsa", "dense")),
            *(f"{r['nsa']['tokens_per_s']:,.0f}", f"{r['nsa']['bytes_per_token'] / 2**20:.1f}"),
            *(f"{r['dense_over_nsa']:.1f}", f"{r['nsa']['over_floor']:.1f}", f"{r['dense']['over_floor']:.1f}"),
        )
        for r in rows
    ]
    headers = (
        *("model", "context", "batch", "NSA, ms (range)", "dense, ms (range)", "NSA, tokens/s", "MiB/token"),
        *("dense / NSA", "NSA / floor", "dense / floor"),
    )
    print(tabulate(table, headers=headers))
    print(f"{1 / per_byte / 1e9:.1f} GB/s read; {out}")


if __name__ == "__main__":
    main()
