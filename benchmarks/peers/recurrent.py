"""The recurrent attentions of `nsa_compile/models/zoo` beside other people's plain PyTorch.

    python benchmarks/peers/recurrent.py                             layers, beside those of the installed transformers
    python benchmarks/peers/recurrent.py --fla PATH --mamba PATH     also the recurrences, beside fla-org's
                                                                     flash-linear-attention and state-spaces/mamba,
                                                                     checked out at these paths

Nothing is fetched. Those two need einops. Of their files the functions that are compared are run, and these in float64:
where they say float32, float64 is read. Layers have the same weights as their peers, which compute parts in float32.
Each line is the greatest difference of the outputs and of the gradients, beside the greatest value of each. The exit
code is 1 where one exceeds 1e-4 of that value, 1e-10 for what runs in float64.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sparse import BATCH, DIM, Compared, copy, default_double, differences, ours, report, rows
from torch import Tensor

from nsa_compile.models.zoo.delta_net import delta_rule
from nsa_compile.models.zoo.gated_delta_net import gated_delta_rule
from nsa_compile.models.zoo.gla import gated_linear_attention
from nsa_compile.models.zoo.kda import kimi_delta_rule
from nsa_compile.models.zoo.linear import linear_attention
from nsa_compile.models.zoo.mamba2 import ssd
from nsa_compile.models.zoo.recurrent import unit
from nsa_compile.models.zoo.retnet import retention

HEADS, KEY, VALUE, LENGTH = 3, 8, 5, 128
TOLERANCE = 1e-10


def in_double(path: Path) -> dict[str, Any]:
    """The functions of a file, without what it imports beside torch and einops, in float64."""
    import einops

    text = re.sub(r"torch\.float(32)?\b", "torch.float64", path.read_text(encoding="utf-8"))
    body = [node for node in ast.parse(text.replace(".float()", ".double()")).body if isinstance(node, ast.FunctionDef)]
    code = "from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in body)
    space: dict[str, Any] = {"torch": torch, "F": F, "rearrange": einops.rearrange, "repeat": einops.repeat}
    with default_double():
        exec(compile(code, str(path), "exec"), space)
    return space


def draw(*shape: int) -> Tensor:
    return torch.randn(BATCH, LENGTH, HEADS, *shape, dtype=torch.float64)


def over_time(step: Callable[..., tuple[Any, Tensor]], state: Any, inputs: Sequence[Tensor]) -> Tensor:
    """The outputs of a recurrence over `[B, S, H, ...]`."""
    outputs = []
    for token in zip(*(x.unbind(1) for x in inputs), strict=True):
        state, o = step(state, *token)
        outputs.append(o)
    return torch.stack(outputs, 1)


def empty(*shape: int) -> Tensor:
    return torch.zeros(BATCH, HEADS, *shape, dtype=torch.float64)


def turned(*inputs: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in inputs]


def linear_of_fla(fla: dict[str, Any]) -> dict[str, Any]:
    q, k, v = F.elu(draw(KEY)) + 1, F.elu(draw(KEY)) + 1, draw(VALUE)

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def step(state: tuple[Tensor, Tensor], *token: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
            s, z, o = linear_attention(*state, *token)
            return (s, z), o

        return over_time(step, (empty(KEY, VALUE), empty(KEY)), (q, k, v))

    # Theirs adds 1e-10 to the denominator, ours 1e-6.
    def rescaled(q: Tensor, k: Tensor, o: Tensor) -> Tensor:
        total = (q * k.cumsum(1)).sum(-1, keepdim=True)
        return o * (total + 1e-10) / (total + 1e-6)

    names = {"recurrent": "naive_recurrent_linear_attn", "chunk": "naive_chunk_linear_attn"}

    def theirs(name: str) -> Callable[..., Tensor]:
        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = fla[names[name]](q, k, v, scale=1.0, normalize=True)
            return rescaled(q, k, given[0] if isinstance(given, tuple) else given)

        return run

    return {"inputs": (q, k, v), "own": own, **{name: theirs(name) for name in names}}


def retention_of_fla(fla: dict[str, Any]) -> dict[str, Any]:
    gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))

    def own(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        step = lambda s, q, k, v: retention(s, q, k * KEY**-0.5, v, gamma)  # noqa: E731
        return over_time(step, empty(KEY, VALUE), (q, k, v))

    return {
        "inputs": (draw(KEY), draw(KEY), draw(VALUE)),
        "own": own,
        "quadratic": lambda *x: fla["naive_retention"](*turned(*x)).transpose(1, 2),
    }


def gla_of_fla(fla: dict[str, Any]) -> dict[str, Any]:
    def own(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return over_time(gated_linear_attention, empty(KEY, VALUE), (q * KEY**-0.5, k, v, g))

    inputs = (draw(KEY), draw(KEY), draw(VALUE), F.logsigmoid(draw(KEY)) / 16)
    return {"inputs": inputs, "own": own, "recurrent": lambda *x: fla["naive_recurrent_gla"](*x)[0]}


def own_ssd(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
    return over_time(lambda s, *token: ssd(s, *token[:2], a, *token[2:]), empty(VALUE, KEY), (x, dt, b, c))


def selective() -> tuple[Tensor, ...]:
    """x, Δ, B, C and A."""
    a = -torch.empty(HEADS, dtype=torch.float64).uniform_(1, 16)
    return draw(VALUE), torch.empty_like(draw()).uniform_(0.001, 0.1), draw(KEY), draw(KEY), a


def ssd_of_fla(fla: dict[str, Any]) -> dict[str, Any]:
    def theirs(name: str) -> Callable[..., Tensor]:
        f = fla[f"naive_{name}_simple_gla"]
        return lambda x, dt, b, c, a: f(c, b, x * dt[..., None], dt * a, scale=1.0)[0]

    forms = {name: theirs(name) for name in ("recurrent", "parallel", "chunk")}
    return {"inputs": selective(), "own": own_ssd, **forms}


def ssd_of_mamba(mamba: dict[str, Any]) -> dict[str, Any]:
    def theirs(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor) -> Tensor:
        return mamba["ssd_minimal_discrete"](x * dt[..., None], dt * a, b, c, 32)[0]

    return {"inputs": selective(), "own": own_ssd, "minimal": theirs}


def written(*decay: int) -> tuple[Tensor, ...]:
    """q, k, v and β, and log decays `[B, S, H, *decay]`."""
    return unit(draw(KEY)), unit(draw(KEY)), draw(VALUE), draw().sigmoid(), -F.softplus(draw(*decay))


def delta_of_fla(fla: dict[str, Any]) -> dict[str, Any]:
    def own(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return over_time(delta_rule, empty(KEY, VALUE), (q * KEY**-0.5, k, v, beta))

    def theirs(name: str) -> Callable[..., Tensor]:
        return lambda *x: fla[name](*turned(*x))[0].transpose(1, 2)

    forms = {"recurrent": theirs("delta_rule_recurrence"), "chunk": theirs("delta_rule_chunkwise")}
    return {"inputs": written()[:4], "own": own, **forms}


def gated_delta_of_fla(fla: dict[str, Any]) -> dict[str, Any]:
    def own(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return over_time(gated_delta_rule, empty(KEY, VALUE), (q * KEY**-0.5, k, v, beta, g))

    return {
        "inputs": written(),
        "own": own,
        "recurrent": lambda q, k, v, beta, g: fla["naive_recurrent_gated_delta_rule"](q, k, v, beta, g)[0],
        "chunk": lambda q, k, v, beta, g: fla["naive_chunk_gated_delta_rule"](q, k, v, g, beta)[0],
    }


def kda_of_fla(fla: dict[str, Any]) -> dict[str, Any]:
    def own(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return over_time(kimi_delta_rule, empty(KEY, VALUE), (q * KEY**-0.5, k, v, beta, g))

    def theirs(name: str) -> Callable[..., Tensor]:
        return lambda q, k, v, beta, g: fla[f"naive_{name}_kda"](q, k, v, g, beta)[0]

    return {"inputs": written(KEY), "own": own, "recurrent": theirs("recurrent"), "chunk": theirs("chunk")}


OF_FLA = {
    "linear_attn": linear_of_fla, "retention": retention_of_fla, "gla": gla_of_fla, "simple_gla": ssd_of_fla,
    "delta_rule": delta_of_fla, "gated_delta_rule": gated_delta_of_fla, "kda": kda_of_fla,
}  # fmt: skip


def compare(name: str, problem: dict[str, Any]) -> bool:
    """Print how far a recurrence is from each of its peers; whether one is too far."""
    inputs = [x.detach().requires_grad_() for x in problem.pop("inputs")]
    results = {}
    for form, f in problem.items():
        with default_double():
            o = f(*inputs)
        weight = torch.randn(o.shape, dtype=o.dtype, generator=torch.Generator().manual_seed(1))
        results[form] = (o.detach(), torch.cat([g.flatten() for g in torch.autograd.grad(o, inputs, weight)]))
    far = False
    expected = results.pop("own")
    for form, given in results.items():
        cells, too_far = differences(expected, given, TOLERANCE)
        far |= too_far
        print(f"{name:17} {form:10} {cells}")
    return far


def mamba2() -> Compared:
    from transformers.models.mamba2 import modeling_mamba2 as peer
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config

    layer, config = ours("mamba2", {"groups": 2}, v_head_dim=16)
    peer_config = Mamba2Config(
        hidden_size=DIM, num_heads=4, head_dim=16, expand=2, state_size=8, n_groups=2, conv_kernel=4, chunk_size=16,
        layer_norm_epsilon=config.norm_eps, num_hidden_layers=1,
    )  # fmt: skip
    with default_double():
        theirs = peer.Mamba2Mixer(peer_config, 0).eval()
    own = rows(layer)
    copy(
        theirs,
        {
            "in_proj.weight": torch.cat([own[f"{name}.weight"] for name in ("gate", "xbc", "dt")]),
            "conv1d.weight": own["conv.weight"][:, None], "conv1d.bias": own["conv.bias"], "dt_bias": own["dt_bias"],
            "A_log": own["a_log"], "D": own["d"], "norm.weight": own["scale"], "out_proj.weight": own["out.weight"],
        },
    )  # fmt: skip
    return "mamba2", "transformers mamba2", layer, theirs


def gated_delta_net() -> Compared:
    from transformers.models.qwen3_next import modeling_qwen3_next as peer
    from transformers.models.qwen3_next.configuration_qwen3_next import Qwen3NextConfig

    layer, config = ours("gated_delta_net", {}, n_kv_heads=4, v_head_dim=6)
    peer_config = Qwen3NextConfig(
        hidden_size=DIM, linear_num_value_heads=4, linear_num_key_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=6, linear_conv_kernel_dim=4, rms_norm_eps=config.norm_eps, num_hidden_layers=1,
        hidden_act="silu",
    )  # fmt: skip
    with default_double():
        theirs = peer.Qwen3NextGatedDeltaNet(peer_config, 0)
    own = rows(layer)
    # Theirs has the projections of one head after those of another.
    by_head = {name: own[f"{name}.weight"].unflatten(0, (4, -1)) for name in ("q", "k", "v", "gate", "beta", "alpha")}
    qkvz = torch.cat([by_head[name] for name in ("q", "k", "v", "gate")], 1).flatten(0, 1)
    ba = torch.cat([by_head[name] for name in ("beta", "alpha")], 1).flatten(0, 1)
    copy(
        theirs,
        {
            "in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba, "conv1d.weight": own["conv.weight"][:, None],
            "dt_bias": own["dt_bias"], "A_log": own["a_log"], "norm.weight": own["norm.weight"],
            "out_proj.weight": own["out.weight"],
        },
    )  # fmt: skip
    return "gdn", "transformers qwen3_next", layer, theirs


def kda() -> Compared:
    from transformers.models.kimi_linear import modeling_kimi_linear as peer
    from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig

    layer, config = ours("kda", {}, n_kv_heads=4)
    peer_config = KimiLinearConfig(
        hidden_size=DIM, linear_num_heads=4, linear_head_dim=8, linear_conv_kernel_dim=4, rms_norm_eps=config.norm_eps,
        num_hidden_layers=1, hidden_act="silu",
    )  # fmt: skip
    with torch.no_grad():
        layer.gate_up.bias.zero_()  # theirs has none
    with default_double():
        theirs = peer.KimiLinearDeltaAttention(peer_config, 0)
    own = rows(layer)
    copy(
        theirs,
        {
            **{f"{name}_proj.weight": own[f"{name}.weight"] for name in "qkv"},
            "conv1d.weight": own["conv.weight"][:, None], "forget_gate.f_a_proj.weight": own["alpha_down.weight"],
            "forget_gate.f_b_proj.weight": own["alpha_up.weight"], "forget_gate.dt_bias": own["dt_bias"],
            "forget_gate.A_log": own["a_log"].reshape(1, 1, 4, 1), "b_proj.weight": own["beta.weight"],
            "g_a_proj.weight": own["gate_down.weight"], "g_b_proj.weight": own["gate_up.weight"],
            "o_norm.weight": own["norm.weight"], "o_proj.weight": own["out.weight"],
        },
    )  # fmt: skip
    return "kda", "transformers kimi_linear", layer, theirs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fla", type=Path, help="checkout of fla-org/flash-linear-attention")
    parser.add_argument("--mamba", type=Path, help="checkout of state-spaces/mamba")
    given = parser.parse_args()
    torch.manual_seed(0)
    far = report([mamba2(), gated_delta_net(), kda()])
    if given.fla or given.mamba:
        print(f"\n{'recurrence':17} {'form':10} {'output':>20} {'gradients':>20}")
    if given.fla:
        for folder, problem in OF_FLA.items():
            far |= compare(folder, problem(in_double(given.fla / "fla" / "ops" / folder / "naive.py")))
    if given.mamba:
        far |= compare("ssd", ssd_of_mamba(in_double(given.mamba / "mamba_ssm" / "modules" / "ssd_minimal.py")))
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
