"""`nsa-compile verify`: silent where all is well, and the right name for every planted fault."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nsa_compile.config import load_config
from nsa_compile.errors import UserError
from nsa_compile.models import nsa
from nsa_compile.passes.pipeline import REGISTRY, pipeline, register
from nsa_compile.verification import verify as verify_module
from nsa_compile.verification.examples import neighbours, options, reduced
from nsa_compile.verification.properties import PROPERTIES, Ambiguous
from nsa_compile.verification.verify import verify
from nsa_compile.verification.verify_cli import NAMES
from tests import processes


@pytest.fixture
def config(tiny_overrides):
    return load_config(None, tiny_overrides(**{"compile.nested": "eager", "train.seq_len": 32, "train.batch_size": 1}))


@pytest.fixture
def few_passes(tiny_overrides):
    """One branch, and without the passes on attention: each of those left is a compilation more."""
    changes = {
        "compile.nested": "eager",
        "compile.disable": "[raise_attention, fuse_selection_scatter, lower_attention]",
        "model.branches": "[window]",
        "train.batch_size": 1,
    }
    return load_config(None, tiny_overrides(**changes))


def broken(config, *properties: str, **arguments) -> dict[str, str]:
    """Names of the properties that do not hold, with what is said."""
    arguments = {"examples": 1, "properties": properties or NAMES, **arguments}
    record = verify(config, **arguments)
    assert record["ok"] == all(result["ok"] for result in record["properties"])
    return {result["name"]: result["message"] for result in record["properties"] if not result["ok"]}


# ---------------------------------------------------------------------------------------------------------- healthy


@pytest.mark.deep
@pytest.mark.parametrize("dtype", ["float32", "bf16", "float64"])
def test_healthy_operators_are_within_their_bounds(config, dtype):
    (result,) = verify(config, examples=5, dtype=dtype, properties=["operators"])["properties"]
    assert result["ok"], result
    assert result["examples"] == 5
    assert 0 < result["error"] <= result["bound"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("dtype", "properties", "branches"),
    [("float32", NAMES[:4], None), ("bf16", NAMES[:1], ("window",))],  # one is compiled in a third of the time
)
def test_a_healthy_compiler_keeps_every_property(config, dtype, properties, branches):
    model = config.model if branches is None else replace(config.model, branches=branches)
    record = verify(config.model_copy(update={"model": model}), examples=1, dtype=dtype, properties=properties)
    assert record["ok"], record["properties"]
    for result in record["properties"]:
        assert result["examples"] == 1
        assert (0 < result["error"] <= result["bound"]) == (result["name"] in ("paths", "replay"))


@pytest.mark.deep
def test_every_pass_can_be_left_out(few_passes):
    assert not broken(few_passes, "passes")


def test_the_command_says_nothing_but_its_table(tiny_overrides):
    words = [word for override in tiny_overrides(**{"compile.nested": "eager"}) for word in ("--set", override)]
    begin = ["verify", "--examples", "1", "--property", "operators"]
    result = processes.run(*begin, *words, "--json")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["ok"]
    assert (record["schema"], record["device"], record["dtype"]) == (1, "cpu", "float32")
    assert record["sizes"]["pattern"]["window"] == 8
    assert [item["name"] for item in record["properties"]] == ["operators"]
    assert all(line.startswith("operators: ") for line in result.stderr.splitlines())


def test_the_names_of_the_command_line_are_the_properties():
    assert tuple(PROPERTIES) == NAMES


@pytest.mark.deep
def test_time_is_kept(config, monkeypatch):
    """On a clock that only the examples move, a second each: neither too few of them nor too many."""
    now = [100.0]
    check = PROPERTIES["operators"]

    def timed(example, setting):
        now[0] += 1
        return check(example, setting)

    monkeypatch.setattr(verify_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setitem(PROPERTIES, "operators", timed)
    timed.__doc__ = check.__doc__
    (result,) = verify(config, seconds=4, properties=["operators"])["properties"]
    assert result["ok"]
    assert result["seconds"] == 4
    assert 2 <= result["examples"] <= 4, "some may have been ambiguous"
    (result,) = verify(config, seconds=0.01, properties=["operators"])["properties"]
    assert result["examples"] == 1, "at least one"


@pytest.mark.deep
def test_what_no_example_decides_does_not_hold(config, monkeypatch):
    def ambiguous(example, setting):
        raise Ambiguous("blocks of equal importance")

    monkeypatch.setitem(PROPERTIES, "operators", ambiguous)
    for examples in (1, 20):
        with pytest.raises(UserError, match=r"operators was checked on no example.*another --seed"):
            verify(config, examples=examples, properties=["operators"])


def test_what_fails_now_and_then_is_broken(config, monkeypatch):
    check, calls = PROPERTIES["operators"], []

    def now_and_then(example, setting):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("a race")
        return check(example, setting)

    monkeypatch.setitem(PROPERTIES, "operators", now_and_then)
    assert broken(config, "operators", examples=10) == {"operators": "RuntimeError: a race"}


# --------------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("path", [None, "configs/m7c_125m_2xa100_production.yaml", "configs/nsa_125m_gpt2.yaml"])
def test_the_first_example_is_the_configuration_made_small(path):
    config = load_config(path)
    small = reduced(config)
    assert reduced(small) == small
    before, after = config.model.pattern, small.model.pattern
    for ratio in (lambda p: p.compress_block / p.compress_stride, lambda p: p.select_block / p.compress_stride):
        assert ratio(after) == ratio(before)
    assert small.model.head_dim == config.model.head_dim
    assert small.train.seq_len > max(after.window, after.num_selected * after.select_block)


def test_random_examples_are_valid_and_can_be_named_as_options():
    from hypothesis import given

    config = load_config(
        "configs/m7c_125m_2xa100_production.yaml", ["train.activation_checkpointing=0-5,8", "train.matmul=int8"]
    )

    @given(example=neighbours(config))
    def check(example):
        words = shlex.split(" ".join(options(example, None)))
        assert load_config(None, words[1::2]) == example
        assert reduced(example) == example

    check()


# ----------------------------------------------------------------------------------------------------------- faults


def _patch_operator(monkeypatch, name: str, change) -> None:
    """Have the C++ kernel of an operator compute something else."""
    from nsa_compile.ops import dispatch

    code = dispatch.choose_kernel(name, torch.zeros(1)).code
    monkeypatch.setattr(code, "forward", change(code.forward))


@pytest.mark.deep
def test_a_scaled_output_is_found_by_the_oracle_and_the_paths(config, monkeypatch):
    def scaled(forward):
        def run(*arguments):
            out, *rest = forward(*arguments)
            return (out * (1 + 1e-3), *rest)

        return run

    _patch_operator(monkeypatch, "selected", scaled)
    found = broken(config, "paths", "future", "operators")
    assert set(found) == {"paths", "operators"}
    assert found["operators"].startswith("selected attention, values (float32): error")


def test_one_token_of_the_future_is_found(config, monkeypatch):
    def ahead(forward):
        def run(q, k, v, *parameters):
            return forward(q, k.roll(-1, 1), v.roll(-1, 1), *parameters)

        return run

    _patch_operator(monkeypatch, "window", ahead)
    found = broken(config, "future", "operators")
    assert set(found) == {"future", "operators"}
    assert found["future"].startswith("logits of the compiled model before token")
    assert found["operators"].startswith("window attention, values")


@pytest.mark.deep
def test_a_selection_that_sees_the_future_is_found(config, monkeypatch):
    def ahead(forward):
        def run(q, k, v, block_size, stride, *rest):
            return forward(q, k, v, block_size - stride, stride, *rest)

        return run

    _patch_operator(monkeypatch, "compressed", ahead)
    found = broken(config, "future", "operators")
    assert set(found) == {"future", "operators"}


@pytest.mark.deep
def test_a_dropped_mask_is_found(config, monkeypatch):
    """The window's kernel forgets where the window begins: plain causal attention."""

    def everything(forward):
        return lambda q, k, v, window, scale: forward(q, k, v, q.shape[1], scale)

    _patch_operator(monkeypatch, "window", everything)
    assert set(broken(config, "future", "operators")) == {"operators"}


