"""The trainer compares a compiled block with the loop at its first call, and says so."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.errors import Miscompiled
from nsa_compile.passes.pipeline import register
from nsa_compile.program import first_call
from nsa_compile.train.checkpoints.resume import first_difference
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from tests import processes

# One branch is compiled in a third of the time.
COMPILED = {"compile.enabled": "true", "compile.nested": "eager", "train.steps": "2", "model.branches": "[window]"}


def train(overrides: list[str]) -> None:
    torch._dynamo.reset()
    config = load_config(overrides=overrides)
    run(config, load_corpus(config), create_run_directory(config))


@pytest.mark.deep(but=["extra2"])
@pytest.mark.parametrize("extra", [{}, {"train.dtype": "bf16"}, {"train.activation_checkpointing": "all"}])
def test_a_run_says_once_that_it_compared_a_block(tiny_overrides, capsys, extra):
    train(tiny_overrides(**COMPILED, **extra))
    lines = [line for line in capsys.readouterr().err.splitlines() if "a compiled block is" in line]
    assert len(lines) == 1
    assert "equal to the loop at the first call: 1 value and" in lines[0]


@pytest.mark.deep
def test_a_run_can_do_without(tiny_overrides, capsys, monkeypatch):
    monkeypatch.setattr(first_call, "compare", None)
    train(tiny_overrides(**COMPILED, **{"compile.check": "false"}))
    assert "a compiled block is" not in capsys.readouterr().err


@pytest.mark.deep
def test_a_wrong_pass_ends_the_run_before_its_first_step(tiny_overrides):
    @register("scales")
    def scales(gm: fx.GraphModule, context) -> bool:
        """Scale the output."""
        output = gm.graph.output_node()
        (value,) = output.args[0]
        with gm.graph.inserting_before(output):
            new = gm.graph.call_function(torch.mul, (value, 1.01))
        new.meta = dict(value.meta)
        output.args = ((new,),)
        gm.recompile()
        return True

    try:
        with pytest.raises(Miscompiled, match=r"^pass scales: "):
            train(tiny_overrides(**COMPILED))
    finally:
        scales.unregister()
        torch._dynamo.reset()  # which would hand the wrong program to whoever compiles a block next


def test_a_resumed_run_may_choose_otherwise():
    config = load_config(overrides=["compile.check=false"])
    saved = load_config().plain()
    assert first_difference(config, saved) is None
    del saved["compile"]["check"]  # a checkpoint from before there was a check
    assert first_difference(config, saved) is None


@pytest.mark.deep
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_process_compares(tiny_overrides, strategy):
    done = processes.train(tiny_overrides(**COMPILED, **{"ddp.strategy": strategy}), "--nproc", "2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("a compiled block is equal to the loop") == 1
