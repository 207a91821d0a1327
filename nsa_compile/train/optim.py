"""AdamW, its state as plain tensors, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from nsa_compile import inductor_files
from nsa_compile.config import OptimSection
from nsa_compile.train.low_precision import import_torchao

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(model: nn.Module, config: OptimSection) -> torch.optim.Optimizer:
    """AdamW whose decoupled weight decay spares norms and biases, the parameters with a single axis.

    Those of torchao compile a program for each shape of a parameter when they first take a step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.betas[0], config.betas[1])
    if config.name == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, fused=config.fused)
    inductor_files.prepare()
    library = import_torchao("torchao.optim")
    kind = {"adamw8bit": library.AdamW8bit, "adamw4bit": library.AdamW4bit}[config.name]
    return kind(groups, lr=config.lr, betas=betas)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next steps be taken at ``lr``."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # a constant would be compiled into torchao's step
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def empty_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps for a parameter, as it is before the first step: zeros."""
    if isinstance(optimizer, torch.optim.AdamW):
        moments = {name: torch.zeros_like(parameter) for name in MOMENTS}
    else:
        # The optimizer itself decides which parameters are worth quantizing; it tells in no public way.
        buffer: Any = optimizer._new_buffer  # pyrefly: ignore[missing-attribute]
        moments = {name: buffer(parameter, signed=name == "exp_avg") for name in MOMENTS}
    return {"step": torch.zeros(()), **moments}


def plain_state(state: Mapping[Any, Mapping[str, Tensor]]) -> dict[Any, Any]:
    """The state of an optimizer without torchao's classes, so that a checkpoint is read without them."""
    return {key: {name: plain_tensors(value) for name, value in entry.items()} for key, entry in state.items()}


def plain_tensors(moment: Tensor) -> Tensor | dict[str, Tensor]:
    """A moment as it is or, if quantized, its parts: the codes, a scale for each block, and what a code stands for."""
    if isinstance(moment, DTensor) or not is_traceable_wrapper_subclass(moment):
        return moment
    names, _ = moment.__tensor_flatten__()
    return {name: getattr(moment, name) for name in names}


def learning_rate(config: OptimSection, step: int, steps: int) -> float:
    """Learning rate of optimizer step ``step``, counted from 1 to ``steps``.

    It rises linearly to ``lr`` during the warm-up and falls along a cosine to ``min_lr_ratio · lr`` at the last step.
    """
    warmup = config.warmup_of(steps)
    if step <= warmup:
        return config.lr * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
