"""The pipeline around the passes: options, order, bisection, dumps, cache, and what the compiled graph looks like."""

from __future__ import annotations

import importlib.util
import json
import linecache
import operator
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx

import nsa_compile
from nsa_compile.analyses import batched_body
from nsa_compile.cache import cache_key
from nsa_compile.capture.refusals import ScanNotCompiled
from nsa_compile.ir.scans import Declined
from nsa_compile.passes.pipeline import (
    Options,
    ScanNotBatched,
    Uncacheable,
    pipeline,
    pipeline_key,
    register,
)
from nsa_compile.passes.report import Guard, Report


def cumulative(x, steps):
    """A window of the last three inputs, summed: batched without any guard to drop."""

    def step(window, row):
        window = torch.cat([window[1:], row[None]])
        return window, window.sum(0)

    return nsa_compile.scan(step, x.new_zeros(3, x.shape[1]), x)[1]


def recurrent(x):
    """h' = tanh(h + x): no pass may touch it."""

    def step(h, row):
        h = torch.tanh(h + row)
        return h, h

    return nsa_compile.scan(step, x.new_zeros(x.shape[1]), x)[1]


def run(fn, *args, **options):
    torch._dynamo.reset()
    result = torch.compile(fn, backend="nsa_compile", fullgraph=True, options={"nested": "eager", **options})(*args)
    return result, nsa_compile.last_report()


def test_every_prefix_by_stop_after():
    x = torch.randn(7, 2, dtype=torch.float64)
    expected = cumulative(x, 7)
    for limit, batched in [(0, False), (1, False), (2, True), (None, True)]:
        actual, report = run(cumulative, x, 7, stop_after=limit)
        torch.testing.assert_close(actual, expected)
        assert report.scans[0].batched == batched
        assert sum(len(p.matches) for p in report.passes) <= (2 if limit is None else limit)


@pytest.mark.deep(but=["resolve_carries"])
@pytest.mark.parametrize("disabled", [p.name for p in pipeline()])
def test_a_pass_can_be_disabled_and_says_so(disabled):
    x = torch.randn(5, 2, dtype=torch.float64)
    actual, report = run(cumulative, x, 5, disable=[disabled])
    torch.testing.assert_close(actual, cumulative(x, 5))
    skipped = {p.name: p.skipped for p in report.passes if p.skipped}
    assert skipped[disabled] == "disabled"
    if disabled == "resolve_carries":
        assert "needs carries" in skipped["batch_prefill"]


def test_a_pass_takes_a_name_and_gives_it_back():
    """In the place of a pass of the package, or after all of them."""
    names, original = [p.name for p in pipeline()], pipeline()[0].run

    @register(names[0], ensures=("carries",))
    def instead(gm, context):
        """Does nothing."""
        return False

    @register("extra")
    def extra(gm, context):
        """Does nothing."""
        return False

    assert [p.name for p in pipeline()] == [*names, "extra"]
    assert pipeline()[0].run is instead
    extra.unregister()
    instead.unregister()
    assert [p.name for p in pipeline()] == names
    assert pipeline()[0].run is original


def test_a_decline_calls_an_operator_what_its_user_calls_it():
    graph = fx.Graph()
    x = graph.placeholder("x")
    best = graph.call_function(torch.ops.aten.topk.default, (x, 2))
    declined = {
        "aten.topk.default": graph.call_function(operator.getitem, (best, 0)),
        "cosine_similarity": graph.call_function(torch.cosine_similarity, (x, x)),
        "relu_": graph.call_method("relu_", (x,)),
    }
    for name, node in declined.items():
        assert Declined("why", node).op == name


def test_a_recurrence_stays_a_loop_and_names_its_line():
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    actual, report = run(recurrent, x)
    torch.testing.assert_close(actual, recurrent(x))
    (decline,) = report.declines
    assert decline.op == "aten.tanh.default"
    assert decline.location.startswith(__file__)
    line = int(decline.location.rpartition(":")[2])
    assert "torch.tanh(h + row)" in linecache.getline(__file__, line)
    assert "recurrence" in decline.reason


def test_on_decline_error_refuses():
    with pytest.raises(ScanNotBatched, match=r"^scan stays a loop of 5 steps"):
        run(recurrent, torch.randn(5, 2), on_decline="error")


def test_memory_bound_declines_a_kept_guard():
    def last_row(x):
        def step(cache, row):
            cache = torch.where((torch.arange(6) == row["t"])[:, None], row["x"], cache)
            return cache, cache.cos().sum(0)  # reads rows that are not written yet

        return nsa_compile.scan(step, x.new_zeros(6, 2), {"x": x, "t": torch.arange(6)})[1]

    x = torch.randn(6, 2, dtype=torch.float64)
    actual, report = run(last_row, x)
    torch.testing.assert_close(actual, last_row(x))
    assert report.scans[0].guards_kept
    assert report.scans[0].batched
    actual, report = run(last_row, x, max_guard_bytes=10)
    torch.testing.assert_close(actual, last_row(x))
    assert not report.scans[0].batched
    assert "max_guard_bytes" in report.declines[-1].reason


