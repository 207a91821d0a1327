"""Hypothesis strategies for attention problems: shapes that divide nothing, exact ties, strides, tiny sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_compile.models import SparsePattern


def few(examples: int) -> settings:
    """So many examples in a run of every case, where other tests draw 12; in proportion in other runs, at least 3."""
    return settings(max_examples=max(3, settings().max_examples * examples // 12))


@dataclass(frozen=True)
class NSAProblem:
    """Shapes and contents of one call of NSA attention, in the paper's letters; D is the key, Dv the value width."""

    B: int
    S: int
    G: int
    h: int
    D: int
    Dv: int
    l: int  # noqa: E741  (the paper's name)
    d: int
    l_sel: int
    n: int
    w: int
    num_initial: int
    num_local: int
    index_convention: str
    phi: str
    contents: str
    strided: bool
    seed: int

    @property
    def pattern(self) -> SparsePattern:
        return SparsePattern(
            compress_block=self.l,
            compress_stride=self.d,
            select_block=self.l_sel,
            num_selected=self.n,
            window=self.w,
            num_initial=self.num_initial,
            num_local=self.num_local,
            index_convention=self.index_convention,
        )

    @property
    def selection(self) -> dict[str, Any]:
        """The arguments of the oracle that decide which blocks are selected."""
        names = ("l", "d", "l_sel", "n", "num_initial", "num_local", "index_convention")
        return {name: getattr(self, name) for name in names} | {"phi_k": self.block_phi}

    @property
    def oracle_arguments(self) -> dict[str, Any]:
        return self.selection | {"w": self.w, "phi_v": self.block_phi}

    @property
    def block_phi(self):
        """φ for blocks `[..., l, D]`, as the model and the oracle take it alike."""
        if self.phi == "mean":
            return "mean"
        l = self.l  # noqa: E741
        weight = torch.linspace(-1, 2, l, dtype=torch.float64) / l
        return lambda block: torch.tanh((block * weight.to(block.dtype)[:, None]).sum(-2))

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
        """q, then k and v of the three branches, then gates: leaves that require a gradient."""
        rng = torch.Generator().manual_seed(self.seed)

        def leaf(*shape: int, contents: str = self.contents) -> Tensor:
            order = (3, 1, 0, 2) if self.strided else (0, 1, 2, 3)
            x = torch.randn(*(shape[i] for i in order), generator=rng, dtype=torch.float64)
            if contents == "small integers":  # dot products are exact, many scores equal
                x = x.round().clamp(-1, 1)
            elif contents == "large":  # softmax saturates
                x = x * 20
            x = x.permute(*(order.index(i) for i in range(4)))
            return x.to(dtype).detach()

        q = leaf(self.B, self.S, self.G * self.h, self.D)
        keys = [leaf(self.B, self.S, self.G, self.D) for _ in range(3)]
        values = [leaf(self.B, self.S, self.G, self.Dv, contents="normal") for _ in range(3)]
        gates = leaf(self.B, self.S, self.G * self.h, 3, contents="normal").sigmoid()
        if self.contents == "zero queries":
            q = torch.zeros_like(q)
        elif self.contents == "equal keys":
            keys = [k[:, :1].expand_as(k).clone() for k in keys]
        kv = [x for pair in zip(keys, values, strict=True) for x in pair]
        return tuple(x.requires_grad_() for x in (q, *kv, gates))


@st.composite
def nsa_problems(draw, contents: tuple[str, ...] | None = None) -> NSAProblem:
    """Small problems; `contents` restricts what the tensors hold."""
    d = draw(st.sampled_from([1, 2, 3, 4]))
    ratio_l, ratio_sel = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    num_initial, num_local = draw(st.integers(0, 2)), draw(st.integers(1, 3))
    D = draw(st.sampled_from([1, 2, 4]))
    return NSAProblem(
        B=draw(st.sampled_from([1, 2])),
        S=draw(st.one_of(st.integers(1, 8), st.integers(9, 40))),
        G=draw(st.sampled_from([1, 2])),
        h=draw(st.sampled_from([1, 2, 3])),
        D=D,
        Dv=draw(st.sampled_from([D, 3])),
        l=d * ratio_l,
        d=d,
        l_sel=d * ratio_sel,
        n=num_initial + num_local + draw(st.integers(0, 3)),
        w=draw(st.sampled_from([1, 2, 5, 16, 64])),
        num_initial=num_initial,
        num_local=num_local,
        index_convention=draw(st.sampled_from(["minus", "minus", "minus", "paper_v2"])),
        phi=draw(st.sampled_from(["mean", "function"])),
        contents=draw(st.sampled_from(contents or ("normal", "small integers", "zero queries", "equal keys", "large"))),
        strided=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )
