"""What would make a GPU wait: a break in a block's graph, or a size or value read back by the host."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from nsa_compile.analyses import attention_costs
from nsa_compile.backend import optimize, parse_options, specialize_shapes
from nsa_compile.config import load_config
from nsa_compile.models.transformer import Block
from nsa_compile.ops.dispatch import KERNELS
from tests.models.test_nsa import tiny_model
from tests.ops.triton_cases import on_cuda

CONFIGS = Path(__file__).parents[2] / "configs"
OPERATORS = ("window", "compressed", "selected")
READS_BACK = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "bincount", "equal")


class Stopped(Exception):
    """Ends a compilation after the passes."""


@pytest.mark.deep
@pytest.mark.parametrize("preset", ["nsa_125m_gpt2.yaml", "m7c_125m_2xa100_production.yaml"])
def test_on_cuda_the_presets_attend_with_the_operators_in_bf16(preset, monkeypatch):
    """The passes on fake tensors, with the costs of a CUDA device."""
    monkeypatch.setattr(attention_costs, "machine", lambda device: "cuda")
    config = load_config(str(CONFIGS / preset))
    called: dict[str, set[torch.dtype]] = {}

    def backend(gm, inputs, **_):
        specialize_shapes(gm, inputs)
        optimize(gm, parse_options({"cache": False}), inputs)
        for operator in OPERATORS:
            target = getattr(torch.ops.nsa_compile, f"{operator}_attention").default
            (node,) = gm.graph.find_nodes(op="call_function", target=target)
            called[operator] = {x.meta["example_value"].dtype for x in node.args[:3]}
        raise Stopped

    torch._dynamo.reset()
    with FakeTensorMode():
        block = Block(config.model)
        x = torch.empty(1, 2048, config.model.dim, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(Exception, match="Stopped"):
            torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(x)
    assert called == {operator: {torch.bfloat16} for operator in OPERATORS}


@pytest.mark.deep
def test_a_compiled_block_is_one_graph_that_reads_nothing_back():
    """On fake tensors, up to the point where Inductor would write code; operators are chosen as on any device."""
    graphs = []

    def partition(joint, inputs, **options):
        graphs[:] = min_cut_rematerialization_partition(joint, inputs, **options)
        return graphs

    def backend(gm, inputs, **_):
        specialize_shapes(gm, inputs)
        optimize(gm, parse_options({"attention": "sparse", "cache": False}), inputs)

        def compiler(graph, _):
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(gm, inputs)

    config = tiny_model(n_layers=1).config
    torch._dynamo.reset()
    with FakeTensorMode():
        block = Block(config)
        x = torch.empty(2, 40, config.dim, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(x)
    calls = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    names = [str(node.target) for node in calls]
    for operator in OPERATORS:
        assert names.count(f"nsa_compile.{operator}_attention.default") == 1, "computed once, not again in backward"
        assert names.count(f"nsa_compile.{operator}_attention_backward.default") == 1
    assert not [name for name in names if name.split(".")[-2:][0] in READS_BACK]


class Unlaunched:
    """A kernel that is given its arguments and does nothing."""

    def __getitem__(self, grid):
        return lambda *arguments, **constants: None


@pytest.fixture
def unlaunched(monkeypatch):
    pytest.importorskip("triton")
    assert all(kernel.code for kernels in KERNELS.values() for kernel in kernels.values()), "loaded"
    for name, module in list(sys.modules.items()):
        if name.startswith("nsa_compile.ops") and "triton" in name:
            for kernel in [attribute for attribute in vars(module) if attribute.endswith("_kernel")]:
                monkeypatch.setattr(module, kernel, Unlaunched())


@pytest.mark.parametrize("heads", [2, 32])
@on_cuda
@pytest.mark.usefixtures("unlaunched")
def test_the_code_around_the_kernels_reads_nothing_back(kernel, heads):
    """Fake tensors have no values: whatever asks for one raises."""
    operator = kernel.operator
    with FakeTensorMode():
        q, grad = (torch.empty(1, 256, heads, 32, dtype=torch.bfloat16) for _ in range(2))
        k, v = (torch.empty(1, 256, 2, 32, dtype=torch.bfloat16) for _ in range(2))
        tensors, parameters = (q, k, v), {"window": (64, 0.1), "selected": (16, 0.1)}.get(operator)
        if operator == "compressed":
            k, v = (torch.empty(1, 15, 2, 32, dtype=torch.bfloat16) for _ in range(2))
            tensors, parameters = (q, k, v), (32, 16, 0.1, 64, [-1, 0, 1], [1, 2, 1], 3, 1, 1)
        extra = (torch.empty(1, 256, 2, 3, dtype=torch.int32),) if operator == "selected" else ()
        out, lse, *_ = kernel.forward(*tensors, *extra, *parameters)
        gradients = kernel.backward(grad, None, *tensors, out, lse, *extra, *parameters)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_scored_attention_reads_nothing_back():
    """Which tiles are read is known before."""
    tiles = torch.ones(4, 4, dtype=torch.uint8).tril()
    kernel = KERNELS["scored"]["portable"].code
    program = "v0 = add.Tensor(s0, x0)\nreturn v0"
    with FakeTensorMode():
        q, grad = (torch.empty(1, 256, 2, 32, dtype=torch.bfloat16) for _ in range(2))
        k, v, bias = torch.empty(1, 256, 32), torch.empty(1, 256, 32), torch.empty(1, 256, 1, 256)
        out, lse, _ = kernel.forward([q], [k], v, [bias], program, tiles)
        gradients = kernel.backward(grad, None, [q], [k], v, [bias], out, lse, program, "return g, g", tiles, [0])
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v, bias)]


def test_fake_tensors_do_raise():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(()).item()
