"""Files in a directory that anybody may have written: no link is followed, no pipe waited for."""

from __future__ import annotations

import os
import socket

import pytest

from nsa_compile.files import (
    NotPlainFile,
    create,
    make_directory,
    open_regular,
    open_to_append,
    refuse_links,
    replace,
    what_became_of,
)

VICTIM = b"of somebody else\n"


@pytest.fixture
def victim(tmp_path):
    """A file outside of the directory that is written to."""
    path = tmp_path / "victim"
    path.write_bytes(VICTIM)
    return path


@pytest.fixture
def place(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    return directory / "file"


def link(place, victim):
    place.symlink_to(victim)


def dangling(place, victim):
    place.symlink_to(victim.with_name("not there yet"))


def pipe(place, victim):
    os.mkfifo(place)


def device(place, victim):
    place.symlink_to("/dev/zero")


def unix_socket(place, victim):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))


def directory(place, victim):
    place.mkdir()


STRANGERS = [link, dangling, pipe, device, unix_socket, directory]


@pytest.mark.parametrize("plant", STRANGERS)
@pytest.mark.parametrize("opened", [create, open_to_append, open_regular])
def test_what_is_no_plain_file_is_refused_by_name(place, victim, plant, opened):
    plant(place, victim)
    with pytest.raises(OSError, match=r".") as error:
        opened(place)
    assert error.value.filename == str(place)
    assert "\n" not in error.value.strerror
    assert victim.read_bytes() == VICTIM
    assert not victim.with_name("not there yet").exists()


def test_a_file_with_two_names_is_not_appended_to(place, victim):
    os.link(victim, place)
    with pytest.raises(NotPlainFile, match="by a hard link"):
        open_to_append(place)
    assert victim.read_bytes() == VICTIM
    with create(place) as file:  # which makes a file of its own
        file.write(b"x")
    assert victim.read_bytes() == VICTIM


@pytest.mark.parametrize("plant", [link, dangling, pipe, unix_socket])
def test_a_file_that_is_replaced_leaves_alone_what_was_in_its_place(place, victim, plant):
    plant(place, victim)
    replace(place, b"new")
    assert place.read_bytes() == b"new"
    assert not place.is_symlink()
    assert victim.read_bytes() == VICTIM


@pytest.mark.parametrize("plant", [link, pipe])
def test_the_temporary_name_of_a_file_that_is_replaced_may_be_planted_too(place, victim, plant):
    plant(place.with_name(f".{place.name}.{os.getpid()}"), victim)
    with pytest.raises(NotPlainFile):
        replace(place, b"new")
    assert victim.read_bytes() == VICTIM


def test_what_a_killed_process_left_makes_way(place):
    place.write_bytes(b"half")
    with create(place) as file:
        file.write(b"whole")
    assert place.read_bytes() == b"whole"


def test_a_directory_is_not_a_link_to_one(place, tmp_path):
    make_directory(place)
    make_directory(place)
    place.rmdir()
    place.symlink_to(tmp_path)
    with pytest.raises(NotPlainFile, match="symbolic link"):
        make_directory(place)


def test_what_a_user_names_may_be_a_link_but_no_pipe(place, victim):
    place.symlink_to(victim)
    with open_regular(place, follow=True) as file:
        assert file.read() == VICTIM
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(NotPlainFile, match="not a regular file"):
        open_regular(place, follow=True)


def test_links_in_a_directory_are_found_before_anything_is_opened(place, victim):
    refuse_links(place.parent)
    os.mkfifo(place.with_name("a"))
    refuse_links(place.parent)
    with pytest.raises(NotPlainFile, match="not a regular file"):
        refuse_links(place.parent, and_pipes=True)
    dangling(place, victim)
    with pytest.raises(NotPlainFile, match="symbolic link") as error:
        refuse_links(place.parent)
    assert error.value.filename == str(place)


def test_an_open_file_knows_what_became_of_its_name(place):
    descriptor = open_to_append(place)
    assert what_became_of(place, descriptor) is None
    place.rename(place.with_name("moved"))
    assert what_became_of(place, descriptor) == f"was moved to '{place.with_name('moved')}'"
    place.write_bytes(b"another file of this name")
    assert what_became_of(place, descriptor) == f"was moved to '{place.with_name('moved')}'"
    place.with_name("moved").unlink()
    assert what_became_of(place, descriptor) == "was deleted"
    os.close(descriptor)


def test_a_full_disk_names_the_file(place, no_room):
    with no_room(), pytest.raises(OSError, match="File too large") as error:
        replace(place, bytes(1000))
    assert error.value.filename == str(place)
    assert list(place.parent.iterdir()) == []
