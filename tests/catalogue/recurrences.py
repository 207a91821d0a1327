"""States that each step updates: linear attention and its kin, averages, extrema, convolutions, cells."""

import torch
import torch.nn.functional as F

import nsa_compile
from tests.catalogue.catalogue import empty, over_time, program, score, weigh, write


def _state(z, x):
    return x.new_zeros(z.B, z.H, z.D, z.D)


def _outer(a, b):
    return torch.einsum("bhd,bhe->bhde", a, b)


def _read(q, state):
    return torch.einsum("bhd,bhde->bhe", q, state)


# Linear attention.


@program("linear_attention", "S + k ⊗ v by einsum, no normaliser")
def linear_by_einsum(z, q, k, v):
    def step(state, token):
        _, q, k, v = token
        state = state + _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v)


@program("linear_attention", "S + k[..., None] * v[..., None, :], read by matmul")
def linear_by_broadcast(z, q, k, v):
    def step(state, token):
        _, q, k, v = token
        state = state + k[..., None] * v[..., None, :]
        return state, (q[..., None, :] @ state)[..., 0, :]

    return over_time(step, _state(z, q), q, k, v)


@program("linear_attention", "state [D_v, D_k], read by (S * q).sum(-1)")
def linear_transposed(z, q, k, v):
    def step(state, token):
        _, q, k, v = token
        state = state + v[..., None] * k[..., None, :]
        return state, (state * q[..., None, :]).sum(-1)

    return over_time(step, _state(z, q), q, k, v)


@program("linear_attention", "torch.baddbmm over [B * H, D, D]")
def linear_by_baddbmm(z, q, k, v):
    def step(state, token):
        _, q, k, v = (x.flatten(0, 1) if x.dim() == 3 else x for x in token)
        state = torch.baddbmm(state, k[:, :, None], v[:, None])
        return state, torch.bmm(q[:, None], state)[:, 0].unflatten(0, (z.B, z.H))

    return over_time(step, _state(z, q).flatten(0, 1), q, k, v)


@program("linear_attention", "products of all keys under the causal mask, no softmax, a cache")
def linear_by_cache(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        s = torch.einsum("bhd,bhsd->bhs", q, K)
        return (K, V), weigh(s.masked_fill(positions > t, 0.0), V)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("linear_attention_normalised", "elu + 1, a sum of keys beside the state")
def linear_normalised(z, q, k, v):
    def step(state, token):
        _, q, k, v = token
        total, norm = state
        q, k = F.elu(q) + 1, F.elu(k) + 1
        total, norm = total + _outer(k, v), norm + k
        return (total, norm), _read(q, total) / ((q * norm).sum(-1, keepdim=True) + 1e-6)

    return over_time(step, (_state(z, q), q.new_zeros(z.B, z.H, z.D)), q, k, v)


@program("linear_attention_normalised", "a column of ones in the values")
def linear_normalised_by_ones(z, q, k, v):
    def step(state, token):
        _, q, k, v = token
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = state + _outer(k, F.pad(v, (0, 1), value=1.0))
        y = _read(q, state)
        return state, y[..., :-1] / (y[..., -1:] + 1e-6)

    return over_time(step, q.new_zeros(z.B, z.H, z.D, z.D + 1), q, k, v)


@program("linear_attention_normalised", "products of all keys under the causal mask, divided by their sum, a cache")
def linear_normalised_by_cache(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        w = torch.einsum("bhd,bhsd->bhs", F.elu(q) + 1, F.elu(K) + 1) * (positions <= t)
        return (K, V), weigh(w, V) / (w.sum(-1, keepdim=True) + 1e-6)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


# Decays.


@program("retnet", "a constant decay of each head times the state")
def retention(z, q, k, v):
    gamma = 1 - 2.0 ** (-5 - torch.arange(z.H, dtype=q.dtype))

    def step(state, token):
        _, q, k, v = token
        state = gamma[:, None, None] * state + _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v)


@program("retnet", "products of all keys times decay ** distance, a cache")
def retention_by_cache(z, q, k, v):
    positions = torch.arange(z.S)
    gamma = 1 - 2.0 ** (-5 - torch.arange(z.H, dtype=q.dtype))

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        weights = torch.einsum("bhd,bhsd->bhs", q, K) * gamma[:, None] ** (t - positions).clamp(min=0)
        return (K, V), weigh(weights * (positions <= t), V)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v)


