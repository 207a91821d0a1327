"""What a run says about the machine it ran on."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from nsa_compile.machine.environment import describe_environment

CPU = torch.device("cpu")


def test_environment_is_plain_data():
    environment = describe_environment(CPU)
    assert json.loads(json.dumps(environment)) == environment
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["machine"]["cpu_count"] >= 1


@pytest.mark.deep
def test_peak_memory_counts_bytes_and_never_falls():
    # In a process of its own: this one may have held more before.
    code = (
        "import torch\nfrom nsa_compile.machine.environment import peak_memory\n"
        "before = peak_memory(torch.device('cpu'))\nblock = torch.ones(100 << 20)\ndel block\n"
        "print(peak_memory(torch.device('cpu')) - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 390 << 20 < int(result.stdout) < 500 << 20
