"""`nsa-compile passes` on models small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner

import nsa_compile
from nsa_compile.cli import cli
from nsa_compile.errors import UserError
from nsa_compile.passes.pipeline import pipeline
from nsa_compile.passes.report import Guard, Report, ScanReport
from nsa_compile.profiles.rendering import render_report, with_unit
from tests import processes


@pytest.fixture
def explain(tiny_overrides):
    """`explain("--json", **{"train.seq_len": 32})`: the output of the command on the tiny model."""

    def run(*flags: str, **changes: object) -> str:
        sets = [word for override in tiny_overrides(**changes) for word in ("--set", override)]
        result = CliRunner().invoke(cli, ["passes", "explain", *flags, *sets], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def test_list_names_every_pass_in_order():
    result = CliRunner().invoke(cli, ["passes", "list", "--json"])
    rows = json.loads(result.stdout)["passes"]
    assert [row["name"] for row in rows] == [p.name for p in pipeline()]
    assert [row["order"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(row["summary"].endswith(".") for row in rows)
    table = CliRunner().invoke(cli, ["passes", "list"]).stdout
    assert all(row["name"] in table and row["summary"] in table for row in rows)


@pytest.mark.deep
def test_explain_tells_what_became_of_each_carry(explain):
    output = explain()
    assert "a loop of 32 steps became" in output
    assert "STAYED A LOOP" not in output
    rows = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip()}
    assert rows["k_slc"] == ["Rows", "dropped"]
    assert rows["recent_k"] == ["Rows", "none", "needed"]


@pytest.mark.deep
def test_explain_as_json_is_the_report(explain):
    explained = json.loads(explain("--json"))
    report = nsa_compile.last_report()
    assert explained["report"] == report.to_dict()
    assert explained["seq_len"] == 32
    assert explained["carries"][0] == "recent_k"
    assert len(explained["carries"]) == len(report.scans[0].carries)


def test_explain_shows_what_each_pass_bought(explain):
    table = explain().split("estimated forward cost after")[1].split("\n\n")[0]
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines() if line.strip()}
    assert {"captured", *(p.name for p in pipeline())} <= set(rows)
    before, after = (float(rows[name][0].replace(",", "")) for name in ("captured", "batch_prefill"))
    assert after < before / 5


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1_234_567, "1.23 MB"), (5e15, "5e+03 TB")]
)
def test_numbers_get_a_unit(value, text):
    assert with_unit(value, "B") == text


@pytest.mark.deep
def test_a_guard_that_stays_is_named(explain):
    output = explain(**{"compile.disable": "[eliminate_guards]"})
    assert "eliminate_guards\n  skipped: disabled" in output
    assert "k_slc     Rows    kept" in output


def test_guards_are_shown_beside_their_carry():
    guards = [Guard(1, "left", False), Guard(1, "found", True)]
    scan = ScanReport("scan", 4, batched=True, carries=["Known", "Rows"], guards=guards)
    rows = render_report(Report("eager", scans=[scan]), ["t", "keys"]).splitlines()
    assert rows[-2].split(maxsplit=2) == ["t", "Known", "none needed"]
    assert rows[-1].split(maxsplit=2) == ["keys", "Rows", "dropped, kept (as the step finds it)"]


def test_a_scan_that_stays_a_loop_says_why(explain):
    output = explain(**{"compile.disable": "[resolve_carries]"})
    assert "scan STAYED A LOOP of 32 steps" in output
    assert "resolve_carries was skipped: disabled" in output
    assert "batched operators" not in output


def test_a_decline_names_operation_line_and_reason():
    def running_total(total, x):
        total = torch.tanh(total * 0.5 + x)
        return total, total

    def run(x):
        return nsa_compile.scan(running_total, torch.zeros(3), x)[1]

    nsa_compile.compile(run, nested="eager", cache=False)(torch.randn(4, 3))
    output = render_report(nsa_compile.last_report())
    assert "scan STAYED A LOOP of 4 steps" in output
    line = running_total.__code__.co_firstlineno + 1
    assert f"aten.tanh.default at {__file__}:{line}: the recurrence has no parallel form" in output


def test_dense_attention_has_nothing_to_batch(explain):
    assert "holds no scan" in explain(**{"model.attention": "dense"})


def passes_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from nsa_compile.cli import main; main()", "passes", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.mark.deep(but=["arguments6---config and --set do not apply; leave them out"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["lst"], "unknown command 'lst'; did you mean 'list'?"),
        (["explain", "--confg", "x"], "unknown option '--confg'; did you mean '--config'?"),
        (["explain", "--config", "missing.yaml"], "configuration file 'missing.yaml' does not exist"),
        (["explain", "--set", "train.seqlen=64"], "did you mean 'train.seq_len'?"),
        (["explain", "--set", "compile.disable=[resolve]"], "compile.disable"),
        (["explain", "missing.py"], "there is no file 'missing.py'; give the path of a Python program"),
        (["explain", "my.py", "--set", "train.seq_len=64"], "--config and --set do not apply; leave them out"),
    ],
)
def test_a_users_mistake_is_one_line_found_before_torch_is_imported(arguments, expected, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')", encoding="utf-8")
    result = passes_command(*arguments, PYTHONPATH=os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


@pytest.mark.deep
def test_explain_in_a_process_of_its_own_needs_no_compiler(tiny_overrides):
    environment = {**os.environ, "PATH": "/nowhere", "CXX": "no-such-compiler"}
    result = processes.run("passes", "explain", "--json", *processes.sets(tiny_overrides()), env=environment)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["report"]["scans"][0]["batched"]


def explain_script(tmp_path, source, *flags):
    path = tmp_path / "program.py"
    path.write_text(f"import torch, nsa_compile\n{source}", encoding="utf-8")
    return CliRunner().invoke(cli, ["passes", "explain", str(path), *flags], catch_exceptions=False)


RECURRENCES = """
def average(xs):
    return nsa_compile.scan(lambda c, x: ((c + x).tanh(), c), xs[0] * 0, xs)[1]

