"""`nsa-compile bench`: measure this machine. The measuring is in `bench.py`, the tables are in `bench_views.py`."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nsa_compile.cli import FiniteRange, SuggestingGroup, json_option, stacked
from nsa_compile.errors import UserError
from nsa_compile.files import why_unwritable
from nsa_compile.models.config import SparsePattern

if TYPE_CHECKING:
    from nsa_compile.profiles.bench import Measuring


class Lengths(click.ParamType):
    """`512,1024`: whole numbers of at least 1, ascending and each once."""

    name = "S,S,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isdecimal() and int(word) >= 1 for word in words):
            self.fail(f"'{value}' must be lengths of at least 1, separated by commas; for example 512,1024", param, ctx)
        return sorted({int(word) for word in words})


class Pattern(click.ParamType):
    """`32/16/64/16/512`: l/d/l'/n/w of a sparse pattern."""

    name = "l/d/l'/n/w"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> SparsePattern:
        if isinstance(value, SparsePattern):
            return value
        words = str(value).split("/")
        if len(words) != 5 or not all(word.strip().isdecimal() for word in words):
            self.fail(f"'{value}' must be five numbers l/d/l'/n/w; for example 32/16/64/16/512", param, ctx)
        try:
            block, stride, select_block, num_selected, window = map(int, words)
            return SparsePattern(block, stride, select_block, num_selected, window)
        except ValueError as error:
            self.fail(f"'{value}': {error}; the order is l/d/l'/n/w, by default 32/16/64/16/512", param, ctx)


def option(name: str, default: Any, help: str, **more: Any) -> Callable[[Any], Any]:
    """An option that shows its default; a plain number is at least 1."""
    if isinstance(default, int) and "type" not in more:
        more["type"] = click.IntRange(min=1)
    return click.option(name, default=default, show_default=default is not None, help=help, **more)


def common(seq_lens: str) -> Callable[[Any], Any]:
    """The options of every benchmark."""
    return stacked(
        option("--seq-lens", seq_lens, "Sequence lengths.", type=Lengths()),
        option("--repeats", 3, "Timed runs of each variant, in turns, after a warm-up."),
        option(
            "--pattern", "32/16/64/16/512", "Compressed block, its stride, selection block, selected blocks, window.",
            type=Pattern(),
        ),
        option("--device", "cpu", "Where to measure.", type=click.Choice(["cpu", "cuda"])),
        option("--threads", None, "Threads of the CPU; torch's default without it.", type=click.IntRange(min=1)),
        option(
            "--max-dense-seq-len", None, "Do not measure dense attention beyond this length.",
            type=click.IntRange(min=0),
        ),
        json_option,
        click.option("--out", type=click.Path(path_type=Path), help="Write the record, with all samples, as JSON."),
        click.option("--plot", type=click.Path(path_type=Path), help="Draw time against S as a PNG."),
    )  # fmt: skip


LAYER = stacked(
    option("--batch-size", 1, "Sequences."),
    option("--heads", 8, "Query heads."),
    option("--groups", 2, "Key/value heads; each serves heads / groups query heads."),
    option("--head-dim", 64, "Width of a head."),
)
MODEL = stacked(
    option("--layers", 4, "Transformer blocks."),
    option("--dim", 256, "Width of the model."),
    option("--head-dim", 64, "Width of a head."),
)


def dtypes(*names: str) -> Callable[[Any], Any]:
    return option("--dtype", "float32", "Element type.", type=click.Choice(names))


WISH = option(
    "--attention", "auto", "How NSA is computed: as fast as measurements say, by operators that follow the mask, or "
    "dense.", type=click.Choice(["auto", "sparse", "dense"]),
)  # fmt: skip
NESTED = option(
    "--nested",
    "inductor",
    "What compiles the graphs in the end.",
    type=click.Choice(["inductor", "aot_eager", "eager"]),
)


