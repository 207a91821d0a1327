"""A trained model for lm-evaluation-harness, the package `lm-eval` (extra `eval`)."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nsa_compile.errors import UserError
from nsa_compile.evaluation.scoring import Scorer
from nsa_compile.generation.generate import Decoder
from nsa_compile.generation.generate_cli import Writer
from nsa_compile.generation.sampling import Sampling
from nsa_compile.generation.trained import load_trained

# Prompts that are gone on with side by side.
PROMPTS = 8


@register_model("nsa-compile")
class NSALM(TemplateLM):
    """The model of a run, of one of its checkpoints or of an exported folder, as lm-evaluation-harness wants one.

        lm_eval.simple_evaluate(model=NSALM("runs/NAME"), tasks=["lambada_openai"])

    Unlike the harness' own `hf` it scores by few compiled programs, one for each power of two of tokens.

    Args:
        run: its directory.
        max_length: tokens that the model sees at most; by default as many as it was trained on. Of a longer context the
            end is read.
        compiled: whether to compile the model.
        options: of the compiler, `passes.pipeline.Options`.

    Raises:
        UserError: there is no such model, or nobody knows its length.
    """

    def __init__(
        self, run: str | Path, *, max_length: int | None = None, compiled: bool = True, **options: Any
    ) -> None:
        super().__init__()
        self._trained = load_trained(Path(run))
        length = max_length or self._trained.seq_len
        if length is None:
            raise UserError(f"'{run}' does not say how long the texts of its training were; give max_length")
        self.max_length = length
        self._decoder = Decoder(self._trained.model, compiled=compiled, **options)
        self._scorer = Scorer(self._trained.model, compiled=compiled, **options)

    @property
    def eot_token_id(self) -> int:
        """What a text without a context is read after; of bytes, the last one of what separates two documents."""
        return self._trained.tokenizer.separator[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        ids: list[int] = self._trained.tokenizer.encode(string).tolist()
        return ids

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        by_length: defaultdict[int, list[tuple[int, list[int], int]]] = defaultdict(list)
        for i, (_, context, continuation) in enumerate(requests):
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a task has an answer of {len(continuation)} tokens, and max_length = {self.max_length}; "
                    "give a greater one"
                )
            tokens = (context + continuation)[-(self.max_length + 1) :]
            length = min(self._scorer.length_for(len(tokens) - 1), self.max_length)
            by_length[length].append((i, tokens, len(continuation)))
        found: dict[int, tuple[float, bool]] = {}
        for length, rows in by_length.items():
            scored = self._scorer.score([tokens for _, tokens, _ in rows], length)
            for (i, _, size), scores in zip(rows, scored, strict=True):
                answer = slice(len(scores.top) - size, None)
                found[i] = float(scores.log_probs[answer].sum()), bool(scores.top[answer].all())
        return [found[i] for i in range(len(requests))]

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        # The windows are the harness' own, so that its figures are comparable.
        found = []
        for request in requests:
            tokens = self.tok_encode(request.args[0])
            windows = get_rolling_token_windows(tokens, self.eot_token_id, self.max_length, context_len=1)
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(log_prob for log_prob, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        found: dict[int, str] = {}
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(i)
        for members in alike.values():
            options = normalize_gen_kwargs(requests[members[0]].args[1])
            count = options["max_gen_toks"]
            if count >= self.max_length:
                raise UserError(
                    f"a task asks for {count} tokens, and max_length = {self.max_length}; give a greater one"
                )
            drawing = Sampling(
                options.get("temperature", 0.0) if options["do_sample"] else 0.0,
                options.get("top_k"),
                options.get("top_p", 1.0),
            )
            stops = [stop for stop in options["until"] if stop]
            prompts = [self.tok_encode(requests[i].args[0]) or [self.eot_token_id] for i in members]
            writer = Writer(self._trained, self._decoder, drawing, count, 0, stops, PROMPTS)
            texts, _ = writer.write([prompt[count - self.max_length :] for prompt in prompts], None)
            found |= {i: text.text for i, text in zip(members, texts, strict=True)}
        return [found[i] for i in range(len(requests))]
