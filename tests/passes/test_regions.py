"""Scans inside regions of the captured graph: checkpointed blocks, and regions that are compiled once and shared."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile.ir.scans import find_scans
from tests.models.test_nsa import tiny_model, tokens_for
from tests.passes.test_pipeline_nsa import assert_whole, compiled, loss_and_grads


class Checkpointed(nn.Module):
    """A model whose blocks are recomputed in the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embedding(tokens)
        for block in self.model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.model.head(self.model.norm(x))


@pytest.mark.deep
@pytest.mark.parametrize(
    ("nested", "changes"), [("aot_eager", {}), ("inductor", {"n_layers": 1, "branches": ("window",)})]
)
def test_checkpointed_blocks_equal_the_loop_without_checkpointing(nested, changes, final_graphs):
    model = tiny_model(**changes)
    tokens = tokens_for(model, 2, 25)
    actual = loss_and_grads(compiled(Checkpointed(model), nested), model, tokens)
    report = nsa_compile.last_report()
    assert_whole(report)
    assert len({scan.name for scan in report.scans}) == model.config.n_layers
    (graph,) = final_graphs
    assert not find_scans(graph)
    regions = [node for node in graph.graph.nodes if node.target is tag_activation_checkpoint]
    assert len(regions) == model.config.n_layers, "the blocks are recomputed still"
    torch.testing.assert_close(actual, loss_and_grads(model, model, tokens), rtol=1e-8, atol=1e-10)


def test_checkpointed_blocks_that_are_not_compiled():
    model = tiny_model()
    tokens = tokens_for(model, 2, 20)
    actual = loss_and_grads(Checkpointed(model), model, tokens)
    torch.testing.assert_close(actual, loss_and_grads(model, model, tokens))


def windows(x, w):
    """Sums over the last three rows, projected."""

    def step(window, row):
        window = torch.cat([window[1:], row[None]])
        return window, (window @ w).sum(0)

    return nsa_compile.scan(step, x.new_zeros(3, x.shape[1]), x)[1]


@pytest.mark.deep
def test_a_shared_region_is_batched_once():
    region = torch.compiler.nested_compile_region(windows)

    def twice(x, w):
        return region(region(x, w), w)

    x, w = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (6, 4))
    actual = compiled(twice, "aot_eager")(x, w)
    (scan,) = nsa_compile.last_report().scans
    assert scan.batched
    expected = windows(windows(x, w), w)
    torch.testing.assert_close(actual, expected)
    grads = (torch.autograd.grad(y.square().sum(), (x, w)) for y in (actual, expected))
    torch.testing.assert_close(*grads)


WARM_START = """
    import torch, nsa_compile
    from torch.utils.checkpoint import checkpoint

    def block(x, w):
        def step(window, xs):
            window = torch.where((torch.arange(8) == xs["t"])[:, None], xs["x"], window)
            seen = (torch.arange(8) <= xs["t"]).to(x.dtype)
            return window, seen @ torch.tanh(window @ w)
        return nsa_compile.scan(step, x.new_zeros(8, 4), {"x": x, "t": torch.arange(8)})[1]

    def loop(x, w):
        return block(block(x, w), w)

    def model(x, w):
        return checkpoint(block, checkpoint(block, x, w, use_reentrant=False), w, use_reentrant=False)

    torch.manual_seed(0)
    x, w = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (8, 4))
    y, expected = torch.compile(model, backend="nsa_compile", options={"nested": "aot_eager"})(x, w), loop(x, w)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(z.square().sum(), (x, w)) for z in (y, expected)))
    report = nsa_compile.last_report()
    assert [scan.batched for scan in report.scans] == [True, True]
    print(report.cache_hit)
"""


@pytest.mark.deep
def test_warm_start_of_a_checkpointed_model(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(WARM_START))
    starts = [subprocess.run([sys.executable, script], capture_output=True, text=True, check=False) for _ in range(2)]
    assert [start.returncode for start in starts] == [0, 0], "".join(start.stderr for start in starts)
    assert [start.stdout.split() for start in starts] == [["False"], ["True"]]
