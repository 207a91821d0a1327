"""Streams of documents: each document once, in order, through failures and restarts, and never a silent stall."""

from __future__ import annotations

import itertools
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.data.streaming import DocumentStream, PackedDocuments, open_dataset
from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.errors import UserError

TEXTS = [f"Document {number}." for number in range(40)]


def opener(texts=TEXTS):
    return lambda position: ({"text": text} for text in texts[position:])


@given(st.integers(0, 40), st.integers(1, 6))
def test_ranks_read_every_document_exactly_once(count, world_size):
    shares = [
        list(DocumentStream("x", opener(TEXTS[:count]), rank=rank, world_size=world_size)) for rank in range(world_size)
    ]
    assert sorted(itertools.chain(*shares)) == sorted(TEXTS[:count])
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(0, 39), st.integers(1, 4))
def test_a_saved_position_goes_on_where_the_other_stopped(taken, world_size):
    first = DocumentStream("x", opener(), rank=0, world_size=world_size)
    whole = list(DocumentStream("x", opener(), rank=0, world_size=world_size))
    reader = iter(first)
    seen = list(itertools.islice(reader, min(taken, len(whole) - 1)))
    next(reader)  # the one in hand is not done with
    rest = list(DocumentStream("x", opener(), rank=0, world_size=world_size, position=first.position))
    assert seen + rest == whole


def test_a_source_that_fails_twice_loses_and_repeats_nothing():
    failures = iter([3, 7])

    def open_at(position):
        limit = next(failures, 1000)
        for number in range(position, len(TEXTS)):
            if number >= limit:
                raise ConnectionError("reset by peer")
            yield {"text": TEXTS[number]}

    assert list(DocumentStream("x", open_at, retries=1, backoff=0.001)) == TEXTS


def test_a_source_that_always_fails_is_an_error_after_its_retries(capsys):
    opened = []

    def open_at(position):
        opened.append(position)
        raise ConnectionError("no route\nto host")

    with pytest.raises(UserError, match=r"'x' cannot be read after 3 tries \(ConnectionError: no route to host\)"):
        list(DocumentStream("x", open_at, retries=2, backoff=0.001))
    assert opened == [0, 0, 0]
    assert capsys.readouterr().err.count("trying again in 0.00") == 2


def test_a_source_that_stalls_is_an_error_in_time():
    def open_at(position):
        yield {"text": "one"}
        threading.Event().wait()

    stream = iter(DocumentStream("x", open_at, timeout=0.2))
    assert next(stream) == "one"
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"no document within 0\.2 s \(document 1\)"):
        next(stream)
    assert time.perf_counter() - start < 2


def test_slow_reading_is_no_stall():
    reader = iter(DocumentStream("x", opener(), timeout=0.2))
    next(reader)
    time.sleep(0.4)
    assert list(reader) == TEXTS[1:]


@pytest.mark.parametrize("document", [{"body": "x"}, {"text": None}, "x"])
def test_a_document_without_text_is_an_error(document):
    with pytest.raises(UserError, match="document 0 of 'x' has no text in 'text'"):
        list(DocumentStream("x", lambda position: [document]))


@given(st.lists(st.text("abc", max_size=9), min_size=1), st.integers(1, 7), st.integers(0, 12))
def test_sequences_are_the_documents_and_their_separators(texts, length, index):
    whole = "\n\n".join(texts).encode()
    source = PackedDocuments(lambda: texts, ByteTokenizer())
    if (index + 1) * length > len(whole):
        with pytest.raises(UserError, match="the stream of documents ended"):
            source.sequence(index, length)
        return
    expected = whole[index * length : (index + 1) * length]
    # Straight to it, after the others, and once more from the start: always the same.
    assert bytes(source.sequence(index, length).tolist()) == expected
    assert np.concatenate([source.sequence(i, length) for i in range(index + 1)]).tolist() == list(
        whole[: (index + 1) * length]
    )


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_the_real_loader_streams_local_files(tmp_path, kind):
    pytest.importorskip("datasets")
    if kind == "json":
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps({"text": text, "score": 3.1}) + "\n" for text in TEXTS), encoding="utf-8")
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        path = tmp_path / "a.parquet"
        parquet.write_table(pyarrow.table({"text": TEXTS, "score": [3.1] * len(TEXTS)}), path)
    open_at = open_dataset(path=kind, data_files=str(path), cache_dir=str(tmp_path / "cache"))
    assert list(DocumentStream("x", open_at)) == TEXTS
    assert list(DocumentStream("x", open_at, position=5, rank=1, world_size=3)) == TEXTS[7::3]


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"nsa-compile\[data\]"):
        open_dataset()
