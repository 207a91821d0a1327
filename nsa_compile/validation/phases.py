"""The phases of the runbook: which commands each runs, and what it reads out of their results."""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_compile.branches import BRANCHES
from nsa_compile.config import options_of
from nsa_compile.experiments.runs import base_overrides
from nsa_compile.experiments.views import CHART_CAPTION, figure
from nsa_compile.files import replace, write_json, write_text
from nsa_compile.machine.environment import describe_environment, git_revision
from nsa_compile.machine.matmul_rate import MatmulRate, busy, impossible
from nsa_compile.models.pattern import SparsePattern
from nsa_compile.train.distributed.buckets import effective_bucket_mb
from nsa_compile.train.records.plots import loss_figure
from nsa_compile.train.report.run_record import RunRecord, latest_layers, read_run
from nsa_compile.train.watch.heartbeat import heartbeat_path
from nsa_compile.validation.runbook import Phase, PhaseRun, Runbook

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A process among others is no faster than alone; this much is left to chance.
MOST_EFFICIENT = 1.1
# What of a run belongs to the report.
RUN_FILES = (
    "training.csv", "val.csv", "attention.jsonl", "summary.json", "env.json", "passes.json", "watchdog.jsonl",
    "heartbeat_rank0.jsonl",
)  # fmt: skip
# Data of which nothing can be learned.
NOISE = "uniform"
NO_FALL = "nothing can be learned from them, so the loss stays near ln 256 = 5.545 or rises"


