"""The comparison on a GPU, without one: its oracle and its checks, adapters against fakes, bars, and a dry run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from benchmarks.gpu import attention, contenders, tables
from benchmarks.gpu.__main__ import TIME_UP, TINY, TOGETHER, Run, cells, choose_device, main
from benchmarks.gpu.bars import judge
from benchmarks.gpu.contenders import CONTENDERS, Contender, NotAvailable, gated
from benchmarks.gpu.oracle import check_sampled, check_small, dense_at, nsa_at, small
from benchmarks.gpu.problem import Problem
from benchmarks.production import settle
from nsa_compile.models import SparsePattern
from nsa_compile.models.nsa import block_weights
from nsa_compile.ops import dispatch, selected_attention, window_attention
from nsa_compile.ops.compressed import compressed_attention

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent
PROBLEM = Problem(160, 2, 4, 16, pattern=TINY, dtype=torch.float32)
PLAIN = replace(TINY, compress_block=16, compress_stride=16)  # l = d = l'


def by_name(name: str) -> Contender:
    return next(contender for contender in CONTENDERS if contender.name == name)


def ours(problem: Problem):
    return by_name("ours, operators").build(problem, CPU)


# -- the oracle and the checks


@pytest.mark.deep(but=["pattern1"])
@pytest.mark.parametrize("pattern", [TINY, PLAIN, replace(TINY, index_convention="paper_v2", num_initial=0)])
def test_attention_at_some_queries_is_the_oracle_of_all(pattern):
    problem = small(replace(PROBLEM, pattern=pattern))
    every = partial(nsa_everywhere, problem)
    double = check_small(every, replace(problem, dtype=torch.float64), "nsa", CPU)
    assert max(double.errors.values()) < 1e-12


def nsa_everywhere(problem, q, k, v, gate, pattern=None):
    return nsa_at(q, k, v, gate, torch.arange(q.shape[1]), pattern or problem.pattern)[0]


@pytest.mark.deep(but=["check_sampled"])
@pytest.mark.parametrize("check", [check_small, check_sampled])
def test_our_operators_agree(check):
    verdict = check(ours(PROBLEM), PROBLEM, "nsa", CPU)
    assert verdict.agrees
    assert verdict.queries >= 10
    assert set(verdict.errors) == {"out", "dq", "dk", "dv", "dgate"}


def test_in_bf16_our_operators_are_no_worse_than_eager_torch():
    verdict = check_sampled(ours(PROBLEM), replace(PROBLEM, dtype=torch.bfloat16), "nsa", CPU)
    assert verdict.agrees
    assert verdict.worst < 1.5


FAULTS = {
    "a window short of a token": {"window": TINY.window - 1},
    "a block fewer": {"num_selected": TINY.num_selected - 1},
    "no forced first block": {"num_initial": 0, "num_selected": 3},
    "another index of eq. 9": {"index_convention": "paper_v2"},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("check", [check_small, check_sampled])
def test_a_wrong_pattern_is_found(check, fault):
    wrong = partial(nsa_everywhere, PROBLEM, pattern=replace(TINY, **FAULTS[fault]))
    assert check(partial(nsa_everywhere, PROBLEM), PROBLEM, "nsa", CPU).agrees
    assert not check(wrong, PROBLEM, "nsa", CPU).agrees


def test_a_wrong_gradient_is_found():
    right = ours(PROBLEM)

    def wrong(q, k, v, gate):
        return right(q, k + (k - k.detach()), v, gate)  # the same value, twice the gradient

    verdict = check_sampled(wrong, PROBLEM, "nsa", CPU)
    assert not verdict.agrees
    assert verdict.errors["out"] < 1e-5
    assert verdict.errors["dk"] > 0.5


def test_dense_attention_is_checked_too():
    assert check_sampled(by_name("SDPA").build(PROBLEM, CPU), PROBLEM, "dense", CPU).agrees

    def looks_ahead(q, k, v, gate):
        return dense_at(q, k, v, gate, (torch.arange(q.shape[1]) + 1).clamp_max(q.shape[1] - 1), TINY)[0]

    assert not check_sampled(looks_ahead, PROBLEM, "dense", CPU).agrees


def test_the_window_alone_is_checked_and_judged():
    ours, flex = contenders.WINDOW_CONTENDERS
    assert check_sampled(ours.build(PROBLEM, CPU), PROBLEM, "window", CPU).agrees
    shorter = replace(PROBLEM, pattern=replace(TINY, window=TINY.window - 1))
    assert not check_sampled(ours.build(shorter, CPU), PROBLEM, "window", CPU).agrees
    with pytest.raises(NotAvailable, match="CUDA only"):
        flex.build(PROBLEM, CPU)
    cells = {
        f"S={length} window": {
            "contenders": {ours.name: {"both": {"median_s": 1.0}}, flex.name: {"both": {"median_s": seconds}}},
            "seq_len": length, "heads_per_group": 16, "dtype": "bfloat16",
        }
        for length, seconds in ((8192, 1.5), (65536, 0.9))
    }  # fmt: skip
    (bar,) = (bar for bar in judge({"attention": cells}) if "FlexAttention" in bar["bar"])
    assert (bar["verdict"], bar["value"], bar["note"]) == ("missed", 0.9, "S=65536 window")


# -- the loop orders


@pytest.mark.deep
def test_loop_orders_are_measured_and_then_chosen(tmp_path):
    """In Triton's interpreter, which reads its variable when it is imported."""
    pytest.importorskip("triton")
    script = f"""
import torch
from pathlib import Path
from benchmarks import selected_orders
from benchmarks.gpu import orders
from nsa_compile.ops.selected import triton
(name, shape), = orders.shapes(smoke=True)
row = orders.measure_order({{**shape, "seq_len": 8}}, torch.device("cpu"))  # a quarter of the programs
assert len(row["milliseconds"]) == 5
triton.ORDER_TABLE = Path({str(tmp_path / "orders.json")!r})
triton.ORDER_TABLE.write_text("{{}}")
args = (shape["heads"], shape["dim"], shape["dim"], torch.bfloat16, 64, 16, 65536, "cpu")
assert triton.choose_order(*args) == ("block", 1)  # estimated
cells = {{"measured": {{**row, "major": "query", "queries": 4}}, "not": {{"not_measured": ""}}}}
orders.keep_orders(cells, torch.device("cpu"))
assert triton.choose_order(*args) == ("query", 4)
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_triton_on_cuda_nothing_is_measured(monkeypatch):
    """Our operators would run in plain torch, and their times would be taken for those of the kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *size, device, dtype: types.SimpleNamespace(device=device, dtype=dtype))
    dispatch._best.cache_clear()
    with pytest.raises(click.UsageError, match="window attention would not run in Triton: triton cannot be used"):
        choose_device("cuda")
    dispatch._best.cache_clear()


