"""Reports of the compiler as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tabulate import tabulate

from nsa_compile.passes.pipeline import Pass
from nsa_compile.passes.report import PassReport, Report, ScanReport
from nsa_compile.profiles.blame import Blame
from nsa_compile.profiles.graph_diff import render_side_by_side, side_by_side


def render_pass_list(passes: Sequence[Pass]) -> str:
    """The passes in the order they run, with what each needs and establishes."""
    rows = [
        (order, p.name, p.summary, ", ".join(p.requires) or "–", ", ".join(p.ensures) or "–")
        for order, p in enumerate(passes, start=1)
    ]
    return tabulate(rows, headers=("order", "pass", "what it does", "requires", "ensures"))


def render_report(report: Report, carry_names: Sequence[str] = ()) -> str:
    """Everything a report knows: a table of the passes, what each found, then one paragraph a scan.

    `carry_names` are the user's names of a scan's carries, for scans that have as many.
    """
    if report.left_alone is not None and not report.passes:
        left = report.left_alone
        return f"{left.op} RUNS AS IT IS WRITTEN: correct, and slow. Why:\n  {left.location}: {left.reason}"
    parts = [_pass_table(report), *_cost_table(report)]
    parts += [text for p in report.passes if (text := _findings(p))]
    skipped = [f"{p.name} was skipped: {p.skipped}" for p in report.passes if p.skipped]
    parts += [_scan(scan, carry_names, skipped) for scan in report.scans]
    if not report.scans:
        parts.append("The graph holds no scan, so there was nothing to batch.")
    parts += [f"note: {note}" for note in report.notes]
    return "\n\n".join(parts)


def _pass_table(report: Report) -> str:
    rows = [
        (
            p.name,
            _verdict(p),
            f"{p.seconds * 1e3:.1f}",
            f"{p.verify_seconds * 1e3:.1f}",
            p.nodes_before,
            p.nodes_after,
            len(p.matches),
            len(p.declines),
        )
        for p in report.passes
    ]
    headers = ("pass", "graph", "ms", "ms to verify", "nodes before", "after", "matches", "declines")
    text = table(rows, headers, left=2)
    if report.cache_hit:
        text = f"Cache hit: no pass ran now; this is what they did when the result was kept.\n\n{text}"
    return f"{text}\n{report.nodes_captured} nodes captured, {report.nodes_final} handed to the nested backend"


def _cost_table(report: Report) -> list[str]:
    """What the graph costs before and after each pass, where that was estimated: a list of one table, or of none."""
    estimates = [("captured", report.estimate_captured), *((p.name, p.estimate) for p in report.passes)]
    rows = [(name, *estimate_cells(asdict(estimate))) for name, estimate in estimates if estimate is not None]
    headers = ("estimated forward cost after", "operators run", "arithmetic", "bytes moved", "peak memory")
    return [table(rows, headers)] if rows else []


def table(rows: Iterable[Sequence[Any]], headers: Sequence[str], left: int = 1) -> str:
    """Rows of texts below `headers`: the first `left` columns to the left, the others to the right."""
    rows = list(rows)
    align = ["left"] * left + ["right"] * (len(headers) - left)
    return tabulate(rows, headers, disable_numparse=True, colalign=align if rows else None)


def estimate_cells(estimate: Mapping[str, int]) -> list[str]:
    """Operators, arithmetic, traffic and peak memory of an `analyses.estimate.Estimate`, which is plain data here."""
    units = {"flops": "FLOP", "bytes_moved": "B", "peak_bytes": "B"}
    return [f"{estimate['operators']:,}", *(with_unit(estimate[name], unit) for name, unit in units.items())]


def with_unit(value: float, unit: str) -> str:
    """`1234567, "B"` as `1.23 MB`: three digits and a decimal prefix."""
    prefixes = ["", "k", "M", "G", "T"]
    while value >= 999.5 and len(prefixes) > 1:
        value /= 1000
        prefixes.pop(0)
    return f"{value:.3g} {prefixes[0]}{unit}"


def _verdict(p: PassReport) -> str:
    if p.skipped:
        return "skipped"
    return "changed" if p.changed else "as it was"


def _findings(p: PassReport) -> str:
    """What one pass rewrote and what it left alone, or nothing if it found nothing."""
    lines = [f"  skipped: {p.skipped}"] if p.skipped else []
    lines += [f"  match    {match}" for match in p.matches]
    lines += [f"  decline  {d.op} at {d.location}: {d.reason}" for d in p.declines]
    return "\n".join([p.name, *lines]) if lines else ""


def _scan(scan: ScanReport, carry_names: Sequence[str], skipped: Sequence[str]) -> str:
    if scan.verdict == "stays a loop":
        why = [f"{d.op} at {d.location}: {d.reason}" for d in scan.declines] or skipped or ["no pass batched it"]
        lines = [f"{scan.name} STAYED A LOOP of {scan.length} steps: correct, and slow. Why:"]
        return "\n".join(lines + [f"  {reason}" for reason in why])
    lines = [f"{scan.name}: a loop of {scan.length} steps became {scan.nodes_after} batched operators."]
    for r in scan.recurrences:
        carries = ", ".join(map(str, r.carries))
        lines.append(
            f"  the recurrence of carry {carries}: {'A LOOP' if r.form == 'loop' else f'in parallel, {r.form}'}"
        )
    if not scan.batched:
        lines += [f"    {d.op} at {d.location}: {d.reason}" for d in scan.declines]
    if scan.carries:
        lines += ["", tabulate(_carry_rows(scan, carry_names), headers=("carry", "kind", "guard"))]
    return "\n".join(lines)


def _carry_rows(scan: ScanReport, carry_names: Sequence[str]) -> list[tuple[str, str, str]]:
    """Name, kind and guards of each carry."""
    names = carry_names if len(carry_names) == len(scan.carries) else [f"carry {i}" for i in range(len(scan.carries))]
    rows = []
    for i, (name, kind) in enumerate(zip(names, scan.carries, strict=True)):
        guards = [
            f"{'kept' if guard.kept else 'dropped'}{' (as the step finds it)' if guard.when == 'found' else ''}"
            for guard in scan.guards
            if guard.carry == i
        ]
        rows.append((name, kind, ", ".join(guards) or "none needed"))
    return rows


def render_blame(blame: Blame, folder: str | None = None, width: int = 160, lines: int = 40) -> str:
    """What makes a check fail, how to see it again, and the first `lines` of what the rewrite changed.

    `folder` is where the graphs were written to.
    """
    if blame.pass_name is None:
        return f"the check fails without any pass, so none of them is to blame: {blame.problem}"
    culprit = f"pass {blame.pass_name}, rewrite {blame.rewrite}"
    if blame.rewrite is None:
        culprit = f"pass {blame.pass_name} as a whole: it fails where it may do no rewrite"
    reproduce = ", ".join(f"{name}={value!r}" for name, value in blame.options.items() if value not in (None, ()))
    rows = [("to blame", culprit), ("match", blame.match or "none: it did not get to record one")]
    rows += [("how it fails", blame.problem), ("again with", reproduce), ("checks run", str(blame.checks))]
    parts = [tabulate(rows, tablefmt="plain", disable_numparse=True)]
    if blame.before is not None and blame.after is not None:
        changed = render_side_by_side(side_by_side(blame.before, blame.after), width).splitlines()
        rest = [f"… and {len(changed) - lines} more lines"] if len(changed) > lines else []
        parts.append("\n".join(["the graph before and after it:", "", *changed[:lines], *rest]))
    if folder is not None:
        parts.append(f"graphs: {folder}")
    return "\n\n".join(parts)
