"""`nsa-compile bench` at sizes small enough for a test: what it measures, prints, records and refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from nsa_compile.analyses import attention_costs
from nsa_compile.cli import cli
from nsa_compile.ops.selected.ranges import selected_attention_v1
from nsa_compile.profiles import bench, measure
from nsa_compile.profiles.bench_views import VIEWS, describe
from tests import processes

LAYER = ["--seq-lens", "32", "--heads", "2", "--groups", "1", "--head-dim", "8", "--pattern", "8/4/8/3/8"]
MODEL = ["--seq-lens", "32", "--layers", "1", "--dim", "32", "--head-dim", "8", "--pattern", "8/4/8/3/8"]
QUICK = ["--repeats", "2", "--nested", "eager"]
TIMING = {"median_s", "min_s", "max_s", "samples_s"}


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(cli, ["bench", *arguments], catch_exceptions=False)
    assert result.exit_code == exit_code, result.output
    return result


def check_record(record: dict, name: str, repeats: int) -> None:
    """What every record tells: where, with what, and every sample of every timing."""
    assert record["benchmark"] == name
    assert record["environment"]["machine"]["processor"]
    assert record["environment"]["packages"]["torch"] == torch.__version__
    assert record["settings"]["repeats"] == repeats
    assert record["settings"]["device"] == "cpu"
    timings = [t for row in record["results"] for t in row.values() if isinstance(t, dict) and "median_s" in t]
    assert timings
    for timing in timings:
        assert set(timing) >= TIMING
        assert len(timing["samples_s"]) == repeats
        assert 0 < timing["min_s"] <= timing["median_s"] <= timing["max_s"]


def check_picture(path: Path) -> None:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


def test_attention_is_measured_in_both_directions(tmp_path):
    out, plot = tmp_path / "new" / "record.json", tmp_path / "plots" / "figure.png"
    files = ("--out", str(out), "--plot", str(plot))
    wish = ("--attention", "sparse", "--dtype", "bfloat16", "--memory")
    result = run("attention", *LAYER, *QUICK, *wish, *files, "--json")
    record = json.loads(result.stdout)
    check_record(record, "attention", 2)
    check_picture(plot)
    assert record == json.loads(out.read_text())
    assert record["pattern"]["window"] == 8
    assert "measured S = 32 forward\n" in result.stderr
    rows = record["results"]
    assert [(row["seq_len"], row["direction"]) for row in rows] == [(32, "forward"), (32, "forward+backward")]
    for row in rows:
        assert row["batched"]
        assert row["ratio"] == row["dense"]["median_s"] / row["sparse"]["median_s"]
        assert row["operators"]["window"] == "window_attention"
        assert set(row["implementations"]) == {"compressed", "selected", "window"}
        assert set(row["peak_bytes"]) == {"sparse", "dense"}
    table = VIEWS["attention"].table(rows)
    assert "window: window_attention (" in table
    assert "peak memory" in table
    assert describe(record["settings"], record["environment"]).startswith("batch 1, heads 2, groups 1, head_dim 8")


@pytest.mark.deep
def test_dense_operators_are_reported_as_dense():
    pattern = measure.SparsePattern(8, 4, 8, 3, 8)
    problem = bench.AttentionProblem(1, 2, 1, 8, pattern, "float32", "dense", "eager")
    row = next(bench.attention(problem, bench.Measuring([32], 1, torch.device("cpu"), max_dense_seq_len=16)))
    assert set(row["operators"]) == {"compressed", "selected", "selection", "window"}
    assert set(row["operators"].values()) == {"dense", "dense scores"}
    assert row["implementations"] == {}
    assert row["dense"] == {"not_measured": "longer than --max-dense-seq-len 16"}
    assert row["ratio"] is None
    assert "not measured" in VIEWS["attention"].table([row])


def test_dense_attention_is_causal_attention_of_groups():
    q, k, v = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8)
    everything = torch.arange(9).expand(1, 9, 2, 9)
    expected = selected_attention_v1(q, k, v, everything, 1, 8**-0.5)
    torch.testing.assert_close(bench.dense_attention(q, k, v), expected)


@pytest.mark.deep
def test_prefill_sets_loop_compiled_and_dense_side_by_side(tmp_path):
    plot = tmp_path / "figure.png"
    # A loop of any length takes longer than this once a shorter one has been timed.
    limits = ("--max-eager-seconds", "1e-9", "--memory-gb", "0", "--max-dense-seq-len", "32")
    arguments = (*QUICK, "--eager-repeats", "2", *limits, "--plot", str(plot), "--json")
    record = json.loads(run("prefill", *MODEL, *arguments, "--seq-lens", "40,32").stdout)
    check_record(record, "prefill", 2)
    check_picture(plot)
    assert record["model"]["n_layers"] == 1
    row, longer = record["results"]
    assert row["batched"]
    assert row["ratio"] == row["eager"]["median_s"] / row["compiled"]["median_s"]
    assert row["dense_ratio"] == row["dense"]["median_s"] / row["compiled"]["median_s"]
    assert longer["seq_len"] == 40
    assert longer["eager"] == {"not_measured": "a run would take longer than 1e-09 s"}
    assert longer["ratio"] is None
    assert longer["dense_ratio"] is None
    assert VIEWS["prefill"].table(record["results"]).splitlines()[3].split().count("not") == 2


@pytest.mark.deep
def test_step_tells_its_sizes_and_its_rate(tmp_path):
    plot = tmp_path / "figure.png"
    arguments = ("--batch-size", "2", "--dtype", "bfloat16", "--plot", str(plot), "--json")
    record = json.loads(run("step", *MODEL, *QUICK, *arguments).stdout)
    check_record(record, "step", 2)
    check_picture(plot)
    (row,) = record["results"]
    for name in ("sparse", "dense"):
        timing = row[name]
        assert timing["tokens_per_s"] == pytest.approx(2 * 32 / timing["median_s"])
        assert timing["std_s"] > 0
        assert 0 < timing["mfu"] < 1
    assert row["sparse"]["parameters"] > row["dense"]["parameters"]
    assert record["settings"]["batch"] == 2
    assert record["model"]["pattern"]["num_selected"] == 3
    table = VIEWS["step"].table([row])
    assert "tokens/s" in table
    assert f"{row['sparse']['parameters']:,}" in table
    assert f"{row['sparse']['mfu']:.1%} of {row['peak_flops'] / 1e9:,.0f}" in table, "a share of what"


def test_a_step_faster_than_the_machine_is_doubted():
    timing = {"median_s": 1.0, "min_s": 1.0, "max_s": 1.0, "samples_s": [1.0], "std_s": None, "tokens_per_s": 64.0}
    sides = {"sparse": timing | {"parameters": 1, "mfu": 1.07}, "dense": timing | {"parameters": 1, "mfu": 0.4}}
    row = {"seq_len": 64, "ratio": 1.0, "peak_flops": 2e11, "busy": None, **sides, "batched": True, "operators": {}}
    table = VIEWS["step"].table([row | {"implementations": {}}])
    assert "107.0% impossible! of 200" in table
    assert "S = 64: MFU 107.0% is impossible: the machine's peak was mis-measured" in table
    busy = VIEWS["step"].table([row | {"implementations": {}, "busy": "the machine was busy"}])
    assert "S = 64: the machine was busy" in busy


def test_selection_compares_every_pattern(tmp_path):
    plot = tmp_path / "figure.png"
    sizes = (*LAYER, "--repeats", "1", "--seq-lens", "40,24", "--max-dense-seq-len", "24")
    record = json.loads(run("selection", *sizes, "--plot", str(plot), "--json").stdout)
    check_record(record, "selection", 1)
    check_picture(plot)
    assert [(row["seq_len"], row["pattern"]) for row in record["results"]] == [
        (seq_len, pattern) for seq_len in (24, 40) for pattern in bench.PATTERNS
    ]
    for row in record["results"]:
        assert row["equal"]
        assert set(row["parity"]) == {"float32", "float64"}
        assert set(row["parity"]["float64"]["max_abs_difference"]) == {"out", "dq", "dk", "dv"}
        assert max(row["parity"]["float64"]["max_abs_difference"].values()) < 1e-12
        assert ("not_measured" in row["dense"]) == (row["seq_len"] == 40)


@pytest.mark.deep(but=["nan"])
@pytest.mark.parametrize("fault", ["value", "gradient", "nan"])
def test_a_planted_disagreement_is_found(monkeypatch, fault):
    operator = bench.selected_attention

    def broken(q, k, v, indices, **sizes):
        out, lse = operator(q, k, v, indices, **sizes)
        if not (indices[0, :, 0] == indices[0, :1, 0]).all() or (indices < 0).any():
            return out, lse  # only patterns that are the same at every position: sequential and gaps
        if fault == "value":
            return out * 1.001, lse
        if fault == "gradient":
            return out.detach() + 0.999 * (out - out.detach()), lse
        return out * torch.nan, lse

    monkeypatch.setattr(bench, "selected_attention", broken)
    result = run("selection", *LAYER, "--seq-lens", "40", "--repeats", "1", exit_code=1)
    assert "error: loop and operator disagree: sequential at S = 40, gaps at S = 40\n" in result.stderr
    verdicts = {
        line.split("  ")[1].strip(): " NO " in line for line in result.stdout.splitlines() if line.startswith("40")
    }
    assert verdicts == {pattern: pattern in ("sequential", "gaps") for pattern in bench.PATTERNS}
    assert ("not finite" in result.stdout) == (fault == "nan")


@pytest.mark.parametrize(
    ("pattern", "property_"),
    [
        ("random", lambda i: len(i.unique()) > 3),
        ("sequential", lambda i: (i[..., 1:] == i[..., :-1] + 1).all()),
        ("duplicates", lambda i: (i == i[..., :1]).all()),
        ("gaps", lambda i: (i[..., 1:] == i[..., :-1] + 2).all()),
        ("single block", lambda i: ((i >= 0).sum(-1) == 1).all()),
        ("all invalid", lambda i: (i < 0).all()),
    ],
)
def test_patterns_are_what_they_are_called(pattern, property_):
    problem = bench.AttentionProblem(1, 2, 1, 8, measure.SparsePattern(8, 4, 8, 3, 8), "float32", "sparse", "eager")
    assert property_(bench.selection_indices(pattern, problem, 40))


def test_variants_take_turns_after_a_warm_up():
    calls: list[str] = []
    timings = measure.interleave({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, {"a": 3, "b": 2})
    assert calls == ["a", "b", "a", "b", "a", "b", "a"]
    assert [len(timings[name]["samples_s"]) for name in "ab"] == [3, 2]


def test_running_out_of_memory_is_recorded_and_the_rest_goes_on():
    def too_large() -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    timings = measure.interleave({"large": too_large, "small": lambda: None}, 2)
    assert timings["large"] == {"not_measured": "does not fit into memory"}
    assert len(timings["small"]["samples_s"]) == 2
    with pytest.raises(RuntimeError, match="another"):
        measure.interleave({"wrong": lambda: (_ for _ in ()).throw(RuntimeError("another"))}, 1)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell the peak")
def test_peak_memory_sees_what_is_freed_again():
    peak = measure.peak_memory(lambda: torch.ones(2**24).sum())
    assert peak is not None
    assert abs(peak / 2**26 - 1) < 0.1  # the kernel counts pages thread by thread, and adds up now and then


@pytest.mark.deep
def test_measured_costs_are_what_the_compiler_reads(tmp_path):
    out = tmp_path / "costs.json"
    out.write_text('{"other": {"dense": {"per_pair": 1.0}}}', encoding="utf-8")
    script = Path(__file__).parents[2] / "benchmarks" / "operator_costs.py"
    done = processes.script(script, "--seq-lens", "64,96", "--repeats", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    measured, shipped = json.loads(out.read_text()), attention_costs.costs()["cpu"]
    for operator, costs in shipped.items():
        assert set(costs) <= set(measured["cpu"][operator])
        assert all(cost >= 0 for cost in measured["cpu"][operator].values())
    assert measured["other"] == {"dense": {"per_pair": 1.0}}
    record = measured["measured"]["cpu"]
    check_record({**record, "results": [{"timing": row} for row in record["results"]]}, "operator_costs", 1)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", "from nsa_compile.cli import main; main()", "bench", *arguments]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.mark.deep(
    but=[
        "arguments6-'float16' is not one of",
        "arguments8---seq-lens 16 must be at least 32, the compressed block of --pattern",
        "arguments9---head-dim 7 must be even",
    ]
)
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["atention"], "unknown command 'atention'; did you mean 'attention'?"),
        (["step", "--seq-len", "512"], "unknown option '--seq-len'; did you mean '--seq-lens'?"),
        (["attention", "--seq-lens", "512,0"], "'512,0' must be lengths of at least 1"),
        (["attention", "--seq-lens", "1k"], "'1k' must be lengths of at least 1"),
        (["attention", "--repeats", "0"], "0 is not in the range x>=1"),
        (["attention", "--dtype", "float8"], "'float8' is not one of 'float32', 'bfloat16', 'float16'"),
        (["step", "--dtype", "float16"], "'float16' is not one of"),
        (["attention", "--heads", "6", "--groups", "4"], "--heads 6 must be a multiple of --groups 4"),
        (["step", "--seq-lens", "16,512"], "--seq-lens 16 must be at least 32, the compressed block of --pattern"),
        (["step", "--head-dim", "7"], "--head-dim 7 must be even"),
        (["selection", "--pattern", "32/16/64"], "'32/16/64' must be five numbers l/d/l'/n/w"),
        (["prefill", "--pattern", "32/12/64/16/512"], "compress_block = 32 must be a multiple of compress_stride = 12"),
        (["attention", "--device", "tpu"], "'tpu' is not one of 'cpu', 'cuda'"),
        (["attention", "--out", "/proc/version/record.json"], "--out '/proc/version/record.json' must be a file"),
        (["attention", "--plot", "/"], "--plot '/' must be a file that can be written: it is a directory"),
    ],
)
def test_a_users_mistake_is_one_line_found_before_torch_is_imported(arguments, expected, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')", encoding="utf-8")
    check_mistake(command(*arguments, PYTHONPATH=search_path(tmp_path)), expected)


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(tmp_path):
    # Put in place before anything else runs: there is no such package any more.
    hide = (
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hide, encoding="utf-8")
    result = command("attention", "--plot", str(tmp_path / "a.png"), PYTHONPATH=search_path(tmp_path))
    check_mistake(result, "--plot needs matplotlib; pip install 'nsa-compile[plots]' brings it")


def test_without_a_compiler_the_way_out_is_named():
    check_mistake(command("attention", PATH="/nowhere", CXX="no-such-compiler"), "or use --nested aot_eager")


@pytest.mark.deep
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_an_error():
    check_mistake(command("selection", "--device", "cuda"), "--device cuda: torch finds no usable GPU here")


def test_help_shows_an_example_and_defaults():
    for name in ("attention", "prefill", "selection", "step"):
        text = run(name, "--help").output
        assert f"nsa-compile bench {name}" in text
        assert "32/16/64/16/512" in text


def check_mistake(result: subprocess.CompletedProcess[str], expected: str) -> None:
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


def search_path(first: Path) -> str:
    return os.pathsep.join((str(first), os.environ.get("PYTHONPATH", "")))
