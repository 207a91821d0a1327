"""`nsa-compile eval`: what it prints and writes, and what it refuses in one line."""

from __future__ import annotations

import json
import shutil

import pytest
from click.testing import CliRunner

from nsa_compile.cli import cli, main
from tests.evaluation.conftest import make_run

WORDS = ["--no-compile"]


def evaluate(*words):
    return CliRunner().invoke(cli, ["eval", *map(str, words), *WORDS], catch_exceptions=False)


def results(*words):
    return json.loads(evaluate(*words, "--json").stdout)["results"]


def test_a_run_is_scored_on_its_held_out_text(text_run):
    said = evaluate(text_run)
    assert said.exit_code == 0
    headers, _, row = said.stdout.splitlines()
    assert headers.split("  ")[-1] == "perplexity"
    (found,) = results(text_run)
    assert row.split() == [
        "32", "32", "99", "99", f"{found['bits_per_byte']:.4f}", f"{found['nats_per_token']:.4f}",
        f"{found['perplexity']:.3f}",
    ]  # fmt: skip
    assert "scored once" in said.stderr


def test_the_object_has_numbers_as_numbers(text_run):
    said = json.loads(evaluate(text_run, "--json").stdout)
    assert (said["seq_len"], type(said["parameters"])) == (32, int)
    assert all(key.isidentifier() for key in said)


@pytest.mark.deep
def test_a_model_of_conversations_is_scored_on_plain_text_too(tmp_path):
    talk = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]}
    (tmp_path / "talks.jsonl").write_text(f"{json.dumps(talk)}\n" * 4, encoding="utf-8")
    (tmp_path / "plain.txt").write_text("a plain text", encoding="utf-8")
    keys = {"data.name": tmp_path / "talks.jsonl", "data.chat": "true", "train.loss": "answers", "train.seq_len": 64}
    run = make_run(tmp_path / "runs", **keys)
    said = evaluate(run, "--data", tmp_path / "plain.txt", "--json")
    assert json.loads(said.stdout)["results"][0]["bytes"] == 12
    assert "note: all tokens are scored; the validation loss of the run is of its answers alone\n" in said.stderr


def test_lengths_beyond_the_training_are_scored_with_a_note(text_run):
    said = evaluate(text_run, "--length", 32, "--length", 64, "--stride", 16, "--max-tokens", 70, "--json")
    assert "note: --length 64 is beyond the 32 tokens of the training" in said.stderr
    found = json.loads(said.stdout)["results"]
    assert [(row["length"], row["stride"], row["tokens"]) for row in found] == [(32, 16, 70), (64, 16, 70)]


def test_documents_of_your_own_are_scored_each_by_itself(text_run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "line 1"}\n{"text": "line 2"}\n', encoding="utf-8")
    (both,) = results(text_run, "--data", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "line 1"}\n', encoding="utf-8")
    (one,) = results(text_run, "--data", tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"text": "line 2"}\n', encoding="utf-8")
    (other,) = results(text_run, "--data", tmp_path / "a.jsonl")
    assert both["bytes"] == one["bytes"] + other["bytes"] == 12
    assert both["nats_per_token"] == pytest.approx((one["nats_per_token"] + other["nats_per_token"]) / 2)


def test_a_run_of_needles_is_asked_for_them(needle_run, tmp_path):
    page = tmp_path / "needle.html"
    said = evaluate(needle_run, "--length", 24, "--length", 32, "--depths", 2, "--samples", 2, "--out", page)
    assert "Share of the answers found" in said.stdout
    assert "depth    24    32" in said.stdout
    assert f"page: {page}" in said.stderr
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 1, "the gain is unknown here"
    assert "length 24, depth 25%: " in html
    found = results(needle_run, "--length", 32, "--depths", 2, "--samples", 2)
    assert {row["length"] for row in found} == {32}
    assert sum(row["answers"] for row in found) == 2 * 3