# -- adapters, against modules that have the arguments of the real ones


@pytest.fixture
def anywhere(monkeypatch):
    monkeypatch.setattr(contenders, "_need_cuda", lambda device: None)

    def install(name, **members):
        module = types.ModuleType(name)
        module.__dict__.update(members)
        for i in range(1, name.count(".") + 1):
            monkeypatch.setitem(sys.modules, name.rsplit(".", i)[0], types.ModuleType("parent"))
        monkeypatch.setitem(sys.modules, name, module)

    return install


def fake_compressed(
    q, k, v, kernel_size, kernel_stride, block_size, topk, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    sm_scale=None, init_blocks=1, local_blocks=2, parallel_topk_compute="auto",
):  # fmt: skip
    assert cu_seqlens_q.tolist() == [0, max_seqlen_q] == [0, len(q)]
    assert cu_seqlens_k.tolist() == [0, max_seqlen_k] == [0, len(k)]
    pattern = SparsePattern(kernel_size, kernel_stride, block_size, topk, 1, init_blocks, local_blocks)
    weights = block_weights(pattern)
    out, _, indices = compressed_attention(
        q[None], k[None], v[None], kernel_size, kernel_stride, q.shape[-1] ** -0.5, block_size, list(weights),
        list(weights.values()), topk, init_blocks, local_blocks,
    )  # fmt: skip
    return out[0], indices[0].transpose(0, 1)  # [G, S, n]


