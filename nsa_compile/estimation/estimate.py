"""What a run needs, before it starts: memory, arithmetic, time and disk.

Memory comes from the graphs of the run itself. One block goes through the whole compiler on fake tensors, up to the
point where Inductor would write code: the partitioner has then decided what the forward graph keeps for backward. The
head and the loss run as the trainer runs them. From that, a step is played through block by block.

What is not counted: what an allocator holds but does not use, and the working memory of single kernels. What is counted
too high: the backward graph's temporaries, many of which Inductor never writes to memory.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import nsa_compile
from nsa_compile.analyses.estimate import peak_of
from nsa_compile.backend import optimize, parse_options, specialize_shapes
from nsa_compile.config import RunConfig
from nsa_compile.errors import UserError
from nsa_compile.models import NSAConfig, NSATransformer
from nsa_compile.models.flops import forward_flops_per_token
from nsa_compile.models.transformer import Block
from nsa_compile.profiles.measure import random_tokens, seconds_of
from nsa_compile.train.low_precision import convert_linear_layers
from nsa_compile.train.optim import make_optimizer
from nsa_compile.train.steps import train_step

# Bits and block of a quantized moment: it has a float32 scale for each block of values, and a table of what its codes
# stand for. Weights that are small, or no multiple of a block, have moments in float32.
_QUANTIZED = {"adamw8bit": (8, 256), "adamw4bit": (4, 128)}
_QUANTIZED_FROM = 4096

REPEATS = 5


@dataclass(frozen=True)
class BlockMemory:
    """What one block needs on one process, in bytes.

    Attributes:
        parameters: its weights.
        input: the activations it is given, ``[B, S, dim]``.
        saved: what its forward pass leaves for backward, its input among it.
        indices: the selected blocks, which it keeps even if it is computed again in the backward pass.
        forward: peak of its forward pass, ``saved`` without the input among it.
        backward: peak of its backward pass on top of ``saved``, the gradients of its weights among it.
    """

    parameters: int
    input: int
    saved: int
    indices: int
    forward: int
    backward: int


@dataclass(frozen=True)
class MemoryEstimate:
    """What a process needs for a step, in bytes.

    Attributes:
        weights: parameters, its share of them under FSDP.
        gradients: likewise.
        optimizer: state of the optimizer, likewise.
        communication: DDP's buckets, or the weights and gradients that FSDP gathers for a block.
        activations: kept for backward when the forward pass is over.
        peak: most of all this alive at one time.
    """

    weights: int
    gradients: int
    optimizer: int
    communication: int
    activations: int
    peak: int
    peak_at: str
    block: BlockMemory


def count_parameters(model: NSAConfig) -> int:
    """Elements of all weights."""
    with torch.device("meta"):
        return sum(p.numel() for p in NSATransformer(model).parameters())


def estimate_memory(
    config: RunConfig,
    device: torch.device,
    processes: int = 1,
    block: BlockMemory | None = None,
) -> MemoryEstimate:
    """Memory of one of ``processes``; the linear layers are taken to multiply in the numbers of ``train.dtype``.

    Args:
        config: the run.
        device: where it trains; decides which operators attention becomes.
        processes: share the micro batch evenly.
        block: what a block needs, where that is known; it is what takes long.

    Raises:
        UserError: the compiler leaves the loop over tokens in place, whose memory nothing here predicts, or layers
            differ.
    """
    config.require_equal_layers()
    batch = config.train.batch_size // processes
    block = block or _block_memory(config, device, batch)
    with FakeTensorMode():
        with device:
            model = NSATransformer(config.model)
        sizes = [parameter.numel() for parameter in model.parameters()]
        embedding = model.embedding.weight.nbytes
        head, head_gradients = _head_peak(model, config, device, batch)
    checkpointed, strategy = config.checkpointed_blocks(), config.ddp.strategy
    weights, state = 4 * sum(sizes), sum(_state_bytes(size, config.optim.name) for size in sizes)
    share = processes if strategy == "fsdp" else 1
    communication = 0
    if processes > 1:
        # FSDP gathers the weights of the next block while it works on one, whose gradients are still whole.
        communication = weights if strategy == "ddp" else 3 * block.parameters
    weights, gradients, state = (-(-value // share) for value in (weights, weights, state))
    resident = weights + state + communication

    layers = range(config.model.n_layers)
    kept = [block.input + block.indices if i in checkpointed else block.saved for i in layers]
    moments = []
    held = resident + (gradients if config.train.accumulate > 1 else 0)
    for i in layers:
        moments.append((held + sum(kept[:i]) + block.input + block.forward, f"the forward pass of block {i}"))
    # The output of the last block, which no block keeps.
    held += block.input
    moments.append((held + sum(kept) + head, "the head and the loss"))
    grown = head_gradients
    for i in reversed(layers):
        again = max(block.forward, block.saved) if i in checkpointed else 0
        now = held + (0 if config.train.accumulate > 1 else grown // share) + sum(kept[: i + 1]) + again
        moments.append((now + block.backward, f"the backward pass of block {i}"))
        grown += block.parameters
    moments.append((resident + gradients + embedding, "the gradient of the embedding"))
    peak, peak_at = max(moments, key=lambda moment: moment[0])
    return MemoryEstimate(weights, gradients, state, communication, sum(kept), peak, peak_at, block)


def _state_bytes(size: int, optimizer: str) -> int:
    """Both moments of a weight of ``size`` elements."""
    bits, block = _QUANTIZED.get(optimizer, (32, 1))
    if bits == 32 or size < _QUANTIZED_FROM or size % block:
        return 2 * 4 * size
    return 2 * (size * bits // 8 + 4 * size // block + 4 * 2**bits)


def _block_memory(config: RunConfig, device: torch.device, batch: int) -> BlockMemory:
    """One block, compiled on fake tensors up to the point where Inductor would write code."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.exc import BackendCompilerFailed
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    graphs: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        graphs[:] = min_cut_rematerialization_partition(joint, inputs, **options)
        return graphs[0], graphs[1]

    def backend(gm: fx.GraphModule, inputs: Any, **_: Any) -> Any:
        specialize_shapes(gm, inputs)
        report, _written = optimize(gm, parse_options({"disable": config.compile.disable}), inputs)
        if not all(scan.batched for scan in report.scans):
            raise UserError(
                "the compiler leaves the loop over tokens in place, and its memory cannot be estimated; "
                "nsa-compile passes explain tells why"
            )

        def compiler(graph: fx.GraphModule, _: Any) -> Any:
            return make_boxed_func(graph.forward)

        return aot_autograd(
            fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, decompositions=select_decomp_table()
        )(gm, inputs)

    with FakeTensorMode():
        with device:
            block = Block(config.model)
        x = torch.empty(batch, config.train.seq_len, config.model.dim, device=device, requires_grad=True)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.dtype == "bf16"):
            try:
                asked = {"return_auxiliary": True} if block.attention.auxiliary else {}
                torch.compile(block, backend=backend, fullgraph=True, dynamic=False)(x, **asked)
            except BackendCompilerFailed as error:
                raise error.inner_exception from None
        parameters = sum(p.nbytes for p in block.parameters())
    forward, backward = graphs
    outputs: Any = forward.graph.output_node().args[0]
    # The first output is the block's own; weights that are kept are there anyway.
    kept = {n for n in outputs[1:] if n.op != "placeholder" or _value(n).shape == x.shape}
    storages = {_value(n).untyped_storage()._cdata: _value(n).untyped_storage().nbytes() for n in kept}
    selecting = forward.graph.find_nodes(op="call_function", target=torch.ops.nsa_compile.compressed_attention.default)
    indices = sum(_value(node)[2].nbytes for node in selecting)
    saved = sum(storages.values())
    return BlockMemory(parameters, x.nbytes, saved, indices, _graph_peak(forward), _graph_peak(backward))