@program("scalar_decay", "Mamba-2, simple GLA: a decay of each head and token")
def scalar_decay(z, q, k, v, decay):
    def step(state, token):
        _, q, k, v, decay = token
        state = decay[..., None, None] * state + _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, decay)


@program("scalar_decay_log", "the decay is exp of a log decay")
def scalar_decay_log(z, q, k, v, log_decay):
    def step(state, token):
        _, q, k, v, f = token
        state = state * f.exp()[..., None, None] + _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, log_decay)


@program("gla", "a decay of each channel of the key")
def gated_linear(z, q, k, v, decays):
    def step(state, token):
        _, q, k, v, a = token
        state = a[..., None] * state + _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, decays)


@program("gla", "torch.diag_embed(decay) @ S")
def gated_linear_by_diagonal(z, q, k, v, decays):
    def step(state, token):
        _, q, k, v, a = token
        state = torch.diag_embed(a) @ state + k[..., None] @ v[..., None, :]
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, decays)


@program("gated_values", "a decay of each channel of the value too, HGRN-2: keys are 1 - decay")
def hgrn2(z, q, v, decays):
    def step(state, token):
        _, q, v, a = token
        state = a[..., None] * state + _outer(1 - a, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, v, decays)


@program("mlstm", "xLSTM's matrix memory with a running maximum of log gates")
def matrix_lstm(z, q, k, v, log_decay, beta):
    def step(state, token):
        _, q, k, v, f, i = token
        memory, norm, top = state
        higher = torch.maximum(f + top, i)
        keep, new = (f + top - higher).exp()[..., None], (i - higher).exp()[..., None]
        memory = keep[..., None] * memory + new[..., None] * _outer(k, v)
        norm = keep * norm + new * k
        scale = torch.maximum((q * norm).sum(-1, keepdim=True).abs(), (-higher).exp()[..., None])
        return (memory, norm, higher), _read(q, memory) / scale

    state = _state(z, q), q.new_zeros(z.B, z.H, z.D), q.new_zeros(z.B, z.H)
    return over_time(step, state, q, k, v, log_decay, beta)


# Delta rules.


@program("delta", "DeltaNet: v - S k, then an outer product")
def delta_rule(z, q, k, v, beta):
    k = F.normalize(k, dim=-1)

    def step(state, token):
        _, q, k, v, beta = token
        state = state + _outer(k, beta[..., None] * (v - _read(k, state)))
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, beta)


@program("delta", "DeltaNet: (I - beta k k^T) S + beta k v^T")
def delta_rule_by_matrix(z, q, k, v, beta):
    k = F.normalize(k, dim=-1)
    eye = torch.eye(z.D, dtype=q.dtype)

    def step(state, token):
        _, q, k, v, beta = token
        b = beta[..., None, None]
        state = (eye - b * _outer(k, k)) @ state + b * _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, beta)


@program("gated_delta", "gated DeltaNet: the state decays, then the delta rule")
def gated_delta_rule(z, q, k, v, beta, decay):
    k = F.normalize(k, dim=-1)

    def step(state, token):
        _, q, k, v, beta, decay = token
        state = decay[..., None, None] * state
        state = state + _outer(k, beta[..., None] * (v - _read(k, state)))
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, beta, decay)


@program("gated_delta", "decay (I - beta k k^T) S + beta k v^T")
def gated_delta_rule_by_matrix(z, q, k, v, beta, decay):
    k = F.normalize(k, dim=-1)
    eye = torch.eye(z.D, dtype=q.dtype)

    def step(state, token):
        _, q, k, v, beta, decay = token
        b = beta[..., None, None]
        state = decay[..., None, None] * (eye - b * _outer(k, k)) @ state + b * _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, beta, decay)


@program("kda", "Kimi's delta attention: a decay of each channel, then the delta rule")
def kimi_delta_rule(z, q, k, v, beta, decays):
    k = F.normalize(k, dim=-1)

    def step(state, token):
        _, q, k, v, beta, a = token
        state = a[..., None] * state
        state = state + _outer(k, beta[..., None] * (v - _read(k, state)))
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, beta, decays)


