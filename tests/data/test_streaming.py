"""Streams of documents: each document once, in order, through failures and restarts, and never a silent stall."""

from __future__ import annotations

import itertools
import json
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.data import BatchSampler, Resumable, streaming
from nsa_compile.data.sampling import UniformBytes
from nsa_compile.data.streaming import DocumentStream, PackedDocuments, open_dataset, open_files
from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.errors import CheckpointError, UserError

TEXTS = [f"Document {number}." for number in range(40)]
SEPARATOR = "\n\n"


def opener(texts=TEXTS, per_file=7):
    """A stream of files of `per_file` documents each."""
    files = [texts[begin : begin + per_file] for begin in range(0, len(texts), per_file)]
    return lambda first: (({"text": text} for text in file) for file in files[first:])


def texts_of(stream):
    return [text for _, text in stream]


def places(texts, per_file=7):
    """An ``open_documents`` of :class:`PackedDocuments`."""
    return lambda place: DocumentStream("x", opener(texts, per_file), place=place)


@given(st.integers(0, 39), st.integers(1, 9))
def test_a_saved_place_goes_on_where_the_other_stopped(taken, per_file):
    first = DocumentStream("x", opener(per_file=per_file))
    reader = iter(first)
    seen = texts_of(itertools.islice(reader, taken))
    next(reader)  # the one in hand is not done with
    assert seen + texts_of(DocumentStream("x", opener(per_file=per_file), place=first.place)) == TEXTS


def test_a_place_opens_its_own_file_and_none_before():
    opened = []

    def open_from(first):
        opened.append(first)
        return opener()(first)

    assert texts_of(DocumentStream("x", open_from, place=(3, 2))) == TEXTS[23:]
    assert opened == [3]


def test_a_source_that_fails_twice_loses_and_repeats_nothing():
    failures = iter([3, 17])

    def open_from(first):
        limit = next(failures, 1000)
        for number, file in enumerate(opener()(first), first):

            def documents(number=number, file=file):
                for row, document in enumerate(file):
                    if 7 * number + row >= limit:
                        raise ConnectionError("reset by peer")
                    yield document

            yield documents()

    assert texts_of(DocumentStream("x", open_from, retries=1, backoff=0.001)) == TEXTS


def test_a_source_that_always_fails_is_an_error_after_its_retries(capsys):
    opened = []

    def open_from(first):
        opened.append(first)
        raise ConnectionError("no route\nto host")

    with pytest.raises(UserError, match=r"'x' cannot be read after 3 tries .*; ConnectionError: no route to host\)"):
        list(DocumentStream("x", open_from, retries=2, backoff=0.001))
    assert opened == [0, 0, 0]
    assert capsys.readouterr().err.count("trying again in 0.00") == 2


def test_a_document_that_always_fails_is_not_tried_for_ever():
    def documents():
        yield from ({"text": text} for text in TEXTS[:5])
        raise OSError("corrupt")

    with pytest.raises(UserError, match=r"after 3 tries \(document 5 of file 0.*OSError: corrupt"):
        list(DocumentStream("x", lambda first: [documents()], retries=2, backoff=0.001))


def test_a_source_that_stalls_is_an_error_in_time():
    def documents():
        yield {"text": "one"}
        threading.Event().wait()

    stream = iter(DocumentStream("x", lambda first: [documents()], timeout=1.5))
    assert next(stream) == ((0, 0), "one")
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"no document within data\.timeout_s = 1\.5 s \(document 1 of file 0"):
        next(stream)
    assert 1.4 < time.perf_counter() - start < 20


@pytest.mark.deep
def test_slow_reading_is_no_stall():
    reader = iter(DocumentStream("x", opener(), timeout=1.5))
    next(reader)
    time.sleep(1.8)
    assert texts_of(reader) == TEXTS[1:]


@pytest.mark.parametrize("document", [{"body": "x"}, {"text": None}, "x"])
def test_a_document_without_text_is_an_error(document):
    with pytest.raises(UserError, match="document 0 of file 0, counted from 0 of 'x' has no text in 'text'"):
        list(DocumentStream("x", lambda first: [[document]]))


@given(st.lists(st.text("abc", max_size=9), min_size=1), st.integers(1, 7), st.integers(0, 12))
def test_sequences_are_the_documents_and_their_separators(texts, length, index):
    whole = "".join(text + SEPARATOR for text in texts).encode()
    source = PackedDocuments(places(texts), ByteTokenizer())
    if (index + 1) * length > len(whole):
        # The second time too, at once.
        for _ in range(2):
            with pytest.raises(UserError, match="the stream of documents ended"):
                source.sequence(index, length)
        return
    # Straight to it, and once more from the start: always the same.
    expected = whole[index * length : (index + 1) * length]
    assert bytes(source.sequence(index, length).tolist()) == expected
    assert np.concatenate([source.sequence(i, length) for i in range(index + 1)]).tolist() == list(
        whole[: (index + 1) * length]
    )


