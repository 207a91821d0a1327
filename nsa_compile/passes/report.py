"""What the compiler did, as data: `nsa_compile.last_report()`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nsa_compile.analyses.estimate import Estimate
from nsa_compile.ir.scans import Decline

SCHEMA = 6


@dataclass
class PassReport:
    """One pass over one captured graph."""

    name: str
    changed: bool = False
    seconds: float = 0.0  # of the pass itself
    verify_seconds: float = 0.0
    nodes_before: int = 0
    nodes_after: int = 0
    matches: list[str] = field(default_factory=list)
    declines: list[Decline] = field(default_factory=list)
    skipped: str | None = None  # why it did not run
    max_abs_error: float | None = None  # against the graph before the pass, when checked on real inputs
    estimate: Estimate | None = None  # of the graph after the pass, with the option of that name


@dataclass(frozen=True)
class Guard:
    """What became of the guard of one carry: the buffer as each step finds it, or as it leaves it."""

    carry: int  # position among the scan's carries
    when: Literal["found", "left"]
    kept: bool


@dataclass(frozen=True)
class RecurrenceReport:
    """What became of carries that are computed from their own earlier values."""

    carries: tuple[int, ...]  # positions among the scan's carries
    form: str  # "loop", or the parallel form


@dataclass
class ScanReport:
    """What became of one scan."""

    name: str
    length: int
    batched: bool = False  # as a whole: no loop is left, not even of a recurrence
    recurrences: list[RecurrenceReport] = field(default_factory=list)
    carries: list[str] = field(default_factory=list)
    guards_kept: list[str] = field(default_factory=list)
    guards_dropped: list[str] = field(default_factory=list)
    guards: list[Guard] = field(default_factory=list)  # the same, in terms of carries, ordered by them
    declines: list[Decline] = field(default_factory=list)
    nodes_after: int = 0  # nodes the scan became; 0 while it is a scan

    @property
    def verdict(self) -> str:
        """In the words of the documentation."""
        if not self.nodes_after and not self.batched:
            return "stays a loop"
        if not self.recurrences:
            return "batched"
        return f"batched, its recurrence {'in parallel' if self.batched else 'a loop'}"


@dataclass(frozen=True)
class AttentionChoice:
    """What `lower_attention` made of an attention, and of the selection that it shares scores with."""

    branch: str  # compressed, selected, selection (alone), window; attention where no pass could tell
    what: str  # in words
    operator: str


@dataclass
class Report:
    """One compilation of one captured graph.

    `cache_hit` says that no pass ran because an equal graph was compiled before with equal passes and options; the
    passes and scans are then those of that earlier compilation.
    """

    nested: str
    passes: list[PassReport] = field(default_factory=list)
    scans: list[ScanReport] = field(default_factory=list)
    left_alone: Decline | None = None  # why no pass looked at the graph, or at a loop that runs as it is written
    cache_hit: bool = False
    cache_key: str = ""
    notes: list[str] = field(default_factory=list)
    first_call: str | None = None  # what became of `check="first"`, once the program was called
    nodes_captured: int = 0
    nodes_final: int = 0
    estimate_captured: Estimate | None = None  # of the graph before any pass
    attention: list[AttentionChoice] = field(default_factory=list)

    @property
    def declines(self) -> list[Decline]:
        return [decline for p in self.passes for decline in p.declines]

    @classmethod
    def of_a_loop_as_written(cls, loop: str, reason: str, place: str) -> Report:
        """A loop that is not compiled: where it is, why, and which of its lines is the cause."""
        return cls("none", left_alone=Decline("nsa_compile.loop", f"the loop at {loop}", place, reason))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with a schema number."""
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Report:
        data = {k: v for k, v in data.items() if k != "schema"}
        passes = [
            PassReport(**(p | {"declines": _declines(p), "estimate": _estimate(p["estimate"])}))
            for p in data.pop("passes")
        ]
        scans = [
            ScanReport(
                **{  # pyrefly: ignore[bad-argument-type]
                    **s,
                    "declines": _declines(s),
                    "guards": [Guard(**g) for g in s["guards"]],
                    "recurrences": [RecurrenceReport(tuple(r["carries"]), r["form"]) for r in s["recurrences"]],
                }
            )
            for s in data.pop("scans")
        ]
        captured = _estimate(data.pop("estimate_captured"))
        attention = [AttentionChoice(**choice) for choice in data.pop("attention")]
        left = data.pop("left_alone")
        return cls(
            **data, passes=passes, scans=scans, estimate_captured=captured, attention=attention,
            left_alone=None if left is None else Decline(**left),
        )  # fmt: skip


def _declines(data: dict[str, Any]) -> list[Decline]:
    return [Decline(**decline) for decline in data["declines"]]


def _estimate(data: dict[str, Any] | None) -> Estimate | None:
    return None if data is None else Estimate(**data)
