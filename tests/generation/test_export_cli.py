"""`export`: what it writes is the model of the run, to us and to `transformers`; what it refuses."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("transformers")

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nsa_compile.cli import cli, main
from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.data.tokenizers import ByteTokenizer, make_tokenizer
from nsa_compile.generation import exported as module
from nsa_compile.generation.text import CHAT_TEMPLATE
from nsa_compile.generation.trained import load_trained
from nsa_compile.hf import NSAForCausalLM
from nsa_compile.hf.tokenizer import fast_tokenizer
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from tests.conftest import TINY_RUN

TEXTS = ["To be, or not", "", "  two  spaces\n\n\tand\r\n", "naïve Ā € 日本 🙂", "\x00<|endoftext|><pad>"]


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """The directory of a tiny run; its embeddings are tied where a test asks for it."""
    values = {**TINY_RUN, "run.dir": str(tmp_path_factory.mktemp("export") / "runs")}
    values["model.tie_embeddings"] = str(getattr(request, "param", False)).lower()
    config = load_config(overrides=[f"{key}={value}" for key, value in values.items()])
    directory = create_run_directory(config)
    run(config, load_corpus(config), directory)
    return directory


def invoke(*words):
    return CliRunner().invoke(cli, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def folders(trained, tmp_path_factory):
    """The model exported in both ways."""
    directory = tmp_path_factory.mktemp("exported")
    for kind in ("safetensors", "hf"):
        said = invoke("export", trained, "--to", kind, "--out", directory / kind)
        assert said.stdout.startswith(f"{directory / kind}: ")
        assert "config.json, model.safetensors" in said.stdout
    return directory


@pytest.mark.deep
@pytest.mark.parametrize("trained", [False, True], ids=["untied", "tied"], indirect=True)
@pytest.mark.parametrize("kind", ["safetensors", "hf"])
def test_what_is_exported_is_the_model_of_the_run(trained, folders, kind):
    ours, again = load_trained(trained), load_trained(folders / kind)
    assert again.model.config == ours.model.config
    assert (again.seq_len, again.tokenizer.name) == (ours.seq_len, ours.tokenizer.name) == (32, "byte")
    theirs = NSAForCausalLM.from_pretrained(folders / kind)
    assert theirs.config.max_position_embeddings == 32
    for model in (again.model, theirs.model):
        found = model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in ours.model.state_dict().items())
    tied = ours.model.config.tie_embeddings
    assert ("model.head.weight" in load_file(folders / kind / "model.safetensors")) != tied
    assert (theirs.model.head.weight is theirs.model.embedding.weight) == tied


@pytest.mark.deep
def test_both_write_the_same_text(trained, folders):
    from transformers import pipeline

    words = ["--prompt", "Oh", "--tokens", 12, "--temperature", 0, "--no-compile"]
    said = [invoke("generate", source, *words).stdout for source in (trained, folders / "safetensors", folders / "hf")]
    assert said[0] == said[1] == said[2]
    writes = pipeline("text-generation", model=str(folders / "hf"))
    (found, longer) = writes(["Oh", "To be or"], max_new_tokens=12, do_sample=False, batch_size=2)
    assert found[0]["generated_text"] + "\n" == said[0]
    assert longer[0]["generated_text"].startswith("To be or")


@pytest.mark.deep
def test_a_model_that_transformers_saved_is_read(folders, tmp_path):
    model = NSAForCausalLM.from_pretrained(folders / "hf", dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    exported = module.read_exported(tmp_path)
    found = exported.model.state_dict()
    assert exported.model.embedding.weight.dtype == torch.bfloat16
    assert all(torch.equal(found[name], value) for name, value in model.model.state_dict().items())


@pytest.mark.deep(but=["byte"])
@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_a_tokenizer_gives_the_same_ids(name, tmp_path):
    from transformers import AutoTokenizer

    ours = make_tokenizer(name)
    fast_tokenizer(ours).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = fast(text).input_ids
        assert ids == ours.encode(text).tolist()
        assert fast.decode(ids) == ours.decode(ids) == text
    batch = fast(["a", "bcd"], padding=True)
    assert batch.attention_mask[0] == [0] * (len(batch.input_ids[1]) - 1) + [1]


@pytest.mark.deep(but=["byte"])
@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_a_dialogue_becomes_text(name, tmp_path):
    from jinja2 import Template
    from transformers import AutoTokenizer

    fast_tokenizer(make_tokenizer(name)).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Who?\n"}, {"role": "assistant", "content": " I"}]
    wanted = "<|user|>\nWho?\n<|end|>\n<|assistant|>\n I<|end|>\n"
    assert Template(CHAT_TEMPLATE).render(messages=messages) == wanted
    assert fast.apply_chat_template(messages, tokenize=False) == wanted
    asked = fast.apply_chat_template(messages[:1], add_generation_prompt=True).input_ids
    assert asked == make_tokenizer(name).encode("<|user|>\nWho?\n<|end|>\n<|assistant|>\n").tolist()


def test_every_byte_has_its_id():
    fast = fast_tokenizer(ByteTokenizer())
    assert len(fast) == 256
    assert fast.decode(list("é".encode())) == "é"


def test_an_empty_folder_is_used(trained, tmp_path):
    (tmp_path / "out").mkdir()
    invoke("export", trained, "--to", "safetensors", "--out", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}
    files = list((tmp_path / "out").iterdir())
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    assert len({path.stat().st_mode for path in files}) == 1, "who may read one may read the other"


RUNS_ALONE = """
import sys, torch

