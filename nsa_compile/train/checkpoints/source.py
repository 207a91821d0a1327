"""Weights to begin with: those of a run, of one of its checkpoints, of a folder, or of a repository of Hugging Face."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from nsa_compile.config import RunConfig
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.generation.exported import CONFIG
from nsa_compile.generation.imported import INDEX, TOKENIZER_FILES, read_folder
from nsa_compile.models import NSAConfig, NSATransformer
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint
from nsa_compile.train.checkpoints.files import MANIFEST, STATE, Checkpoint, verify_checkpoint
from nsa_compile.train.checkpoints.resume import config_of_run, first_difference, newest_good
from nsa_compile.train.lora import merged

HUB = "hf:"


@dataclass(frozen=True)
class Source:
    """A model that was trained before.

    Attributes:
        tokenizer: its name in `data.tokenizer`; None for another one, or where nobody knows.
        seq_len: tokens of the sequences that it was trained on; None where nobody knows.
        chat: whether it was trained on conversations.
        path: the checkpoint or the folder that its weights come from.
        warnings: a line for each newer checkpoint that is damaged.
        config: of its run; None for a folder.
    """

    model: NSATransformer
    tokenizer: str | None
    seq_len: int | None
    chat: bool
    path: Path
    warnings: list[str]
    config: RunConfig | None = None


def read_source(name: str) -> Source:
    """The model of a run, from its newest good checkpoint, or of the checkpoint, folder or repository that is named.

    Args:
        name: the directory of a run or of one of its checkpoints, a folder of `nsa-compile export`, `import` or
            `convert`, or `hf:ORG/NAME`.

    Raises:
        UserError: the name is none of these, or the folder is damaged.
        CheckpointError: it has no good checkpoint, or one of another configuration.
    """
    path = _downloaded(name) if name.startswith(HUB) else Path(name)
    if (path / MANIFEST).exists():
        directory, checkpoint = path.absolute().parent.parent, verify_checkpoint(path)
        warnings: list[str] = []
    elif (path / "checkpoints").is_dir():
        directory = path
        checkpoint, warnings = _newest(path)
    elif (path / CONFIG).exists():
        found = read_folder(path)
        return Source(found.model, found.tokenizer, found.seq_len, found.chat, path, [])
    else:
        raise UserError(
            f"'{path}' must be the directory of a run or of one of its checkpoints, or an exported model; see ls runs"
        )
    config = config_of_run(directory)
    model = NSATransformer(config.model)
    _put_weights(model, config, load_checkpoint(checkpoint.path)[STATE], checkpoint)
    data = config.data
    return Source(model, data.tokenizer, config.train.seq_len, data.chat, checkpoint.path, warnings, config)


def begin_with(model: NSATransformer, name: str, tokenizer: str) -> list[str]:
    """Give a new model the weights that `train.init_from` names; returns lines for the log.

    Args:
        tokenizer: the name of the one that it is going to be trained with.

    Raises:
        UserError: they are of another configuration or another tokenizer, or cannot be read.
        CheckpointError: the run that is named has no good checkpoint.
    """
    source = read_source(name)
    if different := differences(model.config, source.model.config):
        keys = ", ".join(f"{key} = {here!r} here and {there!r} there" for key, here, there in different)
        raise UserError(
            f"train.init_from = '{name}' is of another configuration: {keys}; give the section model of the checkpoint"
        )
    notes = list(source.warnings)
    if source.tokenizer is None:
        notes.append(f"warning: '{source.path}' does not name its tokenizer; data.tokenizer = '{tokenizer}' is used")
    elif source.tokenizer != tokenizer:
        raise UserError(
            f"train.init_from = '{name}' was trained with data.tokenizer = '{source.tokenizer}', and here it is "
            f"'{tokenizer}'; give the same with --set data.tokenizer={source.tokenizer}"
        )
    model.load_state_dict(source.model.state_dict())
    return [*notes, f"begins with the weights of '{source.path}'"]


def differences(here: NSAConfig, there: NSAConfig) -> list[tuple[str, Any, Any]]:
    """The keys of the configuration whose values are not the same model, with both values."""
    ours, theirs = _effective(here), _effective(there)
    return [
        (f"model.{key}", ours.get(key), theirs.get(key))
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    ]


def _effective(config: NSAConfig) -> dict[str, Any]:
    """The keys that this model depends on, by their dotted names, with their defaults worked out."""
    values: dict[str, Any] = asdict(config) | {"mlp_hidden": config.hidden_dim, "v_head_dim": config.value_dim}
    pattern = values.pop("pattern")
    if config.attention == "dense":
        for name in ("phi", "phi_hidden", "shared_kv", "compress_rotated", "branches"):
            del values[name]
        return values
    if config.phi == "mean":
        del values["phi_hidden"]
    return values | {f"pattern.{name}": value for name, value in pattern.items()}


def _downloaded(name: str) -> Path:
    """The folder in which huggingface_hub keeps a repository: its configuration and its weights as safetensors."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(
            snapshot_download(name.removeprefix(HUB), allow_patterns=[CONFIG, "*.safetensors", INDEX, *TOKENIZER_FILES])
        )
    except HFValidationError:
        raise UserError(f"'{name}' must have the form hf:ORG/NAME; give the name of a repository") from None
    except RepositoryNotFoundError:
        raise UserError(
            f"'{name}' is no repository that can be read; check its name, or log in with hf auth login"
        ) from None
    except (LocalEntryNotFoundError, OSError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise UserError(f"'{name}' cannot be downloaded: {reason}; try again, or give a folder that has it") from None


def _newest(run: Path) -> tuple[Checkpoint, list[str]]:
    """The newest good checkpoint of a run, and a warning for each newer one that is damaged."""
    checkpoint, damages = newest_good(run)
    if checkpoint is None:
        why = f": {damages[0]}" if damages else ""
        raise CheckpointError(f"run '{run}' has no good checkpoint{why}; see nsa-compile ckpt verify '{run}'")
    return checkpoint, [f"warning: {damage}; the one before is used" for damage in damages]


def _put_weights(model: nn.Module, config: RunConfig, state: Any, checkpoint: Checkpoint) -> None:
    """Take over the weights, and nothing that is not of this configuration."""
    try:
        difference = first_difference(config, state["config"])
        if difference is None:
            weights = state["model"]
            model.load_state_dict(merged(weights, config.lora) if config.lora.rank else weights)
            return
    except Exception as error:  # whatever a state that anybody may have made up ends in
        difference = f"reading it ended in {type(error).__name__}"
    raise CheckpointError(
        f"checkpoint '{checkpoint.path}' is not of the configuration of its run: {difference}; take another checkpoint"
    )