@dataclass(frozen=True)
class Common:
    """The options of every benchmark: what it measures by, and where its rows go."""

    seq_lens: list[int]
    repeats: int
    pattern: SparsePattern
    max_dense_seq_len: int | None
    device: str
    threads: int | None
    as_json: bool
    out: Path | None
    plot: Path | None

    def prepare(self, nested: str | None = None) -> Measuring:
        """Check everything that could lose a finished measurement, and only then import torch.

        Raises:
            UserError: a file cannot be written, matplotlib, a C++ compiler or the GPU is missing.
        """
        for name, path in (("--out", self.out), ("--plot", self.plot)):
            if path is not None:
                _check_writable(name, path)
        if self.plot and importlib.util.find_spec("matplotlib") is None:
            raise UserError("--plot needs matplotlib; pip install 'nsa-compile[plots]' brings it, or leave --plot out")

        from nsa_compile.machine.preflight import require_cxx, wait_passively

        if nested == "inductor":
            require_cxx("--nested inductor", "--nested aot_eager")
        wait_passively()

        import torch

        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda: torch finds no usable GPU here; use --device cpu")
        if self.threads:
            torch.set_num_threads(self.threads)

        from nsa_compile.profiles.bench import Measuring

        return Measuring(self.seq_lens, self.repeats, torch.device(self.device), self.max_dense_seq_len)

    def show(
        self, name: str, settings: Mapping[str, Any], rows: Iterable[Mapping[str, Any]], **more: Any
    ) -> list[Mapping[str, Any]]:
        """Measure the rows one by one, record them, and print and draw them in the end."""
        import torch

        from nsa_compile.profiles.bench_views import VIEWS, describe, plot_times
        from nsa_compile.profiles.measure import make_record, write_record

        view, device = VIEWS[name], torch.device(self.device)
        done: list[Mapping[str, Any]] = []
        record: dict[str, Any] = {}
        for row in rows:
            done.append(row)
            record = make_record(name, {**settings, "device": self.device}, done, device, **more)
            if self.out:
                write_record(self.out, record)
            what = " ".join(str(row[key]) for key in ("direction", "pattern") if key in row)
            click.echo(f"measured S = {row['seq_len']} {what}".rstrip(), err=True)
        sizes = describe(record["settings"], record["environment"])
        if self.plot:
            self.plot.parent.mkdir(parents=True, exist_ok=True)
            plot_times(self.plot, view.title, sizes, view.series(done))
        click.echo(json.dumps(record, indent=2) if self.as_json else f"{view.title}\n{sizes}\n\n{view.table(done)}")
        return done


def _check_writable(name: str, path: Path) -> None:
    """The path is a file, or can become one."""
    reason = "it is a directory" if path.is_dir() else why_unwritable(path.parent)
    if reason:
        raise UserError(f"{name} '{path}' must be a file that can be written: {reason}; choose another path")


@click.group(cls=SuggestingGroup)
def bench() -> None:
    """Measure this machine: NSA, compiled, against dense attention, in turns.

    \b
    nsa-compile bench attention --seq-lens 1024,4096 --plot attention.png
    nsa-compile bench prefill --seq-lens 128,256
    nsa-compile bench selection
    nsa-compile bench step --seq-lens 1024 --out step.json
    """


@bench.command(short_help="One attention layer against causal SDPA.")
@common("512,1024,2048,4096")
@LAYER
@dtypes("float32", "bfloat16", "float16")
@WISH
@NESTED
@click.option("--memory", is_flag=True, help="Measure peak memory above the inputs, too.")
def attention(
    batch_size: int, heads: int, groups: int, head_dim: int, dtype: str, attention: Any, nested: str, memory: bool,
    **common: Any,
) -> None:  # fmt: skip
    """Time whole NSA attention, compiled, against causal SDPA over all keys: forward, and forward + backward.

    Both read the same queries, keys and values. Below the table: the operator that the compiler chose for each branch,
    and what ran it.

    \b
    nsa-compile bench attention
    nsa-compile bench attention --seq-lens 1024,8192,32768 --max-dense-seq-len 8192 --memory
    """
    chosen = Common(**common)
    _check_heads(heads, groups)
    _check_lengths(chosen)
    by = chosen.prepare(nested)

    from nsa_compile.profiles import bench as measure

    problem = measure.AttentionProblem(batch_size, heads, groups, head_dim, chosen.pattern, dtype, attention, nested)
    rows = measure.attention(problem, by, memory)
    chosen.show("attention", _settings(problem, by.repeats), rows, pattern=asdict(chosen.pattern))


@bench.command(short_help="The loop over the tokens against the compiled model.")
@common("128,256,512")
@MODEL
@option("--eager-repeats", 3, "Timed runs of the loop, which is slow; 0 leaves it out.", type=click.IntRange(min=0))
@option("--max-eager-seconds", 300.0, "Skip longer loops; 0 skips all.", type=FiniteRange(min=0))
@option("--memory-gb", 24.0, "Address space of the process on a CPU; 0: no limit.", type=FiniteRange(min=0))
@NESTED
def prefill(
    layers: int, dim: int, head_dim: int, eager_repeats: int, max_eager_seconds: float, memory_gb: float, nested: str,
    **common: Any,
) -> None:  # fmt: skip
    """Time forward and backward of a whole model: run as written, token by token, and compiled; and dense.

    A loop that does not fit into memory or time is not measured, and the table says so.

    \b
    nsa-compile bench prefill
    nsa-compile bench prefill --seq-lens 2048 --max-eager-seconds 0
    """
    chosen = Common(**common)
    _check_even(head_dim)
    _check_lengths(chosen)
    by = chosen.prepare(nested)

    from nsa_compile.profiles import bench as measure
    from nsa_compile.profiles.measure import model_config

    config = model_config(layers, dim, head_dim, chosen.pattern)
    settings = {
        "batch": 1, "layers": layers, "dim": dim, "pattern": _short(chosen.pattern), "dtype": "float32",
        "nested": nested, "repeats": by.repeats, "eager_repeats": eager_repeats, "max_eager_seconds": max_eager_seconds,
        "memory_gb": memory_gb,
    }  # fmt: skip
    # CUDA reserves far more addresses than it uses memory.
    with measure.limited_memory(memory_gb if by.device.type == "cpu" else 0):
        rows = measure.prefill(config, by, eager_repeats, max_eager_seconds, nested)
        chosen.show("prefill", settings, rows, model=asdict(config))