folder = sys.argv[1]
tokens, wanted = torch.load(folder + "/wanted.pt")
program = torch.export.load(folder + "/out/decode_step.pt2")
compiled = torch._inductor.aoti_compile_and_package(
    program,
    package_path=folder + "/decode_step.aoti.pt2",
    # To compile its headers takes longer than to compile one program without them.
    inductor_configs={"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"},
)
(_, _, empty), _ = program.example_inputs
batch = tokens.shape[1]
for step in (program.module(), torch._inductor.aoti_load_package(compiled)):
    t = torch.zeros(batch, dtype=torch.int64)
    caches = [torch.zeros(batch, *cache.shape[1:], dtype=cache.dtype) for cache in empty]
    with torch.no_grad():
        found = torch.stack([step(token, t, caches).clone() for token in tokens])
    torch.testing.assert_close(found, wanted)
    assert t.tolist() == [len(tokens)] * batch
    try:
        step(tokens[0], t, caches)
    except RuntimeError as error:
        assert "t must be from 0 to 23: the caches have no other rows" in str(error)
    else:
        raise AssertionError("there is no row for one more")
assert "nsa_compile" not in sys.modules
"""


def draw_decoding(trained, folder, length):
    """Tokens `[length, 3]` and the logits after each, as the model of the run makes them, for another process."""
    model = load_trained(trained).model
    tokens = torch.randint(256, (length, 3), generator=torch.Generator().manual_seed(0))
    state, wanted = model.init_state(3, length), []
    for token in tokens:
        state, logits = model.decode_step(state, token)
        wanted.append(logits)
    torch.save((tokens, torch.stack(wanted)), folder / "wanted.pt")


def run_alone(code, folder):
    # Without the directory of the package on the path.
    command = [sys.executable, "-P", "-c", code, str(folder)]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.deep
def test_the_decode_step_runs_without_this_package_also_compiled_by_aotinductor(trained, tmp_path):
    invoke("export", trained, "--to", "decode-step", "--out", tmp_path / "out", "--max-len", 24)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["decode_step.pt2"]
    draw_decoding(trained, tmp_path, 24)
    run_alone(RUNS_ALONE, tmp_path)


RUNS_IN_ONNX = """
import sys
import numpy, onnxruntime, torch

folder = sys.argv[1]
tokens, wanted = torch.load(folder + "/wanted.pt")
session = onnxruntime.InferenceSession(folder + "/out/decode_step.onnx")
names = [given.name for given in session.get_inputs()]
assert names[:3] == ["tokens", "t", "cache_0"], names
assert [made.name for made in session.get_outputs()] == ["logits", "t_next", *(f"{name}_next" for name in names[2:])]

def empty(batch):
    shapes = {given.name: given.shape[1:] for given in session.get_inputs()[2:]}
    caches = {name: numpy.zeros((batch, *shape), numpy.float32) for name, shape in shapes.items()}
    return {"t": numpy.zeros(batch, numpy.int64), **caches}

for batch in (1, tokens.shape[1]):
    state = empty(batch)
    for token, logits in zip(tokens[:, :batch].numpy(), wanted[:, :batch]):
        made, *after = session.run(None, {"tokens": token, **state})
        torch.testing.assert_close(torch.from_numpy(made), logits)
        state = dict(zip(names[1:], after, strict=True))
    assert state["t"].tolist() == [len(tokens)] * batch
    for outside in (len(tokens), -1):
        state["t"][0] = outside
        try:
            session.run(None, {"tokens": token, **state})
        except Exception as error:
            assert "invalid index found, index = 24" in str(error), error
        else:
            raise AssertionError(f"there is no row {outside}")
