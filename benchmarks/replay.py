"""How often training, prefill and decoding select other blocks for a token, and what a replayed selection changes.

    nsa-compile train --config configs/shakespeare_cpu.yaml
    python benchmarks/replay.py runs/NAME

Held-out text goes through a trained model in the three compiled forms: what trains (bf16: autocast, as the trainer
does), prefill and the decode step, token by token (bf16: weights in bf16, as `nsa-compile generate` has them). Counted
are the selections of a token in a layer for a group in which there is a choice: more blocks up to the token's own than
are selected. Then what trains replays the decode step's selection. The log-probability of each next token is compared
with the decode step's: in reinforcement learning, its difference is the logarithm of an importance ratio that
should be 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from tabulate import tabulate
from torch import Tensor

import nsa_compile
from nsa_compile.config import load_config
from nsa_compile.data.corpus import load_corpus
from nsa_compile.generation.trained import load_trained
from nsa_compile.models import NSATransformer
from nsa_compile.profiles.measure import make_record, write_record

RECORD = Path(__file__).parent / "results" / "replay.json"


def held_out(run: Path, sequences: int) -> Tensor:
    """`[B, S + 1]` of the run's validation set."""
    config = load_config(str(run / "config.resolved.yaml"))
    config = config.changed(train={"batch_size": sequences, "eval_batches": 1})
    return torch.from_numpy(load_corpus(config).validation[0])


def decoded(model: NSATransformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits `[B, S, V]` and selection `[B, S, layers, G, n]` of the compiled decode step."""
    step = nsa_compile.compile_decode_step(model)
    state = model.init_state(*tokens.shape)
    logits, selections = [], []
    for column in tokens.unbind(1):
        state, row, selection = step(state, column, return_selection=True)
        logits.append(row.float())
        selections.append(selection)
    return torch.stack(logits, 1), torch.stack(selections, 1)


def share_differing(a: Tensor, b: Tensor, choice: Tensor) -> float:
    """Of the selections with a choice: the tokens `choice` `[S]`."""
    differ = (a.sort(-1).values != b.sort(-1).values).any(-1)
    return differ[:, choice].double().mean().item()


def log_probabilities(logits: Tensor, following: Tensor) -> Tensor:
    """Of the token after each, `[B, S]`."""
    return logits.double().log_softmax(-1).gather(-1, following[..., None])[..., 0]


def compare(run: Path, dtype: str, batch: Tensor) -> dict[str, Any]:
    """One row of the record."""
    torch._dynamo.reset()
    tokens, following = batch[:, :-1], batch[:, 1:]
    length = tokens.shape[1]
    trained = load_trained(run, "float32").model
    nsa_compile.compile_blocks(trained)
    served = load_trained(run, dtype).model
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16")

    stepped, by_decode = decoded(served, tokens)
    lengths = torch.full((len(tokens),), length)
    _, read, by_prefill = nsa_compile.compile_prefill(served)(
        tokens, lengths, length, every=True, return_selection=True
    )
    with autocast:
        logits, by_train = trained(tokens, return_selection=True)
        report = nsa_compile.last_report()
        replayed = trained(tokens, by_decode)

    operators = sorted({choice.operator for choice in report.attention}) if report else []
    pattern = served.config.pattern
    choice = torch.arange(length) // pattern.select_block >= pattern.num_selected
    expected = log_probabilities(stepped, following)
    elsewhere = (by_train.sort(-1).values != by_decode.sort(-1).values).flatten(2).any(-1)  # [B, S]

    def errors(logits: Tensor) -> dict[str, float | None]:
        off = (log_probabilities(logits, following) - expected).abs()
        where = off[elsewhere].mean().item() if elsewhere.any() else None
        return {"mean": off.mean().item(), "max": off.max().item(), "mean_where_train_differs": where}

    return {
        "dtype": dtype,
        "selections": by_decode[:, choice, :, :, 0].numel(),
        "differing": {
            "train_decode": share_differing(by_train, by_decode, choice),
            "prefill_decode": share_differing(by_prefill, by_decode, choice),
            "train_prefill": share_differing(by_train, by_prefill, choice),
        },
        "operators": operators,
        "log_probability": {
            "train": errors(logits),
            "prefill": errors(read),
            "train, replayed": errors(replayed),
        },
    }


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--sequences", default=32, show_default=True, type=click.IntRange(min=1), help="Of the run's length.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
@torch.no_grad()
def main(run: Path, sequences: int, out: Path) -> None:
    """Compare the selections of a trained model's compiled forms."""
    batch = held_out(run, sequences)
    rows = []
    for dtype in ("float32", "bf16"):
        rows.append(compare(run, dtype, batch))
        settings = {"sequences": sequences, "seq_len": batch.shape[1] - 1, "run": run.name}
        write_record(out, make_record("replay", settings, rows))
    table = [
        (row["dtype"], name, *("" if x is None else f"{x:.1e}" for x in error.values()))
        for row in rows
        for name, error in row["log_probability"].items()
    ]
    for row in rows:
        shares = ", ".join(f"{name.replace('_', ' / ')} {share:.4%}" for name, share in row["differing"].items())
        print(f"{row['dtype']}: of {row['selections']:,} selections with a choice differ: {shares}")
    print(tabulate(table, headers=("", "log-probability beside decode's", "mean", "max", "mean where blocks differ")))
    print(out)


if __name__ == "__main__":
    main()
