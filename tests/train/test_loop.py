"""The training loop on models small enough to run eagerly."""

from __future__ import annotations

import csv
import json
import math
import re

import numpy as np
import pytest
import torch
import yaml

from nsa_compile.config import OptimSection, load_config
from nsa_compile.data import BatchSampler, load_corpus
from nsa_compile.data.sampling import UniformBytes
from nsa_compile.generation.generate import generate
from nsa_compile.generation.sampling import Sampling
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.train.checkpoints.checkpoint import load_checkpoint
from nsa_compile.train.evaluation import evaluate_answers, logits_and_loss
from nsa_compile.train.loop import run
from nsa_compile.train.optim import make_optimizer
from nsa_compile.train.records.run_directory import create_run_directory
from nsa_compile.train.steps import train_step

CPU = torch.device("cpu")
PATTERN = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=3, window=4)


def make_model(seed: int = 0) -> NSATransformer:
    torch.manual_seed(seed)
    return NSATransformer(NSAConfig(256, 16, 1, 2, 1, 8, pattern=PATTERN))


def run_tiny(overrides: list[str]):
    config = load_config(overrides=overrides)
    directory = create_run_directory(config)
    return run(config, load_corpus(config), directory), directory


def rows(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(("count", "batch_size"), [(2, 1), (3, 2)])
def test_k_accumulated_batches_are_one_batch_of_k_times_the_size(count, batch_size):
    # SGD, whose update is proportional to the gradient, where AdamW's first step only shows its sign.
    outcomes = []
    for sizes in ([batch_size] * count, [batch_size * count]):
        model = make_model()
        sampler = BatchSampler(UniformBytes(1), sizes[0], 12)
        batches = [sampler.next_batch() for _ in sizes]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        result = train_step(model, optimizer, batches, 1.0, None, CPU, "float32")
        outcomes.append((result.loss, result.grad_norm, torch.cat([p.detach().flatten() for p in model.parameters()])))
    (loss_a, norm_a, weights_a), (loss_b, norm_b, weights_b) = outcomes
    assert loss_a == pytest.approx(loss_b, rel=1e-6)
    assert norm_a == pytest.approx(norm_b, rel=1e-5)
    torch.testing.assert_close(weights_a, weights_b, rtol=1e-5, atol=1e-6)


def test_accumulation_keeps_schedule_and_reported_loss(tiny_overrides):
    _, plain = run_tiny(tiny_overrides(**{"train.batch_size": 2, "train.accumulate": 1}))
    _, accumulated = run_tiny(tiny_overrides(**{"train.batch_size": 1, "train.accumulate": 2}))
    for one, other in zip(rows(plain / "training.csv"), rows(accumulated / "training.csv"), strict=True):
        assert one["step"] == other["step"]
        assert one["lr"] == other["lr"]
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-4)


def test_clipping_bounds_the_update_and_reports_the_norm_before_it():
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    batch = BatchSampler(UniformBytes(1), 2, 12).next_batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    norm = train_step(model, optimizer, [batch], 1.0, 0.01, CPU, "float32").grad_norm
    update = torch.stack([(p.detach() - b).norm() for p, b in zip(model.parameters(), before, strict=True)]).norm()
    assert norm > 0.01
    assert update.item() == pytest.approx(0.01, rel=1e-2)


def test_a_loss_that_is_not_finite_changes_no_weight():
    model = make_model()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, OptimSection())
    batch = BatchSampler(UniformBytes(1), 2, 12).next_batch()
    assert not train_step(model, optimizer, [batch], 0.1, 1.0, CPU, "float32").finite
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name], rtol=0, atol=0, equal_nan=True)


def test_bf16_keeps_float32_weights_gradients_and_moments():
    model = make_model()
    optimizer = make_optimizer(model, OptimSection())
    batch = BatchSampler(UniformBytes(1), 2, 12).next_batch()
    tokens = torch.from_numpy(batch)
    (_, low), (_, full) = logits_and_loss(model, tokens, "bf16"), logits_and_loss(model, tokens, "float32")
    assert low.dtype == torch.float32
    assert low != full
    low.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    train_step(model, optimizer, [batch], 1e-3, 1.0, CPU, "bf16")
    moments = [state["exp_avg"] for state in optimizer.state.values()]
    assert {tensor.dtype for tensor in (*model.parameters(), *moments)} == {torch.float32}


@pytest.mark.deep
def test_random_bytes_stay_unpredictable():
    # A model that reads the future learns to copy it, and its loss sinks below ln 256 = 5.545.
    model = make_model()
    optimizer = make_optimizer(model, OptimSection(weight_decay=0.0))
    sampler = BatchSampler(UniformBytes(7), 8, 24)
    losses = [train_step(model, optimizer, [sampler.next_batch()], 3e-3, 1.0, CPU, "float32").loss for _ in range(60)]
    assert min(losses) > math.log(256) - 0.1  # single batches scatter around the mean
    held_out = BatchSampler(UniformBytes(8), 32, 24).next_batch()[None]
    assert evaluate_answers(model, held_out, None, CPU, "float32")[0] > math.log(256) - 0.01


