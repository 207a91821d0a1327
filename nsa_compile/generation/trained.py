"""A trained model, from a run, one of its checkpoints, or what was exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa_compile.config import TOKENIZER_VOCAB_SIZES, RunConfig, load_config
from nsa_compile.data.tokenizers import Tokenizer, make_tokenizer
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.generation.exported import CONFIG, read_exported
from nsa_compile.models import NSATransformer
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint
from nsa_compile.train.checkpoints.files import MANIFEST, STATE, Checkpoint, verify_checkpoint
from nsa_compile.train.checkpoints.resume import first_difference, newest_good

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained by.

    Attributes:
        seq_len: tokens of the sequences that it was trained on; None where nobody knows.
        source: the checkpoint or the folder that its weights come from.
        warnings: a line for each newer checkpoint that is damaged.
        config: of its run; None for an exported model.
    """

    model: NSATransformer
    tokenizer: Tokenizer
    seq_len: int | None
    source: Path
    warnings: list[str]
    config: RunConfig | None = None


def load_trained(path: Path, dtype: str = "float32") -> TrainedModel:
    """The model of a run, from its newest good checkpoint, or of the checkpoint or the exported folder that is named.

    Args:
        path: the directory of a run or of one of its checkpoints, or a folder of `nsa-compile export`.
        dtype: of the weights, `"float32"` or `"bf16"`.

    Raises:
        UserError: the path is none of these, or the folder is damaged or has a tokenizer that is not known here.
        CheckpointError: it has no good checkpoint, or one of another configuration.
    """
    if (path / MANIFEST).exists():
        directory, checkpoint = path.absolute().parent.parent, verify_checkpoint(path)
        warnings: list[str] = []
    elif (path / "checkpoints").is_dir():
        directory = path
        checkpoint, warnings = _newest(path)
    elif (path / CONFIG).exists():
        return _load_exported(path, dtype)
    else:
        raise UserError(
            f"'{path}' must be the directory of a run or of one of its checkpoints, or an exported model; see ls runs"
        )
    config = load_config(str(directory / "config.resolved.yaml"))
    state = load_checkpoint(checkpoint.path)[STATE]
    model = NSATransformer(config.model)
    _put_weights(model, config, state, checkpoint)
    tokenizer = make_tokenizer(config.data.tokenizer)
    return TrainedModel(_ready(model, dtype), tokenizer, config.train.seq_len, checkpoint.path, warnings, config)


def _load_exported(folder: Path, dtype: str) -> TrainedModel:
    exported = read_exported(folder)
    if exported.tokenizer not in TOKENIZER_VOCAB_SIZES:
        raise UserError(
            f"'{folder / CONFIG}' names the tokenizer {exported.tokenizer!r}; it must be one of "
            f"{', '.join(TOKENIZER_VOCAB_SIZES)}, or the model goes on with no text here"
        )
    tokenizer = make_tokenizer(exported.tokenizer)
    return TrainedModel(_ready(exported.model, dtype), tokenizer, exported.seq_len, folder, [])


def _ready(model: NSATransformer, dtype: str) -> NSATransformer:
    return model.to(DTYPES[dtype]).eval().requires_grad_(False)


def _newest(run: Path) -> tuple[Checkpoint, list[str]]:
    """The newest good checkpoint of a run, and a warning for each newer one that is damaged."""
    checkpoint, damages = newest_good(run)
    if checkpoint is None:
        why = f": {damages[0]}" if damages else ""
        raise CheckpointError(f"run '{run}' has no good checkpoint{why}; see nsa-compile ckpt ls {run}")
    return checkpoint, [f"warning: {damage}; the one before is used" for damage in damages]


def _put_weights(model: NSATransformer, config: RunConfig, state: Any, checkpoint: Checkpoint) -> None:
    """Take over the weights, and nothing that is not of this configuration."""
    try:
        difference = first_difference(config, state["config"])
        if difference is None:
            model.load_state_dict(state["model"])
            return
    except Exception as error:  # whatever a state that anybody may have made up ends in
        difference = f"reading it ended in {type(error).__name__}"
    raise CheckpointError(
        f"checkpoint '{checkpoint.path}' is not of the configuration of its run: {difference}; take another checkpoint"
    )
