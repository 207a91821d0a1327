"""The checks after each pass. What they find is an error of the pass, never of the user, and carries its name."""

from __future__ import annotations

import copy
import hashlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch._higher_order_ops.scan import scan_op
from torch.utils import _pytree as pytree

from nsa_compile import modes
from nsa_compile.capture.scans import StepRun
from nsa_compile.ir.scans import RECORD, ScanSite, example, find_scans, on_fake_inputs, subgraphs
from nsa_compile.workarounds import blank


class VerificationError(RuntimeError):
    """A pass broke the graph, or was wrong about what it did."""

    def __init__(self, pass_name: str, problem: str) -> None:
        super().__init__(f"pass {pass_name}: {problem}")
        self.pass_name = pass_name


@dataclass(frozen=True)
class Signature:
    """What a pass may not change: the graph's inputs, and the shapes, dtypes and devices of its outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> Signature:
        inputs = tuple(n.name for n in gm.graph.find_nodes(op="placeholder"))
        leaves = pytree.tree_leaves(gm.graph.output_node().args[0])
        return cls(inputs, tuple(_describe(example(n)) if isinstance(n, fx.Node) else repr(n) for n in leaves))


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} on {value.device}"
    return type(value).__name__


def fingerprint(gm: fx.GraphModule) -> str:
    """A digest of everything a pass can change: nodes, arguments, bodies, records, annotations."""
    digest = hashlib.sha256()
    bodies = [site.body for site in find_scans(gm)]
    for graph in [*subgraphs(gm), *bodies]:
        for node in graph.graph.nodes:
            record = node.meta.get(RECORD)
            text = f"{node.op}|{node.name}|{node.target}|{node.args}|{node.kwargs}|{record and record.fingerprint()}"
            text += f"|{node.meta.get('custom')}"
            digest.update(text.encode())
    return digest.hexdigest()


def snapshot(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy that later passes do not touch."""
    return copy.deepcopy(gm)


class Outcomes:
    """What nodes have yielded on fake tensors. One is run again if it, or a value that it reads, is another one."""

    def __init__(self) -> None:
        self._known: dict[tuple[fx.Node, str], tuple[Any, list[Any], Any]] = {}

    def of(self, node: fx.Node, values: Sequence[Any], run: Callable[[], Any], what: str = "") -> Any:
        """What a node yields, given the values that it reads, or `what` of it."""
        how = node.target, node.args, node.kwargs
        if (known := self._known.get((node, what))) is not None:
            before, read, result = known
            if before == how and len(read) == len(values) and all(map(operator.is_, read, values)):
                return result
        result = run()
        # What yields no tensor may be there for what it does, and a graph may be another one and the same object.
        if not any(isinstance(x, fx.GraphModule) for x in values) and _has_tensor(result):
            self._known[node, what] = how, list(values), result
        return result


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_has_tensor, value)))


def _enters_modes(gm: fx.GraphModule) -> bool:
    graphs = [*subgraphs(gm), *(site.body for site in find_scans(gm))]
    return any(getattr(n.target, "__name__", "").startswith("_enter_") for g in graphs for n in g.graph.nodes)


def verify(
    gm: fx.GraphModule, pass_name: str, *, changed: bool, before: str, expected: Signature, outcomes: Outcomes
) -> None:
    """Check a graph after a pass; `outcomes` are of the checks after the passes before.

    Raises:
        VerificationError: the pass's answer "changed" is untrue, the graph is malformed, its signature moved, a node
            lost its shape or source line, or its recorded shape is not what the operator yields.
    """
    after = fingerprint(gm)
    if (after != before) != changed:
        raise VerificationError(
            pass_name, f"it said changed={changed}, but the graph {'did' if after != before else 'did not'} change"
        )
    if not changed:
        return
    for graph in subgraphs(gm):
        try:
            graph.graph.lint()
        except Exception as error:
            raise VerificationError(pass_name, f"the graph is malformed: {error}") from error
    _check_meta(gm, pass_name)
    _propagate(gm, pass_name, Outcomes() if _enters_modes(gm) else outcomes)
    signature = Signature.of(gm)
    if signature != expected:
        raise VerificationError(pass_name, f"it changed the graph's signature from {expected} to {signature}")


def _check_meta(gm: fx.GraphModule, pass_name: str) -> None:
    for graph in subgraphs(gm):
        for node in graph.graph.nodes:
            has_shape = "example_value" in node.meta or "val" in node.meta
            returns_something = node.users and node.target is not torch._C._set_grad_enabled
            # A class is called to make a constant, such as an option of a library's function; it never had a shape.
            makes_constant = isinstance(node.target, type)
            # What a region of autocast or inference mode is left with.
            enters_a_mode = getattr(node.target, "__name__", "").startswith("_enter_")
            no_tensor = makes_constant or enters_a_mode
            if node.op == "call_function" and returns_something and not no_tensor and not has_shape:
                raise VerificationError(pass_name, f"node {node.name} ({node.target}) lost its meta: no shape")


