"""Schedule and parameter groups; the optimizers by name: what they keep, save, and come to."""

from __future__ import annotations

import copy
import csv
import json
import signal
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nsa_compile.config import OptimSection, flatten, load_config
from nsa_compile.data import BatchSampler, load_corpus
from nsa_compile.data.sampling import UniformBytes
from nsa_compile.errors import CheckpointError, UserError
from nsa_compile.estimation.estimate import checkpoint_bytes
from nsa_compile.machine.preflight import check_run
from nsa_compile.models import NSATransformer
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from nsa_compile.train.loop import run
from nsa_compile.train.nonfinite import NonFinitePolicy
from nsa_compile.train.optim import learning_rate, make_optimizer, plain_tensors
from nsa_compile.train.state import TrainingState
from nsa_compile.train.steps import train_step
from tests.conftest import with_fault
from tests.processes import train
from tests.train.checkpoints.test_resume import assert_equal_runs

CPU = torch.device("cpu")
QUANTIZED = ["adamw8bit", "adamw4bit"]


@pytest.fixture
def eager():
    """torchao compiles its update for each shape of a weight; what it computes is the same without."""
    pytest.importorskip("torchao")
    with torch.compiler.set_stance("force_eager"):
        yield


@given(st.integers(1, 200), st.data())
def test_schedule_rises_to_lr_and_falls_to_its_floor(steps, data):
    warmup = data.draw(st.integers(0, steps))
    config = OptimSection(lr=0.5, warmup=warmup, min_lr_ratio=0.2)
    rates = [learning_rate(config, step, steps) for step in range(1, steps + 1)]
    assert all(0 < rate <= 0.5 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    if warmup:
        assert rates[warmup - 1] == pytest.approx(0.5)
    if warmup < steps:
        assert rates[-1] == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["adamw", *QUANTIZED])
def test_norms_and_biases_are_not_decayed(name):
    if name != "adamw":
        pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4))
    decayed, spared = make_optimizer(model, OptimSection(name=name, weight_decay=0.3)).param_groups
    assert decayed["weight_decay"] == 0.3
    assert spared["weight_decay"] == 0.0
    assert [p.shape for p in decayed["params"]] == [(4, 4)]
    assert len(spared["params"]) == 2


