"""Time to the first result: cold and warm, in processes of their own, as layers and sequence grow; then at another
length and at another batch size in the same process.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --layers 1,2 --seq-lens 256 --repeats 1

Each repetition has an empty cache folder. A first process fills it (cold), a second one finds it filled (warm). Equal
blocks compile once, so layers should cost next to nothing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

from nsa_compile.profiles.measure import (
    build,
    forward_backward,
    in_a_new_process,
    make_record,
    model_config,
    processor_seconds,
    random_tokens,
    seconds_of,
    show,
    summarize,
    write_record,
)

WORKER_FLAG = "--worker"
RECORD = Path(__file__).parent / "results" / "compile_time.json"


def worker(layers: int, seq_len: int, dim: int, head_dim: int, nested: str) -> None:
    """The measured process: compile, run forward and backward once, print what it took; the same at two more shapes."""
    import nsa_compile

    config = model_config(layers, dim, head_dim)
    model = nsa_compile.compile_blocks(build(config), nested=nested)
    found = {}
    for shape, batch, length in (("first", 1, seq_len), ("length", 1, seq_len + 64), ("batch", 2, seq_len)):
        run = partial(forward_backward, model, random_tokens(config, length).expand(batch, -1))
        busy = processor_seconds()
        first = seconds_of(run)
        busy = processor_seconds() - busy
        # What remains of the first call once the work itself is taken off.
        found[shape] = {"compile_s": first - seconds_of(run), "processor_s": busy}
        report = nsa_compile.last_report()
        assert report is not None
        found[shape]["passes_s"] = sum(p.seconds + p.verify_seconds for p in report.passes)
        found[shape]["cache_hit"] = report.cache_hit
    print(json.dumps(found))


def measure(layers: int, seq_len: int, dim: int, head_dim: int, nested: str, repeats: int) -> dict[str, Any]:
    """Cold and warm compile times of one size."""
    cold, warm = [], []
    words = (__file__, WORKER_FLAG, layers, seq_len, dim, head_dim, nested)
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(in_a_new_process(*words, cache=cache))
            warm.append(in_a_new_process(*words, cache=cache))
    row: dict[str, Any] = {"layers": layers, "seq_len": seq_len}
    for name, runs in (("cold", cold), ("warm", warm)):
        row[name] = summarize([run["first"]["compile_s"] for run in runs])
        row[f"{name}_processor"] = summarize([run["first"]["processor_s"] for run in runs])
        row[f"{name}_cache_hits"] = sum(run["first"]["cache_hit"] for run in runs)
        for shape in ("length", "batch"):
            row[f"{name}_{shape}"] = summarize([run[shape]["compile_s"] for run in runs])
            row[f"{name}_{shape}_processor"] = summarize([run[shape]["processor_s"] for run in runs])
    # Of the cold runs: a cache hit repeats the figures of the run that filled the cache.
    row["passes"] = summarize([run["first"]["passes_s"] for run in cold])
    return row


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


@click.command()
@click.option("--layers", default="1,2,4,8", show_default=True, help="Numbers of layers, at the first sequence length.")
@click.option("--seq-lens", default="256,512,1024,2048", show_default=True, help="Lengths, at the first layer count.")
@click.option("--dim", default=256, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Cold and warm pairs of each size.")
@click.option("--nested", default="inductor", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(layers, seq_lens, dim, head_dim, repeats, nested, out) -> None:
    """Time compilation with an empty and with a filled cache."""
    layer_counts, lengths = numbers(layers), numbers(seq_lens)
    sizes = [(n, lengths[0]) for n in layer_counts] + [(layer_counts[0], s) for s in lengths[1:]]
    settings = {"repeats": repeats, "nested": nested, "batch_size": 1, "dtype": "float32", "device": "cpu"}
    # The model of the first size; each row says its own number of layers.
    model = asdict(model_config(layer_counts[0], dim, head_dim))
    rows: list[dict[str, Any]] = []
    for n, seq_len in sizes:
        rows.append(measure(n, seq_len, dim, head_dim, nested, repeats))
        write_record(out, make_record("compile_time", settings, rows, model=model))
        print(f"{n} layers, S = {seq_len}: cold {show(rows[-1]['cold'], 1)} s", flush=True)
    columns = {
        "cold": "cold, s (range)",
        "warm": "warm, s (range)",
        "passes": "passes, s (range)",
        "cold_length": "another length, s (range)",
        "cold_batch": "another batch size, s (range)",
    }
    table = [(r["layers"], r["seq_len"], *(show(r[key], 1) for key in columns)) for r in rows]
    headers = ("layers", "S", *columns.values())
    print(tabulate(table, headers=headers, disable_numparse=True))
    print(out)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER_FLAG]:
        *sizes, nested = sys.argv[2:]
        worker(*map(int, sizes), nested)
    else:
        main()
