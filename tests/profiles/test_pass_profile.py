"""`profile passes` and `passes diff`: healthy models, wrong, raising and slow passes, and what was not measured."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from torch import fx

from nsa_compile import compiler_cache
from nsa_compile.cli import cli, main
from nsa_compile.config import load_config
from nsa_compile.errors import UserError
from nsa_compile.files import write_sealed
from nsa_compile.ops.cpp import kernel_directory
from nsa_compile.passes import ORDER
from nsa_compile.passes.pipeline import register
from nsa_compile.profiles import pass_profile
from nsa_compile.profiles.graph_diff import count_changes, render_side_by_side, side_by_side
from nsa_compile.profiles.pass_page import cost_cells, render_profile, write_profile_page
from nsa_compile.profiles.pass_profile import SCHEMA, profile_passes
from nsa_compile.profiles.prefixes import PrefixResults, measure_prefixes, measure_within
from tests.conftest import TINY_RUN, cold_cache
from tests.profiles.prefix_work import (
    work_that_compiles,
    work_that_ends_early,
    work_that_fails_when_it_comes_again,
    work_that_hangs,
    work_that_is_too_large,
    work_that_is_wrong,
)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def profile(changes, **arguments):
    overrides = [f"{key}={value}" for key, value in {**TINY_RUN, "compile.nested": "eager", **changes}.items()]
    settings = {"seq_len": 16, "repeats": 3, "limit_s": None, "tell": lambda line: None, **arguments}
    return profile_passes(load_config(None, overrides), **settings)


@pytest.fixture(scope="module")
def nsa():
    """The profile of a tiny block with one of NSA's branches, so that its loops compile quickly, and its graphs."""
    return profile({"model.branches": "[window]", "compile.nested": "aot_eager"}, seq_len=12)


# Nobody asks for ranges here.
PASSES = [name for name in ORDER if name != "annotate_ranges"]
DENSE = {"model.attention": "dense"}  # no loop, so that compiling it many times is quick


@pytest.mark.deep
def test_one_row_a_prefix(nsa):
    record, _ = nsa
    rows = record["prefixes"]
    assert record["schema"] == SCHEMA
    assert [row["name"] for row in rows] == [None, *PASSES]
    assert [row["passes"] for row in rows] == list(range(len(PASSES) + 1))
    assert all(a["nodes_after"] == b["nodes_before"] for a, b in pairwise(rows))
    assert [row["name"] for row in rows if row["changed"] and not row["matches"]] == [None]
    assert not rows[PASSES.index("fuse_selection_scatter") + 1]["changed"], "there is no selection"
    assert any(".py:" in match for row in rows for match in row["matches"]), "file and line"
    loop, batched = rows[PASSES.index("batch_prefill")], rows[PASSES.index("batch_prefill") + 1]
    assert batched["estimate"]["operators"] < loop["estimate"]["operators"] / 4
    assert batched["forward"]["median_s"] < loop["forward"]["median_s"]
    assert json.loads(json.dumps(record)) == record


@pytest.mark.deep
def test_times_are_honest(nsa):
    record, _ = nsa
    for row in record["prefixes"]:
        for direction in ("forward", "backward"):
            timing = row[direction]
            assert len(timing["samples_s"]) == 3
            assert timing["median_s"] == statistics.median(timing["samples_s"])
            assert timing["max_s"] < row["compile_s"], "compiling is not in it"


@pytest.mark.deep
def test_errors_are_those_of_rounding(nsa):
    record, _ = nsa
    assert 0 < record["eager_error"]["value"] < 1e-5
    for row in record["prefixes"]:
        assert row["error"]["explained"]
        assert row["error"]["value"] < 1e-5
        assert row["error"]["gradient"] < 1e-5


@pytest.mark.deep
def test_each_row_points_to_readable_graphs(nsa):
    record, graphs = nsa
    rows = record["prefixes"][1:]
    assert [r["graph_after"] for r in rows[:-1]] == [r["graph_before"] for r in rows[1:]]
    assert "scan" in graphs[rows[0]["graph_before"]]
    assert "scan" not in graphs[rows[-1]["graph_after"]].replace("nsa_compile.scan", "")
    assert all("# File: " in graph for graph in graphs)


