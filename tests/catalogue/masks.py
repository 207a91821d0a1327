"""Which keys a token attends to: windows, sinks, strides, documents, padding, prefixes, other sequences."""

import torch
import torch.nn.functional as F

import nsa_compile
from tests.catalogue.catalogue import empty, over_cache, over_time, program, score, weigh, write


def _masked(z, q, k, v, hidden, *rows):
    """Attention whose scores are -inf where `hidden(t, *rows)` `[S]`, or `[B, 1 or H, S]`."""

    def attend(t, q, K, V, *rows):
        return weigh(score(q, K).masked_fill(hidden(t, *rows), -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v, *rows)


# A window.


@program("window", "(positions > t) | (positions <= t - w)")
def window_by_mask(z, q, k, v):
    positions = torch.arange(z.S)
    return _masked(z, q, k, v, lambda t: (positions > t) | (positions <= t - z.window))


@program("window", "distance = t - positions; 0 <= distance < w")
def window_by_distance(z, q, k, v):
    def hidden(t):
        distance = t - torch.arange(z.S)
        return ~((distance >= 0) & (distance < z.window))

    return _masked(z, q, k, v, hidden)


@program("window", "rows of triu and tril, finfo.min, as Mistral in Hugging Face")
def window_rows_of_finfo_min(z, q, k, v):
    ones = torch.ones(z.S, z.S, dtype=torch.bool)
    bias = torch.full((z.S, z.S), torch.finfo(q.dtype).min, dtype=q.dtype)
    bias = bias * (ones.triu(1) | ones.tril(-z.window))

    def attend(t, q, K, V, bias):
        return weigh((score(q, K) + bias).softmax(-1), V)

    return over_cache(z, attend, q, k, v, bias.expand(z.B, 1, -1, -1).transpose(1, 2))


@program("window", "scaled_dot_product_attention, bool mask")
def window_by_sdpa(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        mask = (positions <= t) & (positions > t - z.window)
        return F.scaled_dot_product_attention(q[:, :, None], K, V, attn_mask=mask[None])[:, :, 0]

    return over_cache(z, attend, q, k, v)


@program("window", "masked_fill(finfo.min)")
def window_by_finfo_min(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        hidden = (positions > t) | (positions <= t - z.window)
        return weigh(score(q, K).masked_fill(hidden, torch.finfo(q.dtype).min).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("window", "a ring buffer of w rows, written at t % w")
def window_by_ring(z, q, k, v):
    slots = torch.arange(z.window)

    def step(cache, token):
        t, q, k, v = token
        at = (slots == t % z.window)[:, None]
        K, V = torch.where(at, k[:, :, None], cache[0]), torch.where(at, v[:, :, None], cache[1])
        return (K, V), weigh(score(q, K).masked_fill(slots > t, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (ring, ring.clone()), q, k, v)


@program("window", "a ring buffer written by index_copy at t % w")
def window_by_ring_index_copy(z, q, k, v):
    slots = torch.arange(z.window)

    def step(cache, token):
        t, q, k, v = token
        at = (t % z.window).view(1)
        K, V = cache[0].index_copy(2, at, k[:, :, None]), cache[1].index_copy(2, at, v[:, :, None])
        return (K, V), weigh(score(q, K).masked_fill(slots > t, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (ring, ring.clone()), q, k, v)


@program("window", "a ring buffer that keeps the position of each slot, -1 where empty")
def window_by_ring_with_positions(z, q, k, v):
    slots = torch.arange(z.window)

    def step(state, token):
        t, q, k, v = token
        position, K, V = state
        here = slots == t % z.window
        position = torch.where(here, t, position)
        K = torch.where(here[:, None], k[:, :, None], K)
        V = torch.where(here[:, None], v[:, :, None], V)
        hidden = (position < 0) | (position > t) | (position <= t - z.window)
        return (position, K, V), weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (torch.full((z.window,), -1), ring, ring.clone()), q, k, v)


@program("window", "a ring buffer whose counter is a carry")
def window_by_ring_with_counter(z, q, k, v):
    slots = torch.arange(z.window)

    def step(state, token):
        _, q, k, v = token
        n, K, V = state
        at = (slots == n % z.window)[:, None]
        K, V = torch.where(at, k[:, :, None], K), torch.where(at, v[:, :, None], V)
        return (n + 1, K, V), weigh(score(q, K).masked_fill(slots > n, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (torch.tensor(0), ring, ring.clone()), q, k, v)


@program("window", "a shift buffer: cat([cache[1:], row])")
def window_by_shift(z, q, k, v):
    slots = torch.arange(z.window)

    def step(cache, token):
        t, q, k, v = token
        K = torch.cat([cache[0][:, :, 1:], k[:, :, None]], 2)
        V = torch.cat([cache[1][:, :, 1:], v[:, :, None]], 2)
        return (K, V), weigh(score(q, K).masked_fill(slots < z.window - 1 - t, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (ring, ring.clone()), q, k, v)


@program("window", "roll(-1), the last row written by index_copy")
def window_by_roll(z, q, k, v):
    slots, last = torch.arange(z.window), torch.tensor([z.window - 1])

    def step(cache, token):
        t, q, k, v = token
        K = cache[0].roll(-1, 2).index_copy(2, last, k[:, :, None])
        V = cache[1].roll(-1, 2).index_copy(2, last, v[:, :, None])
        return (K, V), weigh(score(q, K).masked_fill(slots < z.window - 1 - t, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (ring, ring.clone()), q, k, v)


@program("window", "a shift buffer by torch.stack of the rows")
def window_by_stack(z, q, k, v):
    slots = torch.arange(z.window)

    def step(cache, token):
        t, q, k, v = token
        K = torch.stack([*cache[0].unbind(2)[1:], k], 2)
        V = torch.stack([*cache[1].unbind(2)[1:], v], 2)
        return (K, V), weigh(score(q, K).masked_fill(slots < z.window - 1 - t, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (ring, ring.clone()), q, k, v)


@program("window", "a shift buffer by select_scatter of the last row")
def window_by_select_scatter(z, q, k, v):
    slots = torch.arange(z.window)

    def step(cache, token):
        t, q, k, v = token
        K, V = (torch.select_scatter(c.roll(-1, 2), row, 2, z.window - 1) for c, row in zip(cache, (k, v), strict=True))
        return (K, V), weigh(score(q, K).masked_fill(slots < z.window - 1 - t, -torch.inf).softmax(-1), V)

    ring = q.new_zeros(z.B, z.H, z.window, z.D)
    return over_time(step, (ring, ring.clone()), q, k, v)


@program("window", "rows t - w + 1 .. t gathered from a full cache by index_select")
def window_by_gather(z, q, k, v):
    offsets = torch.arange(z.window) - z.window + 1

    def attend(t, q, K, V):
        rows = t + offsets
        s = score(q, K.index_select(2, rows.clamp(min=0))).masked_fill(rows < 0, -torch.inf)
        return weigh(s.softmax(-1), V.index_select(2, rows.clamp(min=0)))

    return over_cache(z, attend, q, k, v)


@program("window_per_head", "a width for each head, [H, 1]")
def window_per_head(z, q, k, v):
    positions = torch.arange(z.S)
    width = (torch.arange(z.H) + 1)[:, None] * z.window // 2
    return _masked(z, q, k, v, lambda t: (positions > t) | (positions <= t - width))


@program("window_or_full", "half of the heads in a window, half in all")
def window_in_half_of_the_heads(z, q, k, v):
    positions = torch.arange(z.S)
    local = (torch.arange(z.H) < z.H // 2)[:, None]
    return _masked(z, q, k, v, lambda t: (positions > t) | (local & (positions <= t - z.window)))


# A window and sink rows.


@program("window_and_sinks", "one mask: in the window or below the number of sinks")
def sinks_by_mask(z, q, k, v):
    positions = torch.arange(z.S)

    def hidden(t):
        return (positions > t) | ((positions <= t - z.window) & (positions >= z.sinks))

    return _masked(z, q, k, v, hidden)


@program("window_and_sinks", "StreamingLLM: a ring behind the sink rows of one buffer")
def sinks_before_a_ring(z, q, k, v):
    slots = torch.arange(z.sinks + z.window)

    def step(cache, token):
        t, q, k, v = token
        slot = torch.where(t < z.sinks, t, z.sinks + (t - z.sinks) % z.window)
        at = (slots == slot)[:, None]
        K, V = torch.where(at, k[:, :, None], cache[0]), torch.where(at, v[:, :, None], cache[1])
        return (K, V), weigh(score(q, K).masked_fill(slots > t, -torch.inf).softmax(-1), V)

    buffer = q.new_zeros(z.B, z.H, z.sinks + z.window, z.D)
    return over_time(step, (buffer, buffer.clone()), q, k, v)


@program("window_and_sinks", "StreamingLLM: a cache that is full loses the row behind its sinks")
def sinks_in_a_cache_that_is_cut(z, q, k, v):
    size = z.sinks + z.window
    slots = torch.arange(size)

    def step(cache, token):
        t, q, k, v = token

        def written(cache, row):
            cut = torch.cat([cache[:, :, : z.sinks], cache[:, :, z.sinks + 1 :], cache[:, :, -1:]], 2)
            return torch.where(t < size, cache, cut).index_copy(2, t.clamp(max=size - 1).view(1), row[:, :, None])

        K, V = written(cache[0], k), written(cache[1], v)
        return (K, V), weigh(score(q, K).masked_fill(slots > t, -torch.inf).softmax(-1), V)

    buffer = q.new_zeros(z.B, z.H, size, z.D)
    return over_time(step, (buffer, buffer.clone()), q, k, v)


@program("window_and_sinks", "two caches, sink rows and a window of a full cache, in one softmax")
def sinks_in_their_own_cache(z, q, k, v):
    positions, slots = torch.arange(z.S), torch.arange(z.sinks)

    def step(state, token):
        t, q, k, v = token
        sinks, K, V = state
        here = (slots == t)[:, None]
        sinks = (torch.where(here, k[:, :, None], sinks[0]), torch.where(here, v[:, :, None], sinks[1]))
        K, V = write(K, t, k), write(V, t, v)
        in_window = (positions <= t) & (positions > t - z.window) & (positions >= z.sinks)
        s = torch.cat(
            [
                score(q, sinks[0]).masked_fill(slots > t, -torch.inf),
                score(q, K).masked_fill(~in_window, -torch.inf),
            ],
            -1,
        )
        return (sinks, K, V), weigh(s.softmax(-1), torch.cat([sinks[1], V], 2))

    buffer = q.new_zeros(z.B, z.H, z.sinks, z.D)
    return over_time(step, ((buffer, buffer.clone()), empty(z, k), empty(z, v)), q, k, v)


# Known patterns.


@program("longformer", "a window, and global tokens every `block` that all attend to")
def global_tokens(z, q, k, v):
    positions = torch.arange(z.S)

    def hidden(t):
        return (positions > t) | ((positions <= t - z.window) & (positions % z.block != 0))

    return _masked(z, q, k, v, hidden)


@program("longformer", "global tokens attend to all, the mask is a table scanned by rows")
def global_tokens_by_rows(z, q, k, v):
    t, s = torch.arange(z.S)[:, None], torch.arange(z.S)
    hidden = (s > t) | ((s <= t - z.window) & (s % z.block != 0))

    def attend(t, q, K, V, hidden):
        return weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v, hidden.expand(z.B, 1, -1, -1).transpose(1, 2))


@program("longformer_symmetric", "global tokens attend to all, others to global tokens and a window")
def global_queries_too(z, q, k, v):
    positions = torch.arange(z.S)

    def hidden(t):
        near, is_global = positions > t - z.window, (positions % z.block == 0) | (t % z.block == 0)
        return (positions > t) | ~(near | is_global)

    return _masked(z, q, k, v, hidden)


@program("bigbird", "a window, sinks, and random blocks fixed by a table")
def random_blocks(z, q, k, v):
    positions, blocks = torch.arange(z.S), z.S // z.block
    drawn = (torch.arange(blocks)[:, None] * 7 + torch.arange(blocks) * 5) % 11 < 2  # fixed, as if drawn once

    def hidden(t):
        near = positions > t - z.window
        row = drawn.index_select(0, (t // z.block).view(1))[0].repeat_interleave(z.block)
        return (positions > t) | ~(near | (positions < z.sinks) | row)

    return _masked(z, q, k, v, hidden)


@program("strided", "every stride-th key, counted back from t")
def strided_from_the_query(z, q, k, v):
    positions = torch.arange(z.S)
    return _masked(z, q, k, v, lambda t: (positions > t) | ((t - positions) % z.stride != 0))


@program("sparse_transformer", "a window or every block-th key")
def strided_and_window(z, q, k, v):
    positions = torch.arange(z.S)

    def hidden(t):
        return (positions > t) | ((positions <= t - z.block) & (positions % z.block != z.block - 1))

    return _masked(z, q, k, v, hidden)


@program("dilated", "a window of w keys, every stride-th")
def dilated_window(z, q, k, v):
    def hidden(t):
        distance = t - torch.arange(z.S)
        return (distance < 0) | (distance >= z.window * z.stride) | (distance % z.stride != 0)

    return _masked(z, q, k, v, hidden)


@program("chunked", "keys of the token's own chunk, as in Llama 4")
def chunked(z, q, k, v):
    positions = torch.arange(z.S)
    return _masked(z, q, k, v, lambda t: (positions > t) | (positions // z.block != t // z.block))


@program("chunked", "a buffer of one chunk, written at t % block, its mask starts anew")
def chunk_buffer(z, q, k, v):
    slots = torch.arange(z.block)

    def step(cache, token):
        t, q, k, v = token
        at = (slots == t % z.block)[:, None]
        K, V = torch.where(at, k[:, :, None], cache[0]), torch.where(at, v[:, :, None], cache[1])
        return (K, V), weigh(score(q, K).masked_fill(slots > t % z.block, -torch.inf).softmax(-1), V)

    buffer = q.new_zeros(z.B, z.H, z.block, z.D)
    return over_time(step, (buffer, buffer.clone()), q, k, v)


@program("chunk_and_previous", "keys of the own chunk and of the one before")
def chunk_and_previous(z, q, k, v):
    positions = torch.arange(z.S)

    def hidden(t):
        return (positions > t) | (positions // z.block < t // z.block - 1)

    return _masked(z, q, k, v, hidden)


@program("block_causal", "all keys of the token's own block, later ones too, by a full cache")
def block_causal(z, q, k, v):
    positions = torch.arange(z.S)
    K, V = k.transpose(1, 2), v.transpose(1, 2)

    def step(carry, token):
        t, q = token
        hidden = positions // z.block > t // z.block
        return carry, weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)

    return over_time(step, (), q)


@program("prefix_lm", "the first tokens are seen by all, keys closed over")
def prefix_lm(z, q, k, v):
    positions = torch.arange(z.S)
    K, V = k.transpose(1, 2), v.transpose(1, 2)

    def step(carry, token):
        t, q = token
        hidden = (positions > t) & (positions >= z.S // 4)
        return carry, weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)

    return over_time(step, (), q)


@program("prefix_lm", "the prefix is in the caches before the first step")
def prefix_in_the_cache(z, q, k, v):
    positions = torch.arange(z.S)
    prefix = (positions < z.S // 4)[:, None]
    cache = tuple(torch.where(prefix, x.transpose(1, 2), 0.0) for x in (k, v))

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        hidden = (positions > t) & (positions >= z.S // 4)
        return (K, V), weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)

    return over_time(step, cache, q, k, v)


# Documents in a row.


@program("documents", "ids closed over, compared with the token's own")
def documents_closed_over(z, q, k, v, documents):
    positions = torch.arange(z.S)
    return _masked(
        z,
        q,
        k,
        v,
        lambda t, own: ((positions > t) | (documents != own[:, None]))[:, None],
        documents,
    )


@program("documents", "ids in an integer cache")
def documents_in_a_cache(z, q, k, v, documents):
    def step(state, token):
        t, q, k, v, own = token
        ids, K, V = state
        ids = torch.where(torch.arange(z.S) == t, own[:, None], ids)
        K, V = write(K, t, k), write(V, t, v)
        hidden = (ids != own[:, None])[:, None]
        return (ids, K, V), weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)

    state = torch.zeros(z.B, z.S, dtype=torch.int64), empty(z, k), empty(z, v)
    return over_time(step, state, q, k, v, documents)


@program("documents", "the causal mask and the ids in a cache, masked_fill(finfo.min)")
def documents_in_a_cache_finite(z, q, k, v, documents):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v, own = token
        ids, K, V = state
        ids = ids.scatter(1, t.expand(z.B, 1), own[:, None])
        K, V = write(K, t, k), write(V, t, v)
        seen = ((positions <= t) & (ids == own[:, None]))[:, None]
        return (ids, K, V), weigh(score(q, K).masked_fill(~seen, torch.finfo(q.dtype).min).softmax(-1), V)

    state = torch.zeros(z.B, z.S, dtype=torch.int64), empty(z, k), empty(z, v)
    return over_time(step, state, q, k, v, documents)


@program("documents", "the first position of the token's document is a row")
def documents_by_start(z, q, k, v, documents):
    positions = torch.arange(z.S)
    start = torch.searchsorted(documents, documents)  # the first index with this id

    def hidden(t, start):
        return ((positions > t) | (positions < start[:, None]))[:, None]

    return _masked(z, q, k, v, hidden, start)


@program("documents", "a bool [B, S, S] mask scanned by rows")
def documents_by_rows(z, q, k, v, documents):
    mask = (documents[:, :, None] == documents[:, None]) & torch.ones(z.S, z.S, dtype=torch.bool).tril()
    return _masked(z, q, k, v, lambda t, mask: ~mask[:, None], mask)


@program("documents", "an additive float mask scanned by rows")
def documents_by_bias(z, q, k, v, documents):
    mask = (documents[:, :, None] == documents[:, None]) & torch.ones(z.S, z.S, dtype=torch.bool).tril()
    bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)

    def attend(t, q, K, V, bias):
        return weigh((score(q, K) + bias[:, None]).softmax(-1), V)

    return over_cache(z, attend, q, k, v, bias)


@program("documents", "F.scaled_dot_product_attention, bool mask of ids")
def documents_by_sdpa(z, q, k, v, documents):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, own):
        mask = ((positions <= t) & (documents == own[:, None]))[:, None, None]
        return F.scaled_dot_product_attention(q[:, :, None], K, V, attn_mask=mask)[:, :, 0]

    return over_cache(z, attend, q, k, v, documents)


@program("documents_in_a_window", "documents and a window")
def documents_and_window(z, q, k, v, documents):
    positions = torch.arange(z.S)

    def hidden(t, own):
        return ((positions > t) | (positions <= t - z.window) | (documents != own[:, None]))[:, None]

    return _masked(z, q, k, v, hidden, documents)


# Padding on the left.


@program("left_padding", "-inf, and nan_to_num for tokens of padding")
def padding_nan_to_num(z, q, k, v, real):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        hidden = ((positions > t) | ~real)[:, None]
        return weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num(0.0), V)

    return over_cache(z, attend, q, k, v) * real[:, :, None, None]


@program("left_padding", "-inf, a token always sees itself")
def padding_sees_itself(z, q, k, v, real):
    positions = torch.arange(z.S)
    y = _masked(z, q, k, v, lambda t: ((positions > t) | (~real & (positions != t)))[:, None])
    return y * real[:, :, None, None]


@program("left_padding", "additive finfo.min of causal and padding, clamped, as Hugging Face has it")
def padding_finfo_min(z, q, k, v, real):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        low = q.new_tensor(torch.finfo(q.dtype).min)
        bias = torch.where((positions <= t) & real, torch.zeros_like(low), low)[:, None]
        return weigh((score(q, K) + bias).softmax(-1), V)

    return over_cache(z, attend, q, k, v) * real[:, :, None, None]


@program("left_padding", "masked_fill(-1e9)")
def padding_fill_minus_1e9(z, q, k, v, real):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        hidden = ((positions > t) | ~real)[:, None]
        return weigh(score(q, K).masked_fill(hidden, -1e9).softmax(-1), V)

    return over_cache(z, attend, q, k, v) * real[:, :, None, None]


@program("left_padding", "flags of padding in a bool cache")
def padding_in_a_cache(z, q, k, v, real):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v, real = token
        seen, K, V = state
        at = positions == t
        seen = torch.where(at, real[:, None], seen)
        K, V = write(K, t, k), write(V, t, v)
        mask = (seen | at)[:, None]  # a token sees itself
        return (seen, K, V), weigh(score(q, K).masked_fill(~mask, -torch.inf).softmax(-1), V)

    state = torch.zeros(z.B, z.S, dtype=torch.bool), empty(z, k), empty(z, v)
    return over_time(step, state, q, k, v, real) * real[:, :, None, None]


@program("left_padding", "a number of padded tokens for each sequence")
def padding_by_number(z, q, k, v, real):
    positions = torch.arange(z.S)
    padded = (~real).sum(1)[:, None]
    hidden_of = _masked(
        z,
        q,
        k,
        v,
        lambda t: ((positions > t) | ((positions < padded) & (positions != t)))[:, None],
    )
    return hidden_of * real[:, :, None, None]


# Another sequence.


@program("cross", "keys of another sequence, no mask")
def cross_attention(z, q, k_memory, v_memory):
    K, V = k_memory.transpose(1, 2), v_memory.transpose(1, 2)

    def step(carry, token):
        return carry, weigh(score(token[1], K).softmax(-1), V)

    return over_time(step, (), q)


@program("cross_padded", "padding of the other sequence by masked_fill(-inf)")
def cross_attention_padded(z, q, k_memory, v_memory, real_memory):
    K, V = k_memory.transpose(1, 2), v_memory.transpose(1, 2)

    def step(carry, token):
        s = score(token[1], K).masked_fill(~real_memory[:, None], -torch.inf)
        return carry, weigh(s.softmax(-1), V)

    return over_time(step, (), q)


@program("cross_padded", "SDPA, the other sequence is a carry that no step writes")
def cross_attention_in_the_carry(z, q, k_memory, v_memory, real_memory):
    def step(memory, token):
        K, V = memory
        q = token[1][:, :, None]
        return memory, F.scaled_dot_product_attention(q, K, V, attn_mask=real_memory[:, None, None])[:, :, 0]

    return over_time(step, (k_memory.transpose(1, 2), v_memory.transpose(1, 2)), q)


@program("self_and_cross", "a decoder: causal self attention, then cross attention with its result")
def self_and_cross_attention(z, q, k, v, k_memory, v_memory):
    positions = torch.arange(z.S)
    memory = k_memory.transpose(1, 2), v_memory.transpose(1, 2)

    def attend(t, q, K, V):
        y = weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)
        return weigh(score(y, memory[0]).softmax(-1), memory[1])

    return over_cache(z, attend, q, k, v)


@program("encoder", "attention in both directions, a map over the tokens")
def no_mask(z, q, k, v):
    K, V = k.transpose(1, 2), v.transpose(1, 2)
    rows = torch.arange(z.S), q.transpose(0, 1)
    return nsa_compile.scan(lambda carry, row: (carry, weigh(score(row[1], K).softmax(-1), V)), (), rows)[1].transpose(
        0, 1
    )
