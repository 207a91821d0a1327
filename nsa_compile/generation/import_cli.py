"""``nsa-compile import``: a model of others as a folder of ours."""

from __future__ import annotations

import importlib
from pathlib import Path

import click

from nsa_compile.arguments import check_new_directory
from nsa_compile.generation.export_cli import write_folder


@click.command("import")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A folder that is new.")
def import_model(source: Path, out: Path) -> None:
    """Write a model of others as a folder of nsa-compile export.

    SOURCE is a folder of transformers: a config.json and weights as safetensors, of flash-linear-attention's NSA models
    (model_type nsa) or of dense models of the Llama family (llama, mistral), which nsa-compile convert makes sparse.
    The files of its tokenizer are copied.
    `import nsa_compile.hf` and AutoModelForCausalLM.from_pretrained(DIR) load it.

    \b
    nsa-compile import fla-model --out model
    """
    check_new_directory(out)
    importlib.import_module("safetensors")  # who lacks the extra need not wait for torch
    from nsa_compile.generation.exported import write_exported
    from nsa_compile.generation.imported import OTHERS, TOKENIZER_OF_TEXT, copy_tokenizer, read_folder

    model = read_folder(source, list(OTHERS))

    def write(folder: Path) -> None:
        write_exported(folder, model)
        copy_tokenizer(source, folder)

    names = write_folder(write, out)
    click.echo(f"{out}: {', '.join(names)} of '{source}'")
    if not set(TOKENIZER_OF_TEXT) & set(names):
        click.echo(f"note: '{source}' has no tokenizer, so '{out}' takes tokens and not text", err=True)