def fake_selected(q, k, v, topk_idx, block_size, cu_seqlens, softmax_scale=None):
    indices = topk_idx.transpose(0, 1)[None].contiguous()
    return selected_attention(q[None], k[None], v[None], indices, block_size=block_size)[0][0]


class FakeNSAConfig:
    def __init__(
        self, hidden_size=4096, head_dim=128, qk_head_dim=None, v_head_dim=None, num_heads=64, num_kv_heads=4,
        kernel_size=32, stride=16, cmp_k_method="mean", cmp_v_method="mean", block_size=64, top_n=16,
        num_init_blocks=1, num_local_blocks=2, window_size=512,
    ):  # fmt: skip
        assert cmp_k_method == cmp_v_method == "mean"
        self.heads = (num_heads, num_kv_heads, head_dim)
        self.pattern = SparsePattern(
            kernel_size, stride, block_size, top_n, window_size, num_init_blocks, num_local_blocks
        )


class FakeCore(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, q, k, v, combine_weight, cu_seqlens, bench=False, print_result=True):
        assert (q.shape[1], k.shape[1], q.shape[2]) == self.config.heads
        problem = Problem(len(q), k.shape[1], q.shape[1], q.shape[2], pattern=self.config.pattern)
        return ours(problem)(q[None], k[None], v[None], combine_weight[None])[0]


def fake_parallel_nsa(
    q, k, v, g_cmp, g_slc, g_swa, block_indices=None, block_counts=16, block_size=64, window_size=0, scale=None,
    cu_seqlens=None,
):  # fmt: skip
    pattern = SparsePattern(block_size, block_size, block_size, block_counts, max(1, window_size))
    gate = torch.stack((g_cmp, g_slc, g_swa if window_size else torch.zeros_like(g_swa)), -1).logit()
    return ours(Problem(q.shape[1], k.shape[2], q.shape[2], q.shape[3], pattern=pattern))(q, k, v, gate)


def test_the_adapter_of_native_sparse_attention_triton(anywhere):
    anywhere("native_sparse_attention.ops", compressed_attention=fake_compressed, topk_sparse_attention=fake_selected)
    built = by_name("native-sparse-attention-triton").build(PROBLEM, CPU)
    assert check_small(built, PROBLEM, "nsa", CPU).agrees


def test_the_adapter_of_flash_sparse_attention(anywhere):
    anywhere("nsa_ref.ops", compressed_attention=fake_compressed)
    anywhere("fsa.ops.FSA_topk_sparse_attention", FSA_topk_sparse_attention=fake_selected)
    assert check_small(by_name("Flash-Sparse-Attention").build(PROBLEM, CPU), PROBLEM, "nsa", CPU).agrees


def test_the_adapter_of_scalable_flash_nsa(anywhere):
    anywhere("flash_nsa", NSAConfig=FakeNSAConfig, HFNSACore=FakeCore)
    assert check_small(by_name("Scalable-Flash-NSA").build(PROBLEM, CPU), PROBLEM, "nsa", CPU).agrees


@pytest.mark.parametrize("flash_attn", [None, "installed"])
def test_the_adapter_of_fla(anywhere, flash_attn):
    anywhere("fla.ops.nsa.parallel", parallel_nsa=fake_parallel_nsa, flash_attn_func=flash_attn)
    build = by_name("fla.ops.nsa").build
    problem = replace(PROBLEM, groups=1, heads=16, pattern=PLAIN)
    assert check_small(build(problem, CPU), problem, "nsa", CPU).agrees
    with pytest.raises(NotAvailable, match="l = d = l' only"):
        build(replace(problem, pattern=TINY), CPU)
    with pytest.raises(NotAvailable, match="heads a group"):
        build(replace(problem, groups=4), CPU)


def test_what_is_not_installed_says_so():
    for name in ("fla.ops.nsa", "Flash-Sparse-Attention", "Scalable-Flash-NSA"):
        with pytest.raises(NotAvailable, match="cannot import"):
            by_name(name).build(PROBLEM, CPU)


# -- cells


