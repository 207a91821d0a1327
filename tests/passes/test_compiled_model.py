"""What must hold of a compiled language model, whatever the passes: no loop, no sync, no lost accuracy, no future."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator

import nsa_compile
from nsa_compile.config import load_config
from nsa_compile.ir.scans import subgraphs
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.verification.oracle import nsa_branches_oracle
from tests.models.test_nsa import EXAMPLE, PATTERN, tiny_model, tokens_for
from tests.passes.test_pipeline_nsa import assert_whole, attention, compiled

# Operators that wait for the device, or whose result's shape depends on data.
SYNCS = (
    "item",
    "_local_scalar_dense",
    "tolist",
    "numpy",
    "nonzero",
    "argwhere",
    "unique",
    "masked_select",
    "is_nonzero",
)


@pytest.mark.deep
@pytest.mark.parametrize("operators", ["sparse", "dense"])
def test_a_compiled_model_neither_loops_nor_syncs(operators, final_graphs):
    """Nor does its graph grow with the sequence, or the number of operators it runs."""
    model = tiny_model(n_layers=1)
    nodes, runs = [], []
    for S in (64, 256):
        compiled(model, attention=operators, estimate=True)(tokens_for(model, 1, S))
        report = nsa_compile.last_report()
        assert_whole(report)
        assert not report.notes, "it was estimated on fake tensors, on which a sync fails"
        runs.append(report.passes[-1].estimate.operators)
        calls = [n for graph in subgraphs(final_graphs[-1]) for n in graph.graph.nodes if n.op.startswith("call")]
        nodes.append(len(calls))
        for node in calls:
            assert not isinstance(node.target, HigherOrderOperator), "scan, while_loop, map and cond are all of these"
            name = node.target if isinstance(node.target, str) else node.target.__name__
            assert name.partition(".")[0] not in SYNCS, node.format_node()
    assert nodes[0] == nodes[1]
    assert runs[0] == runs[1]


@pytest.mark.deep
def test_the_production_size_is_batched():
    """With nothing but defaults: 2048 tokens under the paper's pattern, every loop gone, no guard, no decline."""
    assert load_config().compile.enabled
    assert not load_config().compile.disable
    model = NSATransformer(NSAConfig(256, 16, 1, 2, 1, 8))
    compiled(model)(torch.zeros(1, 2048, dtype=torch.int64))
    report = nsa_compile.last_report()
    (scan,) = report.scans
    assert scan.length == 2048
    assert_whole(report)
    assert not report.declines


@pytest.mark.deep
@pytest.mark.deep(but=["sparse"])
@pytest.mark.parametrize("operators", ["sparse", "dense"])
def test_each_branch_alone_when_compiled(operators):
    """One gate open: the oracle's branch, under its explicit mask. Where only the selected branch is seen and only the
    keys that decide the selection change, later ones change no earlier selection."""
    *tensors, gates = EXAMPLE.tensors()
    fast = compiled(attention(EXAMPLE), attention=operators)
    branches, _ = nsa_branches_oracle(*tensors, **EXAMPLE.oracle_arguments)
    for i, branch in enumerate(branches):
        one = torch.zeros_like(gates).index_fill(-1, torch.tensor(i), 1.0)
        torch.testing.assert_close(fast(*tensors, one), branch, rtol=1e-9, atol=1e-10)

    q, k_cmp, *rest = tensors
    only_selected = torch.zeros_like(gates).index_fill(-1, torch.tensor(1), 1.0)
    moved = torch.cat([k_cmp[:, :21], -20 * k_cmp[:, 21:]], 1)
    a, b = (fast(q, k, *rest, only_selected) for k in (k_cmp, moved))
    assert torch.equal(a[:, :21], b[:, :21])
    assert not torch.equal(a[:, 21:], b[:, 21:])


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.deep
@pytest.mark.parametrize(("nested", "changes"), [("aot_eager", {}), ("inductor", {"phi": "mean", "shared_kv": True})])
def test_under_autocast_as_good_as_the_loop(nested, changes):
    """bfloat16 autocast over float32 weights: values and gradients, judged by float64 without autocast."""
    # Every block is selected: which ones are would otherwise hang on the rounding of their scores, in the loop as well.
    exact_model = tiny_model(pattern=SparsePattern(4, 2, 4, num_selected=9, window=8), n_layers=1, **changes)
    model = copy.deepcopy(exact_model).float()
    tokens = tokens_for(model, 2, 34)

    def logits_and_grads(run, model):
        with torch.autocast("cpu", torch.bfloat16, enabled=model is not exact_model):
            logits = run(tokens[:, :-1])
        loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).mT, tokens[:, 1:])
        return logits.detach(), *torch.autograd.grad(loss, list(model.parameters()))

    exact = logits_and_grads(exact_model, exact_model)
    eager = logits_and_grads(model, model)
    actual = logits_and_grads(compiled(model, nested), model)
    assert_whole(nsa_compile.last_report())
    assert actual[0].dtype == torch.bfloat16
    assert [x.dtype for x in actual] == [x.dtype for x in eager]
    for a, e, x in zip(actual, eager, exact, strict=True):
        assert rms(a - x) <= 2 * rms(e - x) + torch.finfo(torch.bfloat16).eps / 2 * rms(x)


@pytest.mark.deep
@pytest.mark.parametrize("operators", ["sparse", "dense"])
def test_random_bytes_stay_unpredictable_when_compiled(operators):
    """Fresh uniform bytes at every step, more of them than the window holds and more blocks than are selected: whatever
    is learned of them, no model that sees only the past gets below ln 256 = 5.545."""
    torch.manual_seed(0)
    model = NSATransformer(NSAConfig(256, 32, 1, 2, 1, 16, pattern=PATTERN, phi="mean"))
    fast = nsa_compile.compile_blocks(model, nested="aot_eager", cache=False, attention=operators)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(50):
        tokens = torch.randint(256, (16, 33))
        loss = F.cross_entropy(fast(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_whole(nsa_compile.last_report())
    # 512 tokens a step, of which each scatters by less than 1 around the mean: 0.1 is more than two standard errors.
    assert min(losses) > math.log(256) - 0.1
    assert sum(losses[-20:]) / 20 > math.log(256) - 0.02
