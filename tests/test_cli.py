"""The command line as a user meets it: in a process of its own."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nsa_compile.cli import cli, main
from tests.processes import Command, run, sets

COMMAND = [sys.executable, "-c", "from nsa_compile.cli import main; main()"]


def nsa_compile(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )


def test_help_is_quick():
    def processor_seconds() -> float:  # of processes waited for: the clock on the wall tells of others, too
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    def once() -> float:
        before = processor_seconds()
        assert nsa_compile("--help").returncode == 0
        return processor_seconds() - before

    assert min(once() for _ in range(5)) < 0.3


def test_help_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from nsa_compile.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'pydantic', 'numpy', 'yaml')))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_help_and_version():
    overview = nsa_compile("--help")
    assert "train" in overview.stdout
    assert "passes" in overview.stdout
    assert "--set" in nsa_compile("train", "--help").stdout
    assert nsa_compile("--version").stdout.startswith("nsa-compile ")


@pytest.mark.deep(but=["arguments0-unknown command 'trian'; did you mean 'train'?", "arguments3-requires an argument"])
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "unknown command 'trian'; did you mean 'train'?"),
        (["train", "--confg", "x"], "unknown option '--confg'; did you mean '--config'?"),
        (["--vesion"], "did you mean '--version'?"),
        (["train", "--set"], "requires an argument"),
        (["train", "surplus"], "surplus"),
        (["train", "--set", "train.step=3"], "did you mean 'train.steps'?"),
        (["train", "--set", "train.steps=0"], "train.steps = 0"),
        (["train", "--config", "missing.yaml"], "configuration file 'missing.yaml' does not exist"),
        (["train", "--set", "data.name=missing.txt"], "data.name = 'missing.txt' is no data set"),
        (["train", "--set", "train.seq_len=400000"], "is too short"),
        (["train", "--set", "run.dir=/proc/version/runs"], "run.dir = '/proc/version/runs' must be a writable"),
        (["train", "--set", "run.dir=/proc/new", "--dry-run"], "run.dir = '/proc/new' must be a writable directory: "),
        (["ab", "--set", "optim.lr=1e-4", "--out", "/proc/new"], "nothing can be written to '/proc/new': '/proc' "),
        (
            ["sweep", "optim.lr", "1e-3", "2e-3", "--nproc", "1", "--out", __file__],
            "it is no directory; choose another",
        ),
        (["profile", "step", "--out", "/proc/new"], "nothing can be written to '/proc/new': '/proc' "),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(arguments, expected):
    result = nsa_compile(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


def test_a_read_only_output_directory_is_an_error(tmp_path):
    directory = tmp_path / "sealed"
    directory.mkdir(mode=0o555)
    if os.access(directory, os.W_OK):
        pytest.skip("this user may write everywhere")
    result = nsa_compile("train", "--set", f"run.dir={directory}/runs")
    assert result.returncode == 2
    assert "cannot be written to" in result.stderr


@pytest.mark.parametrize(
    ("file", "said"),
    [("runs/rows.csv", "'runs/rows.csv' cannot be written: No"), (None, "a file cannot be written: No")],
)
def test_a_full_disk_is_not_taken_for_stdout(monkeypatch, capsys, file, said):
    def fail(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file)

    monkeypatch.setattr(cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main(["train"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {said} space left on device; make room for it, or choose")


@pytest.mark.deep
@pytest.mark.parametrize(("path", "cxx"), [("/nowhere", None), (None, "no-such-compiler"), (None, "/bin/false")])
def test_inductor_without_a_compiler_is_an_error(path, cxx):
    environment = {**({"PATH": path} if path else {}), **({"CXX": cxx} if cxx else {})}
    result = nsa_compile("train", "--dry-run", **environment)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "C++ compiler" in result.stderr
    assert nsa_compile("train", "--dry-run", "--set", "compile.nested=aot_eager", **environment).returncode == 0


def test_mistakes_are_found_before_torch_is_imported(tmp_path):
    # A torch that cannot be imported: a command that reaches it fails differently.
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')", encoding="utf-8")
    environment = {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    for arguments in (
        ["--set", "train.steps=0"],
        ["--set", "run.dir=/proc/version/runs"],
        ["--set", "data.name=missing.txt"],
    ):
        assert nsa_compile("train", *arguments, **environment).returncode == 2
    assert nsa_compile("train", "--dry-run", **environment).returncode == 0


@pytest.mark.deep
def test_dry_run_prints_the_resolved_configuration_and_leaves_nothing(tmp_path):
    runs = tmp_path / "runs"
    plain = nsa_compile("train", "--dry-run", "--set", f"run.dir={runs}", "--set", "optim.lr=3e-4")
    as_json = nsa_compile("train", "--dry-run", "--json", "--set", f"run.dir={runs}", "--set", "optim.lr=3e-4")
    assert yaml.safe_load(plain.stdout) == json.loads(as_json.stdout)
    assert json.loads(as_json.stdout)["optim"]["lr"] == 3e-4
    assert not runs.exists()


@pytest.mark.deep
def test_json_is_one_object_on_stdout_and_names_the_run(tiny_overrides):
    result = nsa_compile("train", "--json", *sets(tiny_overrides()))
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["steps"] == 4
    assert (Path(summary["run_dir"]) / "training.csv").is_file()
    assert "validation loss" in result.stderr


def test_a_diverging_run_stops_with_exit_code_3(tiny_overrides):
    result = run("train", *sets(tiny_overrides(**{"optim.lr": 1e30, "optim.weight_decay": 0.0})))
    assert result.returncode == 3
    assert "must be finite" in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


def test_ctrl_c_saves_and_leaves(tiny_overrides, tmp_path):
    import signal

    process = Command("train", "--json", *sets(tiny_overrides(**{"train.steps": 100000})))
    for line in process.stderr:  # until it is well under way
        if line.startswith("step 10:"):
            break
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    summary = json.loads(stdout)
    assert summary["interrupted"]
    saved = Path(summary["run_dir"]) / "checkpoints" / f"step-{summary['steps']:08d}"
    assert (saved / "state.pt").is_file()


@pytest.mark.skipif(shutil.which("nsa-compile") is None, reason="the package is not installed")
def test_console_script_is_installed():
    assert subprocess.run(["nsa-compile", "--version"], capture_output=True, check=False).returncode == 0
