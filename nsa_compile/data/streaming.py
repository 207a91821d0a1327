"""Training sequences from a stream of documents that is too large to be kept, such as FineWeb-Edu."""

from __future__ import annotations

import glob
import heapq
import importlib.util
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nsa_compile.data.sampling import Tokens
from nsa_compile.data.tokenizers import Tokenizer
from nsa_compile.errors import CheckpointError, UserError

# The files of a stream from the n-th on, each with its documents: mappings with the text in one field.
Opener = Callable[[int], Iterable[Iterable[Any]]]
Index = Annotated[int, Field(ge=0, lt=2**62)]
# A document's place in a stream: number of the file, number of the document in it.
Place = tuple[Index, Index]

START: Place = (0, 0)
# Documents read ahead as they come, and tokenized ones.
FETCHED, DEALT = 8, 1024
# Tokens that may wait for their turn, of 2 bytes at most.
MAX_WAITING = 1 << 28

_END = object()

# The data set and its sample of 10 billion tokens, as its publisher names them.
FINEWEB_EDU: dict[str, Any] = {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"}
# Which of the package's readers is for which files.
_READERS = {".jsonl": "json", ".jsonl.gz": "json", ".parquet": "parquet"}


def open_dataset(**arguments: Any) -> Opener:
    """A stream of what ``datasets.load_dataset`` finds under `arguments`; a UserError without that package."""
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            "streams of documents (data.name = 'fineweb-edu', data.stream = true) need the package datasets; install "
            "the data extra: pip install 'nsa-compile[data]'"
        )

    def open_from(first: int) -> Iterator[Iterable[Any]]:
        from datasets import load_dataset
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it reports each of its own retries; DocumentStream tells of failures
        whole = load_dataset(**arguments, split="train", streaming=True)
        for number in range(first, whole.num_shards):
            yield whole.shard(whole.num_shards, number)

    return open_from


def open_files(files: Sequence[Path]) -> Opener:
    """A stream of the rows of local files, all JSON lines or all Parquet.

    Raises:
        UserError: they are something else, or the package ``datasets`` is not installed.
    """
    readers: set[str] = set()
    for file in files:
        reader = next((reader for suffix, reader in _READERS.items() if file.name.endswith(suffix)), None)
        if reader is None or len(readers | {reader}) > 1:
            raise UserError(
                f"data.stream = true reads {', '.join(_READERS)}, one kind at a time, and cannot read '{file}' here; "
                "move it away, or leave data.stream out"
            )
        readers.add(reader)
    return open_dataset(path=readers.pop(), data_files=[glob.escape(str(file.absolute())) for file in files])


class DocumentStream:
    """The texts of a stream that may stall or fail: each with a time limit, and opened again after a failure.

    Args:
        name: what errors call it.
        open_files: opens the stream at its n-th file; called again, with the file reached, after a failure.
        text_field: the field of a document that holds its text.
        place: of the first document; those before it in its file are read and left out.
        timeout: seconds that one document may take.
        retries: failures in a row that are put up with, each followed by a wait twice as long as the last one's.
        backoff: seconds of the first wait.
    """

    def __init__(
        self,
        name: str,
        open_files: Opener,
        *,
        text_field: str = "text",
        place: Place = START,
        timeout: float = 60.0,
        retries: int = 2,
        backoff: float = 1.0,
    ) -> None:
        self.name = name
        self.place = place
        self._open_files = open_files
        self._text_field = text_field
        self._timeout, self._retries, self._backoff = timeout, retries, backoff

    def __iter__(self) -> Iterator[tuple[Place, str]]:
        """Documents with their places; ``place`` is that of the current one, from which a stream goes on with it.

        Raises:
            UserError: the stream stalls, fails too often or holds something else than texts.
        """
        failures = 0
        while True:
            fetched = _Fetcher(lambda: _placed(self._open_files, self.place[0]), FETCHED)
            try:
                while True:
                    kind, value = fetched.next(self._timeout)
                    if kind is not None:
                        break
                    if value is _END:
                        return
                    place, document = value
                    if place < self.place:
                        continue
                    failures = 0  # only by what is new: a document that always fails is reached each time
                    self.place = place
                    yield place, self._text(document)
                    self.place = after(place)
            finally:
                fetched.close()
            if kind == "stalled":
                raise UserError(
                    f"data.name = '{self.name}': no document within data.timeout_s = {self._timeout:g} s "
                    f"({self._where()}); check the connection, or give it more time with --set data.timeout_s=SECONDS"
                )
            failures += 1
            reason = " ".join(f"{type(value).__name__}: {value}".split())[:200]
            if failures > self._retries:
                raise UserError(
                    f"data.name = '{self.name}' cannot be read after {failures} tries ({self._where()}; {reason}); "
                    "check the connection and the files, or use another data set with --set data.name=NAME"
                )
            wait = self._backoff * 2 ** (failures - 1)
            print(f"'{self.name}' failed ({reason}): trying again in {wait:g} s", file=sys.stderr)
            time.sleep(wait)

    def _text(self, document: Any) -> str:
        text = document.get(self._text_field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{self._where()} of '{self.name}' has no text in '{self._text_field}'; "
                "name the right field with --set data.text_field=NAME"
            )
        return text

    def _where(self) -> str:
        file, document = self.place
        return f"document {document} of file {file}, counted from 0"


