"""How Dynamo captures a scan: as one node, in one line where it cannot."""

from __future__ import annotations

from functools import cache


@cache
def mend_dynamo() -> None:
    """Mend what Dynamo does with a scan, once."""
    from nsa_compile.capture import scans, steps

    scans.capture_scans_by_shape()
    scans.take_rows_of_any_dtype()
    steps.mend_steps()
