"""The closing words of a run."""

from __future__ import annotations

from typing import Any


def render(summary: dict[str, Any]) -> str:
    """The summary of :func:`nsa_compile.train.loop.run` as text for a terminal."""
    throughput = "not measured"
    if summary["tokens_per_s_mean"] is not None:
        std = summary["tokens_per_s_std"]
        spread = f" ± {std:,.0f}" if std is not None else ""
        throughput = (
            f"{summary['tokens_per_s_mean']:,.0f}{spread} tokens/s over the last {summary['tokens_per_s_steps']} steps"
        )
    mfu = "" if summary["mfu"] is None else f"{summary['mfu']:.1%} of {summary['peak_flops'] / 1e9:,.0f} GFLOP/s matmul"
    status = f"interrupted by {summary['stopped_by']}" if summary["interrupted"] else "finished"
    if summary["resumed_from"] is not None:
        status += f", resumed from step {summary['resumed_from']}"
    rows = [
        ("status", status),
        ("steps", f"{summary['steps']}, in {summary['dtype']}"),
        ("sequence length S", summary["seq_len"]),
        ("batch", f"{summary['batch_size']} × {summary['accumulate']} accumulated"),
        ("layers", summary["layers"]),
        ("parameters", f"{summary['parameters']:,}"),
        ("pattern", f"n = {summary['num_selected']} selected blocks, w = {summary['window']}"),
        ("throughput", throughput),
        ("MFU", mfu),
        ("validation loss", f"{summary['val_loss_start']:.4f} at the start, {summary['val_loss_end']:.4f} at the end"),
        ("best unigram model", f"{summary['best_unigram_loss']:.4f}"),
        ("files", summary["run_dir"]),
        *(("note", note) for note in summary["notes"]),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {value}" for label, value in rows if value != "")
