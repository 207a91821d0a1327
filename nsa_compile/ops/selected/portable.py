"""Attention over selected blocks in plain torch, block by block instead of query by query.

Gathering the blocks of every query would copy each key hundreds of times. Here the pairs (query, block) of a chunk of
queries are sorted by block and cut into tiles of queries that share one; a tile is two matrix products. Each pair has a
slot for its partial result, and a query's slots are merged at the end, in a fixed order. Time and memory are linear
in S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.ops.tiles import compute_dtype

__all__ = ["backward", "forward"]

TILE = 32  # pairs a tile
MAX_SLOT_ELEMENTS = 2**22  # of the slots of a chunk
MAX_TILE_ELEMENTS = 2**21  # of the scores of tiles computed at once


@dataclass(frozen=True)
class _Tiles:
    """Some tiles of one chunk. `pair` `[M, TILE]` numbers the slots of the chunk; unused places hold their count."""

    block: Tensor  # [M], index into the blocks of all batches and groups
    pair: Tensor  # [M, TILE]
    row: Tensor  # [M, TILE], row of the chunk: a query of a group
    hidden: Tensor  # [M, TILE, 1, block_size], keys after the query


class _Chunk:
    """Queries `start` to `stop` of all batches and groups: `rows` of them, `slots` pairs."""

    def __init__(self, start: int, stop: int, indices: Tensor, length: int, block_size: int) -> None:
        batch, _, groups, num_selected = indices.shape
        self.queries = slice(start, stop)
        self.num_selected = num_selected
        self.rows = batch * (stop - start) * groups
        self.slots = self.rows * num_selected
        device = indices.device
        num_blocks = -(-length // block_size)
        # Rows are flattened [B, C, G].
        row = torch.arange(self.rows, device=device)
        self.position = start + row // groups % (stop - start)
        sequence = row // (groups * (stop - start)) * groups + row % groups  # b * G + g

        index = indices[:, start:stop].reshape(self.rows, num_selected).sort(-1).values.long()
        repeated = F.pad(index[:, 1:] == index[:, :-1], (1, 0)) if num_selected else torch.zeros_like(index).bool()
        seen = (index >= 0) & (index < num_blocks) & (index * block_size <= self.position[:, None]) & ~repeated
        nothing = batch * groups * num_blocks
        block = torch.where(seen, sequence[:, None] * num_blocks + index, nothing).flatten()
        self.order = torch.argsort(block, stable=True)
        self.pairs_of_block = torch.bincount(block, minlength=nothing + 1)[:nothing]
        self.seen = seen
        self.length, self.block_size, self.num_blocks = length, block_size, num_blocks

    def tiles(self, heads: int) -> Iterator[_Tiles]:
        count = self.pairs_of_block
        tiles_of_block = (count + TILE - 1) // TILE
        block = torch.repeat_interleave(tiles_of_block)
        first_tile, first_pair = tiles_of_block.cumsum(0) - tiles_of_block, count.cumsum(0) - count
        batch = max(1, MAX_TILE_ELEMENTS // (TILE * heads * self.block_size))
        lane = torch.arange(TILE, device=count.device)
        offset = torch.arange(self.block_size, device=count.device)
        for at in range(0, block.shape[0], batch):
            some = block[at : at + batch]
            tile = torch.arange(at, at + some.shape[0], device=count.device) - first_tile[some]
            within = (tile * TILE)[:, None] + lane
            used = within < count[some][:, None]
            place = (first_pair[some][:, None] + within).clamp_max(self.slots - 1)
            pair = torch.where(used, self.order[place], self.slots)
            row = (pair // self.num_selected).clamp_max(self.rows - 1)
            key = (some % self.num_blocks * self.block_size)[:, None] + offset  # [M, block_size]
            hidden = (key[:, None] > self.position[row][:, :, None]) | (key >= self.length)[:, None]
            yield _Tiles(some, pair, row, hidden[:, :, None] | ~used[:, :, None, None])

    def rows_of(self, x: Tensor, groups: int) -> Tensor:
        """`[B, S, Hq, D]` -> `[rows, h, D]`, in the dtype of the computation."""
        rows = x[:, self.queries].unflatten(2, (groups, x.shape[2] // groups))
        return rows.flatten(0, 2).to(compute_dtype(x))


def forward(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int, scale: float) -> tuple[Tensor, Tensor]:
    groups, heads, dtype = k.shape[2], q.shape[2] // k.shape[2], compute_dtype(q)
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=dtype)
    block_size = min(block_size, max(1, k.shape[1]))
    keys, values = _to_blocks(k, block_size), _to_blocks(v, block_size)
    for chunk in _chunks(q, k, v, indices, block_size):
        rows = chunk.rows_of(q, groups) * scale
        slot_out = rows.new_zeros(chunk.slots + 1, heads, v.shape[3])
        slot_lse = rows.new_full((chunk.slots + 1, heads), -torch.inf)
        for tile in chunk.tiles(heads):
            scores = _scores(rows, keys, tile)
            tile_lse = scores.logsumexp(-1)
            weights = (scores - tile_lse.masked_fill(tile_lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
            pair = tile.pair.flatten()
            slot_out[pair] = (weights.flatten(1, 2) @ values[tile.block]).view(-1, heads, v.shape[3])
            slot_lse[pair] = tile_lse.view(-1, heads)
        # The places that no pair used all wrote to the slot after the last.
        slot_lse = slot_lse[:-1].view(chunk.rows, chunk.num_selected, heads)
        total = slot_lse.logsumexp(1)
        share = (slot_lse - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(1)).exp_()
        merged = (share.unsqueeze(-1) * slot_out[:-1].view(*slot_lse.shape, v.shape[3])).sum(1)
        out[:, chunk.queries] = merged.view(out[:, chunk.queries].shape)
        lse[:, chunk.queries] = total.view(lse[:, chunk.queries].shape)
    return out, lse


def backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    indices: Tensor, block_size: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    groups, heads = k.shape[2], q.shape[2] // k.shape[2]
    block_size = min(block_size, max(1, k.shape[1]))
    keys, values = _to_blocks(k, block_size), _to_blocks(v, block_size)
    dq, dk, dv = q.new_empty(q.shape), torch.zeros_like(keys), torch.zeros_like(values)
    for chunk in _chunks(q, k, v, indices, block_size):
        rows, rows_grad, rows_out = (chunk.rows_of(x, groups) for x in (q, grad_out, out))
        rows = rows * scale
        delta = (rows_grad * rows_out).sum(-1)
        if grad_lse is not None:
            delta -= chunk.rows_of(grad_lse.unsqueeze(-1), groups).squeeze(-1)
        rows_lse = chunk.rows_of(lse.unsqueeze(-1), groups).squeeze(-1)
        # Rows that see nothing have only scores of -inf; any finite lse gives them weights of zero.
        rows_lse = rows_lse.masked_fill(rows_lse == -torch.inf, 0.0)
        slot_dq = rows.new_zeros(chunk.slots + 1, heads, q.shape[3])
        for tile in chunk.tiles(heads):
            tile_q, tile_grad = rows[tile.row].flatten(1, 2), rows_grad[tile.row].flatten(1, 2)
            weights = (_scores(rows, keys, tile) - rows_lse[tile.row].unsqueeze(-1)).exp_().flatten(1, 2)
            dweights = tile_grad @ values[tile.block].transpose(1, 2)
            dscores = weights * (dweights - delta[tile.row].flatten(1, 2).unsqueeze(-1))
            slot_dq[tile.pair.flatten()] = (dscores @ keys[tile.block]).view(-1, heads, q.shape[3])
            dk.index_add_(0, tile.block, dscores.transpose(1, 2) @ tile_q)
            dv.index_add_(0, tile.block, weights.transpose(1, 2) @ tile_grad)
        merged = slot_dq[:-1].view(chunk.rows, chunk.num_selected, heads, q.shape[3]).sum(1) * scale
        dq[:, chunk.queries] = merged.view(dq[:, chunk.queries].shape)
    return dq, _from_blocks(dk, k), _from_blocks(dv, v)


def _chunks(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block_size: int) -> Iterator[_Chunk]:
    batch, length, heads, dim = q.shape
    per_query = batch * heads * indices.shape[3] * max(dim, v.shape[3])
    step = max(1, MAX_SLOT_ELEMENTS // max(1, per_query))
    for start in range(0, length if batch else 0, step):
        yield _Chunk(start, min(start + step, length), indices, k.shape[1], block_size)


def _scores(rows: Tensor, keys: Tensor, tile: _Tiles) -> Tensor:
    """`[M, TILE, h, block_size]`, -inf where hidden."""
    scores = rows[tile.row].flatten(1, 2) @ keys[tile.block].transpose(1, 2)
    return scores.view(*tile.row.shape, -1, keys.shape[1]).masked_fill(tile.hidden, -torch.inf)


def _to_blocks(x: Tensor, block_size: int) -> Tensor:
    """`[B, T, G, D]` -> `[B * G * num_blocks, block_size, D]`, zeros after the end."""
    batch, length, groups, dim = x.shape
    num_blocks = -(-length // block_size)
    padded = F.pad(x.to(compute_dtype(x)), (0, 0, 0, 0, 0, num_blocks * block_size - length))
    return padded.transpose(1, 2).reshape(batch * groups * num_blocks, block_size, dim)


def _from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    batch, length, groups, dim = like.shape
    rows = -(-length // blocks.shape[1]) * blocks.shape[1]
    return blocks.view(batch, groups, rows, dim)[:, :, :length].transpose(1, 2).to(like.dtype).contiguous()
