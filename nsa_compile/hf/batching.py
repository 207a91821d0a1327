"""What `transformers serve --continuous-batching` asks of a model, by a `Session` that texts join as they come."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from nsa_compile.generation.generate import Decoder, Request, Session
from nsa_compile.generation.sampling import Sampling

# Texts side by side; programs are compiled for powers of two up to it.
MOST_TEXTS = 64


@dataclass
class _Asked:
    """A request of the server's."""

    name: str
    prompt: list[int]
    request: Request
    ends: Sequence[int]
    streaming: bool

    def output(self, status: RequestStatus, error: str | None = None) -> GenerationOutput:
        drawn = self.request.tokens[len(self.prompt) :]
        return GenerationOutput(self.name, self.prompt, drawn, error=error, status=status)


class BatchingManager:
    """Goes on with texts in a thread of its own: what the server uses of `ContinuousBatchingManager`.

    That class keeps keys and values in pages and calls `forward` with masks and positions of them, which is not the
    state of NSA's decode step. As there, all texts are drawn as the first request asks for; only how many tokens and
    where a text ends are each one's own. Its randomness begins with torch's generator when it arrives, where the server
    has set the seed of a request: a text is that which it is alone.
    """

    def __init__(self, decoder: Decoder, generation_config: GenerationConfig) -> None:
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self._decoder, self._config = decoder, generation_config
        self._sampling = _sampling(generation_config)
        self._arriving: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._cancelled: set[str] = set()
        self._lock = threading.Lock()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], asyncio.AbstractEventLoop]] = {}
        self._early: dict[str, GenerationOutput] = {}  # what came before its handler
        self._thread = threading.Thread(target=self._run, name="nsa-batching", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, block: bool = True, timeout: float | None = None) -> None:
        """Take no more requests, and end with the next token."""
        self._arriving.put(None)
        if block:
            self._thread.join(timeout)

    def add_request(
        self,
        input_ids: Sequence[int],
        request_id: str,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        eos_token_id: int | Sequence[int] | None = None,
    ) -> str:
        """Go on with a text.

        Raises:
            ValueError: no tokens, or none to draw.
        """
        if max_new_tokens is None:
            max_new_tokens = self._config.max_length
        generator = torch.Generator(self._decoder.device).manual_seed(int(torch.randint(2**63 - 1, ())))
        request = Request(list(input_ids), max_new_tokens, generator)
        ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id or ())
        self._arriving.put(_Asked(request_id, list(input_ids), request, ends, streaming))
        return request_id

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Call back in the running event loop: for each token where the request streams, else once."""
        with self._lock:
            self._handlers[request_id] = callback, asyncio.get_running_loop()
            early = self._early.pop(request_id, None)
        if early is not None:
            self._deliver(early)

    def cancel_request(self, request_id: str) -> None:
        self._cancelled.add(request_id)

    def _deliver(self, output: GenerationOutput) -> None:
        with self._lock:
            handler = self._handlers.get(output.request_id)
            if handler is None:
                self._early[output.request_id] = output
                return
            if output.is_finished():
                del self._handlers[output.request_id]
        callback, loop = handler
        loop.call_soon_threadsafe(callback, output)

    def _run(self) -> None:
        going: dict[int, _Asked] = {}
        try:
            while (asked := self._arriving.get()) is not None:
                # A new one, so that no caches are kept for an idle server.
                session = Session(self._decoder, limit=MOST_TEXTS)
                going[session.join(asked.request)] = asked
                for number, token in session.stream(self._sampling):
                    self._hand_on(going, session, number, token)
                    while not self._arriving.empty():
                        if (asked := self._arriving.get()) is None:
                            return
                        going[session.join(asked.request)] = asked
        except Exception as error:
            self.background_thread_status.fatal_error = error
            while not self._arriving.empty():
                if (asked := self._arriving.get()) is not None:
                    going[-1 - len(going)] = asked
            for asked in going.values():
                self._deliver(asked.output(RequestStatus.FAILED, f"{type(error).__name__}: {error}"))

    def _hand_on(self, going: dict[int, _Asked], session: Session, number: int, token: int) -> None:
        """Tell of a new token, and let go of a text that is done."""
        asked = going[number]
        cancelled = asked.name in self._cancelled
        done = cancelled or token in asked.ends or not asked.request.left
        if done or asked.streaming:
            self._deliver(asked.output(RequestStatus.FINISHED if done else RequestStatus.DECODING))
        if done:
            self._cancelled.discard(asked.name)
            session.leave(number)
            del going[number]


def _sampling(config: GenerationConfig) -> Sampling:
    """Raises ValueError for what cannot be done."""
    for name in ("stop_strings", "sequence_bias"):
        if getattr(config, name) is not None:
            raise ValueError(f"{name} cannot be with continuous batching; leave it out, or serve without")
    temperature = 1.0 if config.temperature is None else config.temperature
    return Sampling(
        temperature=temperature if config.do_sample else 0.0,
        top_k=config.top_k or None,
        top_p=config.top_p or 1.0,
        repetition_penalty=config.repetition_penalty or 1.0,
    )