assert "nsa_compile" not in sys.modules
"""


@pytest.mark.deep
def test_the_decode_step_runs_in_onnx(trained, tmp_path, capsys, caplog):
    invoke("export", trained, "--to", "onnx-decode-step", "--out", tmp_path / "out", "--max-len", 24)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["decode_step.onnx"]
    assert not capsys.readouterr().err
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    draw_decoding(trained, tmp_path, 24)
    run_alone(RUNS_IN_ONNX, tmp_path)


def refused(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    return error


def test_nothing_is_left_of_an_export_that_fails(trained, tmp_path, monkeypatch, capsys):
    def fail(*_, **__):
        raise SafetensorError("I/O error")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    said = refused(capsys, "export", trained, "--to", "safetensors", "--out", tmp_path / "out")
    assert f"'{tmp_path / 'out'}' cannot be written: I/O error; choose another place with --out DIR" in said
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line_for_a_decode_step_too(trained, tmp_path, capsys, monkeypatch, no_room):
    program = torch.export.export(torch.nn.Linear(8, 8), (torch.zeros(1, 8),))
    monkeypatch.setattr("nsa_compile.generation.exported_step.export_step", lambda step: program)
    with no_room():
        said = refused(capsys, "export", trained, "--to", "decode-step", "--out", tmp_path / "out")
    assert f"'{tmp_path / 'out'}' cannot be written: [Errno 27] File too large; choose another place" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_something_in_it_is_left_alone(trained, tmp_path, capsys):
    (tmp_path / "mine").write_text("x")
    said = refused(capsys, "export", trained, "--to", "hf", "--out", tmp_path)
    assert f"'{tmp_path}': it is not empty; choose another place with --out DIR" in said
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    for place, reason in ((tmp_path / "mine", "it is no directory"), (tmp_path / "a" / "b", "is not a directory")):
        assert reason in refused(capsys, "export", trained, "--to", "hf", "--out", place)


def test_room_is_for_the_decode_step(trained, tmp_path, capsys):
    said = refused(capsys, "export", trained, "--to", "hf", "--out", tmp_path / "out", "--max-len", 8)
    assert "--max-len 8 is for the room of a decode step, and this is --to hf; leave it out" in said


def test_what_is_no_run_is_refused(tmp_path, capsys):
    said = refused(capsys, "export", tmp_path / "nowhere", "--to", "hf", "--out", tmp_path / "out")
    assert "must be the directory of a run" in said
    assert "one of 'safetensors', 'hf', 'decode-step', 'onnx-decode-step'" in refused(
        capsys, "export", "x", "--to", "gguf", "--out", tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "bert"}, "is of model_type 'bert'; it must be 'nsa_compile'"),
        ({"head_dim": 7}, "head_dim = 7 must be even"),
        ({"pattern": {"window": 0}}, "pattern.window = 0 must be at least 1"),
        ({"pattern": {"size": 1}}, "pattern.size is not one of compress_block"),
        ({"dim": None}, "dim = None must be an integer"),
        ({"tokenizer": ["x"]}, "tokenizer = ['x'] must be of type str"),
        ({"tokenizer": "mine"}, "names the tokenizer 'mine'; it must be one of byte, gpt2"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings = 'x' must be of type int"),
        ({"mlp_hidden": 64}, "does not hold the model: by config.json, "),
        ("[]", "is of model_type None"),
        ("{", "cannot be read"),
        ("pickle", "is no file of safetensors"),
        ("other weights", "does not hold the model: by config.json, "),
        ("no weights", "does not hold the model: by config.json, "),
        ("lost", "is no file of safetensors"),
    ],
)
def test_a_damaged_folder_is_refused_in_one_line(folders, tmp_path, capsys, change, said):
    folder = tmp_path / "copy"
    shutil.copytree(folders / "safetensors", folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    if isinstance(change, dict):
        config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    elif change == "pickle":
        torch.save({"x": torch.zeros(1)}, weights)
    elif change.endswith("weights"):
        save_file({"x": torch.zeros(1)} if change == "other weights" else {}, weights)
    elif change == "lost":
        weights.unlink()
    else:
        config.write_text(change)
    error = refused(capsys, "generate", folder, "--prompt", "x", "--no-compile")
    assert said in error


def test_a_model_without_a_tokenizer_has_a_decode_step(folders, tmp_path, capsys):
    model = NSAForCausalLM.from_pretrained(folders / "hf")
    model.config.tokenizer = None
    model.save_pretrained(tmp_path / "model")
    invoke("export", tmp_path / "model", "--to", "decode-step", "--out", tmp_path / "step", "--max-len", 12)
    step = torch.export.load(tmp_path / "step" / "decode_step.pt2")
    (_, t, caches), _ = step.example_inputs
    tokens = torch.tensor([3, 5])
    torch.testing.assert_close(step.module()(tokens, t, caches), model(tokens[:, None]).logits[:, 0])
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "model"), "--to", "safetensors", "--out", str(tmp_path / "weights")])
    assert "names the tokenizer None" in capsys.readouterr().err


def test_a_missing_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as left:
        main(["export", "runs/some", "--out", "x"])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2
    assert "Missing option '--to'. Choose from: safetensors, hf, decode-step, onnx-decode-step" in line
