"""A model as a folder that other programs can read: `config.json` and `model.safetensors`.

It is what `NSAForCausalLM.save_pretrained` writes, too. With a module beside them, `transformers` finds the classes by
`trust_remote_code`, where nobody has imported this package.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from nsa_compile.errors import UserError
from nsa_compile.files import open_regular, write_json
from nsa_compile.models import NSAConfig, NSATransformer
from nsa_compile.models.config import from_plain

MODEL_TYPE = "nsa_compile"  # in config.json; fla's NSA models, which are others, have "nsa"
CONFIG, WEIGHTS = "config.json", "model.safetensors"
MODULE = "nsa_compile_model.py"
MODULE_TEXT = '''"""What trust_remote_code runs; the classes are those of the package: pip install 'nsa-compile[hf]'."""

from nsa_compile.hf import NSAConfig, NSAForCausalLM

__all__ = ["NSAConfig", "NSAForCausalLM"]
'''
# In config.json: the names by which the Auto classes find those of the module.
AUTO_MAP = {
    auto: f"{MODULE.removesuffix('.py')}.{name}"
    for auto, name in (("AutoConfig", "NSAConfig"), ("AutoModelForCausalLM", "NSAForCausalLM"))
}
_PREFIX = "model."  # NSAForCausalLM's name for the NSATransformer within


class Exported(NamedTuple):
    """A model that was exported."""

    model: NSATransformer
    tokenizer: str | None  # its name in `data.tokenizer`; None for another one
    seq_len: int | None  # tokens of the sequences that it was trained on; None where nobody knows
    chat: bool = False  # whether it was trained on conversations, in the template of data/conversations.py


def write_exported(folder: Path, exported: Exported, *, module: bool = False) -> None:
    """Write both files into a folder that exists, and the module if it is asked for.

    Raises:
        OSError: they cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    model = exported.model
    weights = {_PREFIX + name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_embeddings:
        del weights[_PREFIX + "head.weight"]
    values = {
        "model_type": MODEL_TYPE,
        "architectures": ["NSAForCausalLM"],
        "dtype": str(model.embedding.weight.dtype).removeprefix("torch."),
        **asdict(model.config),
        "tokenizer": exported.tokenizer,
        "max_position_embeddings": exported.seq_len,
        "chat": exported.chat,
    }
    if module:
        values["auto_map"] = AUTO_MAP
        (folder / MODULE).write_text(MODULE_TEXT, encoding="utf-8")
    try:
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, among others
        raise OSError(str(error)) from None
    write_json(folder / CONFIG, values)
    shutil.copymode(folder / CONFIG, folder / WEIGHTS)  # safetensors lets nobody else read it


def read_exported(folder: Path) -> Exported:
    """The model of a folder, in the dtype in which it was written.

    Raises:
        UserError: the folder is not of this format, or its files are damaged or do not belong together.
    """
    values = read_config(folder / CONFIG, (MODEL_TYPE,), "as nsa-compile export writes it", "export the model anew")
    names = {field.name for field in fields(NSAConfig)}
    try:
        config = from_plain(NSAConfig, {name: value for name, value in values.items() if name in names})
    except ValueError as error:
        raise UserError(f"'{folder / CONFIG}': {error}; export the model anew") from None
    tokenizer, seq_len, chat = values.get("tokenizer"), values.get("max_position_embeddings"), values.get("chat")
    kinds = (("tokenizer", tokenizer, str), ("max_position_embeddings", seq_len, int), ("chat", chat, bool))
    for name, value, kind in kinds:
        if value is not None and type(value) is not kind:
            raise UserError(f"'{folder / CONFIG}': {name} = {value!r} must be of type {kind.__name__}; export it anew")
    tensors = read_tensors(folder / WEIGHTS, "export the model anew")
    weights = {name.removeprefix(_PREFIX): value for name, value in tensors.items()}
    if config.tie_embeddings and "embedding.weight" in weights:
        weights["head.weight"] = weights["embedding.weight"]
    model = NSATransformer(config)
    if weights:
        model.to(next(iter(weights.values())).dtype)
    try:
        take_weights(model, weights, _PREFIX.__add__)
    except ValueError as error:
        raise UserError(f"'{folder / WEIGHTS}' does not hold the model: {error}; export it anew") from None
    return Exported(model, tokenizer, seq_len, bool(chat))


def take_weights(model: NSATransformer, weights: Mapping[str, Tensor], known_as: Callable[[str], str]) -> None:
    """Give a model all of its weights, and nothing else.

    Args:
        known_as: the name of a weight of ours to whoever wrote them.

    Raises:
        ValueError: a weight is missing, not the model's, or of another shape; the first of several is named.
    """
    wanted = model.state_dict()
    problems = [
        f"{known_as(name)} of the shape {list(value.shape)} is missing"
        for name, value in wanted.items()
        if name not in weights
    ]
    for name, value in weights.items():
        if name not in wanted:
            problems.append(f"{known_as(name)} of the shape {list(value.shape)} has no place in it")
        elif value.shape != wanted[name].shape:
            shapes = f"must have the shape {list(wanted[name].shape)} and has {list(value.shape)}"
            problems.append(f"{known_as(name)} {shapes}")
        elif not value.is_floating_point():
            problems.append(f"{known_as(name)} must hold floating-point numbers and holds {value.dtype}")
    if problems:
        others = f", and {len(problems) - 1} more do not fit" if len(problems) > 1 else ""
        raise ValueError(f"by {CONFIG}, {problems[0]}{others}")
    model.load_state_dict(weights)


def read_config(path: Path, model_types: Sequence[str], whose: str, way_out: str) -> dict[str, Any]:
    """A `config.json` as transformers has it, of one of the `model_types`, which are those of `whose` models."""
    try:
        with open_regular(path, follow=True) as file:
            values = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read: {error}; {way_out}") from None
    kind = values.get("model_type") if isinstance(values, dict) else None
    if kind not in model_types:
        wanted = " or ".join(map(repr, model_types))
        raise UserError(f"'{path}' is of model_type {kind!r}; it must be {wanted}, {whose}")
    assert isinstance(values, dict)
    return values


def read_tensors(path: Path, way_out: str) -> dict[str, Tensor]:
    """The tensors of a file of safetensors; never a pickle, which may run any code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"'{path}' is no file of safetensors: {error}; {way_out}") from None
    return tensors