class LaneState(BaseModel):
    """How far a lane is: `taken` tokens of the document at `place` and all documents before it are handed out."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    place: Place
    taken: Index


class PackedState(BaseModel):
    """Where one process stands in a stream.

    Attributes:
        origin: a place before which nothing is needed any more.
        loads: what each lane of all processes had been dealt when the stream was there.
        lanes: those of this process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    origin: Place
    loads: list[Index]
    lanes: dict[Index, LaneState]


class PackedDocuments:
    """Sequences cut from the documents of a stream, each document followed by the tokenizer's separator.

    The rows of a batch are *lanes*: sequence ``i`` is the next piece of lane ``i mod lanes``. A document goes, whole,
    to the lane that has been dealt the fewest characters so far. Every process can tell that from the lengths of the
    texts, so each deals for itself, tokenizes what its own lanes get and no more, and the batches are the same on any
    number of processes. As all lanes are dealt equally much, few documents wait, however their lengths differ.

    Reading and tokenizing go on in a thread while the model computes.

    Args:
        open_documents: the documents from a place on, with their places.
        tokenizer: turns texts into ids.
        lanes: how many there are in all processes.
        own: those whose sequences are asked for here; ``None`` for all.
        start: place of the first document.
    """

    def __init__(
        self,
        open_documents: Callable[[Place], Iterable[tuple[Place, str]]],
        tokenizer: Tokenizer,
        lanes: int = 1,
        own: range | None = None,
        start: Place = START,
    ) -> None:
        self._fetched: _Fetcher | None = None
        self._open_documents = open_documents
        self._tokenizer = tokenizer
        self._start = start
        self._count = lanes
        self._own = range(lanes) if own is None else own
        self._restart()

    def sequence(self, index: int, length: int) -> Tokens:
        """Tokens ``[length]``; in a lane, sequences are reached by cutting all before them.

        Raises:
            UserError: the stream cannot be read, has ended, or must be kept in too large a part.
        """
        number, lane = divmod(index, self._count)
        if number < self._lanes[lane].number:
            self._restart()
        while self._lanes[lane].number < number:
            self._take(lane, length)
        return self._take(lane, length)

    def state(self) -> dict[str, Any]:
        """Where this process stands, as plain values; see :class:`PackedState`."""
        lanes = {number: LaneState(place=lane.place, taken=lane.taken) for number, lane in self._lanes.items()}
        return PackedState(origin=self._origin, loads=self._loads, lanes=lanes).model_dump()

    def restore(self, states: Sequence[Any], position: int) -> None:
        """Continue where the processes with these states were, after `position` sequences of all lanes together.

        Raises:
            CheckpointError: the states are not those of such a stream.
        """
        try:
            found = [PackedState.model_validate(state) for state in states]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "a rank's"
            raise CheckpointError(f"the place in the stream of documents is damaged: {where}: {first['msg']}") from None
        lanes = {number: lane for state in found for number, lane in state.lanes.items()}
        numbers = sorted(number for state in found for number in state.lanes)
        if numbers != list(range(self._count)) or any(len(state.loads) != self._count for state in found):
            raise CheckpointError(
                f"the place in the stream of documents must be that of {self._count} lanes, each once"
            )
        if position % self._count:
            raise CheckpointError(f"sampler_position = {position} must be a multiple of {self._count} lanes")
        # Whoever is behind knows what was dealt from there on; the others' lanes leave out what they have had.
        last = min(found, key=lambda state: state.origin)
        if last.origin < self._start:
            raise CheckpointError("the place in the stream of documents lies among those that are held out")
        done = position // self._count
        own = {number: _Lane(done, lanes[number].place, lanes[number].taken) for number in self._own}
        self._go_on(last.origin, last.loads, own)

    def close(self) -> None:
        """Stop reading; so does deleting the last reference."""
        if self._fetched is not None:
            self._fetched.close()
            self._fetched = None

    def __del__(self) -> None:
        self.close()

    def _restart(self) -> None:
        self._go_on(self._start, [0] * self._count, {number: _Lane(0, self._start, 0) for number in self._own})

    def _go_on(self, origin: Place, loads: Sequence[int], lanes: dict[int, _Lane]) -> None:
        self.close()
        self._origin, self._loads, self._lanes = origin, list(loads), lanes
        self._dealt: deque[_Dealt] = deque()  # from the origin on; their tokens are in the lanes

    def _take(self, number: int, length: int) -> Tokens:
        lane = self._lanes[number]
        while lane.available < length:
            self._receive(length)
        tokens = lane.take(length)
        while self._dealt and self._done(self._dealt[0]):
            done = self._dealt.popleft()
            self._loads[done.lane] += done.load
            self._origin = after(done.place)
        return tokens

    def _done(self, dealt: _Dealt) -> bool:
        lane = self._lanes.get(dealt.lane)
        return lane is None or dealt.place < lane.place

    def _receive(self, length: int) -> None:
        """Hand the next document to its lane."""
        if self._fetched is None:
            begins = {number: lane.place for number, lane in self._lanes.items()}
            # Without a reference to this object, so that the thread does not keep it alive.
            read = partial(_deal, self._open_documents, self._tokenizer, self._origin, list(self._loads), begins)
            self._fetched = _Fetcher(read, DEALT)
        kind, value = self._fetched.next(None)
        if kind is not None:
            raise value
        if value is _END:
            first = min(lane.number for lane in self._lanes.values()) * self._count
            raise UserError(
                f"the stream of documents ended at sequence {first} of {length} tokens; "
                "take fewer train.steps, a smaller batch, or a larger data set"
            )
        dealt, tokens = value
        self._dealt.append(dealt)
        if tokens is None:
            return
        self._lanes[dealt.lane].put(dealt.place, tokens)
        waiting = sum(lane.available for lane in self._lanes.values())
        if waiting > MAX_WAITING:
            raise UserError(
                f"{waiting:,} tokens of the stream are waiting, and {MAX_WAITING:,} may: some sequences of a "
                "batch get texts of far more tokens to a character than others; shuffle the documents"
            )


