"""Continue prompts by the decode step that trained the model, several at a time."""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_compile.backend import compile_decode_step, compile_prefill
from nsa_compile.generation.sampling import Sampling
from nsa_compile.models import NSATransformer
from nsa_compile.models.transformer import ModelState

# A compiled program belongs to a number of texts and of tokens that their caches have room for, and one that reads
# prompts to their length: all are powers of two, the latter from these on, so that a program is met again.
LEAST_ROOM = 1024
LEAST_PROMPT = 256
LEAST_EAGER_ROOM = 64
# Prompts of up to so many tokens are read by the decode step, which then is the only program.
STEPPED = 128
# Tokens that a text has left to draw where a program for fewer texts is worth the time that fetching it takes.
WORTH_A_PROGRAM = 256
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
        compiled: whether to compile; the smallest caches then have room for more tokens.
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

    def room(self, tokens: int) -> int:
        """How many tokens caches have room for that need it for so many."""
        return max(LEAST_ROOM if self.compiled else LEAST_EAGER_ROOM, 1 << (tokens - 1).bit_length())

    def rows_of_prompt(self, tokens: int) -> int:
        """To how many tokens a prompt is filled up."""
        return max(LEAST_PROMPT, 1 << (tokens - 1).bit_length()) if self.compiled else tokens


