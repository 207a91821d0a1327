"""Event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nsa_compile.config import load_config
from nsa_compile.errors import UserError
from nsa_compile.machine.preflight import check_tensorboard
from nsa_compile.models.nsa_variant import LayerStatistics
from nsa_compile.train.records.rows import EvalRow, StepRow
from nsa_compile.train.records.tensorboard import TensorBoard


def scalars(directory, tag):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)] if tag in events.Tags()["scalars"] else []


def row(step, loss):
    return StepRow(step, loss, 1e-3, 1.0, 100.0, 0.1, 1.0, memory_bytes=2**20)


def test_event_files_hold_the_figures(tmp_path):
    pytest.importorskip("tensorboard")
    layer = LayerStatistics(3, 0.25, *[0.5] * 6, None, *[None] * 5)
    with TensorBoard(tmp_path) as board:
        board.write("training", 1, row(1, 5.5))
        board.write("training", 2, row(2, 4.5))
        board.write("validation", 2, EvalRow(2, 4.75, 0.125))
        board.write("layer 3", 2, layer)
    assert scalars(tmp_path, "training/loss") == [(1, 5.5), (2, 4.5)]
    assert scalars(tmp_path, "training/memory_bytes") == [(1, 2**20), (2, 2**20)]
    assert scalars(tmp_path, "training/forward_s") == []  # not measured
    assert scalars(tmp_path, "validation/val_loss") == [(2, 4.75)]
    assert scalars(tmp_path, "validation/accuracy") == [(2, 0.125)]
    assert scalars(tmp_path, "layer 3/gate_compressed") == [(2, 0.25)]


def test_what_a_resumed_run_does_again_replaces_what_was_there(tmp_path):
    pytest.importorskip("tensorboard")
    with TensorBoard(tmp_path) as board:
        for step in (1, 2, 3):
            board.write("training", step, row(step, 5.0))
    with TensorBoard(tmp_path, resumed_at=2) as board:
        board.write("training", 3, row(3, 4.0))
    assert scalars(tmp_path, "training/loss") == [(1, 5.0), (2, 5.0), (3, 4.0)]


def test_an_absent_package_is_named_before_the_start(tiny_overrides):
    wanted = tiny_overrides(**{"log.tensorboard": "true"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "tensorboard", None)
        check_tensorboard(load_config(overrides=tiny_overrides()))
        with pytest.raises(UserError, match=r"log\.tensorboard = true needs .* 'nsa-compile\[tensorboard\]'") as error:
            check_tensorboard(load_config(overrides=wanted))
    assert "\n" not in str(error.value)


def test_the_check_does_not_import_torch(tiny_overrides):
    code = (
        "import sys\nfrom nsa_compile.config import load_config\n"
        "from nsa_compile.machine.preflight import check_tensorboard\n"
        f"check_tensorboard(load_config(overrides={tiny_overrides(**{'log.tensorboard': 'true'})!r}))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