class _Run(fx.Interpreter):
    """Runs a graph, and each of its scans under the autocast that belongs to it; without gradients, even where the
    graph asks for them: torch's own scan, in a checkpointed region, cannot compute them."""

    def run_node(self, n: fx.Node) -> Any:
        if n.target is torch._C._set_grad_enabled:
            return None
        if n.target is not scan_op:
            return super().run_node(n)
        with modes.under(modes.autocast_at(n)):
            return super().run_node(n)


class _Propagation(_Run):
    """Runs the graph on fake tensors and compares each node with what its meta promises."""

    def __init__(self, gm: fx.GraphModule, pass_name: str, outcomes: Outcomes) -> None:
        super().__init__(gm)
        self.pass_name, self.outcomes = pass_name, outcomes

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        try:
            if n.target is scan_op:
                result = self._scan(ScanSite(cast(fx.GraphModule, self.module), n))
            else:
                values = [self.env[x] for x in n.all_input_nodes]
                result = self.outcomes.of(n, values, lambda: super(_Propagation, self).run_node(n))
        except Exception as error:
            line = str(error).strip().splitlines()
            raise VerificationError(
                self.pass_name, f"node {n.name} ({n.target}) does not run: {line[0] if line else error!r}"
            ) from error
        if n.op == "call_function" and isinstance(result, Tensor):
            promised = n.meta.get("example_value", n.meta.get("val"))
            if isinstance(promised, Tensor) and _describe(promised) != _describe(result):
                raise VerificationError(
                    self.pass_name,
                    f"node {n.name} ({n.target}) has a stale shape: meta says {_describe(promised)}, "
                    f"it yields {_describe(result)}",
                )
            had_gradient = isinstance(promised, Tensor) and promised.requires_grad
            n.meta["example_value"] = result.detach().requires_grad_() if had_gradient else result
        return result

    def _scan(self, site: ScanSite) -> list[Tensor]:
        """The results of a scan, whose step is run once."""
        init, xs, additional = ([self.env[x] for x in nodes] for nodes in (site.init, site.xs, site.additional))
        rows = self.outcomes.of(site.node, xs, lambda: [x[0] for x in xs], "rows")
        with modes.under(modes.autocast_at(site.node)), torch.enable_grad():
            step = _Step(site.body, self.outcomes).run(*init, *rows, *additional)
        after, ys = step[: len(init)], step[len(init) :]
        if list(map(_describe, after)) != list(map(_describe, init)):
            raise ValueError(f"its step makes {list(map(_describe, after))} of {list(map(_describe, init))}")

        def results() -> list[Tensor]:
            return [*(blank(x, x.shape) for x in init), *(blank(y, (site.length, *y.shape)) for y in ys)]

        return cast("list[Tensor]", self.outcomes.of(site.node, [*init, *ys], results, "results"))


class _Step(StepRun):
    """Runs a step on fake tensors, but for what is as it was."""

    def __init__(self, body: fx.GraphModule, outcomes: Outcomes) -> None:
        super().__init__(body)
        self.outcomes = outcomes

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        values = [self.env[x] for x in n.all_input_nodes]
        return self.outcomes.of(n, values, lambda: super(_Step, self).run_node(n))


def _propagate(gm: fx.GraphModule, pass_name: str, outcomes: Outcomes) -> None:
    with on_fake_inputs(gm) as inputs:
        _Propagation(gm, pass_name, outcomes).run(*inputs)


def compare_numerically(
    reference: fx.GraphModule, gm: fx.GraphModule, inputs: Sequence[Tensor], pass_name: str
) -> float:
    """The largest difference between two graphs' outputs on real inputs, relative to the outputs' size.

    Raises:
        VerificationError: it exceeds what rounding explains.
    """
    with torch.no_grad():
        expected = _Run(reference).run(*(_copy(x) for x in inputs))
        actual = _Run(gm).run(*(_copy(x) for x in inputs))
    worst = 0.0
    for e, a in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        if not isinstance(e, Tensor) or e.numel() == 0:
            continue
        if not e.dtype.is_floating_point:
            if not torch.equal(e, a):
                raise VerificationError(pass_name, "it changed an integer output on real inputs")
            continue
        if not torch.equal(e.isnan(), a.isnan()):
            raise VerificationError(pass_name, "its output has NaN in other places than its input's")
        error = float((e.double() - a.double()).abs().nan_to_num(0.0).max())
        scale = max(1.0, float(e.double().abs().nan_to_num(0.0).max()))
        # The order of a sum may change; 1000 roundings of the largest value is far below any wrong mask.
        if error > 1000 * torch.finfo(e.dtype).eps * scale:
            raise VerificationError(
                pass_name, f"it changed values on real inputs by {error:.3g} (outputs up to {scale:.3g})"
            )
        worst = max(worst, error)
    return worst


def _copy(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x
