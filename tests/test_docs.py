"""The code in the README and the documentation runs, and what they show is what comes out."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import linecache
import re
import tomllib
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
import yaml
from click.testing import CliRunner

import nsa_compile
from benchmarks import draw_lengths
from nsa_compile.cli import LAZY_COMMANDS, cli
from nsa_compile.ops import dispatch
from nsa_compile.ops.dispatch import KERNELS
from nsa_compile.passes.pipeline import REGISTRY, pipeline

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The tutorial runs as a notebook.
PAGES = [
    page
    for page in sorted(DOCS.rglob("*.md"))
    if page.name != "tutorial.md" and BLOCK.search(page.read_text(encoding="utf-8"))
]


@pytest.fixture(autouse=True)
def _registry_as_before():
    """Whatever happens half way through a page, no pass of it stays registered."""
    pipeline()
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _kernels_as_before(monkeypatch):
    for operator, kernels in KERNELS.items():
        monkeypatch.setitem(KERNELS, operator, dict(kernels))
    yield
    dispatch._best.cache_clear()


@pytest.fixture(autouse=True)
def _no_inductor(monkeypatch):
    """Programs are compiled by the passes alone where a page does not say otherwise, and are not kept."""
    quick = functools.partial(nsa_compile.compile, nested="eager", cache=False)
    monkeypatch.setattr(nsa_compile, "compile", quick)


@pytest.mark.deep(but=["experiments.md"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    before = dict(REGISTRY)
    namespace: dict[str, object] = {"__name__": "__docs__"}
    torch.manual_seed(0)
    for block in BLOCK.finditer(text):
        # Leading empty lines, so that a traceback names the line of the page.
        source = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        # As in a file of its own: what this one imports from __future__ is not for the page.
        exec(compile(source, str(page), "exec", dont_inherit=True), namespace)
    assert before == REGISTRY, "the page leaves its passes registered"


def test_the_readme_is_short():
    assert len(README.splitlines()) < 200


def test_the_version_is_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.search(r"^## (\S+?),", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest
    assert {project["version"], citation["version"], newest[1]} == {nsa_compile.__version__}


@pytest.mark.deep
def test_the_readme_shows_what_explain_says_of_its_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    program = BLOCK.search(README)
    assert program
    Path("my_step.py").write_text(program[1], encoding="utf-8")
    result = CliRunner().invoke(cli, ["passes", "explain", "my_step.py"], catch_exceptions=False)
    printed = result.output.splitlines()
    shown = re.search(r"^```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert shown
    rest = iter(printed)
    for line in filter(None, shown[1].splitlines()):
        assert line in rest, f"{line} is not printed, or not in this order"


def test_the_numbers_of_the_readme_are_those_of_the_records():
    records = ROOT / "benchmarks" / "results"

    def rows(name):
        return json.loads((records / f"{name}.json").read_text(encoding="utf-8"))["results"]

    loop = {row["seq_len"]: row["ratio"] for row in rows("prefill")}
    layer = {row["seq_len"]: row["ratio"] for row in rows("attention") if row["direction"] == "forward+backward"}
    answers = {row["variant"]: row["accuracy"] for row in rows("needle")}
    for share in ("all branches", "without selected"):
        assert f"{answers[share]:.0%}".replace("%", " %") in README.replace("**", "")
    bits = {(row["seq_len"], row["attention"]): row for row in rows("quality") if row["steps"] == 300}
    for length in (512, 1024):
        nsa, dense = (bits[length, attention]["bits_per_byte"]["mean"] for attention in ("nsa", "dense"))
        assert f"{nsa:.2f} against {dense:.2f}" in README
    for ratio in (f"{loop[1024]:.0f} ×", f"{loop[128]:.0f} ×", f"{layer[32768]:.1f} ×", f"{layer[8192]:.1f} ×",
                  f"{layer[2048]:.2f} ×", f"{layer[512]:.2f} ×"):  # fmt: skip
        assert ratio in README


def test_what_packed_documents_cost_is_what_was_recorded():
    record = json.loads((ROOT / "benchmarks" / "results" / "varlen.json").read_text(encoding="utf-8"))
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    equal, drawn = record["results"]
    shortest, longest = min(drawn["lengths"]), max(drawn["lengths"])
    places = drawn["places"] / record["settings"]["tokens"]
    assert f"{equal['ratio']:.2f} × for {equal['lengths'][0]} tokens each" in page
    assert f"{drawn['ratio']:.2f} × for lengths drawn from {shortest} to {longest:,}" in page
    assert f"whose rows have {places:.2f} × as many places" in page


def test_what_the_zoo_and_loops_of_other_people_take_is_what_was_recorded():
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "benchmarks" / "results" / "zoo.json").read_text(encoding="utf-8"))["results"]
    ratios = {row["name"]: row["ratios"] for row in rows}
    names = {"linear attention": "linear attention", "gla": "GLA", "mamba2": "Mamba-2", "gated delta rule": None}
    of = {shown or name: ratios[f"recurrences/{name}/4096"] for name, shown in names.items()}
    assert ", ".join(f"{name} {found['eager']:.0f} ×" for name, found in of.items()) in page
    assert ", ".join(f"{name} {found['fla']:.1f} ×" for name, found in of.items() if "fla" in found) in page
    keys = {name: 1 / ratios[f"selection/{name}/8192"]["as many keys"] for name in ("moba", "infllm-v2", "msa")}
    assert f"MoBA {keys['moba']:.1f} times as long" in page
    assert f"InfLLM-V2 {keys['infllm-v2']:.1f} times; MSA" in page
    assert f"{keys['msa']:.0f} times |" in page
    dsa = [ratios[f"selection/dsa/{length}"]["SDPA, causal"] for length in (8192, 32768)]
    assert f"| {dsa[0]:.1f} × at 8,192 tokens, {dsa[1]:.1f} × at 32,768 |" in page
    loops = json.loads((ROOT / "benchmarks" / "results" / "loops.json").read_text(encoding="utf-8"))["results"]
    of_loops = {r["program"]: r["loop_processor"]["median_s"] / r["compiled_processor"]["median_s"]
                for r in loops if r["seq_len"] == 1024 and "compiled_processor" in r}  # fmt: skip
    assert (
        f"`DynamicCache` {of_loops['llama']:.0f} ×, fla's gated delta rule {of_loops['gated_delta_rule']:.0f} ×" in page
    )
    assert f"gpt-fast (forward) {of_loops['gpt_fast']:.0f} ×, lucidrains' NSA {of_loops['lucidrains']:.1f} ×" in page


def test_what_converting_costs_is_what_was_recorded():
    record = json.loads((ROOT / "benchmarks" / "results" / "convert.json").read_text(encoding="utf-8"))
    page = (DOCS / "fine-tuning.md").read_text(encoding="utf-8")
    rows = [row["val_loss"] for row in record["results"]]
    for name in rows[0]:
        found, beyond = [row[name] for row in rows], [row[name] - row["dense"] for row in rows]
        line = f"| {name} | {mean(found):.3f} | {mean(beyond):+.3f} ± {stdev(beyond):.3f} |"
        assert line in page
    assert len(rows) == 3


def test_the_picture_is_drawn_from_the_records():
    for theme, colors in draw_lengths.THEMES.items():
        assert (DOCS / "images" / f"lengths-{theme}.svg").read_text(encoding="utf-8") == draw_lengths.draw(colors)


def test_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert len(pages) > 20
    lost = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text):
            file, _, anchor = target.partition("#")
            aim = page.parent / file if file else page
            if not file.startswith("http") and not (aim.exists() and (not anchor or anchor in anchors(aim))):
                lost.append(f"{page.relative_to(ROOT)}: {target}")
    assert lost == []


def anchors(page):
    """The anchors of a page's headings, as both a forge and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_table_of_contents():
    contents = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)["nav"]
    named = re.findall(r"[\w/-]+\.md", json.dumps(contents))
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


