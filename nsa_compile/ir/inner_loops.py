"""A loop within a batched step, while the step is traced: a stand-in, for which a scan is put afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op

from nsa_compile import modes
from nsa_compile.ir.scans import example, results
from nsa_compile.workarounds import blank

__all__ = ["INNER_LOOP", "RECOMPUTED", "body_of_inner_loop", "place_inner_loops", "run_inner_loop"]

# In the meta of a scan: its backward pass computes again what its forward pass has computed, and keeps nothing.
RECOMPUTED = "nsa_recomputed"

_bodies: dict[str, tuple[fx.GraphModule, bool]] = {}
_numbers = itertools.count()


def run_inner_loop(
    body: fx.GraphModule,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    additional: Sequence[Tensor],
    *,
    recomputed: bool = False,
) -> list[Tensor]:
    """Put a loop into the graph that is traced: the final carries, and the yields of all steps, `[S, ...]`."""
    key = str(next(_numbers))
    _bodies[key] = body, recomputed
    return _stand_in(list(init), list(xs), list(additional), key)


@torch.library.custom_op(
    "nsa_compile::inner_loop",
    mutates_args=(),
    schema="(Tensor[] init, Tensor[] xs, Tensor[] additional, str key) -> Tensor[]",
)
def _stand_in(init: Sequence[Tensor], xs: Sequence[Tensor], additional: Sequence[Tensor], key: str) -> list[Tensor]:
    raise AssertionError("an inner loop is a stand-in, which no program runs")


@_stand_in.register_fake
def _(init: Sequence[Tensor], xs: Sequence[Tensor], additional: Sequence[Tensor], key: str) -> list[Tensor]:
    yields = [example(node) for node in results(_bodies[key][0])[len(init) :]]
    rows = [blank(xs[0], (xs[0].shape[0], *x.shape), dtype=x.dtype) for x in yields]
    return [*(blank(x, x.shape) for x in init), *rows]


INNER_LOOP = torch.ops.nsa_compile.inner_loop.default


def body_of_inner_loop(key: str) -> fx.GraphModule:
    """The step of a stand-in, by its last argument."""
    return _bodies[key][0]


def place_inner_loops(owner: fx.GraphModule) -> list[fx.Node]:
    """Make the stand-ins of a graph scans, in place."""
    placed = []
    for node in owner.graph.find_nodes(op="call_function", target=INNER_LOOP):
        *tensors, key = node.args
        body, recomputed = _bodies.pop(key)
        name = next(n for i in itertools.count() if not hasattr(owner, n := f"inner_loop_{i}"))
        owner.add_submodule(name, body)
        with owner.graph.inserting_before(node):
            step = owner.graph.get_attr(name)
        step.meta = {"example_value": body}
        node.target, node.args = scan_op, (step, *tensors)
        node.meta["example_value"] = node.meta.pop("val")
        modes.note_no_autocast(node)
        node.meta[RECOMPUTED] = recomputed
        placed.append(node)
    owner.recompile()
    return placed
