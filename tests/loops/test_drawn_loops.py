"""Loops drawn at random in the style in which people write them, and near misses: values, gradients and variables are
those of the loop as written, or it is declined."""

from __future__ import annotations

import itertools
import linecache

import torch
from hypothesis import given
from hypothesis import strategies as st

import nsa_compile
from nsa_compile.loops import LoopDeclined
from nsa_compile.passes.pipeline import ScanNotBatched
from tests.strategies import few

D = 3
NUMBERS = itertools.count()
HEAD = """
def drawn(x, z):
    keys, other, total, count, out = x[:0], z[:1], x.new_zeros(3), 0, []
    cache, seen, last = {"k": None}, [z[0] * 2], None
    def attend(q, k):
        return torch.softmax(k @ q, 0) @ k
"""
LOOPS = [
    "    for t in range(x.shape[0]):\n        q, y = x[t], x[t] * 0.5\n",
    "    for t, q in enumerate(x):\n        y = q * 0.5\n",
    "    for t, (q, y) in enumerate(zip(x.unbind(), (x * 0.5).split(1))):\n        y = y[0]\n",
]
TAIL = """
        out.append(y)
    return torch.stack(out), keys, other, total, count, cache["k"], t, len(seen), *seen
"""
CONDITIONS = [
    "len(seen) > 2",
    "t > 0",
    "t % 2 == 0",
    "(t + 1) % 3 == 0",
    "t >= 4",
    "keys.shape[0] > 2",
    "count > 3",
    "t == 2",
]
ROWS = [
    "x[: t + 1]", "keys", "other", "x[max(0, t - 2) : t + 1]", "keys[-3:]", "other[:2]", "x[1 : t + 1]", "x[:t]",
    "x[t:]", "keys[1:]", "torch.cat([other[:1], keys])", "torch.cat([keys[:1], keys[-2:]])", "x[: t + 2]",
    "z[: t // 2]", "torch.stack(seen)", "torch.stack(seen[-2:])", "torch.stack([*seen, q])", "torch.stack(seen + [q])",
    "x[: (t + 1) // 2 * 2].view(-1, 2, 3).mean(1)", "x[: t + 1 : 2]", "keys[1::2]", "x[t % 2 : t + 1 : 2]",
    "F.avg_pool1d(torch.cat([z[:2], keys]).T[None], 2, 1)[0].T",
    "F.max_pool1d(torch.cat([z[:3], x[:t]]).T[None], 3)[0].T",
]  # fmt: skip
READS = [
    "attend(q, {})", "{}.sum(0)", "({} * q).sum(0)", "{}.mean(0)", "({} @ q).sigmoid() @ {}", "{}[-1]", "{}[0]",
    "{}.amax(0)", "torch.logsumexp({}, 0)", "{}.cumsum(0).sum(0)", "({} @ q).topk(1).values * q",
    "q / (1 + {}.square().sum(0))", "{}.norm(dim=0)", "({} @ q).exp() @ {}", "q * {}.shape[0]", "({} - q).abs().sum(0)",
    "{}.std(0, correction=0)", "{}.var(0)", "{}.cumprod(0).sum(0)", "sum(torch.aminmax({}, dim=0))",
    "F.cosine_similarity({}, q, dim=-1) @ {}",
]  # fmt: skip
STATEMENTS = [
    "keys = torch.cat([keys, q[None]])", "other = torch.cat([other, (q * 2)[None]])", "keys = keys[-3:]",
    "other = torch.cat([other, z[t][None], q[None]])", "total = total * 0.9 + y", "total = torch.maximum(total, q)",
    "count += 1", "count = count + t", "y = y + total", "y = y * count", "keys, other = other, keys",
    "cache['k'] = q[None] if cache['k'] is None else torch.cat([cache['k'], q[None]])", "other = other.clone()",
    "y = y / (t + 1)", "continue", "total[0] = q[0]", "out.append(q)", "keys = keys[:2]", "y = y + z[t // 2]",
]  # fmt: skip
MISSES = ["if q.sum() > 0: y = -y", "y = y * q.sum().item()", "y = y + x[t + 1]", "y = y + out[-1] if out else y",
          "seen[-1].mul_(2)", "total.add_(q.detach())", "y = y + sum(seen)", "seen.append(q[:2])",
          "if last is not None: last.mul_(2)"]  # fmt: skip


@st.composite
def loops(draw):
    def read():
        rows = draw(st.sampled_from(ROWS))
        return "y = y + " + draw(st.sampled_from(READS)).replace("{}", f"({rows})")

    lines = draw(st.sampled_from([[], ["keys = torch.cat([keys, q[None]])"], ["seen.append(q * 2)"]]))[:]
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.integers(0, 9))
        lines.append(
            read() if kind < 5 else draw(st.sampled_from(MISSES)) if kind == 9 else draw(st.sampled_from(STATEMENTS))
        )
        if kind < 9 and draw(st.integers(0, 2)) == 0:
            lines[-1] = f"if {draw(st.sampled_from(CONDITIONS))}: {lines[-1]}"
    return HEAD + draw(st.sampled_from(LOOPS)) + "".join(f"        {line}\n" for line in lines) + TAIL


def made(source):
    name = f"<drawn {next(NUMBERS)}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    scope = {"torch": torch, "F": torch.nn.functional}
    exec(compile(source, name, "exec"), scope)
    return scope["drawn"]


def outcome(function, seed, length):
    torch.manual_seed(seed)
    x, z = (torch.randn(length, D, dtype=torch.float64, requires_grad=True) for _ in range(2))
    results = function(x, z)
    loss = sum((r * torch.randn_like(r)).sum() for r in results if isinstance(r, torch.Tensor))
    return [*results, *torch.autograd.grad(loss, (x, z), allow_unused=True)]


@few(24)
@given(loops(), st.integers(2, 9))
def test_a_drawn_loop_is_as_it_is_written(source, length):
    function = made(source)
    try:
        expected = [outcome(function, seed, length) for seed in (0, 1)]
    except Exception:
        expected = None
    for options in ({"on_decline": "error"}, {}):
        compiled = nsa_compile.loop(function, nested="eager", cache=False, **options)
        try:
            found = [outcome(compiled, seed, length) for seed in (0, 1)]
        except (LoopDeclined, ScanNotBatched):
            assert options
            continue
        except Exception:
            assert expected is None, "the loop as written ends"
            continue
        if expected is None:
            raise AssertionError("the loop as written ends in an error")
        for ours, theirs in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
            if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
                torch.testing.assert_close(ours, theirs, equal_nan=True)
            elif isinstance(theirs, torch.Tensor) or isinstance(ours, torch.Tensor):
                raise AssertionError("only one of them has a gradient")
            else:
                assert ours == theirs
        return
