"""`nsa-compile data`: look at a data set, tokenize it ahead of a run, check what was kept of it."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import SuggestingGroup, run_options

if TYPE_CHECKING:
    from nsa_compile.config import RunConfig
    from nsa_compile.data.token_cache import TokenCache

SMOKE_BATCHES = 16
EXCERPT = 200


@click.group(cls=SuggestingGroup)
def data() -> None:
    """Look at a data set, tokenize it ahead of a run, check what was kept of it.

    \b
    nsa-compile data smoke --set data.name=needle
    nsa-compile data prepare --set data.name=my_texts/
    nsa-compile data verify --config my_run.yaml
    """


@data.command(short_help="Draw a few batches and show them.")
@run_options
def smoke(config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Draw a few batches as training would, and show their shape, rate and beginning; of a synthetic task, the answer.

    \b
    nsa-compile data smoke
    nsa-compile data smoke --set data.name=needle --set train.seq_len=512
    """
    from nsa_compile.config import load_config
    from nsa_compile.data import BatchSampler, load_corpus
    from nsa_compile.data.sampling import readable, without_filling

    config = load_config(config_path, overrides)
    start = time.perf_counter()
    corpus = load_corpus(config)
    loaded = time.perf_counter()
    sampler = BatchSampler(corpus.train, config.train.batch_size, config.train.seq_len)
    first = sampler.next_batch()
    for _ in range(SMOKE_BATCHES - 1):
        sampler.next_batch()
    seconds = time.perf_counter() - loaded

    sequence = readable(first[0])
    counted = first[0] >= 0 if config.data.chat else corpus.answers
    answer = None if counted is None else corpus.tokenizer.decode(sequence[counted].tolist())
    shown = sequence[: len(without_filling(first[0]))]
    facts = {
        "name": config.data.name,
        "tokenizer": config.data.tokenizer,
        "shape": list(first.shape),
        "batches": SMOKE_BATCHES,
        "load_seconds": loaded - start,
        "tokens_per_s": SMOKE_BATCHES * first.size / seconds,
        "best_unigram_loss": corpus.best_unigram_loss,
        "begins": corpus.tokenizer.decode(shown[:EXCERPT].tolist()),
        "ends": corpus.tokenizer.decode(shown[-EXCERPT:].tolist()),
        "answer": answer,
    }
    rows = {
        "shape": f"{SMOKE_BATCHES} batches of [{first.shape[0]}, {first.shape[1]}] tokens, the last one a target only",
        "rate": f"{facts['tokens_per_s']:,.0f} tokens/s after {facts['load_seconds']:.1f} s of loading",
        "unigram loss": f"{corpus.best_unigram_loss:.4f} nats per token",
        # Escaped: a text from anywhere may hold what moves the cursor.
        "begins": repr(facts["begins"]),
        "ends": repr(facts["ends"]),
    }
    if answer is not None:
        rows["answer"] = repr(answer)
    _show(facts, rows, as_json)


@data.command(short_help="Tokenize files ahead of a run.")
@run_options
def prepare(config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Tokenize the files of data.name into the cache that training reads; a run does so itself if need be.

    \b
    nsa-compile data prepare --set data.name=my_text.txt
    nsa-compile data prepare --set data.name=my_texts/ --set data.cache_dir=cache
    nsa-compile data prepare --set data.name=a.jsonl --set data.tokenizer=gpt2 --set model.vocab_size=50257
    """
    from nsa_compile.data.token_cache import open_cache

    cache = open_cache(_files_of(config_path, overrides).data)
    _show_cache(cache, "made" if cache.built else "there already", as_json)


@data.command(short_help="Check a cache against its files.")
@run_options
def verify(config_path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Hash the whole cache of data.name and tokenize samples of its files again; exit code 2 if anything differs.

    \b
    nsa-compile data verify --set data.name=my_text.txt
    """
    from nsa_compile.data.token_cache import verify_cache

    _show_cache(verify_cache(_files_of(config_path, overrides).data), "verified", as_json)


def _files_of(config_path: str | None, overrides: tuple[str, ...]) -> RunConfig:
    from nsa_compile.config import BUILT_IN, load_config
    from nsa_compile.errors import UserError

    config = load_config(config_path, overrides)
    if config.data.name in BUILT_IN:
        raise UserError(
            f"data.name = '{config.data.name}' is built in and has no cache: it must be a file or a directory here; "
            "name one with --set data.name=PATH"
        )
    if config.data.stream:
        raise UserError("data.stream = true keeps no cache; use --set data.stream=false to tokenize ahead of a run")
    if config.data.chat:
        raise UserError(
            "data.chat = true keeps no cache: a run reads its conversations as it begins, so there is nothing to "
            "prepare or verify; nsa-compile data smoke reads and checks them all"
        )
    return config


def _show_cache(cache: TokenCache, state: str, as_json: bool) -> None:
    header = cache.header
    per_byte = header.tokens / header.text_bytes if header.text_bytes else None
    facts = {
        "state": state,
        "files": len(header.recipe.sources),
        "tokenizer": header.recipe.tokenizer,
        "documents": header.documents,
        "tokens": header.tokens,
        "text_bytes": header.text_bytes,
        "tokens_per_byte": per_byte,
        "cache_bytes": cache.tokens.nbytes,
        "sha256": header.sha256,
        "path": str(cache.directory),
    }
    rows = {
        "cache": f"{state}: {cache.directory}",
        "text": f"{header.documents:,} documents, {header.text_bytes:,} bytes, {facts['files']} files",
        "tokens": f"{header.tokens:,} ({header.recipe.tokenizer}), {cache.tokens.nbytes:,} bytes as {header.dtype}",
        "tokens per byte": "–" if per_byte is None else f"{per_byte:.3f}",
        "SHA-256": header.sha256,
    }
    _show(facts, rows, as_json)


def _show(facts: dict[str, Any], rows: dict[str, str], as_json: bool) -> None:
    from tabulate import tabulate

    click.echo(json.dumps(facts, indent=2) if as_json else tabulate(rows.items(), tablefmt="plain"))