def _value(node: fx.Node) -> Any:
    return node.meta["val"]


def _graph_peak(gm: fx.GraphModule) -> int:
    """Most bytes alive at one time of what a graph makes, its outputs to the end."""
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = next(x.fake_mode for x in inputs if hasattr(x, "fake_mode"))
    with mode, torch.no_grad():
        return peak_of(lambda: fx.Interpreter(gm).run(*inputs), [x for x in inputs if isinstance(x, Tensor)])


def _head_peak(model: NSATransformer, config: RunConfig, device: torch.device, batch: int) -> tuple[int, int]:
    """Peak of the head and the loss, forward and backward, and the gradients they leave: within a fake mode."""
    shape = (batch, config.train.seq_len)
    x = torch.empty(*shape, config.model.dim, device=device, requires_grad=True)
    targets = torch.zeros(shape, dtype=torch.int64, device=device)
    tail = nn.Sequential(model.norm, model.head)

    def work() -> list[Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.dtype == "bf16"):
            logits = tail(x)
        F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()).backward()
        return [p.grad for p in (x, *tail.parameters()) if p.grad is not None]

    peak = peak_of(work, [x, targets, *tail.parameters()])
    return peak, sum(p.nbytes for p in tail.parameters())


def checkpoint_bytes(config: RunConfig) -> int:
    """Size of a checkpoint: the weights and the state of the optimizer, of all processes together."""
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in NSATransformer(config.model).parameters()]
    return sum(4 * size + _state_bytes(size, config.optim.name) for size in sizes)