LENGTHS = st.lists(st.integers(0, 60), min_size=30, max_size=60)
SEQ_LEN = 8


def documents_of(lengths):
    """Documents with a letter and a length of their own."""
    return [chr(33 + number) * length for number, length in enumerate(lengths)] + ["tail" * 10] * 12


def samplers(texts, batch, world_size, position=0):
    shared = {"position": position, "world_size": world_size}
    share = batch // world_size
    sources = [
        PackedDocuments(places(texts), ByteTokenizer(), batch, range(rank * share, (rank + 1) * share))
        for rank in range(world_size)
    ]
    return [BatchSampler(source, batch, SEQ_LEN - 1, rank=rank, **shared) for rank, source in enumerate(sources)]


def next_batch(ranks):
    return np.concatenate([sampler.next_batch() for sampler in ranks])


@given(LENGTHS, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.integers(0, 6))
def test_batches_are_the_same_on_any_number_of_processes_before_and_after_a_restart(lengths, before, then, steps):
    texts = documents_of(lengths)
    undisturbed = samplers(texts, 4, 1)
    expected = [next_batch(undisturbed) for _ in range(steps + 6)]
    first = samplers(texts, 4, before)
    for step in range(steps):
        assert np.array_equal(next_batch(first), expected[step])
    # Through the file format of a checkpoint's values: nothing but plain ones.
    states = json.loads(json.dumps([sampler.source.state() for sampler in first]), object_hook=_int_keys)
    second = samplers(texts, 4, then, position=4 * steps)
    for sampler in second:
        sampler.source.restore(_tuples(states), sampler.position)
    for step in range(steps, steps + 6):
        assert np.array_equal(next_batch(second), expected[step])
    for sampler in (*undisturbed, *first, *second):
        sampler.source.close()


def _int_keys(values):
    return {int(key) if key.isdigit() else key: value for key, value in values.items()}


def _tuples(states):
    for state in states:
        state["origin"] = tuple(state["origin"])
        for lane in state["lanes"].values():
            lane["place"] = tuple(lane["place"])
    return states


@given(LENGTHS)
def test_lanes_get_every_document_once_and_whole(lengths):
    texts = documents_of(lengths)
    lanes = 3
    source = PackedDocuments(places(texts), ByteTokenizer(), lanes)
    pieces = [""] * lanes

    def drain(lane):
        for number in itertools.count():
            pieces[lane] += chr(source.sequence(number * lanes + lane, 1)[0])

    for lane in range(lanes):
        with pytest.raises(UserError, match="ended"):
            drain(lane)
    assert all(piece.endswith(SEPARATOR) for piece in pieces)
    found = [text for piece in pieces for text in piece.removesuffix(SEPARATOR).split(SEPARATOR)]
    assert sorted(found) == sorted(texts)
    sizes = [len(piece) for piece in pieces]
    assert max(sizes) - min(sizes) <= max(map(len, texts)) + len(SEPARATOR)


def test_a_restored_source_reads_only_from_the_document_in_progress():
    texts = [f"{number:04d}" + "x" * (number % 50) for number in range(2000)]
    source = PackedDocuments(places(texts, 100), ByteTokenizer(), 4)
    for index in range(4 * 200):
        source.sequence(index, 40)
    state = source.state()
    begin = state["origin"][0] * 100 + state["origin"][1]
    used = sum(len(text) + 3 for text in texts[:begin])
    assert used > 4 * 200 * 40 * 0.98  # all but the documents in progress lie before

    encoded = []

    class Counting(ByteTokenizer):
        def encode(self, text):
            encoded.append(text)
            return super().encode(text)

    opened = []

    def open_documents(place):
        opened.append(place)
        return DocumentStream("x", opener(texts, 100), place=place)

    before = set(threading.enumerate())
    again = PackedDocuments(open_documents, Counting(), 4, range(2, 4))
    again.restore([state], 4 * 200)
    assert np.array_equal(again.sequence(802, 40), source.sequence(802, 40))
    assert opened == [state["origin"]]
    assert 2000 - begin < streaming.DEALT
    for thread in set(threading.enumerate()) - before:  # they read on to the end
        thread.join(30)
        assert not thread.is_alive()
    share = len(encoded) / (2000 - begin)
    assert 0.4 < share < 0.6  # two lanes of four


