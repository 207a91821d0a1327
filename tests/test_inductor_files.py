"""A compiler that is killed leaves nothing that a later process would load: neither kernels of ours nor Inductor's."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import filelock
import pytest
import torch

import nsa_compile
from nsa_compile import backend, inductor_files
from nsa_compile.files import read_sealed, write_sealed
from nsa_compile.inductor_files import broken_files
from nsa_compile.ops import cpp

SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """`kernels()`: a small library as an operator's is got, from a directory of the test's."""
    monkeypatch.setattr(cpp, "_source", lambda operator: SOURCE)
    directory = cpp.kernel_directory(tmp_path / "cache")

    def obtain() -> int:
        return cpp._obtain("window", directory).answer()

    obtain.directory = directory
    return obtain


@pytest.fixture
def told(caplog):
    """`told()`: the warnings since the last call."""
    caplog.set_level(logging.WARNING, "nsa_compile")

    def lines():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return lines


def only_library(directory) -> Path:
    (path,) = directory.glob("*.so")
    return path


def no_compiler(*_, **__):
    raise AssertionError("it was kept, and compiled again")


@pytest.mark.deep
def test_a_kernel_is_compiled_once(kernels, monkeypatch, told):
    assert kernels() == 42
    read_sealed(only_library(kernels.directory))
    monkeypatch.setattr(cpp, "_build", no_compiler)
    assert kernels() == 42
    assert told() == []


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    path.write_bytes(b"")


def flip(path):
    """Into a library that loads, and computes something else."""
    content = bytearray(path.read_bytes())
    content[content.index(b"\x2a\x00\x00\x00")] = 43
    path.write_bytes(content)


def zero(path):
    path.write_bytes(bytes(path.stat().st_size))


def open_to_all(path):
    path.chmod(0o777)


def give_away(path):
    if os.geteuid() != 0:
        pytest.skip("giving files away takes root")
    os.chown(path, 65534, -1)


def put_pipe(path):
    path.unlink()
    os.mkfifo(path)


def link(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def keep_no_library(path):
    """As sealed as a library, and none that this system loads."""
    write_sealed(path, b"a library of another system")


@pytest.mark.deep
@pytest.mark.parametrize("damage", [cut, empty, flip, zero, open_to_all, give_away, put_pipe, link, keep_no_library])
def test_a_kernel_that_is_not_as_it_was_kept_is_compiled_again(damage, kernels, monkeypatch, told):
    assert kernels() == 42
    # Elsewhere: a process that has loaded a library does not look at the file again.
    elsewhere = shutil.copytree(kernels.directory, kernels.directory.with_name("elsewhere"))
    damage(only_library(elsewhere))
    assert cpp._obtain("window", elsewhere).answer() == 42
    assert "cannot be used" in told()[0]
    monkeypatch.setattr(cpp, "_build", no_compiler)
    assert cpp._obtain("window", elsewhere).answer() == 42
    assert told() == []


@pytest.mark.deep
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_kernel_that_cannot_be_kept_serves_its_process(number, kernels, monkeypatch, told):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(cpp, "write_sealed", refuse)
        assert kernels() == 42
    (line,) = told()
    assert os.strerror(number) in line
    assert not list(kernels.directory.glob("*.so"))
    assert kernels() == 42


@pytest.mark.deep
def test_a_directory_in_the_place_of_a_kernel_is_no_error(kernels, told):
    assert kernels() == 42
    path = only_library(kernels.directory)
    path.unlink()
    path.mkdir()
    assert kernels() == 42
    assert "Is a directory" in told()[-1]


def test_who_waits_for_another_takes_what_that_one_made(kernels, monkeypatch):
    assert kernels() == 42
    path = only_library(kernels.directory)
    away = path.rename(path.with_name("away"))

    class Made(filelock.FileLock):
        def acquire(self, *args, **kwargs):
            away.rename(path)
            return super().acquire(*args, **kwargs)

    monkeypatch.setattr(filelock, "FileLock", Made)
    monkeypatch.setattr(cpp, "_build", no_compiler)
    assert kernels() == 42


@pytest.mark.deep
def test_a_lock_that_nobody_gives_back_is_not_waited_for_for_ever(kernels, monkeypatch):
    monkeypatch.setattr(cpp, "_LONGEST_BUILD_S", 0.1)
    assert kernels() == 42
    path = only_library(kernels.directory)
    path.unlink()
    holder = "import filelock, sys, time; filelock.FileLock(sys.argv[1]).acquire(); print('held', flush=True); input()"
    words = [sys.executable, "-c", holder, str(path.with_suffix(".lock"))]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert kernels() == 42
        process.stdin.close()


# A compiler that gives its output the name that was asked for, tells so, and then takes its time.
SLOW_COMPILER = """
    #!/bin/sh
    for word in "$@"; do
        case "$last $word" in
            "-o "*kernel.so*|"-o "*.main.so*) : > "$word"; touch "{told}"; exec sleep 600;;
        esac
        last="$word"
    done
    exec {compiler} "$@"
