"""Which queries read a block: what programs on the GPU that take block after block walk along.

Plain torch without a size that depends on the data, so nothing is read back from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Lists", "distinct_blocks", "selecting_queries"]


def distinct_blocks(indices: Tensor, num_keys: int, block_size: int) -> Tensor:
    """The visible blocks of every row, ascending, each once: int32 `[B, S, G, n]`, -1 in places that are not used."""
    last = torch.arange(indices.shape[1], device=indices.device)[:, None, None] // block_size
    last = last.clamp_max(-(-num_keys // block_size) - 1)
    blocks = indices.masked_fill(indices > last, -1).clamp_min_(-1).int().sort(-1).values.contiguous()
    blocks[..., 1:].masked_fill_(blocks[..., 1:] == blocks[..., :-1], -1)
    return blocks


class Lists(NamedTuple):
    """For every list (b, g, block), the queries that selected the block, and the programs that share the list.

    A pair is the place of an index in `[B, S, G, n]`, counted in that order.
    """

    pairs: Tensor  # int32 or int64 [B * S * G * n], list after list, ascending within each
    queries: Tensor  # int32 of the same shape, their positions s
    begin: Tensor  # int64 [num_lists + 1], where the pairs of a list begin
    program: Tensor  # int64 [num_lists + 1], the first program of a list; an empty list has one
    part: Tensor  # int64 [num_lists + 1], the first partial sum of a list; a list of one program has none
    owner: Tensor  # int32 [max_programs], the list of a program, num_lists where there is nothing left to do
    num_blocks: int
    num_lists: int
    max_programs: int
    max_parts: int
    longest: int  # pairs a program


def selecting_queries(blocks: Tensor, num_blocks: int, longest: int, start: int = 0) -> Lists:
    """Invert blocks `[B, S, G, n]`, whose first query is `start`.

    Sizes that depend on the data are replaced by their bounds.
    """
    batch, length, groups, n = blocks.shape
    num_lists = batch * groups * num_blocks
    max_programs = num_lists + blocks.numel() // longest
    max_parts = 2 * blocks.numel() // longest

    narrow = torch.int32 if num_lists < 2**31 else torch.int64
    first = torch.arange(batch * groups, dtype=narrow, device=blocks.device).view(batch, 1, groups, 1) * num_blocks
    keys = (first + blocks).masked_fill_(blocks < 0, num_lists)
    keys, pairs = keys.flatten().sort(stable=True)
    if blocks.numel() < 2**31:
        pairs = pairs.int()
    queries = (pairs // (groups * n) % length + start).int()

    every = torch.arange(num_lists + 1, device=blocks.device)
    begin = torch.searchsorted(keys, every.to(keys.dtype))
    programs = ((begin.diff() + longest - 1) // longest).clamp_min_(1)
    program = torch.zeros_like(begin)
    part = torch.zeros_like(begin)
    torch.cumsum(programs, 0, out=program[1:])
    torch.cumsum(programs.masked_fill(programs == 1, 0), 0, out=part[1:])
    owner = torch.searchsorted(program[1:], torch.arange(max_programs, device=blocks.device), right=True).int()
    return Lists(pairs, queries, begin, program, part, owner, num_blocks, num_lists, max_programs, max_parts, longest)