@bench.command(short_help="Selected attention: loop against operator, on every pattern of indices.")
@common("512")
@LAYER
@click.pass_context
def selection(ctx: click.Context, batch_size: int, heads: int, groups: int, head_dim: int, **common: Any) -> None:
    """Compare selected attention as a loop over token ranges (v1) with the operator (v2): values, gradients, time.

    Patterns of selected blocks: random, sequential, duplicates, gaps, single block, all invalid. Exit code 1 if the two
    disagree on any of them.

    \b
    nsa-compile bench selection
    nsa-compile bench selection --seq-lens 1024,2048 --pattern 32/16/64/8/512
    """
    chosen = Common(**common)
    _check_heads(heads, groups)
    by = chosen.prepare()

    from nsa_compile.profiles import bench as measure

    problem = measure.AttentionProblem(batch_size, heads, groups, head_dim, chosen.pattern, "float32", "sparse", "none")
    settings = {k: v for k, v in _settings(problem, by.repeats).items() if k not in ("attention", "nested")}
    done = chosen.show("selection", settings, measure.selection(problem, by), pattern=asdict(chosen.pattern))
    wrong = [f"{row['pattern']} at S = {row['seq_len']}" for row in done if not row["equal"]]
    if wrong:
        click.echo(f"error: loop and operator disagree: {', '.join(wrong)}", err=True)
        ctx.exit(1)


@bench.command(short_help="A training step against the same model with dense attention.")
@common("512,1024,2048")
@option("--batch-size", 1, "Sequences of a step.")
@MODEL
@dtypes("float32", "bfloat16")
@WISH
@NESTED
def step(
    batch_size: int, layers: int, dim: int, head_dim: int, dtype: str, attention: Any, nested: str, **common: Any
) -> None:  # fmt: skip
    """Time a training step (forward, backward, clipping, AdamW) with NSA and with dense attention.

    The dense model is compiled block by block, too, by plain Inductor. bfloat16 means autocast over float32 weights.

    \b
    nsa-compile bench step
    nsa-compile bench step --seq-lens 2048,4096 --layers 12 --dim 768
    """
    chosen = Common(**common)
    _check_even(head_dim)
    _check_lengths(chosen)
    by = chosen.prepare(nested)

    from nsa_compile.profiles import bench as measure
    from nsa_compile.profiles.measure import model_config

    config = model_config(layers, dim, head_dim, chosen.pattern)
    settings = {
        "batch": batch_size, "layers": layers, "dim": dim, "heads": config.n_heads, "groups": config.n_kv_heads,
        "head_dim": head_dim, "pattern": _short(chosen.pattern), "dtype": dtype, "attention": attention,
        "nested": nested, "repeats": by.repeats,
    }  # fmt: skip
    rows = measure.step(config, by, batch_size, dtype, attention, nested)
    chosen.show("step", settings, rows, model=asdict(config))


def _settings(problem: Any, repeats: int) -> dict[str, Any]:
    values = {**vars(problem), "pattern": _short(problem.pattern), "repeats": repeats}
    return {"batch" if name == "batch_size" else name: value for name, value in values.items()}


def _short(pattern: SparsePattern) -> str:
    """As `--pattern` takes it."""
    p = pattern
    return "/".join(map(str, (p.compress_block, p.compress_stride, p.select_block, p.num_selected, p.window)))


def _check_heads(heads: int, groups: int) -> None:
    if heads % groups:
        raise UserError(f"--heads {heads} must be a multiple of --groups {groups}; change one of them")


def _check_even(head_dim: int) -> None:
    if head_dim % 2:
        raise UserError(f"--head-dim {head_dim} must be even, because RoPE rotates pairs; use {head_dim + 1}")


def _check_lengths(chosen: Common) -> None:
    shortest, block = chosen.seq_lens[0], chosen.pattern.compress_block
    if shortest < block:
        raise UserError(
            f"--seq-lens {shortest} must be at least {block}, the compressed block of --pattern, "
            "or no query ever sees a compressed block; use longer sequences or another --pattern"
        )