@pytest.mark.deep
def test_a_run_of_text_is_asked_in_words(text_run, tmp_path):
    (tmp_path / "long.txt").write_text("some text, and more of it. " * 40, encoding="utf-8")
    page = tmp_path / "needle.html"
    words = ["--task", "needle", "--length", 160, "--depths", 2, "--samples", 1, "--data", tmp_path / "long.txt"]
    said = evaluate(text_run, *words, "--out", page)
    assert "Share of the answers found" in said.stdout
    assert "Nats by which" in said.stdout
    html = page.read_text(encoding="utf-8")
    assert html.count("<svg") == 2
    assert "var(--c0)" in html, "in the colours of the theme"
    assert [row["depth"] for row in results(text_run, *words)] == [0, 1]


def fails(capsys, *words):
    with pytest.raises(SystemExit) as left:
        main(["eval", *map(str, words), *WORDS])
    said = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    return said[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stride", 40], "error: --stride 40 must be at most --length 32, or tokens are left out"),
        (["--length", 64, "--length", 48, "--stride", 49], "error: --stride 49 must be at most --length 48, or"),
        (["--data", "nowhere.txt"], "error: --data 'nowhere.txt' does not exist; give another with --data PATH"),
        (["--data", __file__], f"error: --data '{__file__}' is no data set: its name must end in .txt, "),
        (["--task", "needle"], "error: --length 32 must be at least 1"),
        (["--task", "needle", "--stride", 8], "error: --stride 8 is for --task text, and this is --task needle; leave"),
        (
            ["--task", "needle", "--max-tokens", 8],
            "error: --max-tokens 8 is for --task text, and this is --task needle",
        ),
        (["--out", "nowhere/page.html"], "error: nothing can be written to 'nowhere/page.html'"),
        (["--task", "words"], "error: Invalid value for '--task': 'words' is not one of"),
    ],
)
def test_mistakes_are_one_line(capsys, text_run, words, said):
    assert fails(capsys, text_run, *words).startswith(said)


def test_what_is_no_run_is_one_line(capsys, tmp_path):
    assert "must be the directory of a run" in fails(capsys, tmp_path)


def test_an_empty_text_is_one_line(capsys, text_run, tmp_path):
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    assert fails(capsys, text_run, "--data", tmp_path / "empty.txt").endswith(
        "holds no text; give another one with --data PATH"
    )


def test_an_exported_model_is_told_its_text(capsys, text_run, tmp_path):
    pytest.importorskip("safetensors")
    out = tmp_path / "exported"
    CliRunner().invoke(cli, ["export", str(text_run), "--to", "safetensors", "--out", str(out)], catch_exceptions=False)
    assert "does not know what was held out; give --data PATH" in fails(capsys, out)
    shutil.copy(text_run.parent / "text.txt", tmp_path / "text.txt")
    (ours,) = results(text_run, "--data", tmp_path / "text.txt")
    (theirs,) = results(out, "--data", tmp_path / "text.txt")
    assert ours == theirs


def test_a_page_that_cannot_be_written_takes_no_figures_with_it(capsys, text_run, tmp_path, no_room):
    with no_room(), pytest.raises(SystemExit) as ended:
        main(["eval", str(text_run), *WORDS, "--out", str(tmp_path / "page.html")])
    said = capsys.readouterr()
    assert ended.value.code == 2
    assert said.out == evaluate(text_run).stdout
    assert said.err.splitlines()[-1] == (
        f"error: nothing can be written to '{tmp_path}/page.html': File too large; choose another place with --out FILE"
    )


def test_without_matplotlib_the_page_has_tables(needle_run, tmp_path, monkeypatch):
    def missing(make):
        raise ImportError

    monkeypatch.setattr("nsa_compile.page.draw", missing)
    evaluate(needle_run, "--depths", 1, "--samples", 1, "--out", tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "matplotlib is not installed" in html
    assert "<svg" not in html
    assert "<td>50%</td>" in html.replace('<td class="">', "<td>")


def test_the_page_of_a_text_has_its_figures(text_run, tmp_path):
    said = evaluate(text_run, "--out", tmp_path / "page.html")
    figures = said.stdout.splitlines()[-1].split()
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(f">{figure}<" in html for figure in figures)
    assert str(text_run) in html
