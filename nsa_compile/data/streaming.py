"""Training sequences from a stream of documents that is too large to be kept, such as FineWeb-Edu."""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from nsa_compile.data.sampling import Tokens
from nsa_compile.data.tokenizers import Tokenizer
from nsa_compile.errors import UserError

# Documents from the n-th on, each a mapping with the text in one field.
Opener = Callable[[int], Iterable[Any]]

_END = object()


# The data set and its sample of 10 billion tokens, as its publisher names them.
FINEWEB_EDU: dict[str, Any] = {"path": "HuggingFaceFW/fineweb-edu", "name": "sample-10BT"}


def open_dataset(**arguments: Any) -> Opener:
    """A stream of the data set that ``datasets.load_dataset`` finds under `arguments`.

    Raises:
        UserError: the package is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise UserError(
            "data.name = 'fineweb-edu' needs the package datasets; install the data extra: "
            "pip install 'nsa-compile[data]'"
        )

    def open_at(position: int) -> Iterable[Any]:
        from datasets import load_dataset
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it reports each of its own retries; DocumentStream tells of failures
        return load_dataset(**arguments, split="train", streaming=True).skip(position)

    return open_at


class DocumentStream:
    """The texts of a stream that may stall or fail: each with a time limit, and opened again after a failure.

    Rank ``r`` of ``w`` reads the documents ``r, r + w, r + 2 w, …``, so that every document is read exactly once.

    Args:
        name: what errors call it.
        open_at: opens the stream at its n-th document; called again, with the place reached, after a failure.
        text_field: the field of a document that holds its text.
        rank, world_size: which share of the documents to read.
        position: documents of the whole stream to skip: that of an earlier stream, which this one continues.
        timeout: seconds that one document may take.
        retries: failures in a row that are put up with, each followed by a wait twice as long as the last one's.
        backoff: seconds of the first wait.
    """

    def __init__(
        self,
        name: str,
        open_at: Opener,
        *,
        text_field: str = "text",
        rank: int = 0,
        world_size: int = 1,
        position: int = 0,
        timeout: float = 60.0,
        retries: int = 2,
        backoff: float = 1.0,
    ) -> None:
        self.name = name
        self.position = position
        self._open_at = open_at
        self._text_field = text_field
        self._rank, self._world_size = rank, world_size
        self._timeout, self._retries, self._backoff = timeout, retries, backoff

    def __iter__(self) -> Iterator[str]:
        """Texts of this rank's documents; ``position`` counts what is done with, the current one not yet.

        Raises:
            UserError: the stream stalls, fails too often or holds something else than texts.
        """
        failures = 0
        while True:
            fetched = _Fetcher(self._open_at, self.position)
            try:
                while True:
                    kind, value = fetched.next(self._timeout)
                    if kind is not None:
                        break
                    if value is _END:
                        return
                    failures = 0
                    if self.position % self._world_size == self._rank:
                        yield self._text(value)
                    self.position += 1
            finally:
                fetched.close()
            if kind == "stalled":
                raise UserError(
                    f"data.name = '{self.name}': no document within {self._timeout:g} s (document {self.position}); "
                    "check the connection, or use a local data set with --set data.name=PATH"
                )
            failures += 1
            reason = " ".join(f"{type(value).__name__}: {value}".split())[:200]
            if failures > self._retries:
                raise UserError(
                    f"data.name = '{self.name}' cannot be read after {failures} tries ({reason}); "
                    "check the connection, or use a local data set with --set data.name=PATH"
                )
            wait = self._backoff * 2 ** (failures - 1)
            print(f"'{self.name}' failed ({reason}): trying again in {wait:g} s", file=sys.stderr)
            time.sleep(wait)

    def _text(self, document: Any) -> str:
        text = document.get(self._text_field) if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"document {self.position} of '{self.name}' has no text in '{self._text_field}'; "
                "name the right field with --set data.text_field=NAME"
            )
        return text


class PackedDocuments:
    """Sequences cut from documents one after the other, with the tokenizer's separator between two.

    A stream has no random access: sequences are handed out in order, and a later one is reached by reading all before
    it, so the same index is always the same sequence.

    Args:
        open_documents: the texts from the first on; called once more to start over.
        tokenizer: turns texts into ids.
    """

    def __init__(self, open_documents: Callable[[], Iterable[str]], tokenizer: Tokenizer) -> None:
        self._open_documents = open_documents
        self._tokenizer = tokenizer
        self._restart()

    def sequence(self, index: int, length: int) -> Tokens:
        if index < self._next:
            self._restart()
        while self._next < index:
            self._take(length)
        return self._take(length)

    def _restart(self) -> None:
        self._documents = iter(self._open_documents())
        self._buffer: Tokens = np.empty(0, dtype=np.int64)
        self._next = 0
        self._first = True

    def _take(self, length: int) -> Tokens:
        parts, have = [self._buffer], len(self._buffer)
        while have < length:
            text = next(self._documents, None)
            if text is None:
                raise UserError(
                    f"the stream of documents ended at sequence {self._next} of {length} tokens; "
                    "take fewer train.steps, a smaller batch, or a larger data set"
                )
            ids = self._tokenizer.encode(text).astype(np.int64)
            if not self._first:
                ids = np.concatenate((np.array(self._tokenizer.separator, dtype=np.int64), ids))
            self._first = False
            parts.append(ids)
            have += len(ids)
        joined = np.concatenate(parts)
        self._buffer = joined[length:].copy()
        self._next += 1
        return joined[:length]


class _Fetcher:
    """Reads a stream in a thread of its own, since nothing else can leave a read that hangs."""

    def __init__(self, open_at: Opener, position: int) -> None:
        self._items: queue.Queue[tuple[str | None, Any]] = queue.Queue(maxsize=8)
        self._closed = threading.Event()
        # A daemon: a read that hangs for ever must not keep the process alive.
        threading.Thread(target=self._run, args=(open_at, position), daemon=True).start()

    def next(self, timeout: float) -> tuple[str | None, Any]:
        """``(None, document)``, ``(None, _END)``, ``("failed", exception)`` or ``("stalled", None)``."""
        try:
            return self._items.get(timeout=timeout)
        except queue.Empty:
            return "stalled", None

    def close(self) -> None:
        self._closed.set()

    def _run(self, open_at: Opener, position: int) -> None:
        try:
            for document in open_at(position):
                if not self._put((None, document)):
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
