"""A data set of a run: token sources for training and validation, and the yardstick a model has to beat."""

from __future__ import annotations

import gzip
import itertools
import math
from contextlib import closing
from dataclasses import dataclass
from importlib import resources

import numpy as np
import numpy.typing as npt

from nsa_compile.config import SYNTHETIC, RunConfig
from nsa_compile.data.conversations import Conversation, Conversations, fitting, read_conversations
from nsa_compile.data.documents import find_files
from nsa_compile.data.sampling import (
    FILLING,
    BatchSampler,
    RandomWindows,
    Source,
    UniformBytes,
    evenly_spaced_batches,
    local_rows,
)
from nsa_compile.data.streaming import (
    FINEWEB_EDU,
    START,
    DocumentStream,
    Opener,
    PackedDocuments,
    Place,
    after,
    open_dataset,
    open_files,
)
from nsa_compile.data.synthetic import make_synthetic
from nsa_compile.data.tokenizers import ByteTokenizer, Tokenizer, make_tokenizer
from nsa_compile.errors import UserError

VALIDATION_FRACTION = 0.05
# Generated sequences that stand for the training text when token frequencies are counted.
UNIGRAM_SEQUENCES = 256
# Of a stream, which has no end to hold out.
HELD_OUT_DOCUMENTS = 1000
# Token frequencies are counted piece by piece, so that memory stays small, and over 2^25 tokens at most.
PIECE, COUNTED = 1 << 18, 1 << 7


@dataclass(frozen=True)
class Corpus:
    """What a run trains and is judged on.

    Attributes:
        train: source of training sequences.
        validation: held-out batches, ``[eval_batches, B, S + 1]`` int64, the same at every evaluation.
        tokenizer: how ids turn back into text.
        best_unigram_loss: loss in nats per token, on held-out text, of the model that knows only how often each token
            occurs in the training text, of a stream or a task in its first ``UNIGRAM_SEQUENCES`` sequences. A language
            model that has learned anything about order is below it.
        held_out: the whole of the held-out text, tokens ``[N]``; ``None`` for a stream and for a synthetic task, which
            have no such text.
        notes: what a reader of the log is to know of the data.
        answers: for a synthetic task, which tokens ``[S + 1]`` of every sequence can be inferred from those before
            them; ``None`` where that is not known.
    """

    train: Source
    validation: npt.NDArray[np.int64]
    tokenizer: Tokenizer
    best_unigram_loss: float
    answers: npt.NDArray[np.bool_] | None = None
    held_out: npt.NDArray[np.integer] | None = None
    notes: tuple[str, ...] = ()


def load_corpus(config: RunConfig, rank: int = 0, world_size: int = 1) -> Corpus:
    """Load the data set that ``config.data`` names, and tokenize it if that was not done before.

    The last 5 % of a text, by position, are held out; no token of them is ever trained on.

    Args:
        config: of the run.
        rank, world_size: whose part of each batch is going to be asked for.

    Raises:
        UserError: the data set does not exist, cannot be read or is too short.
    """
    if config.data.name == "uniform":
        return _uniform(config)
    if config.data.name in SYNTHETIC:
        return _synthetic(config)
    if config.data.chat:
        return _conversations(config)
    if config.data.name == "fineweb-edu":
        return streamed_corpus(config, open_dataset(**FINEWEB_EDU), rank, world_size)
    if config.data.stream:
        return streamed_corpus(config, open_files(find_files(config.data.name)), rank, world_size)
    return _text(config)


def streamed_corpus(config: RunConfig, open_at: Opener, rank: int = 0, world_size: int = 1) -> Corpus:
    """A data set read as a stream; its first ``HELD_OUT_DOCUMENTS`` documents are held out.

    Raises:
        UserError: the stream cannot be read, or ends too early.
    """
    data, shape = config.data, config.train
    tokenizer = make_tokenizer(data.tokenizer)

    def documents(place: Place) -> DocumentStream:
        return DocumentStream(data.name, open_at, text_field=data.text_field, place=place, timeout=data.timeout_s)

    held_out = list(itertools.islice(documents(START), HELD_OUT_DOCUMENTS))
    if len(held_out) < HELD_OUT_DOCUMENTS:
        raise UserError(
            f"data.name = '{data.name}' is too short for a stream: it holds {len(held_out)} documents, and the first "
            f"{HELD_OUT_DOCUMENTS:,} are held out; take a larger data set"
        )
    start = after(held_out[-1][0])
    with closing(PackedDocuments(lambda place: held_out, tokenizer)) as source:
        validation = _generated_validation(source, config)
    # A source of its own, so that where a run only checks its data nothing is read ahead.
    with closing(PackedDocuments(documents, tokenizer, start=start)) as source:
        sample = np.concatenate([source.sequence(index, shape.seq_len + 1) for index in range(UNIGRAM_SEQUENCES)])
    yardstick = best_unigram_loss(sample, validation.ravel(), tokenizer.vocab_size)
    share = local_rows(shape.batch_size, rank, world_size)
    train = PackedDocuments(documents, tokenizer, shape.batch_size, range(share.start, share.stop), start)
    return Corpus(train, validation, tokenizer, yardstick)


def _uniform(config: RunConfig) -> Corpus:
    # Held-out bytes come from a stream of their own.
    held_out = UniformBytes(config.run.seed + 1)
    return Corpus(
        UniformBytes(config.run.seed), _generated_validation(held_out, config), ByteTokenizer(), math.log(256)
    )


