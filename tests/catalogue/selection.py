"""Attention to rows chosen by data: MoBA, DSA, NSA, Quest, MSA, InfLLM-v2, compressed entries.

A choice is not differentiated, but weights by which people train an indexer are.
"""

import torch
import torch.nn.functional as F

import nsa_compile
from tests.catalogue.catalogue import empty, over_cache, over_time, program, score, weigh, write

INF = float("inf")


def _chosen(index, length):
    """A bool mask `[..., length]` of the rows in `index [..., n]`."""
    return torch.zeros(*index.shape[:-1], length, dtype=torch.bool).scatter(-1, index, True)


def _rows(cache, index):
    """Rows `index [B, H, n]` of `cache [B, H, S, D]`."""
    return cache.gather(2, index[..., None].expand(-1, -1, -1, cache.shape[-1]))


def _rows_of_blocks(index, block):
    """Positions `[B, H, n * block]` of the rows of blocks `index [B, H, n]`."""
    return (index[..., None] * block + torch.arange(block)).flatten(-2)


def _block_means(x, block):
    """Means `[B, H, S / block, D]` of blocks of rows of `x [B, H, S, D]`."""
    return x.unflatten(2, (-1, block)).mean(3)


# MoBA: the token's own block and the best of the blocks before it, by the means of their keys, for each head.