@pytest.mark.deep
def test_what_differs_from_the_oracle_is_not_timed_unless_public():
    def wrong(problem, device):
        return lambda q, k, v, gate: gated(gate, *[window_attention(q, k, v, window=4)[0]] * 3)

    def fails(problem, device):
        raise RuntimeError("no kernel\nand more")

    field = [Contender("wrong", "nsa", wrong), Contender("theirs", "nsa", wrong, public=True),
             Contender("fails", "nsa", fails), by_name("ours, operators"), by_name("SDPA")]  # fmt: skip
    results = attention.measure_cell(PROBLEM, CPU, field, seconds=0)["contenders"]
    assert results["wrong"]["not_measured"] == "differs from the float64 oracle"
    assert results["theirs"]["note"] == "differs from the oracle"
    assert results["fails"] == {"not_measured": "RuntimeError: no kernel"}
    for name in ("theirs", "ours, operators", "SDPA"):
        assert len(results[name]["both"]["samples_s"]) >= 3
        assert results[name]["both"]["median_s"] > 0


def test_a_record_is_gone_on_with_and_leaves_out_what_broke_the_device(tmp_path):
    run = Run(tmp_path, CPU, 1, {"smoke": True})
    run.cell("attention", "one", lambda: planted(1.0, 1.0, seq_len=8192))
    run.cell("step", "three", lambda: {}["absent"])
    assert run.record["step"]["three"]["not_measured"] == "KeyError: 'absent'"
    with pytest.raises(attention.DeviceBroken, match="illegal memory access"):
        run.cell("training", "two", lambda: attention.reason(RuntimeError("CUDA error: an illegal memory access")))
    again = Run(tmp_path, CPU, 1, {"smoke": True})
    for name in ("one", "two"):
        again.cell("training" if name == "two" else "attention", name, lambda: pytest.fail("measured again"))
    assert again.record["training"]["two"]["not_measured"] == "broke the device"
    assert again.record["step"]["three"]["not_measured"] == "KeyError: 'absent'"
    late = Run(tmp_path, CPU, 0, {"smoke": True})
    late.cell("training", "four", lambda: pytest.fail("no time left"))
    assert late.record["training"]["four"]["not_measured"] == TIME_UP
    assert "broke the device" in (tmp_path / "gpu.md").read_text()
    assert ["two", TOGETHER] in json.loads((tmp_path / "gpu.json").read_text())["crashed"]


def test_a_dense_twin_that_cannot_run_leaves_the_other_one():
    def attend():
        q = torch.zeros(1, 1, 4, 16)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(q, q, q)

    assert settle(attend) == "SDPA has no kernel of the kind asked for"
    with pytest.raises(RuntimeError, match="else"):
        settle(lambda: (_ for _ in ()).throw(RuntimeError("something else")))


# -- bars


def planted(ours_s, flash_s, **more):
    """A cell in which ours and flash took so long."""
    check = {"worst_of_eager": more.pop("worst", 0.5)}

    def result(seconds, **entries):
        timing = {"median_s": seconds, "min_s": seconds, "max_s": seconds}
        return {**dict.fromkeys(("forward", "backward", "both"), timing), "kind": "nsa", "check": check, **entries}

    field = {"ours, operators": result(ours_s), "SDPA flash": result(flash_s)}
    if "public" in more:
        field["fla.ops.nsa"] = result(more["public"], public=True)
    cell = {"seq_len": more["seq_len"], "heads_per_group": more.get("h", 16), "dtype": "bfloat16"}
    return cell | {"useful_flops": {"nsa": {"both": 1e12}}, "contenders": field}


def test_bars_are_met_missed_or_not_measured():
    record = {
        "attention": {
            "S=8192 h=16 32/16/64": planted(1.0, 1.3, seq_len=8192, public=1.1),
            "S=8192 h=4 32/16/64": planted(1.4, 1.3, seq_len=8192, h=4),
            "S=65536 h=16 32/16/64": planted(1.0, 6.9, seq_len=65536, worst=1.1),
        },
        "training": {"nsa_125m_gpt2.yaml S=2048": {"nsa": {"tokens_per_s": 210_000.0, "mfu_nominal": 0.3}}},
    }
    bars = {bar["bar"]: bar for bar in judge(record)}
    verdicts = {name: bar["verdict"] for name, bar in bars.items()}
    assert verdicts["8192: against SDPA flash"] == "met"
    assert verdicts["65536: against SDPA flash"] == "missed"
    assert verdicts["32768: against SDPA flash"] == "not measured"
    assert verdicts["65536: against SDPA cuDNN"] == "not measured"
    assert verdicts["S=8192 h=16 32/16/64: against the fastest public NSA"] == "missed"
    assert verdicts["4 heads a group, time per useful FLOP over that of 16"] == "met"
    assert verdicts["125 M preset, S = 2048: tokens/s"] == "met"
    assert verdicts["125 M preset, S = 2048: MFU of the data sheet's peak"] == "missed"
    assert verdicts["error against float64 over that of eager torch"] == "missed"
    assert verdicts["S = 131,072: one layer, forward + backward, in ms"] == "not measured"


