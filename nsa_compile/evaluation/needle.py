"""Needle retrieval: what a model finds again, by the length of the text and the depth at which it was hidden.

A model that was trained on the task `needle` is asked by it (`data/synthetic.py`). One that was trained on text is
asked in words: a sentence that gives a city its password lies in held-out text, and the text ends in that sentence up
to the password. How probable the password is without the sentence says what of the answer was found and not guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nsa_compile.config import RunConfig
from nsa_compile.data.sampling import generator
from nsa_compile.data.synthetic import Needle, make_synthetic
from nsa_compile.data.tokenizers import Tokenizer
from nsa_compile.errors import UserError
from nsa_compile.evaluation.scoring import Scorer

# Beyond the held-out sequences that a run is judged on.
FIRST_SEQUENCE = 1 << 21
CITIES = (
    "Athens", "Berlin", "Cairo", "Dublin", "Geneva", "Havana", "Lima", "London", "Madrid", "Milan", "Paris", "Rome",
    "Sydney", "Tokyo", "Venice", "Vienna",
)  # fmt: skip
PASSWORDS = (
    "anchor", "basket", "candle", "dragon", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "mirror", "needle", "orange", "pocket", "quiver", "rabbit", "silver", "thunder", "urchin", "velvet",
    "window", "yellow",
)  # fmt: skip
QUESTION = "\nThe password of {city} is"
ANSWER = " {password}."


@dataclass(frozen=True)
class Found:
    """What was found of needles at one depth in texts of one length.

    Attributes:
        length: tokens that the model reads.
        depth: where the needle lies, from 0, the start of the text, to 1, its end; the middle of a range of depths
            where needles lie at random.
        answers: how many were asked for.
        accuracy: the share of which every token was the most probable one.
        log_prob: of an answer, in nats, on average.
        unprompted: the same where the text has no needle; None where that cannot be said.
    """

    length: int
    depth: float
    answers: int
    accuracy: float
    log_prob: float
    unprompted: float | None = None

    @property
    def gain(self) -> float | None:
        """Nats by which the needle makes the answer more probable."""
        return None if self.unprompted is None else self.log_prob - self.unprompted

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}


def find_records(scorer: Scorer, config: RunConfig, length: int, depths: int, samples: int) -> list[Found]:
    """Retrieval of the task `needle` on `samples` held-out sequences of `length` tokens, in `depths` ranges of depth.

    Raises:
        UserError: the needles of the task do not fit into so many tokens.
    """
    source = make_synthetic(config, held_out=True)
    assert isinstance(source, Needle)
    if length + 1 < source.shortest:
        raise UserError(
            f"--length {length} must be at least {source.shortest - 1}, or the needles of the run do not fit; "
            "give a larger one"
        )
    sequences = [source.sequence(FIRST_SEQUENCE + i, length + 1) for i in range(samples)]
    asked = np.flatnonzero(source.answers(length + 1))
    found: list[list[tuple[bool, float]]] = [[] for _ in range(depths)]
    for sequence, scores in zip(sequences, scorer.score(sequences, length), strict=True):
        hay = sequence[: asked[0] - 1]
        for answer in asked:
            place = int(np.flatnonzero(hay == source.record(*sequence[answer - 1 : answer + 1]))[0])
            score = bool(scores.top[answer - 1]), float(scores.log_probs[answer - 1])
            found[depths * place // len(hay)].append(score)
    rows = [(i, *np.mean(part, axis=0), len(part)) for i, part in enumerate(found) if part]
    return [Found(length, (i + 0.5) / depths, n, float(right), float(log_prob)) for i, right, log_prob, n in rows]


def find_sentences(
    scorer: Scorer, text: npt.NDArray[np.integer], tokenizer: Tokenizer, length: int, depths: int, samples: int
) -> list[Found]:
    """Retrieval of a sentence from `samples` pieces of a text, at `depths` depths from its start to its end.

    Raises:
        UserError: the sentence does not fit into so many tokens, or the text is too short.
    """
    found: dict[float, list[tuple[bool, float, float]]] = {}
    cases = [
        (depth, _case(text, tokenizer, length, depth, i))
        for depth in np.linspace(0, 1, depths).tolist()
        for i in range(samples)
    ]
    with_needle = scorer.score([tokens for _, (tokens, _, _) in cases], length)
    without = scorer.score([tokens for _, (_, tokens, _) in cases], length)
    for (depth, (_, _, size)), scores, bare in zip(cases, with_needle, without, strict=True):
        row = bool(scores.top[-size:].all()), float(scores.log_probs[-size:].sum()), float(bare.log_probs[-size:].sum())
        found.setdefault(depth, []).append(row)
    rows = [(depth, *np.mean(part, axis=0).tolist()) for depth, part in found.items()]
    return [Found(length, depth, samples, right, log_prob, bare) for depth, right, log_prob, bare in rows]


def _case(
    text: npt.NDArray[np.integer], tokenizer: Tokenizer, length: int, depth: float, index: int
) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer], int]:
    """`length + 1` tokens with a needle, as many without, and how many at their end are the answer.

    The needle and the place in the text depend on `index` alone, so that depths and lengths are asked the same.
    """
    random = generator(0, index)
    city, password = CITIES[random.integers(len(CITIES))], PASSWORDS[random.integers(len(PASSWORDS))]
    question, answer = (
        tokenizer.encode(part.format(city=city, password=password)).astype(np.int64) for part in (QUESTION, ANSWER)
    )
    start = random.random()
    needle = np.concatenate((question, answer, tokenizer.encode("\n").astype(np.int64)))
    room = length + 1 - len(question) - len(answer)
    if room < 2 * len(needle):
        least = length - room + 2 * len(needle)
        raise UserError(f"--length {length} must be at least {least}, or no text is left to hide in; give a larger one")
    if len(text) < room:
        raise UserError(
            f"the held-out text has {len(text)} tokens, and --length {length} needs {room}; give a smaller length, "
            "or a longer text with --data PATH"
        )
    hay = text[int(start * (len(text) - room)) :][:room].astype(np.int64)
    place = round(depth * (room - len(needle)))
    hidden = np.concatenate((hay[:place], needle, hay[place : room - len(needle)]))
    return np.concatenate((hidden, question, answer)), np.concatenate((hay, question, answer)), len(answer)


def grid(rows: Sequence[Found], name: str) -> tuple[list[float], list[int], dict[tuple[float, int], float]]:
    """Depths, lengths, and what is called `name` of each pair of them that was measured."""
    values = {(row.depth, row.length): value for row in rows if (value := getattr(row, name)) is not None}
    return sorted({row.depth for row in rows}), sorted({row.length for row in rows}), values
