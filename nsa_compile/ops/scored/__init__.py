"""`nsa_compile::scored_attention`: attention whose scores are a program of products, positions and tensors.

`nsa_compile::weighted_sum` is attention without a softmax: the result of the program is the weight itself.
`nsa_compile::scored_places` ranks keys by such scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from nsa_compile.ops import cpp, flops
from nsa_compile.ops.declaration import refuse_second_derivatives
from nsa_compile.ops.dispatch import Kernel, choose_kernel, register_kernel
from nsa_compile.ops.scored.program import derivative, parse
from nsa_compile.ops.tiles import compute_dtype

__all__ = ["TILE", "scored_attention", "scored_places", "weighted_sum"]

TILE = 64  # queries, and keys, of a tile

_ARGUMENTS = "Tensor[] q, Tensor[] k, Tensor v, Tensor[] leaves"


def _check(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, leaves: Sequence[Tensor], program: str, tiles: Tensor | None
) -> None:
    if not q or len(q) != len(k):
        raise ValueError(
            f"q has {len(q)} tensors and k {len(k)}; there must be one of k for each of q, and at least one"
        )
    n, s, m, _ = q[0].shape
    keys = v.shape[1]
    for i, (a, b) in enumerate(zip(q, k, strict=True)):
        if a.shape[:3] != (n, s, m) or b.shape != (n, keys, a.shape[3]):
            raise ValueError(
                f"q[{i}] is {list(a.shape)} and k[{i}] {list(b.shape)}; they must be [{n}, {s}, {m}, D] and "
                f"[{n}, {keys}, D]"
            )
    for i, x in enumerate(leaves):
        shapes = (n, s, m, keys), (n, 1, m, s + keys - 1)
        fits = [x.dim() == 4 and all(a in (1, b) for a, b in zip(x.shape, shape, strict=True)) for shape in shapes]
        if not fits[0] and not (fits[1] and x.dtype.is_floating_point):
            raise ValueError(
                f"leaves[{i}] is {x.dtype} {list(x.shape)}; it must broadcast to {list(shapes[0])} or, floating and "
                f"with an element for each distance, to {list(shapes[1])}"
            )
    rows, columns = -(-s // TILE), -(-keys // TILE)
    if tiles is not None and (tiles.shape != (rows, columns) or tiles.dtype != torch.uint8):
        raise ValueError(f"tiles is {tiles.dtype} {list(tiles.shape)}; it must be torch.uint8 [{rows}, {columns}]")
    if tiles is not None and tiles.device.type != "cpu":
        raise ValueError(f"tiles is on {tiles.device}; it must be on the CPU, which decides what is read")
    parse(program)


def _is_small(q: Sequence[Tensor], v: Tensor) -> bool:
    """Whether writing and compiling a kernel, some seconds, takes longer than hundreds of calls without one."""
    return q[0].shape[:3].numel() * v.shape[1] < 2**19


def _compute(
    q: Any, k: Any, v: Tensor, leaves: Any, program: str, tiles: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, leaves, program, tiles)
    out, lse, total = choose_kernel("scored", v, small=_is_small(q, v)).forward(q, k, v, leaves, program, tiles)
    return out, lse, total


#: Attention of queries to keys by scores of a program.
#:
#: Args:
#:     q: one or several `[N, S, m, D_i]`; k: as many `[N, T, D_i]`. Product i is `s<i>` of the program.
#:     v: `[N, T, Dv]`.
#:     leaves: `[N|1, S|1, m|1, T|1]`, floating, int64 or bool: `x<i>` of the program. A floating one that depends on
#:         how far a key lies from its query may have an element for each distance, `[N|1, 1, m|1, S + T - 1]`: query s
#:         and key t read element `t - s + S - 1`.
#:     program: see `program.py`. A score of -inf removes its key.
#:     tiles: uint8 `[ceil(S / 64), ceil(T / 64)]`; 0 where all scores of a tile are -inf, so that it need not be read.
#:         None: there are no such tiles. On the CPU, whatever the device of the others: nobody waits for them.
#:
#: Returns:
#:     The output `[N, S, m, Dv]`, zeros where all keys are removed, and the log-sum-exp of the scores `[N, S, m]`, both
#:     with gradients; and the sum of exp of scores less the largest, `[N, S, m]`, without one. Where all scores are as
#:     low as masks make them, the log-sum-exp alone does not tell how many there are.
scored_attention = torch.library.custom_op(
    "nsa_compile::scored_attention",
    _compute,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, str program, Tensor? tiles) -> (Tensor out, Tensor lse, Tensor total)",
)


def _compute_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Any,
    k: Any,
    v: Tensor,
    leaves: Any,
    out: Tensor,
    lse: Tensor,
    total: Tensor,
    *rest: Any,
) -> list[Tensor]:
    # Kernels take exp(score - lse) for weights. Among scores as low as masks make them, lse loses log(total), so that
    # these are 1 instead of 1 / total; of other scores this is 1.
    share = ((lse - (lse - total.log())).exp() / total).masked_fill(total == 0, 1.0)
    grad_out = grad_out * share.unsqueeze(-1).to(grad_out.dtype)
    grad_lse = None if grad_lse is None else grad_lse * share
    kernel = choose_kernel("scored", v, small=_is_small(q, v))
    return kernel.code.backward(grad_out, grad_lse, q, k, v, leaves, out, lse, *rest)


scored_attention_backward = torch.library.custom_op(
    "nsa_compile::scored_attention_backward",
    _compute_backward,
    mutates_args=(),
    schema=f"(Tensor grad_out, Tensor? grad_lse, {_ARGUMENTS}, Tensor out, Tensor lse, Tensor total, str program,"
    " str derivatives, Tensor? tiles, int[] wanted) -> Tensor[]",
)


@scored_attention.register_fake
def _(q: Any, k: Any, v: Tensor, leaves: Any, program: str, tiles: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    _check(q, k, v, leaves, program, tiles)
    shape, dtype = q[0].shape[:3], compute_dtype(v)
    return v.new_empty(*shape, v.shape[2]), v.new_empty(shape, dtype=dtype), v.new_empty(shape, dtype=dtype)


@scored_attention_backward.register_fake
def _(
    grad_out: Tensor, grad_lse: Any, q: Any, k: Any, v: Tensor, leaves: Any, out: Any, lse: Any, total: Any,
    program: str, derivatives: str, tiles: Tensor | None, wanted: Sequence[int],
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (*q, *k, v, *(leaves[i] for i in wanted))]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, leaves, ctx.program, tiles = inputs
    _note(ctx, q, leaves)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(*q, *k, v, *leaves, *output, tiles)


def _note(ctx: Any, q: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """How many products and leaves there are, and which leaves want a gradient."""
    ctx.counts = len(q), len(leaves)
    passes_on = parse(ctx.program).passes_on
    ctx.wanted = [i for i, x in enumerate(leaves) if x.requires_grad and passes_on(f"x{i}")]


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Any) -> tuple:
    q, k, v, leaves, (out, lse, total, tiles) = _saved(ctx)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    derivatives = _derivatives(ctx, leaves)
    found = scored_attention_backward(
        grad_out, grad_lse, q, k, v, leaves, out, lse, total, ctx.program, derivatives, tiles, ctx.wanted
    )
    return _by_input(ctx, found)


def _saved(ctx: Any) -> tuple[list[Tensor], list[Tensor], Tensor, list[Tensor], list[Tensor]]:
    products, count = ctx.counts
    saved = iter(ctx.saved_tensors)
    q, k = ([next(saved) for _ in range(products)] for _ in range(2))
    return q, k, next(saved), [next(saved) for _ in range(count)], list(saved)


def _derivatives(ctx: Any, leaves: Sequence[Tensor]) -> str:
    """The program of the derivatives that are asked for: by each product, and by the leaves that are wanted."""
    integers, booleans = ([f"x{i}" for i, x in enumerate(leaves) if is_kind(x)] for is_kind in (_is_integer, _is_bool))
    names = (*(f"s{i}" for i in range(ctx.counts[0])), *(f"x{i}" for i in ctx.wanted))
    return derivative(ctx.program, names, tuple(integers), tuple(booleans))


def _by_input(ctx: Any, found: list[Tensor]) -> tuple:
    """Gradients in the order of the operator's inputs."""
    products, count = ctx.counts
    of_leaves: list[Tensor | None] = [None] * count
    for i, gradient in zip(ctx.wanted, found[2 * products + 1 :], strict=True):
        of_leaves[i] = gradient
    return found[:products], found[products : 2 * products], found[2 * products], of_leaves, None, None


