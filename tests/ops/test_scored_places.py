"""Keys ranked by scores of a program: every kernel against loops over the queries, written without programs.

All numbers are small integers, so that every sum is exact, equal scores are many, and the places are those alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nsa_compile import ops
from nsa_compile.ops.scored import scored_places
from tests.depth import takes_every_case
from tests.ops.problems import kernels
from tests.strategies import few

# The text of a program, and the same of one query, head and all keys: `f(products, leaves, s, t)`.
FORMS: dict[str, tuple[int, str, Any]] = {
    "weighed relu": (1, "v0 = relu.default(s0)\nv1 = mul.Tensor(v0, x0)", lambda s, w, d: s[0].clamp(min=0) * w),
    "with a bias": (1, "v0 = mul.Scalar(s0, 2.0)\nv1 = add.Tensor(v0, x3)", lambda s, w, d: 2 * s[0] + d),
    "two products": (2, "v0 = mul.Tensor(s0, x0)\nv1 = sub.Tensor(v0, s1)", lambda s, w, d: s[0] * w - s[1]),
    "the larger one": (
        2,
        "v0 = maximum.default(s0, s1)\nv1 = abs.default(v0)",
        lambda s, w, d: torch.maximum(*s).abs(),
    ),
}
MASKS: dict[str, tuple[str, Any]] = {
    "causal": ("v2 = gt.Tensor(x1, x2)\nv3 = masked_fill.Scalar(v1, v2, -inf)\nreturn v3", lambda t, s: t <= s),
    "the future": ("v2 = gt.Tensor(x1, x2)\nv3 = where.ScalarOther(v2, v1, -inf)\nreturn v3", lambda t, s: t > s),
    "none": ("return v1", lambda t, s: t == t),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """Sizes; the form of the scores and their mask; how far queries lie behind the first key; how many are wanted."""

    N: int
    S: int
    m: int
    T: int
    D: int
    form: str
    mask: str
    behind: int
    count: int
    dtype: torch.dtype
    seed: int

    @property
    def text(self) -> str:
        return f"{FORMS[self.form][1]}\n{MASKS[self.mask][0]}"

    def given(self) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Queries, keys, and leaves: a weight of each query and head, positions of keys and queries, a bias."""
        generator = torch.Generator().manual_seed(self.seed)

        def whole(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator).to(self.dtype)

        products = FORMS[self.form][0]
        q = [whole(self.N, self.S, self.m, self.D) for _ in range(products)]
        k = [whole(self.N, self.T, self.D) for _ in range(products)]
        positions = torch.arange(self.T).view(1, 1, 1, -1), (torch.arange(self.S) + self.behind).view(1, -1, 1, 1)
        return q, k, [whole(self.N, self.S, self.m, 1), *positions, whole(1, 1, self.m, self.T)]

    def loops(self) -> Tensor:
        """The first places of each query: largest score first, and of equal scores the first key."""
        q, k, (w, _, _, bias) = self.given()
        form, seen = FORMS[self.form][2], MASKS[self.mask][1]
        found = []
        for n, s in ((n, s) for n in range(self.N) for s in range(self.S)):
            total = torch.zeros(self.T, dtype=self.dtype)
            for h in range(self.m):
                products = [(b[n] * a[n, s, h]).sum(-1) for a, b in zip(q, k, strict=True)]
                score = form(products, w[n, s, h, 0], bias[0, 0, h])
                total += torch.where(seen(torch.arange(self.T), s + self.behind), score, -torch.inf)
            ranks = sorted(range(self.T), key=lambda t: (-total[t].item(), t))
            found.append(ranks[: self.count])
        return torch.tensor(found).view(self.N, self.S, self.count)

    def tiles(self) -> Tensor:
        """Those of which the mask shows something."""
        seen = MASKS[self.mask][1](torch.arange(self.T), torch.arange(self.S)[:, None] + self.behind)
        padded = torch.zeros(-(-self.S // 64) * 64, -(-self.T // 64) * 64, dtype=torch.bool)
        padded[: self.S, : self.T] = seen
        return padded.unflatten(1, (-1, 64)).unflatten(0, (-1, 64)).any(3).any(1).to(torch.uint8)


# A kernel is compiled for each: five in which every form, mask and dtype is, or all.
PROGRAMS = list(itertools.product(FORMS, MASKS, (torch.float32, torch.float64)))[:: 1 if takes_every_case() else 5]


@st.composite
def problems(draw: Any) -> Problem:
    keys = draw(st.integers(1, 200))
    form, mask, dtype = draw(st.sampled_from(PROGRAMS))
    return Problem(
        N=draw(st.integers(1, 2)),
        S=draw(st.integers(1, 70)),
        m=draw(st.integers(1, 5)),
        T=keys,
        D=draw(st.integers(1, 20)),
        form=form,
        mask=mask,
        behind=draw(st.integers(-3, keys)),
        count=draw(st.integers(1, keys)),
        dtype=dtype,
        seed=draw(st.integers(0, 99)),
    )


ORDINARY = Problem(2, 70, 3, 150, 8, "weighed relu", "causal", 40, 20, torch.float32, 0)


@pytest.mark.deep(but=["portable"])
@pytest.mark.parametrize("kernel", kernels("scored"))
@few(20)
@given(problem=problems(), tiled=st.booleans())
def test_equals_the_loops(kernel, problem, tiled):
    with ops.force_implementation(kernel.name):
        found = scored_places(*problem.given(), problem.text, problem.tiles() if tiled else None, problem.count)
    assert torch.equal(found, problem.loops())


@pytest.mark.parametrize("kernel", kernels("scored"))
def test_nan_comes_first(kernel):
    q, k, leaves = ORDINARY.given()
    k[0][:, [7, 30]] = torch.nan
    with ops.force_implementation(kernel.name):
        found = scored_places(q, k, leaves, ORDINARY.text, None, ORDINARY.count)
    assert (found[..., :2] == torch.tensor([7, 30])).all()


def test_tiles_that_nobody_sees_are_not_read():
    q, k, leaves = ORDINARY.given()
    tiles = torch.tensor([[1, 0, 1], [1, 0, 1]], dtype=torch.uint8)
    k[0][:, 64:128] = torch.nan
    with ops.force_implementation("cpu"):
        found = scored_places(q, k, leaves, ORDINARY.text, tiles, ORDINARY.count)
    assert not ((found >= 64) & (found < 128)).any()


@pytest.mark.parametrize("kernel", kernels("scored"))
def test_registration(kernel):
    with ops.force_implementation(kernel.name):
        torch.library.opcheck(scored_places, (*ORDINARY.given(), ORDINARY.text, None, 3))


def test_bits_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    q, k, leaves = ([torch.randn_like(x) if x.is_floating_point() else x for x in xs] for xs in ORDINARY.given())
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with ops.force_implementation("cpu"):
                results.append(scored_places(q, k, leaves, ORDINARY.text, None, 20))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("count", [0, 151])
def test_a_count_that_cannot_be_is_told_in_one_line(count):
    with pytest.raises(ValueError, match=f"^count is {count}; it must be 1 to 150, the number of keys$"):
        scored_places(*ORDINARY.given(), ORDINARY.text, None, count)


def test_work_is_counted():
    with FlopCounterMode(display=False) as counted:
        scored_places(*ORDINARY.given(), ORDINARY.text, None, 3)
    assert counted.get_total_flops() == 2 * 2 * 70 * 3 * 150 * 8


def test_integers_that_are_too_large_for_vectors(caplog):
    q, k, (w, t, s, bias) = ORDINARY.given()
    far = 2**40
    with ops.force_implementation("cpu"):
        found = scored_places(q, k, [w, t + far, s + far, bias], ORDINARY.text, None, 20)
    assert torch.equal(found, ORDINARY.loops())
    assert "the integers of its scores may be too large" in caplog.text
