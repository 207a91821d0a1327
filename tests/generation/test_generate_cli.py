"""`generate` and `chat` on a run, and what they refuse."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

from nsa_compile.cli import cli, main
from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.generation.generate import Session, generate
from nsa_compile.generation.sampling import Sampling
from nsa_compile.generation.trained import load_trained
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from tests.conftest import TINY_RUN


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a tiny run with checkpoints of steps 2 and 4."""
    values = {**TINY_RUN, "run.dir": str(tmp_path_factory.mktemp("generate") / "runs")}
    config = load_config(overrides=[f"{key}={value}" for key, value in values.items()])
    directory = create_run_directory(config)
    run(config, load_corpus(config), directory)
    return directory


def invoke(*words, given=None):
    return CliRunner().invoke(cli, [str(word) for word in words], input=given, catch_exceptions=False)


@pytest.mark.deep
def test_a_prompt_goes_on_by_the_model_of_the_run(trained):
    result = invoke("generate", trained, "--prompt", "Oh", "--tokens", 12, "--seed", 3, "--no-compile")
    model = load_trained(trained).model
    prompt = torch.tensor(list(b"Oh"))
    tokens = generate(model, prompt, 12, Sampling(0.8), torch.Generator().manual_seed(3))
    assert result.stdout == "Oh" + ByteTokenizer().decode(tokens.tolist()) + "\n"
    assert "tokens/s" in result.stderr


@pytest.mark.deep
def test_several_prompts_compiled_are_those_alone(trained, tmp_path):
    (tmp_path / "prompts.txt").write_text("To be\nA\n", encoding="utf-8")
    words = ["--tokens", 8, "--json"]
    given = ["--prompt", "Oh", "--prompts-from", tmp_path / "prompts.txt", "--batch", 2]
    several = invoke("generate", trained, *given, *words)
    together = json.loads(several.stdout)
    for seed, text in enumerate(together["texts"]):
        alone = invoke("generate", trained, "--prompt", text["prompt"], "--seed", seed, "--no-compile", *words)
        assert json.loads(alone.stdout)["texts"] == [text]
    assert [text["prompt_tokens"] for text in together["texts"]] == [2, 5, 1]
    assert together["tokens_per_s"] > 0
    shown = invoke("generate", trained, "--prompt", "Oh", "--prompt", "A", "--tokens", 2, "--no-compile")
    assert shown.stdout.count("\n\n") >= 2


@pytest.mark.deep
def test_a_text_ends_where_it_is_told_to(trained):
    words = ["--prompt", "Oh", "--no-compile", "--json", "--temperature", 0]
    (free,) = json.loads(invoke("generate", trained, *words, "--tokens", 30).stdout)["texts"]
    stop = free["text"][5:7]
    (text,) = json.loads(invoke("generate", trained, *words, "--tokens", 30, "--stop", stop).stdout)["texts"]
    assert text["text"] == free["text"][: free["text"].index(stop)]
    assert (text["stopped_by"], free["stopped_by"]) == ("stop", "length")


@pytest.mark.deep
def test_a_checkpoint_may_be_named_and_low_precision_asked_for(trained):
    first, last = sorted((trained / "checkpoints").iterdir())
    texts = {
        name: json.loads(invoke("generate", path, "--prompt", "O", "--no-compile", "--json", *more).stdout)
        for name, path, more in (("run", trained, ()), ("last", last, ()), ("first", first, ("--dtype", "bf16")))
    }
    assert texts["run"]["texts"] == texts["last"]["texts"]
    assert [texts[name]["checkpoint"] for name in ("run", "first")] == [str(last), str(first)]
    assert next(load_trained(first, "bf16").model.parameters()).dtype == torch.bfloat16


@pytest.mark.deep
def test_a_full_disk_is_one_line(trained):
    words = ["-m", "nsa_compile", "generate", str(trained), "--prompt", "ab", "--tokens", "3", "--no-compile"]
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 2
    assert [line for line in ended.stderr.splitlines() if not line.startswith("ready")] == [
        "error: stdout cannot be written (No space left on device); the output is not complete"
    ]


def test_stdout_may_be_closed():
    command = f"{sys.executable} -m nsa_compile --version >&-"
    ended = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.fixture
def interrupted(monkeypatch):
    """Ctrl-C after three tokens."""
    stream = Session.stream

    def ending(self, sampling):
        yield from itertools.islice(stream(self, sampling), 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "stream", ending)


