"""What no pass has batched becomes the project's own loop: no nested backend ever gets torch's `scan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import fx

from nsa_compile import modes
from nsa_compile.capture.refusals import ScanNotCompiled, cannot_be
from nsa_compile.ir.inner_loops import RECOMPUTED
from nsa_compile.ir.rewriting import delete_unused_graphs
from nsa_compile.ir.scans import WRITTEN, ScanSite, example, find_scans, location, scan_results, subgraphs
from nsa_compile.ops.loop import Compiler, LoopNotTraced, Program, register, run_loop
from nsa_compile.ops.loop.step import Layout

__all__ = ["keep_loops"]

# A step that runs less often takes less time than a compiler does; tiles hold many steps each.
STEPS_WORTH_COMPILING = 64
TILES_WORTH_COMPILING = 8


def keep_loops(gm: fx.GraphModule, compiler: Compiler | None = None) -> None:
    """Replace every scan of a graph, and those within their steps, by `nsa_compile::loop`, in place.

    Args:
        compiler: of the steps of those that are long enough.

    Raises:
        ScanNotCompiled: a step holds something that has no functional form.
    """
    names = set[str]()
    for site in find_scans(gm):
        keep_loops(site.body)
        enough = TILES_WORTH_COMPILING if site.node.meta.get(RECOMPUTED) else STEPS_WORTH_COMPILING
        _keep(site, names, compiler if site.length >= enough else None)
    for graph in subgraphs(gm):
        delete_unused_graphs(graph)  # AOTAutograd wants a source for each constant that a body holds
        graph.recompile()


def _layouts_of_step(site: ScanSite) -> list[Layout]:
    """What a step of the loop reads: carries, rows of xs, additional inputs."""
    carries = [Layout.standard(example(n)) for n in site.init]
    rows = [Layout.row(example(n)) for n in site.xs]
    return [*carries, *rows, *(Layout.of(example(n)) for n in site.additional)]


def _keep(site: ScanSite, taken: set[str], compiler: Compiler | None) -> None:
    inputs = [*site.init, *site.xs, *site.additional]
    n_init, n_xs, autocast = len(site.init), len(site.xs), modes.autocast_at(site.node)
    read = sorted(site.read)
    with_gradient = [i for i in read if scan_results(site.node)[i].requires_grad]
    layouts = _layouts_of_step(site)
    recomputed = site.node.meta.get(RECOMPUTED, False)
    program = Program(
        site.body, layouts, n_init, n_xs, site.length, autocast, read, with_gradient, recomputed, compiler
    )
    try:  # so that what cannot be traced is said now, and here
        program.graphs(_differentiable(inputs))
    except LoopNotTraced as error:
        raise ScanNotCompiled(f"{cannot_be('compiled', location(site.node), error.line)}: {error.reason}") from error
    name = register(program, taken)
    taken.add(name)
    with site.owner.graph.inserting_before(site.node):
        own = [_copied(n) if WRITTEN in n.meta else n for n in inputs]
        node = site.owner.graph.call_function(run_loop, (name, own))
    node.meta = {k: v for k, v in site.node.meta.items() if k != "val"}
    node.meta["example_value"] = scan_results(site.node)
    site.node.replace_all_uses_with(node)
    body = cast("fx.Node", site.node.args[0])
    site.owner.graph.erase_node(site.node)
    if not body.users:
        site.owner.graph.erase_node(body)


def _copied(node: fx.Node) -> fx.Node:
    """A loop keeps its inputs for the backward pass, whether that needs them or not; a write would be found there."""
    copied = node.graph.call_function(torch.clone, (node,))
    copied.meta = {"example_value": example(node)}
    return copied


def _differentiable(inputs: Sequence[fx.Node]) -> list[bool]:
    """Which inputs of a loop have gradients, as far as is known; none of them, if empty."""
    flags = [example(n).requires_grad for n in inputs]
    return flags if torch.is_grad_enabled() and any(flags) else []
