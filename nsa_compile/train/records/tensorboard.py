"""The figures of a run as TensorBoard event files, for those who watch runs there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nsa_compile.files import make_directory, refuse_links

if TYPE_CHECKING:
    from nsa_compile.models.variant import LayerRow
    from nsa_compile.train.records.rows import EvalRow, StepRow


class TensorBoard:
    """Event files in ``<run>/tensorboard``: every column of the records is a scalar, unless it was not measured.

    What was written after `resumed_at`, the step a resumed run goes on from, is no longer shown.

    Raises:
        NotPlainFile: the folder, or something in it, is a link.
    """

    def __init__(self, directory: Path, resumed_at: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resumed_at is None else resumed_at + 1
        folder = directory / "tensorboard"
        make_directory(folder)
        refuse_links(folder, and_pipes=True)  # the writer, which is not ours, opens what has the name that it makes up
        self._writer = SummaryWriter(str(folder), purge_step=purge)

    def write(self, group: str, step: int, row: StepRow | EvalRow | LayerRow) -> None:
        """The figures of a row after ``step`` optimizer steps."""
        for name, value in vars(row).items():
            if name not in ("step", "layer") and value is not None:
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()