@pytest.mark.deep
def test_the_page_needs_nothing_else(nsa, tmp_path):
    record, graphs = nsa
    path = tmp_path / "passes.html"
    write_profile_page(path, record, graphs)
    page = path.read_text()
    assert "<script" not in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert page.count("<svg") == 3
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert links
    assert links <= set(re.findall(r'id="([^"]+)"', page)), "each link leads somewhere"
    for name in PASSES:
        assert name in page


@pytest.mark.deep
def test_the_table_has_every_prefix(nsa):
    table = render_profile(nsa[0])
    for number, name in enumerate(["captured", *PASSES]):
        assert table.count(f"{number} {name}") == 2
    assert " !" not in table.replace("; ! marks", "")
    assert "not measured" not in table


# ----------------------------------------------------------------------------------------------------- planted faults


@pytest.fixture
def planted(request):
    """`planted(rewrite)` registers a pass that lets `rewrite(gm, node)` change the output `node` of the graph."""

    def add(rewrite):
        @register("planted")
        def run(gm: fx.GraphModule, context) -> bool:
            """Change the output."""
            output = gm.graph.output_node()
            (result,) = output.args[0]
            with gm.graph.inserting_before(output):
                new = rewrite(gm, result)
            new.meta = dict(result.meta)
            output.args = ((new,),)
            gm.recompile()
            context.match(result.name, "changed")
            return True

        request.addfinalizer(run.unregister)

    return add


@pytest.mark.deep
def test_a_wrong_pass_shows_in_its_row_alone(planted):
    planted(lambda gm, node: gm.graph.call_function(torch.mul, (node, 1.01)))
    *healthy, wrong = profile(DENSE)[0]["prefixes"]
    assert all(row["error"]["explained"] for row in healthy)
    assert not wrong["error"]["explained"]
    assert wrong["error"]["value"] == pytest.approx(0.01, rel=1e-3)
    assert cost_cells(wrong)[-1].endswith("!")


@pytest.mark.deep
def test_a_pass_that_raises_is_named_and_the_others_measured(planted, tmp_path):
    def fail(gm, node):
        raise RuntimeError("out of ideas")

    planted(fail)
    record, graphs = profile(DENSE)
    *healthy, raising = record["prefixes"]
    assert all("median_s" in row["forward"] for row in healthy)
    assert raising["not_measured"] == "RuntimeError: out of ideas"
    assert f"{len(healthy)} planted was not measured: RuntimeError: out of ideas" in render_profile(record)
    write_profile_page(tmp_path / "passes.html", record, graphs)
    assert "out of ideas" in (tmp_path / "passes.html").read_text()


# ------------------------------------------------------------------------------- a process that is ended for its prefix


@pytest.mark.deep
def test_a_prefix_that_hangs_and_one_that_ends_its_process_are_given_up(tmp_path):
    told = []
    results = PrefixResults(3, told.append)
    measure_within(5, tmp_path / "started", results, work_that_hangs)
    assert results.measured[1] == {"not_measured": "it took more than 5 s to compile and run"}
    assert results.measured[2] == {"not_measured": "its process was ended by SIGKILL"}
    assert results.given_up == {1, 2}
    assert set(results.timings) == {0, 3}
    by = results.timings[3]["by"]
    assert results.measured[3]["compile_s"] == by, "both are of the last process"
    assert results.measured[0]["compile_s"] != by, "compiled first, in the first process"
    assert [line[0] for line in told] == ["0", "1", "2", "3"]
    for row in (results.measured[0], results.measured[3]):
        with pytest.raises(ProcessLookupError):
            os.kill(int(row["compile_s"]), 0)
    assert (tmp_path / "started.told").read_text() == "clean\n", "it may put its files in order"
    started = int((tmp_path / "started").read_text())
    end = time.monotonic() + 60
    while psutil.pid_exists(started) and psutil.Process(started).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "what the process had started lives on"
        time.sleep(0.05)


