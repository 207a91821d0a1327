"""Loops that nobody here wrote, taken from checkouts as they are: compiled by `nsa_compile.loop`, or declined, and why.

    python benchmarks/loops.py CHECKOUTS

CHECKOUTS is a folder with nsa-vibe, native-sparse-attention-pytorch, flash-linear-attention and gpt-fast. They import
`transformers`, `einops`, `einx`, `rotary-embedding-torch`, `local-attention` and `hyper-connections`. Each loop runs
as it is written, compiled, and in its project's own batched form, if there is one. Times are those of the processor,
on one thread, forward and backward, gpt-fast's forward alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

import nsa_compile
from nsa_compile.loops import LoopDeclined
from nsa_compile.profiles.measure import load_module, make_record, summarize, write_record

RECORD = Path(__file__).parent / "results" / "loops.json"


@dataclass
class Loop:
    """A loop of somebody else's."""

    written: Callable[..., Tensor]  # a function with the loop
    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...] = ()
    batched: Callable[..., Tensor] | None = None  # the project's own form without a loop
    before: Callable[[], Any] = lambda: None  # puts back what a run has left
    around: Callable[[Callable[..., Any]], Callable[..., Tensor]] = lambda function: (
        function
    )  # gives it what else it asks


def llama(checkouts: Path, seq_len: int) -> Loop:
    """A Hugging Face `LlamaAttention` with a `DynamicCache`, fed token by token."""
    from transformers.cache_utils import DynamicCache
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig, LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    attention, rotary = LlamaAttention(config, 0), LlamaRotaryEmbedding(config)

    def token_by_token(x: Tensor) -> Tensor:
        cache, out = DynamicCache(), []
        for t in range(x.shape[1]):
            token = x[:, t : t + 1]
            position = rotary(token, torch.full((1, 1), t))
            out.append(attention(token, position, None, past_key_values=cache)[0])
        return torch.cat(out, 1)

    def batched(x: Tensor) -> Tensor:
        return attention(x, rotary(x, torch.arange(x.shape[1])[None]), None)[0]

    return Loop(token_by_token, (_random(1, seq_len, 64),), tuple(attention.parameters()), batched)


def gated_delta_rule(checkouts: Path, seq_len: int) -> Loop:
    """`naive_recurrent_gated_delta_rule` of flash-linear-attention."""
    naive = load_module(checkouts / "flash-linear-attention/fla/ops/gated_delta_rule/naive.py", "gated_delta_rule")
    q, k, v = (_random(1, seq_len, 2, 16) for _ in range(3))
    k = torch.nn.functional.normalize(k.detach(), dim=-1).requires_grad_()
    beta, g = torch.rand(1, seq_len, 2).requires_grad_(), (-torch.rand(1, seq_len, 2)).requires_grad_()
    inputs = (q, k, v, beta, g)
    return Loop(naive.naive_recurrent_gated_delta_rule, inputs, (), naive.naive_chunk_gated_delta_rule)


def gated_linear(checkouts: Path, seq_len: int) -> Loop:
    """`naive_recurrent_gla` of flash-linear-attention."""
    naive = load_module(checkouts / "flash-linear-attention/fla/ops/gla/naive.py", "gla")
    q, k, v = (_random(1, seq_len, 2, 16) for _ in range(3))
    gate = (-torch.rand(1, seq_len, 2, 16)).requires_grad_()
    return Loop(naive.naive_recurrent_gla, (q, k, v, gate))


def gpt_fast(checkouts: Path, seq_len: int) -> Loop:
    """The decoding of gpt-fast: its `Transformer`, and its caches of full length, fed token by token."""
    model = load_module(checkouts / "gpt-fast/model.py", "model")
    arguments = model.ModelArgs(
        block_size=seq_len, vocab_size=256, n_layer=2, n_head=4, dim=64, intermediate_size=128, n_local_heads=2
    )
    transformer = model.Transformer(arguments).requires_grad_(False)
    transformer.setup_caches(1, seq_len)
    for layer in transformer.layers:
        layer.attention.kv_cache = model.KVCache(1, seq_len, 2, 16, torch.float32)
    transformer.freqs_cis = transformer.freqs_cis.float()

    def token_by_token(tokens: Tensor) -> Tensor:
        out = []
        for t in range(tokens.shape[1]):
            out.append(transformer(tokens[:, t : t + 1], torch.tensor([t])))
        return torch.cat(out, 1)

    def reset() -> None:
        for layer in transformer.layers:
            layer.attention.kv_cache.k_cache.zero_()
            layer.attention.kv_cache.v_cache.zero_()

    def batched(tokens: Tensor) -> Tensor:
        return transformer(tokens, torch.arange(tokens.shape[1]))

    return Loop(token_by_token, (torch.randint(256, (1, seq_len)),), (), batched, reset)


