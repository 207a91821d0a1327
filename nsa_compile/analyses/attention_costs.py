"""What an attention costs: with the operator that follows its mask, and dense.

Which one is faster is decided by the number of keys each of them touches and by what a key costs, as measured
(`operator_costs.json`; `benchmarks/operator_costs.py` measures it anew).
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

from nsa_compile.ir.attention import All, AttentionCall, Blocks, SelectCall, Window
from nsa_compile.ir.scans import example
from nsa_compile.ops import cpp, flops
from nsa_compile.ops.checks import DTYPES

Call = AttentionCall[fx.Node] | SelectCall[fx.Node]

# Of a device on which `benchmarks/operator_costs.py` has not run, in units of a pair of flash attention: an operator
# that follows its mask is taken to get half the rate of flash, which skips half of the pairs where the mask is causal
# and takes no other mask; scores that go through memory are slower yet.
UNMEASURED = {
    name: {"per_query": 0.0, "per_pair": pairs}
    for name, pairs in {
        "window": 2.0, "compressed": 2.0, "selected": 2.0, "dense_causal": 0.5, "dense": 1.5, "dense_scores": 4.0,
    }.items()
}  # fmt: skip


@cache
def costs() -> dict[str, Any]:
    """What a query and a pair of query and key cost each operator, by machine, in nanoseconds."""
    return json.loads((Path(__file__).parent / "operator_costs.json").read_text())


def prefers_sparse(call: Call, wish: str) -> bool:
    """Whether the operator that follows the mask is faster than dense attention, or asked for."""
    read = (call.q, call.k) if isinstance(call, SelectCall) else (call.q, call.k, call.v)
    if isinstance(call, SelectCall) and call.mask is not None:
        return False
    if len({example(x).dtype for x in read}) > 1:
        return False  # the operators want one dtype
    if wish != "auto":
        return wish == "sparse"
    q, k = example(call.q), example(call.k)
    queries, keys = q.shape[1], k.shape[1]
    prices = costs().get(machine(q.device.type), UNMEASURED)

    def cost(name: str, pairs: int) -> float:
        return prices[name]["per_query"] * queries + prices[name]["per_pair"] * pairs

    return cost(*_sparse_work(call, queries, keys)) < cost(_dense_name(call, queries, keys), queries * keys)


def runs_in_place(gm: fx.GraphModule) -> bool:
    """Whether a step by itself may leave attention to `step_attention`: on the CPU, where no gradient is asked for."""
    inputs = gm.graph.find_nodes(op="placeholder")
    on_cpu = all(x.device.type == "cpu" for n in inputs if isinstance(x := example(n), torch.Tensor))
    return on_cpu and not torch.is_grad_enabled()


def reads_in_place(call: Call, wish: str) -> bool:
    """Whether `step_attention` takes an attention of one query, or the ranking of its weights."""
    tensors = [example(x) for x in (call.q, call.k)] + ([example(call.v)] if isinstance(call, AttentionCall) else [])
    told_by_tensors = call.mask is not None or isinstance(call.kind, All)
    if tensors[0].shape[1] != 1 or wish == "dense" or not told_by_tensors:
        return False
    if torch.is_grad_enabled() or any(x.device.type != "cpu" for x in tensors):
        return False
    return len({x.dtype for x in tensors}) == 1 and tensors[0].dtype in DTYPES


def _sparse_work(call: Call, queries: int, keys: int) -> tuple[str, int]:
    """The operator that follows a mask, and how many pairs of queries and keys it computes."""
    if isinstance(call.kind, Blocks):
        return "compressed", flops.compressed_pairs(queries, keys, call.kind.size, call.kind.stride)
    assert isinstance(call, AttentionCall)
    if call.indices is not None:
        return "selected", flops.window_pairs(queries, keys, selected_blocks(call) * call.select_block)
    assert isinstance(call.kind, Window)
    return "window", flops.window_pairs(queries, keys, call.kind.size)


def _dense_name(call: Call, queries: int, keys: int) -> str:
    """What dense attention costs goes by: whether its scores go through memory, and whether it is causal."""
    if isinstance(call, SelectCall) or not fits_sdpa(call):
        return "dense_scores"
    return "dense_causal" if is_causal(call) and queries == keys else "dense"


def machine(device: str) -> str:
    """Whose costs to go by."""
    return "vectors" if device == "cpu" and not cpp.has_matrix_unit() else device


def is_causal(call: AttentionCall[fx.Node]) -> bool:
    """Whether a call's mask keeps every key up to the query's own."""
    return isinstance(call.kind, Window) and call.kind.size >= example(call.q).shape[1]


def selected_blocks(call: AttentionCall[fx.Node]) -> int:
    """How many blocks each query selects."""
    assert call.indices is not None
    return example(call.indices).shape[-1]


def fits_sdpa(call: AttentionCall[fx.Node]) -> bool:
    """A row that sees nothing would be NaN; each query sees at least itself through a window. SDPA wants one dtype.

    In low precision SDPA may be taken apart into float32 products, which an ambient autocast would round again.
    """
    q, k, v = (example(x) for x in (call.q, call.k, call.v))
    by_window = isinstance(call.kind, Window) and call.mask is None and call.indices is None
    precise = q.dtype == k.dtype == v.dtype and q.dtype in (torch.float32, torch.float64)
    return by_window and k.shape[1] >= q.shape[1] and precise
