"""The report of a validation: one text, one page, one JSON, of the same content."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from nsa_compile.files import replace
from nsa_compile.page import embed, render
from nsa_compile.validation.runbook import SCHEMA, Outcome, Plan, verdict

# What a table of figures says of each.
COLUMNS = ("figure", "value", "over", "n", "file")


def write_report(plan: Plan, outcomes: Sequence[Outcome], open_phases: Sequence[str]) -> list[Path]:
    """Write the report of what there is so far; `open_phases` have not been run yet."""
    document = report_document(plan, outcomes, open_phases)
    contents = {
        "report.md": markdown(document),
        "report.html": page(plan, document),
        "report.json": json.dumps(document, indent=2) + "\n",
    }
    paths = []
    for name, content in contents.items():
        paths.append(plan.directory / name)
        replace(paths[-1], content.encode("utf-8"))
    return paths


def report_document(plan: Plan, outcomes: Sequence[Outcome], open_phases: Sequence[str]) -> dict[str, Any]:
    """The report as plain data."""
    decision, reasons = verdict(outcomes)
    if open_phases:
        decision, reasons = "NO-GO", [*reasons, f"not carried out yet: {', '.join(open_phases)}"]
    config = plan.config
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
            "n": config.model.pattern.num_selected,
            "window": config.model.pattern.window,
            "dtype": config.train.dtype,
            "processes": plan.processes,
        },
        "phases": [outcome.to_dict() for outcome in outcomes],
    }


def markdown(document: dict[str, Any]) -> str:
    """The report as text that is also Markdown."""
    sizes = ", ".join(f"{name} {value}" for name, value in document["sizes"].items())
    lines = [f"# Validation: {document['verdict']}", "", f"Preset {document['preset']}; {sizes}.", ""]
    lines += [f"- {_plain(reason)}" for reason in document["reasons"]] or ["Every phase passed."]
    lines += ["", tabulate(_overview(document), headers=("phase", "status", "seconds"), tablefmt="github")]
    for phase in document["phases"]:
        lines += ["", f"## {phase['title']}: {phase['status']}", ""]
        lines += [f"- {_plain(problem)}" for problem in [*phase["problems"], *phase["notes"]]]
        if phase["criteria"]:
            rows = [(c["rule"], c["measured"], "met" if c["met"] else "NOT met") for c in phase["criteria"]]
            lines += ["", tabulate(rows, headers=("criterion", "measured", ""), tablefmt="github")]
        if phase["figures"]:
            cells = [_cells(figure) for figure in phase["figures"]]
            lines += ["", tabulate(cells, headers=COLUMNS, tablefmt="github", disable_numparse=True)]
        lines += ["", *(f"    {command}" for command in phase["commands"])]
        if phase["artifacts"]:
            lines += ["", "Files: " + ", ".join(f"[{name}]({name})" for name in phase["artifacts"])]
        lines += [line for name, text in phase["captions"].items() for line in ("", f"{name}: {_plain(text)}")]
    return "\n".join(lines) + "\n"


def page(plan: Plan, document: dict[str, Any]) -> str:
    """The report as an HTML page that needs no network. Links lead to the files beside it."""
    return render(
        "nsa_compile.validation",
        "validation.html",
        name=f"Validation of {plan.config.run.name}: {document['verdict']}",
        directory=plan.directory,
        problems=[],
        document=document,
        overview=_overview(document),
        columns=COLUMNS,
        phases=[
            (phase, [_cells(figure) for figure in phase["figures"]], _pictures(plan, phase))
            for phase in document["phases"]
        ],
    )


def _pictures(plan: Plan, phase: dict[str, Any]) -> list[tuple[str, str]]:
    """Caption and content of the PNG files among the artifacts."""
    names = [name for name in phase["artifacts"] if name.endswith(".png") and (plan.directory / name).exists()]
    captions = (": ".join(filter(None, (name, phase["captions"].get(name)))) for name in names)
    return [(text, embed((plan.directory / name).read_bytes())) for text, name in zip(captions, names, strict=True)]


def _overview(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(phase["title"], phase["status"], f"{phase['seconds']:.0f}") for phase in document["phases"]]


def _cells(figure: dict[str, Any]) -> list[str]:
    """A figure in the columns of `COLUMNS`."""
    n = "" if figure["n"] is None else str(figure["n"])
    return [figure["name"], figure["value"], figure["window"], n, figure["file"]]


def _plain(text: str) -> str:
    """On one line, and without what Markdown would take for a table or a tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