def preflight(work: PhaseRun) -> None:
    """What this is, on what machine, and whether it can run at all."""
    import torch

    revision = git_revision()
    sha = revision["sha"] or "unknown: not a git checkout"
    path = work.folder / "git_sha.txt"
    write_text(path, sha + (" with uncommitted changes" if revision["dirty"] else "") + "\n")
    work.artifact(path)
    environment = describe_environment(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    write_json(work.folder / "env.json", environment)
    work.artifact(work.folder / "env.json")
    work.process("collect_env", [sys.executable, "-m", "torch.utils.collect_env"], ".txt")
    if shutil.which("nvidia-smi"):
        work.process("nvidia_smi", ["nvidia-smi", "-q", "-x"], ".xml")
    else:
        work.note("there is no nvidia-smi on this machine, so no nvidia_smi.xml")
    work.figure("revision", path.read_text().strip(), "git_sha.txt")
    work.figure("processor", environment["machine"]["processor"], "env.json")
    work.figure("torch", environment["packages"]["torch"], "env.json")
    found = work.command("doctor", "doctor")
    bad = [f for f in found["findings"] if f["status"] == "problem"]
    for finding in bad:
        work.problem(f"{finding['check']}: {finding['found']}; {finding['advice']}")
    work.figure("findings of doctor", f"{len(bad)} problems", "doctor.json", n=len(found["findings"]))


def parity(work: PhaseRun) -> None:
    """Selected attention as a loop over ranges (v1) against the operator (v2), on every pattern."""
    model = work.plan.config.model
    p = model.pattern
    lens = ",".join(map(str, work.plan.effort.parity_lens))
    found = work.command(
        "selection",
        *("bench", "selection", "--seq-lens", lens, "--repeats", "3"),
        *("--pattern", f"{p.compress_block}/{p.compress_stride}/{p.select_block}/{p.num_selected}/{p.window}"),
        *("--heads", str(model.n_heads), "--groups", str(model.n_kv_heads), "--head-dim", str(model.head_dim)),
    )
    for row in found["results"]:
        if not row["equal"]:
            work.problem(f"v1 and v2 disagree on {row['pattern']} at S = {row['seq_len']}")
    rows = found["results"]
    work.figure(
        "patterns on which v1 = v2", f"{sum(r['equal'] for r in rows)} of {len(rows)}", "selection.json", n=len(rows)
    )


def needs_blocks(plan: Runbook) -> str | None:
    model = plan.config.model
    return None if isinstance(model.pattern, SparsePattern) else f"model.attention = {model.attention} has other sizes"


def equivalence(work: PhaseRun) -> None:
    """The properties of `verify`: nothing that is compiled computes anything else."""
    plan = work.plan
    minutes = str(plan.effort.verify_minutes)
    found = work.command("verify", "verify", "--config", str(plan.config_file), "--minutes", minutes)
    for result in found["properties"]:
        if not result["ok"]:
            work.problem(f"{result['name']}: {result['message']}; again: {result['command']}")
        closest = f"{result['error']:.2g} ≤ {result['bound']:.2g}" if result["bound"] else "bitwise"
        value = f"{'holds' if result['ok'] else 'BROKEN'}, {closest}"
        work.figure(f"{result['name']}: {result['title']}", value, "verify.json", "examples", result["examples"])


def needs_properties(plan: Runbook) -> str | None:
    variant = plan.config.model.variant
    return None if variant.verified else f"model.attention = {variant.name} has no branches"


def baseline(work: PhaseRun) -> None:
    """Throughput of the configuration as it is, on random bytes where its tokens are bytes."""
    plan, effort, accept = work.plan, work.plan.effort, work.plan.config.accept
    config = plan.config
    random = config.data.tokenizer == "byte" and config.train.loss == "all"
    data = ("data.name=uniform", "data.stream=false") if random else ()
    if random:
        instead = "" if config.data.name == NOISE else f", not on data.name = {config.data.name}"
        work.note(
            f"throughput is measured on random bytes (data.name = {NOISE}){instead}: {NO_FALL}. It is not judged here"
        )
    else:
        work.note(f"measured on the configured data, {config.data.name}")
    summary, record = train(work, effort.steps, *data, on_noise=random)
    rows = record.steps[-effort.window :]
    mean, deviation = mean_and_deviation([row.tokens_per_s for row in rows])
    mfu = mean * summary["flops_per_token"] / summary["peak_flops"]
    file, window = f"{relative(work, record.directory)}/training.csv", f"the last {len(rows)} steps"
    work.figure("tokens/s", f"{mean:,.0f} ± {deviation:,.0f}", file, window, len(rows))
    share = f"{mfu:.1%} of {summary['peak_flops'] / 1e9:,.0f} GFLOP/s"
    work.figure("MFU", f"{share}, which is impossible" if impossible(mfu) else share, file, window, len(rows))
    if doubt := busy([MatmulRate(**rate) for rate in summary["matmul_rates"]]):
        work.note(doubt)
    if doubt := impossible(mfu):
        work.problem(doubt)
    if (memory := rows[-1].memory_bytes) is not None:
        work.figure("peak memory", f"{memory / 2**30:.2f} GiB", file)
    work.figure("parameters", f"{summary['parameters']:,}", f"{relative(work, record.directory)}/summary.json")
    if accept.tokens_per_s is not None:
        work.require(f"tokens/s ≥ {accept.tokens_per_s:,.0f}", f"{mean:,.0f} tokens/s", mean >= accept.tokens_per_s)
    if accept.mfu is not None:
        met = mfu >= accept.mfu and impossible(mfu) is None
        work.require(f"MFU ≥ {accept.mfu:.1%}", f"MFU {share}", met)


def audit(work: PhaseRun) -> None:
    """Which operator and backend each attention really used."""
    found = work.command("attention", "audit", "attention", "--config", str(work.plan.config_file))
    for fallback in found["fallbacks"]:
        work.problem(str(fallback))
    rows: dict[tuple[str, str, str], list[int]] = {}
    for row in found["observed"]:
        rows.setdefault((row["branch"], row["direction"], row["backend"]), []).append(row["layer"])
    for (branch, direction, backend), layers in rows.items():
        work.figure(f"{branch}, {direction}", backend, "attention.json", f"{len(set(layers))} layers", len(layers))


def profile(work: PhaseRun) -> None:
    """Where the time of a warm step goes, and whether Python or a host sync takes any."""
    plan = work.plan
    steps = str(plan.effort.profile_steps)
    place = work.folder / "step"
    found = work.command(
        "step", "profile", "step", "--config", str(plan.config_file), "--steps", steps, "--out", str(place),
        "--nproc", str(plan.processes),
    )  # fmt: skip
    window, n = f"{found['steps']} warm steps", found["steps"]
    for name, row in found["phases"].items():
        work.figure(f"phase {name}", f"{1e3 * row['mean_s']:,.1f} ms, {row['share']:.1%}", "step.json", window, n)
    branches: dict[str, float] = {}
    for row in found["ranges"]:
        branches[row["branch"]] = branches.get(row["branch"], 0.0) + row["share"]
    for name, share in branches.items():
        if name.startswith("nsa."):
            work.figure(name, f"{share:.1%} of a step", "step.json", window, n)
    expected = plan.config.model.variant.ranges_expected if plan.config.compile.enabled else {}
    for name, meaning in expected.items():
        if name not in branches:
            work.problem(f"the range {name} is missing: {meaning}")
    for name, check in found["checks"].items():
        if not check["ok"] and name != "python_hot_spot":
            work.problem(f"{name.replace('_', ' ')}: {check['value']:.3g}, and the limit is {check['limit']:.3g}")
    python = found["checks"]["python_hot_spot"]
    if (limit := plan.config.accept.python_share) is not None:
        where = "".join(f", {found['where']}" for found in python["places"][:1])
        measured = f"{python['value']:.1%}{where}"
        work.require(f"no Python function takes > {limit:.0%} of a step", measured, python["value"] <= limit)
    for path in sorted(place.iterdir()):
        work.artifact(path)


def buckets(work: PhaseRun) -> None:
    """Throughput by size of the gradients' buckets."""
    plan = work.plan
    sizes = different_buckets(plan)
    if len(sizes) < len(plan.effort.buckets):
        work.note(f"of {words(plan.effort.buckets)} MB, only {words(sizes)} differ in a model of this size")
    experiment(work, "sweep", "sweep", "buckets", *map(str, sizes), "--nproc", str(plan.processes))


def different_buckets(plan: Runbook) -> list[int]:
    """The sizes to compare, each of which makes other buckets of this model's gradients."""
    found: dict[float | None, int] = {}
    for size in plan.effort.buckets:
        found.setdefault(effective_bucket_mb(plan.config.changed(ddp={"bucket_mb": size}), plan.processes), size)
    return list(found.values())


def needs_buckets(plan: Runbook) -> str | None:
    if (reason := needs_processes(plan)) is not None:
        return reason
    if plan.config.ddp.strategy != "ddp":
        return f"ddp.strategy = {plan.config.ddp.strategy} has no buckets"
    if len(different_buckets(plan)) > 1:
        return None
    return f"buckets of {words(plan.effort.buckets)} MB come to the same for a model with so few gradients"


def words(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def isolation(work: PhaseRun) -> None:
    """Throughput of a process among others against that of one alone."""
    plan = work.plan
    record = experiment(work, "scaling", "scaling", "--nproc", "1", "--nproc", str(plan.processes))
    limit = plan.config.accept.scaling
    if limit is None:
        return
    (efficiency,) = record["efficiency"].values()
    measured = "no run to measure it by" if efficiency is None else f"efficiency {efficiency:.1%}"
    possible = efficiency is not None and efficiency <= MOST_EFFICIENT
    if efficiency is not None and not possible:
        measured += ", which is impossible: something else kept the machine busy while one process ran alone"
    work.require(f"efficiency ≥ {limit:.1%}", measured, efficiency is not None and possible and efficiency >= limit)


def fused(work: PhaseRun) -> None:
    """AdamW in one kernel against AdamW in several."""
    settings = ("--base-set", "optim.fused=false", "--set", "optim.fused=true")
    experiment(work, "ab", "ab", *settings, "--nproc", str(work.plan.processes), override="--base-set")


def needs_adamw(plan: Runbook) -> str | None:
    name = plan.config.optim.name
    return None if name == "adamw" else f"optim.name = {name} has no fused form"


def experiment(work: PhaseRun, name: str, *command: str, override: str = "--set") -> dict[str, Any]:
    """The record of an experiment on the configuration. Figures are those of its arms.

    Args:
        override: the option of the command by which all arms are changed.
    """
    plan, effort = work.plan, work.plan.effort
    place = work.folder / name
    record = work.command(
        name, *command, "--config", str(plan.config_file), override, f"run.dir={work.folder}",
        "--steps", str(effort.arm_steps), "--window", str(effort.window), "--repeats", str(effort.repeats),
        "--out", str(place),
    )  # fmt: skip
    for failure in record["failures"]:
        work.problem(f"{failure['arm']} left with exit code {failure['exit_code']}: {failure['last_line']}")
    for arm in record["arms"]:
        rates = [run["tokens_per_s"] for run in arm["runs"]]
        if not rates:
            continue
        mean, deviation = mean_and_deviation(rates)
        steps = arm["runs"][0]["last_step"] - arm["runs"][0]["first_step"] + 1
        value = f"{mean:,.0f} ± {deviation:,.0f}"
        work.figure(f"tokens/s, {arm['name']}", value, f"{name}/experiment.json", f"the last {steps} steps", len(rates))
    work.note(record["title"])
    work.figure("verdict", record["verdict"], f"{name}/experiment.json")
    for note in record["notes"]:
        work.note(note)
    if (place / "experiment.png").exists():  # matplotlib is installed, and there is a run
        work.chart(name, CHART_CAPTION, lambda: figure(record))
    for path in sorted(place.glob("experiment.*")):
        work.artifact(path)
    return record


def stability(work: PhaseRun) -> None:
    """A longer run under the watchdog: its findings, signs of life, gates and memory."""
    plan = work.plan
    steps = plan.effort.stability_steps
    settings = ("watchdog.enabled=true", f"log.stats_every={max(1, steps // 10)}")
    summary, record = train(work, steps, *settings)
    place = relative(work, record.directory)
    for problem in record.problems:
        work.problem(problem)
    for finding in record.findings:
        work.problem(f"watchdog: {finding['rule']}: {finding['message']}")
    silent = [r for r in range(plan.processes) if not heartbeat_path(record.directory, r).exists()]
    for rank in silent:
        work.problem(f"rank {rank} left no heartbeat")
    work.figure(
        "findings of the watchdog", str(len(record.findings)), f"{place}/heartbeat_rank0.jsonl", f"{steps} steps"
    )
    losses = [row.loss for row in record.steps]
    work.figure("training loss", f"{losses[0]:.3f} → {losses[-1]:.3f}", f"{place}/training.csv", f"{steps} steps")
    judge_memory(work, record, place)
    judge_gates(work, record, place)
    judge_loss(work, summary, place)


def judge_loss(work: PhaseRun, summary: dict[str, Any], place: str) -> None:
    """The held-out loss before the first and after the last step: it falls, unless the data are noise."""
    accept, name = work.plan.config.accept, work.plan.config.data.name
    start, end = summary["val_loss_start"], summary["val_loss_end"]
    if start is None or end is None:
        work.problem("the held-out loss was not measured at the start and at the end, or is not finite")
        return
    measured = f"{start:.3f} → {end:.3f}"
    work.figure("held-out loss", measured, f"{place}/val.csv", f"{work.plan.effort.stability_steps} steps", 2)
    if name == NOISE:
        asked = "" if accept.val_loss is None else f"; accept.val_loss = {accept.val_loss} decides nothing"
        work.note(f"the loss is not judged: the data are random bytes (data.name = {NOISE}); {NO_FALL}{asked}")
        return
    work.require(f"the held-out loss on data.name = {name} falls", measured, end < start)
    if accept.val_loss is not None:
        work.require(f"held-out loss ≤ {accept.val_loss}", f"{end:.3f}", end <= accept.val_loss)


def judge_memory(work: PhaseRun, record: RunRecord, place: str) -> None:
    """Peak memory at the end against that after the second quarter: what grows for ever has no plateau."""
    peaks = [row.memory_bytes for row in record.steps if row.memory_bytes is not None]
    if len(peaks) < 4:
        work.note("too few steps to see whether memory grows")
        return
    growth = peaks[-1] / peaks[len(peaks) // 2 - 1] - 1
    window = f"steps {record.steps[len(peaks) // 2 - 1].step} to {record.steps[-1].step}"
    work.figure("growth of peak memory", f"{growth:+.2%}", f"{place}/training.csv", window, len(peaks))
    if (limit := work.plan.config.accept.memory_growth) is not None:
        work.require(f"peak memory grows by at most {limit:.1%}", f"{growth:+.2%} over {window}", growth <= limit)


def judge_gates(work: PhaseRun, record: RunRecord, place: str) -> None:
    """The least share that a branch has in the gates of a layer."""
    step, layers = latest_layers(record)
    if not layers or not work.plan.config.model.variant.gated:
        work.note("no statistics of gates: the attention is dense, or branches are left out")
        return
    gates = {(layer["layer"], b): layer[f"gate_{b}"] for layer in layers for b in BRANCHES}
    totals = {layer["layer"]: sum(layer[f"gate_{b}"] for b in BRANCHES) for layer in layers}
    (layer, branch), least = min(gates.items(), key=lambda item: item[1] / totals[item[0][0]])
    share = least / totals[layer]
    text = f"{share:.1%}, {branch} of layer {layer}"
    work.figure("least share of a branch in the gates", text, f"{place}/attention.jsonl", f"step {step}", len(layers))
    if (limit := work.plan.config.accept.gate_share) is not None:
        work.require(f"every branch has ≥ {limit:.1%} of the gates", text, share >= limit)


def train(work: PhaseRun, steps: int, *settings: str, on_noise: bool = False) -> tuple[dict[str, Any], RunRecord]:
    """Train the configuration for so many steps: the summary of the run and its record. Its files become artifacts.

    With `on_noise` its data are random bytes: the picture of the loss among them is one with a title that says so.
    """
    config_file = str(work.plan.config_file)
    made = base_overrides(config_file, [f"run.dir={work.folder / 'runs'}", *settings], steps)
    summary = work.command("train", "train", *options_of(config_file, made), "--nproc", str(work.plan.processes))
    record = read_run(Path(summary["run_dir"]))
    picture = record.directory / "loss.png"
    caption = f"Loss on random bytes: {NO_FALL}." if on_noise else "Loss of the run on the configured data."

    def make() -> Figure:
        drawing = loss_figure(record.steps, record.evals, record.summary["best_unigram_loss"])
        if on_noise:
            drawing.suptitle(caption, color="C3", fontsize="medium", wrap=True)
        return drawing

    if picture.exists():  # matplotlib is installed
        content = work.chart("loss", caption, make)
        if on_noise:
            picture = work.folder / "loss_on_random_bytes.png"
            replace(picture, content)
    for name in RUN_FILES:
        work.artifact(record.directory / name)
    work.artifact(picture)
    return summary, record


def relative(work: PhaseRun, directory: Path) -> str:
    """Below the folder of the phase."""
    return directory.relative_to(work.folder).as_posix()


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def needs_processes(plan: Runbook) -> str | None:
    return None if plan.processes > 1 else "one process sends no gradients; --nproc 2 or more has something to compare"


PHASES = (
    Phase("preflight", "Preflight", preflight),
    Phase("parity", "Parity of selected attention, v1 and v2", parity, needs_blocks),
    Phase("equivalence", "Equivalence of what is compiled", equivalence, needs_properties),
    Phase("baseline", "Baseline", baseline),
    Phase("buckets", "Sweep of bucket sizes", buckets, needs_buckets),
    Phase("audit", "Attention audit", audit),
    Phase("profile", "Profile of a step", profile),
    Phase("isolation", "One process alone and among others", isolation, needs_processes),
    Phase("fused", "Fused AdamW", fused, needs_adamw),
    Phase("stability", "Stability under the watchdog", stability),
)