def test_guards_are_told_by_carry():
    """Carry 0 counts, 1 is read under a causal mask, 2 before its row is written and again after."""

    def f(x):
        rows = torch.arange(6)

        def step(carry, row):
            t, masked, seen = carry
            here = (rows == t)[:, None]
            early = seen.sum(0)
            masked, seen = torch.where(here, row, masked), torch.where(here, row, seen)
            causal = (rows <= t).to(row.dtype)[:, None]
            return (t + 1, masked, seen), (masked * causal).sum(0) + early + seen.sum(0)

        init = (torch.tensor(0), x.new_zeros(6, 2), x.new_ones(6, 2))
        return nsa_compile.scan(step, init, x)[1]

    x = torch.randn(6, 2, dtype=torch.float64)
    actual, report = run(f, x)
    torch.testing.assert_close(actual, f(x))
    (scan,) = report.scans
    assert scan.carries == ["Known", "Rows", "Rows"]
    assert scan.guards == [Guard(1, "left", False), Guard(2, "left", True), Guard(2, "found", True)]
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disable": ["batch_prefil"]}, "batch_prefil.*no pass"),
        ({"nested": "tvm"}, "nested is 'tvm'"),
        ({"stop_after": -1}, "stop_after is -1"),
        ({"dispable": []}, "unknown option 'dispable'"),
        ({"disable": "batch_prefill"}, "disable is 'batch_prefill'; it must be a list or tuple"),
        ({"disable": None}, "disable is None; it must be a list or tuple"),
        ({"tile_bytes": None}, "tile_bytes is None; it must be a whole number"),
        ({"dump_dir": 5}, "dump_dir is 5; it must be the path of a folder"),
        ({"stop_after": True}, "stop_after is True; it must be a whole number"),
        ({"cache": "no"}, "cache is 'no'; it must be True or False"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        nsa_compile.compile(cumulative, **options)


def test_check_compares_values_on_the_first_inputs(monkeypatch):
    x = torch.randn(5, 2)
    _, report = run(cumulative, x, 5, check=True)
    assert all(p.max_abs_error is not None for p in report.passes if p.changed)

    # Now a pass that reads the wrong rows.
    monkeypatch.setattr(batched_body, "_take", lambda tensor, rows, constant: tensor[:1].expand(len(rows), -1))
    with pytest.raises(Exception, match="pass batch_prefill: it changed values on real inputs"):
        run(cumulative, x, 5, check=True)


def test_a_folder_for_dumps_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ScanNotCompiled, match=r"^dump_dir is '.*file': File exists; name a folder"):
        run(cumulative, torch.randn(5, 2), 5, dump_dir=str(tmp_path / "file"))


def test_dumps_are_numbered_readable_python(tmp_path):
    run(cumulative, torch.randn(5, 2), 5, dump_dir=str(tmp_path))
    *names, report = sorted(p.name for p in tmp_path.iterdir())
    asked_for = [(i, p.name) for i, p in enumerate(pipeline()) if p.option is None]
    expected = [f"{i:02d}_{name}_{when}.py" for i, name in asked_for for when in ("after", "before")]
    assert names == expected
    assert "scan" in (tmp_path / names[1]).read_text()
    assert Report.from_dict(json.loads((tmp_path / report).read_text())) == nsa_compile.last_report()
    (after,) = tmp_path.glob("*_batch_prefill_after.py")
    assert "torch.ops.aten" in after.read_text()


def test_graph_size_does_not_depend_on_the_length():
    sizes = {run(cumulative, torch.randn(s, 2), s)[1].scans[0].nodes_after for s in (5, 9, 40)}
    assert len(sizes) == 1


def test_another_length_recompiles_instead_of_reusing_the_wrong_tables():
    torch._dynamo.reset()
    fast = torch.compile(cumulative, backend="nsa_compile", options={"nested": "eager"})
    for s in (5, 9, 6):
        x = torch.randn(s, 2)
        torch.testing.assert_close(fast(x, s), cumulative(x, s))


def test_key_depends_on_options():
    assert pipeline_key(Options()) == pipeline_key(Options())
    assert pipeline_key(Options()) != pipeline_key(Options(disable=["batch_prefill"]))


