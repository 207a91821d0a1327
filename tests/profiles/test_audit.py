"""`nsa-compile audit attention`: what it says ran is what ran, and a fallback is named with its reason."""

from __future__ import annotations

import json

import pytest
import torch

import nsa_compile
from nsa_compile.cli import main
from nsa_compile.config import load_config
from nsa_compile.errors import UserError
from nsa_compile.ir.scans import Decline
from nsa_compile.ops import dispatch, force_implementation, window_attention
from nsa_compile.passes.report import PassReport, Report, ScanReport
from nsa_compile.profiles.attribution import Event
from nsa_compile.profiles.audit import MATH, PLAIN, Observed, audit_attention, find_fallbacks, recognise
from nsa_compile.profiles.audit_cli import render_audit, spans
from tests import processes

# The passes run, and what they make is run as it is.
COMPILED = {"compile.enabled": "true", "compile.nested": "eager", "train.seq_len": 16}
DENSE = {"model.attention": "dense"}


@pytest.fixture
def audit(tiny_overrides):
    def run(arm=None, **changes):
        torch._dynamo.reset()
        return audit_attention(load_config(None, tiny_overrides(**changes)), arm, repeats=1)

    return run


def backends(result, direction):
    return {row["branch"]: row["backend"] for row in result["observed"] if row["direction"] == direction}


@pytest.mark.deep
def test_a_compiled_model_shows_our_operators_in_every_layer(audit, tiny_overrides):
    result = audit(**COMPILED | {"compile.nested": "aot_eager", "model.n_layers": 2, "train.seq_len": 32})
    assert result["fallbacks"] == []
    ours = {"compressed", "selected"}
    for layer in (0, 1):
        for direction in ("forward", "backward"):
            rows = {
                row["branch"]: row
                for row in result["observed"]
                if (row["layer"], row["direction"]) == (layer, direction)
            }
            assert {"compressed", "selected", "window"} <= set(rows)
            for branch in ours:
                assert rows[branch]["backend"].startswith("C++")
                assert rows[branch]["seen_as"].endswith("dispatch")
                assert rows[branch]["calls"] == 1
    assert "ok  no fallback" in render_audit(result)
    assert "0-1" in render_audit(result)

    # The same, had one of them not run.
    config = load_config(None, tiny_overrides(**COMPILED))
    ran = [Observed(**row) for row in result["observed"] if row["layer"] == 0]
    report = nsa_compile.last_report()
    assert find_fallbacks(ran, config, report) == []
    (fallback,) = find_fallbacks([row for row in ran if row.branch != "compressed"], config, report)
    assert (fallback["branch"], fallback["what"]) == ("compressed", "not observed")


def test_a_loop_that_stayed_one_is_named_with_what_the_compiler_said(tiny_overrides):
    ran = [Observed(layer, "forward", "loop", PLAIN, 96, "aten::_softmax") for layer in (0, 1)]
    decline = Decline("batch_prefill", "aten.cumsum", "step.py:7", "it needs its own result")
    for report, reason in (
        (Report("inductor", [PassReport("batch_prefill", skipped="disabled")]), "batch_prefill did not run: disabled"),
        (
            Report("inductor", scans=[ScanReport("scan", 32, declines=[decline])]),
            "aten.cumsum at step.py:7: it needs its own result",
        ),
    ):
        (fallback,) = find_fallbacks(ran, load_config(None, tiny_overrides(**COMPILED)), report)
        assert fallback["what"] == "a loop over the tokens stayed one"
        assert (fallback["reason"], fallback["layers"]) == (reason, [0, 1])


def test_an_uncompiled_model_is_a_loop(audit):
    (fallback,) = audit(**{"train.seq_len": 8})["fallbacks"]
    assert fallback["reason"] == "compile.enabled = false"


@pytest.mark.deep
def test_attention_that_no_pass_recognised_is_a_dense_fallback(audit):
    result = audit(**COMPILED, **{"compile.disable": "[raise_attention]"})
    assert set(backends(result, "forward").values()) == {PLAIN}
    (fallback,) = result["fallbacks"]
    assert fallback["what"] == PLAIN
    assert "raise_attention did not run: disabled" in fallback["reason"]
    assert "FALLBACK  layers 0" in render_audit(result)


@pytest.mark.deep
def test_attention_with_a_mask_that_nobody_can_name_is_no_window(audit):
    result = audit(**COMPILED, **{"compile.disable": "[fuse_selection_scatter]"})
    assert {branch: "opaque mask" in what for branch, (what, _) in result["choices"].items()} == {
        "compressed": False,
        "attention": True,
        "window": False,
    }
    (fallback,) = result["fallbacks"]
    assert fallback["branch"] == "attention"
    assert (
        "opaque mask), which no operator computes; fuse_selection_scatter did not run: disabled" in fallback["reason"]
    )


