"""Several processes compute what one does: gradients, updates and losses, on gloo with 2 and 4 ranks."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nsa_compile.config import DDPSection
from nsa_compile.data import BatchSampler
from nsa_compile.data.sampling import UniformBytes
from nsa_compile.launch import worker
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern
from nsa_compile.train.distributed.all_reduce import AllReduceHook
from nsa_compile.train.distributed.group import leave_group, share_model, whole
from nsa_compile.train.distributed.world import World
from nsa_compile.train.steps import train_step
from tests import processes
from tests.conftest import TINY_RUN, with_fault

CPU = torch.device("cpu")
PATTERN = SparsePattern(compress_block=4, compress_stride=2, select_block=4, num_selected=3, window=4)
VARIANTS = {
    "plain": {},
    "accumulated": {"accumulate": 3},
    "checkpointed": {"checkpointed": [0, 1], "accumulate": 2},
    "fsdp": {"strategy": "fsdp", "checkpointed": [1], "accumulate": 2},
    "bf16": {"compress": "bf16"},
    "fp16": {"compress": "fp16", "accumulate": 2},
}
EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}


def make_model() -> NSATransformer:
    torch.manual_seed(0)
    return NSATransformer(NSAConfig(256, 16, 2, 2, 1, 8, pattern=PATTERN))


def gradients(model, batches, trained=None, hook=None):
    """Mean gradient of a step, as SGD with a learning rate of 1 shows it, by name; and what the step came to."""
    before = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    result = train_step(trained or model, optimizer, batches, 1.0, None, CPU, "float32", hook=hook)
    return {name: before[name] - whole(p.detach()) for name, p in model.named_parameters()}, result


def in_processes(function: Callable[[int, int, str], None], size: int, folder: Path) -> None:
    """Call it in `size` processes, with the rank of each; they are forked as those of `processes` are."""
    mp.start_processes(function, (size, str(folder)), nprocs=size, start_method="forkserver")


def compare_with_one_process(rank: int, size: int, folder: str) -> None:
    """In each rank: every variant of sharing a step, beside the same step over all batches in one process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    torch.set_num_threads(1)
    outcome = {}
    for name, variant in VARIANTS.items():
        accumulate, compress = variant.get("accumulate", 1), variant.get("compress", "none")
        one = BatchSampler(UniformBytes(3), 4, 12)
        expected, alone = gradients(make_model(), [one.next_batch() for _ in range(accumulate)])

        model = make_model()
        model.checkpoint_blocks(variant.get("checkpointed", []))
        config = DDPSection(strategy=variant.get("strategy", "ddp"), compress=compress)
        hook = AllReduceHook(compress) if config.strategy == "ddp" else None
        trained = share_model(model, config, World(rank, size), CPU, hook)
        share = BatchSampler(UniformBytes(3), 4, 12, rank=rank, world_size=size)
        local = [share.next_batch() for _ in range(accumulate)]
        found, result = gradients(model, local, trained, hook)

        # What each rank rounds and adds up, for the bound of compression: its own mean gradient over its batches.
        magnitude, _ = gradients(make_model(), local)
        for gradient in magnitude.values():
            gradient.abs_()
            dist.all_reduce(gradient)
        outcome[name] = {
            "loss": (alone.loss, result.loss),
            "norm": (alone.grad_norm, result.grad_norm),
            "sent_bytes": result.overlap.sent_bytes if result.overlap else None,
            "parameters": sum(g.numel() for g in found.values()),
            "gradients": {key: (expected[key], found[key], magnitude[key] / size) for key in expected},
        }
    torch.save(outcome, f"{folder}/rank{rank}.pt")
    leave_group()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.deep)])
def outcomes(request, tmp_path_factory):
    """What every rank found, and how many there are."""
    folder = tmp_path_factory.mktemp("ranks")
    in_processes(compare_with_one_process, request.param, folder)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(request.param)], request.param


@pytest.mark.parametrize("variant", VARIANTS)
def test_several_processes_compute_the_gradient_of_one(outcomes, variant):
    ranks, size = outcomes
    epsilon = EPSILON.get(VARIANTS[variant].get("compress", "none"), 0.0)
    for outcome in (rank[variant] for rank in ranks):
        assert outcome["loss"][1] == pytest.approx(outcome["loss"][0], rel=1e-6)
        for name, (expected, found, magnitude) in outcome["gradients"].items():
            # Each rank's part is rounded once, and each of the size - 1 sums.
            band = size * epsilon * magnitude + 1e-6 + 1e-4 * expected.abs().max()
            assert ((found - expected).abs() <= band).all(), name
    for name in ranks[0][variant]["gradients"]:  # and all have the same
        assert len({rank[variant]["gradients"][name][1].numpy().tobytes() for rank in ranks}) == 1


