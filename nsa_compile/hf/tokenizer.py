"""The tokenizers of runs as those of `transformers`, so that pipelines read an exported folder."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Pipeline
from tokenizers import decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nsa_compile.data.tokenizers import GPT2Tokenizer, Tokenizer
from nsa_compile.generation.text import CHAT_TEMPLATE

_END = "<|endoftext|>"


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which `AutoTokenizer` makes it, where texts end, and that they are sampled.

    Otherwise a server would take no notice of the temperature that it is asked for.
    """
    fast = fast_tokenizer(tokenizer)
    fast.save_pretrained(folder)
    ends = {"eos_token_id": fast.eos_token_id, "pad_token_id": fast.pad_token_id}
    GenerationConfig(do_sample=True, top_k=0, **ends).save_pretrained(folder)


def fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The same ids for every text. It fills batches up on the left, as `generate` wants it.

    Bytes have no token left over to fill up with; byte 0 serves, and is left out where special tokens are.
    """
    if isinstance(tokenizer, GPT2Tokenizer):
        pipeline, special = tokenizer.bpe._tokenizer, {"eos_token": _END, "pad_token": _END}
    else:
        letters = bytes_to_unicode()
        pipeline = Pipeline(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
        pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        pipeline.decoder = decoders.ByteLevel()
        special = {"pad_token": letters[0]}
    # No text encodes to a special token.
    return PreTrainedTokenizerFast(
        tokenizer_object=pipeline,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
        **special,
    )
