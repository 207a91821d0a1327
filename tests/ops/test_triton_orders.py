"""The lists that both loop orders of the Triton kernels walk along, the choice of an order, and the compile report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nsa_compile.errors import UserError
from nsa_compile.ops.selected.block_lists import distinct_blocks, selecting_queries
from tests.ops.triton_cases import needs_triton

BATCH, LENGTH, GROUPS, PLACES, BLOCK = 2, 13, 2, 3, 4


@pytest.fixture
def indices():
    rng = torch.Generator().manual_seed(3)
    return torch.randint(-2, 6, (BATCH, LENGTH, GROUPS, PLACES), generator=rng)


def chosen(indices, b, s, g):
    """The visible blocks of a query, as the definition says."""
    return {i for i in indices[b, s, g].tolist() if 0 <= i <= min(s // BLOCK, (LENGTH - 1) // BLOCK)}


def test_distinct_blocks_are_the_visible_ones(indices):
    blocks = distinct_blocks(indices, LENGTH, BLOCK)
    for b, s, g in torch.cartesian_prod(*map(torch.arange, (BATCH, LENGTH, GROUPS))).tolist():
        row = [i for i in blocks[b, s, g].tolist() if i >= 0]
        assert row == sorted(chosen(indices, b, s, g))


def test_indices_beyond_32_bits_stand_for_nothing():
    indices = torch.tensor([1, 2**40 + 1, -(2**40) + 2, 0]).expand(1, 9, 1, 4)
    assert distinct_blocks(indices, 12, BLOCK)[0, -1, 0].tolist() == [-1, -1, 0, 1]


@pytest.mark.parametrize("longest", [1, 4, 100])
def test_lists_name_every_pair_once_under_its_block(indices, longest):
    first, num_blocks = 5, -(-LENGTH // BLOCK)  # a chunk that does not begin at 0
    blocks = distinct_blocks(indices, LENGTH, BLOCK)[:, first:]
    lists = selecting_queries(blocks, num_blocks, longest, first)
    for owner in range(lists.num_lists):
        b, g, block = owner // num_blocks // GROUPS, owner // num_blocks % GROUPS, owner % num_blocks
        begin, end = lists.begin[owner : owner + 2].tolist()
        expected = [s for s in range(first, LENGTH) if block in chosen(indices, b, s, g)]
        assert lists.queries[begin:end].tolist() == expected
        assert (blocks.flatten()[lists.pairs[begin:end].long()] == block).all()
        programs = (lists.owner == owner).sum().item()
        assert programs == max(1, -(-len(expected) // longest))


@needs_triton
class TestOrder:
    def choose(self, heads, dim=128, arch="sm_90", block_size=64, length=65536):
        from nsa_compile.ops.selected.triton import choose_order

        return choose_order(heads, dim, dim, torch.bfloat16, block_size, 16, length, arch)

    def test_small_groups_go_block_by_block(self):
        assert [self.choose(h).major for h in (1, 2, 3, 4, 8)] == ["block"] * 5
        assert self.choose(16) == ("query", 4)
        assert self.choose(64) == ("query", 1)
        assert self.choose(4, block_size=8).major == "query"  # few keys to read, the parts would cost more

    def test_where_neighbours_share_blocks_more_of_them_make_a_tile(self):
        assert self.choose(16, length=8192) == ("query", 4)
        assert self.choose(6, dim=64, length=2048) == ("query", 8)
        assert self.choose(4, length=2048) == ("query", 8)
        assert self.choose(1, length=8192).major == "block"  # one head a row: the parts are few
        for length in (1, 16, 64, 1000):
            assert self.choose(2, length=length).queries <= 8

    def test_a_measurement_overrides_the_estimate(self, tmp_path, monkeypatch):
        from nsa_compile.ops.selected import triton

        row = {"heads": 4, "dim": 128, "value_dim": 128, "dtype": "bfloat16", "block_size": 64}
        rows = [
            {**row, "seq_len": 8192, "major": "query", "queries": 1},
            {**row, "seq_len": 65536, "major": "query", "queries": 4},
        ]
        (tmp_path / "orders.json").write_text(json.dumps({"sm_90": rows}))
        monkeypatch.setattr(triton, "ORDER_TABLE", tmp_path / "orders.json")
        triton._measured.cache_clear()
        try:
            assert self.choose(4) == self.choose(4, length=2**20) == self.choose(4, length=32768) == ("query", 4)
            assert self.choose(4, length=2048) == self.choose(4, length=16384) == ("query", 1)  # the nearest
            assert self.choose(4, arch="sm_80").major == "block"
            assert self.choose(8).major == "block"
        finally:
            triton._measured.cache_clear()

    def test_an_order_that_does_not_exist_is_refused(self):
        from nsa_compile.ops.selected import triton

        q, indices = torch.zeros(1, 4, 1, 16), torch.zeros(1, 4, 1, 1, dtype=torch.int32)
        with pytest.raises(ValueError, match="queries = 9"):
            triton.forward(q, q, q, indices, 4, 1.0, triton.Order("query", 9))


@needs_triton
class TestReport:
    def test_occupancy_is_bounded_by_what_runs_out_first(self):
        from nsa_compile.ops.triton_report import ARCHS, occupancy

        assert occupancy(ARCHS[90], registers=32, shared=0, num_warps=4) == 1.0
        assert occupancy(ARCHS[90], registers=128, shared=0, num_warps=8) == 0.25  # two programs' registers
        assert occupancy(ARCHS[90], registers=32, shared=100 * 1024, num_warps=4) == 2 * 4 / 64  # shared memory of two
        assert occupancy(ARCHS[80], registers=32, shared=100 * 1024, num_warps=4) == 1 * 4 / 64

    @pytest.mark.deep
    def test_spills_are_seen(self, tmp_path, monkeypatch):
        import triton

        from nsa_compile.ops.triton_report import Shape, check_compiler, compile_launch, launches

        try:
            check_compiler()
        except UserError as error:
            pytest.skip(str(error))
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
        found = next(launch for _, launch in launches(Shape()) if launch.kernel.__name__ == "_dkdv_kernel")
        crowded = found._replace(constants=found.constants | {"num_warps": 1})
        report = compile_launch("window", crowded, 90)
        assert report.num_warps == 1
        assert report.spills > 0

    @pytest.mark.deep
    def test_an_unknown_architecture_is_one_line(self):
        from nsa_compile.ops.triton_report import compile_report

        with pytest.raises(UserError, match="arch = 42"):
            compile_report(42)
        command = [sys.executable, "-m", "nsa_compile.ops.triton_report", "42"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 2
        assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.deep
@needs_triton
def test_the_benchmark_writes_a_table_that_choose_order_reads(tmp_path, monkeypatch):
    from nsa_compile.ops.selected import triton

    script = Path(__file__).parents[2] / "benchmarks" / "selected_orders.py"
    table = tmp_path / "orders.json"
    kept = {
        "heads": 2,
        "dim": 64,
        "value_dim": 64,
        "dtype": "bfloat16",
        "block_size": 64,
        "major": "query",
        "queries": 1,
        "seq_len": 8,
    }
    table.write_text(json.dumps({"cpu": [kept, {**kept, "dim": 16, "value_dim": 16, "milliseconds": {}}]}))
    options = ["--device=cpu", "--seq-len=8", "--dim=16", "--heads=2", "--repeats=1", f"--out={table}"]
    subprocess.run([sys.executable, script, *options], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    rows = json.loads(table.read_text())["cpu"]
    assert rows[0] == kept
    assert len(rows) == 2, "a new measurement replaces that of the same shape"
    fastest = min(rows[1]["milliseconds"], key=rows[1]["milliseconds"].get)
    assert fastest.startswith(rows[1]["major"])
    monkeypatch.setattr(triton, "ORDER_TABLE", table)
    triton._measured.cache_clear()
    try:
        chosen = triton.choose_order(2, 16, 16, torch.bfloat16, 64, 16, 8, "cpu")
    finally:
        triton._measured.cache_clear()
    assert chosen == (rows[1]["major"], rows[1]["queries"])
