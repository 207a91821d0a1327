"""``nsa-compile`` on streams with a fault.

From document N of every file but the first on, the stream hangs, fails (once in a process), or fails every time.
"""

from __future__ import annotations

import threading

from nsa_compile import cli
from nsa_compile.data import corpus


def main(fault: str, place: int, arguments: list[str]) -> None:
    """Run a command; `fault` is stall, fail or down, and `place` the N above."""
    real, failed = corpus.open_files, threading.Event()

    def disturbed(documents):
        for number, document in enumerate(documents):
            if number >= place and not failed.is_set():
                if fault == "stall":
                    threading.Event().wait()
                if fault == "fail":
                    failed.set()
                raise ConnectionError("a planted fault")
            yield document

    def open_files(files):
        open_from = real(files)

        def open_disturbed(first):
            for number, documents in enumerate(open_from(first), first):
                yield disturbed(documents) if number else documents

        return open_disturbed

    corpus.open_files = open_files
    cli.main(arguments)
