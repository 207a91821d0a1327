"""Training on several processes: joining them, sharing the model, and what they have to agree on."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from nsa_compile.config import DDPSection, RunConfig
from nsa_compile.models import NSATransformer
from nsa_compile.train.distributed.all_reduce import COMPRESSED, AllReduceHook
from nsa_compile.train.distributed.buckets import bucket_mb
from nsa_compile.train.distributed.world import NCCL_PRESETS, World

Value = TypeVar("Value")

# Groups that were left, kept until nothing else refers to them. Torch ends a group's threads without Python's lock if
# the last reference is this one, and with it if it is that of DDP: then each waits for the other forever where a
# thread has a tensor to give back (pytorch issue 56297).
_left: list[Any] = []
atexit.register(_left.clear)


def choose_device(config: RunConfig, world: World) -> torch.device:
    """The GPU of this process, or the CPU."""
    if config.train.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.local_rank)


@contextlib.contextmanager
def process_group(config: DDPSection, world: World, device: torch.device) -> Iterator[None]:
    """Join the other processes for as long as the context lasts; alone, do nothing."""
    if world.size == 1:
        yield
        return
    os.environ.update(world.rendezvous)
    for name, value in NCCL_PRESETS[config.nccl_preset].items():
        os.environ.setdefault(name, value)
    backend = config.backend
    if backend == "auto":
        backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=config.timeout_s))
    try:
        yield
    finally:
        leave_group()


def leave_group() -> None:
    """Leave the process group. What was made with it, such as a model in DDP, may live on."""
    _left.append(dist.group.WORLD)
    dist.destroy_process_group()


def share_model(
    model: NSATransformer, config: DDPSection, world: World, device: torch.device, hook: AllReduceHook | None
) -> nn.Module:
    """The model to call in training: wrapped in DDP, sharded in place by FSDP2, or unchanged on one process.

    The blocks must have been compiled before. One by one, so that gradients become ready block by block and are sent
    while the backward pass goes on; the whole model in one graph would hand them over together.
    """
    if world.size == 1:
        return model
    if config.strategy == "fsdp":
        # What is sent and added up is low precision; weights, gradients and optimizer state stay float32.
        policy = MixedPrecisionPolicy(reduce_dtype=COMPRESSED[config.compress])
        mesh = dist.device_mesh.init_device_mesh(device.type, (world.size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    # A block is compiled while DDP's forward runs; by default the compiler would cut it where a bucket ends.
    torch._dynamo.config.optimize_ddp = False
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb(config, model),
        gradient_as_bucket_view=True,
    )
    assert hook is not None
    wrapped.register_comm_hook(None, hook.reduce)
    return wrapped


@contextlib.contextmanager
def gradients_stay_local(model: nn.Module) -> Iterator[None]:
    """Add gradients up in this process; the first backward pass after this context sends them."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def mean_of_all(value: Tensor) -> Tensor:
    """Mean of a tensor over all processes, the same in each."""
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value


def all_reduce_max(value: int, device: torch.device) -> int:
    """The greatest of a number over all processes."""
    greatest = torch.tensor(value, device=device)
    if dist.is_initialized():
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
    return int(greatest)


def broadcast(value: Value | None) -> Value:
    """The value that the first process has; the others pass None."""
    values: list[Any] = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def gather_to_main(value: Value) -> list[Value] | None:
    """The values of all processes in the order of their ranks, in the first process; None in the others."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values


def all_gather(value: Value) -> list[Value]:
    """The values of all processes in the order of their ranks, in each."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Return when every process has come here."""
    if dist.is_initialized():
        dist.barrier()


def whole(tensor: Tensor) -> Tensor:
    """A tensor that FSDP shards, put together; every process has to take part."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, example: Tensor) -> Tensor:
    """The share of a whole tensor that this process keeps, sharded as `example` is."""
    if isinstance(example, DTensor):
        tensor = tensor.to(example.device)
        return distribute_tensor(tensor, example.device_mesh, example.placements)
    return tensor


def whole_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Nested dicts of tensors, each put together and on the CPU as soon as it is, so that one at a time is whole."""
    result: dict[Any, Any] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            result[key] = whole_state(value)
        elif isinstance(value, DTensor):
            result[key] = value.full_tensor().cpu()
        else:
            result[key] = value
    return result
