"""What is measured: this project's attention, dense attention, and public NSA kernels behind small adapters.

A contender is built for a problem and gives a function of q, k, v and gates before their sigmoid, as `Problem.inputs`
makes them. Building raises `NotAvailable`, with the reason, where it cannot run. The adapters call public functions by
the names of their arguments; compression is the mean over a block, and gates are applied in torch, unless the package
does it itself.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nsa_compile
from benchmarks.gpu.problem import Problem
from nsa_compile.models import nsa_attention
from nsa_compile.models.nsa import block_weights
from nsa_compile.ops import compressed_attention, selected_attention, window_attention

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class NotAvailable(Exception):
    """Why a contender cannot run here, or cannot do this work."""


@dataclass(frozen=True)
class Contender:
    """Attributes:
    name: in tables.
    kind: `"nsa"`, `"dense"` or `"window"`, the work it does.
    build: the function for a problem on a device.
    public: somebody else's NSA; small deviations from the paper are noted, not held against it.
    """

    name: str
    kind: str
    build: Callable[[Problem, torch.device], Attention]
    public: bool = False


def mean_blocks(x: Tensor, block: int, stride: int) -> Tensor:
    """eq. 7 with the mean as φ: `[B, S, G, D]` to `[B, N, G, D]`."""
    return x.unfold(1, block, stride).mean(-1)


def gated(gate: Tensor, *branches: Tensor) -> Tensor:
    """The sum of branches `[B, S, H, D]` under gates before their sigmoid `[B, S, H, 3]`."""
    gates = gate.sigmoid()
    out = gates[..., 0, None] * branches[0]
    for i, branch in enumerate(branches[1:], start=1):
        out = torch.addcmul(out, gates[..., i, None], branch)
    return out


# -- ours


def _operators(problem: Problem, device: torch.device) -> Attention:
    p, weights = problem.pattern, block_weights(problem.pattern)

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        k_cmp, v_cmp = (mean_blocks(x, p.compress_block, p.compress_stride) for x in (k, v))
        o_cmp, _, indices = compressed_attention(
            q, k_cmp, v_cmp, block_size=p.compress_block, stride=p.compress_stride, select_block=p.select_block,
            offsets=list(weights), weights=list(weights.values()), num_selected=p.num_selected,
            num_initial=p.num_initial, num_local=p.num_local,
        )  # fmt: skip
        o_slc, _ = selected_attention(q, k, v, indices, block_size=p.select_block)
        o_win, _ = window_attention(q, k, v, window=p.window)
        return gated(gate, o_cmp, o_slc, o_win)

    return attention


def _compiled(problem: Problem, device: torch.device) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return nsa_attention(q, k, v, k, v, None, None, gate.sigmoid(), pattern=problem.pattern)

    # On a CPU this is a dry run, which needs no code generated.
    nested = "inductor" if device.type == "cuda" else "aot_eager"
    return nsa_compile.compile(attention, attention="sparse", on_decline="error", nested=nested)


def _window(problem: Problem, device: torch.device) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return window_attention(q, k, v, window=problem.pattern.window)[0]

    return attention


# -- dense


def _sdpa(backend: SDPBackend, problem: Problem, device: torch.device) -> Attention:
    _need_cuda(device)

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, gqa: bool = True) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if not gqa:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)

    tiny = Problem(128, problem.groups, problem.heads, problem.head_dim, dtype=problem.dtype).inputs(device)
    for gqa in (True, False):  # a backend that knows no groups is given the keys of each head
        try:
            attention(*tiny, gqa=gqa).sum().backward()
        except RuntimeError as error:
            reason = _first_line(error)
            continue
        return partial(attention, gqa=gqa)
    raise NotAvailable(reason)


def _flex(window: bool, problem: Problem, device: torch.device) -> Attention:
    _need_cuda(device)
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    length = problem.seq_len
    reach = problem.pattern.window if window else length
    # Uncompiled it would write the whole mask, 16 GiB at S = 131,072.
    blocks_of = torch.compile(create_block_mask, dynamic=False)
    mask = blocks_of(lambda b, h, i, j: (i >= j) & (i - j < reach), None, None, length, length, device=device.type)

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return attention


def _plain_sdpa(problem: Problem, device: torch.device) -> Attention:
    """SDPA as torch chooses it: on a CPU the only dense attention there is."""
    _need(device.type != "cuda", "on CUDA its backends are measured one by one")

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return attention


# -- public NSA kernels


def _fla(problem: Problem, device: torch.device) -> Attention:
    """`fla.ops.nsa` of flash-linear-attention: blocks without overlap, l = d = l', at least 16 heads a group."""
    module = _module("fla.ops.nsa.parallel", device)
    p = problem.pattern
    _need(p.compress_block == p.compress_stride == p.select_block, "it knows l = d = l' only")
    heads = problem.heads // problem.groups
    _need(heads >= 16 and math.log2(heads).is_integer(), "it takes 16, 32, … heads a group")
    _need((p.num_initial, p.num_local) == (1, 2), "it always selects the first and the last two blocks")
    own_window = getattr(module, "flash_attn_func", None) is not None

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        gates = gate.sigmoid()
        out = module.parallel_nsa(
            q=q, k=k, v=v, g_cmp=gates[..., 0], g_slc=gates[..., 1], g_swa=gates[..., 2],
            block_counts=p.num_selected, block_size=p.select_block, window_size=p.window if own_window else 0,
        )  # fmt: skip
        if own_window:
            return out
        # Its window is flash_attn's. Where that is not installed it gets ours.
        return torch.addcmul(out, gates[..., 2, None], window_attention(q, k, v, window=p.window)[0])

    return attention


