"""``nsa-compile export``: a trained model as a folder that other programs read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsa_compile.arguments import check_new_directory
from nsa_compile.errors import UserError

if TYPE_CHECKING:
    from nsa_compile.generation.trained import TrainedModel


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to", "kind", type=click.Choice(["safetensors", "hf"]), required=True,
    help="safetensors: weights and config.json; hf: also the tokenizer's files, for pipelines of transformers.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A folder that is new.")
def export(run: Path, kind: str, out: Path) -> None:
    """Write the model of a run, or of one of its checkpoints, into a folder of its own.

    `import nsa_compile.hf` and AutoModelForCausalLM.from_pretrained(DIR) load either kind; so do nsa-compile generate
    and chat. The folder is there as a whole, or not at all.

    \b
    nsa-compile export runs/shakespeare-cpu-20260101-120000 --to hf --out shakespeare
    nsa-compile generate shakespeare --prompt "ROMEO:"
    """
    check_new_directory(out)
    from safetensors import SafetensorError

    from nsa_compile.generation.trained import load_trained

    trained = load_trained(run)
    for warning in trained.warnings:
        click.echo(warning, err=True)
    try:
        names = _write(trained, kind, out.absolute())
    except (OSError, SafetensorError) as error:
        raise UserError(f"'{out}' cannot be written: {error}; choose another place with --out DIR") from None
    click.echo(f"{out}: {', '.join(names)} of '{trained.source}'")


def _write(trained: TrainedModel, kind: str, target: Path) -> list[str]:
    """Write the folder beside its place, flush it, and give it its name; returns the names of its files."""
    from nsa_compile.files import flush
    from nsa_compile.generation.exported import Exported, write_exported

    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=target.parent) as temporary:
        unfinished = Path(temporary) / target.name
        unfinished.mkdir()
        write_exported(unfinished, Exported(trained.model, trained.tokenizer.name, trained.seq_len))
        if kind == "hf":
            from nsa_compile.hf.tokenizer import save_tokenizer

            save_tokenizer(trained.tokenizer, unfinished)
        names = sorted(path.name for path in unfinished.iterdir())
        for name in names:
            flush(unfinished / name)
        flush(unfinished)
        os.rename(unfinished, target)
    flush(target.parent)
    return names
