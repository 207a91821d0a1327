"""``nsa-compile eval``: how good a trained model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.arguments import check_file, writing
from nsa_compile.cli import json_option
from nsa_compile.errors import UserError

if TYPE_CHECKING:
    from nsa_compile.evaluation.held_out import Text, TextScore
    from nsa_compile.evaluation.needle import Found
    from nsa_compile.generation.trained import TrainedModel

STREAM = (
    "Tokens of each text are scored once, after at least context - stride tokens before them, or all that there are."
)
RECORDS = "The needles are the records of the task that the model was trained on; depths are ranges."
SENTENCES = (
    "A sentence that gives a city its password lies in held-out text, which ends in the sentence up to the password."
)


@click.command("eval")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--task", type=click.Choice(["text", "needle"]),
    help="text: bits per byte. needle: what is found again, by length and depth. By default needle for a model trained "
    "on that task, else text.",
)  # fmt: skip
@click.option(
    "--data", metavar="PATH",
    help="Texts of your own, a file or directory as for data.name, each document or conversation by itself; by default "
    "the run's held-out text.",
)  # fmt: skip
@click.option(
    "--length", "lengths", type=click.IntRange(min=1, max=2**24), multiple=True, metavar="N",
    help="Tokens that the model sees at most; may be given again. By default as many as it was trained on.",
)  # fmt: skip
@click.option(
    "--stride", type=click.IntRange(min=1), metavar="N",
    help="text: tokens from one window to the next, at most the length; by default the length.",
)  # fmt: skip
@click.option("--max-tokens", type=click.IntRange(min=1), metavar="N", help="text: score the first N tokens only.")
@click.option(
    "--depths", type=click.IntRange(min=1, max=100), default=10, show_default=True, help="needle: depths to hide at."
)
@click.option(
    "--samples", type=click.IntRange(min=1), default=16, show_default=True,
    help="needle: texts for each length (and depth, where it is a sentence).",
)  # fmt: skip
@click.option(
    "--compile/--no-compile", "compiled", default=True, show_default=True,
    help="Compile the model, once for each length.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page as well.")
@json_option
def evaluate(
    run: Path,
    task: str | None,
    data: str | None,
    lengths: tuple[int, ...],
    stride: int | None,
    max_tokens: int | None,
    depths: int,
    samples: int,
    compiled: bool,
    out: Path | None,
    as_json: bool,
) -> None:
    """Say how good the model of a run is, of one of its checkpoints, or of an exported folder.

    \b
    nsa-compile eval runs/shakespeare-cpu-20260101-120000
    nsa-compile eval RUN --length 512 --length 2048 --stride 256
    nsa-compile eval RUN --data my_texts.jsonl --json
    nsa-compile eval RUN --task needle --length 256 --length 512 --out needle.html
    """
    if out is not None:
        check_file(out)
    from nsa_compile.evaluation.evaluation_page import tables, write_page
    from nsa_compile.evaluation.held_out import score_texts
    from nsa_compile.evaluation.scoring import Scorer
    from nsa_compile.generation.trained import load_trained

    trained = load_trained(run)
    for warning in trained.warnings:
        click.echo(warning, err=True)
    lengths = _lengths(run, trained, lengths)
    if stride is not None and stride > min(lengths):
        raise UserError(f"--stride {stride} must be at most --length {min(lengths)}, or tokens are left out")
    records = trained.config is not None and trained.config.data.name == "needle" and data is None
    task = task or ("needle" if records else "text")
    if task == "needle" and (stride or max_tokens):
        given = f"--stride {stride}" if stride else f"--max-tokens {max_tokens}"
        raise UserError(f"{given} is for --task text, and this is --task needle; leave it out")
    texts = [] if task == "needle" and records else _texts(run, trained, data, max_tokens)
    scorer = Scorer(trained.model, compiled=compiled)
    scores: list[TextScore] = []
    found: list[Found] = []
    if task == "text":
        meaning = STREAM
        token_bytes = trained.tokenizer.token_bytes
        scores = [score_texts(scorer, texts, length, stride or length, token_bytes) for length in lengths]
    else:
        meaning = RECORDS if records else SENTENCES
        found = _find(scorer, trained, texts, lengths, depths, samples)
    about = {
        "checkpoint": str(trained.source),
        "data": data or (f"held out of {trained.config.data.name}" if trained.config else ""),
        "parameters": sum(weight.numel() for weight in trained.model.parameters()),
        "seq_len": trained.seq_len,  # of the training
    }
    if task == "text" and trained.config is not None and trained.config.train.loss == "answers":
        click.echo("note: all tokens are scored; the validation loss of the run is of its answers alone", err=True)
    # First what was measured: a page that cannot be written takes nothing with it.
    if as_json:
        rows = [row.plain() for row in scores] + [row.plain() for row in found]
        click.echo(json.dumps({"task": task, **about, "meaning": meaning, "results": rows}, indent=2))
    else:
        click.echo("\n\n".join(tables(scores, found)))
        click.echo(meaning, err=True)
    if out is not None:
        with writing(out, "FILE"):
            write_page(out, about, scores, found, meaning)
        click.echo(f"page: {out}", err=True)


def _lengths(run: Path, trained: TrainedModel, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths that were asked for, or that of the training, each once."""
    if not lengths and trained.seq_len is None:
        raise UserError(f"'{run}' does not say how long the texts of its training were; give --length N")
    lengths = tuple(dict.fromkeys(lengths or (trained.seq_len or 0,)))
    if trained.seq_len is not None and max(lengths) > trained.seq_len:
        click.echo(f"note: --length {max(lengths)} is beyond the {trained.seq_len} tokens of the training", err=True)
    return lengths


def _texts(run: Path, trained: TrainedModel, data: str | None, max_tokens: int | None) -> list[Text]:
    from nsa_compile.evaluation.held_out import cut, held_out_texts, read_texts

    if data is not None:
        field = "text" if trained.config is None else trained.config.data.text_field
        texts = read_texts(data, trained.tokenizer, field)
    elif trained.config is not None:
        texts = held_out_texts(trained.config)
    else:
        raise UserError(f"'{run}' is an exported model and does not know what was held out; give --data PATH")
    texts = [text for text in cut(texts, max_tokens) if len(text.tokens) > text.first]
    if not texts:
        raise UserError(f"'{data}' holds no text; give another one with --data PATH")
    return texts


def _find(
    scorer: Any, trained: TrainedModel, texts: list[Text], lengths: tuple[int, ...], depths: int, samples: int
) -> list[Found]:
    import numpy as np

    from nsa_compile.evaluation.needle import find_records, find_sentences

    found = []
    for length in lengths:
        if texts:
            text = np.concatenate([text.tokens for text in texts])
            found += find_sentences(scorer, text, trained.tokenizer, length, depths, samples)
        else:
            assert trained.config is not None
            found += find_records(scorer, trained.config, length, depths, samples)
    return found
