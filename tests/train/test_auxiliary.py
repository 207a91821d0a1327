"""Losses that layers have of their own, as an indexer has: what a step learns from them, and where they are told."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.models import NSAConfig, NSATransformer
from nsa_compile.models.zoo.indexed_variants import MSAPattern
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from nsa_compile.train.report.report_page import write_report
from nsa_compile.train.report.run_record import read_run
from nsa_compile.train.steps import train_step

CPU = torch.device("cpu")


def make_model():
    torch.manual_seed(0)
    config = NSAConfig(
        vocab_size=16, dim=8, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=4, attention="msa", mlp_hidden=16,
        pattern=MSAPattern(block=2, num_selected=2, index_dim=4),
    )  # fmt: skip
    return NSATransformer(config)


def batches(count):
    return list(np.random.default_rng(0).integers(16, size=(count, 2, 11)))


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.deep(but=["1"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_adds_the_mean_of_the_layers_losses(count):
    model, expected = make_model(), make_model()
    parts = []
    for batch in batches(count):
        tokens = torch.from_numpy(batch)
        logits, auxiliary = expected(tokens[:, :-1], return_auxiliary=True)
        losses = [expected.blocks[0](expected.embedding(tokens[:, :-1]), return_auxiliary=True)]
        losses.append(expected.blocks[1](losses[0][0], return_auxiliary=True))
        torch.testing.assert_close(auxiliary, losses[0][1] + losses[1][1])
        parts.append((F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()), auxiliary))
    (sum(loss + own for loss, own in parts) / count).backward()

    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    kept = {}
    optimizer.register_step_pre_hook(lambda *_: kept.update(gradients(model)))
    result = train_step(model, optimizer, batches(count), 0.0, None, CPU, "float32", auxiliary=True)
    assert result.loss == pytest.approx(sum(loss.item() for loss, _ in parts) / count)
    assert any(name.endswith("index_q.weight") for name in kept)
    assert kept.keys() == gradients(expected).keys()
    for name, gradient in gradients(expected).items():
        torch.testing.assert_close(kept[name], gradient, msg=lambda text, of=name: f"{of}: {text}")


def test_blocks_computed_again_have_the_same_losses():
    model, again = make_model(), make_model()
    again.checkpoint_blocks({0, 1})
    tokens = torch.from_numpy(batches(1)[0])
    for one in (model, again):
        logits, auxiliary = one(tokens, return_auxiliary=True)
        (logits.square().mean() + auxiliary).backward()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradients(again)[name], gradient)


@pytest.mark.deep
def test_a_run_tells_the_losses_of_its_indexers(tiny_overrides):
    overrides = [key for key in tiny_overrides(**{"train.steps": 20}) if not key.startswith("model.pattern.")]
    sizes = ["model.pattern.block=4", "model.pattern.num_selected=3", "model.pattern.index_dim=4"]
    settings = ["model.attention=msa", "log.stats_every=5", "compile.enabled=true", "compile.nested=eager"]
    config = load_config(overrides=[*overrides, *sizes, *settings])
    directory = create_run_directory(config)
    run(config, load_corpus(config), directory)
    rows = [json.loads(line) for line in (directory / "attention.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows[:1]] == [["step", "layer", "indexer_loss"]]
    assert len(rows) == 4
    assert all(row["indexer_loss"] > 0 for row in rows)
    record = read_run(directory)
    pictures = write_report(record, directory / "report.html")
    assert record.problems == []
    assert "indexer" in {path.stem for path in pictures}
