"""What is to be reached, and whether a record reaches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.gpu.attention import faster_of_ours
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


def _bar(what: str, target: str, value: float | None, holds: bool | None, note: str = "") -> Row:
    verdict = "not measured" if value is None else "met" if holds else "missed"
    return {"bar": what, "target": target, "value": value, "verdict": verdict, "note": note}


def _seconds(result: Mapping[str, Any], direction: str = "both") -> float | None:
    return result[direction]["median_s"] if direction in result else None


def _main(cells: Mapping[str, Any], seq_len: int) -> Mapping[str, Any]:
    return cells.get(f"S={seq_len} h=16 32/16/64", {"contenders": {}})


def _speedups(cells: Mapping[str, Any]) -> Iterator[Row]:
    for other, seq_len, target in SPEEDUPS:
        cell = _main(cells, seq_len)
        theirs, ours = _seconds(cell["contenders"].get(other, {})), faster_of_ours(cell, OWN)
        value = theirs / ours[1]["both"]["median_s"] if theirs and ours else None
        note = ours[0] if ours else ""
        yield _bar(f"{seq_len}: against {other}", f"≥ {target} ×", value, value is not None and value >= target, note)


def _public(cells: Mapping[str, Any]) -> Iterator[Row]:
    found = False
    for name, cell in cells.items():
        theirs = [(s, n) for n, r in cell["contenders"].items() if r.get("public") and (s := _seconds(r)) is not None]
        ours = faster_of_ours(cell, OWN)
        if cell["seq_len"] < 8192 or not theirs or not ours:
            continue
        found = True
        fastest, who = min(theirs)
        value = fastest / ours[1]["both"]["median_s"]
        note = f"{who}, {cell['contenders'][who].get('note', 'agrees with the oracle')}"
        yield _bar(
            f"{name}: against the fastest public NSA", f"≥ {AGAINST_PUBLIC} ×", value, value >= AGAINST_PUBLIC, note
        )
    if not found:
        yield _bar("against the fastest public NSA", f"≥ {AGAINST_PUBLIC} ×", None, None, "none ran here")


def _small_groups(cells: Mapping[str, Any]) -> Row:
    """The worst, over lengths of at least 8192, of time per useful FLOP with 4 heads a group over that with 16."""
    ratios = []
    for cell in cells.values():
        if cell["heads_per_group"] != 4 or cell["seq_len"] < 8192:
            continue
        pair = [faster_of_ours(c, OWN) for c in (cell, _main(cells, cell["seq_len"]))]
        if all(pair):
            # Both have the same query heads, and so the same useful work.
            ratios.append((pair[0][1]["both"]["median_s"] / pair[1][1]["both"]["median_s"], f"S = {cell['seq_len']}"))
    value, where = max(ratios, default=(None, ""))
    return _bar("4 heads a group, time per useful FLOP over that of 16", f"≤ {SMALL_GROUPS} ×", value,
                value is not None and value <= SMALL_GROUPS, where)  # fmt: skip


def _training(rows: Mapping[str, Any]) -> Iterator[Row]:
    result = rows.get("nsa_125m_gpt2.yaml S=2048", {}).get("nsa", {})
    rate, mfu = result.get("tokens_per_s"), result.get("mfu_nominal")
    yield _bar(
        "125 M preset, S = 2048: tokens/s", f"≥ {TOKENS_PER_S:,}", rate, rate is not None and rate >= TOKENS_PER_S
    )
    yield _bar(
        "125 M preset, S = 2048: MFU of the data sheet's peak", f"≥ {MFU:.0%}", mfu, mfu is not None and mfu >= MFU
    )


def _accuracy(cells: Mapping[str, Any]) -> Row:
    """The worst error of ours in bf16, in units of that of eager torch."""
    worst = [
        (result["check"]["worst_of_eager"], f"{name}, {who}")
        for name, cell in cells.items()
        for who in OWN
        if cell["dtype"] == "bfloat16" and "check" in (result := cell["contenders"].get(who, {}))
    ]
    value, where = max(worst, default=(None, ""))
    return _bar("error against float64 over that of eager torch", "≤ 1", value, value is not None and value <= 1, where)


def _longest(cells: Mapping[str, Any]) -> Row:
    cell = _main(cells, 131072)
    ours = faster_of_ours(cell, OWN)
    value = ours[1]["both"]["median_s"] * 1e3 if ours else None
    ran = any(name in cell["contenders"] for name in OWN)
    row = _bar("S = 131,072: one layer, forward + backward, in ms", "fits and agrees with float64", value, True)
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
    return _bar("sliding window alone: against FlexAttention", "≥ 1 ×", value, value is not None and value >= 1, where)
