"""Another attention is one file and one line: the file of the documentation goes through everything that a run does."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import nsa_compile
from nsa_compile.cli import cli
from nsa_compile.config import load_config
from nsa_compile.config_cli import completions
from nsa_compile.data import load_corpus
from nsa_compile.errors import UserError
from nsa_compile.models import NSATransformer
from nsa_compile.models.flops import forward_flops_per_token
from nsa_compile.models.variant import REGISTERED
from nsa_compile.profiles.audit import audit_attention
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from nsa_compile.train.report.report_page import write_report
from nsa_compile.train.report.run_record import read_run
from tests.attention_programs import entry

PAGE = Path(__file__).parents[2] / "docs" / "own-operator.md"
COMPILED = {"compile.enabled": "true", "compile.nested": "eager"}


@pytest.fixture
def overrides(tiny_overrides, tmp_path, monkeypatch):
    """`tiny_overrides` of a model with the attention of the page, which lies in a file of its own."""
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition("## Add an attention")[2].partition("\n## ")[0]
    source = "\n\n".join(re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL))
    (tmp_path / "window_only.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "window_only", raising=False)
    monkeypatch.setitem(REGISTERED, "window", "window_only:ObservedWindow")
    torch._dynamo.reset()

    def make(**changes):
        return tiny_overrides(**{"model.attention": "window", "log.stats_every": 2, **changes})

    return make


@pytest.mark.deep(but=["loop"])
@pytest.mark.parametrize("changes", [COMPILED, {}], ids=["compiled", "loop"])
def test_it_trains_and_its_records_are_its_own(overrides, changes, capsys):
    config = load_config(overrides=overrides(**changes))
    directory = create_run_directory(config)
    summary = run(config, load_corpus(config), directory)
    assert summary["val_loss_end"] < summary["val_loss_start"]
    assert (summary["attention"], summary["notes"]) == ("window", [])
    assert (directory / "sample.txt").stat().st_size > 0
    assert ("which is slow" in capsys.readouterr().err) == (not changes)
    if changes:
        choices = json.loads((directory / "passes.json").read_text())["attention"]
        assert [choice["branch"] for choice in choices] == ["window"]

    rows = [json.loads(line) for line in (directory / "attention.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["step", "layer", "norm"]] * 2
    assert all(row["norm"] > 0 for row in rows)
    assert not any("gates" in json.loads(line) for line in (directory / "heartbeat_rank0.jsonl").open())
    record = read_run(directory)
    assert [row.norm for _, row in record.layers] == [row["norm"] for row in rows]
    pictures = write_report(record, directory / "report.html")
    assert record.problems == []
    assert {"loss", "norms"} <= {path.stem for path in pictures}
    page = (directory / "report.html").read_text()
    assert "norm of the output" in page
    assert "the mean norm of what attention adds" in page


def test_its_useful_work_is_counted(overrides):
    model = load_config(overrides=overrides()).model
    window, length = model.pattern.window, 20
    assert model.variant.pairs(model, length) == sum(min(t + 1, window) for t in range(length))
    matrices = sum(
        module.weight.numel() for module in NSATransformer(model).modules() if isinstance(module, torch.nn.Linear)
    )
    scores = model.n_layers * model.n_heads * (model.head_dim + model.value_dim) * model.variant.pairs(model, length)
    assert math.isclose(forward_flops_per_token(model, length), 2 * (matrices + scores / length))


@pytest.mark.deep
def test_the_audit_sees_its_operator_and_its_loop(overrides):
    changes = COMPILED | {"compile.nested": "aot_eager", "train.seq_len": 64}  # eager has no ranges in backward
    compiled = audit_attention(load_config(overrides=overrides(**changes)))
    assert {row["branch"] for row in compiled["observed"]} == {"window"}
    assert compiled["fallbacks"] == []
    (fallback,) = audit_attention(load_config(overrides=overrides()))["fallbacks"]
    assert (fallback["what"], fallback["reason"]) == ("a loop over the tokens stayed one", "compile.enabled = false")


@pytest.mark.deep
def test_it_decodes_as_it_trains_and_has_named_ranges(overrides):
    model = NSATransformer(load_config(overrides=overrides()).model).double()
    tokens = torch.randint(256, (2, 12))
    expected = nsa_compile.compile_blocks(model, nested="eager", nvtx=True, cache=False)(tokens)
    labels = " ".join(entry(nsa_compile.last_report(), "annotate_ranges").matches)
    # What leads from attention to the next product counts for the sum of branches, here too.
    assert {"nsa.proj", "nsa.win", "nsa.gate", "nsa.mlp"} == set(re.findall(r"nsa\.\w+", labels))
    state = model.init_state(2, 12)
    for t in range(12):
        state, logits = model.decode_step(state, tokens[:, t])
        torch.testing.assert_close(logits, expected[:, t])
    # Prompts of two lengths, by the prefill that every layer has; then each goes on at its own position.
    lengths = torch.tensor([8, 5])
    for prefill in (model.prefill, nsa_compile.compile_prefill(model, nested="eager", cache=False)):
        state, logits = prefill(tokens[:, :8], lengths, 12)
        for i in range(4):
            torch.testing.assert_close(logits, expected[[0, 1], lengths - 1 + i])
            state, logits = model.decode_step(state, tokens[[0, 1], lengths + i])


def test_its_name_and_its_rules_are_those_of_the_configuration(overrides):
    with pytest.raises(UserError, match=r"^model\.shared_kv = true must be false: a window alone"):
        load_config(overrides=overrides(**{"model.shared_kv": "true"}))
    with pytest.raises(UserError, match=r"^model\.attention = 'windows' must be one of nsa, dense, .*, window;"):
        load_config(overrides=overrides(**{"model.attention": "windows"}))
    assert completions("model.attention=")[-1] == "model.attention=window"
    assert load_config(overrides=overrides()).plain()["model"]["attention"] == "window"
    result = CliRunner().invoke(cli, ["verify", *(word for key in overrides() for word in ("--set", key))])
    assert str(result.exception) == "model.attention = 'window' leaves nothing to verify; use --set model.attention=nsa"
