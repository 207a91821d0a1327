"""One NSA attention layer run as it is written, token by token, on the CPU: forward and backward.

    python benchmarks/attention_loop.py

The sizes are those of `benchmarks/results/attention.json`, which has the compiled form and dense attention. The loop
runs on one thread, for its operators are too small for more. Processor time stands beside the clock's: on a machine
with other work it is what the loop itself took.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from nsa_compile.models import SparsePattern, nsa_attention
from nsa_compile.profiles.bench import AttentionProblem, output_and_gradients
from nsa_compile.profiles.measure import make_record, show, summarize, write_record

RECORD = Path(__file__).parent / "results" / "attention_loop.json"
PROBLEM = AttentionProblem(1, 8, 2, 64, SparsePattern(), "float32", "auto", "none")


def run(seq_len: int) -> tuple[float, float]:
    """Seconds of one forward and backward pass: by the clock, and of the processor."""
    inputs = PROBLEM.inputs(seq_len, torch.device("cpu"))
    clock, processor = time.perf_counter(), time.process_time()
    output_and_gradients(partial(nsa_attention, pattern=PROBLEM.pattern), *inputs)
    return time.perf_counter() - clock, time.process_time() - processor


@click.command()
@click.option("--seq-lens", default="128,256,512,1024", show_default=True, help="Sequence lengths.")
@click.option("--repeats", default=5, show_default=True, help="Runs of each length.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(seq_lens: str, repeats: int, out: Path) -> None:
    """Time the loop over the tokens."""
    torch.set_num_threads(1)
    run(16)
    rows: list[dict[str, Any]] = []
    for seq_len in map(int, seq_lens.split(",")):
        clock, processor = zip(*(run(seq_len) for _ in range(repeats)), strict=True)
        rows.append({"seq_len": seq_len, "direction": "forward+backward"})
        rows[-1] |= {"loop": summarize(clock), "loop_processor": summarize(processor)}
        settings = {"batch": 1, "heads": 8, "groups": 2, "head_dim": 64, "pattern": "32/16/64/16/512"}
        settings |= {"dtype": "float32", "device": "cpu", "repeats": repeats}
        write_record(out, make_record("attention_loop", settings, rows))
        print(f"S = {seq_len}: {show(rows[-1]['loop'])} ms, of the processor {show(rows[-1]['loop_processor'])} ms")


if __name__ == "__main__":
    main()