"""
PROGRAM = """
    import sys
    from torch._inductor import cpu_vec_isa
    cpu_vec_isa.pick_vec_isa = lambda: cpu_vec_isa.invalid_vec_isa  # or the compiler would be called to find it out
    from nsa_compile import inductor_files
    from nsa_compile.ops import cpp
    source = 'extern "C" int answer() { return 42; }'
    directory = inductor_files.prepare()
    if sys.argv[1] == "ours":
        cpp._source = lambda operator: source
        library = cpp._obtain("window", cpp.kernel_directory(directory))
    else:
        from torch._inductor.codecache import CppCodeCache
        library = CppCodeCache.load(source)
    print(library.answer())
"""


@pytest.mark.deep
@pytest.mark.parametrize("whose", ["ours", "inductor"])
def test_a_compiler_that_is_killed_leaves_nothing_that_is_loaded(whose, tmp_path):
    slow, told, cache = tmp_path / "bin" / "g++", tmp_path / "told", tmp_path / "cache"
    slow.parent.mkdir()
    slow.write_text(textwrap.dedent(SLOW_COMPILER).lstrip().format(told=told, compiler=shutil.which("g++")))
    slow.chmod(0o755)
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), whose]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TMPDIR": str(tmp_path)}
    environment.pop("CXX", None)

    path = f"{slow.parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(program, env=environment | {"PATH": path}, start_new_session=True)
    try:
        end = time.monotonic() + 120
        while not told.exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    (left,) = tmp_path.glob("**/*.so*")
    assert not left.read_bytes(), "what a killed linker leaves"
    assert list(cache.glob("**/*.so")) == []

    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["42"]
    assert done.stderr == ""


# --------------------------------------------------------------------- what processes of other programs have left there


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("library")
    source = folder / "answer.cpp"
    source.write_text(SOURCE)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", folder / "answer.so"], check=True)
    subprocess.run(["g++", "-c", source, "-o", folder / "answer.o"], check=True)
    return folder


def test_half_written_files_are_told_from_whole_ones(library, tmp_path):
    folder = tmp_path / "ab"
    folder.mkdir()
    for suffix in (".so", ".o"):
        whole = (library / f"answer{suffix}").read_bytes()
        (folder / f"whole{suffix}").write_bytes(whole)
        for size in (0, 10, 63, 64, len(whole) // 2, len(whole) - 1):
            (folder / f"{size}{suffix}").write_bytes(whole[:size])
        (folder / f"zeros{suffix}").write_bytes(bytes(len(whole)))
    headers = tmp_path / "precompiled_headers"
    headers.mkdir()
    (headers / "a.h.gch").write_bytes(b"")
    (headers / "b.h.gch").write_bytes(b"gpch")
    kept = {path.name for path in (*folder.iterdir(), *headers.iterdir())} - {p.name for p in broken_files(tmp_path)}
    assert kept == {"whole.so", "whole.o", "b.h.gch"}


def test_half_written_files_are_deleted_unless_they_are_being_written(library, tmp_path, monkeypatch, told):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for name in ("ab/cabc.main.so", "ab/cabd.so", "precompiled_headers/cabe.h.gch"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    shutil.copy(library / "answer.so", tmp_path / "ab" / "whole.so")
    (tmp_path / "locks").mkdir()
    with filelock.FileLock(tmp_path / "locks" / "cabd.lock"):
        inductor_files.prepare()
    assert {path.name for path in tmp_path.glob("*/*") if path.suffix != ".lock"} == {"cabd.so", "whole.so", "locks"}
    (line,) = told()
    assert line.startswith("2 half-written files")
    ctypes.CDLL(str(tmp_path / "ab" / "whole.so"))


def test_precompiled_headers_are_not_in_torchs_default_directory(tmp_path, monkeypatch):
    from torch._inductor import codecache

    for name in ("a", "b"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        inductor_files.prepare()
        assert str(tmp_path / name / "precompiled_headers") == codecache._HEADER_DIR
        assert str(tmp_path / name / "precompiled_headers" / "locks") == codecache._HEADER_LOCK_DIR


@pytest.mark.deep
def test_kernels_are_compiled_with_the_header_of_inductors(tmp_path, monkeypatch):
    from torch._inductor import codecache

    with torch._inductor.config.patch(force_disable_caches=True):
        torch.compile(lambda x: x.sin() + 1)(torch.ones(9))
    before = codecache._precompile_header.cache_info().misses
    header = inductor_files.kept_header()
    assert codecache._precompile_header.cache_info().misses == before, "it is another one"
    source = tmp_path / "kernel.cpp"
    source.write_text(cpp._source("window"))
    command = cpp._builder(str(source), str(tmp_path), header=header).get_command_line()
    seen = subprocess.run([*shlex.split(command), "-H", "-fsyntax-only"], capture_output=True, text=True, check=True)
    assert f"! {header}.gch" in seen.stderr.splitlines(), "the compiler reads the text"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "empty"))
    assert inductor_files.kept_header() is None, "to compile one takes longer than a kernel"


def test_the_header_is_compiled_beside_the_passes(tmp_path, monkeypatch, caplog):
    began, compiles = [], threading.Event()

    def compile_header():
        began.append(threading.current_thread())
        compiles.wait(60)
        raise RuntimeError("no compiler")

    def begun_by(nested):
        nsa_compile.compile(lambda x: x + 1, nested=nested)(torch.ones(3))
        return began

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(inductor_files, "_precompile_header", compile_header)
    monkeypatch.setattr(backend, "compile_nested", lambda gm, *args, **options: gm.forward)
    assert not begun_by("aot_eager"), "Inductor compiles nothing here"
    (thread,) = begun_by("inductor")
    assert thread is not threading.current_thread()
    assert begun_by("inductor") == [thread], "it is compiled once"
    with caplog.at_level("DEBUG", "nsa_compile"):
        compiles.set()
        thread.join()
    assert "no compiler" in caplog.text
    inductor_files._begun.clear()
    headers = inductor_files.header_directory(tmp_path)
    headers.mkdir()
    (headers / "kept.h.gch").touch()
    assert begun_by("inductor") == [thread], "it is kept"


@pytest.mark.deep
def test_no_processes_for_triton_are_started_for_a_program_of_the_cpu():
    program = """
