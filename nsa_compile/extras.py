"""What the trainer and the laboratory import beyond what the compiler needs, and the extra that brings it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from nsa_compile.errors import UserError

TRAIN = ("click", "packaging", "psutil", "pydantic", "tabulate", "tqdm", "yaml")
LAB = ("hypothesis", "matplotlib", "nvtx")
HF = ("huggingface_hub", "safetensors", "transformers")
ONNX = ("onnx", "onnxscript")
# Module to package, where the two differ.
PACKAGES = {"yaml": "pyyaml"}
TRAIN_COMMANDS = (
    "chat", "ckpt", "config", "convert", "data", "doctor", "eval", "export", "generate", "import", "launch", "train",
    "watch",
)  # fmt: skip


def installed_version(package: str) -> str | None:
    """The version of a package; ``None`` where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def missing_extra(error: ModuleNotFoundError, command: str) -> UserError | None:
    """The error for the user where an import failed for want of an extra; None where it failed for another reason.

    Args:
        error: what the import raised.
        command: the first word of the command line; empty for the command line itself.
    """
    module = (error.name or "").partition(".")[0]
    brought = {"train": TRAIN, "lab": LAB, "hf": HF, "onnx": ONNX}
    extra = next((extra for extra, modules in brought.items() if module in modules), None)
    if extra is None:
        return None
    if extra == "train" and command not in ("", *TRAIN_COMMANDS):
        extra = "lab"
    name, package = f"nsa-compile {command}".rstrip(), PACKAGES.get(module, module)
    return UserError(f"{name} needs {package}; install it with: pip install 'nsa-compile[{extra}]'")


@contextmanager
def no_messages() -> Iterator[None]:
    """Where torchao is imported, if only by peft or transformers: it tells of libraries for hardware not here."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