@pytest.mark.deep
def test_a_parameter_without_a_gradient_is_found(config, monkeypatch):
    original = nsa.CompressionMLP.forward
    monkeypatch.setattr(nsa.CompressionMLP, "forward", lambda self, block: original(self, block).detach())
    found = broken(config, "gradients")
    assert found == {"gradients": "blocks.0.attention.phi_k.position gets no gradient"}


@pytest.mark.deep
def test_a_replay_that_is_off_by_a_block_is_found(config, monkeypatch):
    from nsa_compile.passes import fuse_selection_scatter

    indices = fuse_selection_scatter._indices

    def off(build, selection, record):
        return indices(build, replace(selection, first=selection.first - 1), record)

    monkeypatch.setattr(fuse_selection_scatter, "_indices", off)
    found = broken(config, "replay", "gradients")
    assert found["replay"].startswith("a replay in the compiled model, logits: error"), found
    assert set(found) == {"replay"}


@pytest.mark.deep
def test_a_selection_of_another_token_is_found(config, monkeypatch):
    def late(forward):
        def run(*arguments):
            out, lse, indices = forward(*arguments)
            return out, lse, indices.roll(1, 1)

        return run

    _patch_operator(monkeypatch, "compressed", late)
    assert broken(config, "replay")["replay"].startswith("the compiled model selects other blocks than the loop in")


