"""Everything the rest of a run depends on: taken from a training, and put back into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from nsa_compile.config import RunConfig
from nsa_compile.data import BatchSampler, Resumable
from nsa_compile.errors import CheckpointError
from nsa_compile.train.checkpoint_files import STATE, rank_file
from nsa_compile.train.distributed import gather_to_main, shard_like, whole_state
from nsa_compile.train.nonfinite import NonFinitePolicy
from nsa_compile.train.optim import empty_state, plain_state, plain_tensors
from nsa_compile.train.resume import first_difference, flatten
from nsa_compile.train.world import World

_SHARED = {"step": int, "model": dict, "optimizer": dict, "sampler_position": int, "nonfinite": dict, "config": dict}


def training_states(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: BatchSampler,
    nonfinite: NonFinitePolicy,
    step: int,
    config: RunConfig,
) -> dict[str, Any]:
    """The files of a checkpoint, as tensors and plain values: what all ranks share, and what each has of its own.

    Every process has to call this; only rank 0 gets the states of the others. A batch is a pure function of the seed
    and of the sampler's position, or each rank keeps the place of its source.
    """
    shared = {
        "step": step,
        "model": whole_state(model.state_dict()),
        # The groups follow from the configuration.
        "optimizer": plain_state(whole_state(optimizer.state_dict()["state"])),
        "sampler_position": sampler.position,
        "nonfinite": nonfinite.state_dict(),
        "config": config.model_dump(),
    }
    own: dict[str, Any] = {"rng": torch.get_rng_state()}
    if torch.cuda.is_available():
        own["cuda_rng"] = torch.cuda.get_rng_state()
    if isinstance(sampler.source, Resumable):
        own["source"] = sampler.source.state()
    everyones = gather_to_main(own) or []
    return {STATE: shared, **{rank_file(rank): state for rank, state in enumerate(everyones)}}


def restore_training(
    states: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    sampler: BatchSampler,
    nonfinite: NonFinitePolicy,
    step: int,
    config: RunConfig,
    world: World = World(),  # noqa: B008  immutable
) -> None:
    """Put the states of the checkpoint of ``step`` back.

    On another number of processes than it was written by, only the state of the random generators is not restored,
    which nothing in a training step draws from.

    Raises:
        CheckpointError: they are not those of such a run; names what differs.
    """
    shared = states[STATE]
    everyones = [states[rank_file(rank)] for rank in range(len(states) - 1)]
    own = everyones[world.rank] if len(everyones) == world.size else None
    _require(all(isinstance(state, dict) for state in (shared, *everyones)), "its files must hold dicts")
    for name, kind in _SHARED.items():
        _require(isinstance(shared.get(name), kind), f"{name} in {STATE} must be of type {kind.__name__}")
    _require(shared["step"] == step, f"step = {shared['step']} in {STATE} must be {step}")
    _require(shared["sampler_position"] >= 0, f"sampler_position = {shared['sampler_position']} must not be negative")
    difference = first_difference(config, shared["config"])
    _require(difference is None, f"it is of another configuration: {difference}")
    _check_tensors("model", shared["model"], model.state_dict())
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = shared["optimizer"]
    # Before the first step there are none.
    _require(not moments or set(moments) == set(range(len(parameters))), "the optimizer has other parameters")
    for index, entry in moments.items():
        _require(isinstance(entry, dict), f"optimizer.{index} must hold AdamW's moments")
        like = {name: plain_tensors(tensor) for name, tensor in empty_state(optimizer, parameters[index]).items()}
        _check_tensors(f"optimizer.{index}", dict(flatten(entry)), dict(flatten(like)))
    source = sampler.source
    names = {"rng", "cuda_rng"} if torch.cuda.is_available() else {"rng"}
    if own is not None:
        generators = own.keys() - {"source"}
        _require(
            generators == names,
            f"it has the generators {sorted(map(str, generators))}, and this machine {sorted(names)}",
        )
    if isinstance(source, Resumable):
        source.restore([state.get("source") for state in everyones], shared["sampler_position"])

    present = model.state_dict()
    model.load_state_dict({name: shard_like(tensor, present[name]) for name, tensor in shared["model"].items()})
    for index, entry in moments.items():
        moments[index] = _as_kept(entry, empty_state(optimizer, parameters[index]))
    optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    sampler.position = shared["sampler_position"]
    nonfinite.load_state_dict(shared["nonfinite"])
    if own is None:
        return
    try:
        torch.set_rng_state(own["rng"])
        if "cuda_rng" in own:
            torch.cuda.set_rng_state(own["cuda_rng"])
    except (RuntimeError, TypeError, AttributeError):
        raise CheckpointError("the state of the random generators is not one of torch's") from None


def _as_kept(saved: Mapping[str, Any], empty: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state of a parameter as the optimizer keeps it: sharded, or quantized."""
    state = {}
    for name, moment in empty.items():
        if isinstance(saved[name], Mapping):
            for part, tensor in saved[name].items():
                getattr(moment, part).copy_(tensor)
            state[name] = moment
        else:
            state[name] = shard_like(saved[name], moment)
    return state


def _check_tensors(where: str, found: dict[Any, Any], expected: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        value = found.get(name)
        _require(
            isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dtype == tensor.dtype,
            f"{where}.{name} must be a tensor {list(tensor.shape)} of {tensor.dtype}",
        )
    _require(len(found) == len(expected), f"{where} must hold {len(expected)} tensors and has {len(found)}")


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise CheckpointError(rule)