def test_not_fitting_at_the_greatest_length_misses_the_bar():
    cell = planted(1.0, 1.0, seq_len=131072)
    cell["contenders"]["ours, operators"] = {"not_measured": "does not fit into memory"}
    last = judge({"attention": {"S=131072 h=16 32/16/64": cell}})[-1]
    assert (last["verdict"], last["note"]) == ("missed", "ours, operators: does not fit into memory")


# -- the command


def test_what_bars_rest_on_is_measured_first(tmp_path):
    run = Run(tmp_path, CPU, 1, {"smoke": False})
    every = sorted(cells(run, smoke=False), key=lambda cell: cell.turn)
    names = [f"{cell.part} {cell.name}" for cell in every]
    assert len(set(names)) == len(names)
    assert names[:3] == [f"attention S={length} h=16 32/16/64" for length in attention.SEQ_LENS[:3]]
    assert names[3:5] == ["training nsa_125m_gpt2.yaml S=2048", "step nsa_125m_gpt2.yaml"]
    rest = {f"attention S={length} h=16 32/16/64" for length in attention.SEQ_LENS[3:]}
    assert rest | {"attention S=65536 window", "attention S=65536 h=4 32/16/64"} < set(names[5:16])
    for preset in ("nsa_125m_gpt2.yaml", "m7c_125m_2xa100_production.yaml"):
        assert {f"training {preset} S={length}" for length in (2048, 8192, 32768, 65536)} < set(names)
    for heads in (16, 4, 1):
        lengths = (4096, 8192, 16384, 32768, 65536, 131072)
        assert {f"attention S={length} h={heads} 32/16/64" for length in lengths} < set(names)


@pytest.mark.deep
def test_a_dry_run_needs_few_packages_and_fills_every_table(tmp_path):
    optional = ["psutil", "nvtx", "scipy", "tqdm", "platformdirs", "hypothesis", "matplotlib", "tokenizers", "torchao"]
    start = f"import sys, runpy; sys.modules.update(dict.fromkeys({optional})); "
    # A checkout on the path, not an installed package: torch.compile finds no backend by its name.
    start += "import importlib.metadata as m; found = m.entry_points; "
    start += "none = ('torch_dynamo_backends', m.EntryPoints()); "
    start += "m.entry_points = lambda **k: none[1] if k.get('group') == none[0] else found(**k); "
    start += f"sys.argv = ['gpu', '--device', 'cpu', '--smoke', '--out', {str(tmp_path)!r}]; "
    start += "runpy.run_module('benchmarks.gpu', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", start], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "gpu.json").read_text())
    (cell, window), (trained,), (step,) = (record[part].values() for part in ("attention", "training", "step"))
    assert window["contenders"]["window, ours"]["both"]["median_s"] > 0
    for name in ("ours, operators", "ours, compiled", "SDPA"):
        assert cell["contenders"][name]["check"]["agrees"]
        assert cell["contenders"][name]["both"]["median_s"] > 0
    assert trained["nsa"]["tokens_per_s"] > 0 < trained["dense"]["tokens_per_s"]
    assert step["graph_breaks"] == 0
    assert step["plain"]["median_s"] > 0
    assert {bar["verdict"] for bar in record["bars"]} == {"not measured"}
    assert done.stdout == (tmp_path / "gpu.md").read_text() + "\n"
    assert tables.render(record) in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--device", "cpu"], "add --smoke"), (["--device", "cuda", "--smoke"], "torch finds no GPU here")],
)
def test_mistakes_are_one_line(tmp_path, words, message):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(main, [*words, "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert message in done.stderr
