"""The layer of Native Sparse Attention: projections, RoPE and gates around `nsa_attention`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nsa_compile.branches import BRANCHES
from nsa_compile.models.config import SparsePattern, check_attention, ordered_branches
from nsa_compile.models.documents import SHAPES, Documents
from nsa_compile.models.nsa import (
    CompressionMLP,
    NSAState,
    NSAToken,
    check_selecting,
    check_selection,
    decode_step,
    init_state,
    mean_phi,
    nsa_attention,
    nsa_prefill,
)
from nsa_compile.models.transformer import AttentionLayer, apply_rope, check_prompts, check_token


class NSAttention(AttentionLayer):
    """Multi-head Native Sparse Attention with its projections, rotary positions and gates: `[B, S, dim]` to the same.

        layer = NSAttention(dim=512, n_heads=8, n_kv_heads=2, head_dim=64)
        y = layer(x)

    Uncompiled it is the loop over the tokens, and says so once; `nsa_compile.compile_block(layer)`, or compiling what
    it is a part of, makes it fast.

    Keys and values have a projection for each branch (the paper's choice) or one shared by all. A branch that
    `branches` lacks has neither projection nor gate. Gates are a sigmoid
    per branch and head of the layer's input. RoPE turns queries and keys of the selected and the window branch;
    compression happens on keys before RoPE, so the compressed branch reads with an unrotated query, unless
    `compress_rotated`.

    **Padding and packed documents.** Positions, compressed blocks and selection blocks count from the first token of
    each document, and no window, block or selection reaches into another one: a packed document gives what it gives
    alone, as do its gradients, and so do the real tokens of a padded row. `Documents` says how: each document is
    computed as a row of its own.

    **Decoding.** `init_state`, `prefill` and `decode_step` are the same step over caches.

    Args:
        dim: width of the input and the output.
        n_heads: query heads, `Hq`.
        n_kv_heads: key/value heads, `G`, which divide the query heads; those of a group select the same blocks.
        head_dim: width of a query or key head; even.
        pattern: block sizes, counts and window.
        v_head_dim: width of a value head; `head_dim` by default.
        phi: how a block is compressed (eq. 7), `"mlp"` or `"mean"`.
        phi_hidden: hidden width of the compression MLP; twice the head's width by default.
        shared_kv: whether the branches share one key/value projection.
        compress_rotated: whether keys are compressed after RoPE, and the compressed branch reads with a rotated query.
        branches: those of `"compressed"`, `"selected"` and `"window"` that there are; selected needs compressed.
        rope_theta: base of the rotary frequencies.

    Raises:
        ValueError: naming the argument, its value and the rule it breaks.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        pattern: SparsePattern = SparsePattern(),  # noqa: B008  # frozen
        v_head_dim: int | None = None,
        phi: str = "mlp",
        phi_hidden: int | None = None,
        shared_kv: bool = False,
        compress_rotated: bool = False,
        branches: Sequence[str] = BRANCHES,
        rope_theta: float = 10000.0,
    ) -> None:
        super().__init__()
        self.dim, self.n_heads, self.n_kv_heads, self.head_dim = dim, n_heads, n_kv_heads, head_dim
        self.pattern, self.v_head_dim, self.phi, self.phi_hidden = pattern, v_head_dim, phi, phi_hidden
        self.shared_kv, self.branches, self.rope_theta = shared_kv, ordered_branches(branches), rope_theta
        self.compress_rotated = compress_rotated
        check_attention(self)
        self.selects = "selected" in self.branches
        self.value_dim = head_dim if v_head_dim is None else v_head_dim
        self._compiled: Callable[[Tensor], Tensor] | None = None
        kv_sets = 1 if shared_kv else len(self.branches)
        self.q = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_sets * n_kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_sets * n_kv_heads * self.value_dim, bias=False)
        self.gate = nn.Linear(dim, n_heads * len(self.branches))
        self.out = nn.Linear(n_heads * self.value_dim, dim, bias=False)
        if phi == "mlp" and "compressed" in self.branches:
            block = pattern.compress_block
            self.phi_k: nn.Module | None = CompressionMLP(block, head_dim, phi_hidden)
            self.phi_v: nn.Module | None = CompressionMLP(block, self.value_dim, phi_hidden)
        else:
            self.phi_k = self.phi_v = None

    @property
    def _phi(self):
        return (mean_phi, mean_phi) if self.phi_k is None else (self.phi_k, self.phi_v)

    def _project(self, x: Tensor, position: Tensor) -> tuple[Tensor | None, ...]:
        """q, q_cmp, then keys and values of each branch, and gates, of `x` `[B, S, dim]` at `[S]` or `[B, S]`."""
        q_cmp = self.q(x).unflatten(-1, (self.n_heads, -1))
        gates = self.gate(x).sigmoid().unflatten(-1, (self.n_heads, -1))
        keys = self.k(x).unflatten(-1, (-1, self.n_kv_heads, self.head_dim)).unbind(-3)
        values = self.v(x).unflatten(-1, (-1, self.n_kv_heads, self.value_dim)).unbind(-3)

        def rope(y: Tensor) -> Tensor:
            return apply_rope(y, position, self.rope_theta)

        q = rope(q_cmp)
        # A branch that is not there is handed the first one's, which it does not read.
        alone = not self.shared_kv
        cmp, slc, win = (self.branches.index(b) if alone and b in self.branches else 0 for b in BRANCHES)
        k_cmp, k_slc = keys[cmp], rope(keys[slc])
        if self.compress_rotated:
            q_cmp, k_cmp = q, rope(k_cmp)
        if self.shared_kv:
            return q, q_cmp, k_cmp, values[cmp], k_slc, values[slc], None, None, gates
        return q, q_cmp, k_cmp, values[cmp], k_slc, values[slc], rope(keys[win]), values[win], gates

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        *,
        doc_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        documents: Documents | None = None,
        selection: Tensor | None = None,
        return_selection: bool = False,
    ) -> Any:
        """Attention of each token to those before it in its document.

        Args:
            x: `[B, S, dim]`.
            attention_mask: `[B, S]` bool, or integers 0 and 1: 0 for padding, at the left or right of a row. Its output
                is zero.
            doc_ids: `[B, S]` integers: tokens with the same number are one document.
            cu_seqlens: `[n + 1]` integers: the starts of the documents of one sequence, B = 1, and S.
            documents: the same, made by `Documents.of` once for all layers. Making them reads values, which waits for
                the device, and cannot happen within a compiled function.
            selection: `[B, S, G, n]` int32 or int64, the blocks of its document that each token reads, instead of those
                that it would rank best; as `nsa_attention` takes it.
            return_selection: return the blocks that each token read, too, in this form.

        Returns:
            `[B, S, dim]`, or with `return_selection` a pair of it and `[B, S, G, n]` int32, -1 for none.

        Raises:
            ValueError: what is given is of another shape or dtype, or against the rules of `Documents.of`.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {list(x.shape)}; it must be [B, S, {self.dim}]")
        if x.shape[1] == 0:  # what is compiled could not say so in one line
            raise ValueError(f"x has shape {list(x.shape)}; attention needs at least one token")
        told = not (attention_mask is None and doc_ids is None and cu_seqlens is None)
        if not told and documents is None:
            return self._rows()(x, **_asked(selection, return_selection))
        if documents is None:
            documents = Documents.of(
                attention_mask=attention_mask, doc_ids=doc_ids, cu_seqlens=cu_seqlens, device=x.device
            )
        elif told:
            raise ValueError("documents was given with attention_mask, doc_ids or cu_seqlens; give one of them")
        attend = self._rows()
        rows = documents.unpack(x)
        given = [None] * len(rows) if selection is None else self._unpacked(selection, x, documents)
        outputs = [attend(row, **_asked(of, return_selection)) for row, of in zip(rows, given, strict=True)]
        if not return_selection:
            return documents.pack(outputs)
        o, selections = (documents.pack(part) for part in zip(*outputs, strict=True))
        return o, selections if documents.real is None else selections.where(documents.real[..., None, None], -1)

    def _unpacked(self, selection: Tensor, x: Tensor, documents: Documents) -> list[Tensor]:
        check_selection(selection, [*x.shape[:2], self.n_kv_heads])
        return documents.unpack(selection)

    def _rows(self) -> Callable[..., Any]:
        """What computes rows that hold one document each, `[N, L, dim] -> [N, L, dim]`."""
        if torch.compiler.is_compiling():
            return self._attend
        if self._compiled is not None:
            return self._compiled
        self.say_uncompiled()
        return self._attend

    def _attend(self, x: Tensor, selection: Tensor | None = None, return_selection: bool = False) -> Any:
        asked = {"selection": selection, "return_selection": return_selection}
        attended = nsa_attention(**self.attention_inputs(x), **asked)
        if not return_selection:
            return self.merge_heads(attended)
        o, selected = attended
        return self.merge_heads(o), selected

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile in place, as `torch.nn.Module.compile`, what is computed of rows of one shape.

        Which documents there are is data: they are taken apart outside of what is compiled. Their rows have a bounded
        number of shapes, and a program for each is kept.
        """
        kwargs["recompile_limit"] = max(kwargs.get("recompile_limit") or 0, SHAPES)
        self._compiled = torch.compile(self._attend, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # As torch does: what is compiled belongs to this layer, and no copy and no file has it.
        return {**super().__getstate__(), "_compiled": None}

    def extra_repr(self) -> str:
        names = (
            "dim",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "v_head_dim",
            "phi",
            "shared_kv",
            "compress_rotated",
            "branches",
            "pattern",
        )
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def attention_inputs(self, x: Tensor) -> dict[str, Any]:
        """What `nsa_attention` takes, by name, of the layer's input."""
        position = torch.arange(x.shape[1], device=x.device)
        q, q_cmp, *kv, gates = self._project(x, position)
        k_cmp, v_cmp, k_slc, v_slc, k_win, v_win = kv
        return {
            "q": q, "k_cmp": k_cmp, "v_cmp": v_cmp, "k_slc": k_slc, "v_slc": v_slc, "k_win": k_win, "v_win": v_win,
            "gates": gates, "pattern": self.pattern, "phi": self._phi, "q_cmp": q_cmp,
            "branches": self.branches,
        }  # fmt: skip

    def prefill(
        self,
        x: Tensor,
        lengths: Tensor,
        max_len: int,
        selection: Tensor | None = None,
        return_selection: bool = False,
    ) -> Any:
        """As `AttentionLayer.prefill`; `selection`, and what comes third with `return_selection`, as in `forward`."""
        check_prompts(lengths, x.shape[:2], max_len)
        asked = {"selection": selection, "return_selection": return_selection}
        state, o, *selected = nsa_prefill(**self.attention_inputs(x), lengths=lengths, max_len=max_len, **asked)
        return state, self.merge_heads(o), *selected

    def merge_heads(self, o: Tensor) -> Tensor:
        """The layer's output of that of its heads, `[..., Hq, Dv] -> [..., dim]`."""
        return self.out(o.flatten(-2))

    def init_state(self, batch_size: int, max_len: int) -> NSAState:
        weight = self.q.weight
        key = weight.new_empty(self.n_kv_heads, self.head_dim)
        value = weight.new_empty(self.n_kv_heads, self.value_dim)
        return init_state(batch_size, max_len, key, value, pattern=self.pattern, shared_kv=self.shared_kv)

    def room(self, state: NSAState) -> int:
        return state.k_slc.shape[1]

    def decode_step(
        self, state: NSAState, x: Tensor, t: Tensor, selection: Tensor | None = None, return_selection: bool = False
    ) -> Any:
        """One token `x` `[B, dim]` at position `t`, `[]` or, of each sequence, `[B]`.

        `selection` and what comes third with `return_selection` are `[B, G, n]`, as those of `forward`.

        Raises:
            ValueError: the caches have no room at that position, or `x` or `t` does not go with the state.
        """
        check_token(state, x, t, self.room(state))
        if selection is not None or return_selection:
            check_selecting(self.selects)
        if selection is not None:
            check_selection(selection, [len(x), self.n_kv_heads])
        projected = (None if y is None else y[:, 0] for y in self._project(x[:, None], t[..., None]))
        phi_k, phi_v = self._phi
        token = NSAToken(t, *projected)._replace(selection=selection)  # pyrefly: ignore[bad-argument-type]
        state, o, *selected = decode_step(
            # pyrefly: ignore[bad-argument-type]
            state, token, pattern=self.pattern, phi_k=phi_k, phi_v=phi_v, branches=self.branches,
            return_selection=return_selection,
        )  # fmt: skip
        return state, self.merge_heads(o), *selected


def _asked(selection: Tensor | None, return_selection: bool) -> dict[str, Any]:
    """What was asked for and is not there by default: the usual call stays the usual program."""
    asked = {"selection": selection, "return_selection": return_selection}
    return {name: value for name, value in asked.items() if value is not None and value is not False}