def test_a_process_that_may_be_ended_compiles_into_a_directory_of_its_own(tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    monkeypatch.setenv(compiler_cache.VARIABLE, str(mine))
    write_sealed(kernel_directory(mine) / "window-0.so", b"a kernel")
    measure_within(60, tmp_path, PrefixResults(1, print), work_that_compiles)
    first, second = (tmp_path / "told").read_text().split("\n")[:2]
    directory, *before = first.split()
    assert before == ["window-0.so"], "kernels are taken along"
    assert second.split() == [directory, "left.so", "window-0.so"], "one for all processes of the command"
    assert not Path(directory).exists()
    assert [path.name for path in mine.rglob("*.so")] == ["window-0.so"]
    assert (mine / "precompiled_headers" / "header").exists(), "headers are shared"


def test_a_prefix_that_fails_when_it_comes_again_is_given_up():
    told = []
    results = PrefixResults(2, told.append)
    measure_within(60, None, results, work_that_fails_when_it_comes_again)
    assert results.given_up == {0, 1}
    assert results.measured[0] == {
        "not_measured": "RuntimeError: not again",
        "compile_s": 1.0,
        "inductor_cache_hit": False,
    }
    assert set(results.measured) - results.given_up == set(results.timings), "a timing of each that was measured"


@pytest.mark.deep
def test_a_process_that_ends_at_no_prefix_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="could not go on: its process ended with exit code 3"):
        measure_within(60, None, PrefixResults(3, print), work_that_ends_early)
    with pytest.raises(UserError, match="seq_len is 7"):
        measure_within(60, 7, PrefixResults(3, print), work_that_is_wrong)
    with pytest.raises(UserError, match=r"memory does not suffice .* allocate 7 bytes; give fewer tokens"):
        measure_within(60, None, PrefixResults(3, print), work_that_is_too_large)
    # One that does not even read what it is to do.
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(UserError, match="could not go on: its process ended with exit code 4"):
        measure_within(60, None, PrefixResults(3, print), work_that_ends_early)


