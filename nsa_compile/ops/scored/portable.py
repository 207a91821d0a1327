"""Attention to scores of a program in plain torch: tiles of queries against the keys that they may see.

Memory is linear in S; time follows the first and the last key that a tile of queries may see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.ops.scored.program import Program, parse
from nsa_compile.ops.tiles import compute_dtype, of_distances

__all__ = ["backward", "forward", "places"]

TILE = 64


def forward(
    q: Sequence[Tensor], k: Sequence[Tensor], v: Tensor, leaves: Sequence[Tensor], program: str, tiles: Tensor | None,
    *, softmax: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = compute_dtype(v)
    n, s, m, _ = q[0].shape
    out = v.new_zeros(n, s, m, v.shape[2])
    if not softmax:
        for queries, keys in _spans(tiles, s, v.shape[1]):
            weights = _scores(parse(program), q, k, leaves, queries, keys, dtype)
            out[:, queries] = torch.einsum("nsmt,ntd->nsmd", weights, v[:, keys].to(dtype)).to(v.dtype)
        return (out,)
    lse, total = (v.new_full((n, s, m), x, dtype=dtype) for x in (-torch.inf, 0.0))
    for queries, keys in _spans(tiles, s, v.shape[1]):
        scores = _scores(parse(program), q, k, leaves, queries, keys, dtype)
        largest = scores.amax(-1)
        weights = _exp(scores, largest)
        total[:, queries] = weights.sum(-1)
        lse[:, queries] = largest + total[:, queries].log()
        weights /= total[:, queries].masked_fill(largest == -torch.inf, 1.0).unsqueeze(-1)
        out[:, queries] = torch.einsum("nsmt,ntd->nsmd", weights, v[:, keys].to(dtype)).to(v.dtype)
    return out, lse, total


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    v: Tensor,
    leaves: Sequence[Tensor],
    out: Tensor | None,
    lse: Tensor | None,
    program: str,
    derivatives: str,
    tiles: Tensor | None,
    wanted: Sequence[int],
) -> list[Tensor]:
    dtype = compute_dtype(v)
    gradient = parse(derivatives)
    of_q, of_k, of_v, of_leaves = (
        [x.new_zeros(x.shape, dtype=dtype) for x in xs] for xs in (q, k, [v], [leaves[i] for i in wanted])
    )
    for queries, keys in _spans(tiles, q[0].shape[1], v.shape[1]):
        weights = _scores(parse(program), q, k, leaves, queries, keys, dtype)
        grad = grad_out[:, queries].to(dtype)
        g = torch.einsum("nsmd,ntd->nsmt", grad, v[:, keys].to(dtype))
        if lse is not None and out is not None:
            weights = _exp(weights, lse[:, queries])
            moved = (grad * out[:, queries].to(dtype)).sum(-1)
            moved = moved if grad_lse is None else moved - grad_lse[:, queries]
            g = weights * (g - moved.unsqueeze(-1))
        of_v[0][:, keys] += torch.einsum("nsmt,nsmd->ntd", weights, grad)
        given = _given(q, k, leaves, queries, keys, dtype)
        found = gradient.evaluate({**given, "g": g}, dtype)
        found = [torch.as_tensor(x, dtype=dtype, device=v.device).expand(g.shape) for x in found]
        for i, of_score in enumerate(found[: len(q)]):
            of_q[i][:, queries] = torch.einsum("nsmt,ntd->nsmd", of_score, k[i][:, keys].to(dtype))
            of_k[i][:, keys] += torch.einsum("nsmt,nsmd->ntd", of_score, q[i][:, queries].to(dtype))
        for of_leaf, of_score in zip(of_leaves, found[len(q) :], strict=True):
            _add(of_leaf, of_score, queries, keys, (q[0].shape[1], v.shape[1]))
    given_to = [*q, *k, v, *(leaves[i] for i in wanted)]
    return [x.to(y.dtype) for x, y in zip([*of_q, *of_k, *of_v, *of_leaves], given_to, strict=True)]


def places(
    q: Sequence[Tensor], k: Sequence[Tensor], leaves: Sequence[Tensor], program: str, tiles: Tensor | None, count: int
) -> Tensor:
    (n, s, _, _), keys = q[0].shape, k[0].shape[1]
    found = torch.arange(count, device=k[0].device).repeat(n, s, 1)  # where all scores are -inf
    for queries, seen in _spans(tiles, s, keys):
        scores = _scores(parse(program), q, k, leaves, queries, seen, compute_dtype(k[0])).sum(2)
        scores = F.pad(scores, (seen.start, keys - seen.stop), value=-torch.inf)
        found[:, queries] = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return found


def _spans(tiles: Tensor | None, queries: int, keys: int) -> Iterator[tuple[slice, slice]]:
    """Tiles of queries, and the keys from the first to the last that they may see."""
    if tiles is None:
        tiles = torch.ones(-(-queries // TILE), -(-keys // TILE), device="cpu")
    for row, flags in enumerate(tiles.tolist()):
        used = [column for column, flag in enumerate(flags) if flag]
        if used:
            first, last = used[0], used[-1] + 1
            yield slice(row * TILE, min(queries, (row + 1) * TILE)), slice(first * TILE, min(keys, last * TILE))


def _part(leaf: Tensor, queries: slice, keys: slice, sizes: tuple[int, int]) -> Tensor:
    """What a leaf is for some of S queries and T keys, a view of `[N|1, S|1, m|1, T|1]` or of distances."""
    if leaf.shape[3] not in (1, sizes[1]):
        return leaf[..., keys.start - queries.stop + sizes[0] : keys.stop - queries.start + sizes[0] - 1]
    leaf = leaf if leaf.shape[1] == 1 else leaf[:, queries]
    return leaf if leaf.shape[3] == 1 else leaf[..., keys]


def _add(of_leaf: Tensor, of_score: Tensor, queries: slice, keys: slice, sizes: tuple[int, int]) -> None:
    """Add to the gradient of a leaf what the gradients of scores `[N, C, m, K]` make of it."""
    part = _part(of_leaf, queries, keys, sizes)
    if of_leaf.shape[3] not in (1, sizes[1]):
        n, c, m, k = part.shape[0], of_score.shape[1], part.shape[2], of_score.shape[3]
        rows = of_score.sum_to_size(n, c, m, k).transpose(1, 2).flip(2)
        part += torch.ops.aten.unfold_backward(rows, [n, m, c + k - 1], 2, k, 1).unsqueeze(1)
    else:
        part += of_score.sum_to_size(part.shape)


def _given(
    q: Sequence[Tensor], k: Sequence[Tensor], leaves: Sequence[Tensor], queries: slice, keys: slice, dtype: torch.dtype
) -> dict[str, Tensor]:
    sizes = q[0].shape[1], k[0].shape[1]
    given = {}
    for i, leaf in enumerate(leaves):
        part = _part(leaf, queries, keys, sizes)
        given[f"x{i}"] = part if leaf.shape[3] in (1, sizes[1]) else of_distances(part, keys.stop - keys.start)
    for i, (a, b) in enumerate(zip(q, k, strict=True)):
        given[f"s{i}"] = torch.einsum("nsmd,ntd->nsmt", a[:, queries].to(dtype), b[:, keys].to(dtype))
    return given


def _scores(
    program: Program,
    q: Sequence[Tensor],
    k: Sequence[Tensor],
    leaves: Sequence[Tensor],
    queries: slice,
    keys: slice,
    dtype: torch.dtype,
) -> Tensor:
    """`[N, C, m, K]`."""
    given = _given(q, k, leaves, queries, keys, dtype)
    (scores,) = program.evaluate(given, dtype)
    return torch.as_tensor(scores, dtype=dtype, device=q[0].device).expand(given["s0"].shape)


def _exp(scores: Tensor, largest: Tensor) -> Tensor:
    """exp of scores less the largest; zeros where these are all -inf."""
    return (scores - largest.masked_fill(largest == -torch.inf, 0.0).unsqueeze(-1)).exp()
