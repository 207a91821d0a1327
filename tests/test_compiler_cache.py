"""Compiled programs are kept where nobody else can plant one; a place that will not do is left alone, with one line."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch._inductor.exc import CppCompileError

from nsa_compile import compiler_cache
from nsa_compile.compiler_cache import VARIABLE, default_directory, directory, torch_default, unsafe
from nsa_compile.errors import UserError, user_facing

SOMEBODY_ELSE = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    """A cache directory of the user's that is the test's, and nothing chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def warnings(caplog):
    """`warnings()`: the lines that were told since the last call."""
    caplog.set_level(logging.WARNING, "nsa_compile")

    def lines() -> list[str]:
        told = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return told

    return lines


def test_without_a_choice_it_is_the_users_own_directory(tmp_path, warnings):
    found = directory()
    assert found == default_directory()
    assert found.is_relative_to(tmp_path / "home" / "nsa-compile")
    for path in (found, *found.parents):
        if path == tmp_path:
            break
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert os.environ[VARIABLE] == str(found), "torch and other processes take the same"
    assert directory() == found
    assert warnings() == []


def test_torchs_default_is_nobodys_choice(monkeypatch, warnings):
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    assert torch_default() == default_cache_dir()
    monkeypatch.setenv(VARIABLE, torch_default())  # torch does so itself when it is imported
    assert directory() == default_directory()
    assert warnings() == []


CPUINFO = "processor\t: 0\nmodel name\t: A\ncpu MHz\t\t: 2000\nflags\t\t: fpu avx2\n\nprocessor\t: 1\n"


def test_machines_that_share_a_home_share_programs_only_if_they_run_them(monkeypatch):
    def name(cpuinfo):
        monkeypatch.setattr(Path, "read_text", lambda path, **_: cpuinfo)
        return compiler_cache.machine_name.__wrapped__()

    names = {name(CPUINFO), name(CPUINFO.replace("avx2", "avx2 avx512f")), name(CPUINFO.replace(": A", ": B"))}
    assert len(names) == 3
    assert name(CPUINFO.replace("2000", "2345").replace("processor\t: 1\n", "")) in names
    monkeypatch.undo()
    assert default_directory().name == compiler_cache.machine_name()


def test_what_the_user_chose_is_taken(tmp_path, monkeypatch, warnings):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "mine/../mine")
    assert directory() == tmp_path / "mine"
    assert os.environ[VARIABLE] == str(tmp_path / "mine")
    assert warnings() == []


def make_mode(mode):
    def make(path: Path) -> Path:
        path.mkdir()
        path.chmod(mode)
        return path

    return make