def test_files_of_the_working_directory_are_no_modules_of_the_process(tmp_path, monkeypatch):
    (tmp_path / "tempfile.py").write_text("raise SystemExit('not the one')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with pytest.raises(UserError, match="exit code 3"):
        measure_within(60, None, PrefixResults(3, print), work_that_ends_early)


@pytest.mark.deep
def test_a_record_of_what_took_too_long(tmp_path, monkeypatch):
    def measure_all_but_three(limit_s, work, results):
        measure_prefixes(work, {0, 3}, results.take)
        results.measured |= {count: {"not_measured": f"it took more than {limit_s} s"} for count in (0, 3)}

    monkeypatch.setattr(pass_profile, "measure_within", measure_all_but_three)
    record, graphs = profile(DENSE, limit_s=5)
    rows = record["prefixes"]
    assert {row["passes"]: row["not_measured"] for row in rows if row["not_measured"]} == {
        0: "it took more than 5 s",
        3: "it took more than 5 s",
    }
    assert rows[3]["forward"] == {"not_measured": "it took more than 5 s"}
    assert "not measured" in render_profile(record)
    write_profile_page(tmp_path / "passes.html", record, graphs)


@pytest.mark.deep
def test_kernels_are_counted_and_cache_hits_marked(tmp_path, monkeypatch):
    """Equal graphs: Inductor compiles the first, and finds the others in its cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cold_cache(tmp_path / "cache")))
    first, *others = profile({**DENSE, "compile.nested": "inductor"})[0]["prefixes"]
    assert not first["inductor_cache_hit"]
    assert all(row["inductor_cache_hit"] for row in others)
    # Seven linear layers, each one product forward and two backward, plus attention in both directions.
    assert first["kernels"]["extern"] >= 3 * 7 + 2
    assert first["kernels"]["generated"] > 0
    assert all(row["kernels"] == first["kernels"] for row in others)
    assert "(cached)" in cost_cells(others[0])[5]


# ------------------------------------------------------------------------------------------------------- the commands


def invoke(*words, **changes):
    sets = [x for key, value in {**TINY_RUN, **changes}.items() for x in ("--set", f"{key}={value}")]
    return CliRunner().invoke(cli, [*words, *sets], catch_exceptions=False)


@pytest.mark.deep
def test_the_command_writes_what_it_prints(tmp_path):
    out = tmp_path / "profile"
    words = ["profile", "passes", "--seq-len", "16", "--repeats", "2", "--out", str(out), "--json"]
    result = invoke(*words, **{**DENSE, "compile.nested": "eager"})
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads((out / "passes.json").read_text())
    assert (out / "passes.html").exists()
    assert (out / "graph_0.py").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["profile", "passes", "--seq-len", "4"], "model.pattern.compress_block"),
        (["profile", "passes", "--repeats", "1"], "--repeats"),
        (["profile", "passes", "--limit", "0.5"], "--limit"),
        (["profile", "passes", "--limit", "nan"], "'nan' is not a finite number"),
        (["profile", "passes", "--limit", "inf"], "--limit"),
        (["profile", "passes", "--set", "train.device=cuda"], "needs a GPU and torch finds no GPU here"),
        (["profile", "passes", "--out", "/nowhere/out"], "'/nowhere' is not a directory"),
        (["passes", "diff", "batch_prefil"], "did you mean 'batch_prefill'?"),
        (["passes", "diff", "batch_prefill", "--out", "/nowhere/a.html"], "'/nowhere' is not a directory"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.deep
def test_diff_of_a_pass(tmp_path):
    page = tmp_path / "diff.html"
    changes = {"train.seq_len": 16, "model.branches": "[window]"}
    shown = invoke("passes", "diff", "raise_attention", "--width", "120", **changes)
    assert shown.exit_code == 0, shown.output
    assert "equal lines" in shown.stdout
    assert "softmax" in shown.stdout
    assert all(len(line) <= 120 for line in shown.stdout.partition("\n\n")[2].splitlines())
    written = invoke("passes", "diff", "raise_attention", "--out", str(page), "--json", **changes)
    result = json.loads(written.stdout)
    assert "nsa_compile.attention" in result["after"]
    assert "nsa_compile.attention" not in result["before"]
    assert "# File: " in page.read_text()


def test_diff_of_a_pass_that_runs_only_where_it_is_asked_for():
    shown = invoke("passes", "diff", "annotate_ranges", "--width", "200", **{"train.seq_len": 16, **DENSE})
    assert shown.exit_code == 0, shown.output
    assert "match    nsa.mlp" in shown.stdout
    assert "# Annotation: {'nsa_range': 'nsa.mlp'}" in shown.stdout


def test_diff_of_a_pass_that_does_not_run():
    with pytest.raises(Exception, match=r"compile\.disable names it"):
        invoke("passes", "diff", "eliminate_guards", **{"compile.disable": "[eliminate_guards]", **DENSE})


def test_side_by_side_folds_what_is_equal_and_keeps_the_source_line():
    body = ["# File: a.py:1, code: y = sin(x)", *(f"n{i}" for i in range(20))]
    rows = side_by_side("\n".join([*body, "old", "tail"]), "\n".join([*body, "new", "more", "tail"]))
    assert [(row.kind, row.left, row.right) for row in rows] == [
        ("folded", "18 equal lines", ""),
        ("same", body[0], body[0]),
        ("same", "n18", "n18"),
        ("same", "n19", "n19"),
        ("changed", "old", "new"),
        ("changed", "", "more"),
        ("same", "tail", "tail"),
    ]
    assert rows[5].left_number is None
    assert (rows[6].left_number, rows[6].right_number) == (23, 24)
    assert count_changes(rows) == (1, 2)
    assert side_by_side("a\nb", "a\nb") == []
    text = render_side_by_side(rows, 43)
    assert "…" in text.splitlines()[1]
    assert all(len(line) <= 43 + 20 for line in text.splitlines())  # escape codes of colours
