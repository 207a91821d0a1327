"""The three kinds of experiment: their arms, and the conclusions from their runs.

A caller makes a plan, has it run by `run_experiment`, and gets plain data: the same as ``experiment.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nsa_compile.config import AcceptSection, CompileSection, DDPSection, RunConfig, flatten, load_config
from nsa_compile.errors import UserError
from nsa_compile.experiments.runs import Arm, Results, RunResult, base_overrides, check_arms, run_arms
from nsa_compile.experiments.statistics import MIN_PAIRS, Comparison, compare, rank
from nsa_compile.files import write_json
from nsa_compile.machine import cores
from nsa_compile.train.records.run_directory import lock_run_directory
from nsa_compile.train.report.summary import doubts_of

SCHEMA = 1
RECORD = "experiment.json"
# What the record keeps of a `RunResult`.
RUN_COLUMNS = ("repeat", "directory", "tokens_per_s", "deviation", "first_step", "last_step")


@dataclass(frozen=True)
class Plan:
    """What is compared.

    Attributes:
        kind: how the arms are judged: ``ab`` the second against the first, ``sweep`` by rank, ``scaling`` by
            throughput per process against the first.
        threads: of each process; ``None`` leaves them to the runs.
    """

    kind: Literal["ab", "sweep", "scaling"]
    title: str
    arms: tuple[Arm, ...]
    threads: int | None = None
    notes: tuple[str, ...] = ()


def ab_plan(
    config_path: str | None,
    overrides: Sequence[str],
    base: Sequence[str] = (),
    *,
    nproc: int = 1,
    steps: int | None = None,
) -> Plan:
    """The configuration with `base` (A) against the same with `overrides` as well (B).

    Raises:
        UserError: one of them is wrong, or they are the same.
    """
    if not overrides:
        raise UserError("ab needs at least one --set KEY=VALUE, by which B differs from A")
    common = base_overrides(config_path, base, steps)
    a, b = load_config(config_path, common), load_config(config_path, [*common, *overrides])
    if a == b:
        raise UserError(
            f"--set {' --set '.join(overrides)} is what A has already, so B would be the same; "
            "give B another value, or A with --base-set"
        )
    arms = (Arm("A", a, nproc), Arm("B", b, nproc, tuple(overrides)))
    return Plan("ab", f"B: {', '.join(overrides)}", arms)


def sweep_plan(
    config_path: str | None,
    key: str,
    values: Sequence[str],
    base: Sequence[str] = (),
    *,
    nproc: int = 2,
    steps: int | None = None,
) -> Plan:
    """One arm for each of the values of a configuration key.

    Raises:
        UserError: a configuration is wrong, or there are fewer than two different ones.
    """
    common = base_overrides(config_path, base, steps)
    arms = tuple(
        Arm(f"{key}={value}", load_config(config_path, [*common, f"{key}={value}"]), nproc, (f"{key}={value}",))
        for value in values
    )
    if len(arms) < 2 or any(arm.config == other.config for i, arm in enumerate(arms) for other in arms[:i]):
        raise UserError(f"a sweep of {key} needs two or more different values, not {' '.join(values) or 'none'}")
    if key.startswith("ddp.") and nproc == 1:
        raise UserError(f"{key} is of no effect on one process; use --nproc 2 or more")
    return Plan("sweep", f"Sweep of {key}", arms)


def check_different(arms: Sequence[Arm]) -> None:
    """Raise a UserError if what differs between two arms is of no effect: they would be one run under two names."""
    for i, arm in enumerate(arms):
        for other in arms[:i]:
            if _in_effect(arm) == _in_effect(other):
                values = (flatten(each.config.model_dump()) for each in (other, arm))
                key, *pair = next((key, a, b) for (key, a), (_, b) in zip(*values, strict=True) if a != b)
                one, two = (f"{key} = {x:g}" if isinstance(x, float) else f"{key} = {x}" for x in pair)
                raise UserError(f"{one} and {two} are the same run here: {_why_no_effect(key, arm)}")


def _in_effect(arm: Arm) -> RunConfig:
    """The configuration of an arm without what changes nothing of what is trained, and how."""
    config = arm.config
    sections: dict[str, Any] = {
        "run": config.run.model_copy(update={"name": "", "dir": ""}),
        "accept": AcceptSection(),
        "ddp": config.ddp.model_copy(update={"bucket_mb": arm.bucket_mb}) if arm.nproc > 1 else DDPSection(),
    }
    if not config.compile.enabled:
        sections["compile"] = CompileSection(enabled=False)
    if config.optim.name != "adamw":
        sections["optim"] = config.optim.model_copy(update={"fused": True})
    return config.model_copy(update=sections)


def _why_no_effect(key: str, arm: Arm) -> str:
    """Why the value of a key changes nothing of an arm, and the way out."""
    if key.startswith("ddp.") and arm.nproc == 1:
        return f"{key} is of no effect on one process; use --nproc 2 or more"
    if key == "ddp.bucket_mb" and arm.bucket_mb is not None:
        return (
            f"the gradients of this model are sent in buckets of {arm.bucket_mb:.3g} MB with either, a quarter of them "
            "or at least 1 MB; use values below that, or a larger model"
        )
    if key == "ddp.bucket_mb":
        return "ddp.strategy = fsdp has no buckets; use --set ddp.strategy=ddp"
    if key.startswith("compile."):
        return f"{key} is of no effect with compile.enabled = false; use --set compile.enabled=true"
    if key == "optim.fused":
        return f"optim.name = {arm.config.optim.name} has no fused form; use --set optim.name=adamw"
    return f"{key} changes nothing of what is trained; choose another key"


def _buckets_in_effect(arms: Sequence[Arm]) -> tuple[str, ...]:
    """A note about compared buckets that are smaller than asked for."""
    if len({arm.config.ddp.bucket_mb for arm in arms}) == 1:
        return ()
    return tuple(
        f"{arm.name}: gradients are sent in buckets of {arm.bucket_mb:.3g} MB, a quarter of them"
        for arm in arms
        if arm.bucket_mb is not None and arm.bucket_mb != arm.config.ddp.bucket_mb
    )


def scaling_plan(
    config_path: str | None,
    counts: Sequence[int],
    base: Sequence[str] = (),
    *,
    strong: bool = False,
    steps: int | None = None,
) -> Plan:
    """The same configuration on several numbers of processes; the smallest is the baseline.

    Each process gets ``train.batch_size`` sequences (weak scaling), or with `strong` its share of them. The threads of
    a process are the same in every arm, or few processes would look slow beside many.

    Raises:
        UserError: a configuration is wrong, or there are fewer than two different numbers.
    """
    numbers = sorted(set(counts))
    if len(numbers) < 2:
        raise UserError("scaling needs two or more different numbers of processes, as in --nproc 1 --nproc 2")
    common = base_overrides(config_path, base, steps)
    batch = load_config(config_path, common).train.batch_size
    arms = []
    for nproc in numbers:
        overrides = () if strong else (f"train.batch_size={batch * nproc}",)
        arms.append(Arm(f"nproc={nproc}", load_config(config_path, [*common, *overrides]), nproc, overrides))
    chosen = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(chosen) if chosen.isdecimal() else max(1, cores() // numbers[-1])
    sequences = f"{batch} sequences shared by all processes" if strong else f"{batch} sequences a process"
    note = f"{'strong' if strong else 'weak'} scaling: {sequences}, {threads} threads each"
    return Plan("scaling", f"Scaling to {numbers[-1]} processes", tuple(arms), threads, (note,))


def run_experiment(
    plan: Plan,
    directory: Path,
    *,
    repeats: int = 5,
    window: int = 50,
    seed: int = 0,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Train every arm of a plan `repeats` times, in turns, and judge them.

    ``experiment.json`` in `directory` is brought up to date after every run; an experiment that was interrupted goes
    on where it was when it is run again.

    Args:
        plan: what to compare.
        directory: for the runs and the results.
        repeats: runs of each arm.
        window: steps at the end of a run over which tokens/s are averaged.
        seed: of the order of the runs.
        tell: is handed a line about each run.

    Returns:
        The content of ``experiment.json``; see docs/experiments.md.

    Raises:
        UserError: an arm cannot run here, two are the same, or the directory cannot be written to, holds another
            experiment, or is another process's at the time.
    """
    check_arms(plan.arms)
    check_different(plan.arms)
    _check_directory(plan, directory)
    directory.mkdir(parents=True, exist_ok=True)
    record = conclude(plan, Results(), directory, repeats, window, seed)
    with lock_run_directory(directory):
        for results in run_arms(
            plan.arms, directory, repeats=repeats, window=window, seed=seed, threads=plan.threads, tell=tell
        ):
            record = conclude(plan, results, directory, repeats, window, seed)
            write_json(directory / RECORD, record)
    return record


def conclude(plan: Plan, results: Results, directory: Path, repeats: int, window: int, seed: int) -> dict[str, Any]:
    """What can be said of the runs there are."""
    judge = {"ab": _judge_ab, "sweep": _judge_sweep, "scaling": _judge_scaling}[plan.kind]
    missing = [arm.name for arm in plan.arms if not results.of(arm.name)]
    if missing:
        conclusions = {"comparisons": [], "verdict": f"no verdict: no finished run of {', '.join(missing)}"}
    else:
        conclusions = judge(plan, results)
    notes = [*plan.notes, *_buckets_in_effect(plan.arms)]
    shorter = sorted({length for run in results.runs if (length := run.last_step - run.first_step + 1) < window})
    if shorter:
        lengths = " or ".join(map(str, shorter))
        notes.append(f"the window is {lengths} steps, not {window}: the first quarter of a run does not count")
    doubtful = [doubts for run in results.runs if (doubts := doubts_of(run.summary))]
    if doubtful:
        notes.append(f"{len(doubtful)} of {len(results.runs)} runs are in doubt; the first: {'; '.join(doubtful[0])}")
    if repeats < MIN_PAIRS:
        notes.append(f"--repeats {repeats} is too few for a test, which needs {MIN_PAIRS}")
    return {
        "schema": SCHEMA,
        "kind": plan.kind,
        "title": plan.title,
        "directory": str(directory),
        "repeats": repeats,
        "window": window,
        "seed": seed,
        "order": [list(entry) for entry in results.order],
        "arms": [_describe(arm, results.of(arm.name)) for arm in plan.arms],
        **conclusions,
        "failures": [dataclasses.asdict(failure) for failure in results.failures],
        "notes": notes,
    }


