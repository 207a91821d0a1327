"""The pass pipeline: registry, order, requirements, verification, report.

A pass is a function `(gm, context) -> changed` under `@register`. It changes the graph only through the helpers of
`rewriting` and of its context, says what it needs and what it establishes, and says truthfully whether it changed
anything; the pipeline checks all of that after each pass.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol, cast

import torch
from torch import Tensor, fx

from nsa_compile import ranges
from nsa_compile.analyses.estimate import Estimate, estimate
from nsa_compile.capture.refusals import ScanNotCompiled
from nsa_compile.files import write_json
from nsa_compile.ir.scans import Decline, Declined, ScanSite, find_scans, name_scans_apart, subgraphs
from nsa_compile.ops import cpp
from nsa_compile.passes import ORDER, verifier
from nsa_compile.passes.report import Guard, PassReport, Report, ScanReport

log = logging.getLogger("nsa_compile")

PassFunction = Callable[[fx.GraphModule, "PassContext"], bool]


class RegisteredPass(Protocol):
    """A pass function as `register` returns it."""

    def __call__(self, gm: fx.GraphModule, context: PassContext) -> bool: ...

    # Takes the pass out of the pipeline again; one whose name it took comes back.
    unregister: Callable[[], None]


@dataclass(frozen=True)
class Pass:
    """A registered pass: what it needs to have happened, what holds once it ran, and the option that asks for it."""

    name: str
    run: PassFunction
    requires: tuple[str, ...]
    ensures: tuple[str, ...]
    option: str | None = None

    @property
    def summary(self) -> str:
        return (self.run.__doc__ or "").strip().splitlines()[0]


REGISTRY: dict[str, Pass] = {}


def register(
    name: str, *, requires: tuple[str, ...] = (), ensures: tuple[str, ...] = (), option: str | None = None
) -> Callable[[PassFunction], RegisteredPass]:
    """Make a function a pass of the pipeline, under a name users can disable. `function.unregister()` undoes it.

    With `option`, the name of a field of `Options`, it runs only where that is true.
    """

    def decorate(run: PassFunction) -> RegisteredPass:
        before = REGISTRY.get(name)

        def unregister() -> None:
            REGISTRY.pop(name, None)
            if before is not None:
                REGISTRY[name] = before

        REGISTRY[name] = Pass(name, run, requires, ensures, option)
        registered = cast(RegisteredPass, run)
        registered.unregister = unregister
        return registered

    return decorate


def pipeline() -> list[Pass]:
    """All passes in the order they run."""
    for name in ORDER:
        importlib.import_module(f"{__package__}.{name}")  # which registers it
    return [REGISTRY[name] for name in ORDER] + [p for name, p in REGISTRY.items() if name not in ORDER]


@dataclass(frozen=True)
class Options:
    """How to compile. Fields that decide what a program becomes take part in the cache key.

    Attributes:
        nested: the backend that compiles the rewritten graph: `"inductor"`, `"aot_eager"` or `"eager"`.
        disable: names of passes that do not run.
        stop_after: do no more than this many rewrites, counted over all passes; for finding the one to blame.
        attention: how attention is computed: `"auto"` as fast as measurements say, `"sparse"` by the operator that
            follows its mask wherever there is one, `"dense"` over all keys.
        max_guard_bytes: a buffer whose guard cannot be dropped costs a copy for each step; above this many bytes for
            one buffer the scan is left a loop.
        tile_bytes: what takes as many bytes over all steps, and is made into something small, is computed in tiles of
            steps, and once more in the backward pass.
        on_decline: `"warn"` leaves a scan that cannot be batched a loop and says so; `"error"` raises.
        check: `"passes"` (or True) runs every pass's result against its input on the first real inputs and compares
            values; `"first"` compares the first call of each compiled program, values and gradients, with the loop
            (`first_call.py`); False checks neither.
        estimate: report what the graph costs after each pass (`estimate.py`); it takes about as long as verifying.
        nvtx: put the named ranges of `annotate_ranges` into the compiled program.
        dump_dir: write each graph before and after each pass there, as readable Python.
        cache: reuse results of earlier processes.
    """

    nested: str = "inductor"
    disable: tuple[str, ...] = ()
    stop_after: int | None = None
    attention: str = "auto"
    max_guard_bytes: int = 2**30
    tile_bytes: int = 2**27
    on_decline: str = "warn"
    check: bool | Literal["passes", "first"] = False
    estimate: bool = False
    nvtx: bool = False
    dump_dir: str | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.disable, str) or not isinstance(self.disable, Iterable):
            raise ValueError(f"disable is {self.disable!r}; it must be a list or tuple of names of passes")
        object.__setattr__(self, "disable", tuple(self.disable))
        names = [p.name for p in pipeline()]
        for name in self.disable:
            if name not in names:
                raise ValueError(f"disable names {name!r}, which is no pass; the passes are {', '.join(names)}")
        _require_choice("nested", self.nested, ("inductor", "aot_eager", "eager"))
        _require_choice("attention", self.attention, ("auto", "sparse", "dense"))
        _require_choice("on_decline", self.on_decline, ("warn", "error"))
        _require_choice("check", self.check, (False, True, "passes", "first"))
        for name in ("estimate", "nvtx", "cache"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name} is {value!r}; it must be True or False")
        for name in ("stop_after", "max_guard_bytes", "tile_bytes"):
            value = getattr(self, name)
            is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
            if not is_number and (name != "stop_after" or value is not None):
                raise ValueError(f"{name} is {value!r}; it must be a whole number, 0 or more")
        if not isinstance(self.dump_dir, str | os.PathLike | None):
            raise ValueError(f"dump_dir is {self.dump_dir!r}; it must be the path of a folder")

    @property
    def checks_passes(self) -> bool:
        """Whether each pass is compared by itself."""
        return self.check in (True, "passes")


def _require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")


class ScanNotBatched(ScanNotCompiled):
    """Raised with `on_decline="error"` when a scan would stay a loop."""


@dataclass
class PassContext:
    """What a pass may ask and must report while it runs."""

    options: Options
    report: Report
    current: PassReport = field(default_factory=lambda: PassReport(""))
    rewrites: int = 0

    def may_rewrite(self) -> bool:
        """Whether `stop_after` allows one more rewrite. Ask before the first change of each."""
        return self.options.stop_after is None or self.rewrites < self.options.stop_after

    def match(self, where: str, what: str) -> None:
        """Record one rewrite."""
        self.rewrites += 1
        self.current.matches.append(f"{where}: {what}")

    def decline(self, site: ScanSite, declined: Declined, did: str = "left {} alone") -> None:
        """Record that something was left alone, and why."""
        decline = Decline(self.current.name, declined.op, declined.location, declined.reason)
        self.current.declines.append(decline)
        self.scan(site.node.name).declines.append(decline)
        said = f"{self.current.name} {did.format(site.words)}"
        log.warning("%s: %s (%s at %s)", said, declined.reason, declined.op, declined.location)

    def leave(self, declined: Declined) -> None:
        """Record that a part of a step stays as it is; that keeps no scan from being batched."""
        decline = Decline(self.current.name, declined.op, declined.location, declined.reason)
        self.current.declines.append(decline)
        log.info("%s left %s at %s alone: %s", self.current.name, declined.op, declined.location, declined.reason)

    def scan(self, name: str) -> ScanReport:
        return next(s for s in self.report.scans if s.name == name)

    @staticmethod
    def add_module(owner: fx.GraphModule, name: str, module: fx.GraphModule) -> str:
        """Attach a sub-graph under a free name and return that name."""
        free, i = name, 0
        while hasattr(owner, free):
            i += 1
            free = f"{name}_{i}"
        owner.add_submodule(free, module)
        return free


def run_pipeline(gm: fx.GraphModule, options: Options, real_inputs: Sequence[Tensor] | None = None) -> Report:
    """Run every enabled pass over a captured graph, in place.

    `real_inputs` are what `check` compares values on. Raises `verifier.VerificationError`, naming the pass, if a pass
    broke the graph or told an untruth about it.
    """
    name_scans_apart(gm)
    report = Report(nested=options.nested, nodes_captured=count_nodes(gm))
    report.scans = [ScanReport(site.node.name, site.length) for site in find_scans(gm)]
    report.estimate_captured = cost = _estimate(gm, report) if options.estimate else None
    context = PassContext(options, report)
    expected, outcomes = verifier.Signature.of(gm), verifier.Outcomes()
    if options.dump_dir is not None:
        try:
            Path(options.dump_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ScanNotCompiled(f"dump_dir is {str(options.dump_dir)!r}: {error.strerror}; name a folder") from error
    established: set[str] = set()
    carry_names: dict[str, list[str]] = {}  # of each scan, in the last form its body had
    for index, p in enumerate(pipeline()):
        entry = PassReport(p.name, nodes_before=count_nodes(gm), nodes_after=count_nodes(gm), estimate=cost)
        report.passes.append(entry)
        missing = [need for need in p.requires if need not in established]
        if p.name in options.disable:
            entry.skipped = "disabled"
        elif p.option is not None and not getattr(options, p.option):
            entry.skipped = "not asked for"
        elif missing:
            entry.skipped = f"needs {', '.join(missing)}, which no earlier pass established"
        if entry.skipped:
            log.info("pass %s skipped: %s", p.name, entry.skipped)
            continue
        context.current = entry
        before = verifier.fingerprint(gm)
        reference = verifier.snapshot(gm) if options.checks_passes and real_inputs is not None else None
        _dump(gm, options, index, p.name, "before")
        start = time.perf_counter()
        with ranges.span(p.name, "pass"):
            entry.changed = p.run(gm, context)
        entry.seconds = time.perf_counter() - start
        start = time.perf_counter()
        verifier.verify(gm, p.name, changed=entry.changed, before=before, expected=expected, outcomes=outcomes)
        if reference is not None and entry.changed:
            assert real_inputs is not None
            entry.max_abs_error = verifier.compare_numerically(reference, gm, real_inputs, p.name)
        entry.verify_seconds = time.perf_counter() - start
        entry.nodes_after = count_nodes(gm)
        if options.estimate and entry.changed:
            entry.estimate = cost = _estimate(gm, report)
        carry_names |= {site.node.name: [n.name for n in site.placeholders()[0]] for site in find_scans(gm)}
        _dump(gm, options, index, p.name, "after")
        established.update(p.ensures)
    report.nodes_final = count_nodes(gm)
    for scan in report.scans:
        scan.guards = _guards_by_carry(scan, carry_names.get(scan.name, []))
    if options.dump_dir is not None:
        write_json(Path(options.dump_dir) / "report.json", report.to_dict())
    _finish(report, options)
    return report


def leave_alone(gm: fx.GraphModule, options: Options, declined: Declined) -> Report:
    """The report on a graph that no pass may look at. Its scans stay loops.

    Raises:
        ScanNotBatched: with `on_decline="error"`.
    """
    name_scans_apart(gm)
    decline = Decline("capture", declined.op, declined.location, declined.reason)
    nodes = count_nodes(gm)
    report = Report(nested=options.nested, left_alone=decline, nodes_captured=nodes, nodes_final=nodes)
    report.scans = [ScanReport(site.node.name, site.length, declines=[decline]) for site in find_scans(gm)]
    report.passes = [PassReport(p.name, skipped="the graph was left alone") for p in pipeline()]
    log.warning("the graph was left as it is: %s (%s at %s)", decline.reason, decline.op, decline.location)
    _finish(report, options)
    return report


def _estimate(gm: fx.GraphModule, report: Report) -> Estimate | None:
    try:
        return estimate(gm)
    except Exception as error:  # an operator that fake tensors do not know is no reason not to compile
        note = f"no estimate: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
        if note not in report.notes:
            report.notes.append(note)
        return None


_VIEWS: tuple[tuple[Literal["found", "left"], str], ...] = (("left", ""), ("found", ".before"))


def _guards_by_carry(scan: ScanReport, carry_names: list[str]) -> list[Guard]:
    """Passes name a guarded view after the body's input: `name` as a step leaves it, `name.before` as it finds it."""
    verdicts = dict.fromkeys(scan.guards_dropped, False) | dict.fromkeys(scan.guards_kept, True)
    views = [(i, when, f"{name}{dot}") for i, name in enumerate(carry_names) for when, dot in _VIEWS]
    return [Guard(carry, when, verdicts[view]) for carry, when, view in views if view in verdicts]


