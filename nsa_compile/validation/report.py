"""The report of a validation: one text, one page, one JSON, of the same content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from nsa_compile.files import replace
from nsa_compile.page import Block, Cell, Chart, Code, Heading, Items, Table, Text, Texts, Tone, markdown, render
from nsa_compile.validation.runbook import SCHEMA, PhaseOutcome, Runbook, verdict

# What a table of figures says of each.
COLUMNS = ("figure", "value", "over", "n", "file")


def write_report(plan: Runbook, outcomes: Sequence[PhaseOutcome], open_phases: Sequence[str]) -> list[Path]:
    """Write the report of what there is so far; `open_phases` have not been run yet."""
    document = report_document(plan, outcomes, open_phases)
    shown = blocks(plan, document)
    contents = {
        "report.md": markdown(f"Validation: {document['verdict']}", shown),
        "report.html": render(f"Validation of {plan.config.run.name}: {document['verdict']}", plan.directory, shown),
        "report.json": json.dumps(document, indent=2) + "\n",
    }
    paths = []
    for name, content in contents.items():
        paths.append(plan.directory / name)
        replace(paths[-1], content.encode("utf-8"))
    return paths


def report_document(plan: Runbook, outcomes: Sequence[PhaseOutcome], open_phases: Sequence[str]) -> dict[str, Any]:
    """The report as plain data."""
    decision, reasons = verdict(outcomes)
    if open_phases:
        decision, reasons = "NO-GO", [*reasons, f"not carried out yet: {', '.join(open_phases)}"]
    config = plan.config
    sizes = config.sizes()
    return {
        "schema": SCHEMA,
        "verdict": decision,
        "reasons": reasons,
        "preset": plan.preset,
        "sizes": {
            "S": config.train.seq_len,
            "batch": f"{config.train.batch_size} × {config.train.accumulate} accumulated",
            "layers": config.model.n_layers,
            "attention": config.model.attention,
            "n": sizes["num_selected"],
            "window": sizes["window"],
            "dtype": config.train.dtype,
            "processes": plan.processes,
        },
        "phases": [asdict(outcome) for outcome in outcomes],
    }


def blocks(plan: Runbook, document: dict[str, Any]) -> list[Block]:
    """The report as a page or a text shows it. Links lead to the files beside it."""
    sizes = "".join(f"; {name} {value}" for name, value in document["sizes"].items())
    overview = [
        (phase["title"], Cell(phase["status"], TONES[phase["status"]]), f"{phase['seconds']:.0f}")
        for phase in document["phases"]
    ]
    return [
        Items(document["reasons"], "bad") if document["reasons"] else Text("Every phase passed.", "good"),
        Text(f"Preset {document['preset']}{sizes}."),
        Table(overview, ("phase", "status", "seconds")),
        *(block for phase in document["phases"] for block in _phase(plan, phase)),
    ]


TONES: dict[str, Tone] = {"passed": "good", "failed": "bad", "not applicable": "quiet"}
MET = {True: Cell("met", "good"), False: Cell("NOT met", "bad")}


def _phase(plan: Runbook, phase: dict[str, Any]) -> Iterator[Block]:
    yield Heading(f"{phase['title']}: {phase['status']}", TONES[phase["status"]], phase["phase"])
    if phase["problems"]:
        yield Items(phase["problems"], "bad")
    if phase["notes"]:
        yield Items(phase["notes"], "quiet")
    if phase["criteria"]:
        yield Table(
            [(c["rule"], c["measured"], MET[c["met"]]) for c in phase["criteria"]], ("criterion", "measured", "")
        )
    if phase["figures"]:
        yield Table([_cells(figure) for figure in phase["figures"]], COLUMNS)
    for name, caption in phase["captions"].items():
        if (plan.directory / name).exists():
            yield Chart(caption, Markup((plan.directory / name).read_text("utf-8")))
    if phase["commands"]:
        yield Code("\n".join(phase["commands"]))
    if phase["artifacts"]:
        yield Text("Files:", "quiet")
        yield Items([Cell(name, href=name) for name in phase["artifacts"]], "quiet")


def _cells(figure: dict[str, Any]) -> Texts:
    """A figure in the columns of `COLUMNS`."""
    n = "" if figure["n"] is None else str(figure["n"])
    return [figure["name"], figure["value"], figure["window"], n, Cell(figure["file"], href=figure["file"])]
