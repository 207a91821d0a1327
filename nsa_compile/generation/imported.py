"""Models of others, read as ours: NSA models of flash-linear-attention (fla), dense models of the Llama family.

In fla (`fla/models/nsa`, `fla/ops/nsa/naive.py`) a block that is compressed is also one that is selected, blocks do not
overlap, φ is the mean, the branches share keys and values, and these are rotated before they are compressed. The first
block, a token's own and the one before it are always selected. Its gates have no bias: ours are zero.

Llama turns channel i of a head with channel i + D/2 (RoPE with halves paired), as we do, so weights are taken as they
are.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_compile.errors import UserError
from nsa_compile.files import open_regular
from nsa_compile.generation.exported import (
    CONFIG,
    MODEL_TYPE,
    Exported,
    read_config,
    read_exported,
    read_tensors,
    take_weights,
)
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern

INDEX = "model.safetensors.index.json"  # of a model whose weights are in several files
# What a tokenizer of transformers consists of, and where texts end.
TOKENIZER_OF_TEXT = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of these is the tokenizer itself
TOKENIZER_FILES = (
    *TOKENIZER_OF_TEXT, "tokenizer_config.json", "special_tokens_map.json", "merges.txt", "generation_config.json",
    "chat_template.jinja",
)  # fmt: skip
# Frequencies that old checkpoints hold; they follow from the configuration.
_FREQUENCIES = "rotary_emb.inv_freq"


class _Family(NamedTuple):
    """Models of others with one form of configuration and of names."""

    written_by: str
    config: Callable[[Mapping[str, Any]], NSAConfig]  # raises KeyError for what is not there, ValueError as ours does
    embedding: str
    of_layer: Mapping[str, str]  # our names of the weights of a layer

    def ours(self, name: str) -> str:
        """Our name of a weight of theirs."""
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        if layer and layer[2] in self.of_layer:
            return f"blocks.{layer[1]}.{self.of_layer[layer[2]]}"
        return self._names().get(name, name)

    def theirs(self, name: str) -> str:
        """Their name of a weight of ours."""
        layer = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        back = {our: their for their, our in (self.of_layer if layer else self._names()).items()}
        return f"model.layers.{layer[1]}.{back.get(layer[2], layer[2])}" if layer else back.get(name, name)

    def _names(self) -> dict[str, str]:
        names = {"model.norm.weight": "norm.weight", "lm_head.weight": "head.weight"}
        return {self.embedding: "embedding.weight", **names}


def _fla(values: Mapping[str, Any]) -> NSAConfig:
    alike = {"qkv_bias": (False,), "hidden_act": ("swish", "silu"), "elementwise_affine": (True, None)}
    _require_alike(values, alike)
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
        rope_theta=values["rope_theta"],
        norm_eps=values["norm_eps"],
        tie_embeddings=values.get("tie_word_embeddings", False),  # save_pretrained leaves out transformers' default
    )


def _llama(values: Mapping[str, Any]) -> NSAConfig:
    # transformers 5 has rope_parameters; 4 had rope_theta, and rope_scaling where positions are scaled.
    rope: dict[str, Any] = values.get("rope_parameters") or {"rope_theta": values.get("rope_theta", 10000.0)}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters = {rope!r} must have rope_theta")
    if scaling := values.get("rope_scaling"):
        rope = {**rope, "rope_type": "default", **(scaling if isinstance(scaling, dict) else {"rope_type": scaling})}
        rope["rope_type"] = rope.get("type", rope["rope_type"])  # its name in old checkpoints
    alike = {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "sliding_window": (None,),
        "quantization_config": (None,),
    }
    _require_alike(values, alike)
    _require_alike(rope, {"rope_type": ("default",), "partial_rotary_factor": (1.0, None)})
    heads = values["num_attention_heads"]
    return NSAConfig(
        vocab_size=values["vocab_size"],
        dim=values["hidden_size"],
        n_layers=values["num_hidden_layers"],
        n_heads=heads,
        n_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        attention="dense",
        mlp_hidden=values["intermediate_size"],
        rope_theta=rope["rope_theta"],
        norm_eps=values["rms_norm_eps"],
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


def _require_alike(values: Mapping[str, Any], alike: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse a key with another value than those of which ours is a model; the first is the one by default."""
    for name, allowed in alike.items():
        if values.get(name, allowed[0]) not in allowed:
            raise ValueError(f"{name} = {values[name]!r} must be {allowed[0]!r}, which is all that models here have")


