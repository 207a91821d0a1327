"""Causal attention, plain and grouped: mask, softmax, products, cache and position in many spellings."""

import torch
import torch.nn.functional as F

import nsa_compile
from tests.catalogue.catalogue import empty, over_cache, over_time, program, score, weigh, write


@program("causal", "masked_fill(-inf).softmax")
def masked_fill_inf(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "torch.where(mask, scores, -inf)")
def where_inf(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(torch.where(positions <= t, score(q, K), float("-inf")).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "masked_fill(-1e9)")
def fill_minus_1e9(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, -1e9).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "masked_fill(-1e4), as GPT-2 had it")
def fill_minus_1e4(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, -1e4).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "masked_fill(finfo.min)")
def fill_finfo_min(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K)
        return weigh(s.masked_fill(positions > t, torch.finfo(s.dtype).min).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "scores + (1 - mask) * finfo.min, as Hugging Face has it")
def add_finfo_min(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        mask = (positions <= t).to(q.dtype)
        return weigh((score(q, K) + (1.0 - mask) * torch.finfo(q.dtype).min).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "rows of full((S, S), finfo.min).triu(1), added, as Hugging Face has it")
def add_rows_of_finfo_min(z, q, k, v):
    bias = torch.full((z.S, z.S), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)

    def attend(t, q, K, V, bias):
        return weigh((score(q, K) + bias).softmax(-1), V)

    return over_cache(z, attend, q, k, v, bias.expand(z.B, 1, -1, -1).transpose(1, 2))


@program("causal", "rows of a bool tril, masked_fill")
def tril_rows(z, q, k, v):
    mask = torch.ones(z.S, z.S, dtype=torch.bool).tril()

    def step(cache, token):
        t, q, k, v, mask = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        return (K, V), weigh(score(q, K).masked_fill(~mask, -torch.inf).softmax(-1), V)

    xs = (torch.arange(z.S), *(x.transpose(0, 1) for x in (q, k, v)), mask)
    return nsa_compile.scan(step, (empty(z, k), empty(z, v)), xs)[1].transpose(0, 1)


@program("causal", "tril.index_select(0, t) of a table in the step")
def tril_by_index_select(z, q, k, v):
    mask = torch.ones(z.S, z.S, dtype=torch.bool).tril()

    def attend(t, q, K, V):
        row = mask.index_select(0, t.view(1))[0]
        return weigh(score(q, K).masked_fill(~row, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "F.scaled_dot_product_attention, bool mask")
def sdpa_bool(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return F.scaled_dot_product_attention(q[:, :, None], K, V, attn_mask=(positions <= t)[None])[:, :, 0]

    return over_cache(z, attend, q, k, v)


@program("causal", "F.scaled_dot_product_attention, float mask of -inf")
def sdpa_float(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        bias = torch.zeros(1, z.S, dtype=q.dtype).masked_fill(positions > t, -torch.inf)
        return F.scaled_dot_product_attention(q[:, :, None], K, V, attn_mask=bias)[:, :, 0]

    return over_cache(z, attend, q, k, v)


@program("causal", "exp(x - max) / sum")
def exp_over_sum(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -torch.inf)
        e = (s - s.amax(-1, keepdim=True)).exp()
        return weigh(e / e.sum(-1, keepdim=True), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "exp(x - max.detach()) * mask, divided after the values")
def exp_times_mask(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K)
        e = (s - s.max(-1, keepdim=True).values.detach()).exp() * (positions <= t)
        return weigh(e, V) / e.sum(-1, keepdim=True)

    return over_cache(z, attend, q, k, v)


@program("causal", "exp(x - logsumexp(x))")
def exp_minus_logsumexp(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -torch.inf)
        return weigh((s - s.logsumexp(-1, keepdim=True)).exp(), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "log_softmax(x).exp()")
def log_softmax_exp(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, -torch.inf).log_softmax(-1).exp(), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "online softmax over blocks of keys")
def online_softmax(z, q, k, v):
    positions = torch.arange(z.S)
    block = z.S // 4

    def attend(t, q, K, V):
        top = q.new_full((z.B, z.H, 1), torch.finfo(q.dtype).min)
        total, y = q.new_zeros(z.B, z.H, 1), torch.zeros_like(q)
        for start in range(0, z.S, block):
            here = slice(start, start + block)
            s = score(q, K[:, :, here]).masked_fill(positions[here] > t, -torch.inf)
            higher = torch.maximum(top, s.amax(-1, keepdim=True))
            e, scale = (s - higher).exp(), (top - higher).exp()
            total = total * scale + e.sum(-1, keepdim=True)
            y = y * scale + weigh(e, V[:, :, here])
            top = higher
        return y / total

    return over_cache(z, attend, q, k, v)


@program("causal", "a softmax over all keys, masked and normalised again")
def softmax_then_mask(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        weights = score(q, K).softmax(-1) * (positions <= t)
        return weigh(weights / weights.sum(-1, keepdim=True), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "softmax().nan_to_num(0)")
def nan_to_num(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1).nan_to_num(0.0), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "scores.float().softmax(-1).to(q.dtype)", tolerance=1e-5)
def float32_scores(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(score(q, K).float().masked_fill(positions > t, -torch.inf).softmax(-1).to(q.dtype), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "F.softmax(scores, -1, dtype=torch.float32).to(q.dtype)", tolerance=1e-5)
def float32_softmax(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, torch.finfo(torch.float32).min)
        return weigh(F.softmax(s, -1, dtype=torch.float32).to(q.dtype), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "F.dropout(weights, p=0.0)")
def dropout_of_zero(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        weights = score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1)
        return weigh(F.dropout(weights, p=0.0, training=True), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "(q[:, :, None] * scale) @ K.mT, [B, H, 1, S] throughout")
def matmul(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = (q[:, :, None] * z.D**-0.5) @ K.transpose(-2, -1)
        return (s.masked_fill(positions > t, -torch.inf).softmax(-1) @ V)[:, :, 0]

    return over_cache(z, attend, q, k, v)


@program("causal", "(q * K).sum(-1) and (w * V).sum(-2)")
def product_and_sum(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = (q[:, :, None] * K).sum(-1) / z.D**0.5
        return (s.masked_fill(positions > t, -torch.inf).softmax(-1)[..., None] * V).sum(-2)

    return over_cache(z, attend, q, k, v)


@program("causal", "bmm over [B * H, S, D]")
def bmm_of_flat_heads(z, q, k, v):
    positions = torch.arange(z.S)
    q, k, v = (x.transpose(1, 2).reshape(z.B * z.H, z.S, z.D).transpose(0, 1) for x in (q, k, v))  # [S, B * H, D]

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        s = torch.bmm(q[:, None], K.mT) * z.D**-0.5
        return (K, V), torch.bmm(s.masked_fill(positions > t, -torch.inf).softmax(-1), V)[:, 0]

    cache = q.new_zeros(z.B * z.H, z.S, z.D), q.new_zeros(z.B * z.H, z.S, z.D)
    y = nsa_compile.scan(step, cache, (positions, q, k, v))[1]
    return y.transpose(0, 1).unflatten(0, (z.B, z.H)).transpose(1, 2)


@program("causal", "torch.baddbmm adds the float mask")
def baddbmm(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        bias = torch.where(positions > t, -torch.inf, 0.0).to(q.dtype).expand(z.B * z.H, 1, z.S)
        s = torch.baddbmm(bias, q.reshape(-1, 1, z.D), K.flatten(0, 1).mT, alpha=z.D**-0.5)
        return torch.bmm(s.softmax(-1), V.flatten(0, 1)).reshape(z.B, z.H, z.D)

    return over_cache(z, attend, q, k, v)


@program("causal", "caches as [B, S, H, D]")
def cache_of_tokens_then_heads(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        at = (positions == t)[:, None, None]
        K, V = torch.where(at, k[:, None], cache[0]), torch.where(at, v[:, None], cache[1])
        s = torch.einsum("bhd,bshd->bhs", q, K) * z.D**-0.5
        weights = s.masked_fill(positions > t, -torch.inf).softmax(-1)
        return (K, V), torch.einsum("bhs,bshd->bhd", weights, V)

    return over_time(step, (torch.zeros_like(k), torch.zeros_like(v)), q, k, v)


@program("causal", "caches as [S, B, H, D]")
def cache_of_time_first(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        at = (positions == t)[:, None, None, None]
        K, V = torch.where(at, k, cache[0]), torch.where(at, v, cache[1])
        s = torch.einsum("bhd,sbhd->bhs", q, K) * z.D**-0.5
        weights = s.masked_fill(positions > t, -torch.inf).softmax(-1)
        return (K, V), torch.einsum("bhs,sbhd->bhd", weights, V)

    cache = k.new_zeros(z.S, z.B, z.H, z.D), v.new_zeros(z.S, z.B, z.H, z.D)
    return over_time(step, cache, q, k, v)


@program("causal", "keys transposed, [B, H, D, S], written by column")
def transposed_keys(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K, V = torch.where(positions == t, k[..., None], cache[0]), write(cache[1], t, v)
        s = (q[:, :, None] @ K)[:, :, 0] * z.D**-0.5
        return (K, V), weigh(s.masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, (empty(z, k).mT.contiguous(), empty(z, v)), q, k, v)


@program("causal", "one cache [2, B, H, S, D] of keys and values, stacked")
def keys_and_values_stacked(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        cache = write(cache, t, torch.stack([k, v]))
        K, V = cache.unbind(0)
        return cache, weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, torch.stack([empty(z, k), empty(z, v)]), q, k, v)


@program("causal", "one cache [B, H, S, 2 D] of keys and values, chunked")
def keys_and_values_joined(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        cache = write(cache, t, torch.cat([k, v], -1))
        K, V = cache.chunk(2, -1)
        return cache, weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, torch.cat([empty(z, k), empty(z, v)], -1), q, k, v)


@program("causal", "a list of two caches in a dict")
def caches_in_a_dict(z, q, k, v):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v = token
        state = {"k": write(state["k"], t, k), "v": write(state["v"], t, v)}
        s = score(q, state["k"]).masked_fill(positions > t, -torch.inf)
        return state, weigh(s.softmax(-1), state["v"])

    return over_time(step, {"k": empty(z, k), "v": empty(z, v)}, q, k, v)


def _causal_by(write_row):
    """Causal attention whose caches are written by `write_row(cache, t, row)`."""

    def run(z, q, k, v):
        positions = torch.arange(z.S)

        def step(cache, token):
            t, q, k, v = token
            K, V = write_row(cache[0], t, k), write_row(cache[1], t, v)
            return (K, V), weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

        return over_time(step, (empty(z, k), empty(z, v)), q, k, v)

    return run


@program("causal", "written by index_copy")
def written_by_index_copy(z, q, k, v):
    return _causal_by(lambda c, t, row: c.index_copy(2, t.view(1), row[:, :, None]))(z, q, k, v)


@program("causal", "written by scatter")
def written_by_scatter(z, q, k, v):
    def put(c, t, row):
        return c.scatter(2, t.expand(z.B, z.H, 1, z.D), row[:, :, None])

    return _causal_by(put)(z, q, k, v)


@program("causal", "written by index_put with slices before it")
def written_by_index_put(z, q, k, v):
    def put(c, t, row):
        return c.transpose(0, 2).index_put((t.view(1),), row.transpose(0, 1)[None]).transpose(0, 2)

    return _causal_by(put)(z, q, k, v)


@program("causal", "cache.clone(); cache[:, :, t.view(1)] = row")
def written_to_a_clone(z, q, k, v):
    def put(c, t, row):
        c = c.clone()
        c[:, :, t.view(1)] = row[:, :, None]
        return c

    return _causal_by(put)(z, q, k, v)


@program("causal", "cache.clone(); cache[:, :, t] = row")
def written_at_a_number(z, q, k, v):
    def put(c, t, row):
        c = c.clone()
        c[:, :, t] = row
        return c

    return _causal_by(put)(z, q, k, v)


@program("causal", "cache * (1 - one_hot) + one_hot * row")
def written_by_blend(z, q, k, v):
    def put(c, t, row):
        at = F.one_hot(t, z.S).to(row.dtype)[:, None]
        return c * (1 - at) + at * row[:, :, None]

    return _causal_by(put)(z, q, k, v)


@program("causal", "cache + one_hot[:, None] * row")
def written_by_one_hot(z, q, k, v):
    return _causal_by(lambda c, t, row: c + F.one_hot(t, z.S).to(row.dtype)[:, None] * row[:, :, None])(z, q, k, v)


@program("causal", "torch.lerp(cache, row, at)")
def written_by_lerp(z, q, k, v):
    def put(c, t, row):
        at = (torch.arange(z.S) == t).to(row.dtype)[:, None]
        return torch.lerp(c, row[:, :, None].expand_as(c), at.expand_as(c))

    return _causal_by(put)(z, q, k, v)


@program("causal", "masked_scatter of the row")
def written_by_masked_scatter(z, q, k, v):
    def put(c, t, row):
        return c.masked_scatter((torch.arange(z.S) == t)[:, None], row)

    return _causal_by(put)(z, q, k, v)


@program("causal", "select_scatter at a Python position, t counted outside")
def written_by_select_scatter(z, q, k, v):
    return _causal_by(lambda c, t, row: torch.select_scatter(c, row, 2, int(t)))(z, q, k, v)


@program("causal", "the newest row first: cat([row, cache[:-1]])")
def newest_first(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K = torch.cat([k[:, :, None], cache[0][:, :, :-1]], 2)
        V = torch.cat([v[:, :, None], cache[1][:, :, :-1]], 2)
        return (K, V), weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("causal", "the newest row last: roll(-1), last row written by where")
def newest_last_by_roll(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        last = (positions == z.S - 1)[:, None]
        K = torch.where(last, k[:, :, None], cache[0].roll(-1, 2))
        V = torch.where(last, v[:, :, None], cache[1].roll(-1, 2))
        return (K, V), weigh(score(q, K).masked_fill(positions < z.S - 1 - t, -torch.inf).softmax(-1), V)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("causal", "the position is a carry, t + 1")
def position_as_a_counter(z, q, k, v):
    positions = torch.arange(z.S)

    def step(state, token):
        t, K, V = state
        q, k, v = token
        K, V = write(K, t, k), write(V, t, v)
        return (t + 1, K, V), weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    xs = tuple(x.transpose(0, 1) for x in (q, k, v))
    return nsa_compile.scan(step, (torch.tensor(0), empty(z, k), empty(z, v)), xs)[1].transpose(0, 1)


@program("causal", "a length for each sequence is a carry, [B]")
def lengths_as_a_carry(z, q, k, v):
    positions = torch.arange(z.S)

    def step(state, token):
        n, K, V = state
        q, k, v = token
        at = (positions == n[:, None])[:, None, :, None]
        K, V = torch.where(at, k[:, :, None], K), torch.where(at, v[:, :, None], V)
        n = n + 1
        hidden = positions >= n[:, None]
        return (n, K, V), weigh(score(q, K).masked_fill(hidden[:, None], -torch.inf).softmax(-1), V)

    xs = tuple(x.transpose(0, 1) for x in (q, k, v))
    n = torch.zeros(z.B, dtype=torch.int64)
    return nsa_compile.scan(step, (n, empty(z, k), empty(z, v)), xs)[1].transpose(0, 1)


@program("causal", "a bool cache of what is written")
def flags_of_written_rows(z, q, k, v):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v = token
        written, K, V = state
        written = written | (positions == t)
        K, V = write(K, t, k), write(V, t, v)
        return (written, K, V), weigh(score(q, K).masked_fill(~written, -torch.inf).softmax(-1), V)

    return over_time(step, (torch.zeros(z.S, dtype=torch.bool), empty(z, k), empty(z, v)), q, k, v)


@program("causal", "an integer cache of positions, -1 where nothing is written")
def positions_in_a_cache(z, q, k, v):
    def step(state, token):
        t, q, k, v = token
        at, K, V = state
        at = torch.where(torch.arange(z.S) == t, t, at)
        K, V = write(K, t, k), write(V, t, v)
        return (at, K, V), weigh(score(q, K).masked_fill(at < 0, -torch.inf).softmax(-1), V)

    return over_time(step, (torch.full((z.S,), -1), empty(z, k), empty(z, v)), q, k, v)


@program("causal", "a cache of the mask as a bias, from -inf to 0")
def bias_in_a_cache(z, q, k, v):
    def step(state, token):
        t, q, k, v = token
        bias, K, V = state
        bias = torch.where(torch.arange(z.S) == t, 0.0, bias)
        K, V = write(K, t, k), write(V, t, v)
        return (bias, K, V), weigh((score(q, K) + bias).softmax(-1), V)

    return over_time(step, (q.new_full((z.S,), -torch.inf), empty(z, k), empty(z, v)), q, k, v)


OUTSIDE = torch.arange(4096)


@program("causal", "positions of a tensor that the module holds")
def positions_closed_over(z, q, k, v):
    def step(cache, token):
        q, k, v, t = token
        at = (OUTSIDE[: z.S] == t)[:, None]
        K, V = torch.where(at, k[:, :, None], cache[0]), torch.where(at, v[:, :, None], cache[1])
        return (K, V), weigh(score(q, K).masked_fill(OUTSIDE[: z.S] > t, -torch.inf).softmax(-1), V)

    xs = (*(x.transpose(0, 1) for x in (q, k, v)), torch.arange(z.S))
    return nsa_compile.scan(step, (empty(z, k), empty(z, v)), xs)[1].transpose(0, 1)


@program("causal", "the mask of a tensor that the module holds, positions made inside")
def mask_closed_over(z, q, k, v):
    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(OUTSIDE[: z.S] > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


class _WithBuffers(torch.nn.Module):
    """Causal attention that keeps its positions and its mask in buffers."""

    def __init__(self, length):
        super().__init__()
        self.register_buffer("positions", torch.arange(length), persistent=False)
        self.register_buffer("hidden", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def forward(self, z, q, k, v, by_table):
        def step(cache, token):
            t, q, k, v, hidden = token
            at = (self.positions[: z.S] == t)[:, None]
            K, V = torch.where(at, k[:, :, None], cache[0]), torch.where(at, v[:, :, None], cache[1])
            hidden = hidden if by_table else self.positions[: z.S] > t
            return (K, V), weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)

        rows = (x.transpose(0, 1) for x in (q, k, v))
        xs = (self.positions[: z.S], *rows, self.hidden[: z.S, : z.S])
        return nsa_compile.scan(step, (empty(z, k), empty(z, v)), xs)[1].transpose(0, 1)


BUFFERS = _WithBuffers(2048)


@program("causal", "positions are a buffer")
def positions_as_a_buffer(z, q, k, v):
    return BUFFERS(z, q, k, v, by_table=False)


@program("causal", "the triangle is a buffer, as nanoGPT has it")
def triangle_as_a_buffer(z, q, k, v):
    return BUFFERS(z, q, k, v, by_table=True)


@program("causal", "cumsum of ones counts positions")
def positions_by_cumsum(z, q, k, v):
    positions = torch.ones(z.S, dtype=torch.int64).cumsum(0) - 1

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "positions.float(), compared as floats")
def positions_as_floats(z, q, k, v):
    positions = torch.arange(z.S, dtype=torch.float32)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions - t.float() > 0.5, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("causal", "t from zero, the new row kept apart: cat([cache, row])")
def new_row_apart(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        s = score(q, cache[0]).masked_fill(positions >= t, -torch.inf)
        s = torch.cat([s, score(q, k[:, :, None])], -1)
        y = weigh(s.softmax(-1), torch.cat([cache[1], v[:, :, None]], 2))
        return (write(cache[0], t, k), write(cache[1], t, v)), y

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("grouped", "einsum over [B, G, H / G, D]")
def grouped_einsum(z, q, kg, vg):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = torch.einsum("bgrd,bgsd->bgrs", q.unflatten(1, (z.G, -1)), K) * z.D**-0.5
        weights = s.masked_fill(positions > t, -torch.inf).softmax(-1)
        return torch.einsum("bgrs,bgsd->bgrd", weights, V).flatten(1, 2)

    return over_cache(z, attend, q, kg, vg)


@program("grouped", "repeat_kv: keys and values repeated by expand and reshape")
def repeat_kv(z, q, kg, vg):
    positions = torch.arange(z.S)

    def repeated(x):
        return x[:, :, None].expand(-1, -1, z.H // z.G, -1, -1).reshape(z.B, z.H, z.S, z.D)

    def attend(t, q, K, V):
        s = score(q, repeated(K)).masked_fill(positions > t, -torch.inf)
        return weigh(s.softmax(-1), repeated(V))

    return over_cache(z, attend, q, kg, vg)


@program("grouped", "repeat_interleave in the step")
def repeat_interleave(z, q, kg, vg):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        K, V = K.repeat_interleave(z.H // z.G, 1), V.repeat_interleave(z.H // z.G, 1)
        return weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, kg, vg)


@program("grouped", "F.scaled_dot_product_attention(enable_gqa=True)")
def sdpa_enable_gqa(z, q, kg, vg):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        mask = (positions <= t)[None]
        return F.scaled_dot_product_attention(q[:, :, None], K, V, attn_mask=mask, enable_gqa=True)[:, :, 0]

    return over_cache(z, attend, q, kg, vg)


@program("grouped", "heads repeated before the scan")
def repeated_before(z, q, kg, vg):
    return masked_fill_inf(z, q, kg.repeat_interleave(z.H // z.G, 2), vg.repeat_interleave(z.H // z.G, 2))
