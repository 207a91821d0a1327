"""`NSATransformer` as a model of `transformers`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ContinuousBatchingConfig, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple

from nsa_compile.generation.generate import Decoder
from nsa_compile.hf.batching import BatchingManager
from nsa_compile.hf.cache import NSACache
from nsa_compile.hf.configuration import NSAConfig
from nsa_compile.models import NSATransformer
from nsa_compile.models.nsa import check_selection

# Not of the model, but of `loss_function` and of the decorator of `forward`.
LOSS_ARGUMENTS = ("num_items_in_batch", "shift_labels", "ignore_index")
# What `generate` uses itself, for its stop strings, and hands on.
GENERATE_ARGUMENTS = ("tokenizer",)


class NSAForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model of `nsa_compile.models` with the interface of `transformers`.

    Eagerly its attention is a loop over the tokens. `nsa_compile.compile_blocks(model.model)` compiles what trains and
    scores, `compile_generation` what `generate` runs.
    """

    config_class = NSAConfig
    base_model_prefix = "model"
    _input_embed_layer = "embedding"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012
    _is_stateful = True  # so that no assistant is let guess ahead: the state takes no token back

    def __init__(self, config: NSAConfig) -> None:
        super().__init__(config)
        self.model = NSATransformer(config.sizes())
        self._is_drawn = not self.model.embedding.weight.is_meta
        self._decoder = Decoder(self.model, compiled=False)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> NSAForCausalLM:
        """As every model of `transformers`, but from safetensors alone: a pickle may run any code."""
        model: NSAForCausalLM = super().from_pretrained(*args, **(kwargs | {"use_safetensors": True}))
        return model

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: a folder that is saved refers to this package, and holds no copy of its files."""

    def compile_generation(self, **options: Any) -> None:
        """Let `generate` run the compiled decode step and prefill; `options` are the compiler's.

        Caches and prompts are then filled up to a power of two of tokens, so that few programs are compiled. So does
        `generate(cache_implementation="static")`, for which `transformers` compiles its own models.
        """
        self._decoder = Decoder(self.model, **options)

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
    ) -> Any:
        """The `BatchingManager` that `transformers serve --continuous-batching` works with.

        Raises:
            ValueError: an option of pages of keys and values, or a way of drawing that is not there.
        """
        if continuous_batching_config is not None:
            raise ValueError("the options --cb-... are of pages, which NSA's caches do not have; leave them out")
        config = self.generation_config if generation_config is None else generation_config
        self._compile_if_static(config)
        return BatchingManager(self._decoder, config)

    def continuous_batching_context_manager(self, *_: Any, **__: Any) -> Any:
        """Not for this model."""
        raise NotImplementedError("NSAForCausalLM does not take generate_batch; give generate a batch")

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.model.head = new_embeddings

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Draw the weights that came from no file as those of a new `NSATransformer`."""
        from_file = {name for name, x in self.model.named_parameters() if getattr(x, "_is_hf_initialized", False)}
        weights = dict(self.model.named_parameters())
        if self._is_drawn or len(from_file) == len(weights):
            return
        with torch.device(self.device):
            new = NSATransformer(self.config.sizes())
        for name, x in new.named_parameters():
            if name not in from_file:
                weights[name].copy_(x)
        self._is_drawn = True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `generate` makes none; `forward` makes an NSACache

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> Any:
        asked = generation_config.cache_implementation
        if asked not in (None, "dynamic", "static"):
            raise ValueError(f"cache_implementation = {asked!r} must be 'dynamic', 'static' or left out")
        self._compile_if_static(generation_config)
        generation_config.cache_implementation = None  # there is one kind of NSACache
        mixin: Any = super()
        return mixin._prepare_cache_for_generation(generation_config, *args, **kwargs)

    def _compile_if_static(self, config: GenerationConfig) -> None:
        if config.cache_implementation == "static" and not self._decoder.compiled:
            self.compile_generation()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: NSACache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        selection: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of tokens, and the loss if there are labels.

        Args:
            input_ids: `[B, S]` int64; with a cache that has read something, the tokens after it.
            attention_mask: `[B, S]`, or with those in the cache: 0 for padding, before or after the tokens of a
                sequence. Padding changes nothing: each sequence begins at position 0.
            cache: what has been read before.
            labels: `[B, S]` int64, -100 for tokens that do not count; the token after each is predicted. In training
                mode the losses that layers have of their own, as an indexer's, are added.
            use_cache: return the state after the tokens. No gradient flows then.
            logits_to_keep: logits of so many of the last columns, 0 for all, or `[n]`, the numbers of columns; without
                labels.
            selection: `[B, S, layers, G, n]` int32 or int64, the blocks that each token reads, instead of those that it
                would rank best, as `selection` of a cache that recorded them; without a cache.
            kwargs: what the loss takes, such as `num_items_in_batch`.

        Returns:
            Logits `[B, S, V]`. Where padding follows a sequence they are those after its last token.

        Raises:
            ValueError: a mask that no padding before or after explains, a selection of another shape or dtype, or
                beside a cache, a cache of other sequences or of another model, or an argument that the model does not
                take.
        """
        _refuse_what_is_unknown(kwargs)
        if not isinstance(cache, NSACache | None):
            raise ValueError(f"cache is a {type(cache).__name__}; it must be an NSACache or None")
        input_ids = _checked(input_ids, cache)
        if labels is not None and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            raise ValueError(
                "labels were given with logits_to_keep; the loss is about all columns, so leave logits_to_keep out"
            )
        kwargs = {name: value for name, value in kwargs.items() if name not in GENERATE_ARGUMENTS}
        if selection is not None and (use_cache or cache is not None):
            raise ValueError("selection was given with a cache; replay it without: use_cache=False")
        auxiliary = None
        if cache is not None and cache.columns:
            cache.check(self.model, len(input_ids))
            logits = self._continue(input_ids, attention_mask, cache)
        else:
            start, lengths = _extent(input_ids, attention_mask)
            tokens = _turned(input_ids, start)
            if labels is not None:
                # Before the first token after padding is nothing that it could be predicted from.
                first = start.unsqueeze(1) == torch.arange(labels.shape[1], device=labels.device)
                labels = labels.masked_fill(first, -100)
            if use_cache:
                cache = NSACache() if cache is None else cache
                every = isinstance(logits_to_keep, Tensor) or logits_to_keep != 1
                logits = self._read(tokens, start, lengths, cache, every=every)
            elif selection is not None:
                check_selection(selection, [*tokens.shape, len(self.model.blocks), self.config.n_kv_heads])
                logits = self.model(tokens, _turned(selection, start))
            elif labels is not None and self.training and self.model.config.auxiliary:
                column = torch.arange(tokens.shape[1], device=tokens.device)
                counted = None if attention_mask is None else column < lengths[:, None]
                logits, auxiliary = self.model(tokens, return_auxiliary=True, counted=counted)
            else:
                logits = self.model(tokens)
            if logits.dim() == 2:
                logits = logits[:, None]
            else:
                logits = _turned_back(logits, start, lengths)
        if isinstance(logits_to_keep, Tensor):
            logits = logits[:, logits_to_keep]
        elif logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if auxiliary is not None:
                loss = loss + auxiliary * _share(labels, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=cache)

    @torch.no_grad()
    def _read(self, tokens: Tensor, start: Tensor, lengths: Tensor, cache: NSACache, *, every: bool) -> Tensor:
        """Fill a cache with sequences `[B, S]` from column 0 on, which began at column `start`; logits as
        `NSATransformer.prefill` gives them."""
        decoder, columns = self._decoder, tokens.shape[1]
        cache.room, cache.filled_by = decoder.room(columns + 1), id(self.model)
        filled = F.pad(tokens, (0, decoder.rows_of_prompt(columns) - columns))
        asked = {"return_selection": True} if cache.record_selection else {}
        cache.state, logits, *selection = decoder.prefill(filled, lengths, cache.room, every=every, **asked)
        for chosen in selection:
            place = torch.arange(columns, device=start.device) - start[:, None]
            there = (place >= 0) & (place < lengths[:, None])
            chosen = _turned(chosen[:, :columns], -start)
            cache.selections.append(chosen.masked_fill(~there[..., None, None, None], -1))
        cache.columns = columns
        return logits[:, :columns] if every else logits

    @torch.no_grad()
    def _continue(self, tokens: Tensor, attention_mask: Tensor | None, cache: NSACache) -> Tensor:
        """Logits `[B, T, V]` of tokens `[B, T]` that follow what a cache holds, read one after the other."""
        if attention_mask is not None and not attention_mask[:, -tokens.shape[1] :].all():
            raise ValueError("attention_mask has a 0 for a token that follows those in the cache; leave that token out")
        cache.columns += tokens.shape[1]
        if cache.columns > cache.room:
            cache.grow(self.model, self._decoder.room(cache.columns))
        logits = []
        asked = {"return_selection": True} if cache.record_selection else {}
        for column in tokens.unbind(1):
            cache.state, following, *selection = self._decoder.step(cache.state, column, **asked)
            cache.selections += [chosen[:, None] for chosen in selection]
            logits.append(following)
        return torch.stack(logits, dim=1)


def _refuse_what_is_unknown(arguments: dict[str, Any]) -> None:
    """What `transformers` may ask of a model and this one does not do; silence would be a wrong answer."""
    for name, value in arguments.items():
        if name not in (*LOSS_ARGUMENTS, *GENERATE_ARGUMENTS) and value is not None and value is not False:
            raise ValueError(f"NSAForCausalLM does not take {name}; leave it out")


def _checked(input_ids: Tensor | None, cache: NSACache | None) -> Tensor:
    if input_ids is None:
        raise ValueError("input_ids is None; the model reads tokens, [B, S] int64, and takes no inputs_embeds")
    if input_ids.dim() == 2 and not input_ids.shape[1] and cache is not None and cache.columns:
        raise ValueError(
            f"input_ids has no token after the {cache.columns} that cache holds; give the text that the cache was "
            "filled with, and what follows it"
        )
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; it must be [B, S] with one or more tokens")
    return input_ids


def _share(
    labels: Tensor, num_items_in_batch: Any = None, shift_labels: Tensor | None = None, ignore_index: int = -100
) -> Any:
    """The part of the labels of all micro batches of a step that these are: their losses are added, not averaged."""
    if num_items_in_batch is None:
        return 1.0
    of_tokens = labels[:, 1:] if shift_labels is None else shift_labels
    return (of_tokens != ignore_index).sum() / num_items_in_batch


def _extent(tokens: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The column at which each sequence begins, and its length, `[B]` each."""
    batch, columns = tokens.shape
    if attention_mask is None:
        return tokens.new_zeros(batch), tokens.new_full((batch,), columns)
    if attention_mask.shape != tokens.shape:
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; input_ids has {list(tokens.shape)}")
    there = attention_mask != 0
    start, lengths = there.int().argmax(dim=1), there.sum(dim=1)
    column = torch.arange(columns, device=tokens.device)
    together = (column >= start[:, None]) & (column < (start + lengths)[:, None])
    wrong = ((together != there).any(dim=1) | (lengths == 0)).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"row {wrong[0]} of attention_mask must be 1 for a sequence of one or more tokens and 0 before and after it"
        )
    return start, lengths


def _turned(tokens: Tensor, start: Tensor) -> Tensor:
    """Sequences `[B, S, ...]` moved to column 0; the padding before them comes after them."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    place = (column + start[:, None]) % tokens.shape[1]
    return tokens.take_along_dim(place[(..., *[None] * (tokens.dim() - 2))], dim=1)


def _turned_back(logits: Tensor, start: Tensor, lengths: Tensor) -> Tensor:
    """Logits `[B, S, V]` in the columns of their tokens; those of the last token also in the columns after it."""
    column = torch.arange(logits.shape[1], device=logits.device)
    row = torch.minimum((column - start[:, None]).clamp(min=0), lengths[:, None] - 1)
    return logits.take_along_dim(row[..., None], dim=1)
