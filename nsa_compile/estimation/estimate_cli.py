"""``nsa-compile estimate``: what a run needs, before it starts."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import run_options
from nsa_compile.errors import UserError
from nsa_compile.files import nearest_existing

if TYPE_CHECKING:
    from nsa_compile.config import RunConfig


@click.command()
@run_options
@click.option("--nproc", default=1, show_default=True, type=click.IntRange(min=1), help="Processes that share a batch.")
@click.option("--measure", is_flag=True, help="Train one and two blocks for a few steps, for the time of a step.")
def estimate(config_path: str | None, overrides: tuple[str, ...], as_json: bool, nproc: int, measure: bool) -> None:
    """Tell the memory, arithmetic, time and disk that a run needs, before it starts.

    Memory is computed: one block goes through the compiler without data, in a few seconds. The time of a step is
    bounded from below by its arithmetic and the peak rate of this machine's matrix products, which is measured; with
    --measure it is taken from steps of smaller models that really run. Both are of as many threads as a run started
    from here has.

    \b
    nsa-compile estimate
    nsa-compile estimate --config my_run.yaml --nproc 8
    nsa-compile estimate --set train.seq_len=4096 --measure --json
    """
    # Everything a user can get wrong is found before torch is imported.
    from nsa_compile.config import load_config
    from nsa_compile.machine.preflight import check_compiler, check_matmul, check_torchao, wait_passively

    config = load_config(config_path, overrides)
    _check(config, nproc)
    if measure:
        check_compiler(config)
        check_torchao(config)
        check_matmul(config)
    wait_passively()  # as the run does
    facts = _estimate(config, nproc, measure)
    click.echo(json.dumps(facts, indent=2) if as_json else _render(facts))


def _check(config: RunConfig, nproc: int) -> None:
    from nsa_compile.train.distributed.world import check_world

    check_world(config, nproc, local_size=1)  # one device is enough to tell for all
    if not config.compile.enabled:
        raise UserError(
            "compile.enabled = False cannot be estimated: the loop over tokens keeps whatever autograd keeps of each; "
            "use --set compile.enabled=true"
        )


def _estimate(config: RunConfig, processes: int, measure: bool) -> dict[str, Any]:
    import dataclasses

    import torch

    from nsa_compile.estimation import estimate as estimates
    from nsa_compile.machine import cores
    from nsa_compile.machine.environment import peak_memory
    from nsa_compile.machine.matmul_rate import best_of, busy, measure_matmul, multiplied_dtypes
    from nsa_compile.models.flops import training_flops_per_token
    from nsa_compile.train.distributed.group import choose_device
    from nsa_compile.train.distributed.world import World

    train = config.train
    device = choose_device(config, World())
    if device.type == "cpu" and processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        # As the launcher has it.
        torch.set_num_threads(max(1, cores() // processes))
    parameters = estimates.count_parameters(config.model)
    memory = estimates.estimate_memory(config, device, processes)
    # Torch and the compiler are loaded by now, and nothing else is.
    resident = peak_memory(torch.device("cpu"))

    dtypes = multiplied_dtypes(train.dtype, train.matmul)
    rates = [measure_matmul(device, dtypes, processes=processes)]
    measured = estimates.measure_step(config, device, processes) if measure else None
    if measure:
        rates.append(measure_matmul(device, dtypes, processes=processes))
    tokens = train.seq_len * train.batch_size * train.accumulate
    bound = estimates.step_flops(config) / processes / best_of(rates)
    seconds = measured["seconds"] if measured else bound
    checkpoint = estimates.checkpoint_bytes(config)
    return {
        "device": str(device),
        "processes": processes,
        "strategy": config.ddp.strategy if processes > 1 else None,
        "optimizer": config.optim.name,
        "parameters": parameters,
        "tokens_per_step": tokens,
        "tokens": tokens * train.steps,
        "memory": {**dataclasses.asdict(memory), "process": resident},
        "flops_per_token": training_flops_per_token(config.model, train.seq_len),
        "matmul_flops": best_of(rates),
        "threads": rates[0].threads,
        "busy": busy(rates) if measure else None,  # the bound is of the peak, which neighbours leave as it is
        "step_seconds_at_least": bound,
        "step_seconds_measured": measured,
        "step_seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "run_seconds": seconds * train.steps,
        "disk": {
            "checkpoint": checkpoint,
            "checkpoints": estimates.checkpoints_on_disk(config),
            "total": checkpoint * estimates.checkpoints_on_disk(config),
            "free": shutil.disk_usage(nearest_existing(Path(config.run.dir))).free,
        },
    }


def _render(facts: dict[str, Any]) -> str:
    from tabulate import tabulate

    from nsa_compile.profiles.rendering import with_unit

    memory, disk, measured = facts["memory"], facts["disk"], facts["step_seconds_measured"]
    block = memory["block"]

    def size(value: float) -> str:
        return with_unit(value, "B")

    rows = [
        ("parameters", f"{facts['parameters']:,}", "counted"),
        ("weights", size(memory["weights"]), "computed: 4 bytes a parameter"),
        ("gradients", size(memory["gradients"]), "computed: 4 bytes a parameter"),
        ("optimizer", size(memory["optimizer"]), f"computed: two moments of {facts['optimizer']}"),
        (
            "activations",
            size(memory["activations"]),
            f"computed: {size(block['saved'])} kept for backward by the compiled graph of a block",
        ),
        ("peak of a step", size(memory["peak"]), f"computed: all that is alive in {memory['peak_at']}"),
        ("the process itself", size(memory["process"]), "measured: Python, torch and the compiler, in main memory"),
        ("", "", ""),
        ("arithmetic", with_unit(facts["flops_per_token"], "FLOP/token"), "computed: useful matrix products"),
        ("machine", with_unit(facts["matmul_flops"], "FLOP/s"), f"measured: peak of matrix products, {_device(facts)}"),
        ("step", _duration(facts["step_seconds"]), _time_source(measured)),
        ("tokens/s", f"{facts['tokens_per_s']:,.0f}", _rate_source(facts)),
        (
            "run",
            _duration(facts["run_seconds"]),
            f"{facts['tokens']:,} tokens{'' if measured else ', at least'}; compilation and evaluation not counted",
        ),
        ("", "", ""),
        (
            "checkpoints",
            size(disk["total"]),
            f"computed: {disk['checkpoints']} of {size(disk['checkpoint'])}; {size(disk['free'])} are free",
        ),
    ]
    if memory["communication"]:
        kind, source = _COMMUNICATION[facts["strategy"]]
        rows.insert(4, (kind, size(memory["communication"]), f"computed: {source}"))
    processes = facts["processes"]
    title = f"Each of {processes} processes, a {'device' if facts['device'] != 'cpu' else 'share of the machine'} each"
    title = title if processes > 1 else "One process"
    table = tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right", "left"))
    doubts = [doubt for doubt in (facts["busy"], _too_fast(facts)) if doubt]
    return "\n\n".join([f"{title}:", table, *doubts])


def _device(facts: dict[str, Any]) -> str:
    """Where it was measured, and on how many threads."""
    count = facts["threads"]
    return facts["device"] + (f", {count} thread{'s' * (count > 1)} a process" if count else "")


def _rate_source(facts: dict[str, Any]) -> str:
    return "from the step" if facts["step_seconds_measured"] else f"at most: from the step, on {_device(facts)}"


def _too_fast(facts: dict[str, Any]) -> str | None:
    """Why the measured step cannot be believed beside the bound."""
    if facts["step_seconds"] >= facts["step_seconds_at_least"]:
        return None
    return (
        f"the measured step is shorter than its arithmetic takes at the machine's peak, "
        f"{_duration(facts['step_seconds_at_least'])}: one of the two was mis-measured, and neither can be relied on"
    )


_COMMUNICATION = {
    "ddp": ("buckets of DDP", "a copy of the gradients"),
    "fsdp": ("gathered by FSDP", "weights of two blocks, gradients of one"),
}


def _time_source(measured: dict[str, float] | None) -> str:
    if measured is None:
        return "at least: the arithmetic at the peak of the machine; --measure runs steps"
    one, two = (_duration(measured[name]) for name in ("one_block", "two_blocks"))
    return f"measured: {one} with one block, {two} with two, and as much for each further one; no communication"


def _duration(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    hours, rest = divmod(round(seconds / 60), 60)
    return f"{hours} h {rest:02} min" if hours else f"{rest} min"
