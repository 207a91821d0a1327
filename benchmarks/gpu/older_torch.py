"""What the compiler takes from torch 2.13, filled in where torch is 2.11 or 2.12.

A machine with a GPU may come with an older torch. The package asks for 2.13, on which it is tested; what is measured
here needs little of what is new there. Steps that take more are captured as torch captures them, without our refusals.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch._dynamo.variables.dicts
import torch._inductor.custom_graph_pass
import torch.fx.experimental.symbolic_shapes


def fill_in() -> None:
    """Nothing where torch is new enough."""
    if hasattr(torch.fx.experimental.symbolic_shapes, "optimization_hint"):
        return
    for module, name, value in (
        (torch.fx.experimental.symbolic_shapes, "optimization_hint", _optimization_hint),
        (torch._inductor.custom_graph_pass, "CustomSchedulerPass", object),
        (torch._dynamo.variables.dicts, "SideEffectsProxyDict", type("SideEffectsProxyDict", (), {})),
    ):
        if not hasattr(module, name):
            setattr(module, name, value)
    torch.compile = _without_limit(torch.compile)

    from nsa_compile.capture import steps

    look_at = steps._in_steps
    steps._in_steps = lambda kind, name, look: look_at(kind, name, look) if hasattr(kind, name) else None


def _optimization_hint(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.hint


def _without_limit(compile: Any) -> Any:
    """`torch.compile`, which knows no limit of its own for recompilations of one function."""

    @functools.wraps(compile)
    def compiled(*args: Any, recompile_limit: int | None = None, **kwargs: Any) -> Any:
        if recompile_limit is not None:
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, recompile_limit)
        return compile(*args, **kwargs)

    return compiled
