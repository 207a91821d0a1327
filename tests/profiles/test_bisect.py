"""Wrong, raising and slow rewrites among right ones, and `passes bisect` to name each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import fx

import nsa_compile
from nsa_compile.cli import cli, main
from nsa_compile.errors import UserError
from nsa_compile.passes.pipeline import register
from nsa_compile.profiles import bisect

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def program(x):
    """Three sines and a loop, so that there are rewrites of the package's own passes, too."""

    def step(window, row):
        window = torch.cat([window[1:], row[None]])
        return window, window.sum(0)

    y = nsa_compile.scan(step, x.new_zeros(3, x.shape[1]), x)[1]
    return torch.sin(y) + torch.sin(2 * y) + torch.sin(3 * y)


def equals_the_loop(options):
    torch.testing.assert_close(nsa_compile.compile(program, **options)(X), program(X))


@pytest.fixture
def rewriting(request):
    """`rewriting(replacement, fault)` registers a pass that asks before it replaces each sine by `replacement(gm, n)`,
    and leaves the one of number `fault` to `replacement` alone; returns it."""

    def add(replace, fault: int | None, name: str = "sines", ask: bool = True):
        @register(name)
        def sines(gm: fx.GraphModule, context) -> bool:
            """Give each sine another form."""
            found = 0
            for node in [n for n in gm.graph.nodes if getattr(n.target, "__name__", "").startswith("sin")]:
                found += 1
                if ask and not context.may_rewrite():
                    break
                with gm.graph.inserting_after(node):
                    new = gm.graph.node_copy(node)
                node.replace_all_uses_with(new)
                gm.graph.erase_node(node)
                if found == fault:
                    replace(gm, new)
                context.match(f"sine {found}", "another node for it")
            gm.recompile()
            return found > 0 and (not ask or bool(context.current.matches))

        request.addfinalizer(sines.unregister)

    return add


def scale(gm, node):
    """1.01 times what it should be."""
    with gm.graph.inserting_after(node):
        new = gm.graph.call_function(torch.mul, (node, 1.01))
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    new.args = (node, 1.01)


def test_a_healthy_pipeline_has_nothing_to_blame():
    assert bisect(equals_the_loop, nested="eager") is None


@pytest.mark.deep(but=["2"])
@pytest.mark.parametrize("fault", [1, 2, 3])
def test_a_wrong_rewrite_among_right_ones(rewriting, fault):
    rewriting(scale, fault)
    blame = bisect(equals_the_loop, nested="eager")
    assert blame.pass_name == "sines"
    assert blame.match == f"sine {fault}: another node for it"
    assert "1.01" not in blame.before
    assert "1.01" in blame.after
    assert "program" in blame.before, "the user's source lines"
    # What it says to run again fails, and with one rewrite less does not.
    torch._dynamo.reset()
    with pytest.raises(AssertionError):
        equals_the_loop({**blame.options, "cache": False})
    torch._dynamo.reset()
    equals_the_loop({**blame.options, "cache": False, "stop_after": blame.rewrite - 1})


@pytest.mark.deep
def test_a_pass_that_does_not_ask_is_blamed_as_a_whole(rewriting):
    rewriting(scale, 2, ask=False)
    blame = bisect(equals_the_loop, nested="eager")
    assert (blame.pass_name, blame.rewrite, blame.match) == ("sines", None, None)
    assert "1.01" in blame.after


@pytest.mark.deep
def test_a_pass_that_raises_in_one_rewrite(rewriting):
    def fail(gm, node):
        raise RuntimeError("no such sine")

    rewriting(fail, 2)
    blame = bisect(lambda options: bool(nsa_compile.compile(program, **options)(X).isfinite().all()), nested="eager")
    assert blame.pass_name == "sines"
    assert blame.rewrite is not None
    assert blame.problem == "RuntimeError: no such sine"
    assert blame.after is None
    assert "sin" in blame.before


@pytest.mark.deep
def test_a_wrong_pass_of_the_package_is_blamed_in_the_middle_of_the_pipeline(monkeypatch):
    from nsa_compile.analyses import batched_body

    monkeypatch.setattr(batched_body, "_take", lambda tensor, rows, constant: tensor[:1].expand(len(rows), -1))
    blame = bisect(equals_the_loop, nested="eager")
    assert blame.pass_name == "batch_prefill"
    assert blame.match.startswith("scan: 6 steps became")


def test_a_check_that_fails_without_passes_blames_none():
    blame = bisect(lambda options: False, nested="eager")
    assert blame.pass_name is None
    assert blame.problem == "the check returned False"


@pytest.mark.deep
def test_a_check_that_changes_its_mind_is_refused(rewriting):
    rewriting(scale, None)
    answers = iter([False, True, True, True])
    with pytest.raises(UserError, match="judge the same every time"):
        bisect(lambda options: equals_the_loop(options) or next(answers, True), nested="eager")