import nsa_compile, torch
from torch._inductor.async_compile import AsyncCompile
nsa_compile.compile(lambda x: x.sin() + 1)(torch.ones(9))
print(AsyncCompile.process_pool.cache_info().currsize)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"]


def test_a_compilation_that_fails_leaves_the_builder_as_it_was(tmp_path):
    from torch._inductor.cpp_builder import CppBuilder, CppOptions
    from torch._inductor.exc import CppCompileError

    inductor_files.prepare()
    (tmp_path / "bad.cpp").write_text("no program")
    builder = CppBuilder("bad", str(tmp_path / "bad.cpp"), CppOptions(), str(tmp_path))
    before = builder.get_command_line()
    with pytest.raises(CppCompileError):
        builder.build()
    assert builder.get_command_line() == before
    (tmp_path / "bad.cpp").write_text(SOURCE)
    builder.build()
    assert ctypes.CDLL(builder.get_target_file_path()).answer() == 42
    assert sorted(path.name for path in tmp_path.glob("*.so*")) == ["bad.so"]


class Vectors:
    """A set of instructions as Inductor has them: named by flags of processors, true if a trial of it works."""

    def __init__(self, flags: str, works: bool, tried: list[str]):
        self.flags, self.works, self.tried = flags, works, tried

    def __str__(self):
        return self.flags

    def __bool__(self):
        self.tried.append(self.flags)
        return self.works


@pytest.mark.parametrize(
    ("working", "found", "tried"),
    [
        ("avx512 amx_tile, avx512, avx2", "avx512 amx_tile", ["avx512 amx_tile"]),
        ("avx512, avx2", "avx512", ["avx512 amx_tile", "avx512"]),
        ("", None, ["avx512 amx_tile", "avx512", "avx2"]),
    ],
)
def test_vectors_are_tried_until_some_work(working, found, tried, monkeypatch):
    from torch._inductor import config, cpu_vec_isa

    trials: list[str] = []
    known = [Vectors(flags, flags in working.split(", "), trials) for flags in ("avx512 amx_tile", "avx512", "avx2")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Vectors("avx10", True, trials), *known])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2", "avx512", "amx_tile"])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: ["all that work"])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    inductor_files._try_vectors_until_some_work.__wrapped__()
    for _ in range(2):
        assert [str(vectors) for vectors in cpu_vec_isa.valid_vec_isa_list()] == ([found] if found else [])
    assert trials == tried
    with config.patch({"cpp.simdlen": 256}):
        assert cpu_vec_isa.valid_vec_isa_list() == ["all that work"], "the width is chosen among them"
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert cpu_vec_isa.valid_vec_isa_list() == ["all that work"]
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu_vec_isa.valid_vec_isa_list() == ["all that work"]


def test_the_vectors_are_those_that_inductor_takes():
    from torch._inductor import cpu_vec_isa

    inductor_files.prepare()
    ours = cpu_vec_isa.pick_vec_isa()
    theirs = cpu_vec_isa.valid_vec_isa_list.__wrapped__()  # all that work, from the widest
    assert ours == next(iter(theirs), cpu_vec_isa.invalid_vec_isa)