def _is_integer(x: Tensor) -> bool:
    return not x.dtype.is_floating_point and x.dtype != torch.bool


def _is_bool(x: Tensor) -> bool:
    return x.dtype == torch.bool


scored_attention.register_autograd(_differentiate, setup_context=_save)
refuse_second_derivatives(scored_attention_backward, "compiled attention")


# -- without a softmax


def _compute_sum(q: Any, k: Any, v: Tensor, leaves: Any, program: str, tiles: Tensor | None) -> Tensor:
    _check(q, k, v, leaves, program, tiles)
    kernel = choose_kernel("scored", v, small=_is_small(q, v))
    out: Tensor = kernel.forward(q, k, v, leaves, program, tiles, softmax=False)[0]
    return out


#: Sums of values by weights of a program: `out[s] = Σ_t weight[s, t] v[t]`, `[N, S, m, Dv]`, with gradients.
#:
#: Args: those of `scored_attention`, but that the program's result is a weight, and that tiles are 0 where all weights
#: of a tile are 0.
weighted_sum = torch.library.custom_op(
    "nsa_compile::weighted_sum",
    _compute_sum,
    mutates_args=(),
    schema=f"({_ARGUMENTS}, str program, Tensor? tiles) -> Tensor",
)


def _compute_sum_backward(grad_out: Tensor, q: Any, k: Any, v: Tensor, leaves: Any, *rest: Any) -> list[Tensor]:
    kernel = choose_kernel("scored", v, small=_is_small(q, v))
    return kernel.code.backward(grad_out, None, q, k, v, leaves, None, None, *rest)