@pytest.mark.parametrize("changed", ["passes/batch_prefill.py", "cache.py", "ops/window/cpu.cpp"])
def test_key_depends_on_the_packages_sources(changed, monkeypatch, tmp_path):
    package = tmp_path / "nsa_compile"
    shutil.copytree(Path(nsa_compile.__file__).parent, package, ignore=shutil.ignore_patterns("ops"))
    (package / "ops" / "window").mkdir(parents=True)
    (package / "ops" / "window" / "cpu.cpp").write_text("// an operator")
    monkeypatch.setattr("nsa_compile.passes.pipeline.__file__", str(package / "passes" / "pipeline.py"))
    before = pipeline_key(Options())
    with (package / changed).open("a") as file:
        file.write("\n")
    assert pipeline_key(Options()) != before


USERS_PASS = """
import functools

def helper(gm):
    return False

def plain(gm, context):
    "A pass of a user's own."
    return helper(gm)

def make(number):
    def closure(gm, context):
        return bool(number)
    return closure

closure = make(0)
partial = functools.partial(plain)
"""


@pytest.fixture
def users_pass(monkeypatch, request, tmp_path):
    """`users_pass("plain")` registers that function of a module outside the package; returns the module's path."""
    path = tmp_path / "users_pass.py"
    path.write_text(USERS_PASS)
    spec = importlib.util.spec_from_file_location("users_pass", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "users_pass", module)

    def add(name: str) -> Path:
        request.addfinalizer(register(name)(getattr(module, name)).unregister)
        return path

    return add


def test_key_depends_on_the_source_of_a_users_pass(users_pass):
    without = pipeline_key(Options())
    path = users_pass("plain")
    before = pipeline_key(Options())
    assert before != without
    assert pipeline_key(Options()) == before
    path.write_text(USERS_PASS.replace("return False", "return 1 == 2"))  # a helper in the same file
    assert pipeline_key(Options()) != before


@pytest.mark.deep(but=["closure"])
@pytest.mark.parametrize("name", ["closure", "partial", "plain"])
def test_a_pass_without_readable_source_is_never_cached(users_pass, name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    path = users_pass(name)
    if name == "plain":
        path.unlink()
        linecache.clearcache()
    with pytest.raises(Uncacheable, match=f"pass {name}"):
        pipeline_key(Options())
    for _ in range(2):
        _, report = run(cumulative, torch.randn(5, 2), 5)
        assert not report.cache_hit
        assert f"pass {name}" in report.notes[0]
    assert not (tmp_path / "cache" / "nsa_compile").exists()


def test_an_object_without_a_name_makes_a_graph_uncacheable():
    """Its address is all that its repr tells, and another process has another object there."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.add, (x, object())))
    with pytest.raises(Uncacheable, match="no name"):
        cache_key(SimpleNamespace(graph=graph), Options())


WARM_START = """
    import sys, torch, nsa_compile
    from pathlib import Path
    def f(x):
        def step(window, row):
            window = torch.cat([window[1:], row[None]])
            return window, window.sum(0)
        return nsa_compile.scan(step, x.new_zeros(3, 2), x)[1]
    torch.manual_seed(0)
    x = torch.randn(8, 2)
    cache, *limits = sys.argv[1:]
    for limit in limits:
        if limit == "damage":
            for path in Path(cache, "nsa_compile").glob("*/*"):
                path.write_bytes(b"damaged")
            continue
        torch._dynamo.reset()
        options = {"nested": "eager", "max_guard_bytes": int(limit)}
        y = torch.compile(f, backend="nsa_compile", options=options)(x)
        assert torch.equal(y, f(x))
        print(nsa_compile.last_report().cache_hit)
"""


@pytest.mark.deep
def test_warm_start_runs_no_pass_and_a_changed_option_does(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(WARM_START))

    def hits(*limits: str) -> list[str]:
        """Whether each compilation in a process of its own was a hit."""
        done = subprocess.run([sys.executable, script, cache, *limits], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert hits("1000000") == ["False"]
    assert hits("1000000", "10000000", "damage", "1000000", "1000000") == ["True", "False", "False", "True"]


def test_a_floor_lost_on_its_way_is_no_kept_score():
    """Step t's only causal score is -inf already: softmax spreads over rows that are not written yet."""

    def f(x, bias):
        rows = torch.arange(6)

        def step(cache, xs):
            cache = torch.where((rows == xs["t"])[:, None], xs["x"], cache)
            scores = (cache @ xs["x"]).masked_fill(rows == xs["t"], float("-inf")) - bias
            scores = torch.where(rows <= xs["t"], scores, torch.finfo(scores.dtype).min)
            return cache, scores.softmax(-1) @ cache

        return nsa_compile.scan(step, x.new_full((6, 2), 3.0), {"x": x, "t": torch.arange(6)})[1]

    args = torch.randn(6, 2, dtype=torch.float64), torch.randn((), dtype=torch.float64)
    actual, report = run(f, *args, cache=False)
    torch.testing.assert_close(actual, f(*args))
    assert "attention of 6 queries to 12 keys" in str(report.passes)  # those of the first step and those of all steps
