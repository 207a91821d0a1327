"""One layer of attention to be measured: its sizes, its inputs and its useful work."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa_compile.models import SparsePattern
from nsa_compile.models.flops import visible_compressed, visible_selected, visible_window
from nsa_compile.ops.flops import attention_backward_flops, attention_flops, causal_pairs

# A public implementation may know one block size only: l = d = l'.
PATTERNS = {
    "32/16/64": SparsePattern(),
    "64/64/64": SparsePattern(compress_block=64, compress_stride=64),
}


@dataclass(frozen=True)
class Problem:
    """Queries of `heads` heads in `groups` groups over shared keys and values, bf16 unless told otherwise."""

    seq_len: int
    groups: int
    heads: int = 64
    head_dim: int = 128
    batch_size: int = 1
    pattern: SparsePattern = field(default_factory=SparsePattern)
    dtype: torch.dtype = torch.bfloat16

    def inputs(self, device: torch.device) -> list[Tensor]:
        """q `[B, S, H, D]`, k and v `[B, S, G, D]`, and gates before their sigmoid `[B, S, H, 3]`, wanting gradients.

        The three branches share keys and values, as in the public kernels. Keys of a block resemble each other and
        the heads of a group agree in part, so that most choices of blocks are clear and can be compared.
        """
        generator = torch.Generator(device).manual_seed(1337)

        def normal(*shape: int) -> Tensor:
            return torch.randn(self.batch_size, *shape, generator=generator, device=device)

        block = self.pattern.select_block
        centres = normal(-(-self.seq_len // block), self.groups, self.head_dim).repeat_interleave(block, 1)
        common = normal(self.seq_len, self.groups, self.head_dim).repeat_interleave(self.heads // self.groups, 2)
        q = common.add_(normal(self.seq_len, self.heads, self.head_dim))
        k = normal(self.seq_len, self.groups, self.head_dim) + centres[:, : self.seq_len]
        v = normal(self.seq_len, self.groups, self.head_dim)
        return [x.to(self.dtype).requires_grad_() for x in (q, k, v, normal(self.seq_len, self.heads, 3))]

    def flops(self, kind: str) -> dict[str, float]:
        """Useful matrix products of `"nsa"` or `"dense"` attention or a branch, both directions: only keys seen."""
        shape, value = (self.batch_size, self.seq_len, self.heads, self.head_dim), (self.head_dim,)
        seen = {
            "compressed": visible_compressed(self.pattern, self.seq_len),
            "selected": visible_selected(self.pattern, self.seq_len),
            "window": visible_window(self.pattern, self.seq_len),
        }
        pairs = {**seen, "nsa": sum(seen.values()), "dense": causal_pairs(self.seq_len, self.seq_len)}[kind]
        return {
            "forward": attention_flops(shape, value, pairs),
            "backward": attention_backward_flops(shape, value, pairs),
        }
