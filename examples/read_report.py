"""Read a report of the passes: what was batched, what stayed a loop, and why.

    python examples/read_report.py

`nsa-compile passes explain FILE.py` prints all of it for a program of yours; this is the same as data.
"""

import torch
from torch import Tensor

import nsa_compile


def saturating_sum(x: Tensor) -> Tensor:
    """A recurrence that is not linear: each sum needs the one before, cut off."""

    def step(total: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        total = (total + row).clamp(-2, 2)
        return total, total

    return nsa_compile.scan(step, x[0], x)[1]


def causal_mean(x: Tensor) -> Tensor:
    """The mean of all rows so far, over a cache: no step needs the result of another."""
    positions = torch.arange(len(x))

    def step(cache: Tensor, row: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        t, x = row
        cache = torch.where((positions == t)[:, None], x, cache)
        return cache, torch.where((positions <= t)[:, None], cache, 0).sum(0) / (t + 1)

    return nsa_compile.scan(step, torch.zeros_like(x), (positions, x))[1]


def main() -> None:
    x = torch.randn(16, 4)
    for function in (causal_mean, saturating_sum):
        torch.testing.assert_close(nsa_compile.compile(function)(x), function(x))
        report = nsa_compile.last_report()
        assert report is not None
        for scan in report.scans:
            became = f"{scan.nodes_after} operators" if scan.batched else "still a loop"
            print(
                f"{function.__name__}: {scan.length} steps, {became}; carries: {', '.join(scan.carries) or 'unknown'}"
            )
        for decline in report.declines:
            print(f"  {decline.op} at {decline.location}: {decline.reason}")


if __name__ == "__main__":
    main()
