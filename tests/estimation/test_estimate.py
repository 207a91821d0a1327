"""What is estimated, against a training that really runs."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

import nsa_compile
from nsa_compile.cli import _run
from nsa_compile.config import load_config
from nsa_compile.estimation import estimate_cli
from nsa_compile.estimation.estimate import (
    checkpoint_bytes,
    checkpoints_on_disk,
    count_parameters,
    estimate_memory,
    measure_step,
    step_flops,
)
from nsa_compile.machine import matmul_rate
from nsa_compile.machine.matmul_rate import MatmulRate
from nsa_compile.models import NSATransformer
from nsa_compile.profiles.measure import CPU, random_tokens
from nsa_compile.train.checkpoints.checkpoint import save_checkpoint
from nsa_compile.train.optim import make_optimizer
from nsa_compile.train.steps import train_step

# Large enough that a step stands out from what the allocator does; compiled without writing C++.
SIZES = {
    "model.dim": 64,
    "model.n_layers": 2,
    "train.seq_len": 512,
    "train.batch_size": 8,
    "compile.enabled": "true",
    "compile.nested": "aot_eager",
}


# The passes have nothing to do.
QUICK = {"model.attention": "dense"}


def configured(tiny_overrides, **changes):
    return load_config(None, tiny_overrides(**{**SIZES, **changes}))


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def allocated_at_peak(work):
    """Most bytes that tensors held at one time beyond what was held before, to the byte.

    Resident memory says more than that: it moves with what the C library keeps, by a fifth from run to run.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


@pytest.mark.deep
@pytest.mark.parametrize(
    "changes",
    [{}, {"model.attention": "dense", "model.vocab_size": 4096, "train.dtype": "bf16"}],
    ids=["nsa", "dense with a large vocabulary in bf16"],
)
def test_memory_is_that_of_a_step_that_runs(tiny_overrides, changes):
    config = configured(tiny_overrides, **changes)
    estimate = estimate_memory(config, CPU)

    torch._dynamo.reset()
    model = nsa_compile.compile_blocks(NSATransformer(config.model), nested="aot_eager")
    optimizer = make_optimizer(model, config.optim)
    batch = random_tokens(config.model, config.train.seq_len + 1, config.train.batch_size).numpy()

    def step():
        train_step(model, optimizer, [batch], 1e-3, 1.0, CPU, config.train.dtype)

    for _ in range(2):
        step()
    # Weights and the optimizer's state lie there before the step.
    predicted = estimate.peak - estimate.weights - estimate.optimizer
    assert predicted == pytest.approx(allocated_at_peak(step), rel=0.02)


