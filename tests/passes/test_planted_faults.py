"""Faults planted in the rules on floors and on rows of zeros, in programs of scores and in sets of keys that share a
softmax: by each a program comes out wrong that equals its loop without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_compile import scan
from nsa_compile.analyses import batched_body, scores
from nsa_compile.analyses.batched_body import apply_at_steps
from nsa_compile.analyses.facts import CLEAN, Facts
from nsa_compile.analyses.scores import Mass
from nsa_compile.analyses.staleness import Analysis
from nsa_compile.ir.aten import aten
from nsa_compile.ops.scored.program import Instruction, Program
from nsa_compile.passes import raise_attention
from tests.analyses.test_staleness_programs import PROGRAMS, check
from tests.analyses.test_staleness_programs import Program as ProofProgram
from tests.passes.test_found_programs import INF, attention, attention_over_two_sets, equal_gradients, rows


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def inputs(*tensors: Tensor) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


def judged(name: str, **changes: Any) -> Callable[[], None]:
    """One of the programs written against the proof; only its numbers count."""
    return lambda: check(replace(PROGRAMS[name], dropped=None, **changes))


def one_set(mask: Callable[..., Tensor], S: int, width: int) -> Callable[[], None]:
    return lambda: equal_gradients(attention(mask), *inputs(*rows(3, S, width)))


def causal(s: Tensor, t: Tensor, P: Tensor) -> Tensor:
    return s.masked_fill(t < P, -INF)


def two_sets() -> None:
    equal_gradients(attention_over_two_sets(causal), *inputs(*rows(3, 9, 6), *rows(2, 4, 6)))


def beside_tensors(score: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Callable[[], None]:
    """Attention over a cache by `score(s, t, P, *tensors)`, which may put a column before the scores."""

    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        P = torch.arange(len(q))

        def step(caches: Any, row: Any) -> Any:
            t, q, k, v = row
            K, V = (torch.where((t == P)[:, None], x, c) for x, c in zip((k, v), caches, strict=True))
            weights = score(K @ q, t, P, *tensors).softmax(-1)
            return (K, V), weights[-len(P) :] @ V

        return scan(step, (torch.zeros_like(k), torch.zeros_like(v)), (P, q, k, v))[1]

    return lambda: equal_gradients(run, *inputs(*rows(3, 9, 6), *(rows(*shape) for shape in shapes)))


def summed(q: Tensor, k: Tensor, v: Tensor, t: Tensor, x: Any, w: Any) -> Tensor:
    """Weights that meet values one by one, and something else, too; the first steps have none."""
    P, none = torch.arange(len(k)), (q[0] == q[0]) & (t < 3)
    return (k @ q).masked_fill((t < P) | none, -INF).softmax(-1)[:, None].mul(v).mul(q).sum(0)


def of_sums() -> None:
    check(ProofProgram(summed, dropped=None))


def no_score_kept(q: Tensor, k: Tensor, v: Tensor, t: Tensor, x: Any, w: Any) -> Tensor:
    s, P = k @ q, torch.arange(len(k))
    return (s + torch.where((t < P) | (t % 2 == 1), torch.finfo(s.dtype).min, torch.zeros_like(s))).softmax(-1) @ v


def of_floors() -> None:
    check(ProofProgram(no_score_kept, dropped=None))


a_sink = beside_tensors(lambda s, t, P, sink: torch.cat([sink, causal(s, t, P)]), (1,))
a_bias = beside_tensors(lambda s, t, P, bias: causal(s + bias - 0.25 * (t - P), t, P), (9,))


# -- the faults, each made of what it takes the place of


def settled_by_the_lowest_number(original: Any) -> Any:
    return lambda self, node: self.raw(node.args[0]).fill


def one_step_late(original: Any) -> Any:
    return lambda first, node, steps: original(torch.where(first > 0, first + 1, first), node, steps)


def one_step_early(original: Any) -> Any:
    return lambda first, node, steps: original(first - 1, node, steps)


def not_masked_behind(original: Any) -> Any:
    return lambda node, operands, *others: apply_at_steps(node, operands)


def forgotten(original: Any) -> Any:
    return property(lambda self: replace(self, absorbed=None))


def rows_that_are_no_zeros(original: Any) -> Any:
    def hide(self: Analysis, node: Any, operands: Any, facts: Any, rows: Any) -> Any:
        facts = tuple(f if f.ready is None else replace(f, blank=f.ready) for f in facts)
        return original(self, node, operands, facts, rows)

    return hide


def others_are_never_stale(original: Any) -> Any:
    def hide(self: Analysis, node: Any, operands: Any, facts: Any, rows: Any) -> Any:
        return original(self, node, operands, tuple(CLEAN if f.blank is None else f for f in facts), rows)

    return hide


def turned_around(original: Any) -> Any:
    def instruction(name: str, operands: Any) -> Instruction:
        return original(name, operands[::-1] if name == "sub.Tensor" else operands)

    return instruction


def of_the_next_key(original: Any) -> Any:
    return lambda elements: original(elements).roll(1, -1)


def never(original: Any) -> Any:
    return lambda *_: False


def a_tile_off(original: Any) -> Any:
    return lambda mask, steps, keys, size: original(mask, steps, keys, size).roll(1, 0)


def no_mass(original: Any) -> Any:
    def build_logits(keys: Any, rows: int, build: Any) -> Mass:
        mass = original(keys, rows, build)
        return replace(mass, largest=build(aten.sub.Tensor, mass.largest, 1e6))

    return build_logits


def twice(original: Any) -> Any:
    def build_shares(masses: list[Mass], build: Any) -> Any:
        first, *others = masses
        return original([replace(first, total=build(aten.mul.Tensor, first.total, 2)), *others], build)

    return build_shares


def without_gradient(original: Any) -> Any:
    def build_shares(masses: list[Mass], build: Any) -> Any:
        return original([replace(mass, lse=build(aten.detach.default, mass.lse)) for mass in masses], build)

    return build_shares


def values_of_the_next_key(original: Any) -> Any:
    return lambda read, n, build: build(aten.roll.default, original(read, n, build), [1], [1])


FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any], Callable[[], None]]] = {
    # what is broken: the object, its attribute, what makes another one of it, and the program that shows it
    "a floor that is a number is settled": (
        Analysis, "_settles", settled_by_the_lowest_number, judged("documents that leave nothing")),
    "a row is settled a step late": (batched_body, "_from", one_step_late, of_sums),
    "a settled row weighs something": (batched_body, "_settled", not_masked_behind, of_sums),
    "a hidden row is read a step early": (batched_body, "_from", one_step_early, judged("scores given")),
    "a hidden row is read a step late": (batched_body, "_from", one_step_late, judged("scores given")),
    "rows of others are hidden": (Analysis, "_hide", rows_that_are_no_zeros, judged("scores given", init=0.25)),
    "what meets rows of zeros is never stale": (
        Analysis, "_hide", others_are_never_stale, judged("every row, beside the sum of all")),
    "a floor forgets what it absorbed": (Facts, "counted", forgotten, of_floors),
    "a difference is turned around": (scores, "Instruction", turned_around, a_bias),
    "a bias of the next key": (scores, "_reduced", of_the_next_key, a_bias),
    "a bias has no gradient": (Program, "passes_on", never, a_bias),
    "scores are compared with themselves": (
        scores.Follower, "_meets_itself", never,
        one_set(lambda s, t, P: s.masked_fill((s != causal(s, t, P).amax()) | (t < P), -INF), 130, 16)),
    "tiles off by one": (batched_body, "used_tiles", a_tile_off, one_set(lambda s, t, P: causal(s * s, t, P), 130, 6)),
    "a sink is not in the denominator": (raise_attention, "build_logits", no_mass, a_sink),
    "a set of keys counts twice": (raise_attention, "build_shares", twice, two_sets),
    "a sum of weights has no gradient": (raise_attention, "build_shares", without_gradient, two_sets),
    "a set of keys is off by one": (raise_attention, "values_of", values_of_the_next_key, two_sets),
}  # fmt: skip


@pytest.mark.deep(but=["a hidden row is read a step late"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault, monkeypatch):
    owner, name, broken, program = FAULTS[fault]
    program()
    torch._dynamo.reset()
    monkeypatch.setattr(owner, name, broken(getattr(owner, name)))
    with pytest.raises(AssertionError):
        program()
