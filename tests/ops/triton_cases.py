"""What the tests of the kernels for CUDA, which are written in Triton, run in a process of their own.

    TRITON_INTERPRET=1 python tests/ops/triton_cases.py cpu [deep]   # the cases of every kernel, interpreted
    python tests/ops/triton_cases.py cuda [deep]       # the same on a GPU
    python tests/ops/triton_cases.py compile [deep]    # compiled for GPUs that need not exist

Triton reads TRITON_INTERPRET when it is imported, so a process has either the interpreter or the compiler. Exit
status 0 is success, SKIPPED means that Triton cannot compile here.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nsa_compile.ops.dense import masked_attention
from nsa_compile.ops.dispatch import KERNELS, Kernel

SKIPPED = 77
ROOT = Path(__file__).parents[2]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ON_CUDA = [kernel for kernels in KERNELS.values() for kernel in kernels.values() if kernel.device == "cuda"]
on_cuda = pytest.mark.parametrize(
    "kernel", [pytest.param(kernel, id=f"{kernel.operator}-{kernel.name}") for kernel in ON_CUDA]
)


def run(mode: str, config: pytest.Config) -> None:
    """This file as a script; fails with what it printed."""
    deep = config.getoption("--hypothesis-profile") == "deep"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    if mode == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, __file__, mode, *["deep"] * deep]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode == SKIPPED:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr


@dataclass(frozen=True)
class Case:
    B: int = 1
    S: int = 21
    T: int = 21  # keys, or compressed blocks
    G: int = 1
    h: int = 2
    D: int = 16
    Dv: int = 16
    dtype: torch.dtype = FP32
    contents: str = "normal"  # "equal keys", "zero queries", "large"
    strided: bool = False
    far: str = ""  # the dimension, "S" or "D", along which q, k, v and the gradient reach beyond 2^31 elements
    scale: float = 0.3
    window: int = 5
    block_size: int = 4
    stride: int = 2
    select_block: int = 4
    offsets: tuple[int, ...] = (-1, 0, 1)
    weights: tuple[int, ...] = (1, 2, 1)
    n: int = 3
    num_initial: int = 1
    num_local: int = 1
    contents_of_indices: str = "any"  # "none", "distinct"
    index_dtype: torch.dtype = torch.int32
    order: tuple[str, int] | None = None  # of the loops of selected attention, and queries a tile; else the default
    part_bytes: int = 2**29  # of the partial results of block-major, a chunk of queries
    min_rows: int = 4096  # of a part of the queries that see a tile of keys
    through_lse: bool = True  # the log-sum-exp has a gradient, too
    seed: int = 0

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output; they hold nothing on the device "meta"."""
        rng = torch.Generator().manual_seed(self.seed)

        def make(*shape: int) -> Tensor:
            if device == "meta":
                return torch.empty(shape, dtype=self.dtype, device=device)
            order = (3, 1, 0, 2) if self.strided else (0, 1, 2, 3)
            x = torch.randn(*(shape[i] for i in order), generator=rng)
            if self.contents == "large":
                x = x * 10
            x = x.permute(*(order.index(i) for i in range(4))).to(self.dtype).to(device)
            return far_apart(x, "BSHD".index(self.far)) if self.far else x

        heads = self.G * self.h
        q, k = make(self.B, self.S, heads, self.D), make(self.B, self.T, self.G, self.D)
        v, grad = make(self.B, self.T, self.G, self.Dv), make(self.B, self.S, heads, self.Dv)
        if self.contents == "equal keys":  # in runs, so that some blocks tie and others do not
            k = k[:, torch.arange(self.T) // 7 * 7]
        elif self.contents == "zero queries":
            q = torch.zeros_like(q)
        if self.strided:  # as the gradient of a sum is
            grad = grad[:1, :1, :1].expand(grad.shape)
        return q, k, v, grad

    def grad_lse(self, device: str) -> Tensor | None:
        """The gradient of the log-sum-exp, if it has one."""
        if not self.through_lse:
            return None
        x = torch.randn(self.G * self.h, self.S, self.B, generator=torch.Generator().manual_seed(self.seed + 1))
        return x.permute(2, 1, 0).to(device)

    def indices(self, device: str) -> Tensor:
        """`[B, S, G, n]`: repeated, negative and out of range, and block 0 nearly everywhere."""
        rng = torch.Generator().manual_seed(self.seed)
        blocks = -(-self.T // self.block_size)
        shape = (self.B, self.S, self.G, self.n)
        if device == "meta":
            return torch.empty(shape, dtype=self.index_dtype, device=device)
        if self.contents_of_indices == "none":
            indices = torch.full(shape, -1)
        elif self.contents_of_indices == "distinct":
            indices = torch.rand(*shape[:3], max(blocks, self.n), generator=rng).argsort(-1)[..., : self.n]
        else:
            indices = torch.randint(-3, blocks + 2, shape, generator=rng)
            indices[:, 1:, :, :1] = 0
            if self.index_dtype == torch.int64:
                indices[:, ::3, :, 1:2] = 2**40
        return indices.to(self.index_dtype).to(device)

    def parameters(self, operator: str, device: str) -> tuple[Any, ...]:
        if operator == "window":
            return self.window, self.scale
        if operator == "selected":
            from nsa_compile.ops.selected.triton import Order

            order = () if self.order is None else (Order(*self.order),)
            return self.indices(device), self.block_size, self.scale, *order
        names = ("block_size", "stride", "scale", "select_block", "offsets", "weights", "n", "num_initial", "num_local")
        return tuple(getattr(self, name) for name in names)

    def visible(self, operator: str) -> Tensor:
        """Boolean, broadcasts to `[B, S, G, h, T]`."""
        s, p = torch.arange(self.S)[:, None], torch.arange(self.T)
        if operator == "window":
            mask = (p <= s) & (p > s - self.window)
        elif operator == "compressed":
            mask = p * self.stride + self.block_size - 1 <= s
        else:
            chosen = (self.indices("cpu")[..., None] == p // self.block_size).any(-2)  # [B, S, G, T]
            return (chosen & (p <= s)[:, None])[:, :, :, None]
        return mask[:, None, None]


def far_apart(x: Tensor, dim: int) -> Tensor:
    """`x` with a stride so large that its last element lies beyond 2^31; memory in between is never touched."""
    strides = list(x.stride())
    strides[dim] = (2**31 + 2**10) // (x.shape[dim] - 1)
    last = sum(stride * (size - 1) for stride, size in zip(strides, x.shape, strict=True))
    spread = torch.empty(last + 1, dtype=x.dtype, device=x.device).as_strided(x.shape, strides)
    return spread.copy_(x)


WINDOW = [
    Case(S=33, T=33, h=1, D=16, Dv=32, window=7),
    Case(B=2, S=19, T=30, G=2, h=2, D=80, Dv=24, window=1),  # rows that are their own only key
    Case(S=37, T=12, h=4, D=16, Dv=16, window=9, dtype=BF16),  # late queries see nothing
    Case(S=30, T=30, h=16, D=192, Dv=128, window=100, dtype=BF16),
    Case(S=45, T=45, G=2, h=3, D=24, Dv=16, window=20, dtype=FP16, strided=True),
    Case(S=70, T=70, h=2, D=32, Dv=32, window=33, contents="large", strided=True),
    Case(S=150, T=150, h=2, D=80, Dv=128, window=90, dtype=BF16),  # the wider tiles of dq
    Case(S=101, T=90, h=4, window=70),  # tiles whose keys every row sees, and keys that all of a tile's rows see
    Case(S=101, T=90, h=4, window=70, min_rows=100),  # parts that are not whole tiles of rows, late keys with fewer
    Case(B=2, S=40, T=37, G=2, h=3, D=80, Dv=24, window=25, dtype=BF16, min_rows=30),
    Case(S=1, T=1, h=1, window=1),
    Case(B=0),
    Case(S=0),
    Case(T=0),
]

COMPRESSED = [
    Case(S=41, T=19, h=1, D=16, Dv=32),
    Case(B=2, S=23, T=10, G=2, h=3, D=80, Dv=24, block_size=4, num_local=2, n=4),
    Case(S=33, T=9, h=4, D=16, Dv=16, dtype=BF16, block_size=8, stride=4, select_block=8, strided=True),
    Case(S=30, T=14, h=16, D=192, Dv=16, dtype=BF16, n=2),
    Case(S=71, T=35, G=2, h=2, contents="equal keys", n=5),
    Case(S=40, T=40, contents="zero queries", n=4, block_size=1, stride=1, select_block=1, offsets=(0,), weights=(1,)),
    Case(S=40, T=20, h=2, n=3, num_initial=2, num_local=3, dtype=FP16),  # more forced blocks than places
    Case(S=40, T=20, h=2, n=15, num_initial=0, num_local=0, offsets=(-1, 2), weights=(3, -1)),  # more than blocks
    Case(S=140, T=69, h=2, D=128, Dv=72, n=2, dtype=FP16),  # the wider tiles of dq
    Case(S=120, T=59, h=4, n=2),  # tiles whose keys every row sees, and keys that all of a tile's rows see
    Case(B=2, S=60, T=29, G=2, h=3, n=1, strided=True, min_rows=50),  # the queries of a tile of keys in parts
    Case(S=9, T=3, h=2, n=0),
    Case(S=9, T=0, h=2, n=2),
    Case(S=1, T=1, h=1, n=1, block_size=3),  # nothing to see, one block to select
    Case(B=0),
    Case(S=0, T=0),
]  # fmt: skip

BLOCK_MAJOR, QUERY_MAJOR = ("block", 1), ("query", 1)
SELECTED = [
    Case(S=25, T=25, h=1, D=16, Dv=32, order=BLOCK_MAJOR),
    Case(S=25, T=25, h=1, D=16, Dv=32, order=QUERY_MAJOR),
    Case(B=2, S=11, T=18, G=2, h=2, D=80, Dv=24, block_size=5, n=4, index_dtype=torch.int64, order=BLOCK_MAJOR),
    Case(B=2, S=11, T=18, G=2, h=2, D=80, Dv=24, block_size=5, n=4, index_dtype=torch.int64, order=("query", 4)),
    Case(S=21, T=12, h=4, D=16, Dv=16, block_size=8, n=2, dtype=BF16, strided=True),
    Case(S=21, T=21, h=4, block_size=8, n=2, dtype=BF16, strided=True, order=("query", 8)),
    Case(S=14, T=14, h=16, D=192, Dv=128, dtype=BF16),
    Case(S=9, T=14, h=16, D=32, Dv=16, dtype=BF16, order=BLOCK_MAJOR),
    Case(S=13, T=13, h=8, D=24, Dv=16, dtype=FP16, n=4, order=BLOCK_MAJOR),
    Case(B=2, S=13, T=13, h=8, D=24, Dv=16, dtype=FP16, n=4, strided=True, order=("query", 2)),
    Case(S=16, T=16, h=3, dtype=FP16, block_size=40, n=1),  # a block wider than the keys
    Case(S=40, T=40, h=18, block_size=20, n=2, contents="large", order=QUERY_MAJOR),  # blocks and groups of many tiles
    Case(S=40, T=40, h=3, block_size=20, n=2, contents="large", order=BLOCK_MAJOR),
    Case(B=2, S=23, T=23, G=2, h=3, n=4, order=BLOCK_MAJOR, part_bytes=16_000),  # chunks of 5 queries, the last of 3
    Case(S=90, T=90, h=1, block_size=1, n=2, contents_of_indices="distinct"),
    Case(S=75, T=75, h=1, block_size=2, n=1),  # the list of block 0 is split among programs
    Case(S=11, T=19, G=2, h=1, block_size=1, n=1, order=("query", 2)),
    Case(S=9, T=9, contents_of_indices="none", order=QUERY_MAJOR),
    Case(S=9, T=9, contents_of_indices="none", order=BLOCK_MAJOR),
    Case(B=0),
    Case(S=0),
    Case(T=0),
    Case(n=0),
]

CASES = {"window": WINDOW, "compressed": COMPRESSED, "selected": SELECTED}


def deep_cases(count: int = 40) -> Iterator[Case]:
    yield Case(dtype=BF16, far="S")
    yield Case(dtype=BF16, far="D")
    yield Case(S=150, T=74, h=1, n=70, num_local=2)  # more places than a tile has columns
    yield Case(S=70, T=34, h=40, n=10, dtype=BF16)
    rng = random.Random(0)
    for seed in range(count):
        stride = rng.choice([1, 2, 3])
        case = Case(
            B=rng.choice([1, 2]), S=rng.randint(1, 90), T=rng.randint(1, 90), G=rng.choice([1, 2]),
            h=rng.choice([1, 2, 3, 4, 7, 16]), D=rng.choice([1, 8, 16, 64, 80, 96, 128, 192]),
            Dv=rng.choice([4, 16, 48, 128]), dtype=rng.choice([FP32, FP32, BF16, FP16]),
            contents=rng.choice(["normal", "normal", "equal keys", "zero queries"]), strided=rng.random() < 0.5,
            scale=rng.choice([0.1, 0.3, -0.2]), window=rng.choice([1, 2, 5, 16, 64, 1000]),
            block_size=rng.choice([1, 3, 4, 8, 17, 64]), stride=stride, select_block=stride * rng.choice([1, 2, 4]),
            n=rng.randint(1, 9), num_initial=rng.randint(0, 2), num_local=rng.randint(0, 3),
            index_dtype=rng.choice([torch.int32, torch.int64]),
            contents_of_indices=rng.choice(["any", "distinct"]), seed=seed,
            order=rng.choice([None, BLOCK_MAJOR, QUERY_MAJOR, ("query", 2), ("query", 4)]),
            through_lse=rng.random() < 0.7, min_rows=rng.choice([1, 64, 4096]),
        )  # fmt: skip
        yield case


def dense(
    case: Case, operator: str, dtype: torch.dtype, inputs: tuple[Tensor, ...], grad_lse: Tensor | None
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Output and gradients, log-sum-exp, and weights `[B, S, G, h, T]`, all keys at once in `dtype`."""
    *leaves, grad = (x.detach().cpu().to(dtype) for x in inputs)
    for x in leaves:
        x.requires_grad_()
    out, lse, weights = masked_attention(*leaves, case.visible(operator), case.scale)
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse.cpu().to(lse.dtype)
    gradients = torch.autograd.grad((out, lse), leaves, (grad, grad_lse))
    return [out.detach(), *gradients], lse.detach(), weights.detach()


def expected_selection(case: Case, weights: Tensor) -> Tensor:
    """The specification in loops, `[B, S, G, n]`; weights are rounded, far below their differences, for exact ties."""
    p = ((weights.sum(3) * 2**28).round() / 2**28).tolist()
    rows = torch.full((case.B, case.S, case.G, case.n), -1, dtype=torch.int32)
    for b, s, g in itertools.product(range(case.B), range(case.S), range(case.G)):
        current = s // case.select_block

        def rank(block: int, p: list[float] = p[b][s][g], current: int = current) -> tuple[float, int]:
            if block < case.num_initial or block > current - case.num_local:
                return -torch.inf, block
            at = [block * (case.select_block // case.stride) + offset for offset in case.offsets]
            return -sum(w * p[j] for w, j in zip(case.weights, at, strict=True) if 0 <= j < case.T), block

        chosen = sorted(range(current + 1), key=rank)[: case.n]
        rows[b, s, g, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    return rows


def rounding_bands(case: Case, weights: Tensor, inputs: tuple[Tensor, ...], grad_lse: Tensor | None) -> list[float]:
    """What rounding may do to output, dq, dk and dv: a few units of the sums of absolute values.

    Zero gradients are differences of equal numbers, so their own size says nothing. A score of size s that is rounded
    once in float32 changes its weight by a factor of s * eps.
    """
    q, k, v, grad = (x.detach().cpu().double() for x in inputs)
    if q.numel() == 0 or k.numel() == 0:
        return [0.0] * 4
    q, grad = (x.unflatten(2, (case.G, case.h)) for x in (q, grad))
    scores = case.scale * torch.einsum("bsgid,btgd->bsgit", q, k)
    dweights = torch.einsum("bsgie,btge->bsgit", grad.abs(), v.abs())
    delta = (weights * dweights).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta += grad_lse.cpu().abs().unflatten(2, (case.G, case.h)).unsqueeze(-1)
    dscores = abs(case.scale) * weights * (dweights + delta)
    sizes = (
        torch.einsum("bsgit,btge->bsgie", weights, v.abs()),
        torch.einsum("bsgit,btgd->bsgid", dscores, k.abs()),
        torch.einsum("bsgit,bsgid->btgd", dscores, q.abs()),
        torch.einsum("bsgit,bsgie->btge", weights, grad.abs()),
    )
    largest = scores.abs().mul(weights > 0).max().item()
    units = 4 * torch.finfo(case.dtype).eps + largest * torch.finfo(torch.float32).eps
    return [units * size.max().item() for size in sizes]


def check(case: Case, kernel: Kernel, device: str, twice: bool) -> None:
    """Compare with float64: no further off than the dense computation in the same precision, and a rounding."""
    operator = kernel.operator
    inputs = case.tensors(device)
    q, k, v, grad = inputs
    parameters, grad_lse = case.parameters(operator, device), case.grad_lse(device)

    def compute() -> list[Tensor]:
        out, lse, *chosen = kernel.forward(q, k, v, *parameters)
        return [out, *kernel.backward(grad, grad_lse, q, k, v, out, lse, *parameters), lse, *chosen]

    with (
        mock.patch("nsa_compile.ops.selected.triton_block_major.MAX_PART_BYTES", case.part_bytes),
        mock.patch("nsa_compile.ops.triton_common.MIN_ROWS", case.min_rows),
    ):
        results = compute()
        if twice:
            for first, second in zip(results, compute(), strict=True):
                assert torch.equal(first, second), "two runs differ"

    exact, exact_lse, weights = dense(case, operator, torch.float64, inputs, grad_lse)
    rounded, _, _ = dense(case, operator, case.dtype, inputs, grad_lse)
    names = ("out", "dq", "dk", "dv")
    bands = rounding_bands(case, weights, inputs, grad_lse)
    for name, got, true, eager, band, like in zip(
        names, results[:4], exact, rounded, bands, (grad, q, k, v), strict=True
    ):
        assert got.dtype == case.dtype, name
        assert got.shape == like.shape, f"{name} has shape {got.shape}"
        if got.numel() == 0:
            continue
        error, allowed = ((x.cpu().double() - true).abs().max().item() for x in (got, eager))
        assert error <= allowed + band, f"{name}: error {error:.2e}, dense {allowed:.2e}, rounding {band:.2e}"

    lse = results[4].cpu()
    assert lse.dtype == torch.float32
    blind = exact_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, blind), "lse is -inf elsewhere than where nothing is seen"
    assert not results[0].cpu()[blind].any(), "a row that sees nothing has an output"
    assert not results[1].cpu()[blind].any(), "a row that sees nothing has a gradient"
    torch.testing.assert_close(lse[~blind], exact_lse[~blind].float(), rtol=2e-6, atol=2e-6)
    if operator == "compressed":
        expected = expected_selection(case, weights)
        wrong = (results[5].cpu() != expected).any(-1)
        assert results[5].dtype == torch.int32
        assert not wrong.any(), f"selected {results[5].cpu()[wrong][0]} rather than {expected[wrong][0]}"


def check_all(kernel: Kernel, device: str, deep: bool) -> int:
    """How many of the kernel's cases fail."""
    if device == "cuda":
        kernel.prepare()
    ours = kernel.name == "triton"  # another one has no loop orders, and refuses other things in other words
    cases = [*CASES[kernel.operator], *(deep_cases() if deep else ())]
    cases = [case if ours else replace(case, order=None) for case in cases if case.dtype in kernel.dtypes]
    failed = 0
    for case in cases:
        try:
            # The interpreter runs program after program: once is enough to see that it repeats itself.
            check(case, kernel, device, twice=device != "cpu" or case is cases[0])
        except Exception as error:
            failed += 1
            print(f"{kernel.operator} of {kernel.name}, {case}\n    {type(error).__name__}: {error}")
    if device == "cpu" and ours:
        check_refusals(kernel)
    return failed


def check_tiles(device: str) -> int:
    """Each block of a tile's queries stands there once, with all of them that selected it; how many tiles do not."""
    from nsa_compile.ops.selected.triton_query_major import blocks_of_tiles

    failed = 0
    for case, queries in itertools.product((Case(B=2, S=13, G=2), Case(S=9, n=1), Case(S=9, n=70)), (1, 2, 4, 8)):
        indices = replace(case, index_dtype=torch.int64).indices("cpu")
        entries, used = blocks_of_tiles(indices.to(device), case.T, case.block_size, queries)
        for b, tile, g in itertools.product(range(case.B), range(-(-case.S // queries)), range(case.G)):
            members: dict[int, int] = {}
            for i, s in enumerate(range(tile * queries, min(case.S, (tile + 1) * queries))):
                for block in {x for x in indices[b, s, g].tolist() if 0 <= x * case.block_size <= min(s, case.T - 1)}:
                    members[block] = members.get(block, 0) | 1 << i
            expected = sorted(block << queries | bits for block, bits in members.items())
            if sorted(entries[b, tile, g, : used[b, tile, g]].tolist()) != expected:
                failed += 1
                print(f"blocks of tile {tile} of {queries} queries, {case}")
    return failed


def _interpreter_is_broken() -> bool:
    """Triton before 3.7 reads a loop's bounds with `int(array)` of one element, which NumPy 2.4 refuses."""
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    return triton < (3, 7) and numpy >= (2, 4)


def check_refusals(kernel: Kernel) -> None:
    case = Case()
    parameters = case.parameters(kernel.operator, "cpu")
    q, k, v, _ = case.tensors("cpu")
    with pytest.raises(ValueError, match="float64"):
        kernel.forward(q.double(), k.double(), v.double(), *parameters)
    q, k, v, _ = replace(case, D=272).tensors("cpu")
    with pytest.raises(ValueError, match="at most 256"):
        kernel.forward(q, k, v, *parameters)
    with (
        mock.patch("torch.cuda.get_device_capability", return_value=(7, 5)),
        pytest.raises(RuntimeError, match=r"8\.0"),
    ):
        kernel.prepare()


# Compilation without a GPU. The launchers run on the CPU or on meta tensors, and a launch is recorded, not made.

ARCHITECTURES = (80, 90)
SHARED_MEMORY = 99 * 1024  # bytes a program may have on every GPU since Ampere
OWN = {"window": "nsa_compile.ops.triton_common"}  # compressed launches these beside its own

_PAPER = Case(S=8192, T=8192, G=4, h=16, D=128, Dv=128, dtype=BF16, window=512, block_size=64, n=16)
_COMPRESSED = replace(
    _PAPER, T=511, block_size=32, stride=16, select_block=64, offsets=(-1, 0, 1, 2, 3), weights=(1, 2, 2, 2, 1)
)
_PRESETS: dict[str, Any] = {"G": 2, "h": 6, "D": 64, "Dv": 64}
PAPER = {
    "window": [_PAPER, replace(_PAPER, **_PRESETS)],
    "compressed": [_COMPRESSED, replace(_COMPRESSED, **_PRESETS)],
    "selected": [
        *(replace(_PAPER, order=order, **_PRESETS) for order in (BLOCK_MAJOR, ("query", 8))),
        *(replace(_PAPER, order=order) for order in (BLOCK_MAJOR, QUERY_MAJOR, ("query", 2), ("query", 4))),
        *(replace(_PAPER, h=h) for h in (1, 3)),
    ],
}


def compile_all(kernel: Kernel, deep: bool) -> int:
    """With the sizes of paper and presets no kernel spills, on one architecture each; deep: on both, and what the other
    cases launch compiles, too. How many do not."""
    import triton

    from nsa_compile.ops.triton_report import compile_launch

    operator, failed = kernel.operator, 0
    with tempfile.TemporaryDirectory() as cache:
        triton.knobs.cache.dir = cache
        for case, arch in zip(PAPER[operator], itertools.cycle(ARCHITECTURES), strict=False):
            launches = _launches(kernel, case, "meta")
            assert launches
            for launch, compiled_for in itertools.product(launches, ARCHITECTURES if deep else (arch,)):
                report = compile_launch(operator, launch, compiled_for)
                print(report)
                failed += report.spills > 0 or report.shared > SHARED_MEMORY
        for case in CASES[operator] if deep else ():
            for launch in _launches(kernel, case, "cpu"):
                report = compile_launch(operator, launch, 80)
                if report.shared > SHARED_MEMORY:
                    failed += 1
                    print(f"{report} for {case}")
    return failed


def _launches(kernel: Kernel, case: Case, device: str) -> list[Any]:
    """The launches of forward and backward that are the operator's own, recorded."""
    from nsa_compile.ops.triton_report import recorded_launches

    q, k, v, grad = case.tensors(device)
    parameters = case.parameters(kernel.operator, device)
    with recorded_launches() as launches:
        out, lse, *_ = kernel.forward(q, k, v, *parameters)
        kernel.backward(grad, case.grad_lse(device), q, k, v, out, lse, *parameters)
    own = OWN.get(kernel.operator, f"nsa_compile.ops.{kernel.operator}.")
    return [launch for launch in launches if launch.kernel.__module__.startswith(own)]


def skipped(mode: str) -> str | None:
    """Why Triton cannot interpret or compile here; None where it can."""
    if mode == "cpu" and _interpreter_is_broken():
        return "the interpreter of Triton 3.6 fails with NumPy 2.4 or newer"
    if mode == "compile":
        from nsa_compile.errors import UserError
        from nsa_compile.ops.triton_report import check_compiler

        try:
            check_compiler()
        except UserError as error:
            return str(error)
    return None


def main(mode: str, deep: bool) -> int:
    if reason := skipped(mode):
        print(reason)
        return SKIPPED
    if mode == "compile":
        failed = [compile_all(kernel, deep) for kernel in ON_CUDA]
    else:
        failed = [check_tiles(mode), *(check_all(kernel, mode, deep) for kernel in ON_CUDA)]
    return min(1, sum(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] == ["deep"]))