weighted_sum_backward = torch.library.custom_op(
    "nsa_compile::weighted_sum_backward",
    _compute_sum_backward,
    mutates_args=(),
    schema=f"(Tensor grad_out, {_ARGUMENTS}, str program, str derivatives, Tensor? tiles, int[] wanted) -> Tensor[]",
)


@weighted_sum.register_fake
def _(q: Any, k: Any, v: Tensor, leaves: Any, program: str, tiles: Tensor | None) -> Tensor:
    _check(q, k, v, leaves, program, tiles)
    return v.new_empty(*q[0].shape[:3], v.shape[2])


@weighted_sum_backward.register_fake
def _(grad_out: Tensor, q: Any, k: Any, v: Tensor, leaves: Any, *rest: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*q, *k, v, *(leaves[i] for i in rest[-1]))]


def _save_sum(ctx: Any, inputs: tuple, output: Tensor) -> None:
    q, k, v, leaves, ctx.program, tiles = inputs
    _note(ctx, q, leaves)
    ctx.save_for_backward(*q, *k, v, *leaves, tiles)


def _differentiate_sum(ctx: Any, grad_out: Tensor) -> tuple:
    q, k, v, leaves, (tiles,) = _saved(ctx)
    derivatives = _derivatives(ctx, leaves)
    return _by_input(ctx, weighted_sum_backward(grad_out, q, k, v, leaves, ctx.program, derivatives, tiles, ctx.wanted))


weighted_sum.register_autograd(_differentiate_sum, setup_context=_save_sum)
refuse_second_derivatives(weighted_sum_backward, "a compiled sum of values")


# -- the keys with the largest scores


def _find_places(q: Any, k: Any, leaves: Any, program: str, tiles: Tensor | None, count: int) -> Tensor:
    _check(q, k, k[0], leaves, program, tiles)
    if not 0 < count <= k[0].shape[1]:
        raise ValueError(f"count is {count}; it must be 1 to {k[0].shape[1]}, the number of keys")
    kernel = choose_kernel("scored", k[0], small=_is_small(q, k[0]))
    places: Tensor = kernel.code.places(q, k, leaves, program, tiles, count)
    return places


#: The places of the keys with the largest scores of a program, summed over the heads of a query, without a gradient.
#:
#: Args:
#:     q, k, leaves, program, tiles: those of `scored_attention`.
#:     count: how many places of each query.
#:
#: Returns:
#:     int64 `[N, S, count]`: the first indices of a stable, descending sort, NaN before all.
scored_places = torch.library.custom_op(
    "nsa_compile::scored_places",
    _find_places,
    mutates_args=(),
    schema="(Tensor[] q, Tensor[] k, Tensor[] leaves, str program, Tensor? tiles, int count) -> Tensor",
)


@scored_places.register_fake
def _(q: Any, k: Any, leaves: Any, program: str, tiles: Tensor | None, count: int) -> Tensor:
    _check(q, k, k[0], leaves, program, tiles)
    return q[0].new_empty(*q[0].shape[:2], count, dtype=torch.int64)


@register_flop_formula(torch.ops.nsa_compile.scored_places)
def _flops_of_places(q: Any, k: Any, *rest: Any, out_shape: Any = None) -> int:
    return sum(2 * math.prod(a) * b[1] for a, b in zip(q, k, strict=True))


@register_flop_formula([torch.ops.nsa_compile.scored_attention, torch.ops.nsa_compile.weighted_sum])
def _flops(q: Any, k: Any, v: Any, leaves: Any, *rest: Any, out_shape: Any = None) -> int:
    return sum(flops.attention_flops(a, v, a[1] * v[1]) for a in q)


@register_flop_formula(torch.ops.nsa_compile.scored_attention_backward)
def _backward_flops(grad_out: Any, grad_lse: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None) -> int:
    return sum(flops.attention_backward_flops(a, v, a[1] * v[1]) for a in q)


@register_flop_formula(torch.ops.nsa_compile.weighted_sum_backward)
def _backward_flops_of_sum(grad_out: Any, q: Any, k: Any, v: Any, *rest: Any, out_shape: Any = None) -> int:
    return _backward_flops(grad_out, None, q, k, v)


cpp.register_kernels("scored", generated=True)
register_kernel(Kernel("scored", "portable", "portable torch", partial(import_module, f"{__name__}.portable")))
