"""Texts decoded side by side, against the model's own forward pass and against each text alone."""

from __future__ import annotations

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nsa_compile.generation import generate as module
from nsa_compile.generation.generate import Decoder, Request, Session
from nsa_compile.generation.sampling import Sampling
from nsa_compile.models.transformer import AttentionLayer
from tests.models.test_nsa import tiny_model
from tests.strategies import few

GREEDY = Sampling(temperature=0)
EAGER = {"nested": "eager", "cache": False}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny_model(n_layers=2)


@pytest.fixture(scope="module")
def fast(model):
    return Decoder(model, **EAGER)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Programs of few rows, and a prompt that is long at once."""
    monkeypatch.setattr(module, "LEAST_ROOM", 16)
    monkeypatch.setattr(module, "LEAST_EAGER_ROOM", 4)
    monkeypatch.setattr(module, "WORTH_A_PROGRAM", 3)
    monkeypatch.setattr(module, "LEAST_PROMPT", 8)
    monkeypatch.setattr(module, "STEPPED", 6)


def request(prompt, count, seed=0):
    return Request(list(prompt), count, torch.Generator().manual_seed(seed))


def texts(decoder, requests, sampling):
    session = Session(decoder, requests)
    drawn = [[] for _ in requests]
    for i, token in session.stream(sampling):
        drawn[i].append(token)
    assert [r.tokens[len(r.tokens) - len(d) :] for r, d in zip(requests, drawn, strict=True)] == drawn
    return drawn


def test_a_greedy_text_is_what_the_forward_pass_finds_most_probable(model):
    prompt = [3, 1, 4, 1, 5]
    (drawn,) = texts(Decoder(model, compiled=False), [request(prompt, 12)], GREEDY)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *drawn]]))[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == drawn


@pytest.mark.deep
@few(6)
@given(
    prompts=st.lists(st.lists(st.integers(0, 15), min_size=1, max_size=14), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    sampling=st.sampled_from([GREEDY, Sampling(), Sampling(0.7, top_k=4, repetition_penalty=1.3)]),
)
def test_every_text_is_the_one_that_it_is_alone(model, fast, prompts, counts, sampling):
    def requests():
        return [request(p, n, seed) for seed, (p, n) in enumerate(zip(prompts, counts, strict=False))]

    slow = Decoder(model, compiled=False)
    alone = [texts(slow, [each], sampling)[0] for each in requests()]
    assert texts(fast, requests(), sampling) == alone
    assert [len(drawn) for drawn in alone] == counts[: len(prompts)]


@pytest.mark.deep
@few(15)
@given(
    texts_of=st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 20), st.integers(1, 20), st.integers(0, 40)),
        min_size=1,
        max_size=7,
    ),
    limit=st.sampled_from([None, 1, 2, 3]),
    compiled=st.booleans(),
)
def test_texts_that_join_move_and_leave_are_those_that_they_are_alone(model, fast, texts_of, limit, compiled):
    """Of each text: tokens of its prompt and to draw; it is ended after so many, and joins after so many of all."""
    sampling, slow = Sampling(0.7, top_k=4), Decoder(model, compiled=False)
    waiting = sorted(enumerate(texts_of), key=lambda numbered: numbered[1][3])
    session = Session(fast if compiled else slow, limit=limit)
    drawn: list[list[int]] = []
    alone = []

    def join_due(count):
        while waiting and waiting[0][1][3] <= count:
            seed, (length, to_draw, end, _) = waiting.pop(0)
            prompt = torch.randint(19, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
            alone.append(texts(slow, [request(prompt, to_draw, seed)], sampling)[0][:end])
            drawn.append([])
            assert session.join(request(prompt, to_draw, seed)) == len(drawn) - 1

    while waiting:
        join_due(waiting[0][1][3])
        for number, token in session.stream(sampling):
            drawn[number].append(token)
            if len(drawn[number]) == len(alone[number]):
                session.requests[number].left = 0
            join_due(sum(map(len, drawn)))
            assert limit is None or sum(bool(text.request.left) for text in session._placed()) <= limit
    assert drawn == alone


@few(20)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6),
    limit=st.sampled_from([None, 2]),
)
def test_the_caches_follow_the_tokens_that_there_are(model, lengths, limit):
    """Of n texts at most twice as many rows, each for at most two and a half times its tokens."""
    requests = [request([1] * tokens, count, n) for n, (tokens, count) in enumerate(lengths)]
    session = Session(Decoder(model, compiled=False), requests, limit)
    for _ in session.stream(GREEDY):
        rows = sum(len(shelf.texts) * shelf.room for shelf in session._shelves.values())
        tokens = sum(max(len(text.request.tokens), module.LEAST_EAGER_ROOM // 2) for text in session._placed())
        assert rows <= 5 * tokens
        held = [model.init_state(len(shelf.texts), shelf.room).caches() for shelf in session._shelves.values()]
        assert session.cache_bytes() == sum(cache.nbytes for caches in held for cache in caches)


def test_one_program_serves_every_length_and_position(model, monkeypatch):
    monkeypatch.setattr(module, "LEAST_ROOM", 32)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    decoder = Decoder(model, **EAGER)
    for prompt, count in (([1], 5), ([1, 2, 3], 20), ([1] * 6, 2)):
        texts(decoder, [request(prompt, count)], GREEDY)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # the step, and what makes logits


@pytest.mark.deep(but=["False"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_text_that_is_added_to_is_as_if_it_had_been_there(model, compiled):
    decoder = Decoder(model, **EAGER) if compiled else Decoder(model, compiled=False)
    session = Session(decoder, [request([1, 2, 3], 4)])
    list(session.stream(GREEDY))
    (going,) = session.requests
    going.tokens += [7, 8]
    going.left = 5
    before = list(going.tokens)
    drawn = [token for _, token in session.stream(GREEDY)]
    assert [drawn] == texts(Decoder(model, compiled=False), [request(before, 5)], GREEDY)


def test_texts_that_ended_at_different_times_may_go_on(model):
    decoder = Decoder(model, compiled=False)
    session = Session(decoder, [request([1], 2), request([4], 9)])
    list(session.stream(GREEDY))
    before = []
    for going in session.requests:
        going.tokens += [7, 8]
        going.left = 5
        before.append(list(going.tokens))
    drawn = [[], []]
    for number, token in session.stream(GREEDY):
        drawn[number].append(token)
    assert drawn == [texts(decoder, [request(prompt, 5)], GREEDY)[0] for prompt in before]


class Sum(NamedTuple):
    sum: torch.Tensor


class Counting(AttentionLayer):
    """Its state, a sum that begins at one, is read before it is written."""

    def __init__(self, config):
        super().__init__()
        self.out = torch.nn.Linear(config.dim, config.dim, bias=False)

    def init_state(self, batch_size, max_len):
        return Sum(self.out.weight.new_ones(batch_size))

    def decode_step(self, state, x, t):
        total = state.sum + x.sin().sum(-1)
        return Sum(total), self.out(x * total[:, None])


def test_a_row_of_caches_is_empty_for_its_next_text(model):
    model = copy.deepcopy(model)
    for block in model.blocks:
        block.attention = Counting(model.config).double()
    decoder = Decoder(model, compiled=False)
    session = Session(decoder, [request([1, 2, 3], 4), request([5, 6], 3), request([7], 5)], limit=1)
    drawn = [[], [], []]
    for number, token in session.stream(GREEDY):
        drawn[number].append(token)
    assert drawn == [texts(decoder, [request(p, n)], GREEDY)[0] for p, n in (([1, 2, 3], 4), ([5, 6], 3), ([7], 5))]


def test_a_text_that_leaves_is_forgotten(model):
    session = Session(Decoder(model, compiled=False), [request([1], 9), request([2], 9)])
    seen = []
    for number, _ in session.stream(GREEDY):
        seen.append(number)
        if seen.count(0) == 2 and number == 0:
            session.leave(0)
            assert session.join(request([3], 1)) == 2
    assert [seen.count(number) for number in range(3)] == [2, 9, 1]
    assert len(session.requests) == 2


def test_a_text_may_be_ended_early(model):
    session = Session(Decoder(model, compiled=False), [request([1], 9), request([2], 3)])
    seen = []
    for i, _ in session.stream(GREEDY):
        seen.append(i)
        if seen.count(0) == 2:
            session.requests[0].left = 0
    assert (seen.count(0), seen.count(1)) == (2, 3)


def test_there_has_to_be_a_prompt_and_something_to_draw():
    for prompt, count in (([], 1), ([1], 0)):
        with pytest.raises(ValueError, match="each must be at least 1"):
            request(prompt, count)


@pytest.mark.parametrize("token", [300, -1])
def test_a_token_that_the_model_does_not_have_is_refused(model, token):
    last = model.config.vocab_size - 1
    with pytest.raises(ValueError, match=f"^token {token} of a request must be from 0 to {last}, as the model has"):
        Session(Decoder(model, compiled=False), [request([1, token], 2)])
    text = request([1, 2], 2)
    session = Session(Decoder(model, compiled=False), [text])
    list(session.stream(GREEDY))
    text.tokens.append(token)
    text.left = 2
    with pytest.raises(ValueError, match=f"^token {token} of a request"):
        list(session.stream(GREEDY))


@pytest.mark.deep(but=["prompts0-False"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("prompts", [[range(3), range(1), range(4)], [range(3), range(11), range(7)]])
def test_the_selection_of_each_text_is_that_of_its_tokens(model, compiled, prompts):
    """Recorded while texts of several lengths are read and drawn, by the step alone or after a prefill."""
    counts = (14, 9, 1)
    requests = [request(prompt, count, seed) for seed, (prompt, count) in enumerate(zip(prompts, counts, strict=True))]
    session = Session(Decoder(model, compiled=compiled, **EAGER), requests, record_selection=True)
    with pytest.raises(ValueError, match="no selection was recorded"):
        session.selection(0)
    session.warm_up()
    list(session.stream(Sampling()))
    for i, (text, prompt, count) in enumerate(zip(requests, prompts, counts, strict=True)):
        assert len(text.tokens) == len(prompt) + count
        _, selection = model(torch.tensor([text.tokens[:-1]]), return_selection=True)
        assert torch.equal(session.selection(i), selection[0])


def test_what_is_compiled_runs_in_one_thread_at_a_time(model, monkeypatch):
    inside, most = [], []

    def pretend(model, **_):
        def compiled(number):
            inside.append(number)
            time.sleep(0.001)
            most.append(len(inside))
            inside.remove(number)

        return compiled

    monkeypatch.setattr(module, "compile_decode_step", pretend)
    monkeypatch.setattr(module, "compile_prefill", pretend)
    decoders = [Decoder(model), Decoder(model)]
    calls = [call for decoder in decoders for call in (decoder.step, decoder.prefill)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: calls[number % 4](number), range(32)))
    assert most == [1] * 32
