"""What is done about steps that are not finite."""

from __future__ import annotations

import json
import math

import pytest

from nsa_compile.errors import CheckpointError, TrainingDiverged
from nsa_compile.train.nonfinite import NonFinitePolicy


def fail(policy, step, rank=0, losses=(math.nan,)):
    policy.nonfinite(step, rank, [4, 7], losses, math.inf)


def test_halt_ends_at_the_first_and_tells_what_it_was_trained_on(tmp_path):
    with pytest.raises(TrainingDiverged, match=r"loss = nan .* rank 1 at step 3 must be finite; try a lower") as error:
        fail(NonFinitePolicy("halt", 1, tmp_path), 3, rank=1, losses=[5.5, math.nan])
    assert "\n" not in str(error.value)
    row = json.loads((tmp_path / "nonfinite.jsonl").read_text())
    assert row == {"step": 3, "rank": 1, "sequences": [4, 7], "loss": "nan", "grad_norm": "inf"}


@pytest.mark.parametrize(
    ("losses", "named"),
    [
        ([5.5, math.nan, math.inf], "loss = nan and gradient norm = inf of ranks 1, 2 at"),
        ([5.0, 6.0], "loss = 5.5 and gradient norm = inf at"),
    ],
)
def test_the_ranks_whose_own_loss_it_was_are_named_whoever_says_it(tmp_path, losses, named):
    with pytest.raises(TrainingDiverged) as error:
        fail(NonFinitePolicy("halt", 1, tmp_path), 3, rank=0, losses=losses)
    assert str(error.value).startswith(named)
    assert json.loads((tmp_path / "nonfinite.jsonl").read_text())["loss"] == losses[0]


def test_the_limit_is_on_steps_in_a_row(tmp_path):
    policy = NonFinitePolicy("skip", 2, tmp_path)
    for step in (1, 2):
        fail(policy, step)
    policy.finite()
    for step in (4, 5):
        fail(policy, step)
    assert (policy.consecutive, policy.skipped) == (2, 4)
    with pytest.raises(TrainingDiverged, match="at step 6 must be finite, and the 2 steps before were skipped"):
        fail(policy, 6)
    steps = [json.loads(line)["step"] for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 4, 5, 6]


def test_counts_go_on_where_a_checkpoint_was(tmp_path):
    policy = NonFinitePolicy("skip", 2, tmp_path)
    for step in (1, 2):
        fail(policy, step)
    resumed = NonFinitePolicy("skip", 2, tmp_path)
    resumed.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    assert (resumed.consecutive, resumed.skipped) == (2, 2)
    with pytest.raises(TrainingDiverged):
        fail(resumed, 3)


@pytest.mark.parametrize(
    "state", [{}, {"consecutive": 1}, {"consecutive": -1, "skipped": 0}, {"consecutive": 1.0, "skipped": 1}]
)
def test_counts_that_are_none_are_refused(tmp_path, state):
    with pytest.raises(CheckpointError, match="counts of skipped steps"):
        NonFinitePolicy("skip", 2, tmp_path).load_state_dict(state)
