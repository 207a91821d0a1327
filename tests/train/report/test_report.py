"""The report of a run, of whole ones and of what is left of others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from nsa_compile.cli import _run
from nsa_compile.config import load_config
from nsa_compile.models.nsa_variant import LayerStatistics
from nsa_compile.page import render
from nsa_compile.train.checkpoints.checkpoint import save_checkpoint
from nsa_compile.train.records.rows import PHASES, CsvLog, EvalRow, JsonLog, StepRow, phase_columns
from nsa_compile.train.records.run_directory import lock_run_directory
from nsa_compile.train.report.report_page import blocks
from nsa_compile.train.report.run_record import read_run
from nsa_compile.train.report.summary import size_and_result_rows

pytest.importorskip("matplotlib")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
STEPS = 6


class Page(HTMLParser):
    """What a browser would make of a page: its elements, its text, and what it refers to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def make_run(tiny_overrides, tmp_path):
    """Writes the files of a run that has done `done` of 6 steps."""

    def make(done: int = STEPS, name: str = "tiny-20260101-120000") -> Path:
        directory = tmp_path / "runs" / name
        directory.mkdir(parents=True)
        config = load_config(overrides=tiny_overrides(**{"train.steps": STEPS}))
        (directory / "config.resolved.yaml").write_text(config.to_yaml())
        (directory / "env.json").write_text(json.dumps({"machine": {"device": "cpu"}, "matmul_peak_flops": 1e11}))
        phases = phase_columns(dict.fromkeys(PHASES, 0.1))
        with CsvLog(directory / "training.csv", StepRow) as training:
            for step in range(1, done + 1):
                training.append(
                    StepRow(step, 5.5 - 0.1 * step, 1e-3, 1.0, 1000.0 + step, 0.25, 0.6, 3 * 2**30, **phases)
                )
        with CsvLog(directory / "val.csv", EvalRow) as validation:
            for step in range(0, done + 1, 2):
                validation.append(EvalRow(step, 5.4375, step / 8))
        with JsonLog(directory / "attention.jsonl") as attention:
            for step in range(2, done + 1, 2):
                for layer in range(2):
                    row = LayerStatistics(layer, 0.25, 0.5, 0.5, 0.1, 0.6, 0.3, 0.9, 0.8, 40.0, 9.0, 37.0, 99.0, 0.5)
                    attention.append({"step": step, **asdict(row)})
        save_checkpoint(directory / "checkpoints", done, {"state.pt": {}, "rank-00000.pt": {}}, 5.4375)
        return directory

    return make


def report(directory: Path, *arguments: str) -> tuple[int, Page]:
    code = _run(["report", str(directory), *arguments])
    return code, Page(directory / "report.html")


def page_without_pictures(directory: Path, tmp_path: Path) -> Page:
    """Drawing is what takes the time."""
    path = tmp_path / "page.html"
    record = read_run(directory)
    path.write_text(render(directory.name, directory, blocks(record, []), record.problems), encoding="utf-8")
    return Page(path)


def problems(directory: Path) -> list[str]:
    return read_run(directory).problems


@pytest.mark.deep
def test_the_page_needs_nothing_but_itself(make_run):
    directory = make_run()
    code, page = report(directory)
    assert code == 0
    references = {value for name, value in page.attributes if name in ("src", "href", "srcset", "data", "action")}
    own = {f"#{value}" for name, value in page.attributes if name == "id"}
    assert references, "charts have markers"
    assert references <= own
    assert page.elements.count("svg") == 8
    assert not {"script", "link", "iframe", "object", "form"} & set(page.elements)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    names = {"loss", "accuracy", "optimizer", "throughput", "phases", "memory", "gates", "selection"}
    assert {path.stem for path in (directory / "report_plots").iterdir()} == names


@pytest.mark.deep
def test_charts_have_text_and_the_colours_of_the_theme(make_run):
    directory = make_run()
    report(directory)
    content = (directory / "report.html").read_text(encoding="utf-8")
    charts = re.findall("<svg.*?</svg>", content, re.DOTALL)
    assert all(">optimizer step</text>" in chart for chart in charts)
    for chart in charts:
        assert not re.search(r"(?:fill|stroke): (?:#[01]{6}|black|white)", chart), "unseen in the dark, or in the light"
        # A phone shows about 360 of a picture's units: letters of 9 are legible there.
        assert 300 < float(chart.split()[3]) < 380
    declared = set(re.findall(r"(--[a-z0-9]+):", content))
    assert set(re.findall(r"var\((--[a-z0-9]+)\)", content)) <= declared