@program("kda", "(I - beta k k^T) diag(decay) S + beta k v^T")
def kimi_delta_rule_by_matrix(z, q, k, v, beta, decays):
    k = F.normalize(k, dim=-1)
    eye = torch.eye(z.D, dtype=q.dtype)

    def step(state, token):
        _, q, k, v, beta, a = token
        b = beta[..., None, None]
        state = (eye - b * _outer(k, k)) @ torch.diag_embed(a) @ state + b * _outer(k, v)
        return state, _read(q, state)

    return over_time(step, _state(z, q), q, k, v, beta, decays)


@program("rwkv7", "diag(decay) S + (S a) b^T + v k^T")
def generalised_delta_rule(z, q, k, v, beta, decays):
    k = F.normalize(k, dim=-1)

    def step(state, token):
        _, q, k, v, beta, w = token
        read = torch.einsum("bhed,bhd->bhe", state, -k)
        state = state * w[..., None, :] + _outer(read, beta[..., None] * k) + _outer(v, k)
        return state, torch.einsum("bhed,bhd->bhe", state, q)

    return over_time(step, _state(z, q), q, k, v, beta, decays)


@program("rwkv6", "a bonus for the token itself, the state read before it decays")
def rwkv6(z, q, k, v, decays):
    bonus = torch.linspace(0.1, 1, z.D, dtype=q.dtype)

    def step(state, token):
        _, q, k, v, w = token
        new = _outer(k, v)
        y = _read(q, state + bonus[:, None] * new)
        return w[..., None] * state + new, y

    return over_time(step, _state(z, q), q, k, v, decays)


@program("rwkv4", "sums of exponentials under a running maximum")
def rwkv4(z, x, gate, channel_decay, channel_bonus):
    def step(state, token):
        _, k, v = token
        a, b, top = state
        own = torch.maximum(top, channel_bonus + k)
        old, new = (top - own).exp(), (channel_bonus + k - own).exp()
        y = (old * a + new * v) / (old * b + new)
        higher = torch.maximum(top - channel_decay, k)
        old, new = (top - channel_decay - higher).exp(), (k - higher).exp()
        return (old * a + new * v, old * b + new, higher), y

    zero = x.new_zeros(x.shape[0], x.shape[2])
    return over_time(step, (zero, zero, zero - 1e4), x, gate)


# State-space models and gated averages of channels.


@program("mamba", "Mamba-1: exp(delta A) h + delta B x, y = C h")
def selective_scan(z, x, delta, a_log, b_state, c_state):
    A = -a_log.exp()

    def step(h, token):
        _, x, delta, b, c = token
        h = (delta[..., None] * A).exp() * h + (delta * x)[..., None] * b[:, None]
        return h, (h * c[:, None]).sum(-1)

    return over_time(step, x.new_zeros(z.B, x.shape[2], z.N), x, delta, b_state, c_state)


@program("mamba", "Mamba-1: discretised before the scan")
def selective_scan_discretised(z, x, delta, a_log, b_state, c_state):
    decay = (delta[..., None] * -a_log.exp()).exp()
    new = (delta * x)[..., None] * b_state[:, :, None]

    def step(h, token):
        _, decay, new, c = token
        h = decay * h + new
        return h, torch.einsum("bwn,bn->bw", h, c)

    return over_time(step, x.new_zeros(z.B, x.shape[2], z.N), decay, new, c_state)


@program("mamba2", "Mamba-2: a decay of each head, B and C shared by heads, a skip")
def state_space_dual(z, v, decay, b_state, c_state):
    def step(h, token):
        _, x, a, b, c = token
        h = a[..., None, None] * h + torch.einsum("bhd,bn->bhdn", x, b)
        return h, torch.einsum("bhdn,bn->bhd", h, c) + 0.5 * x

    return over_time(step, v.new_zeros(z.B, z.H, z.D, z.N), v, decay, b_state, c_state)


@program("diagonal_ssm", "S4D, LRU: a constant complex decay, real and imaginary parts")
def complex_decay(z, x, channel_decay):
    radius, angle = (-channel_decay).exp(), torch.linspace(0, 3, x.shape[-1], dtype=x.dtype)
    a, b = radius * angle.cos(), radius * angle.sin()

    def step(state, token):
        re, im = state
        re, im = a * re - b * im + token[1], a * im + b * re
        return (re, im), re

    zero = x.new_zeros(x.shape[0], x.shape[2])
    return over_time(step, (zero, zero), x)


