"""Documents of local files: plain text, JSON lines and Parquet, read piece by piece whatever their size.

The files come from anywhere: whatever is wrong with one is an error that names file and place.
"""

from __future__ import annotations

import codecs
import difflib
import gzip
import importlib.util
import itertools
import json
import re
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nsa_compile.config import BUILT_IN
from nsa_compile.errors import UserError
from nsa_compile.files import open_regular

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".parquet")
# Read at once, in bytes.
BLOCK = 1 << 20
# A line of JSON, or a text without a place to cut it, may not be longer; memory stays bounded by it.
MAX_LENGTH = 1 << 26
PARQUET_ROWS = 256

# A document: its text in pieces, in order. It is read before the next document is asked for.
Document = Iterable[str]


def find_files(name: str, option: str = "") -> list[Path]:
    """The files that ``data.name`` stands for: itself, or those of a directory, sorted by name, without subdirectories.

    Args:
        option: what named it, if not the key of the configuration.

    Raises:
        UserError: there is no such file, or none of a readable kind.
    """
    path = Path(name)
    kinds = ", ".join(SUFFIXES)
    files = [path]
    if path.is_dir():
        files = [each for each in sorted(path.iterdir()) if _readable_kind(each) and not each.is_dir()]
        reason = f"the directory holds no file that ends in {kinds}"
    elif path.exists():
        reason = f"its name must end in {kinds}"
    else:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        if option:
            raise UserError(f"{option} '{name}' does not exist; give another with {option} PATH")
        raise UserError(
            f"data.name = '{name}' is no data set: there is no such file or directory, and the built-in ones are "
            f"{', '.join(BUILT_IN)}{hint or '; correct it in the file or with --set data.name=VALUE'}"
        )
    if not all(map(_readable_kind, files)) or not files:
        given, another = (option, f"{option} ") if option else ("data.name =", "--set data.name=")
        raise UserError(f"{given} '{name}' is no data set: {reason}; choose another with {another}PATH")
    for file in files:
        # Whoever opens a pipe waits for a writer; a device has no end.
        if file.exists() and not file.is_file():
            raise UserError(f"'{file}' cannot be read: it is not a regular file; name one that is, or copy it to one")
    return files


def read_documents(path: Path, text_field: str, progress: Callable[[int], None]) -> Iterator[Document]:
    """The documents of a file: a whole text, the lines of JSON, or the rows of Parquet; empty ones are left out.

    Args:
        path: the file.
        text_field: key or column of the text, for JSON and Parquet.
        progress: told now and then how many bytes of the file are read.

    Raises:
        UserError: the file cannot be read as what its name says.
    """
    if path.name.endswith(".parquet"):
        for text in _parquet(path, text_field, progress):
            if text:
                yield (text,)
        return
    with _told_as_user_errors(path), open_regular(path, follow=True) as raw:
        # A GzipFile reads like the file; progress counts what is read of the file itself.
        file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        if ".jsonl" in path.suffixes[-2:]:
            for text in _json_lines(path, file, text_field):
                progress(raw.tell())
                if text:
                    yield (text,)
        else:
            pieces = _decoded(path, _blocks(file, raw, progress))
            first = next(pieces, None)
            if first is not None:
                yield itertools.chain((first,), pieces)


def chunks(document: Document, boundary: re.Pattern[str], size: int = BLOCK) -> Iterator[str]:
    """A document in chunks of `size` characters and a little more, cut only where `boundary` matches, at its end.

    Raises:
        UserError: there is no such place for a long time.
    """
    buffer, searched = "", size
    for piece in document:
        buffer += piece
        while found := boundary.search(buffer, searched) if searched <= len(buffer) else None:
            yield buffer[: found.end()]
            buffer, searched = buffer[found.end() :], size
        if len(buffer) > MAX_LENGTH:
            raise UserError(
                f"a document has no space or line break in {len(buffer):,} characters, too many for this tokenizer; "
                "put some in, or take --set data.tokenizer=byte"
            )
        # The last character may be the first half of a boundary.
        searched = max(size, len(buffer) - 1)
    if buffer:
        yield buffer


