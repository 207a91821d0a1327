"""The size of the buckets that gradients are really sent in."""

from __future__ import annotations

import subprocess
import sys

import torch

from nsa_compile.config import load_config
from nsa_compile.models import NSATransformer
from nsa_compile.train.distributed.buckets import bucket_mb, effective_bucket_mb


def test_a_small_model_is_sent_in_the_same_buckets_whatever_is_asked_for(tiny_overrides):
    small = [load_config(overrides=tiny_overrides(**{"ddp.bucket_mb": mb})) for mb in (25, 50, 100)]
    assert [effective_bucket_mb(config, 2) for config in small] == [1.0, 1.0, 1.0]
    large = [load_config(overrides=[f"model.dim={512}", f"ddp.bucket_mb={mb}"]) for mb in (2, 4, 100)]
    found = [effective_bucket_mb(config, 2) for config in large]
    assert found[:2] == [2.0, 4.0]
    with torch.device("meta"):
        gradients = sum(parameter.numel() * 4 for parameter in NSATransformer(large[0].model).parameters())
    assert found[2] == gradients / 2**20 / 4
    assert found[2] == bucket_mb(large[2].ddp, NSATransformer(large[2].model))


def test_where_nothing_is_sent_there_is_no_bucket(tiny_overrides):
    assert effective_bucket_mb(load_config(overrides=tiny_overrides()), 1) is None
    assert effective_bucket_mb(load_config(overrides=tiny_overrides(**{"ddp.strategy": "fsdp"})), 2) is None


def test_the_function_is_there_before_torch_is():
    code = "import sys, nsa_compile.train.distributed.buckets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