def after(place: Place) -> Place:
    """The place of the next document of the same file; where the file ends there, of the first of the next."""
    return place[0], place[1] + 1


class _Dealt(NamedTuple):
    place: Place
    lane: int
    load: int


class _Lane:
    """Tokens that wait to be handed out; `number` sequences have been.

    `place` and `taken` are those of :class:`LaneState`, `available` counts tokens.
    """

    def __init__(self, number: int, place: Place, taken: int) -> None:
        self.number, self.place, self.taken = number, place, taken
        self.available = 0
        self._waiting: deque[tuple[Place, npt.NDArray[np.integer]]] = deque()

    def put(self, place: Place, tokens: npt.NDArray[np.integer]) -> None:
        """Append the tokens of the document at `place`.

        Raises:
            CheckpointError: they should be those of a document of which some are handed out, and cannot be.
        """
        if not self._waiting and self.taken:
            if place != self.place or self.taken >= len(tokens):
                raise CheckpointError(
                    f"the stream of documents is not the one of the checkpoint: {self.taken} tokens of document "
                    f"{self.place[1]} of file {self.place[0]} were handed out; give back the files as they were"
                )
            self.available = -self.taken
        self._waiting.append((place, tokens))
        self.available += len(tokens)

    def take(self, length: int) -> Tokens:
        """Hand out the next tokens ``[length]``; they are available."""
        taken = np.empty(length, dtype=np.int64)
        filled = 0
        while filled < length:
            self.place, tokens = self._waiting[0]
            part = tokens[self.taken : self.taken + length - filled]
            taken[filled : filled + len(part)] = part
            filled += len(part)
            self.taken += len(part)
            if self.taken == len(tokens):
                self._waiting.popleft()
                self.place, self.taken = after(self.place), 0
        self.available -= length
        self.number += 1
        return taken


