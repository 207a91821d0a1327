"""One attention from scratch: a sliding window with sinks, for several heads, trained for a few steps.

    python examples/own_attention.py

Each token sees the first `SINKS` tokens and the last `WINDOW`. Only the step says so; the training graph is derived
from it.
"""

import torch
from torch import Tensor, nn

import nsa_compile

SINKS, WINDOW = 2, 8


def step(cache: tuple[Tensor, Tensor], token: tuple[Tensor, ...]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """One token of each sequence: `q, k, v [B, H, D]` and caches `[B, H, S, D]` to the output `[B, H, D]`."""
    t, q, k, v = token
    positions = torch.arange(cache[0].shape[2])
    here = (positions == t)[:, None]
    keys = torch.where(here, k[:, :, None], cache[0])
    values = torch.where(here, v[:, :, None], cache[1])
    seen = (positions <= t) & ((positions > t - WINDOW) | (positions < SINKS))
    scores = (keys @ q[..., None])[..., 0] * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return (keys, values), (weights[:, :, None] @ values)[:, :, 0]


class Attention(nn.Module):
    """Projections around the looped step: `[B, S, dim]` to the same."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        # The loop goes over the first dimension: [S, B, H, D] each.
        q, k, v = self.qkv(x).transpose(0, 1).unflatten(-1, (3, self.heads, -1)).unbind(2)
        empty = x.new_zeros(x.shape[0], self.heads, x.shape[1], q.shape[-1])
        _, y = nsa_compile.scan(step, (empty, empty.clone()), (torch.arange(x.shape[1]), q, k, v))
        return self.out(y.flatten(2)).transpose(0, 1)


def main() -> None:
    torch.manual_seed(0)
    model = Attention(dim=32, heads=2)
    compiled = nsa_compile.compile(model)
    x = torch.randn(4, 32, 32)
    torch.testing.assert_close(compiled(x), model(x))

    # The output is to be the token three places before.
    wanted = x.roll(3, dims=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(30):
        loss = (compiled(x) - wanted)[:, 3:].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            print(f"step {i}: loss {loss.item():.3f}")
    print(f"batched: {nsa_compile.last_report().scans[0].batched}, last loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