def _synthetic(config: RunConfig) -> Corpus:
    train, held_out = make_synthetic(config, held_out=False), make_synthetic(config, held_out=True)
    length = config.train.seq_len + 1
    validation = _generated_validation(held_out, config)
    answers = train.answers(length)
    # The yardstick is about the tokens that the loss is about.
    counted = answers if config.train.loss == "answers" else np.ones_like(answers)
    sample = np.concatenate([train.sequence(index, length)[counted] for index in range(UNIGRAM_SEQUENCES)])
    yardstick = best_unigram_loss(sample, validation[..., counted].ravel(), ByteTokenizer.vocab_size)
    return Corpus(train, validation, ByteTokenizer(), yardstick, answers)


def split_conversations(config: RunConfig) -> tuple[list[Conversation], list[Conversation], list[str]]:
    """Those to train on and those that are held out, the last 5 %, one at least; and a line for what is lost.

    Raises:
        UserError: there are none to hold out, or they cannot be read.
    """
    shape, tokenizer = config.train, make_tokenizer(config.data.tokenizer)
    conversations = list(read_conversations(config.data.name, tokenizer))
    kept, notes = fitting(conversations, shape.seq_len + 1)
    if len(kept) < 2:
        raise UserError(
            f"data.name = '{config.data.name}' is too short: {len(kept)} of {len(conversations)} conversations hold "
            f"an answer within train.seq_len = {shape.seq_len}, and one to train on and one to hold out are needed; "
            "give more, or a larger train.seq_len"
        )
    boundary = len(kept) - max(1, int(len(kept) * VALIDATION_FRACTION))
    return kept[:boundary], kept[boundary:], notes


def _conversations(config: RunConfig) -> Corpus:
    length, tokenizer = config.train.seq_len + 1, make_tokenizer(config.data.tokenizer)
    trained_on, kept_back, notes = split_conversations(config)
    only_answers = config.train.loss == "answers"
    train = Conversations(trained_on, config.run.seed, only_answers)
    held_out = Conversations(kept_back, None, only_answers)
    # The yardstick is about the tokens that the loss is about.
    counted = [
        np.concatenate([row[row >= 0] for row in (each.sequence(i, length)[1:] for i in range(count))])
        for each, count in ((train, len(trained_on)), (held_out, len(kept_back)))
    ]
    yardstick = best_unigram_loss(counted[0], counted[1], tokenizer.vocab_size)
    return Corpus(train, _each_once(held_out, len(kept_back), config), tokenizer, yardstick, notes=tuple(notes))


def _each_once(held_out: Source, count: int, config: RunConfig) -> npt.NDArray[np.int64]:
    """The first `count` sequences, each once, at most as many as `train.eval_batches` hold; what is missing in the last
    batch is filled up with sequences that no loss is about.
    """
    shape = config.train
    batches = min(shape.eval_batches, -(-count // shape.batch_size))
    rows = np.full((batches * shape.batch_size, shape.seq_len + 1), FILLING, dtype=np.int64)
    for i in range(min(count, len(rows))):
        rows[i] = held_out.sequence(i, shape.seq_len + 1)
    return rows.reshape(batches, shape.batch_size, shape.seq_len + 1)


def _generated_validation(held_out: Source, config: RunConfig) -> npt.NDArray[np.int64]:
    shape = config.train
    batch = BatchSampler(held_out, shape.eval_batches * shape.batch_size, shape.seq_len).next_batch()
    return batch.reshape(shape.eval_batches, shape.batch_size, shape.seq_len + 1)


def _text(config: RunConfig) -> Corpus:
    seed, shape = config.run.seed, config.train
    tokenizer = make_tokenizer(config.data.tokenizer)
    if config.data.name == "shakespeare":
        tokens = tokenizer.encode(_shakespeare())
    else:
        # Here, not above: those who never open a file need none of what it is built on.
        from nsa_compile.data.token_cache import open_cache

        tokens = open_cache(config.data).tokens
    train, held_out_text = split(tokens)
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
        held_out=held_out_text,
    )


def split(tokens: npt.NDArray[np.integer]) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.integer]]:
    """Training text and held-out text: the first 95 % and the last 5 % by position."""
    boundary = len(tokens) - int(len(tokens) * VALIDATION_FRACTION)
    return tokens[:boundary], tokens[boundary:]


def best_unigram_loss(train: npt.NDArray[np.integer], held_out: npt.NDArray[np.integer], vocab_size: int) -> float:
    """Cross-entropy of held-out text under the token frequencies of the training text, in nats per token.

    Counts start at one, so that a token the training text lacks does not make the loss infinite.
    """
    counts = _token_counts(train, vocab_size) + 1
    asked = _token_counts(held_out, vocab_size)
    return float((asked * (np.log(counts.sum()) - np.log(counts))).sum() / asked.sum())


def _token_counts(tokens: npt.NDArray[np.integer], vocab_size: int) -> npt.NDArray[np.int64]:
    """How often each id occurs; in a text of more than ``COUNTED`` pieces, in that many, evenly spread."""
    pieces = -(-len(tokens) // PIECE)
    chosen = np.linspace(0, pieces - 1, min(pieces, COUNTED)).astype(np.int64)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for piece in chosen:
        found = np.bincount(tokens[piece * PIECE : (piece + 1) * PIECE], minlength=vocab_size)
        if len(found) > vocab_size:
            raise UserError(
                f"the text holds the token {len(found) - 1}, which must be below {vocab_size}, the size of the "
                "vocabulary: its cache is damaged; nsa-compile data verify names it, delete it there"
            )
        counts += found
    return counts


def _shakespeare() -> str:
    packed = (resources.files("nsa_compile.data") / "shakespeare.txt.gz").read_bytes()
    return gzip.decompress(packed).decode("utf-8")
