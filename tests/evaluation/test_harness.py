"""The model for lm-evaluation-harness: figures by hand, by its own `hf` model, and through a task of local files."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

from nsa_compile.cli import cli
from nsa_compile.errors import UserError
from nsa_compile.evaluation.harness import NSALM
from nsa_compile.generation.trained import load_trained

# No context ends in white space, which the harness would count to the answer.
PAIRS = [
    ("line 1", " of many\n"),
    ("", "line"),
    ("line 2 of", " m"),
    ("of many\n" * 6 + "line", " 77"),
    ("li", "ne 3 of many\nlin"),
]


def instances(kind, arguments):
    return [Instance(kind, {}, pair, i) for i, pair in enumerate(arguments)]


@pytest.fixture(scope="module")
def model(text_run):
    """Compiled by the passes alone."""
    return NSALM(text_run, nested="eager")


@pytest.fixture(scope="module")
def log_probs(text_run):
    """Of each byte `[N - 1]` after those before it."""
    trained = load_trained(text_run).model

    def of(text):
        tokens = torch.tensor([list(text)])
        logits = trained(tokens[:, :-1]).double().log_softmax(-1)
        return logits.gather(-1, tokens[:, 1:, None])[0, :, 0], logits.argmax(-1)[0] == tokens[0, 1:]

    return of


@pytest.mark.deep
def test_log_likelihoods_are_those_computed_by_hand(model, log_probs):
    found = model.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, answer), (value, greedy) in zip(PAIRS, found, strict=True):
        # The model sees 32 tokens, the last of a longer context; without one, the end of a separator.
        read = ((context or "\n") + answer).encode()[-33:]
        values, top = log_probs(read)
        assert value == pytest.approx(float(values[-len(answer) :].sum()), rel=1e-4)
        assert greedy == bool(top[-len(answer) :].all())


@pytest.mark.deep
def test_a_long_text_is_scored_in_windows_of_the_length(model, log_probs):
    text = "line 1 of many\nline 2 of many\nline 3 of many\n"
    found = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    read = ("\n" + text).encode()
    # The harness' rule: a full window first, then one that ends where the text does.
    expected = log_probs(read[:33])[0].sum() + log_probs(read[len(read) - 33 :])[0][-(len(read) - 33) :].sum()
    assert found == [pytest.approx(float(expected), rel=1e-4)]


@pytest.mark.deep
def test_texts_are_those_that_generate_writes(model, text_run):
    options = {"until": ["\n"], "max_gen_toks": 8}
    requests = [("line 1", options), ("", {"max_gen_toks": 4}), ("line 2 of", options)]
    found = model.generate_until(instances("generate_until", requests), disable_tqdm=True)
    for (prompt, given), text in zip(requests, found, strict=True):
        words = [
            "--prompt",
            prompt or "\n",
            "--temperature",
            0,
            "--tokens",
            given["max_gen_toks"],
            "--no-compile",
            "--json",
        ]
        words += [word for stop in given.get("until", []) for word in ("--stop", stop)]
        said = CliRunner().invoke(cli, ["generate", str(text_run), *map(str, words)], catch_exceptions=False)
        assert json.loads(said.stdout)["texts"][0]["text"] == text


@pytest.mark.deep
def test_drawn_texts_follow_the_options_of_the_task(model):
    drawn = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 5.0}
    greedy = {**drawn, "do_sample": False}
    first, second = model.generate_until(instances("generate_until", [("line", drawn), ("line", greedy)]))
    assert first != second


@pytest.mark.deep
def test_the_own_model_of_the_harness_says_the_same_of_an_exported_folder(model, text_run, tmp_path):
    pytest.importorskip("transformers")
    from lm_eval.models.huggingface import HFLM

    import nsa_compile.hf  # noqa: F401  # the Auto classes know the model

    out = tmp_path / "exported"
    CliRunner().invoke(cli, ["export", str(text_run), "--to", "hf", "--out", str(out)], catch_exceptions=False)
    theirs = HFLM(pretrained=str(out), device="cpu", batch_size=1, prefix_token_id=ord("\n"), max_length=32)
    requests = instances("loglikelihood", [pair for pair in PAIRS if all(pair)])
    for ours, other in zip(model.loglikelihood(requests), theirs.loglikelihood(requests), strict=True):
        assert ours == (pytest.approx(other[0], rel=1e-4), other[1])


def test_a_task_of_local_files_is_evaluated(model, log_probs, tmp_path):
    rows = [{"question": "line 1 of", "choices": [" many", " none"], "answer": 0}]
    rows += [{"question": "line 2", "choices": [" of", " is"], "answer": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "lines",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    found = lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    right = 0
    for row in rows:
        values = [
            float(log_probs((row["question"] + choice).encode())[0][-len(choice) :].sum()) for choice in row["choices"]
        ]
        right += values[row["answer"]] == max(values)
    assert found["results"]["lines"]["acc,none"] == right / 2


def test_what_does_not_fit_is_one_line(model):
    with pytest.raises(UserError, match=r"an answer of 33 tokens, and max_length = 32; give a greater one"):
        model.loglikelihood(instances("loglikelihood", [("a", "b" * 33)]))
    with pytest.raises(UserError, match=r"asks for 32 tokens, and max_length = 32; give a greater one"):
        model.generate_until(instances("generate_until", [("a", {"max_gen_toks": 32})]))
