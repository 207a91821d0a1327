"""Models in folders, of ours and of others, told apart by the model_type of their config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nsa_compile.generation.exported import CONFIG, MODEL_TYPE, Exported, read_config, read_exported
from nsa_compile.generation.imported import MODEL_TYPE as FLA
from nsa_compile.generation.imported import read_fla
from nsa_compile.generation.llama import MODEL_TYPES as LLAMAS
from nsa_compile.generation.llama import read_llama

Readers = Mapping[str, Callable[[Path], Exported]]
# What `nsa-compile import` takes.
OTHERS: Readers = {FLA: read_fla, **dict.fromkeys(LLAMAS, read_llama)}
ALL: Readers = {MODEL_TYPE: read_exported, **OTHERS}


def read_folder(folder: Path, readers: Readers = ALL) -> Exported:
    """The model of a folder, in the dtype in which it was written.

    Raises:
        UserError: it has no such model, or one that uses what ours do not have; its files are damaged.
    """
    whose = "which can be read here"
    values = read_config(folder / CONFIG, list(readers), whose, "give a folder with a config.json of transformers")
    return readers[values["model_type"]](folder)
