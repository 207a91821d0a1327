"""Where compiled programs are kept between processes: results of the passes, kernels, and what Inductor keeps.

All of it is code that a later process runs. So it lies in a directory that nobody but this user and root can change,
and never in torch's default, whose name in the system's temporary folder anybody can take first.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import getpass
import grp
import hashlib
import logging
import os
import platform
import pwd
import re
import shlex
import shutil
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nsa_compile.errors import UserError
from nsa_compile.files import make_private, trusted_owners

log = logging.getLogger("nsa_compile")

# torch reads it whenever it needs its directory, and so do the processes that this one starts.
VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
ADVICE = f"point {VARIABLE} at a directory that only you can write to, with room"
# One precompiled header of Inductor's takes 160 MB; without this room a compilation would end half-way.
LEAST_ROOM = 2**28
_MOST_LINKS = 40  # as in Linux

_settled: set[str] = set()  # values of VARIABLE that were examined


def directory() -> Path:
    """Where this process and those it starts keep compiled programs; it exists, and VARIABLE names it.

    It is the directory that the user named with VARIABLE, or else `default_directory`. One that others can change, or
    that nothing can be written to, is left alone, and a warning says so; the next takes its place, at last a temporary
    one that goes with this process.

    Raises:
        UserError: not even a temporary directory can be made.
    """
    named = os.environ.get(VARIABLE, "")
    if named not in _settled:
        named = os.environ[VARIABLE] = str(_choose())
        _settled.add(named)
    return Path(named)


def candidates() -> list[Path]:
    """The directories to keep compiled programs in, the first choice first.

    What VARIABLE names is one, unless that is torch's default: torch itself sets it to that when it is imported.
    """
    named = os.environ.get(VARIABLE)
    chosen = [Path(os.path.abspath(named))] if named and os.path.abspath(named) != torch_default() else []
    return [*chosen, default_directory()]


def default_directory() -> Path:
    """In the user's directory for caches, which machines may share, one for each kind of processor."""
    try:
        from platformdirs import user_cache_path
    except ImportError:  # the kernels of the GPU benchmark are used where little is installed
        base = Path.home() / ".cache" / "nsa-compile"
    else:
        base = user_cache_path("nsa-compile")
    return base.absolute() / "compiled" / machine_name()


def torch_default() -> str:
    """What torch takes where VARIABLE is not set (`torch._inductor.runtime.cache_dir_utils`); torch stays out."""
    try:
        user = getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        user = f"uid_{os.getuid()}"
    sanitized = re.sub(r'[\\/:*?"<>|]', "_", user)
    return os.path.join(tempfile.gettempdir(), f"torchinductor_{sanitized}")


@cache
def machine_name() -> str:
    """A digest of what kernels are compiled for (`-march=native`): the processor and the C library."""
    processor = [platform.machine()]
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        # Of the first core; its clock and its number do not count.
        fields = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features", "CPU part")
        first = lines[: lines.index("")] if "" in lines else lines
        processor += [line for line in first if line.partition("\t")[0].strip(" :") in fields]
    return hashlib.sha256("\n".join([*processor, *platform.libc_ver()]).encode()).hexdigest()[:16]


def _choose() -> Path:
    complaints = []
    for path in candidates():
        problem = _take(path)
        if problem is None:
            break
        complaints.append(problem)
    else:
        path = _temporary(complaints)
    if complaints:
        until = "" if path == default_directory() else " until this process ends"
        log.warning(
            "%s; compiled programs are kept in '%s' instead%s: %s", " and ".join(complaints), path, until, ADVICE
        )
    return path


def _take(path: Path) -> str | None:
    """Make a directory the place for compiled programs, or say why it cannot be."""
    if problem := unsafe(path):
        return problem
    try:
        make_private(path)
    except OSError as error:
        return f"'{path}' cannot be written to: {error.strerror}"
    # Once more: in a directory for all, another may have made it a moment ago.
    return unsafe(path) or unusable(path)


def _temporary(complaints: list[str]) -> Path:
    try:
        path = Path(tempfile.mkdtemp(prefix="nsa-compile-"))
    except OSError as error:
        reasons = "; ".join([*complaints, f"no temporary directory can be made: {error.strerror}"])
        raise UserError(f"there is no place for compiled programs: {reasons}; {ADVICE}") from None
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # not at the end of a process that was forked
            shutil.rmtree(path, ignore_errors=True)

    atexit.register(remove)
    return path


# --------------------------------------------------------------------------------------------- who can change it


