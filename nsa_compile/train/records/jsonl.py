"""Files of JSON objects, one a line, that are written by processes that may be killed and read while they grow."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nsa_compile.files import open_regular, open_to_append

# No row of ours comes near; what is longer, in a file that somebody else wrote, is passed over.
MAX_ROW_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 22


class JsonlWriter:
    """Appends rows to a file, each with one ``write``: a killed process leaves at most one half row, the last.

    A half row that another process left is closed by a line end before the first row of this one.

    Raises:
        OSError: the file cannot be opened, or (by ``append``) not be written to.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = open_to_append(path)
        size = os.fstat(self._descriptor).st_size
        self._whole = size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n"
        self._lock = threading.Lock()

    def append(self, row: dict[str, Any]) -> None:
        """Write ``row``; numbers that are not finite, which JSON lacks, become the strings ``nan``, ``inf``, ``-inf``.

        Raises:
            ValueError: the row takes more than 64 KiB.
        """
        line = json.dumps(to_json(row), allow_nan=False).encode() + b"\n"
        if len(line) > MAX_ROW_BYTES:
            raise ValueError(f"a row of {len(line)} bytes must not exceed {MAX_ROW_BYTES}")
        with self._lock:
            data = line if self._whole else b"\n" + line
            self._whole = False
            self._whole = os.write(self._descriptor, data) == len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class JsonlReader:
    """Reads what has been added to a file since the last time.

    Nothing in the file is trusted: a line that is no object, too long or not finished is passed over, and a path that
    is no regular file reads as empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The new rows, up to the size that the file has now; a file that shrank is read from its beginning."""
        try:
            file = open_regular(self.path)
        except (OSError, ValueError):
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            if size < self._offset:
                self._offset = 0
            while self._offset < size:
                file.seek(self._offset)
                chunk = file.read(min(_CHUNK_BYTES, size - self._offset))
                whole = chunk.rfind(b"\n") + 1
                if not whole:
                    if len(chunk) <= MAX_ROW_BYTES:
                        return  # a row that is being written
                    whole = len(chunk)  # part of something endless
                self._offset += whole
                for line in chunk[:whole].split(b"\n"):
                    row = _parse(line)
                    if row is not None:
                        yield row


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line or len(line) > MAX_ROW_BYTES:
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # broken UTF-8 and endless integers are ValueErrors
        return None
    return row if isinstance(row, dict) else None


def to_json(value: Any) -> Any:
    """A value as JSON can hold it: keys are strings, and numbers that are not finite are, too."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return value