def _readable_kind(path: Path) -> bool:
    return path.name.endswith(SUFFIXES) and not path.name.startswith(".")


@contextmanager
def _told_as_user_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"'{path}' is no whole gzip file: {error}; compress or copy it again") from None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror or error}; name a readable file") from None


def _blocks(file: IO[bytes], raw: IO[bytes], progress: Callable[[int], None]) -> Iterator[bytes]:
    while block := file.read(BLOCK):
        progress(raw.tell())
        yield block


def _decoded(path: Path, blocks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    lines = read = 0
    # Here too: whoever reads the document pulls the pieces, not read_documents.
    with _told_as_user_errors(path):
        for block in itertools.chain(blocks, (b"",)):
            begun = len(decoder.getstate()[0])  # bytes of a character that the block before ended in
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                line = 1 + lines + error.object.count(b"\n", 0, error.start)
                place, byte = read - begun + error.start, error.object[error.start]
                raise UserError(
                    f"line {line} of '{path}' is not UTF-8 text (byte 0x{byte:02x} at position {place}); "
                    "convert the file to UTF-8"
                ) from None
            lines, read = lines + block.count(b"\n"), read + len(block)
            if text:
                yield text


def json_rows(path: Path) -> Generator[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, compressed or not, with the numbers of their lines.

    Raises:
        UserError: a line is none; it names the file and the line.
    """
    with _told_as_user_errors(path), open_regular(path, follow=True) as raw:
        yield from _rows(path, gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw)


def _json_lines(path: Path, file: IO[bytes], text_field: str) -> Iterator[str]:
    for number, row in _rows(path, file):
        if text_field not in row:
            raise UserError(_no_field(f"line {number} of '{path}'", text_field, row))
        yield _text(row[text_field], f"line {number} of '{path}'", text_field)


def _rows(path: Path, file: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    while line := file.readline(MAX_LENGTH + 1):
        number += 1
        if len(line) > MAX_LENGTH:
            raise UserError(f"line {number} of '{path}' must not exceed {MAX_LENGTH:,} bytes; split the document")
        if line.isspace():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"line {number} of '{path}' is not JSON: {error}; correct or remove it") from None
        if not isinstance(row, dict):
            raise UserError(f"line {number} of '{path}' must be a JSON object with a text; correct or remove it")
        yield number, row


def _parquet(path: Path, text_field: str, progress: Callable[[int], None]) -> Iterator[str]:
    if importlib.util.find_spec("pyarrow") is None:
        raise UserError(f"'{path}' needs the package pyarrow; install the data extra: pip install 'nsa-compile[data]'")
    import pyarrow
    import pyarrow.parquet

    try:
        size = path.stat().st_size
        with open_regular(path, follow=True) as raw, pyarrow.parquet.ParquetFile(raw) as file:
            if text_field not in file.schema_arrow.names:
                raise UserError(_no_field(f"'{path}'", text_field, file.schema_arrow.names))
            row = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_field]):
                for value in batch.column(0):
                    row += 1
                    yield _text(value.as_py(), f"row {row} of '{path}'", text_field)
                progress(size * row // file.metadata.num_rows)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"'{path}' cannot be read as Parquet: {reason}; make or copy it again") from None


def _text(value: Any, where: str, text_field: str) -> str:
    if not isinstance(value, str):
        raise UserError(
            f"{where}: the field '{text_field}' must be a text, not {type(value).__name__}; "
            "correct it, or name another field with --set data.text_field=NAME"
        )
    try:
        # JSON can spell half of a character, which is no text and has no bytes.
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UserError(
            f"{where}: the text holds a lone surrogate, half of a character; correct or remove it"
        ) from None
    return value


def _no_field(where: str, text_field: str, fields: Iterable[str]) -> str:
    names = ", ".join(f"'{name}'" for name in fields) or "none"
    if len(names) > 200:
        names = names[:200] + "…"
    return f"{where} has no field '{text_field}' (its fields: {names}); name one with --set data.text_field=NAME"
