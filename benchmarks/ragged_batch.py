"""Texts of unequal length: a session that they join and leave, beside one batch that has room for the longest.

    python benchmarks/ragged_batch.py

On the CPU, with a model of two layers. The prompts grow from 16 tokens to 3,000, each by one factor; 64 tokens are
drawn of each. The one batch reads all prompts filled up to the longest, and decodes until all are done. Counted are the
bytes of the caches, at their most and in the mean over the tokens drawn, and the tokens drawn in a second of the clock
and of processor time, prompts included and programs compiled before.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click
import torch
from tabulate import tabulate

from nsa_compile.generation.generate import Decoder, Request, Session
from nsa_compile.generation.sampling import Sampling
from nsa_compile.profiles.measure import build, make_record, model_config, random_tokens, write_record

RECORD = Path(__file__).parent / "results" / "ragged_batch.json"
SHORTEST, LONGEST = 16, 3000
DRAWN = 64
GREEDY = Sampling(temperature=0)


def prompts(number: int) -> list[list[int]]:
    """Random bytes, of lengths that grow by one factor."""
    factor = (LONGEST / SHORTEST) ** (1 / (number - 1))
    tokens: list[int] = random_tokens(model_config(2, 256, 64), LONGEST)[0].tolist()
    return [tokens[: round(SHORTEST * factor**n)] for n in range(number)]


def one_batch(decoder: Decoder, given: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The texts, and the bytes of the caches at each token."""
    room = decoder.room(max(map(len, given)) + DRAWN - 1)
    padded = torch.zeros(len(given), decoder.rows_of_prompt(max(map(len, given))), dtype=torch.int64)
    for row, prompt in zip(padded, given, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    state, logits = decoder.prefill(padded, torch.tensor([len(prompt) for prompt in given]), room)
    held = sum(cache.nbytes for cache in state.caches())
    drawn = [logits.argmax(-1)]
    for _ in range(DRAWN - 1):
        state, logits = decoder.step(state, drawn[-1])
        drawn.append(logits.argmax(-1))
    return torch.stack(drawn, dim=1).tolist(), [held] * len(given) * DRAWN


def joined(decoder: Decoder, given: list[list[int]], limit: int | None) -> tuple[list[list[int]], list[int]]:
    """The same of a session."""
    session = Session(decoder, [Request(list(prompt), DRAWN, torch.Generator()) for prompt in given], limit)
    held = [session.cache_bytes() for _ in session.stream(GREEDY)]
    return [request.tokens[-DRAWN:] for request in session.requests], held


@click.command()
@click.option("--texts", default=8, show_default=True, type=click.IntRange(min=2), help="How many.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Timed, in turns.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
@torch.no_grad()
def main(texts, rounds, out) -> None:
    """Decode a ragged mix in each way."""
    decoder, given = Decoder(build(model_config(layers=2, dim=256, head_dim=64))), prompts(texts)
    ways = {
        "one batch": lambda: one_batch(decoder, given),
        "session": lambda: joined(decoder, given, None),
        "session of 4 at a time": lambda: joined(decoder, given, 4),
    }
    found = {name: way() for name, way in ways.items()}  # compiles
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            clock, processor = time.perf_counter(), time.process_time()
            way()
            seconds[name].append((time.perf_counter() - clock, time.process_time() - processor))
    alike = found["one batch"][0]
    rows: list[dict[str, Any]] = []
    for name, (drawn, held) in found.items():
        clock, processor = (median(column) for column in zip(*seconds[name], strict=True))
        rows.append({
            "way": name, "most_cache_bytes": max(held), "mean_cache_bytes": fmean(held),
            "tokens_per_s": texts * DRAWN / clock, "tokens_per_processor_s": texts * DRAWN / processor,
            "seconds": seconds[name], "texts_as_in_one_batch": sum(map(list.__eq__, drawn, alike)),
        })  # fmt: skip
    settings = {"prompt_tokens": [len(prompt) for prompt in given], "drawn": DRAWN, "threads": torch.get_num_threads()}
    write_record(out, make_record("ragged_batch", settings, rows))
    table = [
        (row["way"], *(f"{row[f'{kind}_cache_bytes'] / 2**20:.0f}" for kind in ("most", "mean")),
         *(f"{row[f'tokens_per_{unit}']:.0f}" for unit in ("s", "processor_s")))
        for row in rows
    ]  # fmt: skip
    print(tabulate(table, headers=("", "caches, MiB", "in the mean", "tokens/s", "tokens/s of processor")))


if __name__ == "__main__":
    main()
