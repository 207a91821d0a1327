"""The layer of Native Sparse Attention: projections, RoPE and gates around `nsa_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nsa_compile.branches import BRANCHES
from nsa_compile.models.config import NSAConfig
from nsa_compile.models.nsa import (
    CompressionMLP,
    NSAState,
    NSAToken,
    decode_step,
    init_state,
    mean_phi,
    nsa_attention,
    nsa_prefill,
)
from nsa_compile.models.transformer import AttentionLayer, apply_rope


class NSAttention(AttentionLayer):
    """Multi-head NSA with its projections and gates: `[B, S, dim] -> [B, S, dim]`.

    Keys and values have a projection for each branch (the paper's choice) or one shared by all. A branch that
    `config.branches` lacks has neither projection nor gate. Gates are a sigmoid
    per branch and head of the layer's input. RoPE turns queries and keys of the selected and the window branch;
    compression happens on keys before RoPE, so the compressed branch reads with an unrotated query.
    """

    def __init__(self, config: NSAConfig) -> None:
        super().__init__()
        self.config = config
        heads, groups, dim = config.n_heads, config.n_kv_heads, config.dim
        key_dim, value_dim = config.head_dim, config.value_dim
        kv_sets = 1 if config.shared_kv else len(config.branches)
        self.q = nn.Linear(dim, heads * key_dim, bias=False)
        self.k = nn.Linear(dim, kv_sets * groups * key_dim, bias=False)
        self.v = nn.Linear(dim, kv_sets * groups * value_dim, bias=False)
        self.gate = nn.Linear(dim, heads * len(config.branches))
        self.out = nn.Linear(heads * value_dim, dim, bias=False)
        if config.phi == "mlp" and "compressed" in config.branches:
            block = config.pattern.compress_block
            self.phi_k: nn.Module | None = CompressionMLP(block, key_dim, config.phi_hidden)
            self.phi_v: nn.Module | None = CompressionMLP(block, value_dim, config.phi_hidden)
        else:
            self.phi_k = self.phi_v = None

    @property
    def _phi(self):
        return (mean_phi, mean_phi) if self.phi_k is None else (self.phi_k, self.phi_v)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor | None, ...]:
        """q, q_cmp, then keys and values of each branch, and gates, of `x` `[B, S, dim]` at `[S]` or `[B, S]`."""
        config = self.config
        groups = config.n_kv_heads
        q_cmp = self.q(x).unflatten(-1, (config.n_heads, -1))
        gates = self.gate(x).sigmoid().unflatten(-1, (config.n_heads, -1))
        keys = self.k(x).unflatten(-1, (-1, groups, config.head_dim)).unbind(-3)
        values = self.v(x).unflatten(-1, (-1, groups, config.value_dim)).unbind(-3)

        def rope(y: Tensor) -> Tensor:
            return apply_rope(y, position, config.rope_theta)

        q = rope(q_cmp)
        if config.shared_kv:
            return q, q_cmp, keys[0], values[0], rope(keys[0]), values[0], None, None, gates
        # A branch that is not there is handed the first one's, which it does not read.
        cmp, slc, win = (config.branches.index(b) if b in config.branches else 0 for b in BRANCHES)
        return q, q_cmp, keys[cmp], values[cmp], rope(keys[slc]), values[slc], rope(keys[win]), values[win], gates

    def forward(self, x: Tensor) -> Tensor:
        return self.merge_heads(nsa_attention(**self.attention_inputs(x)))

    def attention_inputs(self, x: Tensor) -> dict[str, Any]:
        """What `nsa_attention` takes, by name, of the layer's input."""
        position = torch.arange(x.shape[1], device=x.device)
        q, q_cmp, *kv, gates = self._project(x, position)
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = kv
        return {
            "q": q, "k_cmp": k_cmp, "v_cmp": v_cmp, "k_slc": k_slc, "v_slc": v_slc, "k_win": k_win, "v_win": v_win,
            "gates": gates, "pattern": self.config.pattern, "phi": self._phi, "q_cmp": q_cmp,
            "branches": self.config.branches,
        }  # fmt: skip

    def prefill(self, x: Tensor, lengths: Tensor, max_len: int) -> tuple[NSAState, Tensor]:
        state, o = nsa_prefill(**self.attention_inputs(x), lengths=lengths, max_len=max_len)
        return state, self.merge_heads(o)

    def merge_heads(self, o: Tensor) -> Tensor:
        """The layer's output of that of its heads, `[..., Hq, Dv] -> [..., dim]`."""
        return self.out(o.flatten(-2))

    def init_state(self, batch_size: int, max_len: int) -> NSAState:
        config, weight = self.config, self.q.weight
        key = weight.new_empty(config.n_kv_heads, config.head_dim)
        value = weight.new_empty(config.n_kv_heads, config.value_dim)
        return init_state(batch_size, max_len, key, value, pattern=config.pattern, shared_kv=config.shared_kv)

    def decode_step(self, state: NSAState, x: Tensor, t: Tensor) -> tuple[NSAState, Tensor]:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`."""
        projected = (None if y is None else y[:, 0] for y in self._project(x[:, None], t[..., None]))
        phi_k, phi_v = self._phi
        pattern, branches = self.config.pattern, self.config.branches
        state, o = decode_step(
            state, NSAToken(t, *projected), pattern=pattern, phi_k=phi_k, phi_v=phi_v, branches=branches
        )
        return state, self.merge_heads(o)