def test_an_interrupted_text_is_not_lost(trained, interrupted, capsys):
    words = ["generate", str(trained), "--prompt", "ab", "--no-compile", "--json"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--tokens", "5"])
    said = capsys.readouterr()
    (text,) = json.loads(said.out)["texts"]
    assert (text["tokens"], text["stopped_by"], ended.value.code) == (3, "interrupted", 130)
    assert "error: interrupted" in said.err
    with pytest.raises(SystemExit) as ended:
        main([*words, "--batch", "1", "--prompt", "cd", "--tokens", "3"])
    first, second = json.loads(capsys.readouterr().out)["texts"]
    assert (first["stopped_by"], second["stopped_by"], second["tokens"]) == ("length", "interrupted", 0)
    assert ended.value.code == 130


def test_an_interrupted_chat_ends(trained, interrupted):
    result = CliRunner().invoke(cli, ["chat", str(trained), "--no-compile"], input="Hello\nyou\n")
    assert (result.exit_code, result.stderr.count("ready after")) == (1, 0), "click's own code; main gives 130"


def test_chat_goes_on_with_one_text(trained):
    words = ["--tokens", 6, "--temperature", 0, "--no-compile"]
    result = invoke("chat", trained, *words, given="\nHello\nyou\n")
    model, text, replies = load_trained(trained).model, [], []
    for line in (b"Hello\n", b"you\n"):
        text += line
        reply = generate(model, torch.tensor(text), 6, Sampling(temperature=0), torch.Generator()).tolist()
        text += reply
        replies.append(ByteTokenizer().decode(reply))
    assert result.stdout == "".join(f"{reply}\n" for reply in replies)


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["nowhere", "--prompt", "x"], "'nowhere' must be the directory of a run or of one of its checkpoints", 2),
        (["RUN"], "there is no prompt; give --prompt TEXT or --prompts-from FILE", 2),
        (["RUN", "--prompt", ""], "a prompt must hold at least one character", 2),
        (["RUN", "--prompt", "a\udcff"], "--prompt is no text in UTF-8", 2),
        (["RUN", "--prompts-from", "BLANK"], "BLANK' is empty; a prompt must hold at least one character", 2),
        (["RUN", "--prompts-from", "BYTES"], "BYTES' is no text in UTF-8", 2),
        (["RUN", "--prompt", "x", "--stop", ""], "--stop '' must hold at least one character", 2),
        (["RUN", "--prompt", "x", "--top-p", "0"], "'--top-p': 0.0 is not in the range", 2),
        (["RUN", "--prompt", "x", "--temperature", "nan"], "'nan' is not a finite number", 2),
        (["EMPTY", "--prompt", "x"], "has no good checkpoint", 5),
        (["DAMAGED", "--prompt", "x"], "has no good checkpoint: checkpoint", 5),
        (["OTHER", "--prompt", "x"], "is not of the configuration of its run: model.dim = 64 here and 32 there", 5),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(trained, tmp_path, capsys, words, said, code):
    copy = tmp_path / "copy"
    if words[0] in ("EMPTY", "DAMAGED", "OTHER"):
        shutil.copytree(trained, copy)
    if words[0] == "EMPTY":
        shutil.rmtree(copy / "checkpoints")
        (copy / "checkpoints").mkdir()
    if words[0] == "DAMAGED":
        for path in copy.glob("checkpoints/*/state.pt"):
            path.write_bytes(b"not what it was")
    if words[0] == "OTHER":
        path = copy / "config.resolved.yaml"
        path.write_text(path.read_text().replace("  dim: 32\n", "  dim: 64\n"))
    (tmp_path / "BLANK").write_text("ab\n\ncd\n")
    (tmp_path / "BYTES").write_bytes(b"ab\nc\xffd\n")
    words = [str(tmp_path / word) if word in ("BLANK", "BYTES") else word for word in words]
    place = {"RUN": str(trained)}.get(words[0], str(copy) if words[0] != "nowhere" else "nowhere")
    with pytest.raises(SystemExit) as ended:
        main(["generate", place, *words[1:]])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (code, 1)
    assert said in error


def test_a_damaged_checkpoint_is_passed_over_and_said(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "copy")
    newest = sorted((tmp_path / "copy" / "checkpoints").iterdir())[-1]
    next(newest.glob("*.pt")).write_bytes(b"")
    result = invoke("generate", tmp_path / "copy", "--prompt", "x", "--tokens", 2, "--no-compile")
    assert "the one before is used" in result.stderr


def test_a_text_longer_than_those_of_the_training_is_written_and_said(trained):
    result = invoke("generate", trained, "--prompt", "x", "--tokens", 40, "--no-compile")
    assert "may grow to 41 tokens; the model was trained on 32 at a time" in result.stderr
