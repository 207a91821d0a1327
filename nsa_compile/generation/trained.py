"""A trained model, from a run, one of its checkpoints, or what was exported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from nsa_compile.config import TOKENIZER_VOCAB_SIZES, RunConfig
from nsa_compile.data.tokenizers import Tokenizer, make_tokenizer
from nsa_compile.errors import UserError
from nsa_compile.generation.exported import CONFIG
from nsa_compile.models import NSATransformer
from nsa_compile.train.checkpoints.source import Source, read_source

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained by.

    Attributes:
        seq_len: tokens of the sequences that it was trained on; None where nobody knows.
        source: the checkpoint or the folder that its weights come from.
        warnings: a line for each newer checkpoint that is damaged.
        config: of its run; None for an exported model.
        chat: whether it was trained on conversations.
    """

    model: NSATransformer
    tokenizer: Tokenizer
    seq_len: int | None
    source: Path
    warnings: list[str]
    config: RunConfig | None = None
    chat: bool = False


def load_trained(path: Path | str, dtype: str = "float32") -> TrainedModel:
    """The model that `read_source` finds, ready to write texts.

    Args:
        path: the directory of a run or of one of its checkpoints, or a folder of `nsa-compile export`.
        dtype: of the weights, `"float32"` or `"bf16"`.

    Raises:
        UserError: the path is none of these, or the folder is damaged or has a tokenizer that is not known here.
        CheckpointError: it has no good checkpoint, or one of another configuration.
    """
    return ready_to_write(read_source(str(path)), dtype)


def ready_to_write(source: Source, dtype: str = "float32") -> TrainedModel:
    """A model that was read, with its tokenizer; `dtype` as for `load_trained`.

    Raises:
        UserError: the tokenizer is not known here.
    """
    if source.tokenizer not in TOKENIZER_VOCAB_SIZES:
        raise UserError(
            f"'{source.path / CONFIG}' names the tokenizer {source.tokenizer!r}; it must be one of "
            f"{', '.join(TOKENIZER_VOCAB_SIZES)}, or the model goes on with no text here"
        )
    model = source.model.to(DTYPES[dtype]).eval().requires_grad_(False)
    tokenizer = make_tokenizer(source.tokenizer)
    return TrainedModel(model, tokenizer, source.seq_len, source.path, source.warnings, source.config, source.chat)