# ------------------------------------------------------------------------------------------------- the command


def command(overrides, *arguments):
    sets = [word for override in overrides for word in ("--set", override)]
    return CliRunner().invoke(cli, ["passes", "bisect", *arguments, *sets], catch_exceptions=False)


WINDOW = "model.branches=[window]"  # a small loop, which compiles quickly


@pytest.fixture
def eager(tiny_overrides):
    return tiny_overrides(**{"compile.nested": "eager"})


def test_the_command_on_a_healthy_model(eager):
    result = command([*eager, WINDOW], "--seq-len", "24")
    assert result.exit_code == 0, result.output
    assert "nothing to blame" in result.stdout


@pytest.mark.deep
def test_the_command_names_a_wrong_rewrite_of_a_model(eager, request, tmp_path):
    """The window loses its mask."""

    @register("unmask")
    def unmask(gm: fx.GraphModule, context) -> bool:
        """Let attention see everything, the future as well."""
        for node in gm.graph.nodes:
            if "attn_mask" in node.kwargs and context.may_rewrite():
                node.kwargs = {k: v for k, v in node.kwargs.items() if k != "attn_mask"}
                context.match(node.name, "without a mask")
        gm.recompile()
        return bool(context.current.matches)

    request.addfinalizer(unmask.unregister)
    out = tmp_path / "blame"
    result = command([*eager, WINDOW], "--seq-len", "16", "--json", "--out", str(out))
    assert result.exit_code == 1, result.output
    blame = json.loads(result.stdout)["blame"]
    assert blame["pass_name"] == "unmask"
    assert blame["match"].endswith("without a mask")
    assert "what rounding explains" in blame["problem"]
    assert (out / "before.py").read_text() == blame["before"]
    assert (out / "after.py").read_text() == blame["after"]


SLOW = """
import time, torch
from torch.library import custom_op

@custom_op("test_bisect::dawdle", mutates_args=())
def dawdle(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.3)
    return x.clone()

dawdle.register_fake(lambda x: torch.empty_like(x))
dawdle.register_autograd(lambda ctx, g: g)
"""


@pytest.mark.deep
def test_the_command_names_a_slow_rewrite(eager, request):
    exec(compile(SLOW, "slow.py", "exec"), {})

    @register("dawdling")
    def dawdling(gm: fx.GraphModule, context) -> bool:
        """Put a slow operator behind the output."""
        if not context.may_rewrite():
            return False
        output = gm.graph.output_node()
        (result,) = output.args[0]
        with gm.graph.inserting_before(output):
            new = gm.graph.call_function(torch.ops.test_bisect.dawdle.default, (result,))
        new.meta = dict(result.meta)
        output.args = ((new,),)
        gm.recompile()
        context.match(result.name, "a nap behind it")
        return True

    request.addfinalizer(dawdling.unregister)
    dense = [*eager, "model.attention=dense"]  # without a loop each of its many compilations is quick
    result = command(dense, "--check", "slow", "--seq-len", "16", "--repeats", "3")
    assert result.exit_code == 1, result.output
    assert "pass dawdling, rewrite" in result.stdout
    assert "a nap behind it" in result.stdout


def test_a_script_of_the_users_own(tmp_path, rewriting):
    rewriting(scale, 2)
    script = tmp_path / "failing.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch, nsa_compile\n"
        "def f(x):\n    return torch.sin(x) + torch.sin(2 * x)\n"
        "def check(options):\n"
        "    x = torch.ones(3)\n"
        "    return torch.allclose(nsa_compile.compile(f, **options)(x), f(x))\n"
    )
    result = command(["compile.nested=eager"], "--script", f"{script}:check", "--json")
    assert result.exit_code == 1, result.output
    blame = json.loads(result.stdout)["blame"]
    assert blame["pass_name"] == "sines"
    assert blame["match"] == "sine 2: another node for it"
    assert str(script) in blame["before"], "the graph names the line of the script"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--script", "nowhere.py:check"], "there is no file 'nowhere.py'"),
        (["--script", "nowhere.py"], "must be FILE:FUNCTION"),
        (["--script", f"{__file__}:nothing"], "has no function 'nothing'"),
        (["--check", "slow", "--script", "a.py:f"], "two checks"),
        (["--check", "speed"], "'speed' is not one of"),
        (["--set", "train.device=cuda"], "needs a GPU and torch finds no GPU here"),
        (["--check", "slow", "--factor", "inf"], "'inf' is not a finite number"),
        (["--seq-len", "4"], "model.pattern.compress_block"),
        (["--out", "/nowhere/blame"], "'/nowhere' is not a directory"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as left:
        main(["passes", "bisect", *arguments, "--set", "compile.nested=eager"])
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