@pytest.mark.deep
def test_weights_state_and_checkpoint_are_those_of_a_trained_model(tiny_overrides, tmp_path):
    config = configured(tiny_overrides, **QUICK)
    model = NSATransformer(config.model)
    optimizer = make_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    tensors = [x for state in optimizer.state.values() for x in state.values() if x.ndim]

    estimate = estimate_memory(config, CPU)
    assert count_parameters(config.model) == sum(p.numel() for p in model.parameters())
    assert estimate.weights == estimate.gradients == sum(p.nbytes for p in model.parameters())
    assert estimate.optimizer == sum(x.nbytes for x in tensors)
    states = {
        "state.pt": {"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]},
        "rank-00000.pt": {"rng": torch.get_rng_state()},
    }
    checkpoint = save_checkpoint(tmp_path, 1, states, None)
    assert checkpoint.bytes == pytest.approx(checkpoint_bytes(config), rel=0.1)


@pytest.mark.deep
def test_memory_follows_batch_processes_checkpointing_and_sharding(tiny_overrides):
    config = configured(tiny_overrides, **QUICK)
    one = estimate_memory(config, CPU)
    torch._dynamo.reset()
    half = estimate_memory(config, CPU, processes=2)
    assert half.activations == pytest.approx(one.activations / 2, rel=0.05)
    assert (half.weights, half.communication) == (one.weights, one.weights)

    def changed(block, processes=1, **changes):
        return estimate_memory(configured(tiny_overrides, **QUICK, **changes), CPU, processes, block)

    sharded = changed(half.block, 2, **{"ddp.strategy": "fsdp"})
    assert sharded.weights == one.weights // 2
    assert sharded.optimizer == one.optimizer // 2

    some, every = (changed(one.block, **{"train.activation_checkpointing": blocks}) for blocks in ("0", "all"))
    assert every.activations == 2 * (one.block.input + one.block.indices)
    assert one.activations > some.activations > every.activations
    assert one.peak > every.peak

    quantized = {name: changed(one.block, **{"optim.name": name}).optimizer for name in ("adamw8bit", "adamw4bit")}
    assert one.optimizer > quantized["adamw8bit"] > quantized["adamw4bit"]


def test_recomputed_blocks_cost_a_forward_pass_more(tiny_overrides):
    plain, some, every = (
        step_flops(configured(tiny_overrides, **{"train.activation_checkpointing": blocks}))
        for blocks in ("none", "1", "0-1")
    )
    assert plain < some < every < 4 / 3 * plain


@pytest.mark.parametrize(
    ("steps", "save_every", "keep_last", "expected"), [(4, 0, 3, 1), (4, 2, 3, 2), (100, 10, 3, 5), (5, 2, 3, 3)]
)
def test_checkpoints_on_disk(tiny_overrides, steps, save_every, keep_last, expected):
    changes = {"train.steps": steps, "train.save_every": save_every, "train.keep_last": keep_last}
    assert checkpoints_on_disk(configured(tiny_overrides, **changes)) == expected


@pytest.mark.deep
def test_a_measured_step_grows_with_the_blocks(tiny_overrides):
    config = configured(tiny_overrides, **QUICK, **{"model.n_layers": 6})
    times = measure_step(config, CPU)
    assert 0 < times["one_block"] < times["two_blocks"] < times["seconds"]
    assert times["seconds"] == pytest.approx(5 * times["two_blocks"] - 4 * times["one_block"])


def arguments(overrides):
    return [word for override in overrides for word in ("--set", override)]


@pytest.mark.deep
def test_the_command_says_what_was_computed_and_what_was_measured(tiny_overrides, capsys):
    overrides = arguments(tiny_overrides(**SIZES, **QUICK))
    assert _run(["estimate", *overrides, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory"]["peak"] > facts["memory"]["activations"] > 0
    assert facts["step_seconds"] == facts["step_seconds_at_least"] > 0
    assert facts["step_seconds_measured"] is None
    torch._dynamo.reset()
    assert _run(["estimate", *overrides, "--nproc", "2", "--measure"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step ") and "measured: " in line for line in lines)
    assert any(line.startswith("activations ") and "computed: " in line for line in lines)
    assert any(line.startswith("buckets of DDP ") for line in lines)
    torch._dynamo.reset()
    changes = ["--set", "ddp.strategy=fsdp", "--set", "train.activation_checkpointing=all"]
    assert _run(["estimate", *overrides, "--nproc", "2", *changes]) == 0
    rows = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line)
    assert "weights of two blocks" in rows["gathered by FSDP"]


@pytest.fixture
def rates(monkeypatch):
    """Sets what measurements of the machine find, one after the other."""

    def find(*found):
        left = iter(found)
        monkeypatch.setattr(matmul_rate, "measure_matmul", lambda *arguments, **others: next(left))

    return find


def estimated(capsys, overrides, *options):
    torch._dynamo.reset()
    assert _run(["estimate", *overrides, *options]) == 0
    return capsys.readouterr().out


def test_at_most_is_of_the_peak_and_names_its_condition(tiny_overrides, capsys, rates):
    config = configured(tiny_overrides, **QUICK)
    overrides = arguments(tiny_overrides(**SIZES, **QUICK))
    rates(MatmulRate(4e11, 4e11, 1e9, 2))  # a busy machine, whose two threads usually wait for each other
    out = estimated(capsys, overrides)
    tokens = config.train.seq_len * config.train.batch_size
    assert f"{tokens * 4e11 / step_flops(config):,.0f}  at most: from the step, on cpu, 2 threads a process" in out
    assert "busy" not in out, "neighbours do not move the peak"


@pytest.mark.deep
def test_a_step_measured_on_a_busy_machine_says_so(tiny_overrides, capsys, rates):
    rates(MatmulRate(4e11, 3e11, 3e11, 2), MatmulRate(4e11, 3e11, 1e9, 2))
    facts = json.loads(estimated(capsys, arguments(tiny_overrides(**SIZES, **QUICK)), "--measure", "--json"))
    assert "the machine was busy with something else" in facts["busy"]
    assert facts["threads"] == 2


@pytest.mark.deep
def test_a_step_below_its_bound_is_doubted(tiny_overrides, capsys, rates):
    rates(*[MatmulRate(1e3, 1e3, 1e3, 1)] * 2)
    out = estimated(capsys, arguments(tiny_overrides(**SIZES, **QUICK)), "--measure")
    assert "one of the two was mis-measured, and neither can be relied on" in out


@pytest.mark.deep
def test_processes_share_the_cores(tiny_overrides, capsys, monkeypatch):
    """Each has the threads that the launcher gives it, in what is measured, too."""
    threads = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(estimate_cli.os, "sched_getaffinity", lambda pid: set(range(6)))
    try:
        facts = json.loads(estimated(capsys, arguments(tiny_overrides(**SIZES, **QUICK)), "--nproc", "2", "--json"))
    finally:
        torch.set_num_threads(threads)
    assert facts["threads"] == 3


@pytest.mark.deep(
    but=[
        "changes0-options0-train.batch_size = 8 must be a multiple of the 3 processes",
        "changes1-options1-torch finds no GPU here",
        "changes2-options2---set compile.enabled=true",
    ]
)
@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, ["--nproc", "3"], "train.batch_size = 8 must be a multiple of the 3 processes"),
        pytest.param(
            {"train.device": "cuda"},
            [],
            "torch finds no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"compile.enabled": "false"}, [], "--set compile.enabled=true"),
        ({"compile.disable": "[batch_prefill]", "train.seq_len": 64}, [], "nsa-compile passes explain"),
    ],
)
def test_mistakes_are_one_line(tiny_overrides, capsys, changes, options, expected):
    assert _run(["estimate", *arguments(tiny_overrides(**{**SIZES, **changes})), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.rstrip().splitlines()[-1].startswith("error: ")
