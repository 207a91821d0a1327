"""Places that commands are to write to."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest

from nsa_compile.arguments import check_directory, check_file, check_new_directory, writing
from nsa_compile.errors import UserError


def test_places_that_can_be_written(tmp_path):
    (tmp_path / "page.html").touch()
    check_file(tmp_path / "page.html")
    check_file(tmp_path / "new.html")
    check_directory(tmp_path)
    check_directory(tmp_path / "new")


@pytest.mark.parametrize(
    ("check", "place", "reason", "kind"),
    [
        (check_file, "", "it is a directory", "FILE"),
        (check_file, "nowhere/page.html", "'{root}/nowhere' is not a directory", "FILE"),
        (check_file, "file/page.html", "'{root}/file' is not a directory", "FILE"),
        (check_directory, "file", "it is no directory", "DIR"),
        (check_directory, "nowhere/out", "'{root}/nowhere' is not a directory", "DIR"),
    ],
)
def test_other_places_are_refused_in_one_line(tmp_path, check, place, reason, kind):
    (tmp_path / "file").touch()
    path = tmp_path / place
    with pytest.raises(UserError) as error:
        check(path)
    why = reason.format(root=tmp_path)
    assert str(error.value) == f"nothing can be written to '{path}': {why}; choose another place with --out {kind}"


@pytest.mark.parametrize(("check", "kind"), [(check_file, "FILE"), (check_directory, "DIR")])
def test_a_parent_without_permission_is_refused(tmp_path, monkeypatch, check, kind):
    def fail(dir):  # root may write anywhere
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("tempfile.TemporaryFile", fail)
    with pytest.raises(UserError, match=f"'{tmp_path}' cannot be written to: Permission denied; .* --out {kind}$"):
        check(tmp_path / "new")


@pytest.mark.parametrize("check", [check_file, check_directory, check_new_directory])
def test_where_nothing_can_be_made_is_found_by_trying(check):
    with pytest.raises(UserError, match=r"^nothing can be written to '/proc/new': '/proc' cannot be written to: "):
        check(Path("/proc/new"))


@pytest.mark.parametrize("check", [check_directory, check_new_directory, partial(check_directory, parents=True)])
def test_a_link_to_nothing_is_no_place_for_a_directory(tmp_path, check):
    (tmp_path / "link").symlink_to("/nowhere/x")
    with pytest.raises(UserError, match=f"'{tmp_path}/link' is a link to '/nowhere/x', which does not exist; choose"):
        check(tmp_path / "link")


def test_parents_may_be_made(tmp_path):
    check_directory(tmp_path / "a" / "b", parents=True)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_one_line_that_names_the_place():
    said = r"written to 'page\.html': No space left on device; .* --out FILE$"
    with pytest.raises(UserError, match=said), writing(Path("page.html"), "FILE"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