@program("rg_lru", "Griffin: sqrt(1 - a²) x, a from a gate")
def griffin(z, x, gate):
    def step(h, token):
        _, x, gate = token
        a = (-8.0 * F.softplus(torch.tensor(0.3)) * gate).exp()
        h = a * h + (1 - a.square()).sqrt() * x
        return h, h

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x, gate)


@program("hgrn", "HGRN, minGRU, QRNN: (1 - g) h + g x")
def gated_average(z, x, gate):
    def step(h, token):
        _, x, g = token
        h = (1 - g) * h + g * x
        return h, h

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x, gate)


@program("hgrn", "torch.lerp(h, x, gate)")
def gated_average_by_lerp(z, x, gate):
    def step(h, token):
        _, x, g = token
        h = torch.lerp(h, x, g)
        return h, h

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x, gate)


@program("hgrn", "h + g * (x - h)")
def gated_average_by_difference(z, x, gate):
    def step(h, token):
        _, x, g = token
        h = h + g * (x - h)
        return h, h

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x, gate)


@program("min_gru", "minGRU with its gate and candidate computed in the step from x")
def min_gru(z, x, w_hidden, w_input):
    def step(h, token):
        g = (token[1] @ w_hidden).sigmoid()
        h = (1 - g) * h + g * (token[1] @ w_input)
        return h, h

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


@program("ema", "0.9 * mean + 0.1 * x")
def exponential_average(z, x):
    def step(mean, token):
        mean = 0.9 * mean + 0.1 * token[1]
        return mean, mean

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


@program("ema_corrected", "Adam's correction: mean / (1 - decay ** (t + 1))")
def exponential_average_corrected(z, x):
    def step(mean, token):
        t, x = token
        mean = 0.9 * mean + 0.1 * x
        return mean, mean / (1 - 0.9 ** (t + 1))

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


@program("two_averages", "Adam: averages of x and of x², their ratio")
def two_averages(z, x):
    def step(state, token):
        m, s = state
        m, s = torch.lerp(m, token[1], 0.1), torch.lerp(s, token[1].square(), 0.01)
        return (m, s), m / (s.sqrt() + 1e-3)

    zero = x.new_zeros(x.shape[0], x.shape[2])
    return over_time(step, (zero, zero), x)


@program("sum", "total + x")
def running_sum(z, x):
    def step(total, token):
        total = total + token[1]
        return total, total

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


@program("mean", "a sum and a count")
def running_mean(z, x):
    def step(state, token):
        total, n = state
        total, n = total + token[1], n + 1
        return (total, n), total / n

    return over_time(step, (x.new_zeros(x.shape[0], x.shape[2]), x.new_zeros(())), x)


@program("mean", "mean + (x - mean) / (t + 1)")
def running_mean_by_correction(z, x):
    def step(mean, token):
        t, x = token
        mean = mean + (x - mean) / (t + 1)
        return mean, mean

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


@program("mean", "the mean of a cache under a mask")
def running_mean_by_cache(z, x):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, x = token
        cache = write(cache, t, x)
        return cache, (cache * (positions <= t)[:, None]).sum(1) / (t + 1)

    return over_time(step, x.new_zeros(z.B, z.S, x.shape[2]), x)


@program("welford", "mean and variance by Welford's update")
def running_variance(z, x):
    def step(state, token):
        t, x = token
        mean, m2 = state
        change = x - mean
        mean = mean + change / (t + 1)
        m2 = m2 + change * (x - mean)
        return (mean, m2), m2 / (t + 1)

    zero = x.new_zeros(x.shape[0], x.shape[2])
    return over_time(step, (zero, zero), x)


@program("max", "torch.maximum(highest, x)")
def running_max(z, x):
    def step(highest, token):
        highest = torch.maximum(highest, token[1])
        return highest, highest

    return over_time(step, x.new_full((x.shape[0], x.shape[2]), -1e9), x)


@program("min", "torch.where(x < lowest, x, lowest)")
def running_min(z, x):
    def step(lowest, token):
        lowest = torch.where(token[1] < lowest, token[1], lowest)
        return lowest, lowest

    return over_time(step, x.new_full((x.shape[0], x.shape[2]), 1e9), x)


