"""NSA as a layer in a model of your own, trained in a plain loop on packed documents.

    python examples/nsa_layer.py

Documents of unequal length stand one after the other in one sequence; none sees another. Activations are computed again
for the backward pass, and matrix products are in bfloat16.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nsa_compile
from nsa_compile.models import Documents, NSAttention, SparsePattern

PATTERN = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)
TEXTS = (b"to be, or not to be: that is the question. " * 2, b"the rest is silence. ", b"words, words, words. " * 3)


class Block(nn.Module):
    """A pre-norm transformer block with NSA: `[B, S, dim]` to the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = NSAttention(dim, n_heads=4, n_kv_heads=2, head_dim=dim // 4, pattern=PATTERN)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, documents: Documents) -> Tensor:
        x = x + self.attention(self.norm(x), documents=documents)
        return x + self.mlp(x)


class Model(nn.Module):
    """Tokens `[B, S]` to logits `[B, S, 256]`."""

    def __init__(self, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor, documents: Documents) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, documents, use_reentrant=False)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    packed = torch.tensor(list(b"".join(TEXTS)))[None]  # [1, S]
    lengths = torch.tensor([len(text) for text in TEXTS])
    documents = Documents.of(cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)))  # once a batch, for all layers
    last = torch.zeros_like(packed, dtype=torch.bool)
    last[0, lengths.cumsum(0) - 1] = True
    following = packed.roll(-1, dims=1).masked_fill(last, -100)  # nothing follows the last token of a document

    model = Model()
    looped = model(packed, documents)
    for block in model.blocks:
        nsa_compile.compile_block(block.attention)  # the layers are equal, so one compilation serves both
    torch.testing.assert_close(model(packed, documents), looped)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(packed, documents)
        loss = F.cross_entropy(logits.float().flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"step {i}: loss {loss.item():.3f}")
    for choice in nsa_compile.last_report().attention:
        print(f"{choice.branch}: {choice.operator}")


if __name__ == "__main__":
    main()
