"""NSA models of flash-linear-attention (fla), read as models of ours.

In fla (`fla/models/nsa`, `fla/ops/nsa/naive.py`) a block that is compressed is also one that is selected, blocks do not
overlap, φ is the mean, the branches share keys and values, and these are rotated before they are compressed. The first
block, a token's own and the one before it are always selected.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_compile.errors import UserError
from nsa_compile.files import open_regular
from nsa_compile.generation.exported import CONFIG, Exported, read_config, take_weights
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern

MODEL_TYPE = "nsa"  # fla's, in config.json
INDEX = "model.safetensors.index.json"  # of a model whose weights are in several files
# What a tokenizer of transformers consists of, and where texts end.
TOKENIZER_OF_TEXT = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of these is the tokenizer itself
TOKENIZER_FILES = (
    *TOKENIZER_OF_TEXT, "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "generation_config.json",
    "chat_template.jinja",
)  # fmt: skip
_NAMES = {
    "model.embeddings.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_NAMES_OF_LAYER = {
    "attn_norm.weight": "attention_norm.weight",
    "attn.q_proj.weight": "attention.q.weight",
    "attn.k_proj.weight": "attention.k.weight",
    "attn.v_proj.weight": "attention.v.weight",
    "attn.g_proj.weight": "attention.gate.weight",
    "attn.o_proj.weight": "attention.out.weight",
    "mlp_norm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
# A key of the configuration, and its values of which ours is a model.
_ALIKE = {"qkv_bias": (False,), "hidden_act": ("swish", "silu"), "elementwise_affine": (True, None)}


def read_fla(folder: Path) -> Exported:
    """The model of a folder that fla wrote by `save_pretrained`, in the dtype in which it was written.

    Raises:
        UserError: it is not of fla's NSA models, or uses what ours do not have; its files are damaged.
    """
    values = read_config(
        folder / CONFIG, (MODEL_TYPE,), "that of fla's NSA models", "give a folder of fla's NSAForCausalLM"
    )
    values = {"tie_word_embeddings": False, **values}  # save_pretrained leaves out transformers' default
    weights = read_weights(folder)
    try:
        config = _config(values, hidden=weights["model.layers.0.mlp.gate_proj.weight"].shape[0])
        model = NSATransformer(config).to(weights["model.embeddings.weight"].dtype)
        found = {ours(name, _NAMES, _NAMES_OF_LAYER): value for name, value in weights.items()}
        # fla's gates have no bias: ours are zero.
        found |= {
            name: torch.zeros_like(value) for name, value in model.state_dict().items() if name.endswith("gate.bias")
        }
        if config.tie_embeddings:
            found["head.weight"] = found["embedding.weight"]
        take_weights(model, found, lambda name: theirs(name, _NAMES, _NAMES_OF_LAYER))
    except KeyError as error:
        raise UserError(f"'{folder}' lacks {error}; it must be a folder of fla's NSAForCausalLM") from None
    except (ValueError, TypeError, RuntimeError) as error:
        raise unlike(folder, error) from None
    return Exported(model, None, values.get("max_position_embeddings"))


def unlike(folder: Path, error: Exception) -> UserError:
    """What is said where the weights of a folder are not of its configuration, or this is of no model of ours."""
    reason = " ".join(str(error).split())
    return UserError(f"'{folder}' holds no model that can be read: {reason}; take another one")


def ours(name: str, names: Mapping[str, str], names_of_layer: Mapping[str, str]) -> str:
    """Our name of a weight of others."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if layer and layer[2] in names_of_layer:
        return f"blocks.{layer[1]}.{names_of_layer[layer[2]]}"
    return names.get(name, name)


def theirs(name: str, names: Mapping[str, str], names_of_layer: Mapping[str, str]) -> str:
    """The name of others for a weight of ours."""
    layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    back = {our: their for their, our in (names_of_layer if layer else names).items()}
    return f"model.layers.{layer[1]}.{back.get(layer[2], layer[2])}" if layer else back.get(name, name)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Take over the files of a tokenizer, as far as they are there."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            with open_regular(source / name, follow=True) as file, (target / name).open("wb") as copy:
                shutil.copyfileobj(file, copy)


def _config(values: dict[str, Any], hidden: int) -> NSAConfig:
    """Raises KeyError for a key that is not there, ValueError for a value that ours cannot take."""
    for name, alike in _ALIKE.items():
        if values.get(name, alike[0]) not in alike:
            raise ValueError(f"{name} = {values[name]!r} must be {alike[0]!r}")
    size = values["block_size"]
    return NSAConfig(
        vocab_size=values["vocab_size"],
        dim=values["hidden_size"],
        n_layers=values["num_hidden_layers"],
        n_heads=values["num_heads"],
        n_kv_heads=values["num_kv_heads"] or values["num_heads"],
        head_dim=values["head_dim"],
        pattern=SparsePattern(size, size, size, values["block_counts"], values["window_size"]),
        phi="mean",
        shared_kv=True,
        compress_rotated=True,
        mlp_hidden=hidden,
        rope_theta=values["rope_theta"],
        norm_eps=values["norm_eps"],
        tie_embeddings=values["tie_word_embeddings"],
    )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's files of safetensors, those of its index if it has one; never a pickle, which may run
    any code.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    paths = _indexed(folder / INDEX) if (folder / INDEX).exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"'{folder}' has no file of safetensors; save the model with safe_serialization=True")
    weights: dict[str, Tensor] = {}
    for path in paths:
        try:
            weights.update(load_file(path))
        except (OSError, SafetensorError) as error:
            raise UserError(f"'{path}' is no file of safetensors: {error}; fetch it anew") from None
    return weights


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, all of them beside it."""
    try:
        with open_regular(index, follow=True) as file:
            names = {str(name) for name in json.loads(file.read())["weight_map"].values()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"'{index}' cannot be read: {error}; fetch it anew") from None
    if outside := [name for name in names if Path(name).name != name]:
        raise UserError(f"'{index}' names '{outside[0]}', which must be a file beside it; fetch it anew")
    return [index.parent / name for name in sorted(names)]