def test_one_huge_document_makes_no_others_wait():
    texts = ["y" * 100_000] + ["x" * 98] * 20_000
    source = PackedDocuments(places(texts), ByteTokenizer(), 2)
    for index in range(2 * 500):
        source.sequence(index, 100)
        assert source._lanes[1].available < 1000


def test_a_source_that_is_forgotten_stops_reading():
    before = set(threading.enumerate())
    source = PackedDocuments(places(["x"] * 5000), ByteTokenizer())
    source.sequence(0, 10)
    threads = set(threading.enumerate()) - before
    assert threads
    del source
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(streaming, "MAX_WAITING", 3000)
    # One text in two has four bytes a character, and goes to the same lane every time.
    texts = ["𝄞" * 100, "x" * 100] * 100
    source = PackedDocuments(places(texts), ByteTokenizer(), 2)
    with pytest.raises(UserError, match="tokens of the stream are waiting, and 3,000 may"):
        source.sequence(2000, 50)


STATE = {
    "origin": (0, 3),
    "loads": [10, 20],
    "lanes": {0: {"place": (0, 3), "taken": 2}, 1: {"place": (0, 4), "taken": 0}},
}


@pytest.mark.parametrize(
    ("states", "position", "expected"),
    [
        ([None], 4, "the place in the stream of documents is damaged"),
        ([{**STATE, "loads": [10, -1]}], 4, r"loads\.1: Input should be greater than or equal to 0"),
        ([{**STATE, "loads": [10, 2**70]}], 4, r"loads\.1"),
        ([{**STATE, "loads": [10]}], 4, "must be that of 2 lanes, each once"),
        ([{**STATE, "origin": (0,)}], 4, r"origin"),
        ([{**STATE, "origin": (0, torch.tensor(1))}], 4, r"origin\.1"),
        ([{**STATE, "code": "x"}], 4, "code: Extra inputs are not permitted"),
        ([{**STATE, "lanes": {0: STATE["lanes"][0]}}], 4, "must be that of 2 lanes, each once"),
        ([STATE, STATE], 4, "must be that of 2 lanes, each once"),
        ([], 4, "must be that of 2 lanes, each once"),
        ([{**STATE, "origin": (0, 1)}], 4, "among those that are held out"),
        ([STATE], 5, "must be a multiple of 2 lanes"),
    ],
)
def test_a_damaged_state_is_refused(states, position, expected):
    source = PackedDocuments(places(TEXTS), ByteTokenizer(), 2, start=(0, 2))
    before = source.sequence(0, 5)
    with pytest.raises(CheckpointError, match=expected) as error:
        source.restore(states, position)
    assert "\n" not in str(error.value)
    assert np.array_equal(source.sequence(0, 5), before)


def test_a_stream_that_is_another_one_is_refused():
    state = {**STATE, "lanes": {**STATE["lanes"], 0: {"place": (0, 3), "taken": 500}}}
    source = PackedDocuments(places(TEXTS), ByteTokenizer(), 2)
    source.restore([state], 4)
    with pytest.raises(CheckpointError, match="500 tokens of document 3 of file 0 were handed out"):
        source.sequence(4, 10)


def test_only_sources_with_a_place_keep_one():
    assert isinstance(PackedDocuments(places(TEXTS), ByteTokenizer()), Resumable)
    assert not isinstance(UniformBytes(1), Resumable)


def write(path, texts):
    """A file of `texts` in the format that its name says."""
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts, "score": [3.1] * len(texts)}), path)
    else:
        lines = "".join(json.dumps({"text": text, "score": 3.1}) + "\n" for text in texts)
        path.write_text(lines, encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_the_real_loader_streams_local_files(tmp_path, suffix):
    pytest.importorskip("datasets")
    files = [write(tmp_path / f"{n} [x]*.{suffix}", TEXTS[20 * n : 20 * n + 20]) for n in range(2)]
    open_from = open_files(files)
    assert texts_of(DocumentStream("x", open_from)) == TEXTS
    assert texts_of(DocumentStream("x", open_from, place=(1, 5))) == TEXTS[25:]


@pytest.mark.parametrize("names", [["a.txt"], ["a.jsonl", "b.parquet"], ["a.txt.gz"]])
def test_files_that_cannot_be_streamed_together_are_named(tmp_path, names):
    with pytest.raises(UserError, match=f"cannot read '.*{names[-1]}'"):
        open_files([tmp_path / name for name in names])


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"nsa-compile\[data\]"):
        open_dataset()
