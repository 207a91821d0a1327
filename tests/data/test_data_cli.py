"""`nsa-compile data` as a user meets it: in a process of its own, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

COMMAND = [sys.executable, "-c", "from nsa_compile.cli import main; main()", "data"]


@pytest.fixture
def data(tmp_path):
    """Runs `nsa-compile data`; torch cannot be imported, the cache lies in tmp_path, and so does a text."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise RuntimeError('torch was imported')", encoding="utf-8")
    (tmp_path / "text.txt").write_text("To be, or not to be.\n" * 500, encoding="utf-8")
    path = os.pathsep.join((str(tmp_path / "broken"), os.environ.get("PYTHONPATH", "")))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [*COMMAND, *arguments, "--set", f"data.cache_dir={tmp_path}/cache"]
        return subprocess.run(
            words, capture_output=True, text=True, check=False, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
        )

    return run


@pytest.mark.deep
@pytest.mark.parametrize("name", ["copying", "needle"])
def test_smoke_shows_a_task_and_its_answer(data, name):
    arguments = ["smoke", "--set", f"data.name={name}", "--set", "train.seq_len=128", "--set", "data.needles=1"]
    plain, as_json = data(*arguments), data(*arguments, "--json")
    assert (plain.returncode, as_json.returncode) == (0, 0), plain.stderr + as_json.stderr
    facts = json.loads(as_json.stdout)
    assert facts["shape"] == [4, 129]
    assert facts["tokens_per_s"] > 0
    assert facts["ends"].endswith(facts["answer"])
    assert f"answer        {facts['answer']!r}" in plain.stdout


def test_smoke_of_a_text_has_no_answer(data):
    done = data("smoke", "--json", "--set", "data.name=text.txt", "--set", "train.seq_len=64")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["answer"] is None
    assert "not to be" in facts["begins"]


def test_prepare_then_verify_then_a_flipped_byte(data, tmp_path):
    made, again, verified = (
        data(verb, "--json", "--set", "data.name=text.txt") for verb in ("prepare", "prepare", "verify")
    )
    facts = [json.loads(done.stdout) for done in (made, again, verified)]
    assert [fact.pop("state") for fact in facts] == ["made", "there already", "verified"]
    assert facts[0] == facts[1] == facts[2]
    assert facts[0]["tokens"] == facts[0]["text_bytes"] == 10_500
    assert facts[0]["tokens_per_byte"] == 1
    tokens = os.path.join(facts[0]["path"], "tokens.bin")
    with open(tokens, "r+b") as file:
        file.write(b"!")
    done = data("verify", "--set", "data.name=text.txt")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: cache '")
    assert done.stderr.count("\n") == 1


@pytest.mark.deep(but=["arguments7-reads .jsonl, .jsonl.gz, .parquet"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["prepair"], "did you mean 'prepare'?"),
        (["prepare"], "data.name = 'shakespeare' is built in and has no cache"),
        (["verify", "--set", "data.name=fineweb-edu"], "data.name = 'fineweb-edu' is built in and has no cache"),
        (["verify", "--set", "data.name=text.txt"], "was never made"),
        (
            ["prepare", "--set", "data.name=text.jsonl", "--set", "data.stream=true"],
            "data.stream = true keeps no cache",
        ),
        (
            ["verify", "--set", "data.name=text.jsonl", "--set", "data.chat=true"],
            "data.chat = true keeps no cache: a run reads its conversations as it begins",
        ),
        (["smoke", "--set", "data.stream=true"], "must be false for the built-in data.name = 'shakespeare'"),
        (["smoke", "--set", "data.name=text.txt", "--set", "data.stream=true"], "reads .jsonl, .jsonl.gz, .parquet"),
        (["smoke", "--set", "data.name=no.jsonl", "--set", "data.stream=true"], "there is no such file or directory"),
        (["smoke", "--set", "data.name=needle", "--set", "data.min_distance=0"], "data.min_distance = 0"),
        (["smoke", "--set", "data.name=needle", "--set", "data.min_distance=600"], "must leave room in a sequence"),
        (["smoke", "--set", "data.name=nothing.jsonl"], "there is no such file or directory"),
        (["smoke", "--set", "data.text_feild=body"], "did you mean 'data.text_field'?"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(data, arguments, expected):
    if arguments == ["prepair"]:
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)
    else:
        done = data(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr
