"""How large the buckets are in which DDP sends gradients. Imports no torch early."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_compile.config import DDPSection, RunConfig

if TYPE_CHECKING:
    from torch import nn

# A small model has buckets small enough that the first is sent long before the last is there.
FEWEST_BUCKETS = 4
# What DDP takes at least, in MB.
LEAST_MB = 1.0


def bucket_mb(config: DDPSection, model: nn.Module) -> float:
    """The MB of a bucket that this model is trained with: ``ddp.bucket_mb``, or what makes ``FEWEST_BUCKETS`` of it."""
    gradient_mb = sum(parameter.numel() * 4 for parameter in model.parameters()) / 2**20
    return max(LEAST_MB, min(config.bucket_mb, gradient_mb / FEWEST_BUCKETS))


def effective_bucket_mb(config: RunConfig, nproc: int) -> float | None:
    """What :func:`bucket_mb` will be in a run of this configuration; ``None`` where DDP sends nothing.

    Two configurations with equal values here are the same to DDP. No weights are made: the model is one of shapes.
    """
    if nproc == 1 or config.ddp.strategy != "ddp":
        return None
    import torch

    from nsa_compile.models import NSATransformer

    with torch.device("meta"):
        return bucket_mb(config.ddp, NSATransformer(config.model))
