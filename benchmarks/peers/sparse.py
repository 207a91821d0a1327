"""The sparse attentions of `nsa_compile/models/zoo` beside other people's plain PyTorch, with the same weights.

    python benchmarks/peers/sparse.py                            those of the installed transformers
    python benchmarks/peers/sparse.py --moba PATH --nemo PATH    also MoonshotAI/MoBA and NVIDIA-NeMo/Automodel, checked
                                                                 out at these paths

Nothing is fetched. Of Automodel only the functions that are compared are run: its modules import what a CPU lacks.
Each line is the greatest difference of the outputs and of the gradient of the input, beside the greatest value of each;
many of the references compute parts in float32, so differences of 1e-6 are theirs. The exit code is 1 where one exceeds
1e-4 of that value.

Indexers have 16 heads here. With few, the ReLU makes the scores of many tokens zero, and which of equal ones are chosen
is up to `topk` there and the first ones here.
"""

from __future__ import annotations

import argparse
import ast
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa_compile.models import NSAConfig
from nsa_compile.models.config import from_plain
from nsa_compile.profiles.measure import load_module

BATCH, LENGTH, DIM = 2, 53, 32
TOLERANCE = 1e-4
Compared = tuple[str, str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def ours(attention: str, pattern: dict[str, Any], **model: Any) -> Any:
    """A layer in float64 with weights far from nothing, and its configuration."""
    sizes = {"vocab_size": 2, "dim": DIM, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    config = from_plain(NSAConfig, {**sizes, "attention": attention, "pattern": pattern, **model})
    torch.manual_seed(0)
    layer = config.variant.layer(config).double()
    layer.says_uncompiled = False
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
            elif name == "sinks":
                parameter.copy_(torch.randn_like(parameter))
    return layer, config


def functions(path: Path, names: set[str]) -> dict[str, Any]:
    """Some functions of a file, and its constants, without what it imports beside torch."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    chosen: list[ast.stmt] = [
        node
        for node in body
        if (isinstance(node, ast.FunctionDef) and node.name in names)
        or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper())
    ]
    missing = names - {node.name for node in chosen if isinstance(node, ast.FunctionDef)}
    if missing:
        raise SystemExit(f"{path} lacks {', '.join(sorted(missing))}: it is another version than was compared with")
    code = "from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in chosen)
    space: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "math": math}
    exec(compile(code, str(path), "exec"), space)
    return space


def causal(batch: int, length: int) -> Tensor:
    """An additive mask `[B, 1, S, S]`."""
    return torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1).expand(batch, 1, -1, -1)


def copy(theirs: nn.Module, weights: dict[str, Tensor]) -> None:
    found = dict(theirs.named_parameters())
    assert set(found) == set(weights), set(found) ^ set(weights)
    with torch.no_grad():
        for name, parameter in found.items():
            parameter.copy_(weights[name])


def rows(layer: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return {name.removeprefix(prefix): p for name, p in layer.named_parameters() if name.startswith(prefix)}


@contextmanager
def default_double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def dsa() -> Compared:
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as peer
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config

    sizes = {"num_selected": 9, "q_rank": 12, "kv_rank": 10, "rope_dim": 4, "index_heads": 16, "index_dim": 8}
    layer, config = ours("dsa", sizes, v_head_dim=6)
    peer_config = DeepseekV32Config(
        hidden_size=DIM, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=12, kv_lora_rank=10,
        qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6, index_topk=9, index_head_dim=8, index_n_heads=16,
        num_hidden_layers=1, rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
    )  # fmt: skip
    peer_config._attn_implementation = "eager"
    with default_double():
        theirs = peer.DeepseekV32Attention(peer_config, 0)
        rotary = peer.DeepseekV32RotaryEmbedding(peer_config)
    own = rows(layer)
    copy(
        theirs,
        {
            "q_a_proj.weight": own["q_down.weight"], "q_a_layernorm.weight": own["q_norm.weight"],
            "q_b_proj.weight": own["q_up.weight"], "kv_a_proj_with_mqa.weight": own["kv_down.weight"],
            "kv_a_layernorm.weight": own["kv_norm.weight"], "kv_b_proj.weight": own["kv_up.weight"],
            "o_proj.weight": own["out.weight"], "indexer.wq_b.weight": own["index_q.weight"],
            "indexer.wk.weight": own["index_k.weight"], "indexer.k_norm.weight": own["index_norm.weight"],
            "indexer.k_norm.bias": own["index_norm.bias"], "indexer.weights_proj.weight": own["index_weight.weight"],
        },
    )  # fmt: skip

    def forward(x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])[None]
        given: Tensor = theirs(x, rotary(x, position), causal(*x.shape[:2]), position_ids=position)[0]
        return given

    return "dsa", "transformers deepseek_v32", layer, forward


def compressed(attention: str) -> Compared:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as peer
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    block = 4 if attention == "csa" else 8
    sizes: dict[str, Any] = {
        "block": block, "window": 7, "q_rank": 12, "rope_dim": 4, "out_groups": 2, "out_rank": 5,
    }  # fmt: skip
    if attention == "csa":
        sizes |= {"num_selected": 3, "index_heads": 16, "index_dim": 8}
    layer, config = ours(attention, sizes, n_kv_heads=1)
    kind = "compressed_sparse_attention" if attention == "csa" else "heavily_compressed_attention"
    peer_config = DeepseekV4Config(
        hidden_size=DIM, num_attention_heads=4, head_dim=8, q_lora_rank=12, sliding_window=7, o_groups=2,
        o_lora_rank=5, index_n_heads=16, index_head_dim=8, index_topk=3, num_hidden_layers=1, layer_types=[kind],
        compress_rates={kind: block}, rope_theta=config.rope_theta, compress_rope_theta=config.rope_theta,
        partial_rotary_factor=0.5, rms_norm_eps=config.norm_eps,
    )  # fmt: skip
    peer_config._attn_implementation = "eager"
    with default_double():
        theirs = peer.DeepseekV4Attention(peer_config, 0)
        if attention == "csa":
            # Of head_dim = index_dim, as here, both turn as many channels.
            theirs.compressor.indexer.rotary_emb = theirs.compressor.rotary_emb
        rotary = peer.DeepseekV4RotaryEmbedding(peer_config)
    own = rows(layer)
    weights = {
        "q_a_proj.weight": own["q_down.weight"], "q_a_norm.weight": own["q_norm.weight"],
        "q_b_proj.weight": own["q_up.weight"], "kv_proj.weight": own["kv.weight"],
        "kv_norm.weight": own["kv_norm.weight"], "o_a_proj.weight": own["out_down.weight"],
        "o_b_proj.weight": own["out.weight"], "sinks": own["sinks"],
    }  # fmt: skip
    compressors = [("compressor.", "compressor.")]
    if attention == "csa":
        compressors.append(("compressor.indexer.", "index_compressor."))
        weights |= {
            "compressor.indexer.q_b_proj.weight": own["index_q.weight"],
            "compressor.indexer.scorer.weights_proj.weight": own["index_weight.weight"],
        }
    for prefix, mine in compressors:
        weights |= {
            f"{prefix}kv_proj.weight": own[f"{mine}value.weight"],
            f"{prefix}gate_proj.weight": own[f"{mine}gate.weight"],
            f"{prefix}position_bias": own[f"{mine}bias"],
            f"{prefix}kv_norm.weight": own[f"{mine}norm.weight"],
        }
    copy(theirs, weights)

    def forward(x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])[None].expand(len(x), -1)
        back = position[0][:, None] - position[0]
        mask = causal(*x.shape[:2]).masked_fill(back >= 7, float("-inf"))
        turned = {name: rotary(x, position, layer_type=name) for name in ("main", "compress")}
        given: Tensor = theirs(x, turned, position, mask)[0]
        return given

    return attention, "transformers deepseek_v4", layer, forward


def msa() -> Compared:
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as peer
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    layer, config = ours("msa", {"block": 5, "num_selected": 3, "index_dim": 8})
    peer_config = MiniMaxM3VLTextConfig(
        hidden_size=DIM, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1, index_n_heads=2,
        index_head_dim=8, index_block_size=5, index_topk_blocks=3, layer_types=["minimax_m3_sparse"],
        rms_norm_eps=config.norm_eps,
    )  # fmt: skip
    peer_config._attn_implementation = "eager"
    with default_double():
        theirs = peer.MiniMaxM3VLAttention(peer_config, 0)
    own = rows(layer)
    # Their model normalises queries and keys of attention, too; the paper's layer does not.
    theirs.q_norm, theirs.k_norm = nn.Identity(), nn.Identity()
    weights = {f"{name}_proj.weight": own[f"{name}.weight"] for name in "qkv"}
    weights |= {"o_proj.weight": own["out.weight"]}
    weights |= {f"indexer.{name}_proj.weight": own[f"index_{name}.weight"] for name in "qk"}
    # A weight of theirs is added to 1.
    weights |= {f"indexer.{name}_norm.weight": own[f"index_{name}_norm.weight"] - 1 for name in "qk"}
    copy(theirs, weights)
    frequency = config.rope_theta ** (-torch.arange(4, dtype=torch.float64) / 4)

    def forward(x: Tensor) -> Tensor:
        position = torch.arange(x.shape[1])[None]
        angle = (position[..., None] * frequency).repeat(1, 1, 2)
        mask = causal(*x.shape[:2])
        given: Tensor = theirs(x, (angle.cos(), angle.sin()), mask, position_ids=position)[0]
        return given

    return "msa", "transformers minimax_m3_vl", layer, forward


def grouped_heads(layer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a whole sequence, each `[B, S, heads, width]`."""
    t = torch.arange(x.shape[1])
    q, k, v = torch.vmap(layer.project, (1, 0), 1)(x, t)
    return q.flatten(2, 3), k, v


def grouped_attention(layer: Any, x: Tensor, seen: Tensor) -> Tensor:
    """The layer's output where a query sees the keys of a mask `[B, Hq, S, S]`, by torch's own attention."""
    q, k, v = (y.transpose(1, 2) for y in grouped_heads(layer, x))
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    out: Tensor = layer.out(o.transpose(1, 2).flatten(2))
    return out


def gpt_oss() -> Compared:
    from transformers.models.gpt_oss import modeling_gpt_oss as peer

    layer, _ = ours("gpt_oss", {"window": 7})
    of_theirs = nn.Module()
    of_theirs.num_key_value_groups, of_theirs.sinks = 2, layer.sinks

    def forward(x: Tensor) -> Tensor:
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        mask = causal(*x.shape[:2]).masked_fill(back >= 7, float("-inf"))
        q, k, v = (y.transpose(1, 2) for y in grouped_heads(layer, x))
        o: Tensor = layer.out(peer.eager_attention_forward(of_theirs, q, k, v, mask, q.shape[-1] ** -0.5)[0].flatten(2))
        return o

    return "gpt_oss", "transformers gpt_oss", layer, forward


def moba(root: Path) -> Compared:
    peer = load_module(root / "moba" / "moba_naive.py", "moba_naive")
    layer, _ = ours("moba", {"block": 6, "num_selected": 3})

    def forward(x: Tensor) -> Tensor:
        q, k, v = grouped_heads(layer, x)
        h, length = layer.config.n_heads // layer.config.n_kv_heads, x.shape[1]
        k, v = k.repeat_interleave(h, 2), v.repeat_interleave(h, 2)
        starts = torch.arange(len(x) + 1) * length
        packed = [y.flatten(0, 1) for y in (q, k, v)]
        o = peer.moba_attn_varlen_naive(*packed, starts, length, 6, 3)
        out: Tensor = layer.out(o.unflatten(0, (len(x), length)).flatten(2))
        return out

    return "moba", "MoonshotAI/MoBA moba_naive", layer, forward


def msa_of_nemo(root: Path) -> Compared:
    path = root / "nemo_automodel/components/models/minimax_m3_vl/layers.py"
    peer = functions(path, {"_select_sparse_blocks_chunk", "select_sparse_blocks", "build_block_sparse_attn_mask"})
    layer, config = ours("msa", {"block": 5, "num_selected": 3, "index_dim": 8})

    def index(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        from nsa_compile.models.zoo.grouped import rope

        q = layer.index_q_norm(layer.index_q(x).unflatten(-1, (config.n_kv_heads, -1)))
        k = layer.index_k_norm(layer.index_k(x))[:, None]
        return rope(q, t, config.rope_theta), rope(k, t, config.rope_theta)

    def forward(x: Tensor) -> Tensor:
        q, k = torch.vmap(index, (1, 0), 1)(x, torch.arange(x.shape[1]))
        chosen = {"block_size": 5, "topk_blocks": 3, "init_blocks": 0, "local_blocks": 1}
        seen = peer["build_block_sparse_attn_mask"](q, k, num_q_heads=config.n_heads, **chosen)
        return grouped_attention(layer, x, seen)

    return "msa", "NeMo Automodel minimax_m3_vl", layer, forward


def qsa_of_nemo(root: Path) -> Compared | None:
    path = root / "nemo_automodel/components/models/qwen3_8_flash_next/qsa.py"
    if not path.exists():
        print(f"qsa    {path} is not there: the checkout is from before it", file=sys.stderr)
        return None
    peer = functions(path, {"select_qsa_token_ids", "_qsa_query_chunk_rows"})
    layer, config = ours("qsa", {"block": 4, "num_selected": 3, "index_heads": 16, "index_dim": 8})

    def queries(x: Tensor, t: Tensor) -> Tensor:
        from nsa_compile.models.zoo.grouped import rope

        return rope(layer.index_q_norm(layer.index_q(x).unflatten(-1, (16, -1))), t, config.rope_theta)

    def forward(x: Tensor) -> Tensor:
        from nsa_compile.models.transformer import apply_rope

        batch, length = x.shape[:2]
        q = torch.vmap(queries, (1, 0), 1)(x, torch.arange(length))
        whole = length // 4 * 4
        pooled = layer.index_k_norm(layer.index_k(x)[:, :whole].unflatten(1, (-1, 4)).mean(2))[:, :, None]
        pooled = apply_rope(pooled, torch.arange(0, whole, 4), config.rope_theta)
        ids = peer["select_qsa_token_ids"](q, pooled, torch.full((batch,), length), token_budget=12, compress_ratio=4)
        places = ids.long().masked_fill(ids < 0, length)
        seen = torch.zeros(batch, length, length + 1, dtype=torch.bool).scatter(-1, places, True)[..., :-1]
        return grouped_attention(layer, x, seen[:, None])

    return "qsa", "NeMo Automodel qwen3_8_flash_next", layer, forward


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--moba", type=Path, help="checkout of MoonshotAI/MoBA")
    parser.add_argument("--nemo", type=Path, help="checkout of NVIDIA-NeMo/Automodel")
    given = parser.parse_args()
    compared: list[Compared | None] = [dsa(), compressed("csa"), compressed("hca"), msa(), gpt_oss()]
    if given.moba:
        compared.append(moba(given.moba))
    if given.nemo:
        compared += [msa_of_nemo(given.nemo), qsa_of_nemo(given.nemo)]

    return report(compared)


def report(compared: Iterable[Compared | None]) -> int:
    """Print how far each is from its peer; 1 where one is too far, else 0."""
    far = False
    print(f"{'':7} {'peer':36} {'output':>20} {'gradient of x':>20}")
    for name, peer, layer, theirs in filter(None, compared):
        results = []
        for f in (layer, theirs):
            x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            x.requires_grad_()
            o = f(x)
            results.append((o.detach().double(), torch.autograd.grad(o.square().sum(), x)[0].double()))
        cells, too_far = differences(*results, TOLERANCE)
        far |= too_far
        print(f"{name:7} {peer:36} {cells}")
    return int(far)


def differences(expected: Sequence[Tensor], given: Sequence[Tensor], tolerance: float) -> tuple[str, bool]:
    """How far tensors are from others, as two columns, and whether one is too far."""
    cells, far = [], False
    for a, b in zip(expected, given, strict=True):
        difference, size = (a - b).abs().max().item(), a.abs().max().item()
        far |= not (a.dtype == b.dtype and difference <= tolerance * size)
        cells.append(f"{difference:.1e} of {size:.2g}")
    return f"{cells[0]:>20} {cells[1]:>20}", far


if __name__ == "__main__":
    sys.exit(main())
