"""A model as a folder that any program can read: `config.json` and `model.safetensors`."""

from __future__ import annotations

MODEL_TYPE = "nsa_compile"  # in config.json; fla's NSA models, which are others, have "nsa"
