"""A trained model, from a run or one of its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa_compile.config import RunConfig, load_config
from nsa_compile.data.tokenizers import Tokenizer, make_tokenizer
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.models import NSATransformer
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint
from nsa_compile.train.checkpoints.files import MANIFEST, STATE, Checkpoint, checkpoint_paths, verify_checkpoint
from nsa_compile.train.checkpoints.resume import first_difference

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained by.

    Attributes:
        checkpoint: where its weights come from.
        warnings: a line for each newer checkpoint that is damaged.
    """

    model: NSATransformer
    config: RunConfig
    tokenizer: Tokenizer
    checkpoint: Checkpoint
    warnings: list[str]


def load_trained(path: Path, dtype: str = "float32") -> TrainedModel:
    """The model of a run, from its newest good checkpoint, or of the checkpoint that is named.

    Args:
        path: the directory of a run or of one of its checkpoints.
        dtype: of the weights, `"float32"` or `"bf16"`.

    Raises:
        UserError: the path is neither, or the run was trained on no text.
        CheckpointError: it has no good checkpoint, or one of another configuration.
    """
    if (path / MANIFEST).exists():
        directory, checkpoint = path.absolute().parent.parent, verify_checkpoint(path)
        warnings: list[str] = []
    elif (path / "checkpoints").is_dir():
        directory = path
        checkpoint, warnings = _newest(path)
    else:
        raise UserError(f"'{path}' must be the directory of a run or of one of its checkpoints; see ls runs")
    config = load_config(str(directory / "config.resolved.yaml"))
    state = load_checkpoint(checkpoint.path)[STATE]
    model = NSATransformer(config.model)
    _put_weights(model, config, state, checkpoint)
    model = model.to(DTYPES[dtype]).eval().requires_grad_(False)
    return TrainedModel(model, config, make_tokenizer(config.data.tokenizer), checkpoint, warnings)


def _newest(run: Path) -> tuple[Checkpoint, list[str]]:
    """The newest good checkpoint of a run, and a warning for each newer one that is damaged."""
    damages: list[str] = []
    for path in reversed(checkpoint_paths(run / "checkpoints")):
        try:
            return verify_checkpoint(path), [f"warning: {damage}; the one before is used" for damage in damages]
        except CheckpointError as error:
            damages.append(str(error))
    raise CheckpointError(
        f"run '{run}' has no good checkpoint{''.join(f': {d}' for d in damages[:1])}; see {_LIST} {run}"
    )


_LIST = "nsa-compile ckpt ls"


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
