"""The run configuration: what it accepts, and what it says about everything else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from nsa_compile.config import RunConfig, default_config_text, load_config
from nsa_compile.data.synthetic import make_synthetic
from nsa_compile.errors import UserError
from nsa_compile.models.config import NSAConfig, SparsePattern

PRESETS = sorted((Path(__file__).parent.parent / "configs").glob("*.yaml"))


def test_documented_default_is_the_packaged_one():
    (documented,) = [path for path in PRESETS if path.name == "shakespeare_cpu.yaml"]
    assert documented.read_text(encoding="utf-8") == default_config_text()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_the_comment_of_a_preset_tells_its_true_size(path):
    import torch

    from nsa_compile.models import NSATransformer

    comment = " ".join(re.match("(?:#.*\n)+", path.read_text(encoding="utf-8"))[0].replace("#", "").split())
    with torch.device("meta"):
        model = NSATransformer(load_config(str(path)).model)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    told = re.search(r"([\d.]+) M parameters", comment)[1]
    assert told == format(millions, ".1f" if millions < 10 else ".0f")


def test_resolved_yaml_loads_to_the_same_configuration(tmp_path):
    config = load_config(overrides=["optim.lr=3e-4", "model.pattern.index_convention=paper_v2"])
    path = tmp_path / "resolved.yaml"
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load_config(str(path)) == config


def test_overrides_are_typed_as_yaml_and_the_last_one_wins():
    config = load_config(
        overrides=[
            "train.steps=50",
            "train.steps=60",
            "optim.lr=3e-4",
            "optim.clip=null",
            "compile.disable=[batch_prefill]",
        ]
    )
    assert config.train.steps == 60
    assert config.optim.lr == 3e-4
    assert config.optim.clip is None
    assert config.compile.disable == ["batch_prefill"]


def test_a_task_of_bytes_takes_no_other_tokenizer():
    with pytest.raises(UserError, match=r"data\.tokenizer = 'gpt2' must be 'byte' for data\.name = 'copying'"):
        load_config(overrides=["data.name=copying", "data.tokenizer=gpt2", "model.vocab_size=50257"])


def test_a_file_needs_only_what_has_no_default(tmp_path):
    path = tmp_path / "run.yaml"
    model = {"vocab_size": 256, "dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32}
    path.write_text(yaml.safe_dump({"model": model}), encoding="utf-8")
    assert load_config(str(path)).model == NSAConfig(**model)


def test_the_configuration_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        load_config().train.steps = 5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.seqlen=3", "unknown configuration key 'train.seqlen'; did you mean 'train.seq_len'?"),
        ("steps=4", "did you mean 'train.steps'?"),
        ("model.pattern.windows=4", "did you mean 'model.pattern.window'?"),
        ("model.attention=mobb", "model.attention = 'mobb' must be one of nsa, dense, gqa, "),
        ("zzz.yyy=4", "the sections are run, model, data, train, lora, optim, ddp, compile, "),
        ("train.steps", "must have the form KEY=VALUE"),
        ("train.steps=0", "train.steps = 0 is not allowed: input should be greater than or equal to 1"),
        ("train.steps=1.5", "train.steps = 1.5 is not allowed"),
        ("train.steps='12'", "train.steps = '12' is not allowed"),
        ("train.dtype=fp16", "'float32' or 'bf16'"),
        ("train=5", "train = 5 is not allowed: it is a section, with keys of its own; set one of those in the file or"),
        ("train=5", "with --set train.steps=VALUE"),
        ("train=", "train is empty: it is a section"),
        ("model.pattern=5", "model.pattern = 5 is not allowed: it is a section"),
        ("model.pattern=5", "with --set model.pattern.compress_block=VALUE"),
        ("run.name=5", """change it in the file or with --set 'run.name="5"'"""),
        ("run.name=1e3", """change it in the file or with --set 'run.name="VALUE"'"""),
        ("run.name=", "run.name is empty: "),
        ("train.steps=", "train.steps is empty: "),
        ("train.steps=[", "is not valid YAML"),
        ("optim.lr=.nan", "optim.lr = nan is not allowed"),
        ("optim.betas=[0.9, 1.0]", "optim.betas = 1.0 is not allowed"),
        ("optim.warmup=301", "optim.warmup = 301 must not exceed train.steps = 300"),
        ("train.seq_len=8", "train.seq_len = 8 must be at least model.pattern.compress_block = 16"),
        ("data.tokenizer=gpt2", "model.vocab_size = 256 must be at least 50257"),
        ("data.cache_dir=''", "data.cache_dir = '' is not allowed"),
        ("data.min_distance=0", "data.min_distance = 0 is not allowed"),
        ("model.n_heads=3", "model.n_heads = 3 must be a multiple of n_kv_heads = 2"),
        ("model.n_layers=true", "model.n_layers = True must be an integer"),
        ("model.head_dim=31", "model.head_dim = 31 must be even"),
        ("model.pattern.select_block=33", "model.pattern.select_block = 33 must be a multiple of compress_stride = 8"),
        ("model.pattern.num_selected=2", "model.pattern.num_selected = 2 must be at least num_initial + num_local"),
        ("model.pattern.window=0", "model.pattern.window = 0 must be at least 1"),
        ("model={}", "model.vocab_size is missing and has no default"),
        ("compile.disable=[batch]", "compile.disable = 'batch' is not allowed: the passes are sink_tables, "),
        ("run.name=a/b", "run.name = 'a/b' is not allowed"),
        ("ddp.backend=mpi", "ddp.backend = 'mpi' is not allowed"),
        ("ddp.bucket_mb=0.5", "ddp.bucket_mb = 0.5 is not allowed"),
        ("train.activation_checkpointing=0-4", "train.activation_checkpointing = '0-4' must be none, all, or ranges"),
        ("train.activation_checkpointing=3-1", "train.activation_checkpointing = '3-1' must be none, all, or ranges"),
    ],
)
def test_a_mistake_is_one_line_that_names_value_and_rule(override, expected):
    with pytest.raises(UserError) as error:
        load_config(overrides=[override])
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_each_attention_has_its_own_sizes():
    # Whichever comes first; the packaged file's sizes are those of nsa.
    for overrides in (
        ["model.attention=moba", "model.pattern.block=8"],
        ["model.pattern.block=8", "model.attention=moba"],
    ):
        config = load_config(overrides=overrides)
        assert config.plain()["model"]["pattern"] == {"block": 8, "num_selected": 3}
        assert load_config(overrides=["model.attention=dense"]).model.pattern == load_config().model.pattern
    text = config.to_yaml()
    assert "block: 8" in text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model.pattern.window=4"],
            "unknown configuration key 'model.pattern.window'; 'model.pattern' has block, num_s",
        ),
        (["model.pattern.blok=4"], "did you mean 'model.pattern.block'?"),
        (["model.pattern.block=0"], "model.pattern.block = 0 must be at least 1"),
        (["model.pattern.block=1.5"], "model.pattern.block = 1.5 must be an integer"),
        (["data.name=copying"], "data.min_distance = null must be a number for model.attention = 'moba'"),
    ],
)
def test_a_mistake_in_sizes_of_another_attention_is_one_line(overrides, expected):
    with pytest.raises(UserError) as error:
        make_synthetic(load_config(overrides=["model.attention=moba", *overrides]), held_out=False)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {steps: 1, steps: 2}", "key 'steps' is given twice"),
        ("train:\n  steps: [1", "is not valid YAML at line 2"),
        ("- a list", "must hold sections"),
        ("", "must hold sections"),
        ("train: {step: 3}", "did you mean 'train.steps'?"),
        ("model: {pattern: {windw: 3}}", "did you mean 'model.pattern.window'?"),
        ("trian: {}", "did you mean 'train'?"),
        ("train: {steps: 10}", "the section model is missing: give it at least vocab_size, dim, n_layers, n_heads, "),
        ("model: {dim: 8, n_heads: 2}", "model.vocab_size is missing and has no default, and so are n_layers, "),
        ("train: 2024-13-45", "cannot be read: month must be in 1..12"),
        ("train: " + "[" * 5000 + "]" * 5000, "cannot be read: it is nested too deeply"),
        ("train: &t {steps: *t}", "must not hold more than 10,000 values"),
        ("x" * 5000, "must hold sections (run, model, data, …), not 'xxx"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_config(str(path))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "a0: &a0 {x: 1}\n"
            + "\n".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 10)),
            "must not hold more than 10,000 values",
        ),
        ("a0: &a0 {x: 1}\n" + "\n".join(f"a{i}: &a{i} {{<<: *a{i - 1}, y{i}: 1}}" for i in range(1, 500)), "10,000"),
        ("\n".join(f"key{i}: {i}" for i in range(200_000)), "must not hold more than 262,144 bytes"),
        ("[" + "a," * 20_000 + "]", "must not hold more than 10,000 values"),
        (
            "train: {steps: " + "1" * 100_000 + "x}",
            "section model is missing",
        ),  # whether it is a number once took 100 s
        ("train: {steps: 0x" + "f" * 5000 + "}", "a number must have at most 128 bits"),
        ("train: {steps: 1" + ":1" * 50_000 + "}", "a number must have at most 128 bits"),
        ("{" + ", ".join(f"{i * (2**61 - 1)}: 1" for i in range(3000)) + "}", "unknown configuration key '0'"),
        ("? [a, b]\n: 1", "a key must be a single word"),
        ("k" * 900 + ": 1", "unknown configuration key 'kkk"),
    ],
    ids=[
        "merges",
        "chain of merges",
        "keys",
        "list",
        "digits",
        "hex",
        "colons",
        "collisions",
        "complex key",
        "long key",
    ],
)
def test_a_file_that_means_to_take_for_ever_is_one_short_line(tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        load_config(str(path))
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


def test_a_merged_mapping_is_one_of_its_keys(tmp_path):
    model = "{vocab_size: 256, dim: 64, n_layers: 1, n_heads: 2, n_kv_heads: 1, head_dim: 32}"
    path = tmp_path / "run.yaml"
    path.write_text(f"model:\n  <<: {model}\n  dim: 32\n", encoding="utf-8")
    assert load_config(str(path)).model.dim == 32


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=18446744073709551616", "train.steps = 18446744073709551616 is not allowed: input should be less"),
        ("train.seq_len=18446744073709551616", "train.seq_len = 18446744073709551616 is not allowed"),
        ("model.dim=18446744073709551616", "model.dim = 18446744073709551616 must be at most 2147483647"),
        ("model.pattern.window=18446744073709551616", "model.pattern.window = 18446744073709551616 must be at most"),
        ('run.dir="a\\0b"', r"run.dir = 'a\x00b' is not allowed: it must not hold line ends or control characters"),
        ('data.name="a\\nerror: forged"', r"data.name = 'a\nerror: forged' is not allowed"),
        ('data.cache_dir="\\e[31mred"', r"data.cache_dir = '\x1b[31mred' is not allowed"),
        ("run.dir=" + "d" * 10_000, "run.dir = 'ddd"),
        ("data.name=" + "d" * 10_000, "data.name = 'ddd"),
        ("run.name=" + "n" * 10_000, "run.name = 'nnn"),
        ("k\x1b[31m" * 1000 + "=1", r"unknown configuration key 'k\x1b[31m"),
        ("k\ny=1", r"unknown configuration key 'k\ny'"),
        ("train.steps", "must have the form"),
    ],
)
def test_an_absurd_value_is_one_short_line_without_control_characters(override, expected):
    with pytest.raises(UserError, match=re.escape(expected)) as error:
        load_config(overrides=[override])
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("kind", ["/dev/zero", "pipe", "directory", "long"])
def test_a_file_that_is_none_is_one_line(tmp_path, kind):
    path = {"/dev/zero": "/dev/zero", "long": "p" * 10_000}.get(kind, str(tmp_path / "x"))
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "directory":
        os.mkdir(path)
    with pytest.raises(UserError, match=r"cannot be read: (it is not a reg|Is a directory|File name too long)"):
        load_config(path)


def test_a_link_to_a_file_is_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text(default_config_text(), encoding="utf-8")
    (tmp_path / "link").symlink_to("run.yaml")
    assert load_config(str(tmp_path / "link")) == load_config()


def test_a_warm_up_follows_the_length_of_the_run_unless_it_is_given():
    for steps, expected in ((300, 30), (20, 2), (1, 0)):
        config = load_config(overrides=[f"train.steps={steps}"])
        assert config.optim.warmup_of(config.train.steps) == expected
    config = load_config(overrides=["train.steps=20", "optim.warmup=20"])
    assert config.optim.warmup_of(config.train.steps) == 20
    with pytest.raises(UserError, match=r"optim\.warmup = 21 must not exceed train\.steps = 20"):
        load_config(overrides=["train.steps=20", "optim.warmup=21"])


@given(
    st.builds(
        dict,
        compress_block=st.integers(-1, 8),
        compress_stride=st.integers(-1, 8),
        select_block=st.integers(-1, 8),
        num_selected=st.integers(-1, 6),
        window=st.integers(-1, 3),
        num_initial=st.integers(-1, 3),
        num_local=st.integers(-1, 3),
    )
)
def test_a_pattern_is_accepted_exactly_when_it_keeps_the_papers_rules(fields):
    block, stride, select = fields["compress_block"], fields["compress_stride"], fields["select_block"]
    valid = (
        min(block, stride, select, fields["window"], fields["num_local"]) >= 1
        and fields["num_initial"] >= 0
        and block % stride == 0
        and select % stride == 0
        and fields["num_selected"] >= fields["num_initial"] + fields["num_local"]
    )
    if valid:
        SparsePattern(**fields)
    else:
        with pytest.raises(ValueError, match=" must be "):
            SparsePattern(**fields)


def test_validating_a_configuration_does_not_import_torch():
    load = "[c.load_config(None, [f'model.attention={name}']) for name in ('nsa', 'dense')]"
    code = f"import sys, nsa_compile.config as c; {load}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_pass_can_be_disabled_by_its_name():
    from nsa_compile.passes.pipeline import pipeline

    names = [p.name for p in pipeline()]
    assert load_config(overrides=[f"compile.disable=[{', '.join(names)}]"]).compile.disable == names


def test_schema_rejects_unknown_keys_without_the_loader():
    with pytest.raises(ValidationError, match="extra"):
        RunConfig.model_validate({"model": load_config().model, "traim": {}})


@pytest.mark.parametrize(
    ("text", "blocks"), [("none", []), ("all", [0, 1, 2, 3]), ("2", [2]), ("0-1,3", [0, 1, 3]), ("1, 2-3", [1, 2, 3])]
)
def test_ranges_of_blocks_to_checkpoint(text, blocks):
    config = load_config(overrides=[f"train.activation_checkpointing={text}"])
    assert sorted(config.checkpointed_blocks()) == blocks


def test_a_hostile_file_runs_no_code_and_is_one_line(tmp_path):
    executed = tmp_path / "executed"
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(f"run:\n  name: !!python/object/apply:os.mkdir ['{executed}']\n", encoding="utf-8")
    with pytest.raises(UserError, match="is not valid YAML at line 2") as error:
        load_config(str(hostile))
    assert "\n" not in str(error.value)
    # References that double at each line would fill any memory, if they were copied.
    bomb = "\n".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 64))
    hostile.write_text(f"a0: &a0 [x, x]\n{bomb}\n", encoding="utf-8")
    with pytest.raises(UserError, match="must not hold more than 10,000 values"):
        load_config(str(hostile))
    assert not executed.exists()
