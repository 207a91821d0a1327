"""Mamba-2, a state space model as attention (SSD, arXiv 2405.21060).

A head has a state of N channels for each of P values. How far a token moves it is the step size Δ_t of that head, with
a rate A < 0 (section 6 and 7; keys are B, queries C, values x):

    Δ_t = softplus(W_Δ u_t + b_Δ)        S_t = exp(Δ_t A) S_{t−1} + Δ_t x_t B_tᵀ        y_t = S_t C_t + D x_t

x, B and C go through a short convolution; heads of a group share B and C, which is multi-value attention. The output is
gated before it is normalised, group by group: W_O RMSNorm(y_t ⊙ swish(z_t)). N is head_dim, P is v_head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models.config import NSAConfig
from nsa_compile.models.transformer import ScannedAttention
from nsa_compile.models.zoo.recurrent import ConvolvedMemory, ShortConvolution, in_sums, initial_bias, initial_rate


def ssd(s: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """A token's `x` `[B, H, P]`, `dt` `[B, H]`, `b` and `c` `[B, H, N]` with `a` `[H]`, and the state `[B, H, P, N]`:
    the new state, and the output `[B, H, P]`."""
    s = s * torch.exp(dt * a)[..., None, None] + torch.einsum("bh,bhp,bhn->bhpn", dt, x, b)
    return s, torch.einsum("bhpn,bhn->bhp", s, c)


class Mamba2Layer(ScannedAttention):
    """A selective state space; sizes are a `Mamba2Pattern`."""

    def __init__(self, model: NSAConfig) -> None:
        super().__init__()
        self.config = model
        inner, of_groups = model.n_heads * model.value_dim, model.pattern.groups * model.head_dim
        self.widths = [inner, of_groups, of_groups]
        self.gate = nn.Linear(model.dim, inner, bias=False)
        self.xbc = nn.Linear(model.dim, sum(self.widths), bias=False)
        self.dt = nn.Linear(model.dim, model.n_heads, bias=False)
        self.conv = ShortConvolution(sum(self.widths), model.pattern.conv, bias=True)
        self.dt_bias = initial_bias(model.n_heads)
        self.a_log = initial_rate(model.n_heads)
        self.d = nn.Parameter(torch.ones(model.n_heads))
        self.norm = nn.RMSNorm(inner // model.pattern.groups, eps=model.norm_eps, elementwise_affine=False)
        self.scale = nn.Parameter(torch.ones(inner))
        self.out = nn.Linear(inner, model.dim, bias=False)

    def init_state(self, batch_size: int, max_len: int) -> ConvolvedMemory:
        c = self.config
        s = self.out.weight.new_zeros(batch_size, c.n_heads, c.value_dim, c.head_dim)
        return ConvolvedMemory(in_sums(s), self.conv.empty(batch_size))

    # pyrefly: ignore[bad-override-param-name]
    def step(self, state: ConvolvedMemory, u: Tensor, t: Tensor) -> tuple[ConvolvedMemory, Tensor]:
        heads, groups = self.config.n_heads, self.config.pattern.groups
        recent, xbc = self.conv(state.recent, self.xbc(u))
        x, b, c = in_sums(xbc).split(self.widths, dim=-1)
        x = x.unflatten(-1, (heads, -1))
        b, c = (y.unflatten(-1, (groups, -1)).repeat_interleave(heads // groups, dim=1) for y in (b, c))
        dt = F.softplus(in_sums(self.dt(u)) + self.dt_bias)
        s, y = ssd(state.s, x, dt, -self.a_log.exp(), b, c)
        y = (y + self.d[:, None] * x).flatten(1).to(u.dtype)
        y = self.norm((y * F.silu(self.gate(u))).unflatten(-1, (groups, -1))).flatten(-2)
        return ConvolvedMemory(s, recent), self.out(self.scale * y)
