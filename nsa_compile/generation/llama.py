"""Dense models of the Llama family, as transformers keeps them, read as dense models of ours.

Both turn channel i of a head with channel i + D/2 (RoPE with halves paired), so weights are taken as they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_compile.errors import UserError
from nsa_compile.generation.exported import CONFIG, Exported, read_config, take_weights
from nsa_compile.generation.imported import ours, read_weights, theirs, unlike
from nsa_compile.models import NSAConfig, NSATransformer

MODEL_TYPES = ("llama", "mistral")
_NAMES = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_NAMES_OF_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.q.weight",
    "self_attn.k_proj.weight": "attention.k.weight",
    "self_attn.v_proj.weight": "attention.v.weight",
    "self_attn.o_proj.weight": "attention.out.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
# Frequencies that old checkpoints hold; they follow from the configuration.
_FREQUENCIES = "rotary_emb.inv_freq"
# A key of the configuration, and its values of which ours is a model; the first is transformers' default.
_ALIKE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
}
_ALIKE_OF_ROPE: dict[str, tuple[Any, ...]] = {"rope_type": ("default",), "partial_rotary_factor": (1.0, None)}


def read_llama(folder: Path) -> Exported:
    """The dense model of a folder that transformers wrote by `save_pretrained`, in the dtype in which it was written.

    Raises:
        UserError: it is not of the Llama family, or uses what ours do not have; its files are damaged.
    """
    values = read_config(
        folder / CONFIG, MODEL_TYPES, "that of dense models of the Llama family", "give a folder of LlamaForCausalLM"
    )
    try:
        config, weights = _config(values), read_weights(folder)
        model = NSATransformer(config).to(weights["model.embed_tokens.weight"].dtype)
        found = {
            ours(name, _NAMES, _NAMES_OF_LAYER): value
            for name, value in weights.items()
            if not name.endswith(_FREQUENCIES)
        }
        if config.tie_embeddings:
            found["head.weight"] = found["embedding.weight"]
        take_weights(model, found, lambda name: theirs(name, _NAMES, _NAMES_OF_LAYER))
    except KeyError as error:
        raise UserError(f"'{folder}' lacks {error}; it must be a folder of LlamaForCausalLM") from None
    except (ValueError, TypeError, RuntimeError) as error:
        raise unlike(folder, error) from None
    return Exported(model, None, values.get("max_position_embeddings"))


def _config(values: dict[str, Any]) -> NSAConfig:
    """Raises KeyError for a key that is not there, ValueError for a value that ours cannot take."""
    # transformers 5 has rope_parameters; 4 had rope_theta, and rope_scaling where positions are scaled.
    rope = values.get("rope_parameters") or {"rope_theta": values.get("rope_theta", 10000.0)}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_parameters = {rope!r} must have rope_theta")
    if scaling := values.get("rope_scaling"):
        rope = {**rope, "rope_type": "default", **(scaling if isinstance(scaling, dict) else {"rope_type": scaling})}
        rope["rope_type"] = rope.get("type", rope["rope_type"])  # its name in old checkpoints
    for where, alike in ((values, _ALIKE), (rope, _ALIKE_OF_ROPE)):
        for name, allowed in alike.items():
            if where.get(name, allowed[0]) not in allowed:
                raise ValueError(f"{name} = {where[name]!r} must be {allowed[0]!r}, which is all that models here have")
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
