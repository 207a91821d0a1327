"""What Inductor keeps, made safe from other users and from processes that are killed (torch 2.13).

Inductor lets the compiler write a library under the name that others look for. A linker that is killed leaves an empty
file there, and whatever needs the library fails from then on; if it is one that tries what the processor can do,
kernels lose their vectors without a word. Its precompiled headers lie in torch's default directory whatever the user
chose.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import platform
import struct
import sys
import threading
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any

import filelock

from nsa_compile import compiler_cache

log = logging.getLogger("nsa_compile")

_mended: set[Path] = set()
_begun: set[Path] = set()


def prepare() -> Path:
    """Let Inductor keep what it compiles in `compiler_cache.directory`, whole files only, and return that.

    To be called before Inductor compiles. Broken files there are deleted, so that Inductor makes them again.
    """
    directory = compiler_cache.directory()
    _write_whole_files()
    _try_vectors_until_some_work()
    _keep_headers_in(header_directory(directory))
    if directory not in _mended:
        _mended.add(directory)
        _delete_broken(directory)
    return directory


def header_directory(compiled: Path) -> Path:
    """Where precompiled headers are kept in a directory for compiled programs; large, they serve any program."""
    return compiled / "precompiled_headers"


@functools.cache
def _write_whole_files() -> None:
    """Make Inductor's compiler write under another name and rename."""
    from torch._inductor.cpp_builder import CppBuilder

    original = CppBuilder.build

    @functools.wraps(original)
    def build(self: Any) -> None:
        target, output = self._target_file, self._output
        unfinished = f"{target}.{os.getpid()}.{threading.get_ident()}"
        self._target_file, self._output = unfinished, output.replace(target, unfinished)
        try:
            original(self)
            os.replace(unfinished, target)
        finally:
            self._target_file, self._output = target, output
            Path(unfinished).unlink(missing_ok=True)

    CppBuilder.build = build


@functools.cache
def _try_vectors_until_some_work() -> None:
    """Find the widest vectors that the processor and the compiler know, and look no further.

    Inductor compiles and loads trials of all that the processor has, up to ten of nearly a second each, and takes the
    widest that work; each process loads them once more (torch 2.13).
    """
    from torch._inductor import config, cpu_vec_isa

    all_that_work = cpu_vec_isa.valid_vec_isa_list

    @functools.cache
    def widest() -> list[Any]:
        of_processor = set(cpu_vec_isa.x86_isa_checker())
        known = (isa for isa in cpu_vec_isa.supported_vec_isa_list if set(str(isa).split()) <= of_processor)
        return list(itertools.islice(filter(None, known), 1))

    @functools.wraps(all_that_work)
    def list_vectors() -> list[Any]:
        chosen = config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
        return all_that_work() if chosen or platform.machine() not in ("x86_64", "AMD64") else widest()

    cpu_vec_isa.valid_vec_isa_list = list_vectors  # pyrefly: ignore[bad-assignment]


def _keep_headers_in(directory: Path) -> None:
    from torch._inductor import codecache

    if str(directory) != codecache._HEADER_DIR:
        codecache._HEADER_DIR = str(directory)
        codecache._HEADER_LOCK_DIR = str(directory / "locks")
        codecache._precompile_header.cache_clear()  # it remembers headers by where they were


def kept_header() -> str | None:
    """The header of Inductor's kernels, if it has been compiled; what ours include of torch takes half of their time.

    To compile it takes longer than to compile a kernel without it.
    """
    return _precompile_header() if any(header_directory(prepare()).glob("*.gch")) else None


def begin_header() -> None:
    """Start to compile the header of Inductor's kernels, unless it is kept.

    That takes 6 s, and Inductor does it when it has its first kernel, where everything waits for it: meanwhile the
    passes run, and Inductor traces and schedules.
    """
    directory = prepare()
    if directory not in _begun and not any(header_directory(directory).glob("*.gch")):
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        _begun.add(directory)
        pick_vec_isa()  # runs a compiler itself, and should do so once
        # Inductor's configuration lives in the context of the calling thread.
        threading.Thread(target=copy_context().run, args=(_compile_header_ahead,), name="header").start()


def _compile_header_ahead() -> None:
    try:
        _precompile_header()
    except Exception as error:  # Inductor meets the same, and says it where it matters
        log.debug("the header of Inductor's kernels was not compiled ahead: %s", error)


def _precompile_header() -> str:
    """Where the header is, once it is compiled."""
    from torch._inductor import codecache
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # Inductor's own arguments, in its order: with others it is another header, or looked for again.
    options: dict[str, Any] = {
        "min_optimize": False,
        **codecache.CppPythonBindingsCodeCache.cpp_compile_command_flags,
        "device_type": "cpu",
        "extra_flags": (),
        "use_relative_path": False,
        "vec_isa": pick_vec_isa(),
    }
    line = CppBuilder(name="o", sources="i", BuildOption=CppTorchDeviceOptions(**options)).get_command_line()
    return codecache._precompile_header(codecache._get_cpp_prefix_header("cpu"), line, **options)


def broken_files(directory: Path) -> Iterator[Path]:
    """What a killed compiler or linker has left half-written in a directory of Inductor's."""
    for path in (*directory.glob("*/*.so"), *directory.glob("*/*.o"), *header_directory(directory).glob("*.gch")):
        if _is_cut_off(path):
            yield path


def _is_cut_off(path: Path) -> bool:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(64)
    except OSError:
        return False
    if not size:
        return True
    if path.suffix == ".gch" or sys.platform != "linux":
        return False
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return True
    # The table of sections is the last that a linker writes: where it begins, and its entries' size and number.
    start, (entry, number) = struct.unpack_from("=Q", header, 40)[0], struct.unpack_from("=HH", header, 58)
    return header[4] == 2 and start + entry * number > size


def _delete_broken(directory: Path) -> None:
    deleted = []
    for path in list(broken_files(directory)):
        group = path.parent if path.parent == header_directory(directory) else directory
        lock = filelock.FileLock(group / "locks" / f"{path.name.partition('.')[0]}.lock", timeout=0)
        # Who holds the lock is writing the file.
        with contextlib.suppress(filelock.Timeout, OSError), lock:
            if _is_cut_off(path):
                path.unlink()
                deleted.append(path.name)
    if deleted:
        log.warning(
            "%d half-written files of a killed compiler were deleted from '%s', such as %s; they are made again",
            len(deleted), directory, deleted[0],
        )  # fmt: skip
