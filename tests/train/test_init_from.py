"""`train --init-from`: the weights of another run, and nothing else of it; and fine-tuning on conversations."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("safetensors")

from nsa_compile.cli import cli, main
from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.generation.generate import Decoder, Request, Session
from nsa_compile.generation.sampling import Sampling
from nsa_compile.generation.trained import load_trained
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from tests.conftest import TINY_RUN


def run_with(directory, **changes):
    values = {**TINY_RUN, "run.dir": str(directory), **changes}
    config = load_config(overrides=[f"{key}={value}" for key, value in values.items()])
    made = create_run_directory(config)
    return run(config, load_corpus(config), made), made


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run, and the folder that it is exported to."""
    root = tmp_path_factory.mktemp("first")
    summary, directory = run_with(root / "runs", **{"optim.lr": 0.01})
    words = ["export", directory, "--to", "safetensors", "--out", root / "exported"]
    CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)
    return summary, directory, root / "exported"


def words_of(directory, *more):
    values = {**TINY_RUN, "run.dir": str(directory)}
    return ["train", *(part for key, value in values.items() for part in ("--set", f"{key}={value}")), *map(str, more)]


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["run", "checkpoint", "exported", "hub"])
def test_a_run_begins_where_another_ended(first, tmp_path, monkeypatch, kind):
    summary, directory, exported = first
    where = {
        "run": directory, "checkpoint": max((directory / "checkpoints").glob("step-*")), "exported": exported,
        "hub": "hf:somebody/model",
    }[kind]  # fmt: skip
    asked = []

    def download(name, allow_patterns):
        asked.append(name)
        assert "model.safetensors.index.json" in allow_patterns
        assert not any(pattern.endswith((".bin", ".pt")) for pattern in allow_patterns)
        return str(exported)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    said = CliRunner().invoke(cli, words_of(tmp_path, "--init-from", where, "--json"), catch_exceptions=False)
    found = json.loads(said.stdout)
    assert found["val_loss_start"] == pytest.approx(summary["val_loss_end"], rel=1e-6)
    assert found["val_loss_start"] != pytest.approx(summary["val_loss_start"], rel=1e-3)
    assert asked == (["somebody/model"] * 2 if kind == "hub" else [])
    # A schedule of its own: its first step is of the warm-up.
    made = next(tmp_path.iterdir())
    with (made / "training.csv").open() as file:
        rates = [float(row["lr"]) for row in csv.DictReader(file)]
    with (directory / "training.csv").open() as file:
        others = [float(row["lr"]) for row in csv.DictReader(file)]
    assert rates[0] / max(rates) == pytest.approx(others[0] / max(others))
    assert f"init_from: {where}" in (made / "config.resolved.yaml").read_text()


@pytest.mark.deep
def test_a_resumed_run_does_not_ask_for_the_weights_it_began_with(first, tmp_path):
    _, _, exported = first
    copy = shutil.copytree(exported, tmp_path / "copy")
    more = ["--init-from", copy, "--set", "train.save_every=1"]
    CliRunner().invoke(cli, words_of(tmp_path / "runs", *more), catch_exceptions=False)
    made = next((tmp_path / "runs").iterdir())
    whole = load_trained(made).model.state_dict()
    shutil.rmtree(copy)
    shutil.rmtree(max((made / "checkpoints").glob("step-*")))
    again = CliRunner().invoke(cli, words_of(tmp_path / "runs", *more, "--resume", made), catch_exceptions=False)
    assert again.exit_code == 0
    resumed = load_trained(made).model.state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ["--set", "model.dim=16", "--set", "model.rope_theta=5.0"],
            "model.dim = 16 here and 32 there, model.mlp_hidden = 64 here and 96 there, model.rope_theta = 5.0",
        ),
        (["--set", "model.attention=dense"], "model.attention = 'dense' here and 'nsa' there"),
        (["--set", "model.pattern.window=5"], "model.pattern.window = 5 here and"),
        ("nowhere", "'nowhere' must be the directory of a run or of one of its checkpoints, or an exported model"),
        ("pickle", "is no file of safetensors"),
        ("only a pickle", "is no file of safetensors"),
        ("tokenizer", "was trained with data.tokenizer = 'gpt2', and here it is 'byte'"),
        ("hf:", "'hf:' must have the form hf:ORG/NAME"),
        ("hf:somebody/model", "'hf:somebody/model' cannot be downloaded: no route to host"),
    ],
)
def test_other_weights_are_refused_in_one_line(first, tmp_path, capsys, monkeypatch, change, said):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    _, _, exported = first
    folder = shutil.copytree(exported, tmp_path / "folder")
    name, more = str(folder), []
    if isinstance(change, list):
        more = change
    elif change in ("pickle", "only a pickle"):
        (folder / "model.safetensors").unlink()
        torch.save({}, folder / ("model.safetensors" if change == "pickle" else "pytorch_model.bin"))
    elif change == "tokenizer":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"tokenizer": "gpt2"}))
    else:
        name = change
    if change == "hf:somebody/model":

        def download(*_, **__):
            raise LocalEntryNotFoundError("not in the cache") from OSError("no route to host")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SystemExit) as ended:
        main(words_of(tmp_path / "runs", "--init-from", name, *more))
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1), error
    assert said in error
    assert not (tmp_path / "runs").exists()