def _describe(arm: Arm, runs: list[RunResult]) -> dict[str, Any]:
    rates = [run.tokens_per_s for run in runs]
    return {
        "name": arm.name,
        "overrides": list(arm.overrides),
        "sizes": {
            **arm.config.sizes(),
            "parameters": runs[0].summary["parameters"] if runs else None,
            "steps": arm.config.train.steps,
            "processes": arm.nproc,
            "threads": runs[0].threads if runs else None,
            "bucket_mb": arm.bucket_mb,
        },
        "tokens_per_s": statistics.fmean(rates) if rates else None,
        "between_runs": statistics.stdev(rates) if len(rates) > 1 else None,
        "within_runs": within_runs(runs) if runs else None,
        "mfu": statistics.fmean(run.summary["mfu"] for run in runs) if runs else None,
        "runs": [{key: vars(run)[key] for key in RUN_COLUMNS} for run in runs],
    }


def within_runs(runs: Sequence[RunResult]) -> float:
    """Standard deviation of tokens/s from step to step, over all runs of an arm: the root of the mean variance."""
    return statistics.fmean(run.deviation**2 for run in runs) ** 0.5


def _judge_ab(plan: Plan, results: Results) -> dict[str, Any]:
    a, b = (arm.name for arm in plan.arms)
    rates = results.rates(a, b)
    comparison = compare(b, rates[b], a, rates[a])
    return {"comparisons": [comparison.plain()], "verdict": comparison.verdict}


def _judge_sweep(plan: Plan, results: Results) -> dict[str, Any]:
    names = [arm.name for arm in plan.arms]
    rates = results.rates(*names)
    if not rates[names[0]]:
        return {"comparisons": [], "verdict": "no verdict: no round in which every value has a finished run"}
    ranking = rank(rates, {name: within_runs(results.of(name)) for name in names})
    return {**vars(ranking), "comparisons": [comparison.plain() for comparison in ranking.comparisons]}


def _judge_scaling(plan: Plan, results: Results) -> dict[str, Any]:
    """Throughput per process against the smallest arm; its ratio is the efficiency."""
    first, *others = plan.arms
    comparisons: list[Comparison] = []
    for arm in others:
        rates = results.rates(arm.name, first.name)
        per_process = [[rate / each.nproc for rate in rates[each.name]] for each in (arm, first)]
        comparisons.append(compare(arm.name, per_process[0], first.name, per_process[1], len(others)))
    verdicts = [_efficiency(comparison) for comparison in comparisons]
    return {
        "comparisons": [
            {**comparison.plain(), "verdict": verdict}
            for comparison, verdict in zip(comparisons, verdicts, strict=True)
        ],
        "efficiency": {comparison.name: comparison.ratio for comparison in comparisons},
        "verdict": "; ".join(verdicts),
    }


def _efficiency(comparison: Comparison) -> str:
    if comparison.ratio is None:
        return comparison.verdict
    text = f"{comparison.name}: efficiency {comparison.ratio:.1%} of {comparison.against} per process"
    if comparison.low is None or comparison.high is None:
        return f"{text} (n = {comparison.pairs} is too few to tell; the test needs {MIN_PAIRS} rounds)"
    level = f"{100 * (1 - comparison.significance):.4g} %"
    difference = "" if comparison.different else "; no significant difference to linear scaling"
    bounds = f"{level} CI {comparison.low:.1%} to {comparison.high:.1%}"
    return f"{text} ({bounds}, n = {comparison.pairs} pairs, p = {comparison.p:.2g}{difference})"


def _check_directory(plan: Plan, directory: Path) -> None:
    """Raises UserError where `directory` holds an experiment with other arms."""
    path = directory / RECORD
    if not path.exists():
        return
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        names, kind = [arm["name"] for arm in record["arms"]], record["kind"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"'{path}' is not the record of an experiment; choose another place with --out DIR") from None
    ours = [arm.name for arm in plan.arms]
    if kind != plan.kind or names != ours:
        raise UserError(
            f"'{directory}' holds another experiment ({kind}: {', '.join(names)}); choose another place with --out DIR"
        )