@pytest.mark.deep
def test_a_pointer_over_a_chart_reads_its_values(make_run):
    directory = make_run()
    report(directory)
    content = (directory / "report.html").read_text(encoding="utf-8")
    (loss,) = re.findall(r'<figure id="loss">.*?</figure>', content, re.DOTALL)
    readings = re.findall(r'<rect class="reading" x="(.*?)" .*?width="(.*?)" .*?<title>(.*?)</title>', loss)
    rows = (directory / "training.csv").read_text().splitlines()
    steps = [int(row.split(",")[0]) for row in rows[1:]]
    read = {int(title.removeprefix("optimizer step ").split(":")[0]): title for _, _, title in readings}
    assert set(steps) <= set(read)
    written = dict(zip(rows[0].split(","), rows[-1].split(","), strict=True))
    assert f"{float(written['loss']):.4g}" in read[steps[-1]]
    ends = [(float(x), float(x) + float(width)) for x, width, _ in readings]
    assert all(abs(end - begin) < 0.3 for (_, end), (begin, _) in pairwise(ends)), "they leave no gap"
    (phases,) = re.findall(r'<figure id="phases">.*?</figure>', content, re.DOTALL)
    assert re.search(r"<title>optimizer step \d+: data .*, forward .*, other .*</title>", phases)


@pytest.mark.parametrize(
    ("attention", "pattern"),
    [
        ({"attention": "dense"}, None),
        ({"attention": "dsa", "num_selected": 16}, "k = 16 selected tokens"),
        ({"attention": "nsa", "num_selected": 4, "window": 16}, "n = 4 selected blocks, w = 16"),
        ({}, None),
    ],
)
def test_a_pattern_is_told_as_the_attention_has_it(make_run, attention, pattern):
    summary = read_run(make_run()).summary
    sizes = dict.fromkeys(("attention", "num_selected", "window")) | attention
    assert dict(size_and_result_rows({**summary, **sizes}))["pattern"] == (pattern or "")


def test_a_run_has_no_size_that_its_attention_does_not_use(tiny_overrides):
    sizes = load_config(overrides=tiny_overrides(**{"model.attention": "dense"})).sizes()
    assert (sizes["num_selected"], sizes["window"]) == (None, None)


@pytest.mark.parametrize(
    ("evaluated", "expected"), [(6, "5.5 at the end"), (4, "5.5 at step 4"), (0, ""), (None, "5.5 at the end")]
)
def test_a_validation_loss_names_its_step(make_run, evaluated, expected):
    summary = read_run(make_run()).summary | {"val_loss_start": 6.0, "val_loss_end": 5.5, "val_step_end": evaluated}
    text = dict(size_and_result_rows(summary))["validation loss"]
    assert text.replace("000", "") == ", ".join(filter(None, ("6.0 at the start", expected)))


def test_the_page_tells_every_size_and_result(make_run):
    directory = make_run()
    (directory / "watchdog.jsonl").write_text('{"time": 0, "rule": "stall", "message": "no step for 60 s"}\n')
    _, page = report(directory)
    for expected in (
        "finished",
        "n = 3 selected blocks, w = 8",
        "2 × 1 accumulated",
        "1,005 tokens/s over the last 3 steps, ± 1 from step to step",
        "25.0% of 100 GFLOP/s",
        "5.4375 at the end",
        "75.0%",
        "3.00 GiB",
        "no step for 60 s",
        "best",
        "num_selected: 3",
        "machine.device",
        "100.0 GFLOP/s",
    ):
        assert expected in page.text
    assert "Missing or damaged" not in page.text
    # Counted from the configuration, as no summary tells it.
    import torch

    from nsa_compile.models import NSATransformer

    with torch.device("meta"):
        model = NSATransformer(load_config(str(directory / "config.resolved.yaml")).model)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,}" in page.text
    assert page.text.count("75.0%") == 1, "the share of right answers is told once"