def make_in_a_directory_for_all(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path / "cache"


def make_of_another(path: Path) -> Path:
    path.mkdir()
    os.chown(path, SOMEBODY_ELSE, -1)
    return path


def make_below_another(path: Path) -> Path:
    make_of_another(path)
    return path / "cache"


def make_of_another_in_a_sticky_directory(path: Path) -> Path:
    """As in /tmp, where somebody was first."""
    make_mode(0o1777)(path)
    return make_of_another(path / "torchinductor")


def make_for_a_shared_group(path: Path) -> Path:
    path.mkdir()
    os.chown(path, -1, SOMEBODY_ELSE)  # the group of "nobody", as it is nobody's but his
    path.chmod(0o775)
    return path / "cache"


def make_link_into_hands_of_another(path: Path) -> Path:
    make_of_another(path.with_name("theirs"))
    path.symlink_to("theirs")
    return path / "cache"


def make_link_of_another(path: Path) -> Path:
    path.with_name("mine").mkdir()
    path.symlink_to(path.with_name("mine"))
    os.chown(path, SOMEBODY_ELSE, -1, follow_symlinks=False)
    return path


def make_link_to_a_directory_for_all(path: Path) -> Path:
    make_mode(0o777)(path.with_name("for_all"))
    path.symlink_to("../" + path.parent.name + "/for_all")
    return path


def make_circle(path: Path) -> Path:
    path.symlink_to(path.name)
    return path


def make_with_something_planted(path: Path) -> Path:
    make_of_another(make_mode(0o700)(path) / "fxgraph")
    return path


def make_with_an_open_directory(path: Path) -> Path:
    make_mode(0o777)(make_mode(0o755)(path) / "fxgraph")
    return path


UNSAFE = [
    pytest.param(make_mode(0o777), "can be written to by others", id="for all"),
    pytest.param(make_mode(0o770), "can be written to by others", id="for the group"),
    pytest.param(make_mode(0o1777), "can be written to by others", id="sticky"),
    pytest.param(make_in_a_directory_for_all, "can be written to by others", id="in a directory for all"),
    pytest.param(make_link_to_a_directory_for_all, "can be written to by others", id="link to a directory for all"),
    pytest.param(make_circle, "circle of links", id="circle"),
    pytest.param(make_with_an_open_directory, "fxgraph' can be written to by others", id="with an open directory"),
    pytest.param(make_of_another, "belongs to user", id="of another", marks=as_root),
    pytest.param(make_below_another, "belongs to user", id="below another", marks=as_root),
    pytest.param(make_of_another_in_a_sticky_directory, "belongs to user", id="as in /tmp", marks=as_root),
    pytest.param(make_for_a_shared_group, "can be written to by others", id="in a group's", marks=as_root),
    pytest.param(make_link_into_hands_of_another, "belongs to user", id="link into others' hands", marks=as_root),
    pytest.param(make_link_of_another, "belongs to user", id="link of another", marks=as_root),
    pytest.param(make_with_something_planted, "belongs to user", id="with something planted", marks=as_root),
]


@pytest.mark.parametrize(("make", "reason"), UNSAFE)
def test_a_directory_that_others_can_change_is_left_alone(make, reason, tmp_path, monkeypatch, warnings):
    chosen = make(tmp_path / "chosen")
    before = sorted(tmp_path.rglob("*"))
    assert reason in (unsafe(chosen) or "")
    monkeypatch.setenv(VARIABLE, str(chosen))
    assert directory() == default_directory()
    assert directory() == Path(os.environ[VARIABLE]) == default_directory()
    (line,) = warnings()
    assert reason in line
    assert "\n" not in line
    assert str(default_directory()) in line
    assert VARIABLE in line
    assert [path for path in sorted(tmp_path.rglob("*")) if "home" not in str(path)] == before


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_that_others_can_only_read_is_taken(mode, tmp_path):
    assert unsafe(make_mode(mode)(tmp_path / "chosen")) is None


def test_a_directory_of_ones_own_in_one_for_all_is_taken_where_that_is_sticky(tmp_path):
    assert unsafe(make_mode(0o700)(make_mode(0o1777)(tmp_path / "tmp") / "mine")) is None


def test_a_group_of_ones_own_is_not_others(tmp_path, monkeypatch):
    """As systems with umask 002 make them."""
    above = make_mode(0o775)(tmp_path / "above")
    monkeypatch.setattr(compiler_cache, "_shared", lambda group: False)
    assert unsafe(above / "cache") is None
    monkeypatch.setattr(compiler_cache, "_shared", lambda group: True)
    assert "above' can be written to by others" in unsafe(above / "cache")


def test_links_of_ones_own_are_followed(tmp_path):
    (tmp_path / "large_disk").mkdir(mode=0o700)
    (tmp_path / "relative").symlink_to("./large_disk/../large_disk")
    (tmp_path / "absolute").symlink_to(tmp_path / "relative")
    assert unsafe(tmp_path / "absolute" / "cache") is None


@as_root
def test_somebody_elses_home_is_left_for_a_directory_that_goes_with_the_process(tmp_path, monkeypatch, warnings):
    make_of_another(tmp_path / "home")
    found = directory()
    assert found.parent == Path(tempfile.gettempdir())
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    (line,) = warnings()
    assert "home' belongs to user" in line
    assert "until this process ends" in line
    found.rmdir()


def test_the_temporary_directory_goes_with_its_process(tmp_path):
    script = "import os; from nsa_compile.compiler_cache import directory; print(directory(), directory().is_dir())"
    environment = {**os.environ, "XDG_CACHE_HOME": "/dev/null/none", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    name, there = done.stdout.split()
    assert there == "True"
    assert len(done.stderr.splitlines()) == 1
    assert not Path(name).exists()


def test_no_place_at_all_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/none")
    monkeypatch.setenv(VARIABLE, "/dev/null/neither")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(UserError, match=r"no place for compiled programs: .*neither.*none.*No space left"):
        directory()


def test_a_place_where_nothing_can_be_kept_is_left(tmp_path, monkeypatch, warnings):
    room = os.statvfs(tmp_path)
    chosen = tmp_path / "chosen"

    def refused(reason):
        monkeypatch.setenv(VARIABLE, str(chosen))
        compiler_cache._settled.discard(str(chosen))
        assert directory() == default_directory()
        (line,) = warnings()
        assert reason in line

    class Changed:
        def __init__(self, **changes):
            self.changes = changes

        def __getattr__(self, name):
            return self.changes.get(name, getattr(room, name))

    def at_chosen(**changes):
        return lambda path: Changed(**changes) if Path(path) == chosen else room

    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", at_chosen(f_bavail=3, f_frsize=2**20))
        refused("3 MB left")
        patch.setattr(os, "statvfs", at_chosen(f_flag=os.ST_NOEXEC))
        refused("noexec")
    chosen = tmp_path / "two words"
    refused("a space")


def test_a_full_disk_and_one_that_is_read_only(tmp_path, monkeypatch, warnings):
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        for remount in (None, "remount,ro"):
            if remount:
                subprocess.run(["mount", "-o", remount, str(small)], check=True)
            monkeypatch.setenv(VARIABLE, str(small / "cache" if remount is None else small))
            assert directory() == default_directory()
            (line,) = warnings()
            assert ("Read-only file system" if remount else "0 MB left") in line
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.parametrize(
    ("cause", "known"),
    [
        (lambda _: OSError(errno.ENOSPC, "No space left on device", "/elsewhere"), True),
        (lambda _: RuntimeError("C++ compile error\n\nerror writing: No space left on device\n"), True),
        (lambda name: OSError(f"{name}/ab/kernel.so: file too short"), True),
        (lambda name: ImportError(f"dlopen {name}/ab/kernel.so failed"), True),
        (lambda _: OSError("/usr/lib/libfoo.so: no such file"), False),
        (lambda name: ValueError(f"{name}"), False),
    ],
)
def test_an_error_of_the_files_names_their_directory(cause, known):
    cause = cause(directory())
    wrapped = RuntimeError("while compiling")
    wrapped.inner_exception = cause
    with pytest.raises(Exception) as caught, compiler_cache.errors_named():  # noqa: PT011
        raise wrapped
    assert (caught.type is UserError) == known
    if known:
        assert str(directory()) in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("a.cpp:1: error: no\ncompilation terminated.\n", "a.cpp:1: error: no"),
        ("note: one\nKilled\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_a_compiler_that_fails_is_named_with_its_last_line(output, line):
    wrapped = RuntimeError("while compiling")
    wrapped.inner_exception = CppCompileError(["my-g++", "-O3"], output)
    said = f"^the C\\+\\+ compiler 'my-g\\+\\+' failed: {line}; mend it, or point CXX at another compiler$"
    with pytest.raises(UserError, match=said), compiler_cache.errors_named():
        raise wrapped


def test_an_error_for_the_user_is_found_in_torchs_own():
    inner, outer = UserError("one line"), RuntimeError("backend raised")
    outer.inner_exception = inner
    assert user_facing(inner) is inner
    assert user_facing(outer) is inner
    assert user_facing(RuntimeError("backend raised")) is None
