"""What it costs to have ranges on: a compiled model with and without them, forward + backward, on the CPU.

    python benchmarks/range_costs.py
    python benchmarks/range_costs.py --seq-lens 512 --repeats 3

No profiler listens, which is what a run pays that leaves `profile.nvtx` on. The same weights and tokens, in turns.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate

import nsa_compile
from nsa_compile import ranges
from nsa_compile.profiles.measure import (
    build,
    forward_backward,
    interleave,
    make_record,
    model_config,
    random_tokens,
    ratio,
    show,
    write_record,
)

RECORD = Path(__file__).parent / "results" / "range_costs.json"


@click.command()
@click.option("--seq-lens", default="512,2048", show_default=True, help="Sequence lengths.")
@click.option("--layers", default=4, show_default=True, help="Blocks of the model.")
@click.option(
    "--repeats", default=15, show_default=True, help="Timed steps of each variant, in turns, after a warm-up."
)
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(seq_lens, layers, repeats, out) -> None:
    """Write the record after each length; print a table."""
    config = model_config(layers, dim=256, head_dim=64)
    settings = {"layers": layers, "dim": 256, "repeats": repeats, "dtype": "float32"}
    rows: list[dict[str, Any]] = []
    for seq_len in (int(length) for length in seq_lens.split(",")):
        tokens = random_tokens(config, seq_len)
        works = {}
        for name, asked in (("without", False), ("with", True)):
            torch._dynamo.reset()
            model = nsa_compile.compile_blocks(build(config), nvtx=asked)

            def step(model=model, tokens=tokens, asked=asked) -> None:
                ranges.enable(asked)
                with ranges.step(0):
                    forward_backward(model, tokens)

            works[name] = step
        timings = interleave(works, repeats)
        rows.append({"seq_len": seq_len, **timings, "ratio": ratio(timings["with"], timings["without"])})
        write_record(out, make_record("nvtx", settings, rows))
    table = [[row["seq_len"], show(row["without"]), show(row["with"]), f"{row['ratio']:.3f}"] for row in rows]
    click.echo(tabulate(table, headers=["seq_len", "without, ms", "with, ms", "with / without"]))


if __name__ == "__main__":
    main()
