"""Scores that are more than a product, and softmaxes over more than one set of keys."""

import torch
import torch.nn.functional as F

import nsa_compile
from tests.catalogue.catalogue import empty, over_cache, over_time, program, score, weigh, write


def _causal(z, q, k, v, change, *rows):
    """Causal attention whose scores `[B, H, S]` are `change(t, scores, *rows)` before the mask."""
    positions = torch.arange(z.S)

    def attend(t, q, K, V, *rows):
        return weigh(change(t, score(q, K), *rows).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v, *rows)


def _slopes(z, like):
    return (2.0 ** (-8.0 * (torch.arange(z.H, dtype=like.dtype) + 1) / z.H))[:, None]


@program("alibi", "slopes * (positions - t)")
def alibi(z, q, k, v):
    positions = torch.arange(z.S)
    return _causal(z, q, k, v, lambda t, s: s + _slopes(z, s) * (positions - t))


@program("alibi", "slopes * positions, as ALiBi's authors add it")
def alibi_of_positions(z, q, k, v):
    positions = torch.arange(z.S)
    return _causal(z, q, k, v, lambda t, s: s + _slopes(z, s) * positions)


@program("alibi", "rows of a table [H, S, S], -inf above the diagonal")
def alibi_by_rows(z, q, k, v):
    distance = torch.arange(z.S) - torch.arange(z.S)[:, None]
    bias = (_slopes(z, q)[:, None] * distance).masked_fill(distance > 0, -torch.inf)  # [H, S, S]

    def attend(t, q, K, V, bias):
        return weigh((score(q, K) + bias).softmax(-1), V)

    return over_cache(z, attend, q, k, v, bias.transpose(0, 1).expand(z.B, -1, -1, -1))


