"""How good a model is on held-out sequences: its loss and, where a task has answers, how many it gets right."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from nsa_compile.data.synthetic import Mask, answer_accuracy

IGNORED = -100  # a target that torch's cross-entropy leaves out


def logits_and_loss(
    model: nn.Module, tokens: torch.Tensor, dtype: str, counted: Mask | None = None, **asked: bool
) -> tuple[torch.Tensor, ...]:
    """Logits ``[B, S, V]`` for ``tokens`` ``[B, S + 1]`` int64 and their mean cross-entropy in nats per token.

    Tokens that are uncounted, as of a source, are read and are no targets.

    Args:
        dtype: ``"float32"``, or ``"bf16"`` for autocast.
        counted: which tokens ``[S + 1]`` of every sequence the loss is about; ``None`` for all but the first.
        asked: ``return_auxiliary=True`` for what the model then returns as a third result.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=dtype == "bf16"):
        given = model(torch.where(tokens < 0, ~tokens, tokens)[:, :-1], **asked)
    logits, *further = given if asked else (given,)
    predicted, targets = logits, tokens[:, 1:]
    if counted is not None:
        chosen = torch.from_numpy(counted[1:]).to(tokens.device)
        predicted, targets = predicted[:, chosen], targets[:, chosen]
    targets = targets.masked_fill(targets < 0, IGNORED)
    # In float32: the sum over the vocabulary is where bf16 would hurt.
    return logits, F.cross_entropy(predicted.float().flatten(0, 1), targets.flatten()), *further


def counted_tokens(batch: npt.NDArray[np.int64]) -> int:
    """How many tokens of a batch ``[..., S + 1]`` are targets."""
    return int((batch[..., 1:] >= 0).sum())


def evaluate_answers(
    model: nn.Module,
    batches: npt.NDArray[np.int64],
    answers: Mask | None,
    device: torch.device,
    dtype: str,
    counted: Mask | None = None,
) -> tuple[float, float | None]:
    """Mean loss over held-out batches, and the share of the answers that the most probable token gets right.

    Args:
        batches: ``[N, B, S + 1]``.
        answers: which tokens ``[S + 1]`` of every sequence are answers; ``None`` where that is not known.
        dtype, counted: as for :func:`logits_and_loss`.

    Returns:
        The loss in nats per token, 0 where no token is a target, and the accuracy or, without ``answers``, ``None``.
    """
    # With gradients enabled, though none are taken: without them the blocks would be compiled a second time.
    losses, counts, predictions = [], [], []
    for batch in batches:
        logits, loss, *_ = logits_and_loss(model, torch.from_numpy(batch).to(device), dtype, counted)
        losses.append(loss.detach())
        if answers is not None:
            predictions.append(logits.detach().argmax(dim=-1))
        counts.append(counted_tokens(batch))
        del logits, loss  # and with them the graph, before the next batch needs its memory
    accuracy = None
    if answers is not None:
        accuracy = answer_accuracy(torch.stack(predictions).cpu().numpy(), batches, answers)
    if len(set(counts)) == 1 and counts[0]:
        return torch.stack(losses).mean().item(), accuracy
    # The loss of a batch without targets, which is NaN, is left out.
    parts = [(loss, count) for loss, count in zip(torch.stack(losses).tolist(), counts, strict=True) if count]
    return sum(loss * count for loss, count in parts) / max(1, sum(counts)), accuracy
