"""Job files do what they say: parsed by what reads them, and run with the scheduler's commands replaced."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import yaml

from nsa_compile.cli import _run
from nsa_compile.config import load_config

NASTY = 'data.name=it\'s; touch pwned $HOME "x" `y`'
SIZES = ("--nodes", "2", "--nproc", "2")
K8S = ("k8s", "--image", "registry/nsa:1", "--claim", "runs")


def launch(capsys, *arguments):
    assert _run(["launch", *arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert _run(["launch", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def program(directory, name, text):
    path = directory / name
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path):
    """Run a job script where `srun`, `scontrol` and `torchrun` are told what to do; returns the process, started."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program(programs, "scontrol", f'[ "$1" = show ] && printf "node1\\nnode2\\n" || echo "$@" >> {tmp_path}/scontrol')

    def start(script, torchrun):
        program(programs, "srun", 'while [[ "$1" == --* ]]; do shift; done; exec "$@"')
        program(programs, "torchrun", f'printf "%s\\0" "$@" > {tmp_path}/arguments\n{torchrun}')
        (tmp_path / "job.sh").write_text(script, encoding="utf-8")
        environment = {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_SUBMIT_DIR": str(tmp_path),
        }
        return subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment)

    return start


def requeued(tmp_path):
    path = tmp_path / "scontrol"
    return path.exists() and path.read_text() == "requeue 77\n"


def test_slurm_runs_torchrun_with_the_options_given(capsys, cluster, tmp_path):
    script = launch(capsys, "slurm", *SIZES, "--set", NASTY, "--set", "train.steps=70", "--time", "1-00:00:00")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gpus-per-node=2\n" in script
    assert "#SBATCH --time=1-00:00:00\n" in script
    assert "#SBATCH --signal=B:TERM@120\n" in script
    assert "#SBATCH --requeue\n" in script

    assert cluster(script, "exit 0").wait(timeout=20) == 0
    arguments = (tmp_path / "arguments").read_text().split("\0")[:-1]
    assert arguments == [
        *("--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29500"),
        *("--rdzv-id", "77", "-m", "nsa_compile.launch.worker"),
        *("--set", NASTY, "--set", "train.steps=70", "--resume", "auto"),
    ]
    assert not (tmp_path / "pwned").exists()
    assert not requeued(tmp_path)


def test_slurm_without_gpus(capsys):
    assert "gpus" not in launch(capsys, "slurm", *SIZES, "--cpu")


@pytest.mark.parametrize(("code", "again"), [(75, True), (3, False)])
def test_slurm_requeues_what_was_pre_empted_and_nothing_else(capsys, cluster, tmp_path, code, again):
    process = cluster(launch(capsys, "slurm", *SIZES), f"exit {code}")
    assert process.wait(timeout=20) == code
    assert requeued(tmp_path) == again


