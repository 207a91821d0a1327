"""The compiled training step: no graph break, no wait for the device, and whether CUDA graphs pay."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
import torch._inductor.config
from torch import nn

import nsa_compile
from benchmarks.gpu.training import SMOKE
from nsa_compile.config import load_config
from nsa_compile.models import NSATransformer
from nsa_compile.profiles.measure import interleave, not_measured, random_tokens, ratio
from nsa_compile.train.evaluation import logits_and_loss


def inspect_step(preset: Path, seq_len: int, device: torch.device, smoke: bool = False) -> dict[str, Any]:
    """Forward and backward of a preset's compiled model on one sequence, without and with checkpointed blocks.

    Returns graph breaks and waits for the device (both have to be zero), and times with CUDA graphs off and on.
    """
    config = load_config(str(preset), [*(SMOKE if smoke else []), f"train.seq_len={seq_len}"])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    works, result = {}, {"preset": preset.name, "seq_len": seq_len, "host_syncs": {}}
    tokens = random_tokens(config.model, seq_len + 1).to(device)
    for checkpointed in (False, True):
        model = NSATransformer(config.model).to(device)
        model.checkpoint_blocks(range(config.model.n_layers) if checkpointed else ())
        nsa_compile.compile_blocks(model, nested=config.compile.nested)
        step = _make_step(model, tokens, config.train.dtype)
        for _ in range(2):
            step()
        name = "checkpointed" if checkpointed else "plain"
        with counted_syncs(device) as syncs:
            step()
        result["host_syncs"][name] = syncs
        works[name] = step
    result["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())

    graphs = None
    if device.type == "cuda":
        try:
            with torch._inductor.config.patch("triton.cudagraphs", True):
                torch._dynamo.reset()
                model = NSATransformer(config.model).to(device)
                nsa_compile.compile_blocks(model, cache=False)
                works["CUDA graphs"] = graphs = _make_step(model, tokens, config.train.dtype)
                for _ in range(4):  # compile, warm up, record
                    graphs()
        # They are tried: what keeps them from working is a result.
        except Exception as error:
            works.pop("CUDA graphs", None)
            result["CUDA graphs"] = not_measured(next(iter(str(error).splitlines()), type(error).__name__))
    else:
        result["CUDA graphs"] = not_measured("runs on CUDA only")
    result |= interleave(works, 2 if smoke else 20, device, warm_up=False)
    result["graphs_speedup"] = ratio(result["plain"], result["CUDA graphs"])
    return result


def _make_step(model: nn.Module, tokens: torch.Tensor, dtype: str) -> Any:
    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=False)  # the gradients stay where a recorded graph has written them
        logits_and_loss(model, tokens, dtype)[1].backward()

    return step


@contextlib.contextmanager
def counted_syncs(device: torch.device) -> Iterator[list[str]]:
    """Collect where the host waits for the device inside this context; a CPU never waits."""
    found: list[str] = []
    if device.type != "cuda":
        yield found
        return
    torch.cuda.synchronize(device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