def _moba_scores(z, t, q, K):
    """Scores of blocks `[B, H, S / block]`: +inf for the token's own, -inf for later ones."""
    blocks = torch.arange(z.S // z.block)
    scores = torch.einsum("bhd,bhnd->bhn", q, _block_means(K, z.block))
    scores = scores.masked_fill(blocks > t // z.block, -INF)
    return scores.masked_fill(blocks == t // z.block, INF)


@program("moba", "topk, a scattered mask, masked_fill(-inf)")
def moba_by_mask(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        index = _moba_scores(z, t, q, K).topk(z.top, -1).indices
        mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
        return weigh(score(q, K).masked_fill(~mask, -INF).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("moba", "stable sort of detached scores, masked_fill(finfo.min), masked weights set to zero")
def moba_by_finite_mask(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        best, index = _moba_scores(z, t, q, K).detach().sort(dim=-1, descending=True, stable=True)
        mask = torch.zeros(best.shape, dtype=torch.bool).scatter(-1, index[..., : z.top], best[..., : z.top] > -INF)
        mask = mask.repeat_interleave(z.block, -1) & (positions <= t)
        s = score(q, K).masked_fill(~mask, torch.finfo(q.dtype).min)
        return weigh(s.softmax(-1).masked_fill(~mask, 0.0), V)

    return over_cache(z, attend, q, k, v)


@program("moba", "topk, an additive mask of -inf")
def moba_by_bias(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        index = _moba_scores(z, t, q, K).topk(z.top, -1).indices
        bias = torch.full((z.B, z.H, z.S // z.block), -INF, dtype=q.dtype).scatter(-1, index, 0.0)
        bias = bias.repeat_interleave(z.block, -1).masked_fill(positions > t, -INF)
        return weigh((score(q, K) + bias).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("moba", "topk, rows of the chosen blocks gathered")
def moba_by_gather(z, q, k, v):
    def attend(t, q, K, V):
        rows = _rows_of_blocks(_moba_scores(z, t, q, K).topk(z.top, -1).indices, z.block)
        s = score(q, _rows(K, rows)).masked_fill(rows > t, -INF)
        return weigh(s.softmax(-1), _rows(V, rows))

    return over_cache(z, attend, q, k, v)


@program("moba", "topk, whole blocks gathered from [B, H, n, block, D]")
def moba_by_gather_of_blocks(z, q, k, v):
    def blocks(x, index):
        x = x.unflatten(2, (-1, z.block))
        index = index[..., None, None].expand(-1, -1, -1, z.block, z.D)
        return x.gather(2, index).flatten(2, 3)

    def attend(t, q, K, V):
        index = _moba_scores(z, t, q, K).topk(z.top, -1).indices
        s = score(q, blocks(K, index)).masked_fill(_rows_of_blocks(index, z.block) > t, -INF)
        return weigh(s.softmax(-1), blocks(V, index))

    return over_cache(z, attend, q, k, v)


@program("moba", "blocks not below the n-th best score, no scatter")
def moba_by_threshold(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        scores = _moba_scores(z, t, q, K)
        mask = (scores >= scores.topk(z.top, -1).values[..., -1:]).repeat_interleave(z.block, -1)
        return weigh(score(q, K).masked_fill(~(mask & (positions <= t)), -INF).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("moba", "one_hot of the indices, summed")
def moba_by_one_hot(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        index = _moba_scores(z, t, q, K).topk(z.top, -1).indices
        mask = F.one_hot(index, z.S // z.block).sum(-2).bool().repeat_interleave(z.block, -1)
        return weigh(score(q, K).masked_fill(~(mask & (positions <= t)), -INF).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("moba", "chosen blocks compared with each position: (positions // block == index).any()")
def moba_by_comparison(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        index = _moba_scores(z, t, q, K).topk(z.top, -1).indices
        mask = (index[..., None] == positions // z.block).any(-2) & (positions <= t)
        return weigh(score(q, K).masked_fill(~mask, -INF).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("moba", "F.scaled_dot_product_attention, the bool mask")
def moba_by_sdpa(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        index = _moba_scores(z, t, q, K).topk(z.top, -1).indices
        mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
        return F.scaled_dot_product_attention(q[:, :, None], K, V, attn_mask=mask[:, :, None])[:, :, 0]

    return over_cache(z, attend, q, k, v)


def _moba_by_running_means(add):
    """`add(means, block, row)` gives the means of blocks with one more row of a block."""

    def run(z, q, k, v):
        positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

        def step(state, token):
            t, q, k, v = token
            means, K, V = state
            means = add(means, t // z.block, k / z.block)
            K, V = write(K, t, k), write(V, t, v)
            scores = torch.einsum("bhd,bhnd->bhn", q, means).masked_fill(blocks > t // z.block, -INF)
            index = scores.masked_fill(blocks == t // z.block, INF).topk(z.top, -1).indices
            mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
            return (means, K, V), weigh(score(q, K).masked_fill(~mask, -INF).softmax(-1), V)

        means = k.new_zeros(z.B, z.H, z.S // z.block, z.D)
        return over_time(step, (means, empty(z, k), empty(z, v)), q, k, v)

    return run


@program("moba", "sums of the keys of each block are a carry to which each step adds")
def moba_with_running_means(z, q, k, v):
    def add(means, block, row):
        return means + (torch.arange(means.shape[2]) == block).to(row.dtype)[:, None] * row[:, :, None]

    return _moba_by_running_means(add)(z, q, k, v)


@program("moba", "means = means.clone(); means[:, :, t // block] += k / block")
def moba_with_means_in_place(z, q, k, v):
    def add(means, block, row):
        means = means.clone()
        means[:, :, block] += row
        return means

    return _moba_by_running_means(add)(z, q, k, v)


@program("moba", "running means by index_add")
def moba_with_means_by_index_add(z, q, k, v):
    return _moba_by_running_means(lambda means, block, row: means.index_add(2, block.view(1), row[:, :, None]))(
        z, q, k, v
    )


@program("moba", "running means by where(blocks == t // block, means + k / block, means)")
def moba_with_means_by_where(z, q, k, v):
    def add(means, block, row):
        at = (torch.arange(means.shape[2]) == block)[:, None]
        return torch.where(at, means + row[:, :, None], means)

    return _moba_by_running_means(add)(z, q, k, v)


@program("moba", "caches in blocks [B, H, n, block, D]: K[:, :, t // block, t % block] = k")
def moba_in_blocks(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K, V = cache[0].clone(), cache[1].clone()
        K[:, :, t // z.block, t % z.block], V[:, :, t // z.block, t % z.block] = k, v
        index = _moba_scores(z, t, q, K.flatten(2, 3)).topk(z.top, -1).indices
        mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
        s = score(q, K.flatten(2, 3)).masked_fill(~mask, -INF)
        return (K, V), weigh(s.softmax(-1), V.flatten(2, 3))

    cache = k.new_zeros(z.B, z.H, z.S // z.block, z.block, z.D)
    return over_time(step, (cache, cache), q, k, v)


@program("moba_of_a_group", "one set for the heads that share keys: scores summed over them")
def moba_of_a_group(z, q, kg, vg):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

    def attend(t, q, K, V):
        q = q.unflatten(1, (z.G, -1))
        scores = torch.einsum("bgrd,bgnd->bgn", q, _block_means(K, z.block))
        scores = scores.masked_fill(blocks > t // z.block, -INF).masked_fill(blocks == t // z.block, INF)
        mask = _chosen(scores.topk(z.top, -1).indices, z.S // z.block).repeat_interleave(z.block, -1)
        s = torch.einsum("bgrd,bgsd->bgrs", q, K) * z.D**-0.5
        s = s.masked_fill(~(mask & (positions <= t))[:, :, None], -INF)
        return torch.einsum("bgrs,bgsd->bgrd", s.softmax(-1), V).flatten(1, 2)

    return over_cache(z, attend, q, kg, vg)


@program("moba_of_heads_in_a_group", "a set for each head of a group that shares keys")
def moba_of_heads_in_a_group(z, q, kg, vg):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        K, V = K.repeat_interleave(z.H // z.G, 1), V.repeat_interleave(z.H // z.G, 1)
        index = _moba_scores(z, t, q, K).topk(z.top, -1).indices
        mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
        return weigh(score(q, K).masked_fill(~mask, -INF).softmax(-1), V)

    return over_cache(z, attend, q, kg, vg)


# DSA: single tokens, the best by a lightning indexer, one set for all heads.


def _index_scores(t, q_index, w_index, K_index):
    """The indexer's scores `[B, S]`: weighted sums of relu(products) over its heads."""
    products = torch.einsum("bir,bsr->bis", q_index, K_index).relu()
    return torch.einsum("bis,bi->bs", products, w_index)


def _dsa(z, q, k, v, q_index, k_index, w_index, attend):
    """A scan whose step is `attend(t, q, K, V, scores)` with the indexer's scores, -inf for later tokens."""
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, q_index, k_index, w_index = token
        K, V, K_index = (write(c, t, row) for c, row in zip(cache, (k, v, k_index), strict=True))
        scores = _index_scores(t, q_index, w_index, K_index).masked_fill(positions > t, -INF)
        return (K, V, K_index), attend(t, q, K, V, scores)

    cache = empty(z, k), empty(z, v), k_index.new_zeros(z.B, z.S, k_index.shape[-1])
    return over_time(step, cache, q, k, v, q_index, k_index, w_index)


@program("dsa", "topk, a scattered mask, masked_fill(-inf)")
def dsa_by_mask(z, q, k, v, q_index, k_index, w_index):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, scores):
        mask = _chosen(scores.topk(z.tokens, -1).indices, z.S) & (positions <= t)
        return weigh(score(q, K).masked_fill(~mask[:, None], -INF).softmax(-1), V)

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa", "an additive mask, full(-inf).scatter(0), as in DeepSeek's inference code")
def dsa_by_bias(z, q, k, v, q_index, k_index, w_index):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, scores):
        index = scores.topk(z.tokens, -1).indices
        bias = torch.full((z.B, z.S), -INF, dtype=q.dtype).scatter(-1, index, 0.0)
        bias = bias + torch.zeros(z.S, dtype=q.dtype).masked_fill(positions > t, -INF)
        return weigh((score(q, K) + bias[:, None]).softmax(-1), V)

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa", "masked_fill(finfo.min) and masked weights set to zero")
def dsa_by_finite_mask(z, q, k, v, q_index, k_index, w_index):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, scores):
        best, index = scores.detach().sort(dim=-1, descending=True, stable=True)
        kept = best[:, : z.tokens] > -INF
        mask = torch.zeros(z.B, z.S, dtype=torch.bool).scatter(-1, index[:, : z.tokens], kept)
        mask = (mask & (positions <= t))[:, None]
        s = score(q, K).masked_fill(~mask, torch.finfo(q.dtype).min)
        return weigh(s.softmax(-1).masked_fill(~mask, 0.0), V)

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa", "topk, rows gathered")
def dsa_by_gather(z, q, k, v, q_index, k_index, w_index):
    def attend(t, q, K, V, scores):
        rows = scores.topk(z.tokens, -1).indices[:, None].expand(-1, z.H, -1)
        s = score(q, _rows(K, rows)).masked_fill(rows > t, -INF)
        return weigh(s.softmax(-1), _rows(V, rows))

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa", "topk, K[batch, :, index] with tensors as indices")
def dsa_by_index(z, q, k, v, q_index, k_index, w_index):
    batch = torch.arange(z.B)[:, None]

    def attend(t, q, K, V, scores):
        rows = scores.topk(z.tokens, -1).indices
        K, V = K[batch, :, rows].transpose(1, 2), V[batch, :, rows].transpose(1, 2)
        s = score(q, K).masked_fill((rows > t)[:, None], -INF)
        return weigh(s.softmax(-1), V)

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa", "tokens not below the n-th best score")
def dsa_by_threshold(z, q, k, v, q_index, k_index, w_index):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, scores):
        kth = scores.topk(z.tokens, -1).values[:, -1:]
        mask = (scores >= kth) & (positions <= t)
        return weigh(score(q, K).masked_fill(~mask[:, None], -INF).softmax(-1), V)

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa", "topk, rows gathered, hidden where the gathered score is -inf")
def dsa_by_values(z, q, k, v, q_index, k_index, w_index):
    def attend(t, q, K, V, scores):
        best, index = scores.topk(z.tokens, -1)
        rows = index[:, None].expand(-1, z.H, -1)
        s = score(q, _rows(K, rows)).masked_fill((best == -INF)[:, None], -INF)
        return weigh(s.softmax(-1), _rows(V, rows))

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa_with_index_weights", "chosen scores of the indexer are added, so that it is trained")
def dsa_with_scores_added(z, q, k, v, q_index, k_index, w_index):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, scores):
        mask = _chosen(scores.detach().topk(z.tokens, -1).indices, z.S) & (positions <= t)
        s = score(q, K) + scores.masked_fill(~mask, 0.0)[:, None]
        return weigh(s.masked_fill(~mask[:, None], -INF).softmax(-1), V)

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa_with_loss", "the indexer's KL divergence is a second output")
def dsa_with_loss(z, q, k, v, q_index, k_index, w_index):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, scores):
        mask = _chosen(scores.detach().topk(z.tokens, -1).indices, z.S) & (positions <= t)
        weights = score(q, K).masked_fill(~mask[:, None], -INF).softmax(-1)
        target = weights.mean(1).detach()
        own = scores.masked_fill(~mask, -INF).log_softmax(-1).masked_fill(~mask, 0.0)
        loss = -(target * own).sum(-1)
        return torch.cat([weigh(weights, V).flatten(1), loss[:, None]], -1)

    return _dsa(z, q, k, v, q_index, k_index, w_index, attend)


@program("dsa_per_group", "an index query and a set for each group")
def dsa_per_group(z, q, kg, vg, q_index_group, k_index):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, q_index, k_index = token
        K, V, K_index = (write(c, t, row) for c, row in zip(cache, (k, v, k_index), strict=True))
        scores = torch.einsum("bgr,bsr->bgs", q_index, K_index).relu().masked_fill(positions > t, -INF)
        mask = _chosen(scores.topk(z.tokens, -1).indices, z.S) & (positions <= t)
        s = torch.einsum("bgrd,bgsd->bgrs", q.unflatten(1, (z.G, -1)), K) * z.D**-0.5
        weights = s.masked_fill(~mask[:, :, None], -INF).softmax(-1)
        return (K, V, K_index), torch.einsum("bgrs,bgsd->bgrd", weights, V).flatten(1, 2)

    cache = empty(z, kg), empty(z, vg), k_index.new_zeros(z.B, z.S, k_index.shape[-1])
    return over_time(step, cache, q, kg, vg, q_index_group, k_index)


@program("top_tokens_per_head", "the best scores of attention itself, for each head")
def top_tokens_by_threshold(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -INF)
        kth = s.topk(z.tokens, -1).values[..., -1:]
        return weigh(s.masked_fill(s < kth, -INF).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("top_tokens_per_head", "topk of the scores, softmax of the values, rows gathered")
def top_tokens_by_gather(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        best, rows = score(q, K).masked_fill(positions > t, -INF).topk(z.tokens, -1)
        return weigh(best.softmax(-1), _rows(V, rows))

    return over_cache(z, attend, q, k, v)


@program("top_tokens_per_head", "topk, a scattered mask")
def top_tokens_by_mask(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -INF)
        mask = _chosen(s.topk(z.tokens, -1).indices, z.S)
        return weigh(s.masked_fill(~mask, -INF).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


# NSA: compressed blocks, the blocks that weigh most among them, a window; three gates.


def _three(z, gates, *branches):
    return sum(gates[..., i : i + 1] * y for i, y in enumerate(branches))


def _grouped(q, K):
    """Scaled products `[B, G, R, n]` of grouped heads `q [B, G, R, D]` with `K [B, G, n, D]`."""
    return torch.einsum("bgrd,bgnd->bgrn", q, K) * q.shape[-1] ** -0.5


def _heads(weights, V):
    return torch.einsum("bgrn,bgnd->bgrd", weights, V).flatten(1, 2)


def _compressed(z, t, q, K, V):
    """Attention to means of complete blocks: outputs and weights, zero where no block is complete yet."""
    complete = (torch.arange(z.S // z.block) + 1) * z.block - 1 <= t
    s = _grouped(q, _block_means(K, z.block)).masked_fill(~complete, torch.finfo(q.dtype).min)
    weights = s.softmax(-1).masked_fill(~complete, 0.0)
    return _heads(weights, _block_means(V, z.block)), weights


def _importance(z, t, weights):
    """Scores `[B, G, S / block]` of blocks: +inf for the own one, -inf for later ones."""
    blocks = torch.arange(z.S // z.block)
    scores = weights.sum(2).masked_fill(blocks > t // z.block, -INF)
    return scores.masked_fill(blocks == t // z.block, INF)


def _windowed(z, t, q, K, V):
    positions = torch.arange(z.S)
    hidden = (positions > t) | (positions <= t - z.window)
    return _heads(_grouped(q, K).masked_fill(hidden, -INF).softmax(-1), V)


@program("nsa", "as this package writes it: finite fills, weights set to zero, a stable sort")
def nsa_by_finite_mask(z, q, kg, vg, gates):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, gates):
        q = q.unflatten(1, (z.G, -1))
        coarse, weights = _compressed(z, t, q, K, V)
        best, index = _importance(z, t, weights).detach().sort(dim=-1, descending=True, stable=True)
        mask = torch.zeros(best.shape, dtype=torch.bool).scatter(-1, index[..., : z.top], best[..., : z.top] > -INF)
        mask = (mask.repeat_interleave(z.block, -1) & (positions <= t))[:, :, None]
        fine = _grouped(q, K).masked_fill(~mask, torch.finfo(q.dtype).min).softmax(-1).masked_fill(~mask, 0.0)
        return _three(z, gates, coarse, _heads(fine, V), _windowed(z, t, q, K, V))

    return over_cache(z, attend, q, kg, vg, gates)


@program("nsa", "as most write it: topk, masked_fill(-inf).softmax")
def nsa_by_mask(z, q, kg, vg, gates):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, gates):
        q = q.unflatten(1, (z.G, -1))
        complete = (torch.arange(z.S // z.block) + 1) * z.block - 1 <= t
        s = _grouped(q, _block_means(K, z.block)).masked_fill(~complete, -INF)
        weights = s.softmax(-1).nan_to_num(0.0)
        coarse = _heads(weights, _block_means(V, z.block))
        mask = _chosen(_importance(z, t, weights).topk(z.top, -1).indices, z.S // z.block)
        mask = mask.repeat_interleave(z.block, -1) & (positions <= t)
        fine = _grouped(q, K).masked_fill(~mask[:, :, None], -INF).softmax(-1)
        return _three(z, gates, coarse, _heads(fine, V), _windowed(z, t, q, K, V))

    return over_cache(z, attend, q, kg, vg, gates)


@program("nsa", "lucidrains: blocks gathered by topk, fine attention to them")
def nsa_by_gather(z, q, kg, vg, gates):
    def blocks(x, index):
        x = x.unflatten(2, (-1, z.block))
        return x.gather(2, index[..., None, None].expand(-1, -1, -1, z.block, z.D)).flatten(2, 3)

    def attend(t, q, K, V, gates):
        q = q.unflatten(1, (z.G, -1))
        coarse, weights = _compressed(z, t, q, K, V)
        index = _importance(z, t, weights).topk(z.top, -1).indices
        hidden = (_rows_of_blocks(index, z.block) > t)[:, :, None]
        fine = _grouped(q, blocks(K, index)).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1)
        return _three(z, gates, coarse, _heads(fine, blocks(V, index)), _windowed(z, t, q, K, V))

    return over_cache(z, attend, q, kg, vg, gates)


@program("nsa", "fla's naive_nsa: positions of chosen blocks, rows gathered, masked_fill(i > t, -inf)")
def nsa_by_gather_of_rows(z, q, kg, vg, gates):
    def attend(t, q, K, V, gates):
        q = q.unflatten(1, (z.G, -1))
        coarse, weights = _compressed(z, t, q, K, V)
        index = _importance(z, t, weights).topk(z.top, -1).indices
        rows = _rows_of_blocks(index, z.block)
        s = _grouped(q, _rows(K, rows.clamp(0, z.S - 1))).masked_fill((rows > t)[:, :, None], -INF)
        fine = _heads(s.softmax(-1), _rows(V, rows.clamp(0, z.S - 1)))
        return _three(z, gates, coarse, fine, _windowed(z, t, q, K, V))

    return over_cache(z, attend, q, kg, vg, gates)


@program("nsa", "Xunhao Lai: blocks of topk compared with each block, then expanded")
def nsa_by_comparison(z, q, kg, vg, gates):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

    def attend(t, q, K, V, gates):
        q = q.unflatten(1, (z.G, -1))
        coarse, weights = _compressed(z, t, q, K, V)
        index = _importance(z, t, weights).topk(z.top, -1).indices.sort(-1).values
        mask = (index[..., None] == blocks).any(-2).repeat_interleave(z.block, -1) & (positions <= t)
        fine = _grouped(q, K).masked_fill(~mask[:, :, None], -INF).softmax(-1)
        return _three(z, gates, coarse, _heads(fine, V), _windowed(z, t, q, K, V))

    return over_cache(z, attend, q, kg, vg, gates)


@program("nsa", "three F.scaled_dot_product_attention under bool masks, the compressed one padded with a zero row")
def nsa_by_sdpa(z, q, kg, vg, gates):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

    def sdpa(q, K, V, mask):
        return F.scaled_dot_product_attention(q, K, V, attn_mask=mask, enable_gqa=True)[:, :, 0]

    def attend(t, q, K, V, gates):
        heads = q[:, :, None]
        _, weights = _compressed(z, t, q.unflatten(1, (z.G, -1)), K, V)
        coarse = _heads(weights, _block_means(V, z.block))
        mask = _chosen(_importance(z, t, weights).topk(z.top, -1).indices, len(blocks))
        mask = (mask.repeat_interleave(z.block, -1) & (positions <= t)).repeat_interleave(z.H // z.G, 1)
        window = ((positions <= t) & (positions > t - z.window))[None]
        return _three(z, gates, coarse, sdpa(heads, K, V, mask[:, :, None]), sdpa(heads, K, V, window))

    return over_cache(z, attend, q, kg, vg, gates)


@program("selected_and_window", "chosen blocks and a window in one softmax, one mask")
def selected_and_window(z, q, kg, vg):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        q = q.unflatten(1, (z.G, -1))
        _, weights = _compressed(z, t, q, K, V)
        mask = _chosen(_importance(z, t, weights).topk(z.top, -1).indices, z.S // z.block)
        mask = (mask.repeat_interleave(z.block, -1) | (positions > t - z.window)) & (positions <= t)
        return _heads(_grouped(q, K).masked_fill(~mask[:, :, None], -INF).softmax(-1), V)

    return over_cache(z, attend, q, kg, vg)


# Quest: pages ranked by an upper bound of their scores, from the minima and maxima of their keys.


def _quest_mask(z, t, q, low, high):
    """The pages of each head: the token's own, and those with the highest bounds before it."""
    pages = torch.arange(z.S // z.block)
    bound = torch.maximum(q[:, :, None] * low, q[:, :, None] * high).sum(-1)
    bound = bound.masked_fill(pages > t // z.block, -INF).masked_fill(pages == t // z.block, INF)
    return bound.topk(z.top, -1).indices


@program("quest", "amin and amax of the pages of the cache, a mask")
def quest_by_mask(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        pages = K.unflatten(2, (-1, z.block))
        index = _quest_mask(z, t, q, pages.amin(3), pages.amax(3))
        mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
        return weigh(score(q, K).masked_fill(~mask, -INF).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("quest", "amin and amax of the pages, rows gathered")
def quest_by_gather(z, q, k, v):
    def attend(t, q, K, V):
        pages = K.unflatten(2, (-1, z.block))
        rows = _rows_of_blocks(_quest_mask(z, t, q, pages.amin(3), pages.amax(3)), z.block)
        s = score(q, _rows(K, rows)).masked_fill(rows > t, -INF)
        return weigh(s.softmax(-1), _rows(V, rows))

    return over_cache(z, attend, q, k, v)


@program("quest_running", "minima and maxima of each page are carries")
def quest_with_running_bounds(z, q, k, v):
    positions, pages = torch.arange(z.S), torch.arange(z.S // z.block)

    def step(state, token):
        t, q, k, v = token
        low, high, K, V = state
        here = (pages == t // z.block)[:, None]
        low = torch.where(here, torch.minimum(low, k[:, :, None]), low)
        high = torch.where(here, torch.maximum(high, k[:, :, None]), high)
        K, V = write(K, t, k), write(V, t, v)
        index = _quest_mask(z, t, q, low, high)
        mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
        return (low, high, K, V), weigh(score(q, K).masked_fill(~mask, -INF).softmax(-1), V)

    bounds = k.new_full((z.B, z.H, z.S // z.block, z.D), 1e4)
    return over_time(step, (bounds, -bounds, empty(z, k), empty(z, v)), q, k, v)


# The rest of the family.


@program("msa", "blocks ranked by the highest score of their keys in any head of the group")
def best_key_of_a_block(z, q, kg, vg):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

    def attend(t, q, K, V):
        s = _grouped(q.unflatten(1, (z.G, -1)), K).masked_fill(positions > t, -INF)
        best = s.amax(2).unflatten(-1, (-1, z.block)).amax(-1)  # [B, G, S / block]
        best = best.masked_fill(blocks == t // z.block, INF)
        mask = _chosen(best.topk(z.top, -1).indices, len(blocks)).repeat_interleave(z.block, -1)[:, :, None]
        return _heads(s.masked_fill(~mask, -INF).softmax(-1), V)

    return over_cache(z, attend, q, kg, vg)


@program("msa_with_index", "blocks ranked by the highest product with an index query of the group, -1e9")
def best_index_key_of_a_block(z, q, kg, vg, q_index_group, k_index):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

    def step(cache, token):
        t, q, k, v, q_index, k_index = token
        K, V, K_index = (write(c, t, row) for c, row in zip(cache, (k, v, k_index), strict=True))
        s = torch.einsum("bgr,bsr->bgs", q_index, K_index).masked_fill(positions > t, -1e9)
        best = s.unflatten(-1, (-1, z.block)).amax(-1).masked_fill(blocks == t // z.block, 1e9)
        mask = _chosen(best.topk(z.top, -1).indices, len(blocks)).repeat_interleave(z.block, -1)
        mask = (mask & (positions <= t))[:, :, None]
        s = _grouped(q.unflatten(1, (z.G, -1)), K).masked_fill(~mask, -1e9)
        return (K, V, K_index), _heads(s.softmax(-1), V)

    cache = empty(z, kg), empty(z, vg), k_index.new_zeros(z.B, z.S, k_index.shape[-1])
    return over_time(step, cache, q, kg, vg, q_index_group, k_index)


@program("qsa", "blocks ranked by index heads of each group on pooled index keys, relu and mean")
def pooled_index_keys(z, q, kg, vg, q_index_group, k_index):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

    def step(cache, token):
        t, q, k, v, q_index, k_index = token
        K, V, K_index = (write(c, t, row) for c, row in zip(cache, (k, v, k_index), strict=True))
        written = (positions <= t).unflatten(0, (-1, z.block)).sum(1).clamp(min=1)[:, None]
        pooled = K_index.unflatten(1, (-1, z.block)).sum(2) / written  # the mean of what is written of a block
        s = torch.einsum("bgr,bnr->bgn", q_index, pooled).relu().masked_fill(blocks > t // z.block, -INF)
        s = s.masked_fill((blocks == t // z.block) | (blocks == 0), INF)
        mask = _chosen(s.topk(z.top, -1).indices, len(blocks)).repeat_interleave(z.block, -1)
        mask = (mask & (positions <= t))[:, :, None]
        s = _grouped(q.unflatten(1, (z.G, -1)), K).masked_fill(~mask, -INF)
        return (K, V, K_index), _heads(s.softmax(-1), V)

    cache = empty(z, kg), empty(z, vg), k_index.new_zeros(z.B, z.S, k_index.shape[-1])
    return over_time(step, cache, q, kg, vg, q_index_group, k_index)


@program("infllm", "overlapping means of keys rank blocks by max-pooling; the first block, the own one and the last")
def overlapping_means_max_pooled(z, q, kg, vg):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)
    starts = torch.arange(z.S // z.stride - 1) * z.stride  # 2 * stride keys each

    def attend(t, q, K, V):
        q = q.unflatten(1, (z.G, -1))
        means = K.unfold(2, 2 * z.stride, z.stride).mean(-1)  # [B, G, n, D]
        complete = starts + 2 * z.stride - 1 <= t
        weights = _grouped(q, means).masked_fill(~complete, torch.finfo(q.dtype).min).softmax(-1)
        weights = weights.masked_fill(~complete, 0.0).sum(2)
        per = z.block // z.stride
        best = F.max_pool1d(F.pad(weights, (1, per)), per + 1, per)[..., : len(blocks)]
        best = best.masked_fill(blocks > t // z.block, -INF)
        best = best.masked_fill((blocks == 0) | ((blocks <= t // z.block) & (blocks >= t // z.block - 1)), INF)
        mask = _chosen(best.topk(z.top, -1).indices, len(blocks)).repeat_interleave(z.block, -1)
        s = _grouped(q, K).masked_fill(~(mask & (positions <= t))[:, :, None], -INF)
        return _heads(s.softmax(-1), V)

    return over_cache(z, attend, q, kg, vg)


@program("hca", "all complete compressed entries and a window in one softmax with a sink logit")
def compressed_window_and_sink(z, q, kg, vg, sink):
    positions, blocks = torch.arange(z.S), torch.arange(z.S // z.block)

    def attend(t, q, K, V):
        q = q.unflatten(1, (z.G, -1))
        complete = (blocks + 1) * z.block - 1 <= t
        in_window = (positions <= t) & (positions > t - z.window)
        s = torch.cat(
            [
                _grouped(q, _block_means(K, z.block)).masked_fill(~complete, -INF),
                _grouped(q, K).masked_fill(~in_window, -INF),
                sink.view(1, z.G, -1, 1).expand(z.B, -1, -1, 1),
            ],
            -1,
        )
        return _heads(s.softmax(-1)[..., :-1], torch.cat([_block_means(V, z.block), V], 2))

    return over_cache(z, attend, q, kg, vg)


@program("csa", "the best overlapping compressed entries by an indexer and a window, one softmax, a sink logit")
def best_compressed_window_and_sink(z, q, kg, vg, q_index, k_index, w_index, sink):
    positions = torch.arange(z.S)
    ends = torch.arange(z.S // z.stride - 1) * z.stride + 2 * z.stride - 1

    def entries(x):
        return x.unfold(-2, 2 * z.stride, z.stride).mean(-1)

    def step(cache, token):
        t, q, k, v, q_index, k_index, w_index = token
        K, V, K_index = (write(c, t, row) for c, row in zip(cache, (k, v, k_index), strict=True))
        q = q.unflatten(1, (z.G, -1))
        ranked = _index_scores(t, q_index, w_index, entries(K_index)).masked_fill(ends > t, -INF)
        chosen = (_chosen(ranked.topk(z.top, -1).indices, len(ends)) & (ends <= t))[:, None, None]
        in_window = (positions <= t) & (positions > t - z.window)
        s = torch.cat(
            [
                _grouped(q, entries(K)).masked_fill(~chosen, -INF),
                _grouped(q, K).masked_fill(~in_window, -INF),
                sink.view(1, z.G, -1, 1).expand(z.B, -1, -1, 1),
            ],
            -1,
        )
        return (K, V, K_index), _heads(s.softmax(-1)[..., :-1], torch.cat([entries(V), V], 2))

    cache = empty(z, kg), empty(z, vg), k_index.new_zeros(z.B, z.S, k_index.shape[-1])
    return over_time(step, cache, q, kg, vg, q_index, k_index, w_index)


@program("csa", "as above, compressed entries written to a cache of their own when complete")
def best_compressed_written(z, q, kg, vg, q_index, k_index, w_index, sink):
    positions = torch.arange(z.S)
    n = z.S // z.stride - 1
    ends = torch.arange(n) * z.stride + 2 * z.stride - 1

    def entry(cache, rows, t):
        """The mean of the last 2 * stride rows, written where t ends an entry."""
        last = (positions <= t) & (positions > t - 2 * z.stride)
        mean = (rows * last[:, None]).sum(-2) / (2 * z.stride)
        return torch.where((ends == t)[:, None], mean[..., None, :], cache)

    def step(state, token):
        t, q, k, v, q_index, k_index, w_index = token
        K, V, K_index, K_entries, V_entries, K_index_entries = state
        K, V, K_index = write(K, t, k), write(V, t, v), write(K_index, t, k_index)
        K_entries, V_entries, K_index_entries = (
            entry(K_entries, K, t),
            entry(V_entries, V, t),
            entry(K_index_entries, K_index, t),
        )
        q = q.unflatten(1, (z.G, -1))
        ranked = _index_scores(t, q_index, w_index, K_index_entries).masked_fill(ends > t, -INF)
        chosen = (_chosen(ranked.topk(z.top, -1).indices, n) & (ends <= t))[:, None, None]
        in_window = (positions <= t) & (positions > t - z.window)
        s = torch.cat(
            [
                _grouped(q, K_entries).masked_fill(~chosen, -INF),
                _grouped(q, K).masked_fill(~in_window, -INF),
                sink.view(1, z.G, -1, 1).expand(z.B, -1, -1, 1),
            ],
            -1,
        )
        state = K, V, K_index, K_entries, V_entries, K_index_entries
        return state, _heads(s.softmax(-1)[..., :-1], torch.cat([V_entries, V], 2))

    r = k_index.shape[-1]
    entries = kg.new_zeros(z.B, z.G, n, z.D), vg.new_zeros(z.B, z.G, n, z.D), k_index.new_zeros(z.B, n, r)
    state = empty(z, kg), empty(z, vg), k_index.new_zeros(z.B, z.S, r), *entries
    return over_time(step, state, q, kg, vg, q_index, k_index, w_index)


@program("compressed", "attention to means of complete blocks, and to the token itself")
def complete_blocks_and_self(z, q, k, v):
    blocks = torch.arange(z.S // z.block)

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        complete = (blocks + 1) * z.block - 1 <= t
        means = score(q, _block_means(K, z.block)).masked_fill(~complete, -INF)
        s = torch.cat([means, score(q, k[:, :, None])], -1)
        return (K, V), weigh(s.softmax(-1), torch.cat([_block_means(V, z.block), v[:, :, None]], 2))

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("selection_given", "indices of blocks are inputs, as shared by layers")
def selection_given(z, q, k, v):
    positions = torch.arange(z.S)
    own = positions // z.block
    index = torch.stack([own, (own - 2).clamp(min=0), torch.zeros_like(own)], -1)  # [S, 3]

    def step(cache, token):
        t, q, k, v, index = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        mask = _chosen(index, z.S // z.block).repeat_interleave(z.block, -1) & (positions <= t)
        return (K, V), weigh(score(q, K).masked_fill(~mask, -INF).softmax(-1), V)

    xs = (positions, *(x.transpose(0, 1) for x in (q, k, v)), index)
    return nsa_compile.scan(step, (empty(z, k), empty(z, v)), xs)[1].transpose(0, 1)
