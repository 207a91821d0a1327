"""``nsa-compile convert``: a dense model as an NSA model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from nsa_compile.arguments import check_new_directory
from nsa_compile.cli import stacked
from nsa_compile.errors import UserError
from nsa_compile.generation.export_cli import write_folder
from nsa_compile.models.config import SparsePattern

_SIZES = {
    "compress_block": "Tokens pooled into one compressed key.",
    "compress_stride": "Tokens between the starts of neighbouring compressed blocks.",
    "select_block": "Tokens of a selection block.",
    "num_selected": "Selection blocks that a query attends to.",
    "window": "Tokens of the sliding window.",
}


@click.command()
@click.argument("source")
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A folder that is new.")
@stacked(
    *(
        click.option(
            f"--{name.replace('_', '-')}", type=int, default=getattr(SparsePattern, name), show_default=True, help=text
        )
        for name, text in _SIZES.items()
    )
)
def convert(source: str, out: Path, **sizes: Any) -> None:
    """Make an NSA model of a dense one; train --init-from goes on with it.

    SOURCE is a folder of transformers' Llama family (config.json, weights as safetensors), hf:ORG/NAME, or a run, a
    checkpoint or an exported folder of ours with model.attention = dense. Keys and values are shared by the branches,
    and the gates begin so that the output is close to that of dense attention. The files of a tokenizer are copied.

    \b
    nsa-compile convert llama --out sparse --window 512
    nsa-compile convert runs/dense-20260101-120000 --out sparse --window 64 --num-selected 4
    """
    check_new_directory(out)
    try:
        pattern = SparsePattern(**sizes)
    except ValueError as error:
        raise UserError(f"{error}; give other sizes, see nsa-compile convert --help") from None
    import safetensors  # noqa: F401  # who lacks the extra need not wait for torch

    from nsa_compile.generation.converted import to_sparse
    from nsa_compile.generation.exported import Exported, write_exported
    from nsa_compile.generation.imported import copy_tokenizer
    from nsa_compile.train.checkpoints.source import read_source

    found = read_source(source)
    for warning in found.warnings:
        click.echo(warning, err=True)
    try:
        sparse = to_sparse(Exported(found.model, found.tokenizer, found.seq_len, found.chat), pattern)
    except ValueError as error:
        raise UserError(f"'{source}' cannot be converted: {error}; give a dense model") from None

    def write(folder: Path) -> None:
        write_exported(folder, sparse)
        copy_tokenizer(found.path, folder)

    click.echo(f"{out}: {', '.join(write_folder(write, out))} of '{found.path}'")
    settings = " ".join(f"--set {key}={value}" for key, value in model_keys(sparse.model.config).items())
    click.echo(f"to train it on, give these keys: {settings}", err=True)


def model_keys(config: Any) -> dict[str, Any]:
    """The keys of a run's configuration that describe a model, those at their defaults left out."""
    keys: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "pattern":
            keys |= {f"model.pattern.{name}": size for name, size in dataclasses.asdict(value).items()}
        elif value != field.default:
            keys[f"model.{field.name}"] = str(value).lower() if isinstance(value, bool) else value
    return keys
