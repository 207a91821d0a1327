"""Tasks whose answers lie far back in the sequence, so that it is known which tokens a model can get right.

Both are made of printable bytes, for the byte tokenizer. The ``index``-th sequence is a function of the seed and of
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
    """``filler mvvvvvvv filler … filler mvvvvvvv mvvvvvvv …``: needle retrieval.

    Needles, each a marker and seven random letters, lie in a haystack of filler and are all asked for at the end, in
    random order: after its marker, the letters are the answer. No marker and no letter is in two needles of a sequence.
    Their places are uniform among those that leave ``min_distance`` tokens up to the first question. Letters and
    markers do not occur in the filler, a text that repeats itself from a random place on.

    Args:
        seed: selects the stream.
        min_distance: tokens of filler between the last needle and the first question.
        held_out: draw from the examples that are not trained on.
        needles: how many there are, at most ``MOST``; the others of a sequence are distractors of each.
    """

    MARKERS = np.frombuffer(b"0123456789!#$%&()*+,-/:;<=>?@^_~", np.uint8)
    LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ[]", np.uint8)
    VALUE = 7
    NEEDLE = 1 + VALUE
    MOST = len(LETTERS) // VALUE
    # After the filler of passkey retrieval (Mohtashami and Jaggi, arXiv 2305.16300).
    FILLER = b"the grass is green. the sky is blue. the sun is yellow. here we go. there and back again. "

    def __init__(self, seed: int, min_distance: int, held_out: bool = False, needles: int = 4) -> None:
        self.seed = seed
        self.min_distance = min_distance
        self.held_out = held_out
        self.needles = needles

    @property
    def shortest(self) -> int:
        """Length of the shortest sequence that has room for needles, distance and questions."""
        return 2 * self.needles * self.NEEDLE + self.min_distance

    def sequence(self, index: int, length: int) -> Tokens:
        random = generator(self.seed, index)
        drawn = _draw(lambda: self._example(random), self.held_out)
        needles = [row.tobytes() for row in drawn]
        room = length - self.shortest
        starts = np.sort(random.integers(room + 1, size=self.needles)).tolist()
        phase, size = int(random.integers(len(self.FILLER))), room + self.min_distance
        filler = (self.FILLER * (size // len(self.FILLER) + 2))[phase : phase + size]
        text = filler[: starts[0]]
        for needle, start, end in zip(needles, starts, [*starts[1:], len(filler)], strict=True):
            text += needle + filler[start:end]
        text += b"".join(needles[i] for i in random.permutation(self.needles))
        return np.frombuffer(text, dtype=np.uint8).astype(np.int64)

    def answers(self, length: int) -> Mask:
        question = np.arange(length) - (length - self.needles * self.NEEDLE)
        return (question >= 0) & (question % self.NEEDLE > 0)

    def _example(self, random: np.random.Generator) -> npt.NDArray[np.uint8]:
        """Markers and letters of all needles, ``[needles, 1 + VALUE]``."""
        markers = random.permutation(self.MARKERS)[: self.needles, None]
        letters = random.permutation(self.LETTERS)[: self.needles * self.VALUE].reshape(self.needles, self.VALUE)
        return np.concatenate((markers, letters), axis=1)


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
