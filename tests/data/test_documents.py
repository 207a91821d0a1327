"""Documents of files: what they hold, how they are cut, and what is said about files that are not what they seem."""

from __future__ import annotations

import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.data import documents
from nsa_compile.data.documents import chunks, find_files, read_documents
from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.errors import UserError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
# Words, and whatever a boundary could be mistaken for.
PROSE = st.lists(st.sampled_from(["a", "word", "don't", "3", " ", "  ", "\n", "\t", "\u3000", ".", "é"])).map("".join)


def texts(path, text_field="text"):
    return ["".join(document) for document in read_documents(path, text_field, lambda read: None)]


@given(st.lists(TEXT), st.integers(1, 20))
def test_chunks_are_the_document(pieces, size):
    found = list(chunks(pieces, ByteTokenizer.boundary, size))
    assert "".join(found) == "".join(pieces)
    assert all(len(chunk) == size for chunk in found[:-1])


@given(pieces=st.lists(PROSE | TEXT), size=st.integers(1, 20))
def test_chunks_have_the_tokens_of_the_whole(gpt2, pieces, size):
    text = "".join(pieces)
    found = list(chunks(pieces, gpt2.boundary, size))
    assert "".join(found) == text
    tokens = [token for chunk in found for token in gpt2.encode(chunk).tolist()]
    assert tokens == gpt2.encode(text).tolist()


def test_prose_is_cut(gpt2):
    assert list(chunks(["a word, ", "another one"], gpt2.boundary, 3)) == ["a word,", " another", " one"]


def test_text_without_a_place_to_cut_is_an_error_and_not_endless(gpt2, monkeypatch):
    monkeypatch.setattr(documents, "MAX_LENGTH", 100)
    with pytest.raises(UserError, match="no space or line break in 101 characters"):
        list(chunks(["x" * 101], gpt2.boundary, 10))
    assert "".join(chunks(["x" * 101], ByteTokenizer.boundary, 10)) == "x" * 101


@pytest.mark.parametrize("packed", [False, True])
def test_text_lines_and_rows_are_read_as_written(tmp_path, packed):
    stories = ["One.\r\nTwo.", "é" * 5, "", "[\u2028]"]
    rows = "".join(json.dumps({"text": story, "n": 1}) + "\n\n" for story in stories).encode()
    for name, content, expected in (
        ("a.txt", stories[0].encode(), stories[:1]),
        ("b.jsonl", rows, [story for story in stories if story]),
        ("empty.txt", b"", []),
    ):
        path = tmp_path / (name + ".gz" * packed)
        path.write_bytes(gzip.compress(content) if packed else content)
        assert texts(path) == expected


def test_parquet_is_read_row_by_row(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(documents, "PARQUET_ROWS", 2)
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "body": ["one", "", "drei ß"]}), path)
    assert texts(path, "body") == ["one", "drei ß"]
    with pytest.raises(UserError, match=r"has no field 'text' \(its fields: 'id', 'body'\)"):
        texts(path)
    with pytest.raises(UserError, match=r"row 1 of .*must be a text, not int"):
        texts(path, "id")


@given(st.lists(TEXT, max_size=5), st.integers(1, 7))
def test_a_text_comes_back_whatever_the_block(tmp_path_factory, lines, block):
    path = tmp_path_factory.mktemp("text") / "a.txt"
    content = "\n".join(lines)
    path.write_bytes(content.encode())
    before = documents.BLOCK
    documents.BLOCK = block
    try:
        assert "".join(texts(path)) == content
    finally:
        documents.BLOCK = before


def test_a_directory_is_its_readable_files_in_order(tmp_path):
    for name in ("b.txt", "a.jsonl.gz", "c.parquet", ".hidden.txt", "README.md", "a.txt~"):
        (tmp_path / name).touch()
    (tmp_path / "d.txt").mkdir()
    assert [path.name for path in find_files(str(tmp_path))] == ["a.jsonl.gz", "b.txt", "c.parquet"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.md", b"x", "its name must end in .txt, "),
        ("empty/", None, "holds no file that ends in .txt, "),
        ("missing.txt", None, "there is no such file or directory"),
        ("a.txt", b"ab\n\nc\xff", r"line 3 of .* is not UTF-8 text \(byte 0xff at position 5\); convert the file"),
        ("a.txt", b"ab\xc3", r"line 1 of .* is not UTF-8 text \(byte 0xc3 at position 2\)"),
        # Cut into blocks of 2 ** 20 bytes, within a character.
        ("a.txt", b"x\n" * 2**19 + b"\n\xc3", r"line 524290 of .* \(byte 0xc3 at position 1048577\)"),
        ("a.txt", b"x" * (2**20 - 1) + b"\xc3\n\xa9", r"line 1 of .* \(byte 0xc3 at position 1048575\)"),
        ("a.txt.gz", b"plain", "no whole gzip file"),
        # Without a time in it: the bytes name the test, which has to be called the same in every process.
        ("a.txt.gz", gzip.compress(b"word " * 1000, mtime=0)[:-12], "no whole gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:-4], "no whole gzip file"),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2 of .* is not JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1 of .* is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}', "line 1 of .* is not JSON"),
        ("a.jsonl", b"[1]", "must be a JSON object"),
        ("a.jsonl", b'{"body": "x"}', r"has no field 'text' \(its fields: 'body'\)"),
        ("a.jsonl", b'{"text": null}', "must be a text, not NoneType"),
        ("a.jsonl", b'{"text": "\\ud800"}', "lone surrogate"),
        ("a.parquet", b"PAR1 not at all", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_one_line(tmp_path, name, content, expected):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=expected) as error:
        [texts(file) for file in find_files(str(path))]
    assert "\n" not in str(error.value)


def test_a_line_that_would_fill_the_memory_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_LENGTH", 50)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "x" * 50}), encoding="utf-8")
    with pytest.raises(UserError, match=r"line 1 of .* must not exceed 50 bytes"):
        texts(path)


def test_a_misspelt_data_set_gets_a_suggestion():
    with pytest.raises(UserError, match="did you mean 'shakespeare'"):
        find_files("shakspeare")


def test_progress_ends_at_the_size_of_the_file(tmp_path):
    for name in ("a.txt", "a.txt.gz", "a.jsonl"):
        path = tmp_path / name
        content = b'{"text": "word"}\n' * 1000
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
        told: list[int] = []
        for document in read_documents(path, "text", told.append):
            "".join(document)
        assert told == sorted(told)
        assert told[-1] == path.stat().st_size


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
@pytest.mark.parametrize("within", [False, True], ids=["file", "directory"])
def test_a_pipe_is_not_waited_for(tmp_path, name, within):
    os.mkfifo(tmp_path / name)
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(UserError, match=f"{name}' cannot be read: it is not a regular file") as error:
        find_files(str(tmp_path if within else tmp_path / name))
    assert "\n" not in str(error.value)


def test_a_file_that_has_become_a_pipe_since_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UserError, match=r"a\.txt' cannot be read: it is not a regular file"):
        texts(tmp_path / "a.txt")


def test_a_link_to_a_file_is_a_file(tmp_path):
    (tmp_path / "a").write_text("text")
    (tmp_path / "link.txt").symlink_to("a")
    assert [texts(path) for path in find_files(str(tmp_path))] == [["text"]]