def test_compression_halves_what_is_sent_and_changes_the_gradient(outcomes):
    ranks, _ = outcomes
    plain, compressed = ranks[0]["plain"], ranks[0]["bf16"]
    assert plain["sent_bytes"] == 4 * plain["parameters"]
    assert compressed["sent_bytes"] == 2 * plain["parameters"]
    differs = [not torch.equal(plain["gradients"][n][1], compressed["gradients"][n][1]) for n in plain["gradients"]]
    assert any(differs)


def measure_overlap(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = NSATransformer(NSAConfig(256, 128, 8, 2, 1, 32, attention="dense"))
    hook = AllReduceHook("bf16")
    trained = share_model(model, DDPSection(bucket_mb=1), World(rank, size), CPU, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [np.zeros((1, 257), dtype=np.int64)]
    results = [train_step(trained, optimizer, batches, 0.1, None, CPU, "float32", hook=hook) for _ in range(9)]
    Path(folder, f"overlap{rank}.json").write_text(json.dumps([result.overlap.first for result in results[2:]]))
    leave_group()


@pytest.mark.deep
def test_gradients_are_sent_before_half_of_the_backward_pass_has_run(tmp_path):
    in_processes(measure_overlap, 2, tmp_path)
    for rank in range(2):
        assert np.median(json.loads((tmp_path / f"overlap{rank}.json").read_text())) < 0.5


LEAVER = """
import gc, sys, time, torch, torch.distributed as dist
from nsa_compile.train.distributed.group import leave_group

rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
if rank == 1:
    time.sleep(2)
dist.all_reduce(torch.ones(2), async_op=True)  # of rank 0, it ends when the group is left
leave_group()
del model
gc.collect()
print("left")
"""


@pytest.mark.deep
def test_a_group_is_left_while_a_thread_of_it_still_has_a_tensor(tmp_path):
    processes = [
        subprocess.Popen([sys.executable, "-c", LEAVER, str(rank), str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.communicate(timeout=60)[0] == "left\n"
            assert process.returncode == 0
    finally:
        for process in processes:
            process.kill()


def train(overrides, *arguments, **options):
    result = processes.train(overrides, *arguments, **options)
    return result.returncode, result.stdout, result.stderr


def losses(directory):
    with (Path(directory) / "training.csv").open(encoding="utf-8") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


LONG = {"train.batch_size": 4, "train.steps": 12, "train.save_every": 3, "train.eval_every": 6}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Losses of a run in one process."""
    values = {**TINY_RUN, **LONG, "run.dir": str(tmp_path_factory.mktemp("alone"))}
    code, stdout, stderr = train([f"{key}={value}" for key, value in values.items()])
    assert code == 0, stderr
    return losses(json.loads(stdout)["run_dir"])


@pytest.mark.deep
def test_a_run_goes_on_with_any_number_of_processes_on_the_same_batches(tiny_overrides, tmp_path, alone):
    overrides = tiny_overrides(**LONG, **{"ddp.compress": "none"})
    code, stdout, stderr = train(overrides, "--nproc", "2", env=with_fault("term@1:4", tmp_path / "once"))
    assert code == 75, stderr
    summary = json.loads(stdout)
    assert (summary["stopped_by"], summary["steps"]) == ("SIGTERM", 4)

    code, stdout, stderr = train(overrides, "--nproc", "4", "--resume", "auto")
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert (summary["resumed_from"], summary["processes"], summary["steps"]) == (4, 4, 12)
    np.testing.assert_allclose(losses(summary["run_dir"]), alone, rtol=1e-4)


@pytest.mark.deep
def test_accumulation_on_two_processes_is_one_large_batch(tiny_overrides, alone):
    changes = {"train.batch_size": 2, "train.accumulate": 2, "train.activation_checkpointing": "all"}
    code, stdout, stderr = train(tiny_overrides(**{**LONG, **changes, "ddp.compress": "none"}), "--nproc", "2")
    assert code == 0, stderr
    np.testing.assert_allclose(losses(json.loads(stdout)["run_dir"]), alone, rtol=1e-4)


@pytest.mark.deep
def test_answers_of_unequal_lengths_count_alike_on_two_processes(tiny_overrides, tmp_path):
    talks = tmp_path / "talks.jsonl"
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * n}] for n in (1, 30, 3, 20) * 5]
    talks.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data = {"data.name": talks, "data.chat": "true", "train.loss": "answers", "train.seq_len": 72}
    both, ends = [], []
    for number, batch in ((1, 4), (2, 2)):
        changes = {"train.batch_size": batch, "train.accumulate": 4 // batch, "train.eval_batches": 4 // batch}
        overrides = tiny_overrides(**data, **changes, **{"ddp.compress": "none"})
        code, stdout, stderr = train(overrides, "--nproc", str(number))
        assert code == 0, stderr
        both.append(losses(json.loads(stdout)["run_dir"]))
        ends.append(json.loads(stdout)["val_loss_end"])
    np.testing.assert_allclose(both[0], both[1], rtol=1e-5)
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_compiled_and_checkpointed_blocks_train_the_same_on_two_processes(tiny_overrides, alone):
    changes = {"train.batch_size": 2, "train.accumulate": 2, "train.activation_checkpointing": "0"}
    changes |= {"compile.enabled": "true", "compile.nested": "aot_eager", "ddp.compress": "none"}
    code, stdout, stderr = train(tiny_overrides(**{**LONG, **changes}), "--nproc", "2")
    assert code == 0, stderr
    np.testing.assert_allclose(losses(json.loads(stdout)["run_dir"]), alone, rtol=1e-4)


@pytest.mark.deep
def test_what_fsdp_has_saved_is_for_any_strategy(tiny_overrides, tmp_path, alone):
    overrides = tiny_overrides(**LONG, **{"ddp.compress": "none"})
    fault = with_fault("term@0:4", tmp_path / "once")
    code, _, stderr = train([*overrides, "ddp.strategy=fsdp"], "--nproc", "2", env=fault)
    assert code == 75, stderr
    code, stdout, stderr = train(overrides, "--resume", "auto")
    assert code == 0, stderr
    summary = json.loads(stdout)
    assert summary["resumed_from"] == 4
    np.testing.assert_allclose(losses(summary["run_dir"]), alone, rtol=1e-4)


@pytest.mark.deep
def test_the_log_says_how_gradients_are_compressed(tiny_overrides):
    code, stdout, stderr = train(tiny_overrides(**{"train.steps": 2}), "--nproc", "2")
    assert code == 0
    assert "[ddp] gradient compression enabled: bf16\n" in stderr
    summary = json.loads(stdout)
    assert summary["gradient_bytes"] == 2 * summary["parameters"]


@pytest.mark.parametrize(
    ("changes", "arguments", "expected"),
    [
        ({"train.batch_size": 3}, ["--nproc", "2"], "train.batch_size = 3 must be a multiple of the 2 processes"),
        ({"train.batch_size": 1}, ["--nproc", "2"], "train.batch_size = 1 must be a multiple of the 2 processes"),
        ({"ddp.backend": "mpi"}, ["--nproc", "2"], "ddp.backend = 'mpi' is not allowed"),
        ({"ddp.strategy": "fsdp"}, [], "ddp.strategy = 'fsdp' shares a model among processes and there is 1"),
        ({}, ["--nproc", "0"], "0 is not in the range"),
    ],
)
def test_a_wrong_configuration_fails_in_one_line_before_any_process_starts(
    tiny_overrides, tmp_path, changes, arguments, expected
):
    code, _, stderr = train(tiny_overrides(**changes), *arguments)
    assert code == 2
    assert expected in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_why_contact_was_lost_is_cut_between_words(monkeypatch, capsys):
    def lose(*arguments):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] " + "word " * 60)

    monkeypatch.setattr(worker, "run_worker", lose)
    assert worker._exit_code(World(), None, (), "never", None) == worker.LOST_CONTACT
    assert capsys.readouterr().err.endswith(" word word ...\n")


@pytest.mark.parametrize("option", ["--dry-run", "--nproc=2"])
def test_an_option_that_is_not_for_one_of_several_processes_is_refused(tiny_overrides, tmp_path, option):
    rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    code, stdout, stderr = train(tiny_overrides(), option, env={**os.environ, **rank})
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert "this is one of 2 processes already; leave it out" in stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("change", ["train.device=cuda", "ddp.backend=nccl"])
def test_a_gpu_that_is_not_there_is_a_mistake(tiny_overrides, change):
    code, _, stderr = train([*tiny_overrides(), change], "--nproc", "2")
    assert code == 2
    assert "torch finds no GPU here" in stderr
    assert stderr.count("\n") == 1


def test_a_port_in_use_is_a_mistake(tiny_overrides):
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, stderr = train(tiny_overrides(**{"ddp.port": port}), "--nproc", "2")
    assert code == 2
    assert stderr == f"error: ddp.port = {port} cannot be used: Address already in use; choose another, or null " + (
        "for a free one\n"
    )


@pytest.mark.deep
def test_processes_of_torchrun_are_picked_up(tiny_overrides):
    sets = processes.sets(tiny_overrides(**{"train.steps": 2}))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, "-m", "nsa_compile", "train", "--json", *sets], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["processes"] == 2
