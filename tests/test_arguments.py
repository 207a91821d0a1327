"""Places that commands are to write to."""

from __future__ import annotations

import pytest

from nsa_compile.arguments import check_directory, check_file
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
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    with pytest.raises(UserError, match=f"'{tmp_path}' cannot be written to; .* --out {kind}$"):
        check(tmp_path / "new")