def _deal(
    open_documents: Callable[[Place], Iterable[tuple[Place, str]]],
    tokenizer: Tokenizer,
    origin: Place,
    loads: Sequence[int],
    begins: Mapping[int, Place],
) -> Iterator[tuple[_Dealt, npt.NDArray[np.integer] | None]]:
    """Documents from `origin` on with their lanes; with their tokens, too, in lanes that have begun. Runs in a thread.

    Args:
        loads: what each lane of all processes had been dealt before.
        begins: from where on the lanes of this process want documents.
    """
    lanes = [(load, number) for number, load in enumerate(loads)]
    heapq.heapify(lanes)
    for place, text in open_documents(origin):
        load, number = lanes[0]
        dealt = _Dealt(place, number, len(text) + len(tokenizer.separator))
        heapq.heapreplace(lanes, (load + dealt.load, number))
        tokens = None
        if number in begins and place >= begins[number]:
            ids = tokenizer.encode(text)
            tokens = np.concatenate((ids, np.array(tokenizer.separator, dtype=ids.dtype)))
        yield dealt, tokens


def _placed(open_files: Opener, first: int) -> Iterator[tuple[Place, Any]]:
    for file, documents in enumerate(open_files(first), first):
        for number, document in enumerate(documents):
            yield (file, number), document


class _Fetcher:
    """Iterates over what `open_items` makes, in a thread of its own, up to `ahead` items before its consumer.

    Only so can a read that hangs be abandoned.
    """

    def __init__(self, open_items: Callable[[], Iterable[Any]], ahead: int) -> None:
        self._items: queue.Queue[tuple[str | None, Any]] = queue.Queue(maxsize=ahead)
        self._closed = threading.Event()
        self._over: tuple[str | None, Any] | None = None
        # A daemon: a read that hangs for ever must not keep the process alive.
        threading.Thread(target=self._run, args=(open_items,), daemon=True).start()

    def next(self, timeout: float | None) -> tuple[str | None, Any]:
        """``(None, item)``, ``("stalled", None)`` or, from then on, ``(None, _END)`` or ``("failed", exception)``."""
        if self._over is not None:
            return self._over
        try:
            kind, value = self._items.get(timeout=timeout)
        except queue.Empty:
            return "stalled", None
        if kind is not None or value is _END:
            self._over = kind, value
        return kind, value

    def close(self) -> None:
        self._closed.set()

    def _run(self, open_items: Callable[[], Iterable[Any]]) -> None:
        try:
            for item in open_items():
                if not self._put((None, item)):
                    return
            self._put((None, _END))
        except Exception as error:  # whatever a loader raises is a failure to try again after
            self._put(("failed", error))

    def _put(self, item: tuple[str | None, Any]) -> bool:
        while not self._closed.is_set():
            try:
                self._items.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
