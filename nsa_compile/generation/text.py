"""Text as its tokens arrive: whole characters, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# A dialogue as text, by Jinja, for every tokenizer: the markers are plain text, which none has a token for. A turn ends
# with CHAT_END; whoever answers stops there. A message that contains markers looks like several.
CHAT_END = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}" + CHAT_END + "\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
CHAT_ROLES = ("system", "user", "assistant")
_INCOMPLETE = "\ufffd"  # what bytes that form no character decode to


def chat_opening(role: str) -> str:
    """What stands before a message in the text of a dialogue."""
    return f"<|{role}|>\n"


def marker_in(text: str) -> str | None:
    """The first of the markers between messages that a text holds; None where it is a message without."""
    return next((marker for marker in (CHAT_END, *map(chat_opening, CHAT_ROLES)) if marker in text), None)


class TextStream:
    """Turns tokens into text, piece by piece.

    A character whose bytes are not all there, and what may become a stop string, is held back.

    Args:
        decode: tokens to text.
        stops: strings at which the text ends; they are no part of it.
        end: tokens that end it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = (), end: Sequence[int] = ()
    ) -> None:
        self._decode, self._stops, self._end = decode, stops, set(end)
        self._tokens: list[int] = []
        self.text = ""
        self.stopped_by: str | None = None  # "stop" or "end"

    def feed(self, token: int) -> str:
        """One more token; what can be shown of it now."""
        if token in self._end:
            self.stopped_by = "end"
            return self._show(self._decode(self._tokens))
        self._tokens.append(token)
        text = self._decode(self._tokens)
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped_by = "stop"
            return self._show(text[: min(found)])
        held = max((_overlap(text, stop) for stop in self._stops), default=0)
        # However many bytes of a character are there, they are one sign until the last one has come.
        return self._show(text[: len(text) - held].removesuffix(_INCOMPLETE))

    def finish(self) -> str:
        """What was held back, when no token follows."""
        return "" if self.stopped_by else self._show(self._decode(self._tokens))

    def _show(self, text: str) -> str:
        new, self.text = text[len(self.text) :], text
        return new


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string may begin."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
