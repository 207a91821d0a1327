"""Tasks whose answers lie far back in the sequence, so that it is known which tokens a model can get right.

Both are made of printable bytes, for the byte tokenizer. The ``index``-th sequence is a function of the seed and of
``index`` alone, so the position of a :class:`~nsa_compile.data.sampling.BatchSampler` resumes them exactly. Training
and held-out sequences share no example: a checksum of its random part decides on which side an example lies.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Protocol

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
        string = _draw(lambda: random.choice(self.ALPHABET, size), self.held_out)
        tokens = np.full(length, self.SEPARATOR, dtype=np.int64)
        tokens[:size] = tokens[size + 1 : 2 * size + 1] = string
        return tokens

    def answers(self, length: int) -> Mask:
        size = (length - 1) // 2
        mask = np.zeros(length, dtype=np.bool_)
        mask[size + 1 : 2 * size + 1] = True
        return mask


class Needle:
    """``filler … [key=value] … filler [key=value``: needle retrieval, the value at the end being the answer.

    The filler is a text that repeats itself, from a random place on, so that nearly all there is to learn is in the
    needle. Its place is uniform among those that leave ``min_distance`` tokens between it and the question.

    Args:
        seed: selects the stream.
        min_distance: tokens that lie between needle and question at the least.
        held_out: draw from the examples that are not trained on.
    """

    # The filler of passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300).
    FILLER = b"The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
    KEY, VALUE = 4, 6
    QUESTION = len("[=") + KEY
    NEEDLE = QUESTION + VALUE + len("] ")

    def __init__(self, seed: int, min_distance: int, held_out: bool = False) -> None:
        self.seed = seed
        self.min_distance = min_distance
        self.held_out = held_out

    @classmethod
    def shortest(cls, min_distance: int) -> int:
        """Length of the shortest sequence that has room for needle, distance and question."""
        return cls.NEEDLE + min_distance + cls.QUESTION + cls.VALUE

    def sequence(self, index: int, length: int) -> Tokens:
        random = generator(self.seed, index)
        letters = _draw(lambda: self._example(random), self.held_out)
        key, value = bytes(letters[: self.KEY].tolist()), bytes(letters[self.KEY :].tolist())
        question = b"[" + key + b"="
        start = int(random.integers(length - self.shortest(self.min_distance) + 1))
        phase = int(random.integers(len(self.FILLER)))
        room = length - self.shortest(0)
        filler = (self.FILLER * (room // len(self.FILLER) + 2))[phase : phase + room]
        text = filler[:start] + question + value + b"] " + filler[start:] + question + value
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def answers(self, length: int) -> Mask:
        return np.arange(length) >= length - self.VALUE

    def _example(self, random: np.random.Generator) -> Tokens:
        """A key of lower-case letters and a value of digits, one after the other."""
        key = random.integers(ord("a"), ord("z") + 1, self.KEY)
        value = random.integers(ord("0"), ord("9") + 1, self.VALUE)
        return np.concatenate((key, value))


def make_synthetic(config: RunConfig, held_out: bool) -> AnsweredSource:
    """The source of ``data.name = copying`` or ``needle``.

    Raises:
        UserError: the sequences are too short for ``data.min_distance``.
    """
    # Tokens of a sequence: the model's and one more, for the last target.
    length = config.train.seq_len + 1
    window = config.model.pattern.window
    given = config.data.min_distance
    distance = window if given is None else given
    shortest = 2 * distance + 1 if config.data.name == "copying" else Needle.shortest(distance)
    if length < shortest:
        origin = f"model.pattern.window = {window}, its default" if given is None else "as configured"
        raise UserError(
            f"data.min_distance = {distance} ({origin}) must leave room in a sequence: data.name = "
            f"'{config.data.name}' needs train.seq_len of at least {shortest - 1}, and it is {length - 1}; "
            "change one of them with --set"
        )
    if config.data.name == "copying":
        return Copying(config.run.seed, held_out)
    return Needle(config.run.seed, distance, held_out)


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


def _draw(example: Callable[[], Tokens], held_out: bool) -> Tokens:
    """The first random example that lies on the wanted side."""
    while True:
        drawn = example()
        if (zlib.crc32(drawn.astype(np.uint8).tobytes()) % HELD_OUT_SHARE == 0) == held_out:
            return drawn
