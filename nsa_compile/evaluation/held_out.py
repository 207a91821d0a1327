"""Bits per byte of text that a model was not trained on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nsa_compile.config import RunConfig
from nsa_compile.data import load_corpus
from nsa_compile.data.conversations import read_conversations
from nsa_compile.data.corpus import split_conversations
from nsa_compile.data.documents import find_files, json_rows, read_documents
from nsa_compile.data.tokenizers import Tokenizer
from nsa_compile.evaluation.scoring import Scorer


@dataclass(frozen=True)
class Text:
    """A text to be scored from its `first` token on; those before it are only read."""

    tokens: npt.NDArray[np.integer]
    first: int = 1


@dataclass(frozen=True)
class TextScore:
    """How well a model predicts texts.

    Attributes:
        length: tokens that the model sees at most, the context.
        stride: tokens from the start of a window to that of the next one.
        tokens, bytes: what was scored.
        nats: the negative logarithm of its probability.
    """

    length: int
    stride: int
    tokens: int
    bytes: int
    nats: float

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Of a token."""
        return math.exp(self.nats_per_token)

    def plain(self) -> dict[str, Any]:
        """As plain data."""
        names = ("length", "stride", "tokens", "bytes", "nats_per_token", "bits_per_byte", "perplexity")
        return {name: getattr(self, name) for name in names}


def windows(count: int, first: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows `(start, scored_from, end)` over `count` tokens: the model reads from `start` on and predicts those of
    `scored_from` to `end`, at most `length` tokens ahead of `start`.

    Each token from `first` on is scored once: in the first window that holds it, so after `length - stride` tokens at
    the least, or after all that there are.
    """
    scored = first
    for start in itertools.count(0, stride):
        end = min(start + length + 1, count)
        if scored < end:
            yield start, scored, end
            scored = end
        if end == count:
            return


def score_texts(
    scorer: Scorer, texts: Iterable[Text], length: int, stride: int, token_bytes: npt.NDArray[np.int64]
) -> TextScore:
    """Score each text by itself, in windows.

    Args:
        length: tokens that the model sees at most.
        stride: from the start of a window to that of the next one, at most `length`.
        token_bytes: bytes of text of each token id.
    """
    parts = [
        (text.tokens[start:end], scored - start)
        for text in texts
        for start, scored, end in windows(len(text.tokens), text.first, length, stride)
    ]
    tokens, size, nats = 0, 0, 0.0
    for (part, scored), scores in zip(parts, scorer.score([part for part, _ in parts], length), strict=True):
        tokens += len(part) - scored
        size += int(token_bytes[np.asarray(part[scored:], dtype=np.int64)].sum())
        nats -= float(scores.log_probs[scored - 1 :].sum())
    return TextScore(length, stride, tokens, size, nats)


def held_out_texts(config: RunConfig) -> list[Text]:
    """What a run was not trained on: the held-out text as one, conversations each by itself, in the template, or the
    held-out sequences where there is no such text.

    Raises:
        UserError: the data set of the run is not there any more.
    """
    if config.data.chat:
        return [Text(conversation.tokens) for conversation in split_conversations(config)[1]]
    corpus = load_corpus(config)
    if corpus.held_out is not None:
        return [Text(corpus.held_out)]
    return [Text(row) for row in corpus.validation.reshape(-1, corpus.validation.shape[-1])]


def read_texts(name: str, tokenizer: Tokenizer, text_field: str) -> list[Text]:
    """The texts of the files that --data names, whatever the model was trained on: conversations in the template, and
    documents, each behind what stands between two of them in training.

    Raises:
        UserError: they cannot be read.
    """
    separator = np.array(tokenizer.separator, dtype=np.int64)
    texts: list[Text] = []
    for path in find_files(name, "--data"):
        if _holds_conversations(path, text_field):
            texts += [Text(conversation.tokens) for conversation in read_conversations(str(path), tokenizer, "--data")]
        else:
            texts += [
                Text(np.concatenate((separator, tokenizer.encode("".join(document)))), len(separator))
                for document in read_documents(path, text_field, lambda read: None)
            ]
    return texts


def _holds_conversations(path: Path, text_field: str) -> bool:
    """Whether a file is one of JSON lines of which the first has messages, and no text."""
    if ".jsonl" not in path.suffixes[-2:]:
        return False
    with closing(json_rows(path)) as rows:
        _, first = next(rows, (0, {}))
    return "messages" in first and text_field not in first


def cut(texts: Iterable[Text], tokens: int | None) -> list[Text]:
    """The first `tokens` to be scored of the texts; all by default."""
    if tokens is None:
        return list(texts)
    kept: list[Text] = []
    for text in texts:
        if tokens <= 0:
            break
        kept.append(Text(text.tokens[: text.first + tokens], text.first))
        tokens -= len(kept[-1].tokens) - text.first
    return kept
