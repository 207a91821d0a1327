"""A tiny run of text and one of needles, made once for the tests of a process."""

from __future__ import annotations

import pytest

from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.train.loop import run
from nsa_compile.train.records.run_directory import create_run_directory
from tests.conftest import TINY_RUN


def make_run(directory, **keys):
    values = {**TINY_RUN, "run.dir": str(directory), "train.steps": 1, "train.sample_tokens": 0, **keys}
    config = load_config(overrides=[f"{key}={value}" for key, value in values.items()])
    place = create_run_directory(config)
    run(config, load_corpus(config), place)
    return place


@pytest.fixture(scope="session")
def text_run(tmp_path_factory):
    """Trained on a text of its own, of which 100 bytes are held out."""
    directory = tmp_path_factory.mktemp("evaluation")
    (directory / "text.txt").write_text("".join(f"line {i} of many\n" for i in range(1000))[:2000], encoding="utf-8")
    return make_run(directory, **{"data.name": directory / "text.txt", "data.cache_dir": directory / "cache"})


@pytest.fixture(scope="session")
def needle_run(tmp_path_factory):
    """Trained on the task of 3 needles."""
    keys = {"data.name": "needle", "data.needles": 3, "data.min_distance": 8}
    return make_run(tmp_path_factory.mktemp("needle"), **keys)
