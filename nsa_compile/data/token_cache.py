"""Tokens of local files, made once and kept in a memory-mapped file.

A cache is a directory ``<name>-<key>`` with ``tokens.bin``, the plain little-endian ids, and ``header.json``. The key
digests tokenizer, text field and the files with their sizes and times, so a change of any of them makes another cache.
It is written under another name, flushed to the disk and renamed: a kill leaves nothing that could be taken for one. A
lock makes a second process wait for the first instead of repeating its work. Nothing here is needed again once the
files are: any directory may be deleted.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import filelock
import numpy as np
import numpy.typing as npt
import platformdirs
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

from nsa_compile.config import DataSection
from nsa_compile.data.documents import chunks, find_files, read_documents
from nsa_compile.data.tokenizers import Tokenizer, make_tokenizer
from nsa_compile.errors import UserError
from nsa_compile.files import flush, open_regular, replace

TOKENS, HEADER = "tokens.bin", "header.json"
# Chunks whose place is remembered for verification; at least half as many in a cache that has them.
MAX_SAMPLES = 256
# A header has a line or four for each file of the text; one this long is none.
MAX_HEADER_BYTES = 1 << 26

Size = Annotated[int, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SourceFile(_Record):
    """A file as it was when it was read."""

    path: str
    size: Size
    mtime_ns: int


class Recipe(_Record):
    """Everything the tokens depend on; the key of a cache is a digest of it."""

    format: Literal[1] = 1
    tokenizer: str
    text_field: str
    sources: list[SourceFile]

    def key(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode("utf-8")).hexdigest()[:16]


class Sample(_Record):
    """Where the tokens of the ``chunk``-th chunk of the text begin."""

    chunk: Size
    start: Size


class Header(_Record):
    """What a cache holds; ``text_bytes`` is the text in UTF-8, without separators."""

    recipe: Recipe
    dtype: Literal["uint8", "uint16", "uint32"]
    tokens: Size
    documents: Size
    chunks: Size
    text_bytes: Size
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    samples: Annotated[list[Sample], Field(max_length=MAX_SAMPLES)]


@dataclass(frozen=True)
class TokenCache:
    """A finished cache.

    Attributes:
        tokens: the ids ``[N]``, mapped from the file, not read.
        built: whether it was made just now.
    """

    directory: Path
    header: Header
    tokens: npt.NDArray[np.integer]
    built: bool


class Damaged(Exception):
    """A cache that is not what its header says; the message is the reason."""


def open_cache(data: DataSection) -> TokenCache:
    """The tokens of the files of ``data.name``, tokenized now if they are not yet.

    Raises:
        UserError: the files cannot be read, or the cache cannot be written.
    """
    recipe = _recipe(data)
    directory = _cache_directory(data, recipe)
    if directory.exists():
        # Without the lock, so that a cache in a directory that cannot be written can be used.
        with suppress(Damaged):
            return TokenCache(directory, *_open(directory, recipe), built=False)
    with _writing(directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory):
            if directory.exists():
                try:
                    return TokenCache(directory, *_open(directory, recipe), built=False)
                except Damaged as error:
                    print(f"cache '{directory}' is damaged ({error}): making it again", file=sys.stderr)
            _build(directory, recipe)
            return TokenCache(directory, *_open(directory, recipe), built=True)


def verify_cache(data: DataSection) -> TokenCache:
    """Hash the whole cache of ``data.name`` and tokenize samples of the files again.

    Raises:
        UserError: there is no cache, or it differs from its header or from the files.
    """
    recipe = _recipe(data)
    directory = _cache_directory(data, recipe)
    if not directory.exists():
        raise UserError(
            f"data.name = '{data.name}' has no cache '{directory}': it was never made, or a file has changed since; "
            "make it with nsa-compile data prepare"
        )
    try:
        header, tokens = _open(directory, recipe)
        _check_hash(directory, header)
        _check_samples(header, tokens)
    except Damaged as error:
        raise UserError(
            f"cache '{directory}' is damaged: {error}; delete the directory and run nsa-compile data prepare"
        ) from None
    return TokenCache(directory, header, tokens, built=False)


def _build(directory: Path, recipe: Recipe) -> None:
    """Tokenize the files of a recipe into `directory`; what was there before is replaced.

    Raises:
        UserError: a file cannot be read, or changes while it is.
        OSError: the cache cannot be written.
    """
    # Only the holder of the lock writes here, so whatever lies here was left by a killed one.
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    try:
        header = _write_tokens(unfinished / TOKENS, recipe)
        if _describe_sources([Path(source.path) for source in recipe.sources]) != recipe.sources:
            raise UserError(
                f"the files of '{directory.name}' changed while they were read; try again when they are done"
            )
        replace(unfinished / HEADER, (header.model_dump_json(indent=2) + "\n").encode(), durable=True)
        flush(unfinished)
        if directory.exists():
            shutil.rmtree(directory)
        unfinished.rename(directory)
        flush(directory.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _recipe(data: DataSection) -> Recipe:
    return Recipe(
        tokenizer=data.tokenizer, text_field=data.text_field, sources=_describe_sources(find_files(data.name))
    )


def _describe_sources(files: list[Path]) -> list[SourceFile]:
    described = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error.strerror}; name a readable file") from None
        described.append(SourceFile(path=str(path.absolute()), size=status.st_size, mtime_ns=status.st_mtime_ns))
    return described


def _cache_directory(data: DataSection, recipe: Recipe) -> Path:
    parent = Path(data.cache_dir) if data.cache_dir else platformdirs.user_cache_path("nsa-compile")
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(data.name).absolute().name).strip("-")[:40]
    return parent / f"{stem or 'text'}-{recipe.key()}"


@contextmanager
def _writing(parent: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"data.cache_dir = '{parent}' must be a directory that can be written: {error.strerror or error}; "
            "choose another with --set data.cache_dir=PATH"
        ) from None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    lock = filelock.FileLock(directory.with_name(directory.name + ".lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        print(f"waiting for another process that is making '{directory}'", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _open(directory: Path, recipe: Recipe) -> tuple[Header, npt.NDArray[np.integer]]:
    try:
        with open_regular(directory / HEADER) as file:
            if os.fstat(file.fileno()).st_size > MAX_HEADER_BYTES:
                raise Damaged(f"{HEADER} is larger than {MAX_HEADER_BYTES:,} bytes")
            header = Header.model_validate_json(file.read())
        with open_regular(directory / TOKENS) as file:
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise Damaged(f"{Path(error.filename or directory).name}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise Damaged(f"{HEADER}: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
    if header.recipe != recipe:
        raise Damaged(f"{HEADER} is of other files")
    dtype = np.dtype(header.dtype).newbyteorder("<")
    if size != header.tokens * dtype.itemsize:
        raise Damaged(f"{TOKENS} has {size} bytes, not {header.tokens * dtype.itemsize}")
    if not header.tokens:  # nothing cannot be mapped
        return header, np.empty(0, dtype)
    return header, np.memmap(directory / TOKENS, dtype, mode="r")


def _write_tokens(path: Path, recipe: Recipe) -> Header:
    tokenizer = make_tokenizer(recipe.tokenizer)
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    digest = hashlib.sha256()
    tokens = text_bytes = documents = count = 0
    samples = _Samples()
    with path.open("wb") as file:

        def write(ids: npt.NDArray[np.integer]) -> None:
            nonlocal tokens
            packed = ids.astype(dtype.newbyteorder("<")).tobytes()
            file.write(packed)
            digest.update(packed)
            tokens += len(ids)

        with tqdm(
            total=sum(source.size for source in recipe.sources),
            desc="tokenizing",
            unit="B",
            unit_scale=True,
            disable=None,  # silent where stderr is no terminal
            file=sys.stderr,
        ) as bar:

            def progress(read: int) -> None:
                bar.update(read - bar.n)

            for document, chunk in _chunks(recipe, tokenizer, progress):
                if document > documents:
                    if documents:
                        write(np.array(tokenizer.separator))
                    documents = document
                samples.add(count, tokens)
                write(tokenizer.encode(chunk))
                text_bytes += len(chunk.encode("utf-8"))
                count += 1
        file.flush()
        os.fsync(file.fileno())
    return Header(
        recipe=recipe,
        dtype=str(dtype),  # pyrefly: ignore[bad-argument-type]
        tokens=tokens,
        documents=documents,
        chunks=count,
        text_bytes=text_bytes,
        sha256=digest.hexdigest(),
        samples=samples.kept,
    )


def _chunks(recipe: Recipe, tokenizer: Tokenizer, progress: Callable[[int], None]) -> Iterator[tuple[int, str]]:
    """Chunks of all files, in order, with the number of their document, from 1 on."""
    number = before = 0
    for source in recipe.sources:

        def read_so_far(read: int, before: int = before) -> None:
            progress(before + read)

        for document in read_documents(Path(source.path), recipe.text_field, read_so_far):
            number += 1
            for chunk in chunks(document, tokenizer.boundary):
                yield number, chunk
        before += source.size


class _Samples:
    """Chunks evenly spread over a text whose length is not known before its end."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []
        self._stride = 1

    def add(self, chunk: int, start: int) -> None:
        if chunk % self._stride:
            return
        if len(self.kept) == MAX_SAMPLES:
            self._stride *= 2
            self.kept = self.kept[::2]
        if chunk % self._stride == 0:
            self.kept.append(Sample(chunk=chunk, start=start))


def _check_hash(directory: Path, header: Header) -> None:
    with open_regular(directory / TOKENS) as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != header.sha256:
        raise Damaged(f"{TOKENS} has the SHA-256 {found}, not {header.sha256}")


def _check_samples(header: Header, tokens: npt.NDArray[np.integer]) -> None:
    tokenizer = make_tokenizer(header.recipe.tokenizer)
    places = {sample.chunk: sample.start for sample in header.samples}
    count = documents = text_bytes = 0
    for count, (documents, chunk) in enumerate(_chunks(header.recipe, tokenizer, lambda read: None), start=1):
        text_bytes += len(chunk.encode("utf-8"))
        start = places.pop(count - 1, None)
        if start is None:
            continue
        expected = tokenizer.encode(chunk)
        if not np.array_equal(tokens[start : start + len(expected)], expected):
            raise Damaged(f"the tokens from {start} on are not those of document {documents}")
    if places or (count, documents, text_bytes) != (header.chunks, header.documents, header.text_bytes):
        raise Damaged(
            f"the files have {documents} documents and {text_bytes} bytes of text, "
            f"not {header.documents} and {header.text_bytes}"
        )
