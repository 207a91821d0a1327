"""The properties that a compiled NSA model has, each a function of an example that raises `Broken` or measures.

The judge is float64: the eager loop where paths are compared with each other, the oracle, which shares no code with the
package, where operators are judged. In lower precision a result may be as far from it as twice what the eager loop is
in that precision, and a band for the rounding of reordered sums. There the choice of blocks would hang on rounding, in
the loop as well, so every block is selected, or the example has a margin.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nsa_compile
from nsa_compile import ops
from nsa_compile.branches import BRANCHES
from nsa_compile.config import RunConfig
from nsa_compile.models import NSATransformer, SparsePattern, nsa_attention
from nsa_compile.models.nsa import block_weights
from nsa_compile.passes import ORDER
from nsa_compile.verification import oracle

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}
# What reordered sums may cost, as a fraction of a result's size.
BANDS = {"float64": 1e-9, "float32": 64 * 2**-23, "bf16": 2 * 2**-7}
# Tokens where the model is compiled without each of the passes, the one that removes the loop included.
SHORT = 40


class Broken(Exception):
    """A property does not hold; the message says what and by how much."""


class Ambiguous(Exception):
    """Rounding may rightly decide which blocks are selected, so the example shows nothing."""


@dataclass
class Measured:
    """The largest error so far, as a fraction of the bound it was held against, with both."""

    error: float = 0.0
    bound: float = 0.0

    def add(self, what: str, error: float, bound: float) -> None:
        """Take note of an error; `Broken` is raised where it is above its bound, or not a number."""
        if not error <= bound:
            raise Broken(f"{what}: error {error:.2g}, bound {bound:.2g}")
        if self.bound == 0 or error * self.bound > self.error * bound:
            self.error, self.bound = error, bound


@dataclass(frozen=True)
class Setting:
    """Where and in which precision an example is run; `dtype` is a key of `DTYPES`."""

    device: torch.device
    dtype: str


Property = Callable[[RunConfig, Setting], Measured]


# ------------------------------------------------------------------------------------------------------- properties


def paths(example: RunConfig, setting: Setting) -> Measured:
    """The loop over tokens, the compiled model and decoding step by step agree, in values and gradients."""
    measured = Measured()
    model, tokens = _model(example, setting), _tokens(example, setting)
    exact = _results(model, model, tokens)
    bounds = _exact_bounds(exact)
    others = {
        "compiled, against the loop": _results(model, _compiled(model, example, nested=_quick(example)), tokens),
        "decoding step by step, against the loop": _results(model, lambda x: _decode(model, x), tokens),
    }
    for name, actual in others.items():
        _hold(measured, f"{name} (float64)", model, actual, exact, bounds)
    step = nsa_compile.compile_decode_step(model, nested="eager", cache=False, disable=example.compile.disable)
    with torch.no_grad():
        decoded = _decode(model, tokens[:, :-1], step)
    _hold(measured, "the compiled decode step (float64)", model, [decoded], exact[:1], bounds[:1])

    if setting.dtype != "float64":
        blocks = -(-example.train.seq_len // example.model.pattern.select_block)
        pattern = example.model.pattern
        everything = dataclasses.replace(pattern, num_selected=max(pattern.num_selected, blocks))
        example = example.model_copy(update={"model": dataclasses.replace(example.model, pattern=everything)})
        judge = _model(example, setting)
        exact = _results(judge, judge, tokens)
        low = _model(example, setting).float()
        eager, actual = (_results(low, run, tokens, setting.dtype) for run in (low, _compiled(low, example)))
        bounds = _low_bounds(exact, eager, setting.dtype)
        _hold(measured, f"compiled, against float64 ({setting.dtype})", low, actual, exact, bounds)
    return measured


def future(example: RunConfig, setting: Setting) -> Measured:
    """Other tokens after a position change no logit and no selection before it, to the last bit."""
    measured = Measured()
    before = _tokens(example, setting)
    length = before.shape[1] - 1
    cut = 1 + example.run.seed % max(1, length - 1)
    after = torch.cat([before[:, :cut], (before[:, cut:] + 1) % example.model.vocab_size], 1)
    model = _model(example, setting)
    model = model if setting.dtype == "float64" else model.float()
    for name, run in (("the loop", model), ("the compiled model", _compiled(model, example))):
        with torch.no_grad(), _autocast(setting, setting.dtype):
            a, b = (run(x[:, :-1]) for x in (before, after))
        _unchanged(measured, f"logits of {name} before token {cut}", a[:, :cut], b[:, :cut])
        if cut < length and torch.equal(a[:, cut:], b[:, cut:]):
            raise Broken(f"logits of {name} do not depend on the tokens at all")

    q, _, _, *rest = _attention_tensors(example, setting, DTYPES[setting.dtype])
    k, v = (oracle_keys(x, example.model.pattern).to(q) for x in rest[:2])
    blocks = torch.arange(k.shape[1], device=q.device)
    pattern = example.model.pattern
    later = (blocks * pattern.compress_stride + pattern.compress_block - 1 >= cut)[:, None, None]
    a, b = (_select(q, x, v, pattern) for x in (k, torch.where(later, -20 * k, k)))
    _unchanged(measured, f"selection before token {cut}", a[:, :cut], b[:, :cut])
    return measured


def gradients(example: RunConfig, setting: Setting) -> Measured:
    """Every parameter of the compiled model gets a finite gradient that is not zero."""
    model = _model(example, setting)
    model = model if setting.dtype == "float64" else model.float()
    run = _compiled(model, example, nested=_quick(example))
    _, *grads = _results(model, run, _tokens(example, setting), setting.dtype)
    for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
        if not grad.isfinite().all():
            raise Broken(f"the gradient of {name} is not finite")
        if not grad.any():
            raise Broken(f"{name} gets no gradient")
    return Measured()


def replay(example: RunConfig, setting: Setting) -> Measured:
    """What trains, prefill and decoding select what the loop selects, and replay any selection as it does (float64)."""
    measured = Measured()
    if "selected" not in example.model.branches:
        return measured
    model, tokens = _model(example, setting), _tokens(example, setting)
    read = tokens[:, :-1]
    run: Any = _compiled(model, example, nested=_quick(example))
    options = {"nested": "eager", "cache": False, "disable": example.compile.disable}
    step = nsa_compile.compile_decode_step(model, **options)
    prefill = nsa_compile.compile_prefill(model, **options)
    lengths = torch.full((len(read),), read.shape[1], device=setting.device)

    def prefilled(selection: Tensor | None = None) -> list[Tensor]:
        asked = {"return_selection": True} if selection is None else {"selection": selection}
        return list(prefill(read, lengths, read.shape[1], every=True, **asked)[1:])

    with torch.no_grad():
        _, selection = model(read, return_selection=True)
        recorded = {
            "the compiled model": run(read, return_selection=True)[1],
            "prefill": prefilled()[1],
            "the decode step": _decode(model, read, step, recorded=True),
        }
    for name, found in recorded.items():
        differing = int((found.sort(-1).values != selection.sort(-1).values).any(-1).sum())
        if differing:
            raise Broken(f"{name} selects other blocks than the loop in {differing} of {found[..., 0].numel()} choices")

    # Blocks that no token would choose: those of another token, later ones among them, some twice.
    other = selection.flip(1).clamp(min=0)
    exact = _results(model, lambda x: model(x, other), tokens)
    bounds = _exact_bounds(exact)
    replaying = _results(model, lambda x: run(x, other), tokens)
    _hold(measured, "a replay in the compiled model", model, replaying, exact, bounds)
    with torch.no_grad():
        replayed = {"prefill": prefilled(other)[0], "the decode step": _decode(model, read, step, replayed=other)}
    for name, logits in replayed.items():
        _hold(measured, f"a replay in {name}", model, [logits], exact[:1], bounds[:1])
    return measured


def passes(example: RunConfig, setting: Setting) -> Measured:
    """The compiled model computes the same with all passes and without each of them (float64)."""
    measured = Measured()
    shorter = min(example.train.seq_len, SHORT)
    example = example.changed(train={"seq_len": shorter})
    model, tokens = _model(example, setting), _tokens(example, setting)
    exact = _results(model, model, tokens)
    bounds = _exact_bounds(exact)
    off = tuple(example.compile.disable)
    on = [name for name in ORDER if name not in off]
    wrong: dict[str | None, Broken] = {}
    with _quiet():  # a loop that stays one says so each time
        for name in (None, *on):
            run = _compiled(model, example, nested="eager", disable=off if name is None else (*off, name))
            try:
                _hold(measured, "", model, _results(model, run, tokens), exact, bounds)
            except Broken as error:
                wrong[name] = error
    if None in wrong:
        right = [name for name in on if name not in wrong]
        blame = f"right without {' or '.join(right)}" if right else "wrong without any one of them, too"
        raise Broken(f"wrong with all passes, {blame}{wrong[None]}")
    for name, broken in wrong.items():
        raise Broken(f"wrong without {name}{broken}")
    return measured


def operators(example: RunConfig, setting: Setting) -> Measured:
    """The operators of the three branches equal the oracle, which has explicit masks in float64."""
    pattern, dtype = example.model.pattern, DTYPES[setting.dtype]
    tensors = _attention_tensors(example, setting, dtype)
    q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = tensors
    sizes: dict[str, Any] = {
        "l": pattern.compress_block, "d": pattern.compress_stride, "l_sel": pattern.select_block,
        "n": pattern.num_selected, "num_initial": pattern.num_initial, "num_local": pattern.num_local,
        "index_convention": pattern.index_convention,
        # The operator is handed keys in its precision; the oracle sees the same.
        "phi_k": lambda block: block.mean(-2).to(dtype).double(),
    }  # fmt: skip
    on_cpu = [x.cpu() for x in tensors]
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    if oracle.selection_margin(on_cpu[0], on_cpu[1], **sizes) <= 64 * eps * q.shape[2]:
        raise Ambiguous
    branches, chosen = oracle.nsa_branches_oracle(*on_cpu, **sizes, phi_v=sizes["phi_k"], w=pattern.window)

    def compressed() -> Tensor:
        k, v = (oracle_keys(x, pattern).to(dtype) for x in (k_cmp, v_cmp))
        return ops.compressed_attention(
            q, k, v, block_size=pattern.compress_block, stride=pattern.compress_stride
        )[0]  # fmt: skip

    indices = chosen.to(setting.device)
    runs: dict[str, Callable[[], Tensor]] = {
        "compressed": compressed,
        "selected": lambda: ops.selected_attention(q, k_slc, v_slc, indices, block_size=pattern.select_block)[0],
        "window": lambda: ops.window_attention(q, k_win, v_win, window=pattern.window)[0],
    }
    measured = Measured()
    for place, (name, run) in enumerate(runs.items()):
        exact = _values_and_gradients(branches[place], on_cpu)
        gates = torch.zeros(*q.shape[:3], 3, dtype=dtype, device=q.device)
        gates[..., place] = 1
        loop = nsa_attention(q, k_cmp, v_cmp, k_slc, v_slc, k_win, v_win, gates, pattern=pattern)
        eager = _values_and_gradients(loop, tensors)
        actual = _values_and_gradients(run(), tensors)
        bounds = _low_bounds(exact, eager, setting.dtype)
        for label, a, x, bound in zip(("values", *_INPUTS), actual, exact, bounds, strict=True):
            what = f"{name} attention, {'values' if label == 'values' else f'gradient of {label}'} ({setting.dtype})"
            measured.add(what, _rms(a - x), bound)
    keys, values = (oracle_keys(x, pattern).to(dtype) for x in (k_cmp, v_cmp))
    selection = _select(q, keys, values, pattern).sort(-1).values
    differing = int((selection.cpu() != chosen.sort(-1).values).any(-1).sum())
    if differing:
        raise Broken(f"the selection differs from the oracle's for {differing} of {chosen[..., 0].numel()} queries")
    return measured


PROPERTIES: dict[str, Property] = {
    "paths": paths,
    "future": future,
    "gradients": gradients,
    "replay": replay,
    "passes": passes,
    "operators": operators,
}


# ---------------------------------------------------------------------------------------------------------- helpers

_INPUTS = ("q", "k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win")


def oracle_keys(x: Tensor, pattern: SparsePattern) -> Tensor:
    """Keys or values `[B, S, G, D]` to the means of the compressed blocks `[B, N, G, D]`, in float64."""
    windows = x.double().unfold(1, pattern.compress_block, pattern.compress_stride)
    return windows.mean(-1)


def _select(q: Tensor, k: Tensor, v: Tensor, pattern: SparsePattern) -> Tensor:
    """The blocks `[B, S, G, n]` that the operator selects for compressed keys."""
    weights = block_weights(pattern)
    return ops.compressed_attention(
        q, k, v, block_size=pattern.compress_block, stride=pattern.compress_stride, select_block=pattern.select_block,
        offsets=list(weights), weights=list(weights.values()), num_selected=pattern.num_selected,
        num_initial=pattern.num_initial, num_local=pattern.num_local,
    )[2]  # fmt: skip


def _model(example: RunConfig, setting: Setting) -> NSATransformer:
    """A model in float64 whose weights are so large that attention is far from a mean."""
    torch.manual_seed(example.run.seed)
    model = NSATransformer(example.model).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(parameter.shape[-1] ** -0.5 / parameter.std())
    return model.to(setting.device)


def _tokens(example: RunConfig, setting: Setting) -> Tensor:
    """`[B, S + 1]`."""
    rng = torch.Generator().manual_seed(example.run.seed)
    shape = (example.train.batch_size, example.train.seq_len + 1)
    return torch.randint(example.model.vocab_size, shape, generator=rng).to(setting.device)


def _attention_tensors(example: RunConfig, setting: Setting, dtype: torch.dtype) -> list[Tensor]:
    """q, then keys and values of the three branches: leaves."""
    model, rng = example.model, torch.Generator().manual_seed(example.run.seed)
    start = (example.train.batch_size, example.train.seq_len)
    shapes = [(model.n_heads, model.head_dim)]
    for _ in BRANCHES:
        shapes += [(model.n_kv_heads, model.head_dim), (model.n_kv_heads, model.value_dim)]
    drawn = (torch.randn(*start, *shape, generator=rng, dtype=torch.float64) for shape in shapes)
    return [x.to(setting.device, dtype).requires_grad_() for x in drawn]


def _compiled(model: NSATransformer, example: RunConfig, **changes: Any) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    compiling = example.compile
    chosen: dict[str, Any] = {"nested": compiling.nested, "disable": tuple(compiling.disable), "attention": "sparse"}
    return nsa_compile.compile(model, cache=False, **(chosen | changes))


def _quick(example: RunConfig) -> str:
    """What compiles a graph whose like another property hands to Inductor, which takes many times as long."""
    return "aot_eager" if example.compile.nested == "inductor" else example.compile.nested


def _decode(
    model: NSATransformer,
    tokens: Tensor,
    step: Callable[..., Any] | None = None,
    *,
    recorded: bool = False,
    replayed: Tensor | None = None,
) -> Tensor:
    """The logits of each token, one decode step after the other, or its selection where that is `recorded`."""
    state = model.init_state(tokens.shape[0], tokens.shape[1])
    rows = []
    asked: dict[str, Any] = {"return_selection": True} if recorded else {}
    for t in range(tokens.shape[1]):
        if replayed is not None:
            asked["selection"] = replayed[:, t]
        state, *outputs = (step or model.decode_step)(state, tokens[:, t], **asked)
        rows.append(outputs[-1].clone())
    return torch.stack(rows, 1)


def _autocast(setting: Setting, dtype: str) -> torch.autocast:
    return torch.autocast(setting.device.type, torch.bfloat16, enabled=dtype == "bf16")


def _results(
    model: NSATransformer, run: Callable[[Tensor], Tensor], tokens: Tensor, dtype: str = "float64"
) -> list[Tensor]:
    """Logits, then the gradient of each parameter."""
    with _autocast(Setting(tokens.device, dtype), dtype):
        logits = run(tokens[:, :-1])
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)).mT, tokens[:, 1:])
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    missing = (torch.zeros_like(p) if g is None else g for p, g in zip(model.parameters(), grads, strict=True))
    return [logits.detach(), *missing]


def _values_and_gradients(out: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradient of each leaf under a fixed cotangent, as float64 on the CPU."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(out.shape, generator=rng, dtype=torch.float64).to(out.device, out.dtype)
    grads = torch.autograd.grad(out, leaves, weight, allow_unused=True)
    missing = (torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))
    return [x.detach().double().cpu() for x in (out, *missing)]


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _sizes(results: Sequence[Tensor]) -> list[float]:
    return [_rms(x) for x in results]


def _exact_bounds(exact: Sequence[Tensor]) -> list[float]:
    """How far results in float64 may be from each other: the band of each, and a thousandth of that of the largest."""
    size, band = _sizes(exact), BANDS["float64"]
    return [band * x + 1e-3 * band * max(size) for x in size]


def _low_bounds(exact: Sequence[Tensor], eager: Sequence[Tensor], dtype: str) -> list[float]:
    """How far a result may be from float64: twice as far as the eager loop is, the band, and some roundings of the
    largest result, of whose size are the terms that cancel in a small gradient."""
    size, band, eps = _sizes(exact), BANDS[dtype], torch.finfo(DTYPES[dtype]).eps
    return [2 * _rms(e - x) + band * s + 8 * eps * max(size) for e, x, s in zip(eager, exact, size, strict=True)]


def _hold(
    measured: Measured,
    name: str,
    model: NSATransformer,
    actual: Sequence[Tensor],
    exact: Sequence[Tensor],
    bounds: Sequence[float],
) -> None:
    labels = ["logits", *(f"gradient of {parameter}" for parameter, _ in model.named_parameters())]
    for label, a, x, bound in zip(labels, actual, exact, bounds, strict=False):
        measured.add(f"{name}, {label}", _rms(a - x), bound)


def _unchanged(measured: Measured, what: str, a: Tensor, b: Tensor) -> None:
    if not torch.equal(a, b):
        raise Broken(f"{what} change by up to {float((a.double() - b.double()).abs().max()):.2g}")
    measured.add(what, 0.0, 0.0)


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("nsa_compile")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
