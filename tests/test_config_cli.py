"""`nsa-compile config`: shown, checked, compared and explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nsa_compile.cli import _run
from nsa_compile.config import flatten, load_config

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


def test_diff_of_equal_configurations_is_empty(capsys, tmp_path):
    # The same with every default written out.
    (tmp_path / "same.yaml").write_text(load_config().to_yaml(), encoding="utf-8")
    assert config(capsys, "diff", PACKAGED, str(tmp_path / "same.yaml")) == (0, "", "")


def test_keys_lists_every_key_with_what_the_schema_says(capsys):
    code, out, _ = config(capsys, "keys", "--json")
    rows = {row["key"]: row for row in json.loads(out)["keys"]}
    assert code == 0
    assert set(rows) == set(dict(flatten(load_config().plain())))
    assert rows["train.steps"]["type"] == "integer ≥ 1"
    assert rows["train.steps"]["default"] == 300
    assert rows["model.dim"] | {"required": True} == rows["model.dim"]
    assert rows["model.pattern.window"]["meaning"].startswith("w, tokens of the sliding window")
    assert "key or column with the text" in rows["data.text_field"]["meaning"]
    for key, row in rows.items():
        if not row["required"]:
            json.dumps(row["default"])
            assert row["type"], key


def test_keys_of_one_section(capsys):
    code, out, _ = config(capsys, "keys", "model.pattern")
    assert code == 0
    assert "model.pattern.window" in out
    assert "train.steps" not in out


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
