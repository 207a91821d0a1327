"""One optimizer step, on one process or many."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from nsa_compile.data.synthetic import Mask
from nsa_compile.train.distributed.all_reduce import AllReduceHook, Overlap
from nsa_compile.train.distributed.group import gradients_stay_local, mean_of_all, whole
from nsa_compile.train.evaluation import counted_tokens, logits_and_loss
from nsa_compile.train.optim import set_learning_rate
from nsa_compile.train.phases import PhaseTimer


@dataclass(frozen=True)
class StepResult:
    """What a step came to, the same in every process but for ``own_loss`` and ``overlap``.

    Attributes:
        loss: mean over the micro batches of all processes, in nats per token.
        grad_norm: of the mean gradient, before clipping.
        own_loss: of this process's part of the batch; on the device, since hardly anybody asks.
        overlap: when this process sent its gradients; ``None`` where DDP did not.
    """

    loss: float
    grad_norm: float
    own_loss: torch.Tensor
    overlap: Overlap | None = None

    @property
    def finite(self) -> bool:
        """Whether the weights were changed: no update is made of a loss or a gradient that is not finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[np.ndarray],
    lr: float,
    clip: float | None,
    device: torch.device,
    dtype: str,
    timer: PhaseTimer | None = None,
    hook: AllReduceHook | None = None,
    counted: Mask | None = None,
    varies: bool = False,
    auxiliary: bool = False,
) -> StepResult:
    """One optimizer step over micro batches ``[B, S + 1]``, equal to one step over all of them at once.

    Args:
        model: tokens to logits; wrapped in DDP or FSDP where other processes work on batches of their own.
        batches: this process's micro batches.
        clip: greatest norm of the gradient; ``None`` for any.
        dtype, counted: as for :func:`~nsa_compile.train.evaluation.logits_and_loss`.
        varies: whether sequences differ in how many of their tokens the loss is about; it is the mean over all of them,
            of all micro batches and processes.
        auxiliary: whether layers of the model have losses of their own; the gradient is that of their mean, too.
        timer: told of each phase.
        hook: the communication hook of a model wrapped in DDP.
    """
    timer = timer or PhaseTimer(device)
    total = torch.zeros((), device=device)
    parts = _parts(batches, device) if varies else [len(batches)] * len(batches)
    asked = {"return_auxiliary": True} if auxiliary else {}
    for number, batch in enumerate(batches, start=1):
        last = number == len(batches)
        # Gradients are sent once a step, when those of the last micro batch have been added.
        with contextlib.nullcontext() if last else gradients_stay_local(model):
            with timer.phase("forward"):
                # Not a name for the logits: they would live through the backward pass.
                loss, *own = logits_and_loss(model, torch.from_numpy(batch).to(device), dtype, counted, **asked)[1:]
                loss = loss / parts[number - 1]
            with timer.phase("backward"):
                if hook is not None and last:
                    hook.begin()
                sum((x / len(batches) for x in own), start=loss).backward()
        total += loss.detach()
    overlap = None if hook is None else hook.end()

    with timer.phase("optimizer"):
        norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip))
    with timer.phase("communication"):
        # The one place a step waits for the device. A loss that is not finite in one process is so in the mean, so
        # that all of them leave their weights as they are, or none.
        values = torch.stack((total, norm)).double()
        loss_value, norm_value = mean_of_all(values).tolist()
    result = StepResult(loss_value, norm_value, total, overlap)
    with timer.phase("optimizer"):
        if result.finite:
            set_learning_rate(optimizer, lr)
            optimizer.step()
        optimizer.zero_grad()
    return result


def _parts(batches: list[np.ndarray], device: torch.device) -> list[float]:
    """What the loss of each micro batch is divided by, so that every target of all processes counts alike."""
    counts = [counted_tokens(batch) for batch in batches]
    mean = mean_of_all(torch.tensor(float(sum(counts)), dtype=torch.float64, device=device)).item()
    return [mean / count for count in counts]
