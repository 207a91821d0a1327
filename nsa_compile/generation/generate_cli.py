"""``nsa-compile generate`` and ``nsa-compile chat``: text from a trained model."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import FiniteRange, json_option, stacked
from nsa_compile.errors import UserError

if TYPE_CHECKING:
    from nsa_compile.generation.generate import Decoder, Request, Session
    from nsa_compile.generation.sampling import Sampling
    from nsa_compile.generation.trained import TrainedModel

# How tokens are drawn, and by what.
drawing_options = stacked(
    click.option(
        "--tokens", "count", type=click.IntRange(min=1), default=200, show_default=True, help="Tokens to draw at most."
    ),
    click.option(
        "--temperature", type=FiniteRange(min=0), default=0.8, show_default=True,
        help="Divides the logits; 0 takes the most probable token.",
    ),
    click.option("--top-k", type=click.IntRange(min=1), help="Only the k most probable tokens."),
    click.option(
        "--top-p", type=FiniteRange(min=0, max=1, min_open=True), default=1.0, show_default=True,
        help="Only the most probable tokens whose probabilities add up to p.",
    ),
    click.option(
        "--repetition-penalty", type=FiniteRange(min=0, min_open=True), default=1.0, show_default=True,
        help="Makes tokens that are there already less probable; 1 does not.",
    ),
    click.option(
        "--seed", type=click.IntRange(min=0, max=2**63 - 1), default=0, show_default=True,
        help="Of the randomness; prompt n takes seed + n.",
    ),
    click.option("--stop", "stops", multiple=True, metavar="TEXT", help="Text at which to end; may be given again."),
    click.option(
        "--dtype", type=click.Choice(["float32", "bf16"]), default="float32", show_default=True, help="Of the weights."
    ),
    click.option(
        "--compile/--no-compile", "compiled", default=True, show_default=True,
        help="Compile the decode step; the first text waits for it.",
    ),
)  # fmt: skip


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to go on with; may be given again.")
@click.option(
    "--prompts-from",
    "file",
    type=click.File(encoding="utf-8", errors="surrogateescape"),
    metavar="FILE",
    help="A prompt a line; - for stdin.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), default=8, show_default=True, metavar="N",
    help="Prompts that are decoded side by side at most; the next one begins where one is done.",
)  # fmt: skip
@drawing_options
@json_option
def generate(
    run: Path, prompts: tuple[str, ...], file: Any, as_json: bool, dtype: str, compiled: bool, **options: Any
) -> None:
    """Go on with prompts by the model of a run, of one of its checkpoints, or of an exported folder.

    Several prompts, of any lengths, are decoded side by side, each as if it were alone.

    \b
    nsa-compile generate runs/shakespeare-cpu-20260101-120000 --prompt "ROMEO:"
    nsa-compile generate RUN --prompt "To be" --temperature 0 --tokens 50 --json
    nsa-compile generate RUN --prompts-from prompts.txt --top-p 0.9 --stop END
    """
    given = [_checked(prompt, "--prompt") for prompt in prompts]
    for number, line in enumerate(file or (), 1):
        given.append(_checked(line.rstrip("\n"), f"line {number} of '{file.name}'"))
    if not given:
        raise UserError("there is no prompt; give --prompt TEXT or --prompts-from FILE")
    writer = Writer.of(run, dtype, compiled, **options)
    alone = len(given) == 1 and not as_json
    if alone:
        _show(given[0])
    texts, timing = writer.write(
        [writer.trained.tokenizer.encode(prompt).tolist() for prompt in given], _show if alone else None
    )
    if as_json:
        rows = [{"prompt": prompt, **asdict(text)} for prompt, text in zip(given, texts, strict=True)]
        found = {"checkpoint": str(writer.trained.source), "dtype": dtype, **timing}
        click.echo(json.dumps({"texts": rows, **found}, indent=2, ensure_ascii=False))
    elif alone:
        click.echo()
    else:
        for prompt, text in zip(given, texts, strict=True):
            click.echo(f"{click.style(prompt, bold=True)}{text.text}\n")
    if any(text.stopped_by == "interrupted" for text in texts):
        raise click.Abort
    if not as_json:
        click.echo(_in_words(timing), err=True)


def _checked(prompt: str, where: str) -> str:
    """A prompt that can be read.

    Raises:
        UserError: it is empty, or bytes in it are no UTF-8.
    """
    if not prompt:
        raise UserError(f"{where} is empty; a prompt must hold at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where} is no text in UTF-8; convert it, for instance by iconv -t utf-8") from None
    return prompt


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@drawing_options
def chat(run: Path, dtype: str, compiled: bool, **options: Any) -> None:
    """Write with the model of a run: your lines and its own become one text, which it goes on with.

    An empty line lets it go on; Ctrl-D ends. A model that was trained with data.chat is asked in the template of its
    conversations, a line being a message. Nothing is put around your lines for another one: if it was trained on
    dialogues, write them in its form, and let --stop be what begins your turn.

    \b
    nsa-compile chat runs/shakespeare-cpu-20260101-120000 --stop "ROMEO:"
    """
    writer = Writer.of(run, dtype, compiled, **options)
    encode: Any = writer.trained.tokenizer.encode
    asked = _Asked(writer) if writer.trained.chat else None
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is told so, and the chat goes on
    while (line := _next_line()) is not None:
        added = []
        if line.strip():
            try:
                _checked(line, "your line")
                added = encode(asked.message(line) if asked else line).tolist()
            except UserError as error:
                click.echo(f"error: {error}", err=True)
                continue
        if not added and (not writer.begun or (asked and asked.answered())):
            continue
        (text,), timing = writer.write([added], _show)
        click.echo()
        if text.stopped_by == "interrupted":
            raise click.Abort
        click.echo(_in_words(timing), err=True)


class _Asked:
    """How a model of conversations is asked: in its template, which also ends what it answers."""

    def __init__(self, writer: Writer) -> None:
        from nsa_compile.generation.text import CHAT_END

        self._writer, self._end = writer, CHAT_END
        writer.stops = (*writer.stops, CHAT_END)

    def answered(self) -> bool:
        """Whether the text so far ends with the end of a message."""
        last = self._writer.tokens[-len(self._end) :]  # no token is shorter than a character of it
        return self._writer.trained.tokenizer.decode(last).endswith(self._end)

    def message(self, line: str) -> str:
        """What is put behind the text so far for a line to be answered."""
        from nsa_compile.generation.text import chat_opening, marker_in

        if marker := marker_in(line):
            raise UserError(f"your line holds {marker!r}, which stands between messages; write it without")
        before = ""
        if self._writer.begun:
            before = "\n" if self.answered() else self._end + "\n"
        return f"{before}{chat_opening('user')}{line.strip()}{self._end}\n{chat_opening('assistant')}"


def _next_line() -> str | None:
    """A line of the user's, with its end; None when there are no more."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    return sys.stdin.readline() or None


@dataclass(frozen=True)
class Text:
    """What became of a prompt."""

    text: str
    tokens: int
    prompt_tokens: int
    stopped_by: str  # "length", "stop", "end" or "interrupted"


@dataclass
class Writer:
    """A model, how it is asked to write, and the texts that it writes."""

    trained: TrainedModel
    decoder: Decoder
    sampling: Sampling
    count: int
    seed: int
    stops: Sequence[str]
    batch: int
    _session: Session | None = None

    @classmethod
    def of(
        cls,
        run: Path,
        dtype: str,
        compiled: bool,
        count: int,
        seed: int,
        stops: tuple[str, ...],
        batch: int = 1,
        **drawing: Any,
    ) -> Writer:
        """By the options of a command."""
        from nsa_compile.generation.generate import Decoder
        from nsa_compile.generation.sampling import Sampling
        from nsa_compile.generation.trained import load_trained

        if not all(stops):
            raise UserError("--stop '' must hold at least one character; leave it out to write --tokens tokens")
        trained = load_trained(run, dtype)
        for warning in trained.warnings:
            click.echo(warning, err=True)
        return cls(trained, Decoder(trained.model, compiled=compiled), Sampling(**drawing), count, seed, stops, batch)

    @property
    def begun(self) -> bool:
        """Whether there is a text to go on with."""
        return self._session is not None

    @property
    def tokens(self) -> list[int]:
        """Those of the only text."""
        return self._session.requests[0].tokens if self._session else []

    def write(
        self, added: Sequence[list[int]], show: Callable[[str], None] | None
    ) -> tuple[list[Text], dict[str, float | None]]:
        """Add tokens to each text, or begin one with them, and go on with it, until all are written or Ctrl-C.

        Args:
            show: gets each piece of the only text as it comes.

        Returns:
            The texts, and seconds: until the step was compiled, then to the first token, and tokens a second after it;
            None for what there was not.
        """
        from nsa_compile.generation.text import TextStream

        tokenizer = self.trained.tokenizer
        begun = time.perf_counter()
        session = self._ready(added)
        requests = session.requests
        started = [len(request.tokens) for request in requests]
        end = tokenizer.separator if len(tokenizer.separator) == 1 else ()
        streams = [TextStream(tokenizer.decode, self.stops, end) for _ in added]
        ready = time.perf_counter()
        times: list[float] = []
        try:
            for i, token in session.stream(self.sampling):
                times.append(time.perf_counter())
                piece = streams[i].feed(token)
                if streams[i].stopped_by:
                    requests[i].left = 0
                if not requests[i].left:
                    piece += streams[i].finish()
                if show:
                    show(piece)
        except KeyboardInterrupt:  # what there is so far is not lost
            for stream in streams:
                piece = stream.finish()
                if show:
                    show(piece)
        texts = [
            Text(
                stream.text,
                len(request.tokens) - before,
                before,
                stream.stopped_by or ("interrupted" if request.left else "length"),
            )
            for stream, request, before in zip(streams, requests, started, strict=True)
        ]
        # All texts get their first token in the same step where they are equally long.
        rest = len(times) - len(texts)
        rate = rest / (times[-1] - times[0]) if rest > 0 and times[-1] > times[0] else None
        first = times[0] - ready if times else None
        return texts, {"ready_s": ready - begun, "first_token_s": first, "tokens_per_s": rate}

    def _ready(self, added: Sequence[list[int]]) -> Session:
        """The session with these tokens in it, compiled."""
        import torch

        from nsa_compile.generation.generate import Request, Session

        if self._session is None:
            generators = [torch.Generator(self.decoder.device).manual_seed(self.seed + i) for i in range(len(added))]
            requests = [Request(tokens, self.count, g) for tokens, g in zip(added, generators, strict=True)]
        else:
            requests = self._session.requests
            for request, tokens in zip(requests, added, strict=True):
                request.tokens += tokens
                request.left = self.count
        self._warn_of_length(requests)
        if self._session is None:
            self._session = Session(self.decoder, requests, self.batch)
            self._session.warm_up()
        return self._session

    def _warn_of_length(self, requests: Sequence[Request]) -> None:
        trained = self.trained.seq_len
        longest = max(len(request.tokens) + request.left for request in requests)
        if trained is not None and longest > trained:
            click.echo(
                f"note: the text may grow to {longest} tokens; the model was trained on {trained} at a time", err=True
            )


def _show(text: str) -> None:
    """Show a piece of text at once."""
    click.echo(text, nl=False)


def _in_words(timing: dict[str, float | None]) -> str:
    ready, first, rate = (timing[key] for key in ("ready_s", "first_token_s", "tokens_per_s"))
    words = [f"ready after {ready:.1f} s", f"first token {first:.2f} s later"]
    return ", ".join(words + ([f"{rate:.1f} tokens/s"] if rate else []))
