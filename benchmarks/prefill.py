"""The sequential loop against the compiled graph: forward and backward of the whole model, on the CPU.

    python benchmarks/prefill.py
    python benchmarks/prefill.py --seq-lens 128,256 --max-eager-seconds 0

Both run the same weights on the same tokens, in turns, so that a slow minute of the machine falls on both. A length
whose loop does not fit into memory or time is recorded as not measured; nothing is extrapolated. `nsa-compile bench
prefill` measures the same, and dense attention beside it; this script keeps the project's own record.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from nsa_compile.profiles.bench import limited_memory, prefill
from nsa_compile.profiles.measure import make_record, model_config, show, write_record

RECORD = Path(__file__).parent / "results" / "prefill.json"


@click.command()
@click.option("--seq-lens", default="128,256,512,1024,2048", show_default=True, help="Sequence lengths, ascending.")
@click.option("--layers", default=4, show_default=True)
@click.option("--dim", default=256, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--repeats", default=7, show_default=True, help="Compiled runs of each length.")
@click.option("--eager-repeats", default=3, show_default=True, help="Runs of the loop, which is slow.")
@click.option("--max-eager-seconds", default=300.0, show_default=True, help="Skip longer loops; 0 skips all.")
@click.option("--memory-gb", default=24.0, show_default=True, help="Address space of the process; 0: no limit.")
@click.option("--nested", default="inductor", show_default=True)
@click.option("--out", metavar="PATH", help="Where the record goes; benchmarks/results/prefill.json without it.")
def main(seq_lens, layers, dim, head_dim, repeats, eager_repeats, max_eager_seconds, memory_gb, nested, out) -> None:
    """Time forward and backward, eagerly and compiled."""
    config = model_config(layers, dim, head_dim)
    settings = {"repeats": repeats, "eager_repeats": eager_repeats, "nested": nested, "memory_gb": memory_gb}
    settings |= {"max_eager_seconds": max_eager_seconds, "batch_size": 1, "dtype": "float32", "device": "cpu"}
    path = Path(out) if out else RECORD
    lengths = [int(word) for word in seq_lens.split(",")]
    rows: list[dict[str, Any]] = []
    with limited_memory(memory_gb):
        for row in prefill(config, lengths, repeats, eager_repeats, nested, max_eager_seconds):
            rows.append(row)
            write_record(path, make_record("prefill", settings, rows, model=asdict(config)))
            print(
                f"S = {row['seq_len']}: loop {show(row['eager'])} ms, compiled {show(row['compiled'])} ms", flush=True
            )
    table = []
    for row in rows:
        ratio_text = f"{row['ratio']:.1f}" if row["ratio"] else "–"
        table.append((row["seq_len"], show(row["eager"]), show(row["compiled"]), ratio_text, row["batched"]))
    headers = ("S", "loop, ms (range)", "compiled, ms (range)", "ratio", "batched")
    print(tabulate(table, headers=headers, disable_numparse=True))
    print(path)


if __name__ == "__main__":
    main()