def _finish(report: Report, options: Options) -> None:
    for scan in report.scans:
        if not scan.batched and options.on_decline == "error":
            why = "; ".join(f"{d.op} at {d.location}: {d.reason}" for d in scan.declines) or "no pass batched it"
            raise ScanNotBatched(f'{scan.name} stays a loop of {scan.length} steps, and on_decline is "error": {why}')


def count_nodes(gm: fx.GraphModule) -> int:
    """Operations in a graph and the bodies it calls."""
    inner = {id(g): g for g in subgraphs(gm)} | {id(s.body): s.body for s in find_scans(gm)}
    return sum(node.op.startswith("call") for g in inner.values() for node in g.graph.nodes)


def _dump(gm: fx.GraphModule, options: Options, index: int, name: str, when: str) -> None:
    if options.dump_dir is None:
        return
    folder = Path(options.dump_dir)
    text = gm.print_readable(print_output=False, include_stride=True, include_device=True)
    (folder / f"{index:02d}_{name}_{when}.py").write_text(text)


class Uncacheable(Exception):
    """No key can stand for this compilation; says why."""


def pipeline_key(options: Options) -> str:
    """A digest of the sources of all passes and of the options: equal keys do equal things to equal graphs.

    Raises:
        Uncacheable: the source of a pass cannot be read.
    """
    digest = hashlib.sha256(f"{torch.__version__} {sources_digest()}".encode())
    for entry in pipeline():
        digest.update(f"{entry.name}:{entry.run.__module__}".encode())
        if not entry.run.__module__.startswith(f"{__package__}."):
            digest.update(_source_of(entry).encode())
    chosen = {k: v for k, v in asdict(options).items() if k not in ("cache", "check", "dump_dir")}
    digest.update(repr(sorted(chosen.items())).encode())
    digest.update(str(cpp.has_matrix_unit()).encode())  # what is faster depends on it
    return digest.hexdigest()


def sources_digest() -> str:
    """A digest of the passes, of the operators they put into graphs, of what captures graphs and keeps the results."""
    package = Path(__file__).parent.parent
    folders = [package / name for name in ("analyses", "capture", "ir", "ops", "passes", "program")]
    modules = ("backend", "cache", "scanning", "modes", "ranges", "workarounds")
    inside = [p for folder in folders for p in folder.rglob("*") if p.suffix in (".py", ".json", ".cpp", ".h", ".cu")]
    digest = hashlib.sha256()
    for path in sorted([*inside, *(package / f"{name}.py" for name in modules)]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _source_of(entry: Pass) -> str:
    """The source of the module that defines a pass outside this package: its helpers there take part as well."""
    if not inspect.isfunction(entry.run) or entry.run.__closure__:
        raise Uncacheable(f"pass {entry.name} is no plain function, so its source does not say all that it does")
    try:
        return inspect.getsource(sys.modules[entry.run.__module__])
    except (KeyError, OSError, TypeError) as error:
        raise Uncacheable(f"the source of pass {entry.name} cannot be read") from error
