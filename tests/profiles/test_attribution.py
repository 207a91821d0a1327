"""Taking a step apart: every instant goes somewhere, once, on traces made by hand."""

from __future__ import annotations

import gzip
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.profiles.attribution import Event, attribute, host_intervals, read_trace, segments, timelines


def operator(name, start, end, thread="main"):
    return Event(name, "cpu_op", thread, start, end)


def region(name, start, end, thread="main"):
    return Event(name, "user_annotation", thread, start, end)


def figures(events):
    return attribute(timelines(events))


def microseconds(result, **where):
    return sum(
        row["mean_s"] * 1e6 for row in result["ranges"] if all(row[name] == value for name, value in where.items())
    )


STEP = [region("step", 0, 1000)]


def test_time_goes_to_the_innermost_range_of_its_phase():
    result = figures(
        [
            *STEP,
            region("forward", 100, 400),
            region("nsa.sel", 150, 350),
            operator("aten::topk", 160, 200),
            region("nsa.sel.ranges_v2", 200, 300),
            operator("nsa_compile::selected_attention", 210, 290),
            region("backward", 400, 900),
            region("nsa.sel", 500, 600),
        ]
    )
    assert microseconds(result, phase="forward", branch="nsa.sel") == pytest.approx(100)
    assert microseconds(result, phase="forward", branch="nsa.sel.ranges_v2") == pytest.approx(100)
    assert microseconds(result, phase="forward", branch="other") == pytest.approx(100)
    assert microseconds(result, phase="backward", branch="nsa.sel") == pytest.approx(100)
    assert microseconds(result, phase="other") == pytest.approx(200)
    assert result["step"]["sum_s"] == pytest.approx(1e-3)
    assert result["phases"]["backward"]["share"] == pytest.approx(0.5)


def test_operators_are_told_from_the_host_and_count_without_those_inside():
    result = figures(
        [
            *STEP,
            region("forward", 0, 1000),
            operator("CompiledFunction", 0, 1000),
            operator("autograd::engine::evaluate_function: MmBackward0", 0, 1000),
            operator("aten::linear", 100, 600),
            operator("aten::mm", 200, 500),
            operator("graph_0_cpp_fused_add_1", 700, 800),
        ]
    )
    assert result["kinds"]["operator"]["mean_s"] == pytest.approx(600e-6)
    assert result["kinds"]["host"]["mean_s"] == pytest.approx(400e-6)
    found = {row["name"]: row["mean_s"] * 1e6 for row in result["operators"]}
    assert found == pytest.approx({"aten::mm": 300, "aten::linear": 200, "graph_0_cpp_fused_add_1": 100})
    assert next(row["name"] for row in result["operators"]) == "aten::mm"


def test_an_operator_may_end_inside_the_range_it_opened():
    result = figures([*STEP, operator("aten::opens", 100, 200), region("nsa.win", 150, 400)])
    assert microseconds(result, branch="nsa.win") == pytest.approx(250)
    assert result["step"]["sum_s"] == pytest.approx(1e-3)


def test_what_another_thread_computes_while_the_main_thread_waits_counts_for_it():
    result = figures(
        [
            *STEP,
            region("backward", 200, 800),
            operator("aten::mm", 300, 350),
            region("nsa.mlp", 250, 600, "autograd"),
            operator("aten::bmm", 320, 600, "autograd"),
        ]
    )
    assert microseconds(result, phase="backward", branch="nsa.mlp") == pytest.approx(250)
    found = {row["name"]: row["mean_s"] * 1e6 for row in result["operators"]}
    assert found == pytest.approx({"aten::mm": 50, "aten::bmm": 250})
    assert result["step"]["sum_s"] == pytest.approx(1e-3)


def test_a_kernel_counts_where_it_was_launched_and_not_when():
    launch = Event("cudaLaunchKernel", "cuda_runtime", "main", 120, 130, correlation=7)
    kernel = Event("sgemm", "kernel", "gpu", 400, 900, correlation=7)
    result = figures([*STEP, region("forward", 100, 200), region("nsa.cmp", 110, 150), launch, kernel])
    assert microseconds(result, phase="forward", branch="nsa.cmp") == pytest.approx(40 + 500)
    assert result["operators"][0] == {
        "name": "sgemm", "mean_s": pytest.approx(500e-6), "share": pytest.approx(0.5), "calls": 1.0,
        "phase": "forward", "branch": "nsa.cmp",
    }  # fmt: skip


def test_communication_and_how_much_of_it_is_hidden():
    result = figures(
        [
            *STEP,
            region("backward", 0, 1000),
            operator("gloo:all_reduce", 200, 600, "gloo"),
            operator("aten::mm", 0, 300),
        ]
    )
    assert result["communication"]["total_s"] == pytest.approx(400e-6)
    assert result["communication"]["overlapped_s"] == pytest.approx(100e-6)


def test_syncs_are_counted_by_phase_and_expected_in_communication_alone():
    result = figures(
        [
            *STEP,
            region("forward", 0, 500),
            operator("aten::item", 100, 120),
            operator("aten::_local_scalar_dense", 105, 115),
            region("communication", 500, 600),
            operator("aten::_local_scalar_dense", 510, 520),
        ]
    )
    assert [(row["phase"], row["calls"], row["expected"]) for row in result["syncs"]] == [
        ("communication", 1.0, True),
        ("forward", 1.0, False),
    ]


def test_figures_are_of_all_steps_and_say_how_far_these_differ():
    two = [region("step", 0, 100), region("step", 200, 500), operator("aten::mm", 250, 350)]
    result = figures(two)
    assert (result["steps"], result["step"]["min_s"], result["step"]["max_s"]) == (2, 100e-6, 300e-6)
    assert result["operators"][0]["calls"] == 0.5
    assert list(host_intervals(timelines(two))) == [(0, 100), (200, 250), (350, 500)]


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="no range 'step'"):
        timelines([operator("aten::mm", 0, 1)])


def test_reads_what_the_profiler_writes(tmp_path):
    rows = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 2, "ts": 5.5, "dur": 2.0, "args": {}},
        {"ph": "M", "name": "process_name", "pid": 1},
    ]
    path = tmp_path / "trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": rows}, file)
    assert read_trace(path) == [Event("aten::mm", "cpu_op", (1, 2), 5.5, 7.5)]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), st.sampled_from("abc")), max_size=12))
def test_no_instant_is_lost_or_counted_twice(intervals):
    events = [region("step", 0, 100)]
    for first, last, kind in intervals:
        start, end = min(first, last), max(first, last)
        name, thread = {"a": ("aten::mm", "main"), "b": ("nsa.win", "main"), "c": ("aten::bmm", "other")}[kind]
        events.append(operator(name, start, end, thread) if kind != "b" else region(name, start, end, thread))
    (step,) = timelines(events)
    covered = [(segment.start, segment.end) for segment in step.segments]
    assert covered[0][0] == 0
    assert covered[-1][1] == 100
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))
    for segment in segments(events[:1]):
        assert segment.path == (events[0],)
