"""Standard output and error that outlive their readers: a run does not die with the pipe or terminal it talks to."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TextIO

STDOUT = "/dev/stdout"  # what an OSError of standard output names
# A pipe without a reader, a connection that was closed, a terminal that is gone.
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EIO)


def outlive_readers() -> None:
    """Let this process continue in silence when its standard output or error has lost its reader."""
    sys.stdout = _outliving(sys.stdout, 1)
    sys.stderr = _outliving(sys.stderr, 2)


class _Outliving(io.FileIO):
    """A descriptor that is turned to ``/dev/null`` when its reader is gone; children that start later inherit that."""

    def write(self, data: object) -> int:
        try:
            return super().write(data)  # pyrefly: ignore[bad-argument-type]
        except OSError as error:
            if error.errno not in _GONE:
                error.filename = STDOUT if self.fileno() == 1 else "/dev/stderr"  # or nobody knows which file it was
                raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return super().write(data)  # pyrefly: ignore[bad-argument-type]


def _outliving(stream: TextIO, descriptor: int) -> TextIO:
    """The stream of a descriptor, made so; one that a test or a caller has put in its place is left alone."""
    if not isinstance(stream, io.TextIOWrapper) or isinstance(getattr(stream.buffer, "raw", None), _Outliving):
        return stream
    try:
        if stream.fileno() != descriptor:
            return stream
    except (OSError, ValueError):  # closed, or nothing that has one
        return stream
    stream.flush()
    buffered = io.BufferedWriter(_Outliving(descriptor, "w", closefd=False))
    return io.TextIOWrapper(
        buffered,
        encoding=stream.encoding,
        errors=stream.errors,
        # A stream that Python leaves unbuffered writes through, and has no line to wait for.
        line_buffering=stream.line_buffering or stream.write_through,
    )