def test_weights_of_an_unknown_tokenizer_are_taken_with_a_warning(first, tmp_path):
    _, _, exported = first
    folder = shutil.copytree(exported, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tokenizer": None}))
    said = CliRunner().invoke(cli, words_of(tmp_path / "runs", "--init-from", folder), catch_exceptions=False)
    assert said.exit_code == 0
    assert "does not name its tokenizer; data.tokenizer = 'byte' is used" in said.stderr


TALKS = {"red": "apple", "blue": "sky", "green": "leaf", "white": "snow"}


@pytest.mark.deep
def test_a_model_learns_the_answers_and_not_the_questions(tmp_path):
    path = tmp_path / "talks.jsonl"
    talks = [
        {"messages": [{"role": "user", "content": color}, {"role": "assistant", "content": thing}]}
        for color, thing in TALKS.items()
    ]
    path.write_text("".join(json.dumps(talk) + "\n" for talk in talks * 6))
    summary, made = run_with(
        tmp_path / "runs",
        **{
            "data.name": path, "data.chat": "true", "train.loss": "answers", "train.seq_len": 56, "train.steps": 100,
            "train.batch_size": 4, "train.eval_every": 100, "optim.lr": 0.02, "optim.weight_decay": 0,
            "model.attention": "dense", "model.dim": 32, "compile.enabled": "false",
        },
    )  # fmt: skip
    assert summary["val_loss_end"] < 0.1
    trained = load_trained(made)
    assert trained.chat
    for asked, answer in (("blue", "sky"), ("green", "leaf")):
        words = ["chat", str(made), "--temperature", "0", "--no-compile", "--tokens", "30"]
        said = CliRunner().invoke(cli, words, input=f"red<|end|>\n{asked}\n\n")
        assert said.stdout == f"{answer}\n"
        assert "error: your line holds '<|end|>', which stands between messages; write it without" in said.stderr
    # Asked in another way it has learned nothing: the loss was not about the questions.
    prompt = trained.tokenizer.encode("<|user|>\n").tolist()
    session = Session(Decoder(trained.model, compiled=False), [Request(prompt, 4, torch.Generator())])
    drawn = trained.tokenizer.decode([token for _, token in session.stream(Sampling(0))])
    assert not any(color.startswith(drawn[:3]) for color in TALKS)


@pytest.mark.parametrize("ended", [True, False])
def test_a_second_question_stands_in_the_text_as_in_the_template(first, ended):
    from jinja2 import Template

    from nsa_compile.generation.generate_cli import Writer, _Asked
    from nsa_compile.generation.text import CHAT_TEMPLATE

    trained = load_trained(first[1])
    writer = Writer(trained, Decoder(trained.model, compiled=False), Sampling(), 1, 0, (), 8)
    asked = _Asked(writer)
    text = asked.message("One?\n")
    writer.write([trained.tokenizer.encode(text).tolist()], None)
    # What the model has drawn, put in its place.
    writer.tokens[len(text) :] = b"1<|end|>" if ended else b"1"
    turns = [("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    wanted = Template(CHAT_TEMPLATE).render(
        messages=[{"role": role, "content": content} for role, content in turns], add_generation_prompt=True
    )
    assert trained.tokenizer.decode(writer.tokens) + asked.message("Two?\n") == wanted


def test_an_exported_model_of_conversations_is_asked_as_one(first, tmp_path):
    from nsa_compile.generation.exported import Exported, read_exported, write_exported

    trained = load_trained(first[1])
    for chat in (True, False):
        (tmp_path / str(chat)).mkdir()
        write_exported(tmp_path / str(chat), Exported(trained.model, "byte", 32, chat))
        assert read_exported(tmp_path / str(chat)).chat is chat
        assert load_trained(tmp_path / str(chat)).chat is chat


@pytest.mark.deep
def test_adapters_learn_the_rest_stays_and_a_reader_gets_the_sum(first, tmp_path):
    pytest.importorskip("peft")
    from nsa_compile.models import NSATransformer
    from nsa_compile.train.checkpoints.checkpoint import load_checkpoint
    from nsa_compile.train.lora import add_adapters

    _, directory, exported = first
    changes = {"lora.rank": 2, "lora.alpha": 8, "optim.lr": 0.01, "train.init_from": exported}
    summary, made = run_with(tmp_path / "runs", **changes)
    before, after = load_trained(directory).model, load_trained(made).model
    changed = {name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])}
    linear = {"attention.q", "attention.k", "attention.v", "attention.gate", "attention.out"}
    linear |= {"mlp.gate", "mlp.up", "mlp.down"}
    assert changed == {f"blocks.0.{name}.weight" for name in linear}
    assert summary["val_loss_start"] > summary["val_loss_end"]

    # What trained, put together again from the checkpoint by peft itself.
    config = load_config(str(made / "config.resolved.yaml"))
    trained = NSATransformer(config.model)
    assert add_adapters(trained, config.lora) == 8
    newest = max((made / "checkpoints").glob("step-*"))
    trained.load_state_dict(load_checkpoint(newest)["state.pt"]["model"])
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = trained(tokens)
        torch.testing.assert_close(after(tokens), wanted, rtol=1e-5, atol=1e-5)
        assert (before(tokens) - wanted).abs().max() > 1e-2

    # Another run begins with the sum, and this one goes on.
    again, _ = run_with(tmp_path / "again", **{"train.init_from": made})
    assert again["val_loss_start"] == pytest.approx(summary["val_loss_end"], rel=1e-5)
    shutil.rmtree(newest)
    values = {**TINY_RUN, "run.dir": str(tmp_path / "runs"), **changes}
    words = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    said = CliRunner().invoke(cli, ["train", *words, "--resume", str(made)], catch_exceptions=False)
    assert said.exit_code == 0
    resumed = load_trained(made).model.state_dict()
    assert all(torch.equal(value, resumed[name]) for name, value in after.state_dict().items())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "train.init_from = None must name the weights to freeze for lora.rank = 2"),
        (["train.init_from=x", "ddp.strategy=fsdp"], "ddp.strategy = 'fsdp' must be 'ddp' for lora.rank = 2"),
        (["train.init_from=x", "train.matmul=int8"], "train.matmul = 'int8' must be 'native' for lora.rank = 2"),
        (["train.init_from=x", "model.attention=dense"], "must not name 'attention.gate'"),
        (["train.init_from=x", "lora.targets=[head]"], "lora.targets = 'head' is not allowed"),
    ],
)
def test_adapters_that_cannot_be_are_refused(capsys, overrides, said):
    with pytest.raises(SystemExit) as ended:
        main(["train", "--dry-run", *(part for word in ["lora.rank=2", *overrides] for part in ("--set", word))])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert said in error


def test_adapters_without_peft_are_one_line(monkeypatch, capsys):
    from nsa_compile.machine import preflight

    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        main(["train", "--dry-run", "--set", "lora.rank=2", "--set", "train.init_from=x"])
    assert ended.value.code == 2
    assert "needs the package peft; install it with pip install 'nsa-compile[lora]'" in capsys.readouterr().err