def test_a_text_that_can_be_learned_is_learned():
    model = make_model()
    optimizer = make_optimizer(model, OptimSection(weight_decay=0.0))
    batch = np.tile(np.arange(25) % 5 + 97, (4, 1)).astype(np.int64)
    losses = [train_step(model, optimizer, [batch], 1e-2, 1.0, CPU, "float32").loss for _ in range(30)]
    assert losses[-1] < 1.0 < losses[0]


def test_generation_follows_the_model_and_its_seed():
    model = make_model()
    prompt = torch.tensor([72, 105])

    def sample(seed):
        return generate(model, prompt, 6, Sampling(), torch.Generator().manual_seed(seed))

    assert sample(0).shape == (6,)
    assert torch.equal(sample(0), sample(0))
    assert not torch.equal(sample(0), sample(1))
    # At a temperature near zero the sample is the argmax of the sequential forward pass.
    greedy = generate(model, prompt, 4, Sampling(temperature=1e-6), torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(torch.cat((prompt, greedy))[None, :-1])[0, 1:]
    assert torch.equal(logits.argmax(dim=-1), greedy)


def test_a_run_leaves_everything_in_its_own_directory(tiny_overrides):
    pytest.importorskip("matplotlib")
    overrides = tiny_overrides()
    summary, directory = run_tiny(overrides)
    expected = ["config.resolved.yaml", "training.csv", "val.csv", "env.json", "git_sha.txt"]
    expected += ["checkpoints", "loss.png", "sample.txt", "attention.jsonl", "summary.json"]
    expected += ["heartbeat_rank0.jsonl", "stacks_rank0.txt"]
    assert sorted(path.name for path in directory.iterdir()) == sorted(expected)
    assert [row["step"] for row in rows(directory / "training.csv")] == ["1", "2", "3", "4"]
    assert {"step", "loss", "lr", "grad_norm", "tokens_per_s", "mfu"} <= set(rows(directory / "training.csv")[0])
    assert [row["step"] for row in rows(directory / "val.csv")] == ["0", "2", "4"]
    assert load_config(str(directory / "config.resolved.yaml")) == load_config(overrides=overrides)
    assert json.loads((directory / "env.json").read_text())["packages"]["torch"] == torch.__version__
    assert summary["seq_len"] == 32
    assert summary["parameters"] > 0
    assert summary["tokens_per_s_std"] is not None

    _, other = run_tiny(overrides)
    assert other != directory


def test_a_compiled_run_equals_the_eager_one_and_reports_its_passes(tiny_overrides):
    _, eager = run_tiny(tiny_overrides())
    _, compiled = run_tiny(tiny_overrides(**{"compile.enabled": "true", "compile.nested": "eager"}))
    for one, other in zip(rows(eager / "training.csv"), rows(compiled / "training.csv"), strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-4)
    report = json.loads((compiled / "passes.json").read_text(encoding="utf-8"))
    assert "batch_prefill" in [entry["name"] for entry in report["passes"]]
    assert 0 < report["passes"][-1]["estimate"]["operators"] < report["estimate_captured"]["operators"]


@pytest.mark.deep
def test_a_log_line_tells_the_rate_since_the_line_before(tiny_overrides, capsys):
    _, directory = run_tiny(tiny_overrides(**{"train.log_every": 2}))
    rates = [float(row["tokens_per_s"]) for row in rows(directory / "training.csv")]
    said = re.findall(r"step \d: loss .* ([\d,]+) tokens/s", capsys.readouterr().err)
    assert said == [f"{2 / (1 / one + 1 / other):,.0f}" for one, other in (rates[:2], rates[2:])]


@pytest.mark.deep
def test_checkpoints_hold_the_run(tiny_overrides):
    _, directory = run_tiny(tiny_overrides())
    checkpoints = sorted((directory / "checkpoints").iterdir())
    assert [path.name for path in checkpoints] == ["step-00000002", "step-00000004"]
    state = load_checkpoint(checkpoints[-1])["state.pt"]
    assert state["step"] == 4
    assert state["sampler_position"] == 8
    resolved = yaml.safe_load((directory / "config.resolved.yaml").read_text())
    assert state["config"] == resolved
    NSATransformer(load_config(str(directory / "config.resolved.yaml")).model).load_state_dict(state["model"])


def test_a_run_repeats_itself(tiny_overrides):
    first, second = (run_tiny(tiny_overrides())[1] for _ in range(2))
    losses = [[row["loss"] for row in rows(directory / "training.csv")] for directory in (first, second)]
    assert losses[0] == losses[1]
