"""Tasks whose answers lie far back in the sequence, so that it is known which tokens a model can get right.

Both are made of bytes, for the byte tokenizer. The ``index``-th sequence is a function of the seed and of
``index`` alone, so the position of a :class:`~nsa_compile.data.sampling.BatchSampler` resumes them exactly. Training
and held-out sequences share no example: a checksum of its random part decides on which side an example lies.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nsa_compile.config import RunConfig
from nsa_compile.data.sampling import Source, Tokens, generator
from nsa_compile.errors import UserError

# One example in this many is held out.
HELD_OUT_SHARE = 20

Mask = npt.NDArray[np.bool_]


class AnsweredSource(Source, Protocol):
    """A source of which it is known what can be predicted."""

    def answers(self, length: int) -> Mask:
        """Which tokens ``[length]`` of every sequence of that length can be inferred from the tokens before them."""


class Copying:
    """``random string | the same string``: the copying task.

    A string has ``n = (length - 1) // 2`` characters; an even ``length`` ends with a second separator. Each answer is
    found ``n`` tokens before the query that predicts it.

    Args:
        seed: selects the stream.
        held_out: draw from the examples that are not trained on.
    """

    SEPARATOR = ord("|")
    ALPHABET = np.setdiff1d(np.arange(ord("!"), ord("~") + 1), SEPARATOR)

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.seed = seed
        self.held_out = held_out

    def sequence(self, index: int, length: int) -> Tokens:
        size = (length - 1) // 2
        random = generator(self.seed, index)
        original = _draw(lambda: random.choice(self.ALPHABET, size), self.held_out)
        tokens = np.full(length, self.SEPARATOR, dtype=np.int64)
        tokens[:size] = tokens[size + 1 : 2 * size + 1] = original
        return tokens

    def answers(self, length: int) -> Mask:
        size = (length - 1) // 2
        mask = np.zeros(length, dtype=np.bool_)
        mask[size + 1 : 2 * size + 1] = True
        return mask


class Needle:
    """``filler r filler … r filler KvKvKv…``: needle retrieval.

    A needle ``r`` is a record, one token that says a key and its value at once. The needles lie in a haystack of
    filler and are all asked for at the end, in random order: after the letter ``K`` of a key, the digit ``v`` of its
    value is the answer. No two needles of a sequence have the same key. Their places are uniform among those that
    leave ``min_distance`` tokens up to the first question. The filler is a text that repeats itself from a random
    place on, without records, capital letters and digits.

    Args:
        seed: selects the stream.
        min_distance: tokens of filler between the last needle and the first question.
        held_out: draw from the examples that are not trained on.
        needles: how many there are, at most ``MOST``; the others of a sequence are distractors of each.
    """

    KEYS = np.frombuffer(b"ABCDEFGHIJKLMNOP", np.uint8)
    VALUES = np.frombuffer(b"01234567", np.uint8)
    MOST = len(KEYS)
    # The record of the first key and the first value; those of a key lie together. No byte of ASCII text.
    RECORDS = 128
    # After the filler of passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300).
    FILLER = np.frombuffer(
        b"the grass is green. the sky is blue. the sun is yellow. here we go. there and back again. ", np.uint8
    )

    def __init__(self, seed: int, min_distance: int, held_out: bool = False, needles: int = MOST) -> None:
        self.seed = seed
        self.min_distance = min_distance
        self.held_out = held_out
        self.needles = needles

    @property
    def shortest(self) -> int:
        """Length of the shortest sequence that has room for needles, distance and questions."""
        return 3 * self.needles + self.min_distance

    def sequence(self, index: int, length: int) -> Tokens:
        random = generator(self.seed, index)
        keys, values = _draw(lambda: self._example(random), self.held_out)
        room = length - self.shortest
        places = np.sort(random.integers(room + 1, size=self.needles))
        phase = int(random.integers(len(self.FILLER)))
        filler = self.FILLER[(phase + np.arange(room + self.min_distance)) % len(self.FILLER)]
        hay = np.insert(filler.astype(np.int64), places, self._records(keys, values))
        order = random.permutation(self.needles)
        questions = np.stack((self.KEYS[keys[order]], self.VALUES[values[order]]), axis=1)
        return np.concatenate((hay, questions.flatten()))

    def answers(self, length: int) -> Mask:
        question = np.arange(length) - (length - 2 * self.needles)
        return (question >= 0) & (question % 2 == 1)

    def record(self, key: int, value: int) -> int:
        """The needle that a question, the letter of a key, and its answer, the digit of a value, are about."""
        return int(self._records(np.flatnonzero(key == self.KEYS), np.flatnonzero(value == self.VALUES))[0])

    def _records(self, keys: npt.NDArray[Any], values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return self.RECORDS + len(self.VALUES) * keys + values

    def _example(self, random: np.random.Generator) -> npt.NDArray[np.int64]:
        """Which keys and which values the needles have, ``[2, needles]``."""
        keys = random.permutation(len(self.KEYS))[: self.needles]
        return np.stack((keys, random.integers(len(self.VALUES), size=self.needles)))


def make_synthetic(config: RunConfig, held_out: bool) -> AnsweredSource:
    """The source of ``data.name = copying`` or ``needle``.

    Raises:
        UserError: the sequences are too short for ``data.min_distance``.
    """
    # Tokens of a sequence: the model's and one more, for the last target.
    length = config.train.seq_len + 1
    window = getattr(config.model.pattern, "window", None)
    given = config.data.min_distance
    distance = window if given is None else given
    if distance is None:
        raise UserError(
            f"data.min_distance = null must be a number for model.attention = '{config.model.attention}', which has no "
            "model.pattern.window to take; set it with --set data.min_distance=VALUE"
        )
    source: Copying | Needle
    if config.data.name == "copying":
        source, shortest = Copying(config.run.seed, held_out), 2 * distance + 1
    else:
        source = Needle(config.run.seed, distance, held_out, config.data.needles)
        shortest = source.shortest
    if length < shortest:
        origin = f"model.pattern.window = {window}, its default" if given is None else "as configured"
        raise UserError(
            f"data.min_distance = {distance} ({origin}) must leave room in a sequence: data.name = "
            f"'{config.data.name}' needs train.seq_len of at least {shortest - 1}, and it is {length - 1}; "
            "change one of them with --set"
        )
    return source


def answer_accuracy(predictions: npt.ArrayLike, tokens: npt.ArrayLike, answers: Mask) -> float:
    """Share of the answers that are predicted right.

    Args:
        predictions: most probable next token after each token, ``[..., S]``: the argmax of the logits.
        tokens: the sequences, ``[..., S + 1]``.
        answers: which tokens are answers, ``[S + 1]``.
    """
    asked = answers[1:]  # nothing predicts the first token
    right = np.asarray(predictions) == np.asarray(tokens)[..., 1:]
    return float(right[..., asked].mean())


def _draw(example: Callable[[], npt.NDArray[Any]], held_out: bool) -> npt.NDArray[Any]:
    """The first random example that lies on the wanted side."""
    while True:
        drawn = example()
        if (zlib.crc32(drawn.astype(np.uint8).tobytes()) % HELD_OUT_SHARE == 0) == held_out:
            return drawn