def _variable_length(ops: str, selected: str, problem: Problem, device: torch.device) -> Attention:
    """XunhaoLai's `native_sparse_attention` and what follows its interface: sequences in one row, no window."""
    compressed = _function(ops, "compressed_attention", device)
    attend_selected = _function(*selected.rsplit(".", 1), device)
    p = problem.pattern
    _need(problem.batch_size == 1, "this adapter hands over one sequence")
    cu = torch.tensor([0, problem.seq_len], dtype=torch.int32, device=device)
    blocks = (problem.seq_len - p.compress_block) // p.compress_stride + 1
    cu_cmp = torch.tensor([0, blocks], dtype=torch.int32, device=device)

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        k_cmp, v_cmp = (mean_blocks(x, p.compress_block, p.compress_stride)[0].contiguous() for x in (k, v))
        o_cmp, indices = compressed(
            q=q[0], k=k_cmp, v=v_cmp, kernel_size=p.compress_block, kernel_stride=p.compress_stride,
            block_size=p.select_block, topk=p.num_selected, cu_seqlens_q=cu, cu_seqlens_k=cu_cmp,
            max_seqlen_q=problem.seq_len, max_seqlen_k=blocks, sm_scale=None, init_blocks=p.num_initial,
            local_blocks=p.num_local,
        )  # fmt: skip
        o_slc = attend_selected(q[0], k[0], v[0], indices, p.select_block, cu)
        o_win, _ = window_attention(q, k, v, window=p.window)  # they use flash_attn's, which ours replaces
        return gated(gate, o_cmp[None], o_slc[None], o_win)

    return attention


def _flash_nsa(problem: Problem, device: torch.device) -> Attention:
    """Scalable-Flash-Native-Sparse-Attention: everything in its own kernels, window and gates included."""
    module = _module("flash_nsa", device)
    p = problem.pattern
    _need(problem.batch_size == 1, "this adapter hands over one sequence")
    config = module.NSAConfig(
        head_dim=problem.head_dim, num_heads=problem.heads, num_kv_heads=problem.groups, kernel_size=p.compress_block,
        stride=p.compress_stride, block_size=p.select_block, top_n=p.num_selected, num_init_blocks=p.num_initial,
        num_local_blocks=p.num_local, window_size=p.window, cmp_k_method="mean", cmp_v_method="mean",
    )  # fmt: skip
    core = module.HFNSACore(config).to(device, problem.dtype)
    cu = torch.tensor([0, problem.seq_len], dtype=torch.int32, device=device)

    def attention(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return core(q[0], k[0], v[0], gate[0], cu)[None]

    return attention


def _module(name: str, device: torch.device) -> Any:
    try:
        module = importlib.import_module(name)
    # A package built for another torch or Triton fails to import in many ways.
    except Exception as error:
        raise NotAvailable(f"cannot import {name}: {_first_line(error)}") from error
    _need_cuda(device)
    return module


def _function(module: str, name: str, device: torch.device) -> Any:
    function = getattr(_module(module, device), name, None)
    _need(function is not None, f"{module} has no {name}")
    return function


def _need(holds: bool, rule: str) -> None:
    if not holds:
        raise NotAvailable(rule)


def _need_cuda(device: torch.device) -> None:
    _need(device.type == "cuda", "runs on CUDA only")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


OURS = "ours, operators"
COMPILED = "ours, compiled"
FLASH = "SDPA flash"
CUDNN = "SDPA cuDNN"
CONTENDERS = (
    Contender(OURS, "nsa", _operators),
    Contender(COMPILED, "nsa", _compiled),
    Contender(FLASH, "dense", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    Contender(CUDNN, "dense", partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    Contender("FlexAttention", "dense", partial(_flex, False)),
    Contender("SDPA", "dense", _plain_sdpa),
    Contender("fla.ops.nsa", "nsa", _fla, public=True),
    Contender(
        "native-sparse-attention-triton",
        "nsa",
        partial(_variable_length, "native_sparse_attention.ops", "native_sparse_attention.ops.topk_sparse_attention"),
        public=True,
    ),
    Contender(
        "Flash-Sparse-Attention",
        "nsa",
        partial(_variable_length, "nsa_ref.ops", "fsa.ops.FSA_topk_sparse_attention.FSA_topk_sparse_attention"),
        public=True,
    ),
    Contender("Scalable-Flash-NSA", "nsa", _flash_nsa, public=True),
)
# The window branch alone: what is faster should compute it.
WINDOW, FLEX_WINDOW = "window, ours", "window, FlexAttention"
WINDOW_CONTENDERS = (Contender(WINDOW, "window", _window), Contender(FLEX_WINDOW, "window", partial(_flex, True)))
