"""Native Sparse Attention: the decode step of one token, the single definition everything else is derived from.

Equation numbers are those of arXiv 2502.11089. Symbols: `l` compress_block, `d` compress_stride, `l'` select_block,
`n` num_selected, `w` window, `G` key/value heads (groups), `h = Hq / G` query heads a group. Query head `g * h + i`
belongs to group `g`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.branches import BRANCHES
from nsa_compile.models.config import SparsePattern, ordered_branches
from nsa_compile.scanning import scan

__all__ = [
    "CompressionMLP", "NSAState", "NSAToken", "decode_step", "init_state", "nsa_attention", "nsa_prefill",
    "observed_nsa_attention",
]  # fmt: skip

Phi = Callable[[Tensor], Tensor]


class NSAToken(NamedTuple):
    """What one token brings to the step. `B` sequences are decoded side by side.

    `q` reads the selected and the window branch, `q_cmp` the compressed one: compression happens on keys before
    RoPE, so the compressed keys carry no rotation and meet a query without one. `gates` are activated, one for each
    branch, in the order compressed, selected, window. With a shared projection `k_win` and `v_win` are None, and the
    window branch reads the cache of the selected one.

    A `selection` takes the place of the ranking, eq. 8 to 11. A number that is no block's, such as -1, stands for none,
    and one that comes twice counts once. No block lets a token see a later one.
    """

    t: Tensor  # [] int64, the position of the token, or [B], of the token of each sequence
    q: Tensor  # [B, Hq, D]
    q_cmp: Tensor  # [B, Hq, D]
    k_cmp: Tensor  # [B, G, D]
    v_cmp: Tensor  # [B, G, Dv]
    k_slc: Tensor  # [B, G, D]
    v_slc: Tensor  # [B, G, Dv]
    k_win: Tensor | None  # [B, G, D]
    v_win: Tensor | None  # [B, G, Dv]
    gates: Tensor  # [B, Hq, branches]
    selection: Tensor | None = None  # [B, G, n] int32 or int64, the blocks to read instead of ranking them


class NSAState(NamedTuple):
    """The caches before a token: room for S tokens and for the `N = (S - l) // d + 1` blocks they complete.

    Empty ones, and so those that are decoded into, lie as they are read fastest: one group after the other.
    """

    recent_k: Tensor  # [B, l, G, D], the last l uncompressed keys
    recent_v: Tensor  # [B, l, G, Dv]
    k_cmp: Tensor  # [B, G, N, D]
    v_cmp: Tensor  # [B, G, N, Dv]
    k_slc: Tensor  # [B, S, G, D]
    v_slc: Tensor  # [B, S, G, Dv]
    k_win: Tensor | None  # [B, S, G, D]
    v_win: Tensor | None  # [B, S, G, Dv]


def init_state(
    batch_size: int, max_len: int, key: Tensor, value: Tensor, *, pattern: SparsePattern, shared_kv: bool = False
) -> NSAState:
    """Empty caches for `max_len` tokens, like `key` `[..., G, D]` and `value` `[..., G, Dv]` in all but length.

    Raises:
        ValueError: a length or a number of sequences below 0.
    """
    for name, value_of in (("batch_size", batch_size), ("max_len", max_len)):
        if value_of < 0:
            raise ValueError(f"{name} is {value_of}; it must be 0 or more")
    n_blocks = max(0, (max_len - pattern.compress_block) // pattern.compress_stride + 1)

    def cache(like: Tensor, rows: int) -> Tensor:
        return empty_cache(like, batch_size, rows, *like.shape[-2:])

    def recent(like: Tensor) -> Tensor:
        return like.new_zeros(batch_size, pattern.compress_block, *like.shape[-2:])

    return NSAState(
        recent_k=recent(key),
        recent_v=recent(value),
        k_cmp=cache(key, n_blocks).transpose(1, 2),
        v_cmp=cache(value, n_blocks).transpose(1, 2),
        k_slc=cache(key, max_len),
        v_slc=cache(value, max_len),
        k_win=None if shared_kv else cache(key, max_len),
        v_win=None if shared_kv else cache(value, max_len),
    )


def empty_cache(like: Tensor, batch_size: int, rows: int, groups: int, width: int) -> Tensor:
    """Zeros `[B, rows, G, width]`, of which each group's rows lie one after the other.

    A head reads its own group alone. Where the groups' rows alternate, the processor does not foresee which is next,
    and a step over long caches takes three times as long.
    """
    return like.new_zeros(batch_size, groups, rows, width).transpose(1, 2)


def group_after_group(cache: Tensor) -> Tensor:
    """A cache `[B, S, G, D]` that lies as an empty one does."""
    return cache.transpose(1, 2).contiguous().transpose(1, 2)


def decode_step(
    state: NSAState,
    token: NSAToken,
    *,
    pattern: SparsePattern,
    phi_k: Phi,
    phi_v: Phi,
    branches: Sequence[str] = BRANCHES,
    return_selection: bool = False,
) -> Any:
    """One token through all three branches: the new state and the output `[B, Hq, Dv]` (eq. 5).

    `phi_k` and `phi_v` compress a block `[B, G, l, D] -> [B, G, D]`. Of fewer `branches` the output is the sum of
    those; the keys and values of the others are kept and not read. With `return_selection` the blocks that were read
    come third, int32 `[B, G, n]`, as `token.selection` takes them.
    """
    state, gated, selection = _gated_branches(state, token, pattern, phi_k, phi_v, branches)
    output = _sum_of(gated, token.q.dtype)
    return (state, output, _filled_up(selection, pattern)) if return_selection else (state, output)


def _sum_of(gated: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The sum of eq. 5, `[B, Hq, Dv]`."""
    output = gated[0]
    for other in gated[1:]:
        output = output + other
    return output.flatten(1, 2).to(dtype)


