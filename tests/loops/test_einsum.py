"""`torch.einsum` in a loop: the same product at every size, and one way for all steps."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from nsa_compile import loop
from nsa_compile.loops.einsum import einsum
from nsa_compile.loops.paths import Explorer

S, D = 7, 3


@st.composite
def equations(draw):
    """An equation of two operands, with the shapes that it is for."""
    letters = draw(st.permutations("abcdeX"))
    sizes = {name: draw(st.integers(1, 3)) for name in letters}
    around = draw(st.lists(st.integers(1, 3), max_size=2))
    parts, shapes = [], []
    for _ in range(2):
        names = draw(st.lists(st.sampled_from(letters), max_size=4, unique=True))
        at = draw(st.integers(0, len(names)) | st.none())
        shape = [draw(st.sampled_from([1, sizes[n]])) for n in names]
        if at is None:
            parts.append("".join(names))
        else:
            own = [draw(st.sampled_from([1, n])) for n in around[draw(st.integers(0, len(around))) :]]
            parts.append("".join(names[:at]) + "..." + "".join(names[at:]))
            shape[at:at] = own
        shapes.append(shape)
    equation = ",".join(parts)
    if draw(st.booleans()):
        used = sorted({*parts[0], *parts[1]} - {"."})
        kept = draw(st.lists(st.sampled_from(used), unique=True)) if used else []
        at = draw(st.integers(0, len(kept)))
        # torch wants the ellipsis of an operand in what it yields
        equation += "->" + "".join(kept[:at]) + ("..." if "..." in equation else "") + "".join(kept[at:])
    spaced = draw(st.booleans())
    return " ".join(equation).replace(". . .", "...").replace("- >", "->") if spaced else equation, shapes


@given(equations(), st.integers(0, 99), st.booleans())
def test_it_is_what_torch_computes(drawn, seed, listed):
    equation, shapes = drawn
    torch.manual_seed(seed)
    x, y = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    expected = torch.einsum(equation, x, y)
    found = einsum(equation, [x, y]) if listed else einsum(equation, x, y)
    if found is NotImplemented:  # a size of 1 at one of two places, where it is not the other's
        return
    torch.testing.assert_close(found, expected)
    loss = torch.randn_like(expected)
    for ours, theirs in zip(
        *(torch.autograd.grad((out * loss).sum(), (x, y), allow_unused=True) for out in (found, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("equation", ["ab,bc,cd->ad", "aab,bc->ac", "ab->ba"])
def test_other_forms_are_left_to_torch(equation):
    operands = [torch.ones(2, *[2] * (len(part) - 1)) for part in equation.split("->")[0].split(",")]
    assert einsum(equation, *operands) is NotImplemented


def test_an_equation_that_does_not_fit_is_torchs_to_refuse():
    assert einsum("abc,bc->a", torch.ones(2, 2), torch.ones(2, 2)) is NotImplemented


def attention(scores: str, read: str, *, wide: bool):
    def run(x: Tensor) -> Tensor:
        keys, ys = x.new_zeros(2, 0, D), []
        for t in range(x.shape[1]):
            keys = torch.cat([keys, x[:, t : t + 1]], 1)
            query = x[:, t : t + 1] if wide else x[:, t]
            weights = torch.einsum(scores, query, keys).softmax(-1)
            ys.append(torch.einsum(read, weights, keys))
        return torch.stack(ys)

    return run


@pytest.mark.deep
@pytest.mark.parametrize(
    ("scores", "read", "wide"),
    [
        ("bd,bsd->bs", "bs,bsd->bd", False),
        ("...d,...sd->...s", "...s, ...sd -> ...d", False),
        ("bid,bjd->bij", "bij,bjd->bid", True),
        ("bid,bjd->bij", "bij,bjd", True),  # the labels that stand once: [D, I]
        ("b...d,bjd->b...j", "b...j,bjd->bd...", True),
    ],
)
def test_rows_that_grow_from_one_take_one_way(monkeypatch, scores, read, wide):
    explored, explore = [], Explorer.explore
    monkeypatch.setattr(Explorer, "explore", lambda self: explored.append(explore(self)) or explored[-1])
    run = attention(scores, read, wide=wide)
    x = torch.randn(2, S, D, dtype=torch.float64, requires_grad=True)
    expected = run(x)
    found = loop(run, nested="eager", on_decline="error", cache=False)(x)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected))
    torch.testing.assert_close(*gradients)
    (exploration,) = explored
    assert len(exploration.ways) <= 2  # the first step, and all others
