"""What the operators have in common: registration, vmap, threads, memory, FLOPs, errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nsa_compile import ops
from nsa_compile.ops import cpp, flops
from nsa_compile.ops.dense import masked_attention
from nsa_compile.ops.dispatch import KERNELS
from tests.ops.problems import kernels, peak_memory, reference


def inputs(B=2, S=9, T=9, G=2, h=2, D=3, Dv=5, dtype=torch.float64, stride=1) -> dict[str, tuple]:
    """Arguments of each operator; the compressed branch gets T / stride keys."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(dtype)

    q, k, v = normal(B, S, G * h, D), normal(B, T, G, D), normal(B, T, G, Dv)
    indices = torch.randint(-1, T // 3 + 1, (B, S, G, 4), generator=rng)
    blocks = max(1, T // stride)
    pattern = (2 * stride, stride, 0.5, 2 * stride, [-1, 0, 1], [1, 2, 1], 3, 1, 1)
    return {
        "window": (q, k, v, max(1, S // 3), 0.5),
        "compressed": (q, k[:, :blocks], v[:, :blocks], *pattern),
        "selected": (q, k, v, indices, 3, 0.5),
    }


OPERATORS = list(inputs())  # what else is registered depends on the modules that other tests import
PRECISE = [kernel for name in OPERATORS for kernel in kernels(name, torch.float64)]


def operator(name: str):
    return getattr(torch.ops.nsa_compile, f"{name}_attention").default


def with_gradients(arguments: tuple) -> tuple:
    return tuple(x.detach().clone().requires_grad_() if i < 3 else x for i, x in enumerate(arguments))


@pytest.mark.deep(but=["portable1"])
@pytest.mark.parametrize("kernel", PRECISE)
def test_registration(kernel):
    with ops.force_implementation(kernel.name):
        torch.library.opcheck(operator(kernel.operator), with_gradients(inputs()[kernel.operator]))


@pytest.mark.deep(but=["cpu2"])
@pytest.mark.parametrize("kernel", PRECISE)
def test_gradcheck(kernel):
    arguments = with_gradients(inputs(B=1, S=7, T=7)[kernel.operator])
    with ops.force_implementation(kernel.name):
        assert torch.autograd.gradcheck(
            lambda *x: _finite(*operator(kernel.operator)(*x, *arguments[3:])), arguments[:3]
        )


def _finite(out: Tensor, lse: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return out, lse.masked_fill(lse == -torch.inf, 0.0)


@pytest.mark.parametrize("name", OPERATORS)
def test_indices_carry_no_gradient(name):
    out, lse, *indices = operator(name)(*with_gradients(inputs()[name]))
    assert out.requires_grad
    assert lse.requires_grad
    assert not any(x.requires_grad for x in indices)


@pytest.mark.parametrize("kernel", kernels("window", torch.float64))
def test_two_sets_of_keys_in_one_softmax(kernel):
    """Outputs weighted by the exponentials of their log-sum-exps are attention to all keys, gradients included."""
    q, *near = with_gradients(inputs()["window"])[:3]
    far = [x.detach().flip(1).requires_grad_() for x in near]
    with ops.force_implementation(kernel.name):
        (out, lse), (far_out, far_lse) = (operator("window")(q, *x, size, 0.5) for x, size in ((near, 3), (far, 5)))
    total = torch.logaddexp(lse, far_lse)
    joined = (lse - total).exp().unsqueeze(-1) * out + (far_lse - total).exp().unsqueeze(-1) * far_out

    ago = torch.arange(9)[:, None] - torch.arange(9)
    visible = torch.cat([(ago >= 0) & (ago < size) for size in (3, 5)], 1)
    keys, values = (torch.cat(x, 1) for x in zip(near, far, strict=True))
    expected, _, _ = masked_attention(q, keys, values, visible[:, None, None], 0.5)
    torch.testing.assert_close(joined, expected)
    gradients = [torch.autograd.grad(x.sin().sum(), (q, *near, *far)) for x in (joined, expected)]
    for found, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("name", OPERATORS)
def test_only_the_log_sum_exp_is_used(name):
    arguments = with_gradients(inputs()[name])
    losses = [_finite(*compute(*arguments))[1].sin().sum() for compute in (operator(name), reference(name))]
    *found, of_v = torch.autograd.grad(losses[0], arguments[:3])
    assert not of_v.any()
    for x, exact in zip(found, torch.autograd.grad(losses[1], arguments[:2]), strict=True):
        torch.testing.assert_close(x, exact)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_log_sum_exp_without_a_gradient_is_not_given_one(name):
    arguments = with_gradients(inputs()[name])
    with _Calls(f"nsa_compile.{name}_attention_backward.default") as seen:
        operator(name)(*arguments)[0].sum().backward()
    assert [call[1] for call in seen.calls] == [None]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (2, None, 1), (None, 3, None)])
def test_vmap_equals_a_loop(name, in_dims):
    arguments = inputs()[name]
    copies = 3
    leaves = []
    for x, dim in zip(arguments[:3], in_dims, strict=True):
        stacked = x if dim is None else torch.stack([x * (1 + i) for i in range(copies)], dim)
        leaves.append(stacked.requires_grad_())
    mapped = torch.vmap(lambda *x: operator(name)(*x, *arguments[3:]), in_dims=in_dims)(*leaves)
    one = [
        [x if dim is None else x.select(dim, i) for x, dim in zip(leaves, in_dims, strict=True)] for i in range(copies)
    ]
    looped = [torch.stack(x) for x in zip(*(operator(name)(*x, *arguments[3:]) for x in one), strict=True)]
    for a, b in zip(mapped, looped, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    gradients = [torch.autograd.grad(sum(y.sin().sum() for y in _finite(*x)), leaves) for x in (mapped, looped)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("cpu", torch.float32), ("vectors", torch.float32), ("cpu", torch.float64)]
)
def test_bits_do_not_depend_on_the_number_of_threads(name, implementation, dtype):
    arguments = inputs(B=1, S=1500, T=1500, D=16, Dv=8, dtype=dtype, stride=4)[name]
    kernel = KERNELS[name][implementation]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            outputs = kernel.forward(*arguments)
            gradients = kernel.backward(outputs[0], outputs[1].exp(), *arguments[:3], *outputs[:2], *arguments[3:])
            results.append((*outputs, *gradients))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_matrix_unit_is_as_exact_as_vectors(name, dtype):
    arguments = inputs(B=1, S=700, T=700, G=2, h=3, D=64, Dv=80, dtype=dtype, stride=4)[name]
    doubles = tuple(x.double() if i < 3 else x for i, x in enumerate(arguments))
    gradients = [x.nan_to_num(neginf=0) for x in KERNELS[name]["cpu"].forward(*doubles)[:2]]

    def results(implementation: str, arguments: tuple) -> list[Tensor]:
        kernel = KERNELS[name][implementation]
        out, lse, *_ = kernel.forward(*arguments)
        grads = (g.to(x.dtype) for g, x in zip(gradients, (out, lse), strict=True))
        found = kernel.backward(*grads, *arguments[:3], out, lse, *arguments[3:])
        # Of 16-bit numbers the matrix unit takes what makes the output exact in these, not the sums in float32.
        return [out, *([lse.nan_to_num(neginf=0)] if dtype == torch.float32 else []), *found]

    exact = results("cpu", doubles)
    errors = {
        implementation: [
            torch.linalg.vector_norm(x.double() - y) / torch.linalg.vector_norm(y)
            for x, y in zip(results(implementation, arguments), exact, strict=True)
        ]
        for implementation in ("cpu", "vectors")
    }
    for ours, vectors in zip(errors["cpu"], errors["vectors"], strict=True):
        assert ours <= 1.1 * vectors


class _Calls(TorchDispatchMode):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) == self.name:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        for x in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return outputs


@pytest.mark.parametrize("name", OPERATORS)
def test_portable_makes_no_tensor_of_quadratic_size(name):
    S = 4096
    arguments = inputs(B=1, S=S, T=S, G=1, h=1, D=4, Dv=4, dtype=torch.float32, stride=4)[name]
    with _LargestTensor() as largest:
        out, lse, *_ = KERNELS[name]["portable"].forward(*arguments)
        KERNELS[name]["portable"].backward(out, lse.exp(), *arguments[:3], out, lse, *arguments[3:])
    assert largest.elements < S * S / 4


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure peak memory")
@pytest.mark.parametrize("name", OPERATORS)
def test_cpp_takes_no_memory_of_quadratic_size(name):
    S = 8192
    arguments = inputs(B=1, S=S, T=S, G=1, h=1, D=4, Dv=4, dtype=torch.float32, stride=4)[name]
    kernel = KERNELS[name]["cpu"]
    kernel.prepare()
    before = peak_memory(reset=True)
    out, lse, *_ = kernel.forward(*arguments)
    kernel.backward(out, lse.exp(), *arguments[:3], out, lse, *arguments[3:])
    assert peak_memory() - before < S * S  # a quarter of a float for each pair


def test_large_outputs_are_ordinary_tensors():
    x = cpp.empty(torch.empty(0, dtype=torch.bfloat16), 2**12, 2**11 + 3, dtype=torch.float32)  # above 32 MB
    assert (x.shape, x.dtype, x.is_contiguous()) == ((2**12, 2**11 + 3), torch.float32, True)
    assert x.fill_(1).sum() == x.numel()


def test_small_numbers_stay_after_the_kernels_are_loaded():
    # Linking with -ffast-math would switch denormal numbers off for the whole process.
    cpp.load("window")
    assert (torch.tensor(1e-40) * torch.ones(64)).min() > 0


def test_flops_count_the_keys_that_are_seen():
    for queries, keys, window in [(10, 10, 3), (10, 4, 3), (3, 9, 20), (0, 4, 1)]:
        seen = sum(1 for s in range(queries) for p in range(keys) if s - window < p <= s)
        assert flops.window_pairs(queries, keys, window) == seen
    for queries, blocks, size, stride in [(40, 9, 8, 4), (40, 3, 8, 4), (5, 2, 8, 4), (7, 7, 1, 1)]:
        seen = sum(1 for s in range(queries) for j in range(blocks) if j * stride + size - 1 <= s)
        assert flops.compressed_pairs(queries, blocks, size, stride) == seen
    for queries, count, size in [(40, 3, 8), (20, 3, 8), (43, 1, 4), (5, 0, 4)]:
        seen = sum(min(s + 1, (count - 1) * size + s % size + 1) for s in range(queries)) if count else 0
        assert flops.selected_pairs(queries, queries, count, size) == seen


@pytest.mark.parametrize("name", OPERATORS)
def test_flop_counter(name):
    with FlopCounterMode(display=False) as counter:
        operator(name)(*with_gradients(inputs()[name]))[0].sum().backward()
    counts = {str(op).removeprefix("nsa_compile."): count for op, count in counter.get_flop_counts()["Global"].items()}
    # D = 3, Dv = 5: two products forwards, five backwards.
    assert counts[f"{name}_attention_backward"] / counts[f"{name}_attention"] == (3 * 3 + 2 * 5) / (3 + 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 9, 4)}, "q has shape [2, 9, 4]; it must be [batch, sequence, heads, head_dim]"),
        ({"q": torch.zeros(2, 9, 3, 3)}, "q has 3 heads and k has 2; Hq must be a positive multiple of G"),
        ({"q": torch.zeros(2, 9, 4, 3).int()}, "q has dtype torch.int32"),
        ({"k": torch.zeros(2, 9, 2, 3).half()}, "k has dtype torch.float16 and q torch.float32"),
        ({"k": torch.zeros(1, 9, 2, 3)}, "k has shape [1, 9, 2, 3]; with q [2, 9, 4, 3] it must be [2, T, G, 3]"),
        ({"v": torch.zeros(2, 8, 2, 5)}, "v has shape [2, 8, 2, 5]; with this k it must be [2, 9, 2, 'Dv']"),
        ({"window": 0}, "window = 0 must be at least 1"),
    ],
)
def test_errors_name_value_and_rule(change, message):
    q, k, v = (x.float() for x in inputs()["window"][:3])
    with pytest.raises(ValueError) as error:  # noqa: PT011
        ops.window_attention(**({"q": q, "k": k, "v": v, "window": 3} | change))
    assert message in str(error.value)


def test_errors_of_selection_and_indices():
    q, k, v = inputs()["window"][:3]
    pattern = {"block_size": 2, "stride": 2, "select_block": 3, "num_selected": 1}
    with pytest.raises(ValueError, match=r"select_block = 3 must be a multiple of stride = 2"):
        ops.compressed_attention(q, k, v, **pattern)
    with pytest.raises(ValueError, match=r"offsets = \[1, 0\] must ascend strictly"):
        ops.compressed_attention(q, k, v, **(pattern | {"select_block": 4}), offsets=[1, 0], weights=[1, 1])
    with pytest.raises(ValueError, match=r"indices has dtype torch.float32; it must be torch.int32 or torch.int64"):
        ops.selected_attention(q, k, v, torch.zeros(2, 9, 2, 1), block_size=4)
    with pytest.raises(ValueError, match=r"it must be \[2, 9, 2, 'n'\]"):
        ops.selected_attention(q, k, v, torch.zeros(2, 9, 4, 1, dtype=torch.int64), block_size=4)
