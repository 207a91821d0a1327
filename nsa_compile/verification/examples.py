"""What the properties are checked on: the configuration made small, and random ones around it. Imports no torch.

An example is a run configuration itself, so the one that breaks a property can be named as options of a command.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING

from nsa_compile.config import DataSection, RunConfig, flatten, load_config, options_of
from nsa_compile.models.config import NSAConfig, SparsePattern

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

# Tokens of an example: the loop over them is the slow, readable one.
MAX_TOKENS = 96
MAX_DIM = 64


def reduced(config: RunConfig) -> RunConfig:
    """The same kind of model, small enough for the loop over tokens; a configuration that is small already stays.

    The block sizes keep their proportions; the widths of heads stay, since kernels depend on them. There are more
    selection blocks than are selected and more tokens than the window holds, if the configuration has as many.
    """
    model = config.model
    pattern = _reduced_pattern(model.pattern)
    groups = min(model.n_kv_heads, 2)
    small = dataclasses.replace(
        model,
        vocab_size=256,
        dim=min(model.dim, MAX_DIM),
        n_layers=1,
        n_kv_heads=groups,
        n_heads=model.n_heads // model.n_kv_heads * groups,
        mlp_hidden=min(model.hidden_dim, MAX_DIM),
        pattern=pattern,
    )
    # Room for two compressed blocks: a softmax over a single key is constant, and its key without a gradient.
    least = pattern.compress_block + pattern.compress_stride
    length = max(least, min(config.train.seq_len, MAX_TOKENS))
    return _example(config, small, length, min(config.train.batch_size, 2))


def _reduced_pattern(pattern: SparsePattern) -> SparsePattern:
    stride = pattern.compress_stride
    chosen = min(pattern.num_selected, pattern.num_initial + pattern.num_local + 2)
    longest = max(pattern.compress_block, pattern.window, (chosen + 1) * pattern.select_block)
    divisors = [factor for factor in range(1, stride + 1) if stride % factor == 0]
    factor = next((factor for factor in divisors if longest / factor <= MAX_TOKENS), divisors[-1])
    return dataclasses.replace(
        pattern,
        compress_block=pattern.compress_block // factor,
        compress_stride=stride // factor,
        select_block=pattern.select_block // factor,
        num_selected=chosen,
        window=max(2, min(pattern.window // factor, MAX_TOKENS)) if pattern.window > 1 else 1,
    )


def neighbours(config: RunConfig) -> SearchStrategy[RunConfig]:
    """Random small configurations around `config`: sizes, pattern, heads, φ, sharing; its branches stay."""
    from hypothesis import strategies as st

    model, pattern = config.model, config.model.pattern
    ratios = (pattern.compress_block // pattern.compress_stride, pattern.select_block // pattern.compress_stride)

    @st.composite
    def draw_one(draw: st.DrawFn) -> RunConfig:
        def one_of(*values: int) -> int:
            return draw(st.sampled_from(sorted(set(values))))

        stride = one_of(1, 2, 3, min(pattern.compress_stride, 8))
        block = stride * one_of(1, 2, min(ratios[0], 4))
        initial, local = one_of(0, 1, pattern.num_initial), one_of(1, 2, pattern.num_local)
        groups = one_of(1, min(model.n_kv_heads, 2))
        drawn = SparsePattern(
            compress_block=block,
            compress_stride=stride,
            select_block=stride * one_of(1, 2, min(ratios[1], 4)),
            num_selected=initial + local + draw(st.integers(0, 3)),
            window=one_of(2, 5, 16, min(pattern.window, MAX_TOKENS)),
            num_initial=initial,
            num_local=local,
            index_convention=pattern.index_convention,
        )
        small = dataclasses.replace(
            model,
            vocab_size=256,
            dim=one_of(8, 32),
            n_layers=1,
            n_kv_heads=groups,
            n_heads=groups * one_of(1, 2, min(model.n_heads // model.n_kv_heads, 4)),
            head_dim=one_of(4, 16, model.head_dim),
            mlp_hidden=32,
            pattern=drawn,
            phi=draw(st.sampled_from(["mean", "mlp"])),
            shared_kv=draw(st.booleans()),
        )
        seed, batch = draw(st.integers(0, 999)), draw(st.integers(1, 2))
        length = block + stride + draw(st.integers(0, 32))
        nested = draw(st.sampled_from(["eager", "aot_eager", config.compile.nested]))
        example = _example(config, small, length, batch).changed(run={"seed": seed}, compile={"nested": nested})
        return reduced(example)  # as it will be when it is named as a configuration

    return draw_one()


def _example(config: RunConfig, model: NSAConfig, seq_len: int, batch_size: int) -> RunConfig:
    unused = {"loss": "all", "matmul": "native", "activation_checkpointing": "none"}
    train = config.train.model_copy(update={"seq_len": seq_len, "batch_size": batch_size, **unused})
    data = config.data if config.data.tokenizer == "byte" else DataSection()
    return config.model_copy(update={"model": model, "train": train, "data": data})


def options(example: RunConfig, config_path: str | None) -> list[str]:
    """The options that lead a command to this example."""
    base = dict(flatten(load_config(config_path).plain()))
    values = flatten(example.plain())
    changed = [f"{key}={_yaml(value)}" for key, value in values if base.get(key) != value or key not in base]
    return [shlex.quote(word) for word in options_of(config_path, changed)]


def _yaml(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)