def _one_at_a_time(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """What is compiled, for several threads."""

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _COMPILED:
            return compiled(*args, **kwargs)

    return call


class _Text:
    """A request, and what has been read of it."""

    def __init__(self, number: int, request: Request) -> None:
        self.number, self.request = number, request
        self.read = 0  # tokens that are in the caches
        self.logits: Tensor | None = None  # after the last of these
        self.selections: list[Tensor] = []  # blocks that tokens read, [T, layers, G, n] each
        self.placed = False  # whether it has caches

    def at_end(self) -> bool:
        """Whether the next token can be drawn: all that there are have been read."""
        return self.logits is not None and self.read == len(self.request.tokens)


class _Shelf:
    """The caches of texts of about the same length: a row for each, a power of two of rows.

    Attributes:
        room: tokens that a row has room for.
        texts: of each row; None where it is free.
    """

    def __init__(self, decoder: Decoder, room: int, asked: dict[str, bool]) -> None:
        self.decoder, self.room, self._asked = decoder, room, asked
        self.texts: list[_Text | None] = []
        self.state: Any = None

    def put(self, text: _Text, source: ModelState | None = None, row: int = 0) -> None:
        """Give a text a row, with the caches of a row of another state, which has no more room, or with empty ones."""
        if None not in self.texts:
            self._resize(max(1, 2 * len(self.texts)))
        taken = self.texts.index(None)
        fresh = self.decoder.model.init_state(1, self.room)
        if source is not None:
            _copy_row(fresh, 0, source, row)
        _copy_row(self.state, taken, fresh, 0)
        self.texts[taken], text.placed = text, True

    def free(self, text: _Text) -> None:
        """Let another text have its row."""
        self.texts[self.texts.index(text)] = None
        text.read, text.logits, text.placed = 0, None, False

    def move(self, text: _Text, larger: _Shelf) -> None:
        """Put the caches of a text on another shelf."""
        row, read = self.texts.index(text), text.read
        self.free(text)
        text.read = read
        larger.put(text, self.state, row)

    def shrink(self) -> None:
        """Do with fewer rows if half of them suffice, and if that is worth a program of its own."""
        texts = self.running()
        rows = 1 << (len(texts) - 1).bit_length()
        worth = not self.decoder.compiled or max(text.request.left for text in texts) >= WORTH_A_PROGRAM
        if rows < len(self.texts) and worth:
            self._resize(rows)

    def running(self) -> list[_Text]:
        return [text for text in self.texts if text is not None]

    def step(self) -> None:
        """Read the next token of each text; free rows read token 0 at position 0."""
        device = self.decoder.device
        following = [0 if text is None else text.request.tokens[text.read] for text in self.texts]
        t = torch.tensor([0 if text is None else text.read for text in self.texts], device=device)
        state = self.state._replace(t=t)
        self.state, logits, *selection = self.decoder.step(state, torch.tensor(following, device=device), **self._asked)
        for i, text in enumerate(self.texts):
            if text is not None:
                text.read, text.logits = text.read + 1, logits[i]
                text.selections += [chosen[i : i + 1] for chosen in selection]

    def _resize(self, rows: int) -> None:
        texts, old = self.running(), self.state
        state = self.decoder.model.init_state(rows, self.room)
        for row, text in enumerate(texts):
            _copy_row(state, row, old, self.texts.index(text))
        self.state, self.texts = state, [*texts, *[None] * (rows - len(texts))]


class Session:
    """Texts that are decoded side by side, and the caches of what has been read of them.

    Each has positions, caches and randomness of its own, so it becomes the same text as alone. Texts may join at any
    time. One that is done makes place for one that waits; one that outgrows its caches gets some with room for twice as
    many tokens, beside those of other long texts. So the caches have room for a few times the tokens that there are,
    however unequal the texts, and no more programs are needed than there are powers of two.

    A text may be added to between two calls of `stream`. If its caches are still there, only what is new is read.

    Args:
        requests: the first texts.
        limit: how many are decoded side by side at most; the others wait for their turn.
        record_selection: keep which blocks each token read, for `selection`.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request] = (),
        limit: int | None = None,
        *,
        record_selection: bool = False,
    ) -> None:
        self.decoder, self.limit = decoder, limit
        self._asked = {"return_selection": True} if record_selection else {}
        self._texts: dict[int, _Text] = {}  # by number
        self._numbers = itertools.count()
        self._waiting: deque[_Text] = deque()
        self._shelves: dict[int, _Shelf] = {}  # by room
        for request in requests:
            self.join(request)

    @property
    def requests(self) -> list[Request]:
        return [text.request for text in self._texts.values()]

    def join(self, request: Request) -> int:
        """Take one more text; returns its number, by which `stream` names it.

        Raises:
            ValueError: the model has no such token.
        """
        self._check_tokens(request.tokens)
        text = _Text(next(self._numbers), request)
        self._texts[text.number] = text
        self._waiting.append(text)
        return text.number

    def leave(self, number: int) -> None:
        """End a text, and forget it."""
        self._texts.pop(number).request.left = 0

    def cache_bytes(self) -> int:
        """Of all caches that there are now."""
        return sum(cache.nbytes for shelf in self._shelves.values() for cache in shelf.state.caches())

    def selection(self, number: int) -> Tensor:
        """The blocks that the tokens of a text read, as `NSATransformer.forward` takes them for a batch: int32
        `[tokens - 1, layers, G, n]`. The last token drawn is read by nobody.

        Raises:
            ValueError: the session does not record selections, or has not read the text.
        """
        text = self._texts[number]
        if not text.selections:
            raise ValueError("no selection was recorded; make the Session with record_selection=True and draw from it")
        width = max(chosen.shape[-1] for chosen in text.selections)  # small caches have fewer blocks
        filled = [F.pad(chosen, (0, width - chosen.shape[-1]), value=-1) for chosen in text.selections]
        return torch.cat(filled)[: len(text.request.tokens) - 1]

    @torch.no_grad()
    def warm_up(self) -> None:
        """Compile the decode step for the texts that begin, or fetch it, so that no token waits for it."""
        beginning = list(self._waiting)[: self.limit]
        for room, number in Counter(self._room_for(text) for text in beginning).items():
            rows = 1 << (number - 1).bit_length()
            state = self.decoder.model.init_state(rows, room)
            tokens = torch.zeros(rows, dtype=torch.int64, device=self.decoder.device)
            self.decoder.step(state, tokens, **self._asked)

    @torch.no_grad()
    def stream(self, sampling: Sampling) -> Iterator[tuple[int, int]]:
        """Draw what is left of each text; yields the number of a text and its new token.

        Prompts of up to `STEPPED` tokens are read token by token, by the step that draws; a longer one in one go.

        Raises:
            ValueError: a token was added that the model does not have.
        """
        for text in self._texts.values():
            self._check_tokens(text.request.tokens[text.read :])
        self._waiting = deque(text for text in self._texts.values() if text.request.left and not text.placed)
        while True:
            for text in self._placed():
                if text.at_end() and text.request.left:
                    assert text.logits is not None
                    before = torch.tensor(text.request.tokens, device=self.decoder.device)
                    token = int(sampling.draw(text.logits, before, text.request.generator))
                    text.request.tokens.append(token)
                    text.request.left -= 1
                    yield text.number, token
            if not self._waiting and not any(text.request.left for text in self._placed()):
                return
            self._arrange()
            if not any(text.at_end() for text in self._placed()):
                for shelf in self._shelves.values():
                    shelf.step()

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        number = self.decoder.model.embedding.num_embeddings
        for token in tokens:
            if not 0 <= token < number:
                raise ValueError(
                    f"token {token} of a request must be from 0 to {number - 1}, as the model has {number}"
                )

    def _placed(self) -> list[_Text]:
        return [text for shelf in self._shelves.values() for text in shelf.running()]

    def _arrange(self) -> None:
        """Free the rows of texts that are done, and see that each text that is to go on has one, with room in it."""
        for shelf in self._shelves.values():
            for text in shelf.running():
                if not text.request.left:
                    shelf.free(text)
        running = len(self._placed())
        while self._waiting and (self.limit is None or running < self.limit):
            text = self._waiting.popleft()
            if text.request.left:
                self._begin(text)
                running += 1
        for shelf in list(self._shelves.values()):
            for text in shelf.running():
                if text.read == shelf.room and not text.at_end():
                    shelf.move(text, self._shelf_for(text))
        self._shelves = {room: shelf for room, shelf in self._shelves.items() if shelf.running()}
        for shelf in self._shelves.values():
            shelf.shrink()

    def _begin(self, text: _Text) -> None:
        """Give a text its first row, and read its prompt if it is long."""
        decoder, tokens, shelf = self.decoder, text.request.tokens, self._shelf_for(text)
        text.selections = []
        if len(tokens) <= STEPPED:
            shelf.put(text)
            return
        prompt = torch.zeros(1, min(decoder.rows_of_prompt(len(tokens)), shelf.room), dtype=torch.int64)
        prompt[0, : len(tokens)] = torch.tensor(tokens)
        lengths = torch.tensor([len(tokens)], device=decoder.device)
        state, logits, *selection = decoder.prefill(prompt.to(decoder.device), lengths, shelf.room, **self._asked)
        text.selections += [chosen[0, : len(tokens)] for chosen in selection]
        shelf.put(text, state)
        text.read, text.logits = len(tokens), logits[0]

    def _shelf_for(self, text: _Text) -> _Shelf:
        room = self._room_for(text)
        return self._shelves.setdefault(room, _Shelf(self.decoder, room, self._asked))

    def _room_for(self, text: _Text) -> int:
        # A text that soon outgrows its caches would need two programs where one serves. Its last token is never read.
        tokens = len(text.request.tokens)
        return self.decoder.room(min(tokens + text.request.left - 1, tokens + tokens // 4 + 1))


def _copy_row(target: ModelState, row: int, source: ModelState, source_row: int) -> None:
    """Copy the caches of a text; where the target has room for more, it keeps what it holds there."""
    for new, old in zip(target.caches(), source.caches(), strict=True):
        new[row][tuple(slice(0, size) for size in old.shape[1:])] = old[source_row]


def generate(
    model: NSATransformer, prompt: Tensor, count: int, sampling: Sampling, generator: torch.Generator
) -> Tensor:
    """The `count` tokens that follow a prompt `[P]` int64, without compiling anything."""
    request = Request(prompt.tolist(), count, generator)
    tokens = [token for _, token in Session(Decoder(model, compiled=False), [request]).stream(sampling)]
    return torch.tensor(tokens, device=prompt.device)