@pytest.mark.deep
def test_a_wrong_pass_is_named(few_passes):
    pipeline()
    before = REGISTRY["batch_prefill"]

    @register("batch_prefill", requires=before.requires, ensures=before.ensures)
    def wrong(gm, context):
        changed = before.run(gm, context)
        (output,) = gm.graph.find_nodes(op="output")
        logits = output.args[0][0]
        with gm.graph.inserting_before(output):
            scaled = gm.graph.call_function(torch.mul, (logits, 1 + 1e-3))
        scaled.meta = dict(logits.meta)
        output.replace_input_with(logits, scaled)
        gm.recompile()
        return changed

    try:
        found = broken(few_passes, "passes")
    finally:
        wrong.unregister()
    assert REGISTRY["batch_prefill"] is before
    assert found["passes"].startswith("wrong with all passes, right without"), found
    assert "batch_prefill" in found["passes"]


@pytest.mark.deep
def test_a_failure_names_the_smallest_example_as_a_command(config, monkeypatch):
    """Sequences of 20 tokens and more with several heads are wrong: a random one is found, and made smaller."""

    def wrong_when_long(forward):
        def run(q, *arguments):
            out, *rest = forward(q, *arguments)
            return (out * 1.01 if q.shape[1] >= 20 and q.shape[2] > 1 else out, *rest)

        return run

    _patch_operator(monkeypatch, "window", wrong_when_long)
    small = config.model_copy(update={"train": config.train.model_copy(update={"seq_len": 12})})
    record = verify(small, examples=60, properties=["operators"])
    (result,) = record["properties"]
    assert not result["ok"]
    words = shlex.split(result["command"])
    assert words[:2] == ["nsa-compile", "verify"]
    assert words[-8:] == ["--property", "operators", "--examples", "1", "--device", "cpu", "--dtype", "float32"]
    overrides = [word for previous, word in pairwise(words) if previous == "--set"]
    again = load_config(None, overrides)
    assert 20 <= again.train.seq_len <= 22, "made smaller"
    assert broken(again, "operators") == {"operators": result["message"]}, "and it is the example that fails"
    monkeypatch.undo()
    assert not broken(again, "operators")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--minutes", "1", "--examples", "3"], "--minutes and --examples both say how much to check"),
        (["--set", "model.attention=dense"], "model.attention = 'dense' leaves nothing to verify"),
        (["--property", "speed"], "'speed' is not one of"),
        (["--set", "train.seqlen=3"], "did you mean 'train.seq_len'?"),
        (["--device", "cuda"], "torch finds no usable GPU here"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = processes.run("verify", *arguments)
    assert result.returncode == 2
    assert result.stderr.strip().count("\n") == 0
    assert message in result.stderr