def lucidrains(checkouts: Path, seq_len: int) -> Loop:
    """`forward_inference` of native-sparse-attention-pytorch, with its own cache."""
    sys.path.insert(0, str(checkouts / "native-sparse-attention-pytorch"))
    from native_sparse_attention_pytorch.native_sparse_attention import SparseAttention

    attention = SparseAttention(
        dim=64, dim_head=16, heads=4, kv_heads=2, sliding_window_size=16, compress_block_size=8,
        compress_block_sliding_stride=4, selection_block_size=8, num_selected_blocks=2, causal=True,
    )  # fmt: skip

    def token_by_token(x: Tensor) -> Tensor:
        empty, out = x.new_zeros(1, 2, 0, 16), []
        cache: Any = ((empty, empty), ((empty, empty), (empty, empty)))
        for t in range(x.shape[1]):
            token, cache = attention.forward_inference(x[:, t : t + 1], cache, return_cache=True)
            out.append(token)
        return torch.cat(out, 1)

    weights = tuple(p for p in attention.parameters() if p.requires_grad)
    return Loop(token_by_token, (_random(1, seq_len, 64),), weights, lambda x: attention(x))


def nsa_vibe(checkouts: Path, seq_len: int) -> Loop:
    """The sequential prefill of nsa-vibe's `NSAAttention`, its reference for the batched one."""
    sys.path.insert(0, str(checkouts / "nsa-vibe"))
    from nsa.cache.kv_cache import NSA_KV
    from nsa.core.block_index import build_block_meta
    from nsa.core.nsa_attention import NSAAttention

    attention = NSAAttention(64, 4, 2, 16, 16, l=8, d=4, l_sel=8, n_sel=4, w=16)

    def cache() -> Any:
        rows, none = torch.zeros(1, 2, 0, 16), torch.zeros(0, dtype=torch.int64)
        meta = build_block_meta(seq_len=seq_len, l=8, d=4, l_sel=8, n_sel=4, w=16)
        pointers = [torch.zeros(1, 2, dtype=torch.int32) for _ in range(2)]
        return NSA_KV(*[rows] * 8, *pointers, meta, *[none] * 5)

    def around(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda x: function(x, cache())[0]

    weights = tuple(attention.parameters())
    batched = around(attention._forward_prefill_batched)
    x = _random(1, seq_len, 64)
    return Loop(attention._forward_prefill_sequential, (x,), weights, batched, around=around)


PROGRAMS = {f.__name__: f for f in (llama, gated_delta_rule, gated_linear, gpt_fast, lucidrains, nsa_vibe)}


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def run(loop: Loop, function: Callable[..., Any]) -> tuple[list[Tensor], float]:
    """What a function yields, its gradients behind it, and the processor's seconds."""
    loop.before()
    began = time.process_time()
    out = function(*loop.inputs)
    out = out[0] if isinstance(out, tuple) else out
    results = [out]
    if out.requires_grad:
        inputs = [x for x in (*loop.inputs, *loop.weights) if x.requires_grad]
        grads = torch.autograd.grad(out.square().sum(), inputs, allow_unused=True)
        results += [torch.zeros(()) if g is None else g for g in grads]
    return [x.detach() for x in results], time.process_time() - began


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, as a part of the largest number in the same tensor."""
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def measure(loop: Loop, repeats: int) -> dict[str, Any]:
    """The row of a loop."""
    row: dict[str, Any] = {}
    expected, seconds = run(loop, loop.around(loop.written))
    row["loop_processor"] = summarize([seconds])
    began = time.process_time()
    try:
        compiled = loop.around(nsa_compile.loop(loop.written, on_decline="error"))
        found, _ = run(loop, compiled)
        row["outcome"] = "batched"
    except LoopDeclined as why:
        return row | {"outcome": "declined", "reason": str(why).split("cannot be compiled: ")[-1]}
    except ValueError as why:
        compiled = loop.around(nsa_compile.loop(loop.written))
        found, _ = run(loop, compiled)
        row |= {"outcome": "stays a loop", "reason": str(why).split('"error": ')[-1]}
    row["first_call_processor"] = time.process_time() - began
    row["difference"] = difference(found, expected)
    row["compiled_processor"] = summarize([run(loop, compiled)[1] for _ in range(repeats)])
    if loop.batched is not None:
        run(loop, loop.batched)
        row["own_batched_processor"] = summarize([run(loop, loop.batched)[1] for _ in range(repeats)])
    return row


@click.command()
@click.argument("checkouts", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--programs", default=",".join(PROGRAMS), show_default=True, help="Which loops.")
@click.option("--seq-lens", default="256,1024", show_default=True, help="Sequence lengths.")
@click.option("--repeats", default=3, show_default=True, help="Runs of what is compiled.")
@click.option("--out", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def main(checkouts: Path, programs: str, seq_lens: str, repeats: int, out: Path) -> None:
    """Compile loops from checkouts, compare them with themselves as written, and time both."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name in programs.split(","):
        for seq_len in map(int, seq_lens.split(",")):
            torch.manual_seed(0)
            row = measure(PROGRAMS[name](checkouts, seq_len), repeats)
            if "reason" in row:
                row["reason"] = row["reason"].replace(f"{checkouts}/", "")
            rows.append({"program": name, "seq_len": seq_len} | row)
            write_record(out, make_record("loops", {"dtype": "float32", "repeats": repeats}, rows))
            print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
