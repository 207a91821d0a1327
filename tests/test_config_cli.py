"""`nsa-compile config`: shown, checked, compared and explained."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from nsa_compile.cli import _run, main
from nsa_compile.config import flatten, load_config
from nsa_compile.models.variant import REGISTERED, find

PACKAGED = str(Path(__file__).parent.parent / "configs" / "shakespeare_cpu.yaml")


def config(capsys, *arguments):
    code = _run(["config", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_show_prints_what_load_config_takes_back(capsys, tmp_path):
    code, out, _ = config(capsys, "show", "--set", "train.steps=50")
    assert code == 0
    (tmp_path / "run.yaml").write_text(out, encoding="utf-8")
    assert load_config(str(tmp_path / "run.yaml")) == load_config(None, ["train.steps=50"])
    code, out, _ = config(capsys, "show", "--set", "train.steps=50", "--json")
    assert json.loads(out) == load_config(None, ["train.steps=50"]).plain()


def test_validate_has_a_line_for_each_file(capsys, tmp_path):
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model: {}\n", encoding="utf-8")
    assert config(capsys, "validate", PACKAGED) == (0, f"{PACKAGED}: ok\n", "")
    code, out, _ = config(capsys, "validate", PACKAGED, str(wrong), "missing.yaml")
    first, second, third = out.splitlines()
    assert code == 2
    assert first == f"{PACKAGED}: ok"
    assert second.startswith(f"{wrong}: model.vocab_size is missing")
    assert third.startswith("missing.yaml: configuration file 'missing.yaml' does not exist")
    code, out, _ = config(capsys, "validate", PACKAGED, str(wrong), "--json")
    assert code == 2
    assert [row["ok"] for row in json.loads(out)["files"]] == [True, False]


def test_diff_tells_the_keys_that_differ_in_files_and_runs(capsys, tmp_path):
    run = tmp_path / "run-1"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(
        load_config(None, ["train.steps=50", "model.pattern.window=32"]).to_yaml(), encoding="utf-8"
    )
    code, out, _ = config(capsys, "diff", PACKAGED, str(run), "--json")
    assert code == 1
    assert json.loads(out) == {"differences": {"train.steps": [300, 50], "model.pattern.window": [64, 32]}}
    code, out, _ = config(capsys, "diff", PACKAGED, str(run))
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["model.pattern.window", "train.steps"]


def test_sizes_of_different_attentions_differ_from_null(capsys, tmp_path):
    (tmp_path / "moba.yaml").write_text(load_config(None, ["model.attention=moba"]).to_yaml(), encoding="utf-8")
    code, out, _ = config(capsys, "diff", PACKAGED, str(tmp_path / "moba.yaml"), "--json")
    differences = json.loads(out)["differences"]
    assert code == 1
    assert differences["model.attention"] == ["nsa", "moba"]
    assert differences["model.pattern.block"] == [None, 512]
    assert differences["model.pattern.window"] == [64, None]


def test_diff_of_equal_configurations_is_empty(capsys, tmp_path):
    # The same with every default written out.
    (tmp_path / "same.yaml").write_text(load_config().to_yaml(), encoding="utf-8")
    assert config(capsys, "diff", PACKAGED, str(tmp_path / "same.yaml")) == (0, "", "")


def test_keys_lists_every_key_with_what_the_schema_says(capsys):
    code, out, _ = config(capsys, "keys", "--json")
    listed = json.loads(out)["keys"]
    assert code == 0
    for attention in REGISTERED:  # each with sizes of its own
        keys = {row["key"] for row in listed if attention in row.get("attentions", [attention])}
        plain = load_config().plain()
        plain["model"]["pattern"] = asdict(find(attention).pattern())
        assert keys == set(dict(flatten(plain)))
    rows = {row["key"]: row for row in listed if "nsa" in row.get("attentions", ["nsa"])}
    assert rows["train.steps"]["type"] == "integer ≥ 1"
    assert rows["train.steps"]["default"] == 300
    assert rows["model.dim"] | {"required": True} == rows["model.dim"]
    assert rows["model.pattern.window"]["meaning"].startswith("Tokens of the sliding window, w,")
    assert rows["data.text_field"]["meaning"] == "Key or column with the text, for JSON lines and Parquet"
    assert len({row["meaning"] for row in rows.values()}) == len(rows)
    for row in listed:
        key = row["key"]
        # A sentence or a phrase of its own, not the key said again or a piece of another's.
        assert re.fullmatch(r"[A-Z][^`\n]{14,}[^.;:`\s]", row["meaning"]), (key, row["meaning"])
        assert "None" not in row["meaning"], "a file says null"
        if not row["required"]:
            json.dumps(row["default"])
            assert row["type"], key


def test_keys_of_one_section(capsys):
    code, out, _ = config(capsys, "keys", "model.pattern")
    assert code == 0
    assert "model.pattern.window" in out
    assert "model.pattern of nsa, dense: Which keys a query of NSA sees" in out
    assert "model.pattern of moba: " in out
    assert "train.steps" not in out


@pytest.mark.parametrize(
    ("incomplete", "expected"),
    [
        ("train.se", ["train.seq_len="]),
        ("train.dtype=", ["train.dtype=float32", "train.dtype=bf16"]),
        ("model.pattern.index_convention=p", ["model.pattern.index_convention=paper_v2"]),
        ("optim.fused=t", ["optim.fused=true"]),
        ("train.steps=", []),
        ("nothing=", []),
    ],
)
def test_a_shell_completes_keys_and_values(incomplete, expected, monkeypatch, capsys):
    monkeypatch.setenv("_NSA_COMPILE_COMPLETE", "zsh_complete")
    monkeypatch.setenv("COMP_WORDS", f"nsa-compile train --set {incomplete}")
    monkeypatch.setenv("COMP_CWORD", "3")
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.splitlines()[1::3] == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.dty", ["plain,train.dtype="]),
        ("train.dtype =", ["plain,float32", "plain,bf16"]),
        ("train.dtype = b", ["plain,bf16"]),
    ],
)
def test_bash_completes_a_value_though_it_takes_it_for_a_word_of_its_own(words, expected, monkeypatch, capsys):
    monkeypatch.setenv("_NSA_COMPILE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"nsa-compile train --set {words}")
    monkeypatch.setenv("COMP_CWORD", str(2 + len(words.split())))
    with pytest.raises(SystemExit):
        main([])
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["keys", "trian"], "'trian' is no section"),
        (["show", "--set", "train.step=1"], "did you mean 'train.steps'?"),
        (["diff", PACKAGED, "missing"], "configuration file 'missing' does not exist"),
        (["validate"], "FILE"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, expected):
    code, out, err = config(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert expected in err