_MLP = {
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
_LLAMA = _Family(
    "LlamaForCausalLM",
    _llama,
    "model.embed_tokens.weight",
    {
        "input_layernorm.weight": "attention_norm.weight",
        "self_attn.q_proj.weight": "attention.q.weight",
        "self_attn.k_proj.weight": "attention.k.weight",
        "self_attn.v_proj.weight": "attention.v.weight",
        "self_attn.o_proj.weight": "attention.out.weight",
        "post_attention_layernorm.weight": "mlp_norm.weight",
        **_MLP,
    },
)
_FLA = _Family(
    "fla's NSAForCausalLM",
    _fla,
    "model.embeddings.weight",
    {
        "attn_norm.weight": "attention_norm.weight",
        "attn.q_proj.weight": "attention.q.weight",
        "attn.k_proj.weight": "attention.k.weight",
        "attn.v_proj.weight": "attention.v.weight",
        "attn.g_proj.weight": "attention.gate.weight",
        "attn.o_proj.weight": "attention.out.weight",
        "mlp_norm.weight": "mlp_norm.weight",
        **_MLP,
    },
)
# By the model_type in config.json: what `nsa-compile import` takes.
OTHERS = {"nsa": _FLA, "llama": _LLAMA, "mistral": _LLAMA}


def read_folder(folder: Path, model_types: Sequence[str] = (MODEL_TYPE, *OTHERS)) -> Exported:
    """The model of a folder, of ours or of others, in the dtype in which it was written.

    Raises:
        UserError: it has no model of these types, or one that uses what ours do not have; its files are damaged.
    """
    way_out = "give a folder with a config.json of transformers"
    values = read_config(folder / CONFIG, model_types, "which can be read here", way_out)
    if values["model_type"] == MODEL_TYPE:
        return read_exported(folder)
    family = OTHERS[values["model_type"]]
    try:
        config, weights = family.config(values), read_weights(folder)
        if config.mlp_hidden is None:  # as fla's configuration may leave it
            config = replace(config, mlp_hidden=weights["model.layers.0.mlp.gate_proj.weight"].shape[0])
        model = NSATransformer(config).to(weights[family.embedding].dtype)
        found = {family.ours(name): value for name, value in weights.items() if not name.endswith(_FREQUENCIES)}
        found |= {
            name: torch.zeros_like(value) for name, value in model.state_dict().items() if name.endswith("gate.bias")
        }
        if config.tie_embeddings:
            found["head.weight"] = found["embedding.weight"]
        take_weights(model, found, family.theirs)
    except KeyError as error:
        raise UserError(f"'{folder}' lacks {error}; it must be a folder of {family.written_by}") from None
    except (ValueError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"'{folder}' holds no model that can be read: {reason}; take another one") from None
    return Exported(model, None, values.get("max_position_embeddings"))


def copy_tokenizer(source: Path, target: Path) -> None:
    """Take over the files of a tokenizer, as far as they are there."""
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            with open_regular(source / name, follow=True) as file, (target / name).open("wb") as copy:
                shutil.copyfileobj(file, copy)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's files of safetensors, those of its index if it has one."""
    paths = _indexed(folder / INDEX) if (folder / INDEX).exists() else sorted(folder.glob("*.safetensors"))
    if not paths:
        raise UserError(f"'{folder}' has no file of safetensors; save the model with safe_serialization=True")
    return {name: value for path in paths for name, value in read_tensors(path, "fetch it anew").items()}


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