@pytest.mark.deep
def test_the_notebook_is_the_tutorial_and_the_drawings_are_those_of_its_graphs(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    text = (ROOT / "examples" / "tutorial.ipynb").read_text(encoding="utf-8")
    assert text == importlib.import_module("notebook").notebook(page), "python docs/notebook.py writes it"
    defined: dict[str, object] = {"__name__": "__docs__"}
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            # As notebooks do: `nsa_compile.loop` reads the source of a function.
            linecache.cache[cell["id"]] = len(source), None, source.splitlines(keepends=True), cell["id"]
            exec(compile(source, cell["id"], "exec"), defined)
    drawn = importlib.import_module("draw_graphs").draw(defined)
    assert "attention-lower_attention.svg" in drawn
    for name, picture in drawn.items():
        assert (DOCS / "images" / name).read_text(encoding="utf-8") == picture, "python docs/draw_graphs.py draws it"


def test_the_reference_has_every_key_and_every_command(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    made = importlib.import_module("reference_pages").on_page_markdown
    keys = json.loads(CliRunner().invoke(cli, ["config", "keys", "--json"]).stdout)["keys"]
    shown = made((DOCS / "reference" / "configuration.md").read_text(encoding="utf-8"))
    assert keys
    assert [key["key"] for key in keys if f"| `{key['key']}` |" not in shown] == []
    shown = made((DOCS / "reference" / "cli.md").read_text(encoding="utf-8"))
    assert [name for name in LAZY_COMMANDS if f"\n### nsa-compile {name}\n" not in shown] == []
    assert "#### nsa-compile passes explain\n" in shown


@pytest.mark.deep
def test_the_reasons_of_the_page_on_declines_are_those_the_compiler_gives():
    page = (DOCS / "declined.md").read_text(encoding="utf-8")
    reasons = re.findall(r"^\| (\w.*?) \|", page, re.MULTILINE)[1:]
    texts = [
        node.value
        for path in (ROOT / "nsa_compile").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(reasons) == 8
    for part in (part.strip() for reason in reasons for part in reason.split("…")):
        assert any(part in text for text in texts), part