def trained(steps, lr=lambda step: 1e-2, **optim):
    """Weights and losses after some steps on a repeating sequence, with a model most of whose weights are quantized."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
    optimizer = make_optimizer(model, OptimSection(**optim))
    batch = ((torch.arange(17) ** 2 + torch.arange(8)[:, None]) % 64).numpy()
    losses = [train_step(model, optimizer, [batch], lr(i), 1.0, CPU, "float32").loss for i in range(steps)]
    return [p.detach() for p in model.parameters()], losses


@pytest.mark.deep
@pytest.mark.usefixtures("eager")
def test_quantized_moments_train_like_whole_ones():
    losses = {name: trained(40, name=name)[1] for name in ("adamw", *QUANTIZED)}
    start, end = losses["adamw"][0], losses["adamw"][-1]
    assert end < 0.5 * start
    for name in QUANTIZED:
        assert losses[name][:2] == pytest.approx(losses["adamw"][:2], rel=1e-3)  # before anything was rounded
        assert losses[name] != losses["adamw"]
        # Nine tenths of what whole moments gain.
        assert start - losses[name][-1] > 0.9 * (start - end), name


def test_a_fused_step_is_a_step():
    fused, plain = (trained(5, fused=fused)[0] for fused in (True, False))
    for one, other in zip(fused, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", QUANTIZED)
def test_the_learning_rate_of_a_step_is_the_one_given(name):
    before, _ = trained(0, name=name)
    after, _ = trained(1, lambda step: 3e-4, name=name, weight_decay=0.0)
    # The first step of Adam is the learning rate, in the direction of the gradient.
    moved = torch.cat([(a - b).abs().flatten() for a, b in zip(after, before, strict=True)])
    assert moved.max() == pytest.approx(3e-4, rel=1e-3)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_too_small_to_quantize_are_updated_as_ever(name):
    found = []
    for kind in ("adamw", name):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = make_optimizer(layer, OptimSection(name=kind, lr=1e-2, betas=[0.8, 0.9], weight_decay=0.5))
        for _ in range(5):
            optimizer.zero_grad()
            layer(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
        found.append(layer.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def state_bytes(optimizer):
    return sum(
        part.nbytes
        for entry in optimizer.state.values()
        for name, moment in entry.items()
        if name != "step"
        for part in (lambda x: x.values() if isinstance(x, dict) else [x])(plain_tensors(moment))
    )


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("name", "expected"), [("adamw", 8.0), ("adamw8bit", 2.03), ("adamw4bit", 1.06)])
def test_the_state_takes_as_many_bytes_as_promised(tiny_overrides, name, expected):
    layer = nn.Linear(512, 512, bias=False)
    optimizer = make_optimizer(layer, OptimSection(name=name))
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert state_bytes(optimizer) / layer.weight.numel() == pytest.approx(expected, rel=0.01)

    # And `nsa-compile estimate` counts them: small weights are not quantized.
    config = load_config(overrides=tiny_overrides(**{"optim.name": name}))
    model = NSATransformer(config.model)
    optimizer = make_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights = sum(p.nbytes for p in model.parameters())
    assert checkpoint_bytes(config) == weights + state_bytes(optimizer)


def training(overrides, seed):
    """A training after two steps."""
    config = load_config(overrides=overrides)
    torch.manual_seed(seed)
    model = NSATransformer(config.model)
    optimizer = make_optimizer(model, config.optim)
    sampler, policy = BatchSampler(UniformBytes(1), 2, 32), NonFinitePolicy("skip", 3, Path(config.run.dir))
    for _ in range(2):
        step(model, optimizer, sampler)
    return TrainingState(config, model, optimizer, sampler, policy)


def step(model, optimizer, sampler):
    train_step(model, optimizer, [sampler.next_batch()], 1e-2, 1.0, CPU, "float32")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["adamw", *QUANTIZED])
def test_what_is_saved_goes_on_bit_for_bit_and_needs_no_torchao(tiny_overrides, tmp_path, name):
    overrides = tiny_overrides(**{"optim.name": name, "model.attention": "dense"})
    one, other = training(overrides, 0), training(overrides, 1)
    path = save_checkpoint(tmp_path, 5, one.files(5)).path
    states = load_checkpoint(path)
    saved = dict(flatten(states["state.pt"]["optimizer"]))
    assert {type(tensor) for tensor in saved.values()} == {torch.Tensor}
    assert any(key.endswith("exp_avg.codes") for key in saved) == (name != "adamw")
    other.restore(states, 5)
    for each in (one, other):
        step(each.model, each.optimizer, each.sampler)
    for expected, found in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(expected, found)
    # The next checkpoint is the same, too.
    expected, found = (each.files(5)["state.pt"]["optimizer"] for each in (one, other))
    found = dict(flatten(found))
    assert all(torch.equal(tensor, found[name]) for name, tensor in flatten(expected))


def replaced(entry, **parts):
    entry["exp_avg"] = {**entry["exp_avg"], **parts}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda entry: replaced(entry, codes=torch.zeros(3, dtype=torch.uint8)), r"exp_avg\.codes must be a tensor"),
        (lambda entry: replaced(entry, scale=None), r"exp_avg\.scale must be a tensor"),
        (lambda entry: replaced(entry, more=torch.zeros(3)), "must hold 7 tensors and has 8"),
        (lambda entry: entry.update(exp_avg=torch.zeros(256, 32)), r"exp_avg\.codes must be a tensor"),
        (lambda entry: entry.pop("step"), "step must be a tensor"),
    ],
)
def test_a_quantized_state_of_something_else_is_refused(tiny_overrides, damage, expected):
    refused = training(tiny_overrides(**{"optim.name": "adamw8bit", "model.attention": "dense"}), 0)
    states = copy.deepcopy(refused.files(5))
    index = next(i for i, entry in states["state.pt"]["optimizer"].items() if isinstance(entry["exp_avg"], dict))
    damage(states["state.pt"]["optimizer"][index])
    before = [p.detach().clone() for p in refused.model.parameters()]
    with pytest.raises(CheckpointError, match=expected):
        refused.restore(states, 5)
    assert all(map(torch.equal, before, refused.model.parameters()))


def compile_nothing() -> None:
    """What the fixture `eager` does here, for a process of its own."""
    torch.compiler.set_stance("force_eager")


@pytest.mark.deep
@pytest.mark.usefixtures("eager")
def test_a_killed_run_that_goes_on_equals_an_undisturbed_one(tiny_overrides, tmp_path):
    changes = {"train.steps": 8, "train.save_every": 2, "train.log_every": 99, "train.sample_tokens": 0}
    changes |= {"optim.name": "adamw4bit", "model.attention": "dense"}
    overrides = tiny_overrides(**changes)
    config = load_config(overrides=overrides)
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    run(config, load_corpus(config), undisturbed)
    result = train(overrides, env=with_fault("kill@0:7", tmp_path / "once"), first=compile_nothing)
    assert result.returncode == -signal.SIGKILL
    result = train(overrides, "--resume", "auto", first=compile_nothing)
    assert result.returncode == 0, result.stderr
    assert "torchao" not in result.stderr  # none of its messages
    assert json.loads(result.stdout)["resumed_from"] in (2, 4, 6)
    (directory,) = (tmp_path / "runs").iterdir()
    assert_equal_runs(directory, undisturbed)


@pytest.mark.deep
def test_two_processes_train_as_one_and_the_update_is_compiled(tiny_overrides):
    """With torchao's update and the blocks both compiled in the same processes, where one process compiles neither."""
    pytest.importorskip("torchao")
    changes = {"train.steps": 3, "train.sample_tokens": 0, "optim.name": "adamw4bit", "ddp.compress": "none"}
    overrides = tiny_overrides(**changes, **{"compile.enabled": "true", "compile.nested": "aot_eager"})
    overrides.append("model.attention=dense")
    found = []
    for first, arguments in ((compile_nothing, []), (None, ["--nproc", "2"])):
        result = train(overrides, *arguments, first=first)
        assert result.returncode == 0, result.stderr
        assert "adamw4bit compiles its update in the first step" in result.stderr
        with (Path(json.loads(result.stdout)["run_dir"]) / "training.csv").open(encoding="utf-8") as file:
            found.append([float(row["loss"]) for row in csv.DictReader(file)])
    assert found[0][-1] < found[0][0]
    assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize(("key", "value"), [("optim.name", "adamw8bit"), ("train.matmul", "int8")])
def test_without_torchao_the_extra_is_named(tiny_overrides, monkeypatch, key, value):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        UserError, match=rf"{key} = '{value}' needs the package torchao.*nsa-compile\[torchao\]"
    ) as error:
        check_run(load_config(overrides=tiny_overrides(**{key: value})))
    assert "\n" not in str(error.value)


def test_without_a_compiler_the_optimizer_is_named(tiny_overrides, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    check_run(load_config(overrides=tiny_overrides()))
    with pytest.raises(UserError, match=r"optim\.name = 'adamw8bit' needs a C\+\+ compiler.*optim\.name=adamw"):
        check_run(load_config(overrides=tiny_overrides(**{"optim.name": "adamw8bit"})))


@pytest.mark.parametrize("name", QUANTIZED)
def test_fsdp_is_for_whole_moments(tiny_overrides, name):
    with pytest.raises(UserError, match=r"optim\.name = .* must be 'adamw' for ddp\.strategy = 'fsdp'"):
        load_config(overrides=tiny_overrides(**{"optim.name": name, "ddp.strategy": "fsdp"}))
