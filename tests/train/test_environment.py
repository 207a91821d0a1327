"""What a run says about the machine it ran on."""

from __future__ import annotations

import json

import torch

from nsa_compile.train.environment import describe_environment, measure_matmul_flops

CPU = torch.device("cpu")


def test_environment_is_plain_data():
    environment = describe_environment(CPU)
    assert json.loads(json.dumps(environment)) == environment
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["machine"]["cpu_count"] >= 1


def test_matmul_rate_is_a_plausible_number():
    rate = measure_matmul_flops(CPU, torch.float32, size=256, seconds=0.05)
    assert 1e8 < rate < 1e14
