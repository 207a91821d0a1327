"""The token cache: what it holds, when it is made anew, and that no kill, race or flipped bit gets into a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.config import DataSection
from nsa_compile.data import token_cache
from nsa_compile.data.token_cache import HEADER, MAX_SAMPLES, TOKENS, open_cache, verify_cache
from nsa_compile.errors import UserError

DOCUMENTS = ["The first.", "A second one,\nof two lines.", "Drittens: ß."]
# Opens the cache that its arguments name, and says whether it made it.
OPEN = (
    "import sys; from nsa_compile.config import DataSection; from nsa_compile.data.token_cache import open_cache;"
    "print(open_cache(DataSection(name=sys.argv[1], cache_dir=sys.argv[2])).built)"
)


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


@pytest.fixture
def data(tmp_path):
    """Three documents in a file, and a place for its cache."""
    write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    return DataSection(name=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))


def entries(data):
    return sorted(path.name for path in os.scandir(data.cache_dir) if not path.name.endswith(".lock"))


@given(st.lists(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4), max_size=3))
def test_documents_are_separated_by_an_empty_line_whatever_the_file(tmp_path_factory, files):
    folder = tmp_path_factory.mktemp("texts")
    for number, texts in enumerate(files):
        write_jsonl(folder / f"{number}.jsonl", texts)
    (folder / "9.txt").write_text("The end", encoding="utf-8")
    data = DataSection(name=str(folder), cache_dir=str(folder / "cache"))
    cache = open_cache(data)
    everything = [text for texts in files for text in texts] + ["The end"]
    assert bytes(cache.tokens).decode() == "\n\n".join(everything)
    assert cache.header.documents == len(everything)
    assert cache.header.text_bytes == sum(len(text.encode()) for text in everything)
    assert verify_cache(data).header == cache.header


def test_gpt2_documents_are_separated_by_end_of_text(data, gpt2):
    cache = open_cache(data.model_copy(update={"tokenizer": "gpt2"}))
    assert cache.tokens.dtype == np.uint16
    assert gpt2.decode(cache.tokens) == "<|endoftext|>".join(DOCUMENTS)


def test_a_cache_is_made_once_and_mapped(data):
    first, second = open_cache(data), open_cache(data)
    assert (first.built, second.built) == (True, False)
    assert isinstance(second.tokens, np.memmap)
    assert not second.tokens.flags.writeable
    assert entries(data) == [first.directory.name]
    assert np.array_equal(first.tokens, second.tokens)


def test_another_source_tokenizer_or_field_makes_another_cache(data, tmp_path, gpt2):
    directories = [open_cache(data).directory]
    write_jsonl(tmp_path / "a.jsonl", [*DOCUMENTS, "A fourth."])
    directories.append(open_cache(data).directory)
    directories.append(open_cache(data.model_copy(update={"tokenizer": "gpt2"})).directory)
    (tmp_path / "a.jsonl").write_text('{"body": "x"}', encoding="utf-8")
    directories.append(open_cache(data.model_copy(update={"text_field": "body"})).directory)
    assert len(set(directories)) == 4


def test_the_default_place_is_the_platforms(data, tmp_path, monkeypatch):
    monkeypatch.setattr(token_cache.platformdirs, "user_cache_path", lambda name: tmp_path / "platform" / name)
    directory = open_cache(data.model_copy(update={"cache_dir": None})).directory
    assert directory.parent == tmp_path / "platform" / "nsa-compile"


def edit_header(directory, **changes):
    header = json.loads((directory / HEADER).read_text())
    (directory / HEADER).write_text(json.dumps({**header, **changes}))


DAMAGES = {
    "no tokens": lambda path: (path / TOKENS).unlink(),
    "truncated": lambda path: os.truncate(path / TOKENS, 7),
    "no header": lambda path: (path / HEADER).unlink(),
    "no JSON": lambda path: (path / HEADER).write_bytes(b"\xff{"),
    "a type": lambda path: edit_header(path, tokens="12"),
    "a dtype": lambda path: edit_header(path, dtype="object"),
    "a negative size": lambda path: edit_header(path, tokens=-1),
    "an unknown field": lambda path: edit_header(path, more=1),
    "other files": lambda path: edit_header(
        path, recipe={**json.loads((path / HEADER).read_text())["recipe"], "sources": []}
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_said_to_be_and_made_anew(data, capsys, damage):
    good = open_cache(data)
    expected = np.array(good.tokens)
    DAMAGES[damage](good.directory)
    with pytest.raises(UserError, match="is damaged: "):
        verify_cache(data)
    again = open_cache(data)
    assert again.built
    assert np.array_equal(again.tokens, expected)
    assert "is damaged (" in capsys.readouterr().err
    verify_cache(data)


def test_verify_finds_a_flipped_bit(data):
    directory = open_cache(data).directory
    content = bytearray((directory / TOKENS).read_bytes())
    content[5] ^= 1
    (directory / TOKENS).write_bytes(content)
    with pytest.raises(UserError, match=r"tokens\.bin has the SHA-256"):
        verify_cache(data)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["The first!", *DOCUMENTS[1:]], "the tokens from 0 on are not those of document 1"),
        ([*DOCUMENTS[:2], "Drittens: s."], "the tokens from 41 on are not those of document 3"),
    ],
)
def test_verify_finds_another_text_behind_an_unchanged_time_and_size(data, tmp_path, texts, expected):
    path = tmp_path / "a.jsonl"
    status = path.stat()
    open_cache(data)
    write_jsonl(path, texts)
    content = path.read_bytes()
    path.write_bytes(content.ljust(status.st_size, b" "))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match=expected):
        verify_cache(data)


def test_verify_needs_a_cache(data):
    with pytest.raises(UserError, match="nsa-compile data prepare"):
        verify_cache(data)


def test_samples_are_spread_over_the_whole_text(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"Document {number}." for number in range(5000)])
    data = DataSection(name=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))
    chosen = [sample.chunk for sample in open_cache(data).header.samples]
    assert MAX_SAMPLES / 2 <= len(chosen) <= MAX_SAMPLES
    assert chosen == list(range(0, 5000, chosen[1]))
    verify_cache(data)


def test_a_file_that_changes_while_it_is_read_is_an_error(data, tmp_path, monkeypatch):
    write_tokens = token_cache._write_tokens

    def write_and_change(*arguments):
        header = write_tokens(*arguments)
        write_jsonl(tmp_path / "a.jsonl", ["Something else."])
        return header

    monkeypatch.setattr(token_cache, "_write_tokens", write_and_change)
    with pytest.raises(UserError, match="changed while they were read"):
        open_cache(data)
    assert entries(data) == []


def test_a_full_disk_is_an_error_and_leaves_nothing(data, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache.os, "fsync", full)
    with pytest.raises(UserError, match=r"data\.cache_dir = .* must be .*: No space left on device"):
        open_cache(data)
    assert entries(data) == []


def test_a_cache_directory_that_is_a_file_is_an_error(data, tmp_path):
    (tmp_path / "cache").touch()
    with pytest.raises(UserError, match=r"data\.cache_dir = .* must be a directory"):
        open_cache(data)


@pytest.mark.deep
def test_two_processes_at_once_make_one_cache(tmp_path):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_bytes(b"word " * 8_000_000)
    command = [sys.executable, "-c", OPEN, str(path), str(cache)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outcomes = [process.communicate(timeout=60)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(outcomes) == ["False", "True"]
    verify_cache(DataSection(name=str(path), cache_dir=str(cache)))


@pytest.mark.deep
def test_a_kill_leaves_nothing_that_could_be_taken_for_a_cache(tmp_path):
    path, cache = tmp_path / "a.txt", tmp_path / "cache"
    path.write_bytes(b"word " * 30_000_000)
    data = DataSection(name=str(path), cache_dir=str(cache))
    process = subprocess.Popen([sys.executable, "-c", OPEN, str(path), str(cache)])
    while process.poll() is None and not any(file.stat().st_size for file in cache.glob(f"*/{TOKENS}")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    (left,) = entries(data)
    assert left.endswith(".unfinished")
    again = open_cache(data)
    assert again.built
    assert entries(data) == [again.directory.name]
    assert len(again.tokens) == path.stat().st_size


@pytest.mark.deep
def test_memory_stays_small_for_a_large_text(tmp_path):
    # 100 MB of text, and 40 MB of memory beyond what the imports took; the mapped tokens do not count.
    path = tmp_path / "a.txt"
    path.write_bytes(b"some words, " * 8_000_000)
    code = f"""
import resource
from nsa_compile.config import load_config
from nsa_compile.data import BatchSampler, load_corpus
import nsa_compile.data.token_cache
config = load_config(overrides=["data.name={path}", "data.cache_dir={tmp_path}/cache"])
taken = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + (40 << 20),) * 2)
corpus = load_corpus(config)
print(len(corpus.train.tokens) + BatchSampler(corpus.train, 8, 512).next_batch().size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 96_000_000 * 95 // 100 + 8 * 513


@pytest.mark.parametrize("name", [HEADER, TOKENS])
@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["pipe", "endless"])
def test_a_cache_whose_files_are_none_is_made_anew(data, capsys, name, plant):
    directory = open_cache(data).directory
    (directory / name).unlink()
    plant(directory / name)
    with pytest.raises(UserError, match="is damaged"):
        verify_cache(data)
    assert open_cache(data).built
    assert f"cache '{directory}' is damaged ({name}: it is " in capsys.readouterr().err
    assert not open_cache(data).built


def test_a_header_without_an_end_is_damaged(data):
    directory = open_cache(data).directory
    os.truncate(directory / HEADER, 1 << 40)  # a file of holes
    with pytest.raises(UserError, match=r"header\.json is larger than"):
        verify_cache(data)