@program("alibi", "a table [H, S, S] made before, of which the step reads bias[:, t]")
def alibi_by_pick(z, q, k, v):
    distance = torch.arange(z.S) - torch.arange(z.S)[:, None]
    bias = (_slopes(z, q)[:, None] * distance).masked_fill(distance > 0, -torch.inf)  # [H, S, S]

    def attend(t, q, K, V):
        return weigh((score(q, K) + bias[:, t]).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("alibi", "F.scaled_dot_product_attention, the bias is its float mask")
def alibi_by_sdpa(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        bias = (_slopes(z, q) * (positions - t)).masked_fill(positions > t, -torch.inf)
        return F.scaled_dot_product_attention(q[:, :, None], K, V, attn_mask=bias[:, None])[:, :, 0]

    return over_cache(z, attend, q, k, v)


@program("alibi_in_a_window", "ALiBi under a window")
def alibi_in_a_window(z, q, k, v):
    positions = torch.arange(z.S)

    def change(t, s):
        return (s + _slopes(z, s) * (positions - t)).masked_fill(positions <= t - z.window, -torch.inf)

    return _causal(z, q, k, v, change)


@program("relative_bias", "T5: a learned bias for each distance, index_select")
def relative_bias(z, q, k, v, bias_table):
    positions = torch.arange(z.S)

    def change(t, s):
        distance = (t - positions).clamp(0, z.window - 1)
        return s + bias_table.index_select(1, distance)

    return _causal(z, q, k, v, change)


@program("relative_bias", "T5: bias_table[:, distance]")
def relative_bias_by_index(z, q, k, v, bias_table):
    positions = torch.arange(z.S)
    return _causal(z, q, k, v, lambda t, s: s + bias_table[:, (t - positions).clamp(0, z.window - 1)])


@program("relative_bias", "T5: F.embedding of the bucket of each distance")
def relative_bias_by_embedding(z, q, k, v, bias_table):
    positions = torch.arange(z.S)

    def change(t, s):
        return s + F.embedding((t - positions).clamp(0, z.window - 1), bias_table.T).T

    return _causal(z, q, k, v, change)


@program("relative_bias", "T5: a table [H, S, S] made before, scanned by rows")
def relative_bias_by_rows(z, q, k, v, bias_table):
    distance = (torch.arange(z.S)[:, None] - torch.arange(z.S)).clamp(0, z.window - 1)
    bias = bias_table[:, distance].transpose(0, 1).expand(z.B, -1, -1, -1)
    return _causal(z, q, k, v, lambda t, s, bias: s + bias, bias)


@program("relative_bias", "T5: a table [H, S, S] made before, of which the step reads bias[:, t]")
def relative_bias_by_pick(z, q, k, v, bias_table):
    distance = (torch.arange(z.S)[:, None] - torch.arange(z.S)).clamp(0, z.window - 1)
    bias = bias_table[:, distance]
    return _causal(z, q, k, v, lambda t, s: s + bias[:, t])


@program("bias_rows", "a learned bias [H, S, S], scanned by rows")
def bias_by_rows(z, q, k, v, bias_rows):
    bias = bias_rows.transpose(0, 1).expand(z.B, -1, -1, -1)
    return _causal(z, q, k, v, lambda t, s, bias: s + bias, bias)


@program("softcap", "cap * tanh(s / cap), as Gemma 2")
def softcap(z, q, k, v):
    return _causal(z, q, k, v, lambda t, s: 5.0 * torch.tanh(s / 5.0))


@program("softcap", "the cap, then the mask as a bias")
def softcap_then_bias(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K) / 5.0
        bias = torch.zeros(z.S, dtype=q.dtype).masked_fill(positions > t, -torch.inf)
        return weigh((torch.tanh(s) * 5.0 + bias).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("softcap_in_a_window", "a soft cap under a window")
def softcap_in_a_window(z, q, k, v):
    positions = torch.arange(z.S)

    def change(t, s):
        return (5.0 * torch.tanh(s / 5.0)).masked_fill(positions <= t - z.window, -torch.inf)

    return _causal(z, q, k, v, change)


@program("qk_norm", "queries and keys normalised before the cache")
def qk_norm(z, q, k, v, temperature):
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = torch.einsum("bhd,bhsd->bhs", q, K) * temperature[:, None]
        return weigh(s.masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("qk_norm", "queries and keys normalised in the step, keys on the way to the cache")
def qk_norm_in_the_step(z, q, k, v, temperature):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, F.normalize(k, dim=-1)), write(cache[1], t, v)
        s = torch.einsum("bhd,bhsd->bhs", F.normalize(q, dim=-1) * temperature[:, None], K)
        return (K, V), weigh(s.masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("qk_norm", "the cache normalised after it is read")
def qk_norm_of_the_cache(z, q, k, v, temperature):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = torch.einsum("bhd,bhsd->bhs", F.normalize(q, dim=-1), F.normalize(K, dim=-1))
        return weigh((s * temperature[:, None]).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("temperature", "a learned temperature of each head")
def temperature_of_a_head(z, q, k, v, temperature):
    return _causal(z, q, k, v, lambda t, s: s * temperature[:, None])


@program("temperature_of_a_token", "a temperature of each token: log-length scaling")
def temperature_of_a_token(z, q, k, v):
    return _causal(z, q, k, v, lambda t, s: s * (t + 2.0).log())


def _turned(x, position):
    """Rotary embedding of `x [..., D]` at `position`, a tensor that broadcasts with `x[..., 0]`."""
    half = x.shape[-1] // 2
    angle = position[..., None] * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


@program("rope", "queries and keys turned before the scan")
def rope_before(z, q, k, v):
    positions = torch.arange(z.S)[:, None]
    return _causal(z, _turned(q, positions), _turned(k, positions), v, lambda t, s: s)


@program("rope", "turned in the step, keys on the way to the cache")
def rope_in_the_step(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, _turned(k, t)), write(cache[1], t, v)
        return (K, V), weigh(score(_turned(q, t), K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("rope", "the cache turned after it is read")
def rope_of_the_cache(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(_turned(q, t), _turned(K, positions))
        return weigh(s.masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_cache(z, attend, q, k, v)


@program("rope", "by products of complex numbers: view_as_complex(x) * polar(1, angle)")
def rope_by_complex_numbers(z, q, k, v):
    def turned(x, t):
        half = x.shape[-1] // 2
        angle = t * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
        pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1))
        return torch.cat(torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).unbind(-1), -1)

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, turned(k, t)), write(cache[1], t, v)
        s = score(turned(q, t), K).masked_fill(torch.arange(z.S) > t, -torch.inf)
        return (K, V), weigh(s.softmax(-1), V)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("rope", "cosines and sines are rows of tables")
def rope_by_rows(z, q, k, v):
    half = z.D // 2
    angle = torch.arange(z.S)[:, None] * 100.0 ** (-torch.arange(half, dtype=q.dtype) / half)
    positions = torch.arange(z.S)

    def turned(x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def step(cache, token):
        t, q, k, v, cos, sin = token
        K, V = write(cache[0], t, turned(k, cos, sin)), write(cache[1], t, v)
        s = score(turned(q, cos, sin), K).masked_fill(positions > t, -torch.inf)
        return (K, V), weigh(s.softmax(-1), V)

    xs = (torch.arange(z.S), *(x.transpose(0, 1) for x in (q, k, v)), angle.cos(), angle.sin())
    return nsa_compile.scan(step, (empty(z, k), empty(z, v)), xs)[1].transpose(0, 1)


@program("two_products", "MLA: a product of content and one of positions, added")
def two_products(z, q, k, v, q_rope, k_rope):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, q_rope, k_rope = token
        K, V, P = write(cache[0], t, k), write(cache[1], t, v), write(cache[2], t, k_rope)
        s = torch.einsum("bhd,bhsd->bhs", q, K) + torch.einsum("bhr,bsr->bhs", q_rope, P)
        s = s * (z.D + z.D // 2) ** -0.5
        return (K, V, P), weigh(s.masked_fill(positions > t, -torch.inf).softmax(-1), V)

    cache = empty(z, k), empty(z, v), k_rope.new_zeros(z.B, z.S, z.D // 2)
    return over_time(step, cache, q, k, v, q_rope, k_rope)


@program("two_products", "MLA: content and positions joined before the cache")
def two_products_joined(z, q, k, v, q_rope, k_rope):
    positions = torch.arange(z.S)
    k = torch.cat([k, k_rope[:, :, None].expand(-1, -1, z.H, -1)], -1)
    q = torch.cat([q, q_rope], -1)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    cache = empty(z, k), empty(z, v)

    def step(cache, token):
        t, q, k, v = token
        cache = write(cache[0], t, k), write(cache[1], t, v)
        return cache, attend(t, q, *cache)

    return over_time(step, cache, q, k, v)


@program("latent", "MLA absorbed: queries in the latent space, the latent is key and value")
def latent_absorbed(z, q, latent, w_key, w_value):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, c = token
        cache = write(cache, t, c)
        s = torch.einsum("bhl,bsl->bhs", torch.einsum("bhd,hdl->bhl", q, w_key), cache) * z.D**-0.5
        y = torch.einsum("bhs,bsl->bhl", s.masked_fill(positions > t, -torch.inf).softmax(-1), cache)
        return cache, torch.einsum("bhl,hdl->bhd", y, w_value)

    return over_time(step, latent.new_zeros(z.B, z.S, latent.shape[-1]), q, latent)


@program("latent", "MLA as written: keys and values of the latent cache at each step")
def latent_expanded(z, q, latent, w_key, w_value):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, c = token
        cache = write(cache, t, c)
        K = torch.einsum("bsl,hdl->bhsd", cache, w_key)
        V = torch.einsum("bsl,hdl->bhsd", cache, w_value)
        return cache, weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, latent.new_zeros(z.B, z.S, latent.shape[-1]), q, latent)


@program("latent", "MLA: keys and values of the latent on the way to the caches")
def latent_before_the_cache(z, q, latent, w_key, w_value):
    k = torch.einsum("bsl,hdl->bshd", latent, w_key)
    v = torch.einsum("bsl,hdl->bshd", latent, w_value)
    return _causal(z, q, k, v, lambda t, s: s)


# Sinks that hold no value.


@program("sink_logit", "a learned logit of each head, joined by cat and cut off, as gpt-oss")
def sink_by_cat(z, q, k, v, sink):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -torch.inf)
        s = torch.cat([s, sink[:, None].expand(z.B, -1, 1)], -1)
        return weigh(s.softmax(-1)[..., :-1], V)

    return over_cache(z, attend, q, k, v)


@program("sink_logit", "a learned logit in the sum of exponentials")
def sink_in_the_sum(z, q, k, v, sink):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -torch.inf)
        top = torch.maximum(s.amax(-1, keepdim=True), sink[:, None])
        e = (s - top).exp()
        return weigh(e / (e.sum(-1, keepdim=True) + (sink[:, None] - top).exp()), V)

    return over_cache(z, attend, q, k, v)


@program("sink_logit", "the output times sigmoid(logsumexp - sink)")
def sink_by_sigmoid(z, q, k, v, sink):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -torch.inf)
        y = weigh(s.softmax(-1), V)
        return y * (s.logsumexp(-1) - sink).sigmoid()[..., None]

    return over_cache(z, attend, q, k, v)


@program("sink_logit", "a key of zeros and a bias before the cache of keys")
def sink_as_a_row(z, q, k, v, sink):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = torch.cat([sink[:, None].expand(z.B, -1, 1), score(q, K).masked_fill(positions > t, -torch.inf)], -1)
        return weigh(s.softmax(-1), F.pad(V, (0, 0, 1, 0)))

    return over_cache(z, attend, q, k, v)


@program("sink_logit_in_a_window", "a learned logit and a window, as gpt-oss in every other layer")
def sink_in_a_window(z, q, k, v, sink):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill((positions > t) | (positions <= t - z.window), -torch.inf)
        s = torch.cat([s, sink[:, None].expand(z.B, -1, 1)], -1)
        return weigh(s.softmax(-1)[..., :-1], V)

    return over_cache(z, attend, q, k, v)


@program("softmax1", "exp(s) / (1 + sum of exp(s)), by max and exp")
def softmax1(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K).masked_fill(positions > t, -torch.inf)
        top = s.amax(-1, keepdim=True).clamp(min=0)
        e = (s - top).exp()
        return weigh(e / (e.sum(-1, keepdim=True) + (-top).exp()), V)

    return over_cache(z, attend, q, k, v)


@program("softmax1", "a column of zeros padded on, softmax, cut off")
def softmax1_by_pad(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = F.pad(score(q, K).masked_fill(positions > t, -torch.inf), (1, 0))
        return weigh(s.softmax(-1)[..., 1:], V)

    return over_cache(z, attend, q, k, v)


# Two sets of keys.


@program("two_caches", "two caches in one softmax, scores joined by cat")
def two_caches_by_cat(z, q, k, v, k2, v2):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, k2, v2 = token
        K, V, K2, V2 = (write(c, t, row) for c, row in zip(cache, (k, v, k2, v2), strict=True))
        hidden = positions > t
        s = torch.cat([score(q, c).masked_fill(hidden, -torch.inf) for c in (K, K2)], -1)
        return (K, V, K2, V2), weigh(s.softmax(-1), torch.cat([V, V2], 2))

    return over_time(step, (empty(z, k),) * 4, q, k, v, k2, v2)


@program("two_caches", "two caches in one softmax, weights split")
def two_caches_split(z, q, k, v, k2, v2):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, k2, v2 = token
        K, V, K2, V2 = (write(c, t, row) for c, row in zip(cache, (k, v, k2, v2), strict=True))
        hidden = positions > t
        s = torch.cat([score(q, c).masked_fill(hidden, -torch.inf) for c in (K, K2)], -1)
        first, second = s.softmax(-1).split(z.S, -1)
        return (K, V, K2, V2), weigh(first, V) + weigh(second, V2)

    return over_time(step, (empty(z, k),) * 4, q, k, v, k2, v2)


@program("two_caches", "keys and values joined by cat, the mask repeated")
def two_caches_joined(z, q, k, v, k2, v2):
    positions = torch.arange(z.S).repeat(2)

    def step(cache, token):
        t, q, k, v, k2, v2 = token
        K, V, K2, V2 = (write(c, t, row) for c, row in zip(cache, (k, v, k2, v2), strict=True))
        s = score(q, torch.cat([K, K2], 2)).masked_fill(positions > t, -torch.inf)
        return (K, V, K2, V2), weigh(s.softmax(-1), torch.cat([V, V2], 2))

    return over_time(step, (empty(z, k),) * 4, q, k, v, k2, v2)


@program("two_caches", "two attentions merged by their logsumexp")
def two_caches_merged(z, q, k, v, k2, v2):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, k2, v2 = token
        K, V, K2, V2 = (write(c, t, row) for c, row in zip(cache, (k, v, k2, v2), strict=True))
        s, s2 = (score(q, c).masked_fill(positions > t, -torch.inf) for c in (K, K2))
        part = (s.logsumexp(-1) - s2.logsumexp(-1)).sigmoid()[..., None]
        return (K, V, K2, V2), part * weigh(s.softmax(-1), V) + (1 - part) * weigh(s2.softmax(-1), V2)

    return over_time(step, (empty(z, k),) * 4, q, k, v, k2, v2)


@program("memory_and_past", "learned memory rows before the past in one softmax")
def memory_and_past(z, q, k, v, k_memory, v_memory):
    positions = torch.arange(z.S)
    memory = k_memory.transpose(1, 2), v_memory.transpose(1, 2)

    def attend(t, q, K, V):
        past = score(q, K).masked_fill(positions > t, -torch.inf)
        s = torch.cat([score(q, memory[0]), past], -1)
        return weigh(s.softmax(-1), torch.cat([memory[1], V], 2))

    return over_cache(z, attend, q, k, v)


# Other weights than a softmax of one product.


@program("sigmoid", "sigmoid(s - log S), masked to zero")
def sigmoid_attention(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh((score(q, K) - torch.log(torch.tensor(float(z.S)))).sigmoid() * (positions <= t), V)

    return over_cache(z, attend, q, k, v)


@program("sigmoid", "masked_fill(-inf).sigmoid()")
def sigmoid_of_minus_infinity(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = score(q, K) - torch.log(torch.tensor(float(z.S)))
        return weigh(s.masked_fill(positions > t, -torch.inf).sigmoid(), V)

    return over_cache(z, attend, q, k, v)


@program("relu", "relu(s) ** 2 / (t + 1)")
def relu_attention(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(score(q, K).masked_fill(positions > t, 0.0).relu().square() / (t + 1), V)

    return over_cache(z, attend, q, k, v)


@program("relu", "where(mask, s, 0).relu().pow(2), divided by t + 1 at last")
def relu_divided_at_last(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(torch.where(positions <= t, score(q, K), 0.0).relu().pow(2), V) / (t + 1)

    return over_cache(z, attend, q, k, v)


@program("relu_normalised", "relu(s), divided by its sum")
def relu_normalised(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        w = score(q, K).relu() * (positions <= t)
        return weigh(w / (w.sum(-1, keepdim=True) + 1e-6), V)

    return over_cache(z, attend, q, k, v)


@program("silu", "silu(s) / S, masked to zero")
def silu_attention(z, q, k, v):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        return weigh(F.silu(score(q, K)) / z.S * (positions <= t), V)

    return over_cache(z, attend, q, k, v)


@program("talking_heads", "scores and weights mixed over heads")
def talking_heads(z, q, k, v, mix):
    positions = torch.arange(z.S)

    def attend(t, q, K, V):
        s = torch.einsum("bhs,hg->bgs", score(q, K), mix)
        weights = s.masked_fill(positions > t, -torch.inf).softmax(-1)
        return weigh(torch.einsum("bgs,gh->bhs", weights, mix), V)

    return over_cache(z, attend, q, k, v)


@program("differential", "the difference of two softmaxes, weights subtracted")
def differential(z, q, k, v, q2, k2):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, q2, k2 = token
        K, V, K2 = (write(c, t, row) for c, row in zip(cache, (k, v, k2), strict=True))
        hidden = positions > t
        first = score(q, K).masked_fill(hidden, -torch.inf).softmax(-1)
        second = score(q2, K2).masked_fill(hidden, -torch.inf).softmax(-1)
        return (K, V, K2), weigh(first - 0.3 * second, V)

    return over_time(step, (empty(z, k),) * 3, q, k, v, q2, k2)


@program("differential", "the difference of two attentions")
def differential_of_outputs(z, q, k, v, q2, k2):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, q2, k2 = token
        K, V, K2 = (write(c, t, row) for c, row in zip(cache, (k, v, k2), strict=True))
        hidden = positions > t
        first = score(q, K).masked_fill(hidden, -torch.inf).softmax(-1)
        second = score(q2, K2).masked_fill(hidden, -torch.inf).softmax(-1)
        return (K, V, K2), weigh(first, V) - 0.3 * weigh(second, V)

    return over_time(step, (empty(z, k),) * 3, q, k, v, q2, k2)


@program("forgetting", "FoX: sums of log decays before the scan, their difference is the bias")
def forgetting_before(z, q, k, v, log_decay):
    total = log_decay.cumsum(1)  # [B, S, H]
    keys = total.transpose(1, 2)
    return _causal(z, q, k, v, lambda t, s, own: s + own[:, :, None] - keys, total)


@program("forgetting", "FoX: the sum is a carry, each token's sum is cached")
def forgetting_in_the_step(z, q, k, v, log_decay):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v, f = token
        total, at, K, V = state
        total = total + f
        at = torch.where(positions == t, total[:, :, None], at)
        K, V = write(K, t, k), write(V, t, v)
        s = (score(q, K) + total[:, :, None] - at).masked_fill(positions > t, -torch.inf)
        return (total, at, K, V), weigh(s.softmax(-1), V)

    state = q.new_zeros(z.B, z.H), q.new_zeros(z.B, z.H, z.S), empty(z, k), empty(z, v)
    return over_time(step, state, q, k, v, log_decay)


@program("forgetting", "FoX: the bias of each key is a carry to which each step adds")
def forgetting_by_a_bias_that_grows(z, q, k, v, log_decay):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v, f = token
        bias, K, V = state
        bias = torch.where(positions < t, bias + f[:, :, None], torch.zeros_like(bias))
        K, V = write(K, t, k), write(V, t, v)
        return (bias, K, V), weigh((score(q, K) + bias).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, (q.new_zeros(z.B, z.H, z.S), empty(z, k), empty(z, v)), q, k, v, log_decay)


@program("gated_output", "the output of attention times a gate of the token")
def gated_output(z, q, k, v, gates):
    positions = torch.arange(z.S)

    def attend(t, q, K, V, gates):
        y = weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)
        return y * gates[..., :1]

    return over_cache(z, attend, q, k, v, gates)
