"""The sequential loop against the compiled graph: forward and backward of the whole model, on the CPU.

    python benchmarks/prefill.py
    python benchmarks/prefill.py --seq-lens 128,256 --max-eager-seconds 0

Both run the same weights on the same tokens, in turns, so that a slow minute of the machine falls on both. A length
whose loop does not fit into memory or time is recorded as not measured; nothing is extrapolated.
"""

from __future__ import annotations

import resource
from typing import Any

import click
import torch
from record import build, forward_backward, model_config, print_table, random_tokens, seconds_of, show, summarize, write

import nsa_compile


def limit_memory(gigabytes: float) -> None:
    """Let an allocation beyond the limit fail in this process instead of taking the machine down."""
    limit = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def ran_out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "can't allocate memory" in text or "not enough memory" in text


def expected_eager_seconds(rows: list[dict[str, Any]], seq_len: int) -> float | None:
    """A lower bound from the last length measured, as time grows at least linearly. Only decides what to skip."""
    measured = [row for row in rows if "median_s" in row["eager"]]
    return measured[-1]["eager"]["median_s"] * seq_len / measured[-1]["seq_len"] if measured else None


def measure(config, seq_len: int, repeats: int, eager_repeats: int, nested: str) -> tuple[dict, dict, float, bool]:
    """Timings of the loop and of the compiled model, the seconds to compile, and whether every scan was batched."""
    tokens = random_tokens(config, seq_len)
    torch._dynamo.reset()
    compiled = nsa_compile.compile_blocks(build(config), nested=nested, cache=False)
    compile_seconds = seconds_of(lambda: forward_backward(compiled, tokens))
    report = nsa_compile.last_report()
    assert report is not None
    forward_backward(compiled, tokens)  # the first run of compiled code pays for what is lazy

    fast, slow = [], []
    eager: dict[str, Any] = {}
    model = build(config)
    for i in range(max(repeats, eager_repeats)):
        if i < repeats:
            fast.append(seconds_of(lambda: forward_backward(compiled, tokens)))
        if i < eager_repeats:
            try:
                slow.append(seconds_of(lambda: forward_backward(model, tokens)))
            except (RuntimeError, MemoryError) as error:
                if not ran_out_of_memory(error):
                    raise
                eager = {"not_measured": "the loop's saved tensors do not fit into memory"}
                break
    if slow and not eager:
        eager = summarize(slow)
    return eager or {"not_measured": "skipped"}, summarize(fast), compile_seconds, all(s.batched for s in report.scans)


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
    if memory_gb:
        limit_memory(memory_gb)
    config = model_config(layers, dim, head_dim)
    settings = {"repeats": repeats, "eager_repeats": eager_repeats, "nested": nested, "memory_gb": memory_gb}
    settings["max_eager_seconds"] = max_eager_seconds
    rows: list[dict[str, Any]] = []
    for seq_len in (int(word) for word in seq_lens.split(",")):
        expected = expected_eager_seconds(rows, seq_len)
        skip = max_eager_seconds == 0 or (expected is not None and expected > max_eager_seconds)
        stopped = next((row["eager"] for row in rows if "memory" in row["eager"].get("not_measured", "")), None)
        eager, fast, compile_seconds, batched = measure(
            config, seq_len, repeats, 0 if skip or stopped else eager_repeats, nested
        )
        if skip:
            eager = {"not_measured": f"a run would take longer than {max_eager_seconds:g} s"}
        if stopped:
            eager = {"not_measured": "a shorter sequence did not fit into memory already"}
        ratio = eager["median_s"] / fast["median_s"] if "median_s" in eager else None
        row = {"seq_len": seq_len, "eager": eager, "compiled": fast, "ratio": ratio}
        rows.append(row | {"first_call_s": compile_seconds, "batched": batched})
        path = write("prefill", out, config, settings, rows)
        print(f"S = {seq_len}: loop {show(eager)} ms, compiled {show(fast)} ms", flush=True)
    table = []
    for row in rows:
        ratio_text = f"{row['ratio']:.1f}" if row["ratio"] else "–"
        table.append((row["seq_len"], show(row["eager"]), show(row["compiled"]), ratio_text, row["batched"]))
    print_table(table, ("S", "loop, ms (range)", "compiled, ms (range)", "ratio", "batched"))
    print(path)


if __name__ == "__main__":
    main()