@pytest.mark.parametrize(("code", "again"), [(1, True), (0, False)])
def test_slurm_passes_sigterm_on_waits_and_requeues_an_unfinished_run(capsys, cluster, tmp_path, code, again):
    # Like torchrun: it takes a while to save, and then leaves with 1.
    torchrun = f"trap 'sleep 0.5; touch saved; exit {code}' TERM; touch started; while true; do sleep 0.05; done"
    process = cluster(launch(capsys, "slurm", *SIZES), torchrun)
    deadline = time.monotonic() + 20
    while not (tmp_path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == code
    assert (tmp_path / "saved").exists()
    assert requeued(tmp_path) == again


def test_torchx_component_starts_the_worker(capsys, monkeypatch):
    calls = []
    dist = types.ModuleType("torchx.components.dist")
    dist.ddp = lambda *arguments, **options: calls.append((arguments, options))
    package = types.ModuleType("torchx")
    package.specs = types.SimpleNamespace(AppDef=object)
    monkeypatch.setitem(sys.modules, "torchx", package)
    monkeypatch.setitem(sys.modules, "torchx.components", types.ModuleType("torchx.components"))
    monkeypatch.setitem(sys.modules, "torchx.components.dist", dist)

    namespace: dict = {}
    text = launch(capsys, "torchx", *SIZES, "--image", "registry/nsa:1", "--set", NASTY)
    exec(compile(text, "job.py", "exec"), namespace)
    namespace["train"]()
    [(arguments, options)] = calls
    assert arguments == ("--set", NASTY, "--resume", "auto")
    assert options["m"] == "nsa_compile.launch.worker"
    assert (options["j"], options["gpu"], options["image"]) == ("2x2", 2, "registry/nsa:1")


def test_k8s_manifests_fit_together(capsys, tmp_path):
    text = launch(capsys, *K8S, *SIZES, "--set", "train.steps=70", "--name", "nsa-7")
    by_kind = {document["kind"]: document for document in yaml.safe_load_all(text)}
    assert list(by_kind) == ["ConfigMap", "Service", "Job"]
    job, pod = by_kind["Job"]["spec"], by_kind["Job"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    # The Service names the pods, and the first of them is where all meet.
    assert by_kind["Service"]["spec"]["selector"] == job["template"]["metadata"]["labels"]
    assert by_kind["Service"]["metadata"]["name"] == pod["subdomain"]
    command = container["command"]
    assert command[command.index("--rdzv-endpoint") + 1] == f"nsa-7-0.{pod['subdomain']}:29500"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    # The file the worker is given is the one in the ConfigMap, and it is the configuration asked for.
    [(name, content)] = by_kind["ConfigMap"]["data"].items()
    assert command[command.index("--config") + 1] == f"/etc/nsa-compile/{name}"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["config"] == "/etc/nsa-compile"
    assert mounts["workspace"] == container["workingDir"]
    assert {volume["name"] for volume in pod["volumes"]} == set(mounts)
    path = tmp_path / "run.yaml"
    path.write_text(content, encoding="utf-8")
    assert load_config(str(path)) == load_config(None, ["train.steps=70"])


def test_names_that_yaml_takes_for_something_else_stay_names(capsys):
    text = launch(capsys, "k8s", "--image", "15", "--claim", "1.5", *SIZES, "--name", "no")
    config_map, _, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    assert config_map["metadata"]["name"] == job["metadata"]["name"] == "no"
    assert pod["containers"][0]["image"] == "15"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "1.5"


def test_a_config_file_is_handed_on(capsys, tmp_path):
    path = tmp_path / "my run.yaml"
    path.write_text(load_config().to_yaml(), encoding="utf-8")
    script = launch(capsys, "slurm", *SIZES, "--config", str(path))
    [command] = [line for line in script.splitlines() if line.startswith("srun")]
    words = shlex.split(command)
    assert words[words.index("--config") + 1] == str(path)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["slurm", "--nodes", "0", "--nproc", "2"], "--nodes"),
        (["slurm", "--nodes", "3", "--nproc", "2"], "train.batch_size = 4 must be a multiple of --nodes × --nproc = 6"),
        (["slurm", *SIZES, "--set", "train.step=1"], "did you mean 'train.steps'?"),
        (["slurm", *SIZES, "--config", "missing.yaml"], "configuration file 'missing.yaml' does not exist"),
        (["slurm", *SIZES, "--partition", "a b"], "--partition 'a b' must be"),
        (["slurm", *SIZES, "--time", "soon"], "--time 'soon' must be"),
        (["slurm", *SIZES, "--name", "x\n#SBATCH --uid=0"], "must be a name"),
        (["torchx", *SIZES, "--image", "a b"], "--image 'a b' must be"),
        ([*K8S, *SIZES, "--name", "Big"], "'Big' is no name for Kubernetes"),
        (["k8s", *SIZES, "--image", "a"], "--claim"),
        (["slrum"], "did you mean 'slurm'?"),
    ],
)
def test_mistakes_are_one_line(capsys, arguments, expected):
    assert expected in refused(capsys, *arguments)


def test_nothing_imports_torch():
    code = (
        "import sys\nfrom nsa_compile.cli import _run\n"
        "for kind in (['slurm'], ['torchx', '--image', 'a'], ['k8s', '--image', 'a', '--claim', 'c']):\n"
        "    assert _run(['launch', *kind, '--nodes', '2', '--nproc', '2']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent, stdout=subprocess.DEVNULL)
