"""The configuration of a model as `transformers` keeps it, in `config.json`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from nsa_compile import models
from nsa_compile.generation.exported import AUTO_MAP, MODEL_TYPE, MODULE, MODULE_TEXT
from nsa_compile.models.config import from_plain

_FIELDS = [field.name for field in dataclasses.fields(models.NSAConfig)]


class NSAConfig(PreTrainedConfig):
    """The fields of `nsa_compile.models.NSAConfig`, `pattern` as a dictionary, beside those of every configuration.

    Args:
        max_position_embeddings: tokens of the longest sequence that the model was trained on; None where nobody knows.
            `generate` warns of longer ones.
        tokenizer: its name in a run's `data.tokenizer`; None for another one.
        kwargs: both kinds of fields.

    Raises:
        ValueError: naming the field, its value and the rule it breaks.
    """

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar = ["cache"]
    # What other code calls the same sizes.
    attribute_map: ClassVar = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(
        self, *, max_position_embeddings: int | None = None, tokenizer: str | None = None, **kwargs: Any
    ) -> None:
        kwargs = {self.attribute_map.get(name, name): value for name, value in kwargs.items()}
        given = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        for name, value in dataclasses.asdict(from_plain(models.NSAConfig, given)).items():
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        self.max_position_embeddings = max_position_embeddings
        self.tokenizer = tokenizer
        super().__init__(**kwargs)

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Write `config.json`, and the module by which `trust_remote_code` finds the classes."""
        self.auto_map = dict(AUTO_MAP)
        super().save_pretrained(save_directory, *args, **kwargs)
        (Path(save_directory) / MODULE).write_text(MODULE_TEXT, encoding="utf-8")

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: a folder that is saved refers to this package, and holds no copy of its files."""

    @classmethod
    def of(cls, config: models.NSAConfig, **kwargs: Any) -> NSAConfig:
        """Of the configuration of an `NSATransformer`; `kwargs` as for the class."""
        return cls(**dataclasses.asdict(config), **kwargs)

    def sizes(self) -> models.NSAConfig:
        """The configuration of the `NSATransformer` within."""
        return from_plain(models.NSAConfig, {name: getattr(self, name) for name in _FIELDS})
