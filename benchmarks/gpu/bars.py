"""What is to be reached, and whether a record reaches it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.contenders import COMPILED, CUDNN, FLASH, FLEX_WINDOW, OURS, WINDOW

Row = dict[str, Any]
OWN = (OURS, COMPILED)
SPEEDUPS = ((FLASH, 8192, 1.2), (FLASH, 32768, 3.5), (FLASH, 65536, 7.0), (CUDNN, 65536, 4.0))
AGAINST_PUBLIC = 1.2
SMALL_GROUPS = 1.5
TOKENS_PER_S, MFU = 200_000, 0.35


def judge(record: Mapping[str, Any]) -> list[Row]:
    """Each bar with its target, what was measured, and `"met"`, `"missed"` or `"not measured"`."""
    cells = {name: cell for name, cell in record.get("attention", {}).items() if "contenders" in cell}
    return [*_speedups(cells), *_public(cells), _small_groups(cells), *_training(record.get("training", {})),
            _window(cells), _accuracy(cells), _longest(cells)]  # fmt: skip


def _bar(
    what: str, target: str, value: float | None, note: str = "", least: float = -math.inf, most: float = math.inf
) -> Row:
    verdict = "not measured" if value is None else "met" if least <= value <= most else "missed"
    return {"bar": what, "target": target, "value": value, "verdict": verdict, "note": note}


def _seconds(result: Mapping[str, Any]) -> float | None:
    """Of forward and backward."""
    return result["both"]["median_s"] if "both" in result else None


def _fastest_of_ours(cell: Mapping[str, Any]) -> tuple[float, str] | None:
    """Seconds of the faster of ours, and its name."""
    return min(((s, who) for who in OWN if (s := _seconds(cell["contenders"].get(who, {}))) is not None), default=None)


def _main(cells: Mapping[str, Any], seq_len: int) -> Mapping[str, Any]:
    return cells.get(f"S={seq_len} h=16 32/16/64", {"contenders": {}})


def _speedups(cells: Mapping[str, Any]) -> Iterator[Row]:
    for other, seq_len, target in SPEEDUPS:
        cell = _main(cells, seq_len)
        theirs, ours = _seconds(cell["contenders"].get(other, {})), _fastest_of_ours(cell)
        value = theirs / ours[0] if theirs and ours else None
        yield _bar(f"{seq_len}: against {other}", f"≥ {target} ×", value, ours[1] if ours else "", least=target)


def _public(cells: Mapping[str, Any]) -> Iterator[Row]:
    found = False
    for name, cell in cells.items():
        theirs = [(s, n) for n, r in cell["contenders"].items() if r.get("public") and (s := _seconds(r)) is not None]
        ours = _fastest_of_ours(cell)
        if cell["seq_len"] < 8192 or not theirs or not ours:
            continue
        found = True
        fastest, who = min(theirs)
        note = f"{who}, {cell['contenders'][who].get('note', 'agrees with the oracle')}"
        what, value = f"{name}: against the fastest public NSA", fastest / ours[0]
        yield _bar(what, f"≥ {AGAINST_PUBLIC} ×", value, note, least=AGAINST_PUBLIC)
    if not found:
        yield _bar("against the fastest public NSA", f"≥ {AGAINST_PUBLIC} ×", None, "none ran here")


def _small_groups(cells: Mapping[str, Any]) -> Row:
    """The worst, over lengths of at least 8192, of time per useful FLOP with 4 heads a group over that with 16."""
    ratios = []
    for cell in cells.values():
        if cell["heads_per_group"] != 4 or cell["seq_len"] < 8192:
            continue
        four, sixteen = (_fastest_of_ours(c) for c in (cell, _main(cells, cell["seq_len"])))
        if four and sixteen:
            # Both have the same query heads, and so the same useful work.
            ratios.append((four[0] / sixteen[0], f"S = {cell['seq_len']}"))
    value, where = max(ratios, default=(None, ""))
    what = "4 heads a group, time per useful FLOP over that of 16"
    return _bar(what, f"≤ {SMALL_GROUPS} ×", value, where, most=SMALL_GROUPS)


def _training(rows: Mapping[str, Any]) -> Iterator[Row]:
    row = rows.get("nsa_125m_gpt2.yaml S=2048", {})
    result, note = row.get("nsa", {}), row.get("note", "")
    rate, mfu = result.get("tokens_per_s"), result.get("mfu_nominal")
    yield _bar("125 M preset, S = 2048: tokens/s", f"≥ {TOKENS_PER_S:,}", rate, note, least=TOKENS_PER_S)
    yield _bar("125 M preset, S = 2048: MFU of the data sheet's peak", f"≥ {MFU:.0%}", mfu, note, least=MFU)


def _accuracy(cells: Mapping[str, Any]) -> Row:
    """The worst error of ours in bf16, in units of that of eager torch."""
    worst = [
        (result["check"]["worst_of_eager"], f"{name}, {who}")
        for name, cell in cells.items()
        for who in OWN
        if cell["dtype"] == "bfloat16" and "check" in (result := cell["contenders"].get(who, {}))
    ]
    value, where = max(worst, default=(None, ""))
    return _bar("error against float64 over that of eager torch", "≤ 1", value, where, most=1)


def _longest(cells: Mapping[str, Any]) -> Row:
    cell = _main(cells, 131072)
    ours = _fastest_of_ours(cell)
    value = ours[0] * 1e3 if ours else None
    ran = any(name in cell["contenders"] for name in OWN)
    row = _bar("S = 131,072: one layer, forward + backward, in ms", "fits and agrees with float64", value)
    if ran and not ours:
        reasons = {name: cell["contenders"][name].get("not_measured", "") for name in OWN if name in cell["contenders"]}
        row |= {"verdict": "missed", "note": "; ".join(f"{name}: {reason}" for name, reason in reasons.items())}
    return row


def _window(cells: Mapping[str, Any]) -> Row:
    """The worst over lengths: where FlexAttention is faster, it should compute this branch."""
    ratios = []
    for name, cell in cells.items():
        flex, ours = (_seconds(cell["contenders"].get(who, {})) for who in (FLEX_WINDOW, WINDOW))
        if flex and ours:
            ratios.append((flex / ours, name))
    value, where = min(ratios, default=(None, ""))
    return _bar("sliding window alone: against FlexAttention", "≥ 1 ×", value, where, least=1)