@program("product", "a cumulated product of decays")
def running_product(z, gate):
    def step(product, token):
        product = product * token[1]
        return product, product

    return over_time(step, gate.new_ones(gate.shape[0], gate.shape[2]), gate)


@program("logsumexp", "torch.logaddexp(total, x)")
def running_logsumexp(z, x):
    def step(total, token):
        total = torch.logaddexp(total, token[1])
        return total, total

    return over_time(step, x.new_full((x.shape[0], x.shape[2]), -1e4), x)


@program("counts", "counts of token ids, an integer histogram")
def counts_of_tokens(z, x, tokens):
    def step(counts, token):
        _, x, i = token
        counts = counts + F.one_hot(i, 5)
        return counts, x * counts.gather(1, i[:, None]).to(x.dtype)

    return over_time(step, torch.zeros(z.B, 5, dtype=torch.int64), x, tokens)


@program("sums_by_key", "sums of rows by token id, index_add or scatter_add")
def sums_by_token(z, x, tokens):
    def step(sums, token):
        _, x, i = token
        sums = sums + F.one_hot(i, 5).to(x.dtype)[:, :, None] * x[:, None]
        return sums, sums.gather(1, i[:, None, None].expand(-1, 1, x.shape[-1]))[:, 0]

    return over_time(step, x.new_zeros(z.B, 5, x.shape[-1]), x, tokens)


# Convolutions and shifts.


@program("convolution", "a shift buffer of the last rows, [B, W, n]")
def short_convolution(z, x, kernel):
    def step(state, token):
        state = torch.cat([state[:, :, 1:], token[1][:, :, None]], -1)
        return state, F.silu((state * kernel).sum(-1))

    return over_time(step, x.new_zeros(z.B, x.shape[2], 3), x)


@program("convolution", "roll(-1) and the last column written, as Mamba's step has it")
def short_convolution_by_roll(z, x, kernel):
    last = torch.arange(3) == 2

    def step(state, token):
        state = torch.where(last, token[1][:, :, None], state.roll(-1, -1))
        return state, F.silu((state * kernel).sum(-1))

    return over_time(step, x.new_zeros(z.B, x.shape[2], 3), x)


@program("convolution", "cat([the last rows, row]), of which the state keeps all but the first")
def short_convolution_by_cat(z, x, kernel):
    def step(state, token):
        rows = torch.cat([state, token[1][:, :, None]], -1)
        return rows[:, :, 1:], F.silu((rows * kernel).sum(-1))

    return over_time(step, x.new_zeros(z.B, x.shape[2], 2), x)


@program("convolution", "two rows as carries of their own")
def short_convolution_by_rows(z, x, kernel):
    def step(state, token):
        a, b = state
        y = a * kernel[:, 0] + b * kernel[:, 1] + token[1] * kernel[:, 2]
        return (b, token[1]), F.silu(y)

    zero = x.new_zeros(z.B, x.shape[2])
    return over_time(step, (zero, zero.clone()), x)


@program("token_shift", "the last row is a carry: lerp(x, last, mix)")
def token_shift(z, x):
    def step(last, token):
        return token[1], torch.lerp(token[1], last, 0.3)

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


# Cells that are not linear in their state.


@program("lstm", "four gates of x and h")
def lstm(z, x, w_hidden, w_input):
    def step(state, token):
        h, c = state
        u, w = token[1] @ w_input, h @ w_hidden
        c = (u + w).sigmoid() * c + (u - w).sigmoid() * (u + 0.5 * w).tanh()
        h = (0.5 * u - w).sigmoid() * c.tanh()
        return (h, c), h

    zero = x.new_zeros(x.shape[0], x.shape[2])
    return over_time(step, (zero, zero.clone()), x)


@program("gru", "gates of x and h")
def gru(z, x, w_hidden, w_input):
    def step(h, token):
        u, w = token[1] @ w_input, h @ w_hidden
        update, reset = (u + w).sigmoid(), (u - w).sigmoid()
        h = (1 - update) * (u + reset * w).tanh() + update * h
        return h, h

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


