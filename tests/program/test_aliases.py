"""A final carry that is a tensor of the caller's is that tensor again, and a view of it a view."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile import scan


def loop(x, k, w):
    def step(c, row):
        new = {
            "kept": c["kept"],
            "last": row,
            "one before": c["last"],
            "part": row.view(1, 2)[:, :1],
            "closed over": w,
            "turned": w.t(),
            "copied": row.clone(),
            "computed": c["computed"] * 0.5 + row,
            "swapped": c["with"],
            "with": c["swapped"],
        }
        return new, c["last"] * 2 + c["computed"]

    init = {
        "kept": k,
        "part": x.new_zeros(1, 1),
        "closed over": w * 0,
        "turned": w.t() * 0,
        "swapped": k,
        "with": k * 2,
    }
    init |= {name: x.new_zeros(2) for name in ("last", "one before", "copied", "computed")}
    return scan(step, init, x)


def in_a_region(x, k, w):
    return checkpoint(loop, x, k, w, use_reentrant=False)


def in_a_region_of_a_region(x, k, w):
    return checkpoint(in_a_region, x, k, w, use_reentrant=False)


def written_to(loop):
    def run(x, k, w):
        final, y = loop(x, k, w)
        final["one before"].mul_(3)  # which is a row of x
        final["swapped"].add_(1)
        return final, y

    return run


def observed(function, steps):
    generator = torch.Generator().manual_seed(0)
    given = {
        name: torch.randn(size, generator=generator)
        for name, size in {"x": (steps, 2), "k": (2, 3), "w": (2, 3)}.items()
    }
    final, y = function(**given)
    shared = {
        name: [n for n, x in given.items() if x.untyped_storage()._cdata == value.untyped_storage()._cdata]
        for name, value in final.items()
    }
    return final, y, given, shared


@pytest.mark.deep(but=["True-in_a_region_of_a_region-eager-4"])
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
@pytest.mark.parametrize("where", [loop, in_a_region, in_a_region_of_a_region])
@pytest.mark.parametrize("write", [False, True])
def test_final_carries_share_the_memory_that_the_loop_leaves_them(write, where, nested, steps):
    torch._dynamo.reset()
    run = written_to(where) if write else where
    fast = torch.compile(run, backend="nsa_compile", fullgraph=True, options={"nested": nested, "cache": False})
    *values, shared = observed(fast, steps)
    *wanted, shared_by_the_loop = observed(run, steps)
    torch.testing.assert_close(values, wanted)
    assert shared == shared_by_the_loop
    assert shared["kept"] == ["k"]
    assert shared["one before"] == shared["part"] == ["x"]
    assert shared["turned"] == ["w"]
    assert shared["swapped"] == (["k"] if steps % 2 == 0 else [])
    assert shared["copied"] == shared["computed"] == []


@pytest.mark.deep(but=["aot_eager-True"])
@pytest.mark.parametrize("recurrence", [True, False])
@pytest.mark.parametrize("nested", ["eager", "aot_eager"])
def test_final_carries_share_memory_with_each_other_as_the_loop_leaves_them(nested, recurrence):
    """A write to one of them reaches the others."""

    def run(x):
        def step(c, row):
            new = row * 2 + (c["whole"] * 0.5 if recurrence else 0)
            return {"first": new[:2][:1], "part": new[:2], "whole": new, "again": new, "copy": new.clone()}, row

        whole = x.new_zeros(3)
        init = {"first": whole[:1], "part": whole[:2], "whole": whole, "again": whole, "copy": whole}
        final, y = scan(step, init, x)
        final["part"].fill_(7)
        return final, y

    torch._dynamo.reset()
    fast = torch.compile(run, backend="nsa_compile", fullgraph=True, options={"nested": nested, "cache": False})
    x = torch.arange(12.0).view(4, 3)
    (wanted, _), (final, _) = run(x), fast(x)
    torch.testing.assert_close(final, wanted)
    memory = {name: value.untyped_storage()._cdata for name, value in final.items()}
    assert len({memory[name] for name in ("first", "part", "whole", "again")}) == 1
    assert memory["copy"] != memory["whole"]


def test_carries_that_a_vmap_makes_are_no_views_of_each_other():
    """What lies within it has no memory to compare."""

    def run(x):
        def step(c, row):
            return (torch.vmap(lambda y: y * 2)(row), c[0] + row), c[1]

        return scan(step, (x[0], x[0] * 2), x)

    x = torch.randn(3, 4)
    torch.testing.assert_close(nsa_compile.compile(run, nested="eager", cache=False)(x), run(x))