@pytest.mark.deep
def test_operators_that_fell_back_to_plain_torch_say_why(audit, monkeypatch):
    for name, kernels in dispatch.KERNELS.items():
        if "portable" not in kernels:
            continue  # decays are no attention
        monkeypatch.setitem(dispatch.KERNELS, name, {"portable": kernels["portable"]})
    dispatch._best.cache_clear()
    try:
        result = audit(**COMPILED | {"train.seq_len": 32})
    finally:
        dispatch._best.cache_clear()
    found = {(row["branch"], row["what"], row["reason"]) for row in result["fallbacks"]}
    assert found >= {(branch, "portable torch", "no native one exists") for branch in ("compressed", "selected")}


def test_the_choice_of_an_implementation_is_seen_when_it_is_made():
    q, k = torch.randn(1, 8, 2, 4), torch.randn(1, 8, 1, 4)
    with dispatch.observe() as outer, dispatch.observe() as inner:
        with force_implementation("portable"):
            window_attention(q, k, k, window=4)
        with force_implementation("vectors"):
            window_attention(q, k, k, window=4)
        window_attention(q.double(), k.double(), k.double(), window=4)
    window_attention(q, k, k, window=4)
    assert [use.implementation for use in inner] == ["portable torch", "C++, vectors", "C++, vectors"]
    assert inner == outer


def test_dense_attention_runs_on_the_backends_it_is_allowed(audit):
    assert backends(audit(**DENSE), "forward") == {"attention": "SDPA, flash"}
    without = audit("no flash", **DENSE)
    assert backends(without, "forward") == backends(without, "backward") == {"attention": MATH}
    assert without["fallbacks"] == []  # asked for
    only = audit("flash only", **DENSE)
    assert backends(only, "backward") == {"attention": "SDPA, flash"}
    timings = only["comparison"]["timings"]
    assert set(timings) == {"flash only", "any backend"}
    assert all(len(timing["samples_s"]) == 1 for timing in timings.values())


def test_a_math_backend_that_nobody_asked_for_is_a_fallback(audit):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (fallback,) = audit(**DENSE)["fallbacks"]
    assert fallback["what"] == MATH


def test_a_backend_that_cannot_run_is_one_line(audit):
    # Flash attention on a CPU wants values as wide as the keys.
    with pytest.raises(UserError, match="--flash-only is not available for this model on cpu: No available kernel"):
        audit("flash only", **DENSE, **{"model.v_head_dim": 16})


def test_backends_of_sdpa_need_a_model_that_uses_it(audit):
    with pytest.raises(UserError, match="nothing to act on"):
        audit("no flash", **{"train.seq_len": 8})


def test_recognises_the_backends_of_a_gpu_and_its_threads():
    def event(name, start, end, thread=0, category="cpu_op"):
        return Event(name, category, thread, start, end)

    trace = [
        event("audit 0 forward", 0, 100, category="user_annotation"),
        event("nsa.win", 10, 50, category="user_annotation"),
        event("aten::_scaled_dot_product_cudnn_attention", 20, 30),
        event("aten::_softmax", 60, 70),
        event("audit 0 backward", 100, 200, category="user_annotation"),
        event("aten::_scaled_dot_product_efficient_attention_backward", 120, 130, thread=1),
        event("aten::_softmax", 121, 122, thread=1),
    ]
    assert [(row.direction, row.branch, row.backend) for row in recognise(trace, {})] == [
        ("forward", "window", "SDPA, cuDNN"),
        ("forward", "attention", PLAIN),
        ("backward", "attention", "SDPA, memory-efficient"),
    ]


def test_layers_in_short():
    assert spans([0, 1, 2, 3, 7]) == "0-3,7"


@pytest.mark.deep
def test_the_command_prints_one_object_and_leaves_with_the_verdict(tiny_overrides, capsys, monkeypatch):
    def arguments(*options, **changes):
        sets = [word for override in tiny_overrides(**changes) for word in ("--set", override)]
        return ["audit", "attention", *sets, *options]

    loop = processes.run(*arguments("--json", **{"train.seq_len": 8}))
    assert loop.returncode == 1, loop.stderr
    assert json.loads(loop.stdout)["schema"] == 1

    def leave(words):
        with pytest.raises(SystemExit) as left:
            main(words)
        return left.value.code, *capsys.readouterr()

    code, out, _ = leave(arguments(**DENSE))
    assert (code, "ok  no fallback" in out) == (0, True)
    code, _, error = leave(arguments("--flash-only", "--no-flash"))
    assert (code, error.count("\n")) == (2, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, error = leave(arguments(**{"train.device": "cuda"}))
    assert (code, error.count("\n")) == (2, 1)
    assert "torch finds no GPU here" in error
