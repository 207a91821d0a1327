"""Batches of token sequences, each a pure function of the seed and of its position in the stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]
# What a sequence that is too short is filled up with: token 0, uncounted.
FILLING = ~0


class Source(Protocol):
    """A source with a sequence of tokens for every position of a stream."""

    def sequence(self, index: int, length: int) -> Tokens:
        """Tokens ``[length]`` of the ``index``-th sequence; always the same for the same index.

        A token that no loss is to be about is given as its complement, which is negative; see ``uncounted``.
        """


@runtime_checkable
class Resumable(Protocol):
    """A source that cannot jump to a position, and has to keep its place to go on from there."""

    def state(self) -> dict[str, Any]:
        """The place this process is at, as plain values."""

    def restore(self, states: Sequence[Any], position: int) -> None:
        """Continue where the processes with these states were, after `position` sequences of all together.

        Raises:
            CheckpointError: the states are not those of this source.
        """


def generator(seed: int, index: int) -> np.random.Generator:
    """Random numbers of the ``index``-th sequence of a stream."""
    # A counter-based generator: the index is the counter's top word, so streams of different indices never meet.
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, index]))


class RandomWindows:
    """Windows of a text ``[N]``, of any integer type, at random starts that the seed selects."""

    def __init__(self, tokens: npt.NDArray[np.integer], seed: int) -> None:
        self.tokens = tokens
        self.seed = seed

    def sequence(self, index: int, length: int) -> Tokens:
        start = int(generator(self.seed, index).integers(len(self.tokens) - length + 1))
        return self.tokens[start : start + length].astype(np.int64)


def uncounted(tokens: Tokens) -> Tokens:
    """Tokens as they are handed out where the model is to read them and not to learn to write them."""
    return ~tokens


def without_filling(tokens: Tokens) -> Tokens:
    """A sequence without what fills it up at its end: token 0, uncounted."""
    return tokens[: len(tokens) - int(np.argmax(np.append(tokens[::-1] != FILLING, True)))]


def readable(tokens: Tokens) -> Tokens:
    """The tokens themselves, of a sequence of which some are uncounted."""
    return np.where(tokens < 0, ~tokens, tokens)


class UniformBytes:
    """Uniform random bytes: nothing can be learned from them, so no honest loss is below ``ln 256``."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def sequence(self, index: int, length: int) -> Tokens:
        return generator(self.seed, index).integers(256, size=length, dtype=np.int64)


class BatchSampler:
    """Batches of consecutive sequences of a source, or one process's share of each.

    The whole state is ``position``, the number of sequences handed out by all processes together: a sampler made with a
    saved position goes on where the other stopped, and ``k`` batches of ``B`` hold the same sequences as one batch of
    ``k·B``. Of each batch, rank ``r`` of ``w`` takes the ``r``-th of ``w`` equal parts.

    Args:
        source: where the sequences come from.
        batch_size: sequences ``B`` in a batch of all processes.
        seq_len: tokens ``S`` the model sees; a sequence has one more, for the targets.
        position: sequences to skip.
        rank, world_size: which part of a batch to hand out; ``world_size`` divides ``batch_size``.
    """

    def __init__(
        self, source: Source, batch_size: int, seq_len: int, position: int = 0, rank: int = 0, world_size: int = 1
    ) -> None:
        self.source = source
        self.batch_size = batch_size
        self.seq_len = seq_len
        self.position = position
        self._share = local_rows(batch_size, rank, world_size)

    def next_indices(self) -> range:
        """Numbers of the next sequences of this process; the batch is done with."""
        start = self.position
        self.position += self.batch_size
        return range(start + self._share.start, start + self._share.stop)

    def sequences(self, indices: range) -> Tokens:
        """The tokens ``[len(indices), S + 1]`` of these sequences."""
        return np.stack([self.source.sequence(index, self.seq_len + 1) for index in indices])

    def next_batch(self) -> Tokens:
        """The next tokens ``[B / world_size, S + 1]``."""
        return self.sequences(self.next_indices())


def local_rows(batch_size: int, rank: int, world_size: int) -> slice:
    """The rows of a batch that belong to one process."""
    share = batch_size // world_size
    return slice(rank * share, (rank + 1) * share)


def evenly_spaced_batches(
    tokens: npt.NDArray[np.integer], batches: int, batch_size: int, seq_len: int
) -> npt.NDArray[np.int64]:
    """Windows spread evenly over a text, ``[batches, B, S + 1]``; they overlap when the text is short."""
    starts = np.linspace(0, len(tokens) - seq_len - 1, batches * batch_size).astype(np.int64)
    windows = np.stack([tokens[start : start + seq_len + 1] for start in starts])
    return windows.astype(np.int64).reshape(batches, batch_size, seq_len + 1)
