"""NSA as a layer in a model of your own, trained for a few steps.

python examples/nsa_layer.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nsa_compile
from nsa_compile.models import SparsePattern, nsa_attention

PATTERN = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)


class Block(nn.Module):
    """A pre-norm transformer block with NSA: `[B, S, dim]` to the same."""

    def __init__(self, dim: int, heads: int, groups: int) -> None:
        super().__init__()
        self.split = [heads, groups, groups]
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, sum(self.split) * dim // heads)
        self.gates = nn.Linear(dim, 3 * heads)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.qkv(h).unflatten(-1, (sum(self.split), -1)).split(self.split, dim=2)
        gates = self.gates(h).unflatten(-1, (self.split[0], 3)).sigmoid()
        # The three branches share keys and values here; the paper gives each its own.
        x = x + self.out(nsa_attention(q, k, v, k, v, k, v, gates, pattern=PATTERN).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Tokens `[B, S]` to logits `[B, S, 256]`."""

    def __init__(self, dim: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.blocks = nn.ModuleList(Block(dim, heads=4, groups=2) for _ in range(layers))
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(b"to be, or not to be: that is the question. " * 4))
    tokens, following = text[:64][None], text[1:65][None]
    model = Model()
    looped = model(tokens)
    nsa_compile.compile_blocks(model)  # the two blocks are equal, so one compilation serves both
    torch.testing.assert_close(model(tokens), looped)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(20):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 5 == 0:
            print(f"step {i}: loss {loss.item():.3f}")
    for choice in nsa_compile.last_report().attention:
        print(f"{choice.branch}: {choice.operator}")


if __name__ == "__main__":
    main()
