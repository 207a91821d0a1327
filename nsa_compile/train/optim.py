"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from nsa_compile.config import OptimSection


def make_optimizer(model: nn.Module, config: OptimSection) -> torch.optim.AdamW:
    """AdamW whose decoupled weight decay spares norms and biases, the parameters with a single axis."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        fused=config.fused,
    )


def learning_rate(config: OptimSection, step: int, steps: int) -> float:
    """Learning rate of optimizer step ``step``, counted from 1 to ``steps``.

    It rises linearly to ``lr`` at step ``warmup`` and falls along a cosine to ``min_lr_ratio · lr`` at the last step.
    """
    if step <= config.warmup:
        return config.lr * step / config.warmup
    progress = (step - config.warmup) / max(1, steps - config.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
