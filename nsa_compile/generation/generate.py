"""Continue prompts by the decode step that trained the model, several at a time."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_compile.backend import compile_decode_step, compile_prefill
from nsa_compile.generation.sampling import Sampling
from nsa_compile.models import NSATransformer

# A compiled program belongs to a number of rows of the caches, and one that reads prompts to their length: both are
# powers of two from these on, so that a program is met again.
LEAST_ROOM = 4096
LEAST_PROMPT = 256
# Prompts of up to so many tokens are read by the decode step, which then is the only program.
STEPPED = 128
# Dynamo has one state for all threads of a process, and a program that is met for the first time is judged beside the
# eager one, by switches that are everybody's, too.
_COMPILED = threading.RLock()


@dataclass
class Request:
    """A text to go on with.

    Attributes:
        tokens: ids of the text so far, at least one: the prompt, and what has been drawn.
        left: tokens still to draw; set it to 0 to end the text early.
        generator: source of randomness, on the model's device.
    """

    tokens: list[int]
    left: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        if not self.tokens or self.left < 1:
            raise ValueError(f"{len(self.tokens)} tokens of prompt and {self.left} to draw; each must be at least 1")


class Decoder:
    """A model that can go on with texts: its decode step and its prefill, compiled if asked for.

    Several threads may use it, each with states of its own.

    Args:
        model: in the dtype and on the device in which it is to run.
        compiled: whether to compile; caches then have room for a power of two of tokens.
        options: of the compiler, `passes.pipeline.Options`.
    """

    def __init__(self, model: NSATransformer, *, compiled: bool = True, **options: Any) -> None:
        self.model, self.compiled, self._options = model, compiled, options
        self.step: Callable[..., Any] = model.decode_step
        self.prefill: Callable[..., Any] = model.prefill
        if compiled:
            self.step = _one_at_a_time(compile_decode_step(model, **options))
            self.prefill = _one_at_a_time(compile_prefill(model, **options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Decoder:
        # What is compiled holds the model, and would go on with the weights of the old one.
        return Decoder(copy.deepcopy(self.model, memo), compiled=self.compiled, **self._options)

    @property
    def device(self) -> torch.device:
        return self.model.embedding.weight.device

    def rows(self, needed: int, least: int) -> int:
        """How many rows to compile for where `needed` are."""
        return max(least, 1 << (needed - 1).bit_length()) if self.compiled else needed


def _one_at_a_time(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled, for several threads."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _COMPILED:
            return compiled(*args, **kwargs)

    return call


class Session:
    """Texts that are decoded side by side, and the caches of what has been read of them.

    Each has positions, caches and randomness of its own, so it becomes the same text as alone. A text may be added to
    between two calls of `stream`.

    Args:
        decoder: the model.
        requests: the texts.
        record_selection: keep which blocks each token read, for `selection`.
    """

    def __init__(self, decoder: Decoder, requests: Sequence[Request], *, record_selection: bool = False) -> None:
        self.decoder, self.requests = decoder, list(requests)
        self._asked = {"return_selection": True} if record_selection else {}
        self._selections: list[list[Tensor]] = [[] for _ in self.requests]
        self.room = decoder.rows(self._needed(), LEAST_ROOM)
        self._read = [0] * len(self.requests)  # tokens of each that are in the caches
        self._state: Any = decoder.model.init_state(len(self.requests), self.room)

    def _needed(self) -> int:
        # The last token drawn is never fed back.
        return max(len(request.tokens) + request.left - 1 for request in self.requests)

    def fits(self) -> bool:
        """Whether the caches have room for all that is to be drawn."""
        return self._needed() <= self.room

    def selection(self, number: int) -> Tensor:
        """The blocks that the tokens of a text read, as `NSATransformer.forward` takes them for a batch: int32
        `[tokens - 1, layers, G, n]`. The last token drawn is read by nobody.

        Raises:
            ValueError: the session does not record selections, or has not read the text.
        """
        if not self._selections[number]:
            raise ValueError("no selection was recorded; make the Session with record_selection=True and draw from it")
        return torch.cat(self._selections[number])[: len(self.requests[number].tokens) - 1]

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile the decode step, or fetch it, so that no token waits for it."""
        state = self.decoder.model.init_state(len(self.requests), self.room)
        tokens = torch.zeros(len(self.requests), dtype=torch.int64, device=self.decoder.device)
        self.decoder.step(state, tokens, **self._asked)

    @torch.no_grad()
    def stream(self, sampling: Sampling) -> Iterator[tuple[int, int]]:
        """Draw what is left of each text; yields the number of a text and its new token.

        Short prompts are read token by token, by the step that draws; if one is longer than `STEPPED`, all are read in
        one go, filled up to one length.
        """
        requests, step, device = self.requests, self.decoder.step, self.decoder.device
        logits: Tensor | None = None
        if not any(self._read) and max(len(request.tokens) for request in requests) > STEPPED:
            logits = self._read_prompts()
        while True:
            for i, request in enumerate(requests):
                if logits is not None and request.left and self._read[i] == len(request.tokens):
                    before = torch.tensor(request.tokens, device=device)
                    token = int(sampling.draw(logits[i], before, request.generator))
                    request.tokens.append(token)
                    request.left -= 1
                    yield i, token
            if not any(request.left for request in requests):
                return
            # A text that is complete is fed its last token again, behind its end, where nothing is read any more.
            following = [
                request.tokens[min(n, len(request.tokens) - 1)] for request, n in zip(requests, self._read, strict=True)
            ]
            self._state, logits, *selection = step(self._state, torch.tensor(following, device=device), **self._asked)
            for chosen in selection:
                self._keep(chosen[:, None])
            self._read = [n + 1 for n in self._read]

    def _read_prompts(self) -> Tensor:
        """Fill the caches with the texts as they are; the logits after the last token of each."""
        decoder, device = self.decoder, self.decoder.device
        lengths = [len(request.tokens) for request in self.requests]
        length = min(decoder.rows(max(lengths), LEAST_PROMPT), self.room)
        tokens = torch.zeros(len(self.requests), length, dtype=torch.int64, device=device)
        for row, request in zip(tokens, self.requests, strict=True):
            row[: len(request.tokens)] = torch.tensor(request.tokens)
        self._state, logits, *selection = decoder.prefill(
            tokens, torch.tensor(lengths, device=device), self.room, **self._asked
        )
        for chosen in selection:
            self._keep(chosen)
        self._read = lengths
        return logits

    def _keep(self, selection: Tensor) -> None:
        """Note the blocks `[B, T, layers, G, n]` that the next T tokens of each text read, where it has as many."""
        for kept, chosen, request, read in zip(self._selections, selection, self.requests, self._read, strict=True):
            kept.append(chosen[: max(0, len(request.tokens) - read)])


def generate(
    model: NSATransformer, prompt: Tensor, count: int, sampling: Sampling, generator: torch.Generator
) -> Tensor:
    """The `count` tokens that follow a prompt `[P]` int64, without compiling anything."""
    request = Request(prompt.tolist(), count, generator)
    tokens = [token for _, token in Session(Decoder(model, compiled=False), [request]).stream(sampling)]
    return torch.tensor(tokens, device=prompt.device)
