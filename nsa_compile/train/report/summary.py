"""The closing words of a run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from nsa_compile.page import size


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
        spread = f" ± {std:,.0f}" if std is not None else ""
        throughput = (
            f"{summary['tokens_per_s_mean']:,.0f}{spread} tokens/s over the last {summary['tokens_per_s_steps']} steps"
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
        (
            "validation loss",
            f"{_number(summary['val_loss_start'], '.4f')} at the start, "
            f"{_number(summary['val_loss_end'], '.4f')} at the end",
        ),
        ("best unigram model", _number(summary["best_unigram_loss"], ".4f")),
        ("answers", "" if summary.get("accuracy") is None else f"{summary['accuracy']:.1%} right at the end"),
        ("skipped", f"{summary['skipped_steps']} steps that were not finite" if summary.get("skipped_steps") else ""),
    ]


def doubts_of(summary: Mapping[str, Any]) -> list[str]:
    """Why figures of a run say less than they seem to: a busy machine, an impossible MFU."""
    doubts = summary.get("doubts")
    return [str(doubt) for doubt in doubts] if isinstance(doubts, list) else []


def _pattern(summary: Mapping[str, Any]) -> list[str]:
    """The sizes that are known; an attention may have neither."""
    words = {"num_selected": "n = {} selected blocks", "window": "w = {}"}
    return [text.format(summary[name]) for name, text in words.items() if summary.get(name) is not None]


def _processes(summary: dict[str, Any]) -> str:
    """How many there were, and how they sent gradients; nothing for one alone."""
    if summary.get("processes", 1) == 1:
        return ""
    text = f"{summary['processes']}, {summary['strategy']}"
    if "gradient_bytes" in summary:
        text += (
            f"; {size(summary['gradient_bytes'])} of gradients a step each ({summary['compress']}), the first "
            f"sent after {summary['first_all_reduce']:.0%} of the backward pass"
        )
    return text


def _number(value: float | None, form: str) -> str:
    return "unknown" if value is None else format(value, form)
