"""Loss and accuracy on held-out sequences."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch

from nsa_compile.data.synthetic import Copying
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.train.evaluation import evaluate_answers

CPU = torch.device("cpu")
LENGTH = 25


class Oracle(torch.nn.Module):
    """Predicts what stood `distance` tokens before the next one: the copying task's answers, and little else."""

    def __init__(self, distance: int, wrong: int = 0) -> None:
        super().__init__()
        self.distance = distance
        self.wrong = wrong
        self.scale = torch.nn.Parameter(torch.tensor(9.0))

    def forward(self, tokens):
        guess = tokens.roll(self.distance - 1, dims=1)
        guess[:, -1 - self.wrong : -1] = 0
        return torch.nn.functional.one_hot(guess, 256) * self.scale


def batches(count=3):
    task = Copying(1, held_out=True)
    return np.stack([[task.sequence(2 * i + j, LENGTH) for j in range(2)] for i in range(count)])


def test_accuracy_counts_the_answers_alone():
    # String, separator, string again: 12 answers, each 13 tokens after what it repeats.
    answers = Copying(1).answers(LENGTH)
    assert evaluate_answers(Oracle(13), batches(), answers, CPU, "float32")[1] == 1.0
    assert evaluate_answers(Oracle(13, wrong=3), batches(), answers, CPU, "float32")[1] == 0.75
    assert evaluate_answers(Oracle(13), batches(), None, CPU, "float32")[1] is None


def test_the_loss_is_the_mean_over_all_batches():
    torch.manual_seed(0)
    model = NSATransformer(NSAConfig(256, 16, 1, 2, 1, 8, pattern=SparsePattern(4, 2, 4, 3, 4)))
    held_out = batches()
    loss, accuracy = evaluate_answers(model, held_out, Copying(1).answers(LENGTH), CPU, "float32")
    flat = torch.from_numpy(held_out.reshape(-1, LENGTH))
    expected = torch.nn.functional.cross_entropy(model(flat[:, :-1]).transpose(1, 2), flat[:, 1:])
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert accuracy < 0.2


def test_only_one_batch_is_held_at_a_time():
    made, alive = [], []

    class Watched(Oracle):
        def forward(self, tokens):
            alive.append(sum(reference() is not None for reference in made))
            logits = super().forward(tokens)
            made.append(weakref.ref(logits))
            return logits

    evaluate_answers(Watched(13), batches(4), Copying(1).answers(LENGTH), CPU, "float32")
    assert alive == [0, 0, 0, 0]
