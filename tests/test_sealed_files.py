"""Files that are believed only as they were written, by their own user."""

from __future__ import annotations

import errno
import os
import stat
import threading

import pytest

from nsa_compile.files import make_private, read_sealed, write_sealed


def read_within_ten_seconds(path):
    """`read_sealed`, which a pipe without a writer must not hold up; the exception where it raises."""
    outcome = []

    def read():
        try:
            outcome.append(read_sealed(path))
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


@pytest.fixture
def sealed(tmp_path):
    path = tmp_path / "made" / "for" / "it"
    write_sealed(path, b"content")
    return path


@pytest.mark.parametrize("content", [b"", b"content", os.urandom(10_000)])
def test_what_was_written_comes_back(content, tmp_path):
    path = tmp_path / "a" / "b"
    write_sealed(path, b"something else")
    write_sealed(path, content)
    assert read_sealed(path) == content
    assert [entry.name for entry in path.parent.iterdir()] == ["b"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_every_flipped_bit_and_every_cut_is_seen(sealed):
    whole = sealed.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            changed = bytearray(whole)
            changed[place] ^= 1 << bit
            sealed.write_bytes(changed)
            with pytest.raises(ValueError, match="SHA-256"):
                read_sealed(sealed)
        sealed.write_bytes(whole[:place])
        with pytest.raises(ValueError, match="SHA-256"):
            read_sealed(sealed)
    sealed.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match="SHA-256"):
        read_sealed(sealed)


def test_what_is_no_file_of_ones_own_is_not_read(sealed):
    kept = sealed.with_name("kept")
    sealed.rename(kept)
    assert isinstance(read_within_ten_seconds(sealed), FileNotFoundError)
    sealed.symlink_to(kept)
    assert isinstance(read_within_ten_seconds(sealed), OSError)
    sealed.unlink()
    sealed.mkdir()
    assert "regular" in str(read_within_ten_seconds(sealed))
    sealed.rmdir()
    os.mkfifo(sealed)
    assert "regular" in str(read_within_ten_seconds(sealed))
    sealed.unlink()
    kept.rename(sealed)
    assert read_within_ten_seconds(sealed) == b"content"
    for mode in (0o620, 0o602):
        sealed.chmod(mode)
        assert "others can write" in str(read_within_ten_seconds(sealed))
    sealed.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(sealed, 65534, -1)
        assert "belongs to user 65534" in str(read_within_ten_seconds(sealed))


def test_a_write_that_fails_leaves_what_was_there(sealed, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_sealed(sealed, b"other")
    assert read_sealed(sealed) == b"content"
    assert [entry.name for entry in sealed.parent.iterdir()] == ["it"]


def test_directories_are_made_private_whatever_the_umask(tmp_path):
    old = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
