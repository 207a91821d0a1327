"""Forward and backward of every program of tests/catalogue at 2,048 tokens, and how far its spellings lie apart.

    python benchmarks/catalogue.py
    python benchmarks/catalogue.py --only causal/,moba/ --seq-len 512 --repeats 3

Each program is compiled by Inductor and run in a process of its own, on one thread, in float32. Times are processor
time. A program that takes more than `--limit` seconds of it, or more than `--memory` GiB, is recorded as not measured.
Programs of a group compute the same: the cliff is the time of a spelling over that of the fastest of its group. The
first call of a process, less a second one, is its time to compile; C++ kernels that an earlier process has built are
not built again. `--only` replaces the rows of the programs it names in a record that is there.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import psutil
import torch
import torch.nn.functional as F
from tabulate import tabulate

import nsa_compile
from nsa_compile.profiles.measure import (
    make_record,
    not_measured,
    processor_seconds,
    seconds_of,
    show,
    summarize,
    write_record,
)
from tests.catalogue.catalogue import LONG, Program, class_of, verdict
from tests.catalogue.programs import PROGRAMS

WORKER_FLAG = "--worker"
RECORD = Path(__file__).parent / "results" / "catalogue.json"
DENSE = "dense causal SDPA"
ENOUGH = 4.0  # seconds of repetitions, after which no more are made


def dense_causal(z, q, k, v):
    """What attention without a mask of its own costs; not compiled."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)


def worker(name: str, seq_len: int, repeats: int) -> None:
    """The measured process: compile, run forward and backward, print what it took."""
    torch.set_num_threads(1)
    logging.getLogger("nsa_compile").setLevel(logging.ERROR)
    sizes = replace(LONG, S=seq_len)
    program = PROGRAMS[name] if name != DENSE else Program(name, "", "", "", dense_causal, 0.0)
    inputs = program.inputs(sizes, torch.float32)
    run = program.at(sizes)
    if name != DENSE:
        run = nsa_compile.compile(run, cache=False)

    def work() -> None:
        for x in inputs:
            x.grad = None
        run(*inputs).sum().backward()

    first = seconds_of(work, clock=processor_seconds)
    samples = [seconds_of(work, clock=time.process_time)]
    row = {"compile_s": first - samples[0], "verdict": verdict(nsa_compile.last_report()) if name != DENSE else ""}
    while len(samples) <= repeats and sum(samples) < ENOUGH:
        samples.append(seconds_of(work, clock=time.process_time))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**row, "time": summarize(samples[1:] or samples), "peak_bytes": peak}))


def in_a_process(name: str, seq_len: int, repeats: int, limit: float, memory: float, cache: str) -> dict[str, Any]:
    """One row: what the worker prints, or why it did not."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.catalogue", WORKER_FLAG, name, str(seq_len), str(repeats)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment, text=True)
        measured = psutil.Process(process.pid)
        while process.poll() is None:
            time.sleep(0.2)
            try:
                seconds, resident = sum(measured.cpu_times()[:4]), measured.memory_info().rss
            except psutil.NoSuchProcess:
                continue
            if seconds > limit or resident > memory * 2**30:
                process.kill()
                process.wait()
                why = f"more than {limit:g} s" if seconds > limit else f"more than {memory:g} GiB"
                return {"name": name, "verdict": None, "time": not_measured(why)}
        out.seek(0)
        err.seek(0)
        if process.returncode:
            lines = [line for line in err.read().splitlines() if "Error" in line or "ScanNotCompiled" in line]
            return {"name": name, "verdict": None, "time": not_measured(lines[-1][:300] if lines else "crash")}
        return {"name": name, **json.loads(out.read().splitlines()[-1])}


def cliffs(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Each program with its time, and with its time over that of the fastest of its group."""
    times = {row["name"]: row["time"].get("median_s") for row in rows}
    for row in rows:
        program = PROGRAMS.get(row["name"])
        group = [t for name, t in times.items() if t and name.split("/")[0] == row["name"].split("/")[0]]
        own = times[row["name"]]
        ratio = f"{own / min(group):,.2f}" if own and len(group) > 1 else ""
        time_of = show(row["time"]) if own else row["time"]["not_measured"]
        compile_of = f"{row['compile_s']:.1f}" if "compile_s" in row else ""
        yield row["name"], row["verdict"] or "", time_of, ratio, compile_of, program.spelling if program else ""


@click.command()
@click.option("--only", default="", help="Beginnings of names, with commas between them; all programs without it.")
@click.option("--seq-len", default=LONG.S, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Timed runs of a program, fewer where they take long.")
@click.option("--limit", default=120.0, show_default=True, help="Seconds of processor time for a program, all told.")
@click.option("--memory", default=6.0, show_default=True, help="GiB that a program may take.")
@click.option("--processes", default=1, show_default=True, help="Programs at a time.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(only, seq_len, repeats, limit, memory, processes, out) -> None:
    """Time the catalogue, and compare spellings of the same attention."""
    names = [name for name in PROGRAMS if name.startswith(tuple(only.split(",")))]
    sizes = replace(LONG, S=seq_len)
    settings = {"repeats": repeats, "limit_s": limit, "threads": 1, "processes": processes}
    settings |= {"dtype": "float32", "nested": "inductor", "clock": "processor time"}
    rows: dict[str, dict[str, Any]] = {}
    if only and out.exists():
        rows = {row["name"]: row for row in json.loads(out.read_text(encoding="utf-8"))["results"]}
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(processes) as pool:

        def measure(name: str) -> dict[str, Any]:
            return in_a_process(name, seq_len, repeats, limit, memory, cache)

        for row in pool.map(measure, [DENSE, *names]):
            if row["verdict"]:
                row["class"] = class_of(row["verdict"])
            rows[row["name"]] = {**row, "memory_gib": memory}
            write_record(out, make_record("catalogue", settings, list(rows.values()), sizes=asdict(sizes)))
            print(f"{row['name']}: {show(row['time'])} ms, {row['verdict'] or row['time']}", flush=True)
    headers = ("program", "verdict", "ms (range)", "over the fastest", "compile, s", "spelling")
    print(tabulate(list(cliffs(list(rows.values()))), headers=headers, disable_numparse=True))
    print(out)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER_FLAG]:
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