def checkpoints_on_disk(config: RunConfig) -> int:
    """How many checkpoints a run has on the disk at most: those it keeps, and the one it is writing."""
    train = config.train
    saves = train.steps // train.save_every + bool(train.steps % train.save_every) if train.save_every else 1
    return min(saves, train.keep_last + train.keep_best + 1)


def step_flops(config: RunConfig) -> float:
    """Matmul FLOPs of an optimizer step, of all processes together; what is run again in backward counts again."""
    train, model = config.train, config.model
    forward = forward_flops_per_token(model, train.seq_len)
    head = 2.0 * model.dim * model.vocab_size
    again = (forward - head) * len(config.checkpointed_blocks()) / model.n_layers
    return (3 * forward + again) * train.seq_len * train.batch_size * train.accumulate


def make_step(config: RunConfig, device: torch.device, batch_size: int) -> Callable[[], Any]:
    """A function that does an optimizer step of the configured model, compiled, on random micro batches."""
    train, optim = config.train, config.optim
    torch.manual_seed(config.run.seed)
    model = NSATransformer(config.model).to(device)
    model.checkpoint_blocks(config.checkpointed_blocks())
    if train.matmul != "native":
        convert_linear_layers(model, train.matmul)
    nsa_compile.compile_blocks(model, nested=config.compile.nested, disable=config.compile.disable)
    batches = [random_tokens(config.model, train.seq_len + 1, batch_size).numpy()] * train.accumulate
    rest = (batches, optim.lr, optim.clip, device, train.dtype)
    return partial(train_step, model, make_optimizer(model, optim), *rest, auxiliary=config.model.auxiliary)


def measure_step(config: RunConfig, device: torch.device, processes: int = 1) -> dict[str, float]:
    """Train models of one and of two blocks for some steps on one process, and go on from them to the model's depth.

    All activations are kept, whatever ``train.activation_checkpointing`` says.

    Returns:
        Median seconds of a step of each, and ``"seconds"`` of a step of the whole model, communication not counted.
    """
    config.require_equal_layers()

    def step(layers: int) -> Callable[[], Any]:
        model = dataclasses.replace(config.model, n_layers=layers)
        kept = config.changed(train={"activation_checkpointing": "none"}).model_copy(update={"model": model})
        return make_step(kept, device, config.train.batch_size // processes)

    works = [step(layers) for layers in (1, 2)]
    for work in works:
        work()
    # In turns, so that a slow moment of the machine falls on both.
    samples = [[seconds_of(work, device) for work in works] for _ in range(REPEATS)]
    one, two = (statistics.median(column) for column in zip(*samples, strict=True))
    return {"one_block": one, "two_blocks": two, "seconds": one + (config.model.n_layers - 1) * max(0.0, two - one)}
