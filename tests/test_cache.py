"""Kept results of the passes: whatever is wrong with one, the passes run; and what a key must tell apart."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
from torch import fx

import nsa_compile
from nsa_compile import backend, cache
from nsa_compile.cache import cache_key
from nsa_compile.files import write_sealed
from nsa_compile.passes.pipeline import Options, Uncacheable


def window(x):
    def step(rows, row):
        rows = torch.cat([rows[1:], row[None]])
        return rows, rows.sum(0)

    return nsa_compile.scan(step, x.new_zeros(3, 2), x)[1]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def told(caplog):
    """`told()`: the warnings since the last call."""
    caplog.set_level(logging.WARNING, "nsa_compile")
    cache._warn.cache_clear()

    def lines():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return lines


def compiled():
    """Compile `window` as a new process would, check it, and tell whether a kept result served."""
    torch._dynamo.reset()
    x = torch.arange(16, dtype=torch.float64).reshape(8, 2)
    result = torch.compile(window, backend="nsa_compile", fullgraph=True, options={"nested": "eager"})(x)
    assert torch.equal(result, window(x))
    return nsa_compile.last_report().cache_hit


@pytest.fixture
def entry(directory) -> Path:
    """The only kept result."""
    assert not compiled()
    assert compiled()
    (path,) = (path for path in (directory / "nsa_compile").glob("*/*") if path.is_file())
    return path


@pytest.mark.deep
def test_no_flipped_byte_comes_through(entry, told):
    whole = entry.read_bytes()
    places = [*range(0, len(whole), max(1, len(whole) // 300)), *range(len(whole) - 40, len(whole))]
    for place in places:
        entry.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
        assert cache.load(fx.GraphModule({}, fx.Graph()), entry.name) is None
    assert len(told()) == 1, "of one file, once"
    assert not compiled()
    assert compiled()


@pytest.mark.deep(but=["31"])
@pytest.mark.parametrize("size", [0, 1, 31, 32, 1000])
def test_a_result_that_was_cut_is_made_again(entry, size, told):
    entry.write_bytes(entry.read_bytes()[:size])
    assert not compiled()
    assert "cannot be used" in told()[0]
    assert compiled()


class Planted:
    """What a pickle of another's can do: anything."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


@pytest.mark.deep
@pytest.mark.parametrize("owner", ["mine", "another"])
def test_a_foreign_pickle_is_not_executed(entry, owner, tmp_path, told):
    victim = tmp_path / "victim"
    content = b"{}\n" + pickle.dumps(Planted(victim))
    if owner == "another":
        if os.geteuid() != 0:
            pytest.skip("giving files away takes root")
        write_sealed(entry, content)  # he can write the digest as well
        os.chown(entry, 65534, -1)
    else:
        entry.write_bytes(content)
    assert not compiled()
    assert "cannot be used" in told()[0]
    assert not victim.exists()
    assert compiled()


@pytest.mark.deep
@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away takes root")
def test_what_another_has_planted_is_not_even_looked_at(entry, directory, tmp_path, monkeypatch, told):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    victim = tmp_path / "victim"
    planted = tmp_path / "planted"
    directory.rename(planted)
    path = planted / entry.relative_to(directory)
    write_sealed(path, b"{}\n" + pickle.dumps(Planted(victim)))
    os.chown(planted, 65534, -1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(planted))
    assert not compiled()
    assert compiled()
    (line,) = told()
    assert "belongs to user" in line
    assert path.exists()
    assert not victim.exists()


@pytest.mark.deep
def test_a_pipe_in_the_place_of_a_result_does_not_hang(entry, told):
    entry.unlink()
    os.mkfifo(entry)
    hits = []
    thread = threading.Thread(target=lambda: hits.append(cache.load(fx.GraphModule({}, fx.Graph()), entry.name)))
    thread.daemon = True
    thread.start()
    thread.join(30)
    assert hits == [None], "it hangs"
    assert "regular" in told()[0]
    assert not compiled()
    assert compiled()


@pytest.mark.deep
def test_a_directory_in_the_place_of_a_result_is_no_error(entry, told):
    entry.unlink()
    entry.mkdir()
    for _ in range(2):
        assert not compiled()
    cannot_be_read, cannot_be_written = told()
    assert "regular" in cannot_be_read
    assert "Is a directory" in cannot_be_written


def test_a_result_of_another_program_is_not_taken(entry, told):
    """Equal keys should not happen; what does not fit is not put into a graph by halves."""
    graph = fx.Graph()
    graph.output(graph.placeholder("another"))
    gm = fx.GraphModule({}, graph)
    before = gm.code
    assert cache.load(gm, entry.name) is None
    assert "different inputs" in told()[0]
    assert gm.code == before