def unsafe(path: Path) -> str | None:
    """Why somebody else could put a file below `path`, in words; None where nobody but this user and root can.

    Every directory on the way counts, since who can change it decides what the next name stands for; links are followed
    one by one. What does not exist yet is as safe as what it would lie in.
    """
    here, rest, links = Path("/"), [*reversed(path.absolute().parts)], 0
    while rest:
        name = rest.pop()
        here = Path("/") if name == "/" else here.parent if name == ".." else here / name
        try:
            status = here.lstat()
        except FileNotFoundError:
            return None
        except OSError as error:
            return f"'{here}' cannot be looked at: {error.strerror}"
        if status.st_uid not in trusted_owners():
            return f"'{here}' belongs to {_user(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                return f"'{path}' is a circle of links"
            rest += reversed(Path(os.readlink(here)).parts)
            here = here.parent
        elif not stat.S_ISDIR(status.st_mode):  # nothing can lie below it
            return None
        elif _others_may_write(status, last=not rest):
            return f"'{here}' can be written to by others"
    return _planted(here)


def _others_may_write(status: os.stat_result, *, last: bool) -> bool:
    """Whether others can put files into a directory, or, if it is not the `last`, put another into its place."""
    if last:
        return bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    if status.st_mode & stat.S_ISVTX:  # there, nobody can rename or delete what is not his
        return False
    return bool(status.st_mode & stat.S_IWOTH) or bool(status.st_mode & stat.S_IWGRP and _shared(status.st_gid))


def _shared(group: int) -> bool:
    """Whether a group has members besides this user and root; many systems give each user a group of his own."""
    try:
        members = set(grp.getgrgid(group).gr_mem)
    except KeyError:
        return True
    for entry in pwd.getpwall():
        if entry.pw_uid in trusted_owners():
            members.discard(entry.pw_name)
        elif entry.pw_gid == group:
            return True
    return bool(members)


def _planted(path: Path) -> str | None:
    """What lies in a directory from a time when others could write to it, in words."""
    try:
        reachable = path.stat().st_mode & (stat.S_IXGRP | stat.S_IXOTH)
        entries = [(entry.path, entry.stat(follow_symlinks=False)) for entry in os.scandir(path)]
    except OSError as error:
        return f"'{path}' cannot be looked at: {error.strerror}"
    for name, status in entries:
        if status.st_uid not in trusted_owners():
            return f"'{name}' belongs to {_user(status.st_uid)}"
        if reachable and stat.S_ISDIR(status.st_mode) and _others_may_write(status, last=True):
            return f"'{name}' can be written to by others"
    return None


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


# ----------------------------------------------------------------------------------------------- whether it can be used


def unusable(path: Path) -> str | None:
    """Why compiled programs cannot be kept in a directory that exists, in words; None where they can."""
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Inductor locks what it writes; some network file systems cannot
        room = os.statvfs(path)
    except OSError as error:
        return f"'{path}' cannot be written to: {error.strerror}"
    if shlex.split(str(path)) != [str(path)]:
        return f"'{path}' has a space or a quote in its name, which Inductor does not quote for the compiler"
    free = room.f_bavail * room.f_frsize
    if room.f_blocks and free < LEAST_ROOM:
        return f"'{path}' has {free / 1e6:,.0f} MB left where {LEAST_ROOM / 1e6:,.0f} are needed"
    if room.f_flag & getattr(os, "ST_NOEXEC", 0):
        return f"'{path}' lies on a file system that runs no programs (noexec)"
    return None


@contextlib.contextmanager
def errors_named() -> Iterator[None]:
    """Inside this context, a compilation that fails for the files in `directory` raises one line that names it.

    So does one that fails for the C++ compiler: the line names that.

    Raises:
        UserError: a file there cannot be written, or what was read is no program; or the C++ compiler failed.
    """
    try:
        yield
    except Exception as error:
        causes = list(_causes(error))
        if reason := next(filter(None, map(_about_files, causes)), None):
            raise UserError(
                f"what is kept in '{directory()}' cannot be used: {reason}; make room there or delete it, or {ADVICE}"
            ) from error
        if reason := next(filter(None, map(_about_compiler, causes)), None):
            raise UserError(f"{reason}; mend it, or point CXX at another compiler") from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        yield error
        # torch's errors of compilation hold the one that they wrap.
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _about_compiler(error: BaseException) -> str | None:
    """That the C++ compiler failed, with its last line about an error, or its last; None for other errors."""
    from torch._inductor.exc import CppCompileError, InvalidCxxCompiler

    if isinstance(error, InvalidCxxCompiler):
        return f"the C++ compiler '{os.environ.get('CXX', 'g++')}' does not run"
    if not isinstance(error, CppCompileError):
        return None
    said = [line.strip() for line in str(error.output).splitlines() if line.strip()]
    last = ([line for line in said if "error" in line] or said or ["it said nothing"])[-1]
    return f"the C++ compiler '{error.cmd[0]}' failed: {last}"


def _about_files(error: BaseException) -> str | None:
    """The line of an error that reports a full disk (a compiler's too) or a broken library; None for other errors."""
    signs = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)]
    if isinstance(error, (OSError, ImportError)):
        signs.append(str(directory()))
    return next((line.strip() for line in str(error).splitlines() if any(sign in line for sign in signs)), None)