f = nsa_compile.compile(average, nested="eager")
for length in (3, 4):
    f(torch.randn(length))
print("done")
"""


@pytest.mark.deep
def test_explain_tells_of_every_graph_that_a_script_compiles(tmp_path):
    for _ in range(2):  # the second time nothing is taken from the cache either
        torch._dynamo.reset()
        output = explain_script(tmp_path, RECURRENCES).stdout
        assert output.startswith("done\nReport 1 of 2 on ")
        assert "STAYED A LOOP of 3 steps" in output
        assert "STAYED A LOOP of 4 steps" in output
        assert "program.py:4" in output
        assert "Cache hit" not in output
        assert "estimated forward cost after" in output


def test_explain_of_a_script_as_json_leaves_stdout_to_the_reports(tmp_path):
    explained = json.loads(explain_script(tmp_path, RECURRENCES, "--json").stdout)
    reports = [Report.from_dict(report) for report in explained["reports"]]
    assert [report.scans[0].length for report in reports] == [3, 4]


def test_explain_tells_why_a_loop_runs_as_it_is_written(tmp_path):
    source = """
@nsa_compile.loop
def f(x):
    out = []
    for t in range(len(x)):
        out.append(x[t] if x[t] > 0 else -x[t])
    return torch.stack(out)

f(torch.ones(3))
"""
    text = explain_script(tmp_path, source).stdout
    assert "RUNS AS IT IS WRITTEN: correct, and slow. Why:" in text
    assert ":7: it reads a number out of a tensor" in text
    (report,) = json.loads(explain_script(tmp_path, source, "--json").stdout)["reports"]
    assert Report.from_dict(report).left_alone.reason.startswith("it reads a number out of a tensor")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", "compiled nothing; call a function made by nsa_compile.compile"),
        ("raise KeyError('x')", "failed: KeyError: 'x'; python "),
        ("nsa_compile.compile(", "failed: SyntaxError: "),
        ("raise SystemExit('stop')", "left with 'stop'; python "),
    ],
)
def test_a_script_that_cannot_be_explained_is_one_line(tmp_path, source, expected):
    with pytest.raises(UserError) as error:
        explain_script(tmp_path, source)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
