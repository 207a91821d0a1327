"""``nsa-compile export``: a trained model as a folder that other programs read."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nsa_compile.arguments import check_new_directory
from nsa_compile.errors import UserError

if TYPE_CHECKING:
    from nsa_compile.generation.trained import TrainedModel

# What the extra brings for each kind, imported first: who lacks it need not wait for the model.
_NEEDED = {
    "safetensors": ("safetensors",),
    "hf": ("safetensors", "transformers"),
    "decode-step": (),
    "onnx-decode-step": ("onnx", "onnxscript"),
}


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to", "kind", type=click.Choice(list(_NEEDED)), required=True,
    help="safetensors: weights and config.json. hf: also the tokenizer's files, for pipelines of transformers. "
    "decode-step: a program of torch.export that makes the logits of the next token. onnx-decode-step: one of ONNX.",
)  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="A folder that is new.")
@click.option(
    "--max-len", type=click.IntRange(min=1), metavar="N",
    help="Tokens that the caches of a decode step have room for; by default as many as the model was trained on.",
)  # fmt: skip
def export(run: Path, kind: str, out: Path, max_len: int | None) -> None:
    """Write the model of a run, or of one of its checkpoints, into a folder of its own.

    `import nsa_compile.hf` and AutoModelForCausalLM.from_pretrained(DIR) load the first two kinds; so do nsa-compile
    generate and chat. transformers serve DIR --trust-remote-code serves the second. A decode step runs without
    nsa-compile. The folder is there as a whole, or not at all.

    \b
    nsa-compile export runs/shakespeare-cpu-20260101-120000 --to hf --out shakespeare
    nsa-compile generate shakespeare --prompt "ROMEO:"
    """
    check_new_directory(out)
    is_step = kind.endswith("decode-step")
    if max_len is not None and not is_step:
        raise UserError(f"--max-len {max_len} is for the room of a decode step, and this is --to {kind}; leave it out")
    for module in _NEEDED[kind]:
        importlib.import_module(module)
    from nsa_compile.generation.trained import ready_to_write
    from nsa_compile.train.checkpoints.source import read_source

    source = read_source(str(run))
    for warning in source.warnings:
        click.echo(warning, err=True)
    if is_step:  # it has no text, and needs no tokenizer
        from nsa_compile.generation.exported_step import write_onnx_step, write_step

        room = max_len or source.seq_len
        if room is None:
            raise UserError(f"'{run}' does not say how long the texts of its training were; give --max-len N")
        write = write_step if kind == "decode-step" else write_onnx_step
        model = source.model.float().eval().requires_grad_(False)
        names = write_folder(lambda folder: write(folder, model, room), out)
    else:
        trained = ready_to_write(source)
        names = write_folder(lambda folder: _write_model(trained, kind, folder), out)
    click.echo(f"{out}: {', '.join(names)} of '{source.path}'")


def _write_model(trained: TrainedModel, kind: str, folder: Path) -> None:
    from nsa_compile.generation.exported import Exported, write_exported

    exported = Exported(trained.model, trained.tokenizer.name, trained.seq_len, trained.chat)
    write_exported(folder, exported, module=kind == "hf")
    if kind == "hf":
        from nsa_compile.hf.tokenizer import save_tokenizer

        save_tokenizer(trained.tokenizer, folder)


def write_folder(write: Callable[[Path], None], out: Path) -> list[str]:
    """Let a folder be written beside its place, flush it, and give it its name; returns the names of its files.

    Raises:
        UserError: it cannot be written.
    """
    from nsa_compile.files import flush

    target = out.absolute()
    try:
        with tempfile.TemporaryDirectory(prefix=".exporting-", dir=target.parent) as temporary:
            unfinished = Path(temporary) / target.name
            unfinished.mkdir()
            write(unfinished)
            names = sorted(path.name for path in unfinished.iterdir())
            for name in names:
                flush(unfinished / name)
            flush(unfinished)
            os.rename(unfinished, target)
        flush(target.parent)
    except OSError as error:
        raise UserError(f"'{out}' cannot be written: {error}; choose another place with --out DIR") from None
    return names
