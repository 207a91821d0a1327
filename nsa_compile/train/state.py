"""Everything the rest of a run depends on: taken from a training, and put back into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn

from nsa_compile.config import RunConfig, flatten
from nsa_compile.data import BatchSampler, Resumable
from nsa_compile.errors import CheckpointError
from nsa_compile.train.checkpoints.files import STATE, rank_file
from nsa_compile.train.checkpoints.resume import first_difference
from nsa_compile.train.distributed.group import gather_to_main, shard_like, whole_state
from nsa_compile.train.distributed.world import World
from nsa_compile.train.nonfinite import NonFinitePolicy
from nsa_compile.train.optim import empty_state, plain_state, plain_tensors

_SHARED = {"step": int, "model": dict, "optimizer": dict, "sampler_position": int, "nonfinite": dict, "config": dict}


@dataclass(frozen=True)
class TrainingState:
    """The parts of a training that a checkpoint holds."""

    config: RunConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    sampler: BatchSampler
    nonfinite: NonFinitePolicy
    world: World = World()  # noqa: RUF009  immutable

    def files(self, step: int) -> dict[str, Any]:
        """The files of the checkpoint of ``step``, plain values and tensors: what ranks share, and what each has.

        Every process has to call this; only rank 0 gets the states of the others. A batch is a pure function of the
        seed and of the sampler's position, or each rank keeps the place of its source.
        """
        shared = {
            "step": step,
            "model": whole_state(self.model.state_dict()),
            # The groups follow from the configuration.
            "optimizer": plain_state(whole_state(self.optimizer.state_dict()["state"])),
            "sampler_position": self.sampler.position,
            "nonfinite": self.nonfinite.state_dict(),
            "config": self.config.plain(),
        }
        own: dict[str, Any] = {"rng": torch.get_rng_state()}
        if torch.cuda.is_available():
            own["cuda_rng"] = torch.cuda.get_rng_state()
        if isinstance(self.sampler.source, Resumable):
            own["source"] = self.sampler.source.state()
        everyones = gather_to_main(own) or []
        return {STATE: shared, **{rank_file(rank): state for rank, state in enumerate(everyones)}}

    def restore(self, files: Mapping[str, Any], step: int) -> None:
        """Put the files of the checkpoint of ``step`` back.

        On another number of processes than they were written by, only the state of the random generators is not
        restored, which nothing in a training step draws from.

        Raises:
            CheckpointError: they are not those of such a run; names what differs.
        """
        try:
            self._restore(files, step)
        except CheckpointError:
            raise
        except Exception as error:  # whatever else a state that anybody may have made up ends in
            raise CheckpointError(f"its state cannot be put back, which ended in {type(error).__name__}") from None

    def _restore(self, files: Mapping[str, Any], step: int) -> None:
        shared = files[STATE]
        everyones = [files[rank_file(rank)] for rank in range(len(files) - 1)]
        own = everyones[self.world.rank] if len(everyones) == self.world.size else None
        _require(all(isinstance(state, dict) for state in (shared, *everyones)), "its files must hold dicts")
        self._check_shared(shared, step)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        self._check_optimizer(shared["optimizer"], parameters, step)
        if own is not None:
            _check_generators(own)
        source, position = self.sampler.source, shared["sampler_position"]
        if isinstance(source, Resumable):
            source.restore([state.get("source") for state in everyones], position)

        present = self.model.state_dict()
        self.model.load_state_dict({name: shard_like(saved, present[name]) for name, saved in shared["model"].items()})
        moments = {
            index: _as_kept(entry, empty_state(self.optimizer, parameters[index]))
            for index, entry in shared["optimizer"].items()
        }
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.sampler.position = position
        self.nonfinite.load_state_dict(shared["nonfinite"])
        if own is not None:
            _set_generators(own)

    def _check_shared(self, shared: Mapping[str, Any], step: int) -> None:
        for name, kind in _SHARED.items():
            _require(isinstance(shared.get(name), kind), f"{name} in {STATE} must be of type {kind.__name__}")
        position, shape = shared["sampler_position"], self.config.train
        _require(_is_count(shared["step"]) and shared["step"] == step, f"step in {STATE} must be {step}")
        _require(position >= 0, "sampler_position must not be negative")
        expected = step * shape.accumulate * shape.batch_size
        _require(position <= expected, f"sampler_position must be at most {expected}, the sequences of {step} steps")
        difference = first_difference(self.config, shared["config"])
        _require(difference is None, f"it is of another configuration: {difference}")
        _check_tensors("model", shared["model"], self.model.state_dict())

    def _check_optimizer(self, moments: Mapping[Any, Any], parameters: Sequence[torch.Tensor], step: int) -> None:
        # Before the first step there are none.
        _require(not moments or set(moments) == set(range(len(parameters))), "the optimizer has other parameters")
        for index, entry in moments.items():
            _require(isinstance(entry, dict), f"optimizer.{index} must hold AdamW's moments")
            kept = empty_state(self.optimizer, parameters[index])
            like = {name: plain_tensors(tensor) for name, tensor in kept.items()}
            _check_tensors(f"optimizer.{index}", dict(flatten(entry)), dict(flatten(like)))
            steps = float(entry["step"])
            _require(0 <= steps <= step, f"optimizer.{index}.step must be a number from 0 to {step}")


def _check_generators(own: Mapping[str, Any]) -> None:
    names = {"rng", "cuda_rng"} if torch.cuda.is_available() else {"rng"}
    found = own.keys() - {"source"}
    _require(found == names, f"it has the generators {sorted(map(str, found))}, and this machine {sorted(names)}")
    for name in names:
        _require(_is_plain(own[name]) and own[name].dtype == torch.uint8, f"{name} must be a tensor of {torch.uint8}")


def _set_generators(own: Mapping[str, Any]) -> None:
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
            _is_plain(value) and value.shape == tensor.shape and value.dtype == tensor.dtype,
            f"{where}.{name} must be a tensor {list(tensor.shape)} of {tensor.dtype}, dense and with values",
        )
    _require(len(found) == len(expected), f"{where} must hold {len(expected)} tensors and has {len(found)}")


def _is_plain(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor whose numbers are there, one by one: not sparse, quantized, nested or without any."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, nn.Parameter)
        and value.layout == torch.strided
        and value.device.type != "meta"
        and not (value.is_quantized or value.is_nested)
    )


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**60


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise CheckpointError(rule)
