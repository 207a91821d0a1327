"""The closing words of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from nsa_compile.models.variant import REGISTERED, find


def render(summary: dict[str, Any]) -> str:
    """The summary of :func:`nsa_compile.train.loop.run` as text for a terminal."""
    status = f"interrupted by {summary['stopped_by']}" if summary["interrupted"] else "finished"
    if summary["resumed_from"] is not None:
        status += f", resumed from step {summary['resumed_from']}"
    rows = [
        ("status", status),
        *size_and_result_rows(summary),
        ("files", summary["run_dir"]),
        ("go on with", _resume(summary) if summary["interrupted"] else ""),
        *(("note", note) for note in summary["notes"]),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows if value != "")


def _resume(summary: Mapping[str, Any]) -> str:
    """The command that goes on with an interrupted run."""
    place = summary["run_dir"]
    words = ["nsa-compile", "train", "--config", f"{place}/config.resolved.yaml", "--resume", place]
    return shlex.join([*words, *(("--nproc", str(summary["processes"])) if summary.get("processes", 1) > 1 else ())])


def size_and_result_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of what was trained and what came of it; results that are ``None`` were not measured."""
    throughput = "not measured"
    if summary["tokens_per_s_mean"] is not None:
        std = summary["tokens_per_s_std"]
        spread = f", ± {std:,.0f} from step to step" if std is not None else ""
        throughput = (
            f"{summary['tokens_per_s_mean']:,.0f} tokens/s over the last {summary['tokens_per_s_steps']} steps{spread}"
        )
    mfu = ""
    if summary["mfu"] is not None and summary["peak_flops"] is not None:
        mfu = f"{summary['mfu']:.1%} of {summary['peak_flops'] / 1e9:,.0f} GFLOP/s matmul"
    return [
        ("steps", f"{summary['steps']}, in {summary['dtype']}"),
        ("sequence length S", str(summary["seq_len"])),
        ("batch", f"{summary['batch_size']} × {summary['accumulate']} accumulated"),
        ("processes", _processes(summary)),
        ("layers", str(summary["layers"])),
        ("parameters", _number(summary["parameters"], ",.0f")),
        ("pattern", ", ".join(_pattern(summary))),
        ("throughput", throughput),
        ("MFU", mfu),
        *(("doubt", doubt) for doubt in doubts_of(summary)),
        ("validation loss", _validation(summary)),
        ("best unigram model", _number(summary["best_unigram_loss"], ".4f")),
        (
            "answers",
            "" if summary.get("accuracy") is None else f"{summary['accuracy']:.1%} right {_last_evaluated(summary)}",
        ),
        ("skipped", f"{summary['skipped_steps']} steps that were not finite" if summary.get("skipped_steps") else ""),
    ]


def _validation(summary: Mapping[str, Any]) -> str:
    start, end = (_number(summary[f"val_loss_{name}"], ".4f") for name in ("start", "end"))
    return f"{start} at the start" + (f", {end} {when}" if (when := _last_evaluated(summary)) else "")


def _last_evaluated(summary: Mapping[str, Any]) -> str:
    """When the last evaluation was, which an interrupted run has before its end; nothing for the one at the start."""
    step = summary.get("val_step_end")
    if step == 0:
        return ""
    return "at the end" if step in (None, summary["steps"]) else f"at step {step}"


def doubts_of(summary: Mapping[str, Any]) -> list[str]:
    """Why figures of a run say less than they seem to: a busy machine, an impossible MFU."""
    doubts = summary.get("doubts")
    return [str(doubt) for doubt in doubts] if isinstance(doubts, list) else []


def _pattern(summary: Mapping[str, Any]) -> list[str]:
    """The sizes that are known, as the attention calls them; it may have none."""
    name = summary.get("attention")
    if name not in REGISTERED:  # of a report whose run has lost its configuration
        return []
    variant = find(name)
    return [
        f"{symbol} = {summary[size]}" + (f" selected {variant.selects}" if size == "num_selected" else "")
        for symbol, size in variant.shown_sizes.items()
        if summary.get(size) is not None
    ]


def _processes(summary: dict[str, Any]) -> str:
    """How many there were, and how they sent gradients; nothing for one alone."""
    if summary.get("processes", 1) == 1:
        return ""
    text = f"{summary['processes']}, {summary['strategy']}"
    if "gradient_bytes" in summary:
        text += (
            f"; {summary['gradient_bytes'] / 1e6:,.1f} MB of gradients a step each ({summary['compress']}), the first "
            f"sent after {summary['first_all_reduce']:.0%} of the backward pass"
        )
    return text


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
