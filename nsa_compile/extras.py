"""What the trainer and the laboratory import beyond what the compiler needs, and the extra that brings it."""

from __future__ import annotations

from importlib import metadata

from nsa_compile.errors import UserError

# Module to package, where the two differ.
TRAIN = {"click": "", "packaging": "", "psutil": "", "pydantic": "", "tabulate": "", "tqdm": "", "yaml": "pyyaml"}
LAB = {"hypothesis": "", "matplotlib": "", "nvtx": ""}
HF = {"huggingface_hub": "", "safetensors": "", "transformers": ""}
ONNX = {"onnx": "", "onnxscript": ""}
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
    if module not in TRAIN | LAB | HF | ONNX:
        return None
    extra = "train" if module in TRAIN and command in ("", *TRAIN_COMMANDS) else "lab"
    extra = "hf" if module in HF else "onnx" if module in ONNX else extra
    name = f"nsa-compile {command}".rstrip()
    package = (TRAIN | LAB | HF | ONNX)[module] or module
    return UserError(f"{name} needs {package}; install it with: pip install 'nsa-compile[{extra}]'")