def _only_sum(gated: list[Tensor], dtype: torch.dtype) -> tuple[Tensor]:
    return (_sum_of(gated, dtype),)


def _gated_branches(
    state: NSAState, token: NSAToken, pattern: SparsePattern, phi_k: Phi, phi_v: Phi, branches: Sequence[str]
) -> tuple[NSAState, list[Tensor], Tensor | None]:
    """The new state, the output of each branch times its gate, `[B, G, h, Dv]` (eq. 5 before its sum), and the blocks
    that were selected or given, `[B, G, n]`; None where no branch selects."""
    t = token.t
    max_len = state.k_slc.shape[1]
    n_blocks = state.k_cmp.shape[2]
    groups = state.k_slc.shape[2]
    position = torch.arange(max_len, device=t.device)
    each = t[..., None]  # [1], or [B, 1]: what is compared with it is [T], or [B, T]

    # Append the token to the caches. Its keys and values are visible to itself.
    here = (position == each)[..., None, None]
    k_slc = torch.where(here, token.k_slc[:, None], state.k_slc)
    v_slc = torch.where(here, token.v_slc[:, None], state.v_slc)
    if token.k_win is None or token.v_win is None or state.k_win is None or state.v_win is None:
        k_win, v_win, kept_k_win, kept_v_win = k_slc, v_slc, None, None
    else:
        k_win = kept_k_win = torch.where(here, token.k_win[:, None], state.k_win)
        v_win = kept_v_win = torch.where(here, token.v_win[:, None], state.v_win)

    # eq. 7: token t completes block j when t = j·d + l − 1. The block is φ of the last l keys.
    recent_k = torch.cat([state.recent_k[:, 1:], token.k_cmp[:, None]], dim=1)
    recent_v = torch.cat([state.recent_v[:, 1:], token.v_cmp[:, None]], dim=1)
    block = torch.arange(n_blocks, device=t.device)
    block_end = block * pattern.compress_stride + pattern.compress_block - 1
    completed = (block_end == each)[..., None, :, None]
    new_k = phi_k(recent_k.transpose(1, 2)).to(state.k_cmp.dtype)
    new_v = phi_v(recent_v.transpose(1, 2)).to(state.v_cmp.dtype)
    k_cmp = torch.where(completed, new_k[:, :, None], state.k_cmp)
    v_cmp = torch.where(completed, new_v[:, :, None], state.v_cmp)

    q = token.q.unflatten(1, (groups, -1))  # [B, G, h, D]
    q_cmp = token.q_cmp.unflatten(1, (groups, -1))

    outputs = []
    selection = None
    if "compressed" in branches:
        # Compressed branch, eq. 8: attention over the blocks that end no later than t.
        o_cmp, p_cmp = _masked_attention(
            q_cmp, k_cmp.transpose(1, 2), v_cmp.transpose(1, 2), (block_end <= each)[..., None, None, :]
        )
        outputs.append(o_cmp)

        if "selected" in branches:
            # Selected branch, eq. 9–12: attention over the tokens of the n best blocks.
            ranked = token.selection is None
            selection = select_blocks(p_cmp, t, max_len, pattern) if ranked else token.selection  # [B, G, n]
            # pyrefly: ignore[bad-argument-type]
            selected = block_mask(selection, -(-max_len // pattern.select_block))  # [B, G, Nb]
            in_selected_block = selected.repeat_interleave(pattern.select_block, dim=-1)[..., :max_len]
            o_slc, _ = _masked_attention(
                q, k_slc, v_slc, (in_selected_block & (position <= each)[..., None, :])[:, :, None]
            )
            outputs.append(o_slc)

    if "window" in branches:
        # Sliding window, §3.3.3: the last w tokens, t included.
        in_window = (position <= each) & (position > each - pattern.window)
        o_win, _ = _masked_attention(q, k_win, v_win, in_window[..., None, None, :])
        outputs.append(o_win)

    gates = token.gates.unflatten(1, (groups, -1))[..., None]  # [B, G, h, branches, 1]
    gated = [gates[..., i, :] * output for i, output in enumerate(outputs)]
    new_state = NSAState(recent_k, recent_v, k_cmp, v_cmp, k_slc, v_slc, kept_k_win, kept_v_win)
    return new_state, gated, selection


def _masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of `q` `[B, G, h, D]` over a cache `[B, T, G, D]`: output `[B, G, h, Dv]` and weights `[B, G, h, T]`.

    `mask` broadcasts to the weights. Where it keeps nothing, weights and output are zero and so are their gradients:
    the smallest finite score instead of -inf keeps NaN out of both directions, and the second mask makes the weights
    exactly zero.
    """
    scale = 1.0 / math.sqrt(q.shape[-1])
    scores = torch.einsum("bghd,btgd->bght", q, k) * scale
    # Softmax and selection in at least float32, whatever the inputs are.
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).masked_fill(~mask, 0.0)
    return torch.einsum("bght,btge->bghe", weights.to(v.dtype), v), weights


def select_blocks(p_cmp: Tensor, t: Tensor, max_len: int, pattern: SparsePattern) -> Tensor:
    """The n selection blocks that a token at `t`, `[]` or `[B]`, reads, the best first: int64 `[B, G, n]`, -1 where
    there are fewer, from the compressed weights `[B, G, h, N]`.

    eq. 9 and 10 give each block its importance; the first `num_initial` blocks and the `num_local` blocks up to the
    current one are always taken and count towards n; eq. 11 takes the n best, ties to the lower index. Blocks after
    the current one are never taken. Carries no gradient.
    """
    block = torch.arange(-(-max_len // pattern.select_block), device=t.device)
    current = (t // pattern.select_block)[..., None, None]  # [1, 1], or [B, 1, 1]
    visible = block <= current
    forced = (block < pattern.num_initial) | (block > current - pattern.num_local)

    # The sum over heads (eq. 10) and the mapping (eq. 9) are linear, so their order is free; this one is cheaper.
    importance = block_importance(p_cmp.detach().sum(dim=2), block.shape[0], pattern)
    score = torch.where(forced, math.inf, importance)
    score = torch.where(visible, score, -math.inf)
    # A stable sort, because topk leaves the order of ties open.
    best, index = torch.sort(score, dim=-1, descending=True, stable=True)
    n = min(pattern.num_selected, block.shape[0])
    return torch.where(best[..., :n] > -math.inf, index[..., :n], -1)


def block_mask(selection: Tensor, n_select: int) -> Tensor:
    """The blocks of a selection, integers `[B, G, n]`, as a mask `[B, G, Nb]`."""
    # Beside the columns of the blocks there is one before and one after them, for numbers that are no block's.
    column = selection.long().clamp(-1, n_select) + 1
    columns = torch.zeros(*selection.shape[:-1], n_select + 2, dtype=torch.bool, device=selection.device)
    return columns.scatter(-1, column, True)[..., 1:-1]


def _filled_up(selection: Tensor | None, pattern: SparsePattern) -> Tensor:
    """A selection as it is returned, int32 `[B, G, n]`, also from caches that are too short for n blocks."""
    assert selection is not None  # `check_selecting` has seen to it
    missing = max(0, pattern.num_selected - selection.shape[-1])
    return F.pad(selection, (0, missing), value=-1).int()


def block_importance(p_cmp: Tensor, n_select: int, pattern: SparsePattern) -> Tensor:
    """eq. 9: importance `[..., Nb]` of the selection blocks from that of the compression blocks `[..., N]`.

    `p_slc[j] = Σ_m Σ_n p_cmp[(l'/d)·j + m − n]` over `0 ≤ m < l'/d`, `0 ≤ n < l/d`, terms outside the sequence being
    zero. For 32/16/64 block j weighs the compressed blocks 4j−1 … 4j+3 by 1, 2, 2, 2, 1. `index_convention="paper_v2"`
    takes the index `−m − n`, as the paper's second version prints it.

    The terms are added one by one in a fixed order, so that equal blocks get equal sums on every path and device.
    """
    ratio = pattern.select_block // pattern.compress_stride
    weight = block_weights(pattern)
    left = -min(weight)
    padded = F.pad(p_cmp, (left, max(0, ratio * n_select - p_cmp.shape[-1])))
    importance = torch.zeros_like(padded[..., :1])
    for offset in weight:
        first = left + offset
        term = padded[..., first : first + ratio * (n_select - 1) + 1 : ratio]
        importance = importance + weight[offset] * term
    return importance


def block_weights(pattern: SparsePattern) -> dict[int, int]:
    """eq. 9: how often compressed block `(l'/d)·j + offset` counts for selection block j, by ascending offset."""
    sign = 1 if pattern.index_convention == "minus" else -1
    weight: dict[int, int] = {}
    for m in range(pattern.select_block // pattern.compress_stride):
        for n in range(pattern.compress_block // pattern.compress_stride):
            weight[sign * m - n] = weight.get(sign * m - n, 0) + 1
    return dict(sorted(weight.items()))


def mean_phi(block: Tensor) -> Tensor:
    """φ as the mean over a block: `[..., l, D] -> [..., D]`."""
    return block.mean(dim=-2)


class CompressionMLP(nn.Module):
    """The paper's φ (eq. 7): an MLP over a block with an intra-block position embedding, `[..., l, D] -> [..., D]`."""

    nsa_range = "nsa.cmp"

    def __init__(self, block_size: int, head_dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 2 * head_dim
        self.position = nn.Parameter(torch.randn(block_size, head_dim) * 0.02)
        self.up = nn.Linear(block_size * head_dim, hidden, bias=False)
        self.down = nn.Linear(hidden, head_dim, bias=False)

    def forward(self, block: Tensor) -> Tensor:
        return self.down(F.silu(self.up((block + self.position).flatten(-2))))


def nsa_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    *,
    pattern: SparsePattern,
    phi: str | Phi | tuple[Phi, Phi] = "mean",
    q_cmp: Tensor | None = None,
    branches: Sequence[str] = BRANCHES,
    selection: Tensor | None = None,
    return_selection: bool = False,
) -> Any:
    """NSA over a sequence: `decode_step`, looped. No projection and no RoPE happen here.

    Args:
        q: `[B, S, Hq, D]`.
        k_cmp: `[B, S, G, D]`, the keys of the compressed branch.
        v_cmp: `[B, S, G, Dv]`, its values.
        k_slc: keys of the selected branch.
        v_slc: its values.
        k_win: keys of the window branch; None, as `v_win`, lets it read those of the selected one.
        v_win: its values.
        gates: `[B, S, Hq, 3]`, already activated, in the order compressed, selected, window; of fewer `branches`, one
            column for each.
        pattern: block sizes, number of blocks and window.
        phi: `"mean"`, a module `[B, G, l, D] -> [B, G, D]` for keys and values alike, or a pair of them.
        q_cmp: `[B, S, Hq, D]`, the query of the compressed branch where it differs from `q`.
        branches: those that are there, in this order; `"selected"` needs `"compressed"`.
        selection: `[B, S, G, n]` int32 or int64, the blocks that each token reads, instead of those that it would rank
            best. A number that is no block's, such as -1, stands for none; one that comes twice counts once. A block
            after the token's own gives it nothing.
        return_selection: return the blocks that each token read, too, in this form.

    Returns:
        `[B, S, Hq, Dv]`, or with `return_selection` a pair of it and `[B, S, G, n]` int32, the best block first, -1
        where there are fewer than n.

    Raises:
        ValueError: shapes that do not fit together, S = 0, an unknown `phi`, `branches` that cannot be, or a selection
            of another shape or dtype, or where no branch selects.
    """
    keys_and_values = (k_cmp, v_cmp, k_slc, v_slc, k_win, v_win)
    _, output = _over_tokens(
        q, keys_and_values, gates, pattern, phi, q_cmp, branches, _only_sum, selection, return_selection
    )
    return output if return_selection else output[0]


def nsa_prefill(*, lengths: Tensor, max_len: int, k_cmp: Tensor, v_cmp: Tensor, **inputs: Any) -> tuple[Any, ...]:
    """The state after the first `lengths` `[B]` tokens of each sequence, with room for `max_len`, and `nsa_attention`.

    What the caches hold of later tokens is written by the step that reads it first. The last l keys are those before
    each sequence's own end.
    """
    given = _given(k_cmp=k_cmp, v_cmp=v_cmp, **inputs)
    state, output = _over_tokens(read=_only_sum, max_len=max_len, **given)
    size = state.recent_k.shape[1]
    row = lengths[:, None] - size + torch.arange(size, device=lengths.device)  # [B, l]
    before = (row < 0)[..., None, None]
    row = row.clamp(min=0)[..., None, None]
    recent_k, recent_v = (torch.take_along_dim(x, row, dim=1).masked_fill(before, 0) for x in (k_cmp, v_cmp))
    caches = {name: getattr(state, name) for name in ("k_slc", "v_slc", "k_win", "v_win")}
    laid_out: dict[str, Any] = {name: None if x is None else group_after_group(x) for name, x in caches.items()}
    return state._replace(recent_k=recent_k, recent_v=recent_v, **laid_out), *output


def observed_nsa_attention(**inputs: Any) -> tuple[Tensor, Tensor]:
    """`nsa_attention`, and what each branch gave to it, times its gate: `[B, S, Hq, branches, Dv]`."""

    def both(gated: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return _sum_of(gated, dtype), torch.stack(gated, dim=-2).flatten(1, 2)

    _, (output, gated) = _over_tokens(read=both, **_given(**inputs))
    return output, gated


def _given(**inputs: Any) -> dict[str, Any]:
    """The arguments of `nsa_attention`, by name, as `_over_tokens` takes them."""
    defaults = {"phi": "mean", "q_cmp": None, "branches": BRANCHES, "selection": None, "return_selection": False}
    inputs = {**defaults, **inputs}
    names = ("k_cmp", "v_cmp", "k_slc", "v_slc", "k_win", "v_win")
    return {"keys_and_values": tuple([inputs.pop(name) for name in names]), **inputs}


def _over_tokens(
    q: Tensor,
    keys_and_values: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    gates: Tensor,
    pattern: SparsePattern,
    phi: str | Phi | tuple[Phi, Phi],
    q_cmp: Tensor | None,
    branches: Sequence[str],
    read: Callable[[list[Tensor], torch.dtype], tuple[Tensor, ...]],
    selection: Tensor | None,
    return_selection: bool,
    max_len: int | None = None,
) -> tuple[NSAState, tuple[Tensor, ...]]:
    """The state after the last token, with room for `max_len`, and what `read` makes of the gated branches of each
    token, then its selection if asked for, as `[B, S, ...]`."""
    ordered = ordered_branches(branches)
    if tuple(branches) != ordered:
        raise ValueError(f"branches = {list(branches)!r} must be {list(ordered)!r}, the order of the columns of gates")
    branches = ordered
    _check_shapes(q, *keys_and_values, gates, len(branches))
    if selection is not None or return_selection:
        check_selecting("selected" in branches)
    if selection is not None:
        check_selection(selection, [*q.shape[:2], keys_and_values[2].shape[2]])
    k_cmp, v_cmp, *_, k_win, _ = keys_and_values
    batch, length = q.shape[:2]
    phi_k, phi_v = _resolve_phi(phi)
    room = length if max_len is None else max_len
    state = init_state(batch, room, k_cmp, v_cmp, pattern=pattern, shared_kv=k_win is None)
    rows = NSAToken(
        torch.arange(length, device=q.device),
        *(  # pyrefly: ignore[bad-argument-type]
            None if x is None else x.transpose(0, 1)
            for x in (q, q if q_cmp is None else q_cmp, *keys_and_values, gates, selection)
        ),
    )

    def step(state: NSAState, token: NSAToken) -> tuple[NSAState, Any]:
        state, gated, chosen = _gated_branches(state, token, pattern, phi_k, phi_v, branches)
        selected = (_filled_up(chosen, pattern),) if return_selection else ()
        return state, (*read(gated, token.q.dtype), *selected)

    state, outputs = scan(step, state, rows)
    return state, tuple(x.transpose(0, 1) for x in outputs)


def _resolve_phi(phi: str | Phi | tuple[Phi, Phi]) -> tuple[Phi, Phi]:
    if isinstance(phi, tuple):
        return phi
    if phi == "mean":
        return mean_phi, mean_phi
    if isinstance(phi, str):
        raise ValueError(f'phi is {phi!r}; it must be "mean", a module, or a pair of modules for keys and values')
    return phi, phi


def _check_shapes(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_slc: Tensor,
    v_slc: Tensor,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor,
    branches: int,
) -> None:
    if q.dim() != 4:
        raise ValueError(f"q has shape {list(q.shape)}; it must be [B, S, Hq, D]")
    batch, length, heads, dim = q.shape
    if length == 0:
        raise ValueError("q holds a sequence of length 0; attention needs at least one token")
    if (k_win is None) != (v_win is None):
        raise ValueError("k_win and v_win must both be given, or both be None to share the selected branch's")
    groups, value_dim = k_slc.shape[-2], v_slc.shape[-1]
    keys = {"k_cmp": k_cmp, "k_slc": k_slc, "k_win": k_win}
    values = {"v_cmp": v_cmp, "v_slc": v_slc, "v_win": v_win}
    for names, last in ((keys, dim), (values, value_dim)):
        for name, x in names.items():
            if x is not None and x.shape != (batch, length, groups, last):
                raise ValueError(
                    f"{name} has shape {list(x.shape)}; with this q it must be {[batch, length, groups, last]}"
                )
    if groups == 0 or heads % groups:
        raise ValueError(f"q has {heads} heads, k_slc has {groups}; the query heads must be a multiple of the groups")
    expected = [batch, length, heads, branches]
    if list(gates.shape) != expected:
        raise ValueError(f"gates has shape {list(gates.shape)}; with this q it must be {expected}")


def check_selecting(selects: bool) -> None:
    """Refuse to replay or to return a selection where nothing selects."""
    if not selects:
        raise ValueError("selection and return_selection need the selected branch, which this attention does not have")


def check_selection(selection: Tensor, rows: list[int]) -> None:
    """Refuse a selection that is not `[*rows, n]` integers."""
    if selection.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"selection has dtype {selection.dtype}; it must be torch.int32 or torch.int64, numbers of blocks and -1"
        )
    if list(selection.shape[:-1]) != rows or selection.dim() != len(rows) + 1 or not selection.shape[-1]:
        raise ValueError(f"selection has shape {list(selection.shape)}; here it must be {rows} and n, 1 or more")
