"""`nsa-compile doctor` finds what is planted, and calls a machine that can train healthy."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from importlib import metadata

import pytest

from nsa_compile.cli import _run
from nsa_compile.compiler_cache import torch_default
from nsa_compile.files import write_sealed
from nsa_compile.machine import doctor
from nsa_compile.machine.doctor import examine, report
from nsa_compile.ops.cpp import kernel_directory


def processor_seconds():
    """Of all processes that were waited for: the clock on the wall would tell of the other tests, too."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def finding(check, run_dir="runs"):
    [found] = [f for f in examine(run_dir) if f.check == check]
    return found


@pytest.fixture
def healthy(monkeypatch, tmp_path):
    """An environment in which nothing is wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("healthy")
def test_a_machine_that_runs_the_tests_can_train():
    findings = {f.check: f for f in examine()}
    assert report(list(findings.values()))["ok"]
    for check in ("python", "torch", "C++ compiler", "gloo", "compiler cache", "token cache", "runs", "OpenMP", "nvtx"):
        assert findings[check].status == "ok", findings[check]
    for f in findings.values():
        assert bool(f.advice) == (f.status != "ok"), f


@pytest.mark.deep
def test_the_command_is_quick_and_tells_by_its_exit_code(tmp_path):
    command = [sys.executable, "-c", "from nsa_compile.cli import main; main()", "doctor", "--json"]
    before = processor_seconds()
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    seconds = processor_seconds() - before
    assert result.returncode == 0, result.stdout
    assert json.loads(result.stdout)["ok"]
    assert not list(tmp_path.iterdir())  # it leaves nothing behind
    assert seconds < 8  # 2.5 s on an idle machine

    broken = {**os.environ, "CXX": "no-such-compiler"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=broken)
    assert result.returncode == 1
    assert not json.loads(result.stdout)["ok"]


@pytest.mark.usefixtures("healthy")
def test_the_table_has_a_line_of_advice_for_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert _run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "C++ compiler" in out
    assert "→ CXX = 'no-such-compiler' is no program" in out


@pytest.mark.usefixtures("healthy")
def test_no_compiler_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = finding("C++ compiler")
    assert found.status == "problem"
    assert "neither g++ nor clang++ is on the PATH" in found.advice


@pytest.mark.usefixtures("healthy")
def test_a_compiler_that_compiles_nothing(monkeypatch, tmp_path):
    compiler = tmp_path / "broken-g++"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'fatal error: omp.h: No such file' >&2; exit 1\n",
        encoding="utf-8",
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    found = finding("C++ compiler")
    assert found.status == "problem"
    assert "omp.h: No such file" in found.found


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(
    ("check", "variable", "status"),
    [("compiler cache", "TORCHINDUCTOR_CACHE_DIR", "problem"), ("token cache", "XDG_CACHE_HOME", "warning")],
)
def test_caches_that_cannot_be_written(monkeypatch, tmp_path, check, variable, status):
    # Below a file: that stops even root, whom permissions do not.
    (tmp_path / "file").touch()
    monkeypatch.setenv(variable, str(tmp_path / "file" / "cache"))
    found = finding(check)
    assert found.status == status
    assert "cannot be written to" in found.found


@pytest.mark.deep(but=["all-chosen"])
@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize("whose", ["chosen", "default"])
@pytest.mark.parametrize("owner", ["another", "all"])
def test_a_compiler_cache_that_others_can_change(monkeypatch, tmp_path, whose, owner):
    if whose == "chosen":
        path = tmp_path / "inductor"
    else:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
        path = tmp_path / "cache"
    path.mkdir()
    if owner == "all":
        path.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(path, 65534, -1)
    else:
        pytest.skip("giving files away takes root")
    found = finding("compiler cache")
    assert found.status == "warning"
    assert f"'{path}' {'can be written to by others' if owner == 'all' else 'belongs to'}" in found.found
    assert "point TORCHINDUCTOR_CACHE_DIR at a directory that only you can write to" in found.advice
    assert ("a temporary directory" if whose == "default" else "compiled") in found.advice


@pytest.mark.usefixtures("healthy")
def test_what_a_killed_compiler_has_left(tmp_path):
    cache = tmp_path / "inductor"
    write_sealed(kernel_directory(cache) / "window-0.so", b"a kernel")
    (cache / "ab").mkdir()
    assert "compiled programs" not in {f.check for f in examine()}
    (cache / "ab" / "kernel.main.so").touch()
    found = finding("compiled programs")
    assert found.status == "warning"
    assert found.found.startswith("1 broken")
    assert "kernel.main.so" in found.found
    assert f"delete '{cache}'" in found.advice
    (kernel_directory(cache) / "window-0.so").write_bytes(b"")
    assert finding("compiled programs").found.startswith("2 broken")
    assert (cache / "ab" / "kernel.main.so").exists(), "doctor only looks"


@pytest.mark.usefixtures("healthy")
def test_without_a_choice_the_users_own_directory_is_looked_at(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", torch_default())
    found = finding("compiler cache")
    assert found.status == "ok"
    assert str(tmp_path / "cache" / "nsa-compile") in found.found
    assert not (tmp_path / "cache").exists(), "doctor only looks"


@pytest.mark.usefixtures("healthy")
def test_runs_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    assert finding("runs", str(tmp_path / "file" / "runs")).status == "problem"


@pytest.mark.usefixtures("healthy")
def test_a_full_disk(monkeypatch):
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**8))
    found = finding("runs")
    assert found.status == "warning"
    assert "0.1 GB free" in found.found


@pytest.mark.usefixtures("healthy")
@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("OMP_WAIT_POLICY", "active", "unset OMP_WAIT_POLICY"),
        ("OMP_NUM_THREADS", "100000", "set OMP_NUM_THREADS to"),
        ("OMP_PROC_BIND", "close", "unset OMP_PROC_BIND"),
    ],
)
def test_settings_of_openmp_that_slow_down(monkeypatch, variable, value, expected):
    monkeypatch.setenv(variable, value)
    found = finding("OpenMP")
    assert found.status == "warning"
    assert expected in found.advice


@pytest.mark.usefixtures("healthy")
def test_a_package_that_is_not_installed(monkeypatch):
    version = metadata.version

    def without_matplotlib(name):
        if name == "matplotlib":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_matplotlib)
    found = finding("matplotlib")
    assert found.status == "warning"
    assert found.advice == "pip install 'nsa-compile[plots]'"


@pytest.mark.usefixtures("healthy")
def test_a_check_that_fails_does_not_stop_the_others(monkeypatch):
    def _memory():
        raise OSError("no such device")

    monkeypatch.setattr(doctor.psutil, "virtual_memory", _memory)
    findings = {f.check: f for f in examine()}
    assert findings["processor"].status == "warning"
    assert "no such device" in findings["processor"].found
    assert findings["OpenMP"].status == "ok"
