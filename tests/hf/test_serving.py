"""`transformers serve` with an exported model: real processes, the official client, and what the server calls."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.continuous_api import ContinuousMixin

from nsa_compile.data.tokenizers import ByteTokenizer
from nsa_compile.hf import NSAConfig, NSAForCausalLM, batching
from nsa_compile.hf.tokenizer import save_tokenizer
from tests.models.test_nsa import tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve.py"
MISSING = [name for name in ("fastapi", "uvicorn", "openai") if importlib.util.find_spec(name) is None]
needs_server = pytest.mark.skipif(
    bool(MISSING), reason=f"{' and '.join(MISSING)} not installed: pip install 'transformers[serving]'"
)


@pytest.fixture(scope="module")
def model():
    ours = tiny_model(vocab_size=256)
    model = NSAForCausalLM(NSAConfig.of(ours.config)).eval()
    model.model.load_state_dict(ours.float().state_dict())
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The model as `nsa-compile export --to hf` writes it."""
    folder = tmp_path_factory.mktemp("served") / "model"
    model.save_pretrained(folder)
    save_tokenizer(ByteTokenizer(), folder)
    return folder


@pytest.fixture
def environment(tmp_path, monkeypatch):
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    return os.environ


@pytest.mark.deep
@needs_server
@pytest.mark.parametrize("options", [[], ["--continuous-batching"]], ids=["in turn", "continuous"])
def test_eight_streams_at_once_are_the_texts_alone(folder, environment, options):
    command = [sys.executable, str(EXAMPLE), str(folder), *options]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"^(\w+): 8 of 8 texts are those alone; (\d) are different$", result.stdout, re.MULTILINE)
    assert [way for way, _ in found] == (["greedy", "sampled"] if options else ["greedy"])
    assert all(int(different) > 4 for _, different in found), "a server that says always the same shows nothing"


@pytest.mark.deep
@needs_server
def test_a_dialogue_is_streamed(model, folder, environment):
    from openai import OpenAI

    example = {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(encoding="utf-8"), str(EXAMPLE), "exec"), example)
    messages = [{"role": "user", "content": "Who is there?"}]
    asked = {"model": str(folder), "messages": messages, "max_tokens": 12, "temperature": 0}
    with example["served"](str(folder)) as address:
        parts = list(OpenAI(base_url=address, api_key="none").chat.completions.create(**asked, stream=True))
    text = "".join(part.choices[0].delta.content or "" for part in parts)
    prompt = b"<|user|>\nWho is there?<|end|>\n<|assistant|>\n"
    tokens = model.generate(torch.tensor([list(prompt)]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    # What a text ends with may be a part of a character.
    assert ByteTokenizer().decode(tokens.tolist()).startswith(text)
    assert text


def test_the_batching_of_transformers_itself_does_not_take_our_state(model):
    """When this fails, `BatchingManager` may no longer be needed."""
    pages = ContinuousBatchingConfig(num_blocks=4, block_size=32, max_batch_tokens=32)
    manager = ContinuousMixin.init_continuous_batching(model, GenerationConfig(eos_token_id=-1), pages)
    manager.start()
    try:
        manager.add_request([1, 2, 3], max_new_tokens=2)
        assert manager.get_result(timeout=60).error == "NSAForCausalLM does not take position_ids; leave it out"
    finally:
        manager.stop(block=True)
    with pytest.raises(NotImplementedError, match="give generate a batch"):
        model.generate_batch([[1, 2, 3]])


def drawn(model, requests, cancelled=(), **drawing):
    """The tokens that each request ends with, all of them at once: a name, a prompt, and arguments."""

    async def ask():
        manager = model.init_continuous_batching(GenerationConfig(**drawing))
        loop, ended, streamed = asyncio.get_running_loop(), {}, []
        manager.start()
        for name, prompt, arguments in requests:
            ended[name] = loop.create_future()
            torch.manual_seed(len(prompt))
            manager.add_request(prompt, name, **arguments)

            def receive(output):
                streamed.append(output.request_id)
                if output.request_id in cancelled:
                    manager.cancel_request(output.request_id)
                if output.is_finished():
                    ended[output.request_id].set_result(output)

            manager.register_result_handler(name, receive)
        outputs = await asyncio.wait_for(asyncio.gather(*ended.values()), 60)
        manager.stop()
        assert not manager._thread.is_alive()
        return outputs, streamed

    return asyncio.run(ask())


REQUESTS = [(f"text {n}", [n + 1] * n, {"max_new_tokens": 10, "streaming": n % 2 == 0}) for n in (1, 3, 8, 20, 150)]


@pytest.mark.deep
@pytest.mark.parametrize("drawing", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9}])
def test_texts_at_once_are_those_alone(model, drawing, monkeypatch):
    monkeypatch.setattr(batching, "MOST_TEXTS", 3)
    outputs, streamed = drawn(model, REQUESTS, **drawing)
    assert [output.request_id for output in outputs] == [name for name, *_ in REQUESTS]
    for request, output in zip(REQUESTS, outputs, strict=True):
        ((alone,), _) = drawn(model, [request], **drawing)
        assert output.generated_tokens == alone.generated_tokens
        assert len(output.generated_tokens) == 10
        # One that comes before its handler is told with the next.
        assert streamed.count(output.request_id) in (range(1, 11) if request[2]["streaming"] else (1,))
    if not drawing:
        tokens = torch.tensor([REQUESTS[2][1]])
        assert model.generate(tokens, max_new_tokens=10, do_sample=False)[0, 8:].tolist() == outputs[2].generated_tokens


def test_a_text_ends_at_its_token_or_when_nobody_wants_it(model):
    (_, third), _ = drawn(model, REQUESTS[1:3])
    end = third.generated_tokens[2]
    name, prompt, arguments = REQUESTS[2]
    longer = ("long", [5, 6], {"max_new_tokens": 5000, "streaming": True})
    (found, cut), _ = drawn(model, [(name, prompt, {**arguments, "eos_token_id": end}), longer], cancelled=["long"])
    assert found.generated_tokens == third.generated_tokens[: third.generated_tokens.index(end) + 1]
    assert len(cut.generated_tokens) < 5000


def test_an_error_ends_every_text(model, monkeypatch):
    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(batching.Session, "stream", fail)
    (output,), _ = drawn(model, REQUESTS[:1])
    assert (output.error, output.generated_tokens) == ("RuntimeError: no memory", [])


def test_what_cannot_be_batched_is_refused(model):
    for name, value in (("stop_strings", ["x"]), ("sequence_bias", {(1,): 2.0})):
        with pytest.raises(ValueError, match=f"{name} cannot be with continuous batching"):
            model.init_continuous_batching(GenerationConfig(**{name: value}))
    with pytest.raises(ValueError, match=r"the options --cb-\.\.\. are of pages"):
        model.init_continuous_batching(continuous_batching_config=ContinuousBatchingConfig(block_size=16))