def test_json_is_one_object(make_run, tmp_path, capsys):
    directory = make_run()
    out = tmp_path / "elsewhere.html"
    assert _run(["report", str(directory), "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"] == "finished"
    assert result["summary"]["tokens_per_s_mean"] == pytest.approx(1005.0, abs=0.01)
    assert result["problems"] == []
    assert Path(result["report"]) == out
    assert "loss.png" in {Path(plot).name for plot in result["plots"]}
    assert all(Path(plot).is_file() for plot in result["plots"])
    assert sorted(path.name for path in directory.glob("report*")) == []


def test_a_run_at_work_has_half_a_line_and_no_summary(make_run, tmp_path):
    directory = make_run(3)
    for name in ("training.csv", "attention.jsonl"):
        with (directory / name).open("a") as file:
            file.write('{"step": 4, "la' if name.endswith("jsonl") else "4,5.1,0.00")
    with lock_run_directory(directory):
        page = page_without_pictures(directory, tmp_path)
        assert "running: step 3 of 6" in page.text
    assert "Missing or damaged" not in page.text
    assert read_run(directory).status.startswith("stopped at step 3 of 6 without a summary")


def test_a_run_that_has_only_begun(make_run):
    directory = make_run(0)
    for name in ("val.csv", "attention.jsonl", "env.json"):
        (directory / name).unlink()
    shutil.rmtree(directory / "checkpoints")
    code, page = report(directory)
    assert code == 0
    assert "No step has been recorded." in page.text
    assert problems(directory) == ["val.csv is missing", "env.json is missing"]


def test_an_interrupted_and_resumed_run_says_so(make_run, tmp_path):
    directory = make_run(4)
    (directory / "env.from-step-2.json").write_text('{"python": "3.12.1"}')
    summary = {"steps": 4, "interrupted": True, "stopped_by": "SIGTERM", "parameters": 12345, "world_size": 2}
    (directory / "summary.json").write_text(json.dumps({**summary, "best_unigram_loss": 3.25}))
    page = page_without_pictures(directory, tmp_path)
    assert "interrupted by SIGTERM at step 4 of 6; resumed from step 2" in page.text
    assert "12,345" in page.text
    assert "3.2500" in page.text
    assert "world size" in page.text
    assert "3.12.1" in page.text
    # Throughput is that of the part after the resumption.
    assert read_run(directory).summary["tokens_per_s_steps"] == 1


def test_the_summary_of_an_earlier_part_is_not_believed(make_run):
    directory = make_run(4)
    (directory / "summary.json").write_text('{"steps": 2, "interrupted": true, "parameters": 12345}')
    record = read_run(directory)
    assert record.status.startswith("stopped at step 4")
    assert record.summary["parameters"] != 12345


DAMAGES = [
    ("training.csv", b"\x00\xff\x00", None),
    ("training.csv", b"step,loss\n1,2\n", "training.csv: line 2 cannot be read"),
    ("val.csv", b"step,val_loss\n0,5.5\nx,1\n2,5.0\n3\n4,1e999\n", "val.csv: line 3 and 1 more cannot be read"),
    ("val.csv", b"step,val_loss\n" + b"9" * 40 + b",5.5\n0,1e300\n", "val.csv: line 2 and 1 more cannot be read"),
    ("attention.jsonl", b'{"step": 1}\n', "attention.jsonl: line 1 cannot be read"),
    ("attention.jsonl", b"[" * 100_000 + b"\n", "attention.jsonl: line 1 cannot be read"),
    ("watchdog.jsonl", b"oops\n", "watchdog.jsonl: line 1 cannot be read"),
    ("env.json", b"{", "env.json cannot be read"),
    ("env.json", b"[]", "env.json cannot be read: it must hold an object"),
    ("env.json", b'{"a":' * 5000 + b"1" + b"}" * 5000, "env.json cannot be read"),
    ("summary.json", b'{"steps": 6, "parameters": "many"}', "summary.json: parameters must be a number"),
    ("summary.json", b'{"steps": 6, "mfu": NaN, "notes": [NaN]}', None),
    ("config.resolved.yaml", b"train: {steps: -1}", "config.resolved.yaml: the section model is missing"),
    ("config.resolved.yaml", b"\xff\xfe: [", "config.resolved.yaml: configuration file"),
    ("checkpoints/step-00000006/manifest.json", b"{}", "checkpoints/step-00000006: "),
]


@pytest.mark.deep(
    but=[
        "training.csv-\\x00\\xff\\x00-None",
        "env.json-content9-env.json cannot be read",
        "config.resolved.yaml-train: {steps: -1}-config.resolved.yaml: the section model is missing",
        "config.resolved.yaml-\\xff\\xfe: [-config.resolved.yaml: configuration file",
    ]
)
@pytest.mark.parametrize(("name", "content", "expected"), DAMAGES)
def test_damaged_files_are_named_and_the_rest_is_shown(make_run, tmp_path, name, content, expected):
    directory = make_run()
    (directory / name).write_bytes(content)
    record = read_run(directory)
    page = page_without_pictures(directory, tmp_path)
    if expected is not None:
        assert record.problems[0].startswith(expected)
        assert record.problems[0] in page.text
    assert "\n" not in "".join(record.problems)
    assert "Configuration" in page.text
    json.dumps(record.summary, allow_nan=False)


def test_a_run_of_which_nothing_is_whole_has_a_report(make_run, capsys):
    directory = make_run()
    for name, content, _ in DAMAGES:
        (directory / name).write_bytes(content)
    assert _run(["report", str(directory), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["problems"]) >= 5
    assert "Traceback" not in (directory / "report.html").read_text()


@pytest.mark.deep
def test_numbers_that_no_axis_holds_do_not_end_the_report(make_run):
    directory = make_run(2)
    with (directory / "training.csv").open("a") as file:
        file.write("3,nan,inf,-inf,inf,nan,0,,,,,,,\n4,1e99,-1e99,0,0,0,0,0,1e99,,,,,\n")
    assert report(directory)[0] == 0


def test_a_file_that_is_no_plain_file_is_not_waited_for(make_run):
    directory = make_run()
    (directory / "val.csv").unlink()
    os.mkfifo(directory / "val.csv")
    assert problems(directory) == ["val.csv cannot be read: it is not a regular file"]


EVIL = "<script>document.title = 'hacked'</script><img src=x onerror=\"document.title='hacked'\">"


def plant(directory: Path) -> None:
    """Put markup into everything that is read from the disk."""
    (directory / "watchdog.jsonl").write_text(json.dumps(dict.fromkeys(("time", "rule", "message"), EVIL)) + "\n")
    (directory / "env.json").write_text(json.dumps({EVIL: {EVIL: EVIL}}))
    (directory / "summary.json").write_text(
        json.dumps({"steps": STEPS, "interrupted": True, "stopped_by": EVIL, "parameters": EVIL, EVIL: EVIL})
    )
    with (directory / "config.resolved.yaml").open("a") as file:
        file.write(f"\n# </pre>{EVIL}\n")
    with (directory / "val.csv").open("a") as file:
        file.write(f"{EVIL},1\n")


def test_what_comes_from_the_disk_is_text(make_run, tmp_path):
    directory = make_run(name="tiny-<script>alert(1)<")
    plant(directory)
    page = page_without_pictures(directory, tmp_path)
    assert "script" not in page.elements
    assert "img" not in page.elements
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(EVIL) >= 9
    assert "tiny-<script>alert(1)<" in page.text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the PATH")
def test_a_browser_shows_the_pictures_and_runs_nothing(make_run, tmp_path):
    from matplotlib.image import imread

    directory = make_run(name="run")
    plant(directory)
    report(directory)
    url = (directory / "report.html").as_uri()

    def chromium(*arguments: str) -> str:
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
        return subprocess.run([*command, *arguments, url], capture_output=True, text=True, timeout=120).stdout

    assert "<title>run</title>" in chromium("--dump-dom")
    chromium("--window-size=1000,3000", f"--screenshot={tmp_path / 'page.png'}")
    pixels = (imread(tmp_path / "page.png")[..., :3] * 255).round()
    # The first colour of every plot is nowhere else on the page.
    assert (abs(pixels - (31, 119, 180)).max(axis=-1) < 2).sum() > 500


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["missing"], "'missing' must be the directory of a run, and is none"),
        (["."], "must be the directory of a run, with 'training.csv'"),
        (["{run}", "--out", "missing/page.html"], "'missing' is not a directory; choose another place with --out"),
        (["{run}", "--out", "{run}"], "it is a directory"),
        (["{run}", "--ot", "x"], "did you mean '--out'?"),
    ],
)
def test_mistakes_are_one_line(make_run, tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    directory = make_run()
    assert _run(["report", *(argument.format(run=directory) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert expected in error
    assert not (directory / "report.html").exists()


def test_without_matplotlib_the_extra_is_named(make_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _run(["report", str(make_run())]) == 2
    assert "pip install 'nsa-compile[plots]'" in capsys.readouterr().err


@pytest.mark.deep
def test_a_mistake_is_found_without_torch(tmp_path):
    code = (
        f"import sys\nfrom nsa_compile.cli import _run\nassert _run(['report', {str(tmp_path)!r}]) == 2\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0
