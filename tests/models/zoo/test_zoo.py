"""What holds of every attention of the zoo: decoding, causality, compiling, training, configuration."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest
import torch

import nsa_compile
from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.generation.exported_step import InPlaceStep, export_step
from nsa_compile.models import NSATransformer, transformer
from nsa_compile.models.flops import forward_flops_per_token
from nsa_compile.models.variant import REGISTERED, find
from nsa_compile.models.zoo.recurrent_variants import Recurrent
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from tests.models.zoo import judge

# Sizes at which a sequence of 19 tokens has something to choose from.
SMALL: dict[str, dict] = {
    "gqa": {},
    "streaming": {"window": 5, "num_sinks": 2},
    "gpt_oss": {"window": 5},
    "longformer": {"window": 3, "dilation": 3, "num_dilated": 2},
    "bigbird": {"block": 2, "num_window": 2, "num_global": 1, "num_random": 2},
    "moba": {"block": 4, "num_selected": 2},
    "quest": {"block": 3, "num_selected": 3},
    "infllm_v2": {
        "pool_block": 4,
        "pool_stride": 2,
        "block": 4,
        "num_selected": 2,
        "num_initial": 1,
        "window": 4,
        "dense_len": 9,
    },
    "dsa": {"num_selected": 5, "q_rank": 6, "kv_rank": 5, "rope_dim": 2, "index_heads": 2, "index_dim": 4},
    "msa": {"block": 4, "num_selected": 2, "index_dim": 4},
    "qsa": {"block": 3, "num_selected": 3, "index_heads": 2, "index_dim": 4},
    "csa": {
        "block": 3,
        "window": 4,
        "q_rank": 6,
        "rope_dim": 2,
        "out_groups": 2,
        "out_rank": 3,
        "num_selected": 2,
        "index_heads": 2,
        "index_dim": 4,
    },
    "hca": {"block": 5, "window": 4, "q_rank": 6, "rope_dim": 2, "out_groups": 2, "out_rank": 3},
    "linear": {},
    "retnet": {},
    "gla": {"gate_rank": 3},
    "mamba2": {"conv": 3, "groups": 2},
    "delta_net": {"conv": 3},
    "gated_delta_net": {"conv": 3},
    "kda": {"conv": 3, "gate_rank": 3},
}
# What else a design asks of a model.
OTHERS = {name: {"n_kv_heads": 1, "v_head_dim": None} for name in ("csa", "hca")}
ZOO = [name for name, place in REGISTERED.items() if ".zoo." in place]
LENGTH = 19


def test_each_has_small_sizes():
    assert set(SMALL) == set(ZOO)


def small(name):
    return judge.make_config(name, SMALL[name], **OTHERS.get(name, {}))


@pytest.fixture(params=ZOO)
def config(request):
    return small(request.param)


@pytest.fixture(params=[name for name in ZOO if find(name).auxiliary])
def indexed(request):
    return small(request.param)


def test_a_decode_step_is_the_same_as_the_scan(config):
    judge.check_decoding(judge.make_layer(config), judge.make_input(config, 3, LENGTH))


# A cache by position, a shift buffer, an indexer, and all of these.
@pytest.mark.deep(but=["moba"])
@pytest.mark.parametrize("name", ["moba", "infllm_v2", "dsa", "csa"])
def test_a_compiled_decode_step_is_the_step(name):
    torch._dynamo.reset()
    config = small(name)
    torch.manual_seed(0)
    model = NSATransformer(config).double()
    tokens = torch.randint(256, (2, 12))
    expected = model(tokens)
    state = model.init_state(2, 16)
    step = nsa_compile.compile_decode_step(model, nested="eager", cache=False)
    # The second sequence is two tokens behind.
    for t in range(2):
        after, _ = step(state, tokens[:, t])
    after.t.copy_(torch.tensor([2, 0]))
    for t in range(2, 10):
        given = torch.stack([tokens[0, t], tokens[1, t - 2]])
        after, logits = step(after, given)
        torch.testing.assert_close(logits[0], expected[0, t])
        torch.testing.assert_close(logits[1], expected[1, t - 2])


@pytest.mark.deep
def test_an_exported_step_takes_any_batch_and_begins_another_text_in_a_row(config):
    torch.manual_seed(0)
    model = NSATransformer(config).double().eval()
    step = export_step(InPlaceStep(model, LENGTH)).module()
    batch = torch.arange(3)
    tokens, state = torch.randint(256, (2, 12)), model.init_state(3, LENGTH)
    with torch.no_grad():
        _, expected = model.decode_step(state, batch)
        torch.testing.assert_close(step(batch, state.t, state.caches()), expected)
        expected, state = model(tokens), model.init_state(2, LENGTH)
        for t in range(6):
            step(tokens[:, t], state.t, state.caches())
        state.t[1] = 0
        for t in range(6):
            following = torch.stack([tokens[0, 6 + t], tokens[1, t]])
            logits = step(following, state.t, state.caches())
            torch.testing.assert_close(logits, torch.stack([expected[0, 6 + t], expected[1, t]]))


def test_a_model_that_is_cast_has_the_constants_of_its_design(config):
    """A buffer would be rounded with the weights, and lost where a file has the weights alone."""
    assert not dict(judge.make_layer(config).named_buffers())


@pytest.mark.deep(but=["msa"])
def test_the_tokens_whose_loss_counts(indexed):
    layer, x = judge.make_layer(indexed), judge.make_input(indexed, 2, LENGTH)
    counted = torch.arange(LENGTH) < torch.tensor([[LENGTH], [7]])
    _, loss = layer(x, return_auxiliary=True, counted=counted)
    alone = [layer(row[None, :n], return_auxiliary=True)[1] * n for row, n in zip(x, (LENGTH, 7), strict=True)]
    torch.testing.assert_close(loss, sum(alone) / (LENGTH + 7))


@pytest.mark.deep(but=["linear", "gla", "delta_net"])
def test_a_later_token_changes_nothing_before_it(config):
    judge.check_causality(judge.make_layer(config), judge.make_input(config, 2, LENGTH))


def test_a_loss_of_its_own_teaches_the_indexer_alone(indexed):
    judge.check_auxiliary(judge.make_layer(indexed), judge.make_input(indexed, 2, LENGTH))


@pytest.mark.deep
def test_an_indexer_learns_what_attention_reads(indexed):
    layer, x = judge.make_layer(indexed), judge.make_input(indexed, 2, LENGTH)
    optimizer = torch.optim.Adam([p for name, p in layer.named_parameters() if name.startswith("index")], 0.02)
    losses = []
    for _ in range(40):
        _, loss = layer(x, return_auxiliary=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def verdict(report):
    """What became of a layer, in the words of the page."""
    if not all(scan.batched for scan in report.scans):
        return "a loop"
    operators = sorted({f"`{choice.operator}`" for choice in report.attention if choice.operator != "dense"})
    if any(entry.name == "parallelize_recurrences" and entry.matches for entry in report.passes):
        operators.append("in parallel")
    copies = any(decline.pass_name == "eliminate_guards" for decline in report.declines)
    return ", ".join([*operators, *([] if operators else ["dense"]), *(["copies"] if copies else [])])


@pytest.mark.deep(but=["bigbird"])
def test_what_is_compiled_is_the_loop_and_what_the_page_says(config):
    report = judge.check_compiled(judge.make_layer(config), judge.make_input(config, 2, 40))
    if isinstance(config.variant, Recurrent):  # of states this small some stay in a loop, which costs less
        wide = judge.make_config(config.attention, SMALL[config.attention], head_dim=32, v_head_dim=32)
        report = judge.check_compiled(judge.make_layer(wide), judge.make_input(wide, 2, 96))
    page = (Path(__file__).parents[3] / "docs" / "zoo.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", page, re.MULTILINE))
    assert rows.keys() == set(ZOO)
    assert rows[config.attention] == verdict(report)


def test_uncompiled_it_says_so_once(config, monkeypatch, caplog):
    monkeypatch.setattr(transformer, "_said", set())
    layer = config.variant.layer(config)
    x = torch.zeros(1, 3, config.dim)
    with caplog.at_level(logging.WARNING, logger="nsa_compile"):
        layer(x)
        layer(x)
    assert [record.message.split(" runs uncompiled")[0] for record in caplog.records] == [type(layer).__name__]


def test_its_matrices_are_counted(config):
    """A token alone sees itself, but for a recurrence: what is not a matrix is the product of scores and values."""
    variant = config.variant
    assert variant.pairs(config, 1) >= 1 or isinstance(variant, Recurrent)
    layer = judge.make_layer(config)
    matrices = sum(p.numel() for name, p in layer.named_parameters() if p.dim() == 2 and name.endswith("weight"))
    # Work beside the projections, such as ranking, is none for one token, or is counted by the design's own test.
    assert sum(variant.multiplies(config, 1)) >= matrices
    assert forward_flops_per_token(config, LENGTH) > 0


@pytest.mark.deep(but=["bigbird"])
def test_it_trains_and_writes_text(config, tiny_overrides, tmp_path):
    torch._dynamo.reset()
    name = config.attention
    overrides = [key for key in tiny_overrides() if not key.startswith("model.pattern.")]
    sizes = [f"model.pattern.{key}={json.dumps(value)}" for key, value in SMALL[name].items()]
    sizes += [f"model.{key}={json.dumps(value)}" for key, value in OTHERS.get(name, {}).items()]
    settings = ["compile.enabled=true", "compile.nested=eager", f"model.attention={name}", "optim.lr=0.01"]
    run_config = load_config(overrides=[*overrides, *sizes, *settings])
    directory = create_run_directory(run_config)
    summary = run(run_config, load_corpus(run_config), directory)
    assert summary["val_loss_end"] < summary["val_loss_start"]
    assert summary["attention"] == name
    assert (directory / "sample.txt").stat().st_size > 0
    model = NSATransformer(run_config.model)
    assert model.config.pattern == run_config.model.pattern
