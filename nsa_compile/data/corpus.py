"""A data set of a run: token sources for training and validation, and the yardstick a model has to beat."""

from __future__ import annotations

import gzip
import math
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nsa_compile.config import RunConfig
from nsa_compile.data.sampling import BatchSampler, RandomWindows, Source, UniformBytes, evenly_spaced_batches
from nsa_compile.data.tokenizers import ByteTokenizer, Tokenizer, make_tokenizer
from nsa_compile.errors import UserError

VALIDATION_FRACTION = 0.05


@dataclass(frozen=True)
class Corpus:
    """What a run trains and is judged on.

    Attributes:
        train: source of training sequences.
        validation: held-out batches, ``[eval_batches, B, S + 1]`` int64, the same at every evaluation.
        tokenizer: how ids turn back into text.
        best_unigram_loss: loss in nats per token, on held-out text, of the model that knows only how often each token
            occurs in the training text. A language model that has learned anything about order is below it.
    """

    train: Source
    validation: npt.NDArray[np.int64]
    tokenizer: Tokenizer
    best_unigram_loss: float


def load_corpus(config: RunConfig) -> Corpus:
    """Load and tokenize the data set that ``config.data`` names.

    The last 5 % of a text, by position, are held out; no token of them is ever trained on.

    Raises:
        UserError: the data set does not exist, cannot be read or is too short.
    """
    seed, shape = config.run.seed, config.train
    if config.data.name == "uniform":
        # Held-out bytes come from a stream of their own.
        held_out = BatchSampler(UniformBytes(seed + 1), shape.eval_batches * shape.batch_size, shape.seq_len)
        validation = held_out.next_batch().reshape(shape.eval_batches, shape.batch_size, shape.seq_len + 1)
        return Corpus(UniformBytes(seed), validation, ByteTokenizer(), math.log(256))

    tokenizer = make_tokenizer(config.data.tokenizer)
    train, held_out_text = split(tokenizer.encode(_read_text(config.data.name)))
    if len(held_out_text) <= shape.seq_len:
        raise UserError(
            f"data.name = '{config.data.name}' is too short: its held-out {VALIDATION_FRACTION:.0%} are "
            f"{len(held_out_text)} tokens and train.seq_len = {shape.seq_len} needs {shape.seq_len + 1}; "
            "give a longer text or a smaller train.seq_len"
        )
    return Corpus(
        RandomWindows(train, seed),
        evenly_spaced_batches(held_out_text, shape.eval_batches, shape.batch_size, shape.seq_len),
        tokenizer,
        best_unigram_loss(train, held_out_text, tokenizer.vocab_size),
    )


def split(tokens: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Training text and held-out text: the first 95 % and the last 5 % by position."""
    boundary = len(tokens) - int(len(tokens) * VALIDATION_FRACTION)
    return tokens[:boundary], tokens[boundary:]


def best_unigram_loss(train: npt.NDArray[np.integer], held_out: npt.NDArray[np.integer], vocab_size: int) -> float:
    """Cross-entropy of held-out text under the token frequencies of the training text, in nats per token.

    Counts start at one, so that a token the training text lacks does not make the loss infinite.
    """
    counts = np.bincount(train, minlength=vocab_size) + 1
    return float(np.mean(np.log(counts.sum()) - np.log(counts[held_out])))


def _read_text(name: str) -> str:
    if name == "shakespeare":
        packed = (resources.files("nsa_compile.data") / "shakespeare.txt.gz").read_bytes()
        return gzip.decompress(packed).decode("utf-8")
    path = Path(name)
    if path.suffix != ".txt" or not path.is_file():
        raise UserError(
            f"data.name = '{name}' is no data set: it must be 'shakespeare', 'uniform' or the path of an existing "
            ".txt file; correct it in the file or with --set data.name=VALUE"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"data.name = '{name}' cannot be read: {reason}; give a readable UTF-8 .txt file") from None