@program("slstm", "xLSTM's scalar memory, gates of h, a running maximum")
def scalar_lstm(z, x, w_hidden, w_input):
    def step(state, token):
        h, c, n, top = state
        u, w = token[1] @ w_input, h @ w_hidden
        i, f = u + w, F.logsigmoid(u - w)
        higher = torch.maximum(f + top, i)
        c = (f + top - higher).exp() * c + (i - higher).exp() * u.tanh()
        n = (f + top - higher).exp() * n + (i - higher).exp()
        h = c / n.clamp(min=1e-6)
        return (h, c, n, higher), h

    zero = x.new_zeros(x.shape[0], x.shape[2])
    return over_time(step, (zero, zero.clone(), zero.clone(), zero.clone()), x)


@program("ttt", "test-time training: a gradient step through a tanh of the state's reading")
def test_time_training(z, q, k, v, beta):
    k = F.normalize(k, dim=-1)

    def step(state, token):
        _, q, k, v, beta = token
        read = _read(k, state).tanh()
        state = state - _outer(k, beta[..., None] * (read - v) * (1 - read.square()))
        return state, _read(q, state).tanh()

    return over_time(step, _state(z, q), q, k, v, beta)


@program("linear_rnn", "h @ W + x, a full constant matrix")
def linear_rnn(z, x, w_hidden, w_input):
    def step(h, token):
        h = 0.5 * h @ w_hidden + token[1] @ w_input
        return h, h

    return over_time(step, x.new_zeros(x.shape[0], x.shape[2]), x)


# An attention and a recurrence in one step.


@program("hybrid", "causal attention, its output averaged: one scan")
def attention_then_average(z, q, k, v):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v = token
        mean, K, V = state
        K, V = write(K, t, k), write(V, t, v)
        y = weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)
        mean = 0.9 * mean + 0.1 * y
        return (mean, K, V), mean

    return over_time(step, (q.new_zeros(z.B, z.H, z.D), empty(z, k), empty(z, v)), q, k, v)


@program("hybrid", "the same as two scans")
def attention_then_average_apart(z, q, k, v):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v = token
        K, V = write(cache[0], t, k), write(cache[1], t, v)
        return (K, V), weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    def average(mean, token):
        mean = 0.9 * mean + 0.1 * token[1]
        return mean, mean

    y = over_time(step, (empty(z, k), empty(z, v)), q, k, v)
    return over_time(average, q.new_zeros(z.B, z.H, z.D), y)


@program("hybrid_before", "averaged keys go to the cache of attention")
def average_then_attention(z, q, k, v):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v = token
        mean, K, V = state
        mean = 0.5 * mean + 0.5 * k
        K, V = write(K, t, mean), write(V, t, v)
        return (mean, K, V), weigh(score(q, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)

    return over_time(step, (q.new_zeros(z.B, z.H, z.D), empty(z, k), empty(z, v)), q, k, v)


@program("hybrid_beside", "Hymba: attention to a window and a state, added")
def attention_beside_a_state(z, q, k, v, decay):
    positions = torch.arange(z.S)

    def step(cache, token):
        t, q, k, v, decay = token
        state, K, V = cache
        state = decay[..., None, None] * state + _outer(k, v)
        K, V = write(K, t, k), write(V, t, v)
        hidden = (positions > t) | (positions <= t - z.window)
        y = weigh(score(q, K).masked_fill(hidden, -torch.inf).softmax(-1), V)
        return (state, K, V), y + _read(q, state)

    return over_time(step, (_state(z, q), empty(z, k), empty(z, v)), q, k, v, decay)


@program("hybrid_recurrent", "the query of attention depends on its last output")
def attention_fed_back(z, q, k, v):
    positions = torch.arange(z.S)

    def step(state, token):
        t, q, k, v = token
        y, K, V = state
        K, V = write(K, t, k), write(V, t, v)
        y = weigh(score(q + y, K).masked_fill(positions > t, -torch.inf).softmax(-1), V)
        return (y, K, V), y

    return over_time(step, (q.new_zeros(z.B, z.H, z.D), empty(z, k), empty(z, v)), q, k, v)


@program("states_as_outputs", "the last state is a result, too")
def last_state_of_linear_attention(z, q, k, v):
    def step(state, token):
        q, k, v = token
        state = state + _outer(k, v)
        return state, _read(q, state)

    rows = tuple(x.transpose(0, 1) for x in (q, k, v))
    last, y = nsa_compile.scan(step, _state(z, q), rows)
    return torch.cat([y.transpose(0, 1).flatten(1), last.flatten(1)], 1)
