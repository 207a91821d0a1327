"""Conversations of JSON lines as training sequences, one to a sequence, and which of their tokens are answers.

A line is `{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}`; other keys are left
alone. The text is that of `CHAT_TEMPLATE`, by which `chat` and exported tokenizers ask, too. It becomes tokens piece by
piece, cut where the assistant begins to write and where it ends, as it is when a model answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nsa_compile.data.documents import find_files, json_rows
from nsa_compile.data.sampling import FILLING, Tokens, generator, uncounted
from nsa_compile.data.tokenizers import Tokenizer
from nsa_compile.errors import UserError
from nsa_compile.generation.text import CHAT_END, CHAT_ROLES, chat_opening, marker_in

ASSISTANT = "assistant"
_WAY_OUT = "correct or remove it"


class Conversation(NamedTuple):
    """A conversation as tokens `[N]`, and which of them the assistant writes, the end of its turns included."""

    tokens: npt.NDArray[np.int64]
    answers: npt.NDArray[np.bool_]


def read_conversations(name: str, tokenizer: Tokenizer, option: str = "") -> Iterator[Conversation]:
    """The conversations of a file of JSON lines, or of those of a directory; `option` named it, or else data.name.

    Raises:
        UserError: a line is no conversation; it names the file and the line.
    """
    for path in find_files(name, option):
        if ".jsonl" not in path.suffixes[-2:]:
            raise UserError(
                f"data.chat = true reads JSON lines, and '{path}' must end in .jsonl or .jsonl.gz; convert it"
            )
        yield from _of_file(path, tokenizer)


def _of_file(path: Path, tokenizer: Tokenizer) -> Iterator[Conversation]:
    for number, row in json_rows(path):
        where = f"line {number} of '{path}'"
        yield encode(_messages(row, where), tokenizer)


def encode(messages: list[tuple[str, str]], tokenizer: Tokenizer) -> Conversation:
    """The tokens of turns, each a role and what was said."""
    pieces: list[tuple[str, bool]] = []
    before = ""
    for role, content in messages:
        before += chat_opening(role)
        if role == ASSISTANT:
            pieces += [(before, False), (content + CHAT_END, True)]
            before = "\n"
        else:
            before += content + CHAT_END + "\n"
    pieces.append((before, False))
    parts = [(tokenizer.encode(text).astype(np.int64), answer) for text, answer in pieces]
    return Conversation(
        np.concatenate([tokens for tokens, _ in parts]),
        np.concatenate([np.full(len(tokens), answer) for tokens, answer in parts]),
    )


def _messages(row: dict[str, Any], where: str) -> list[tuple[str, str]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: messages must be a list of one or more of them; {_WAY_OUT}")
    found = []
    for i, message in enumerate(messages):
        role, content = (message.get(key) if isinstance(message, dict) else None for key in ("role", "content"))
        if role not in CHAT_ROLES:
            raise UserError(
                f"{where}: messages[{i}] has role = {role!r}, not one of {', '.join(CHAT_ROLES)}; {_WAY_OUT}"
            )
        if not isinstance(content, str):
            raise UserError(f"{where}: messages[{i}] has content = {content!r}, which must be a text; {_WAY_OUT}")
        if marker := marker_in(content):
            raise UserError(f"{where}: messages[{i}] holds {marker!r}, which stands between messages; {_WAY_OUT}")
        try:
            content.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{where}: messages[{i}] holds half of a character; {_WAY_OUT}") from None
        found.append((role, content))
    if all(role != ASSISTANT for role, _ in found):
        raise UserError(f"{where}: no message is the {ASSISTANT}'s, so there is nothing to learn; {_WAY_OUT}")
    return found


class Conversations:
    """A source with one conversation to a sequence: all of them once, in an order that the seed selects, then again.

    What does not fit is cut off, what is missing filled up; no loss is about the filling, nor, with `only_answers`,
    about what the assistant has not written. Causal attention lets no conversation see the filling behind it.

    Args:
        seed: of the order; None takes them as they come.
    """

    def __init__(self, conversations: list[Conversation], seed: int | None, only_answers: bool) -> None:
        self.conversations, self.seed, self.only_answers = conversations, seed, only_answers
        self._epoch, self._order = -1, np.arange(len(conversations))

    def sequence(self, index: int, length: int) -> Tokens:
        epoch, place = divmod(index, len(self.conversations))
        if self.seed is not None and epoch != self._epoch:
            self._epoch, self._order = epoch, generator(self.seed, epoch).permutation(len(self.conversations))
        tokens, answers = (part[:length] for part in self.conversations[self._order[place]])
        filled = np.full(length, FILLING, dtype=np.int64)
        filled[: len(tokens)] = np.where(answers, tokens, uncounted(tokens)) if self.only_answers else tokens
        return filled


def fitting(conversations: list[Conversation], length: int) -> tuple[list[Conversation], list[str]]:
    """Those with an answer among their first `length` tokens, the first token aside; and a line for what is lost."""
    kept = [each for each in conversations if each.answers[1:length].any()]
    notes = []
    if lost := len(conversations) - len(kept):
        notes.append(f"{lost} of {len(conversations)} conversations have no answer within train.seq_len: left out")
    if cut := sum(len(each.tokens) > length for each in kept):
        notes.append(
            f"{cut} of {len(conversations)} conversations are longer than train.seq_len: their ends are cut off"
        )
    return kept, notes