@pytest.mark.deep(but=["13"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_result_that_cannot_be_kept_costs_one_line(number, directory, monkeypatch, told):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        for _ in range(3):
            assert not compiled()
    assert told() == [f"results of the passes cannot be kept in '{directory}': {os.strerror(number)}"]
    assert [path for path in directory.rglob("*") if path.is_file()] == []


def test_no_place_for_results_costs_one_line(monkeypatch, told):
    def nowhere():
        raise nsa_compile.errors.UserError("there is no place")

    monkeypatch.setattr(cache.compiler_cache, "directory", nowhere)
    for _ in range(2):
        assert not compiled()
    assert told() == ["results of the passes are not kept: there is no place"]


# ------------------------------------------------------------------------------------------------------------- the key


def graph_holding(**held) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(tuple(graph.get_attr(name) for name in held))
    return fx.GraphModule(held, graph)


def key_of(*tensors) -> str:
    return cache_key(graph_holding(**{f"t{i}": tensor for i, tensor in enumerate(tensors)}), Options())


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.int8,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def test_the_key_tells_held_tensors_apart_bit_by_bit():
    bits = torch.tensor([0, 1, 1, 0, 0, 0, 0, 0] * 4, dtype=torch.uint8)
    keys = {}
    for dtype in DTYPES:
        for content in (bits, bits.flip(0)):
            tensor = content.view(dtype)
            keys[key_of(tensor)] = tensor
            assert key_of(tensor.clone()) == key_of(tensor)
    assert len(keys) == 2 * len(DTYPES)
    zero, nan = torch.zeros(1), torch.tensor([float("nan")])
    other_nan = (nan.view(torch.int32) + 1).view(torch.float32)
    assert other_nan.isnan()
    tensors = [zero, -zero, nan, other_nan, zero[0], zero[None], zero[:0], torch.zeros(0, 3), torch.zeros(3, 0)]
    assert len({key_of(tensor) for tensor in tensors}) == len(tensors)
    assert key_of(nan) == key_of(nan.clone())
    rows = torch.arange(6.0).reshape(2, 3)
    assert key_of(rows) != key_of(rows.t().contiguous().t()), "another layout"
    assert key_of(rows, zero) != key_of(zero, rows)


def test_the_key_of_a_view_is_that_of_its_numbers():
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert key_of(z.conj()) == key_of(z.conj().resolve_conj())
    assert key_of(z.conj()) != key_of(z)


def test_a_held_tensor_in_a_submodule_counts():
    def key(value):
        owner = torch.nn.Module()
        owner.inner = torch.nn.Module()
        owner.inner.register_buffer("rows", torch.full((3,), value))
        graph = fx.Graph()
        graph.output(graph.get_attr("inner.rows"))
        return cache_key(fx.GraphModule(owner, graph), Options())

    assert key(1.0) == key(1.0)
    assert key(1.0) != key(2.0)


def test_what_cannot_be_told_bit_by_bit_is_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.zeros(3)
    for held in (fake, torch.zeros(3, device="meta"), torch.eye(3).to_sparse()):
        with pytest.raises(Uncacheable, match="bits cannot be told"):
            key_of(held)


def test_real_tensors_are_told_while_others_are_fake():
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = torch.arange(3)
    expected = key_of(tensor)
    with FakeTensorMode():
        assert key_of(tensor) == expected


def test_the_key_covers_the_state_of_the_process():
    def key():
        return key_of(torch.zeros(2))

    def deterministic():
        torch.use_deterministic_algorithms(True)
        try:
            return key()
        finally:
            torch.use_deterministic_algorithms(False)

    def in_float64():
        torch.set_default_dtype(torch.float64)
        try:
            return cache_key(graph_holding(t0=torch.zeros(2, dtype=torch.float32)), Options())
        finally:
            torch.set_default_dtype(torch.float32)

    keys = [key(), deterministic(), in_float64()]
    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16),
        torch.autocast("cpu", torch.float16),
    ):
        tensor = torch.zeros(2)
        with context:
            keys.append(key_of(tensor))
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def test_the_key_covers_sizes_behind_symbols_and_tags_of_checkpoints():
    def key(**meta):
        graph = fx.Graph()
        x = graph.placeholder("x")
        x.meta.update(meta)
        graph.output(x)
        return cache_key(fx.GraphModule({}, graph), Options())

    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    def size(hint):
        env = ShapeEnv()
        symbol = env.create_symbol(hint, ConstantSource("s"), DimDynamic.DYNAMIC)
        return env.create_symintnode(symbol, hint=hint, source=ConstantSource("s"))

    keys = [key(), key(recompute=1), key(recompute=2), key(custom={"a": 1}), key(example_value=size(5))]
    keys.append(key(example_value=size(7)))
    assert len(set(keys)) == len(keys)
    assert key(example_value=size(5)) == keys[4]


def test_the_entry_says_what_it_is_before_its_pickle(entry):
    """So that a report can be read without unpickling anything."""
    assert json.loads(entry.read_bytes().partition(b"\n")[0])["cache_hit"] is False


@pytest.mark.deep
def test_no_program_is_taken_that_another_version_had_inductor_keep(directory, monkeypatch):
    """Their keys do not know what the backward pass of an operator is: an upgrade would call the old one."""
    from torch._dynamo.utils import counters

    x = torch.arange(16, dtype=torch.float64).reshape(8, 2).requires_grad_()

    def taken() -> bool:
        torch._dynamo.reset()
        counters.clear()
        nsa_compile.compile(window, nested="inductor")(x).sum().backward()
        return counters["aot_autograd"]["autograd_cache_hit"] == 1

    # Not by monkeypatch, which deletes what it has set in such a module: torch hides it then.
    with torch.compiler.config.patch(cache_key_tag="the user's own"):
        assert [taken(), taken()] == [False, True]
    monkeypatch.setattr(backend, "_own_tag", lambda: " another version")
    with torch.compiler.config.patch(cache_key_tag="the user's own"):
        assert [taken(), taken()] == [False, True]
        assert torch.compiler.config.cache_key_tag == "the user's own another version"


def holding(held):
    gm = fx.GraphModule({}, fx.Graph())
    gm.register_buffer("held", held)
    gm.graph.output(gm.graph.get_attr("held"))
    return gm


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (3, 2), (0,)])
def test_a_tensor_that_a_graph_holds_is_told_whatever_its_strides(dtype, shape):
    """One of a single element is contiguous with a stride of 0, and cannot be read as bytes then."""
    ones = torch.ones((), dtype=dtype).expand(shape)
    digest = cache.constants_digest(holding(ones))
    assert digest == cache.constants_digest(holding(torch.ones((), dtype=dtype).expand(shape)))
    if ones.numel():
        assert digest != cache.constants_digest(holding(torch.zeros((), dtype=dtype).expand(shape)))
