"""Results of the passes, kept across processes.

The key digests the captured graph, the layouts of its inputs, the sources of the passes, the options and torch's
version; so an equal program starts without running a pass, and any change of either runs them again. Entries live
beside Inductor's own cache and, like those, are trusted: they belong to the user who runs the program.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions

from nsa_compile.passes.pipeline import Options, Uncacheable, pipeline_key
from nsa_compile.passes.report import Report
from nsa_compile.passes.scans import find_scans, subgraphs

log = logging.getLogger("nsa_compile")

# What of a node's meta outlives the process: the user's source line, and the tag of a checkpointed region.
KEPT_META = ("stack_trace", "recompute", "custom")


def cache_key(gm: fx.GraphModule, options: Options) -> str:
    """The digest under which the result for a captured graph is kept.

    Raises:
        Uncacheable: equal keys would not mean equal programs.
    """
    digest = hashlib.sha256(pipeline_key(options).encode())
    bodies = [site.body for site in find_scans(gm)]
    for graph in [*subgraphs(gm), *bodies]:
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            layout = ""
            if node.op == "get_attr" and isinstance(held := getattr(graph, node.target, None), Tensor):
                digest.update(repr(held.tolist()).encode())
            if isinstance(value, Tensor):
                layout = f"{value.dtype}{list(value.shape)}{value.stride()}{value.device}{value.requires_grad}"
            text = f"{node.op}|{node.name}|{_name(node.target)}|{node.args}|{node.kwargs}|{layout}\n"
            if " at 0x" in text:  # an object without a name of its own: another process has another one there
                raise Uncacheable(f"the graph holds an object that has no name: {node.format_node()}")
            digest.update(text.encode())
    digest.update(f"autocast {torch.is_autocast_enabled('cpu')} {torch.is_autocast_enabled('cuda')}".encode())
    return digest.hexdigest()


def _name(target: Any) -> str:
    """A name that is the same in every process; the repr of a built-in function holds an address."""
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}:{type(target).__name__}"


def load(gm: fx.GraphModule, key: str) -> Report | None:
    """Put the kept result into `gm` and return its report, marked as a hit; None where there is none."""
    path = _path(key)
    try:
        text, _, data = path.read_bytes().partition(b"\n")
        report = Report.from_dict(json.loads(text))
        kept: Any = GraphPickler.loads(data, FakeTensorMode())
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a damaged file makes of itself
        log.warning("the kept result %s cannot be read (%s); the passes run again", path, error)
        path.unlink(missing_ok=True)
        return None
    _restore(gm, kept)
    report.cache_hit = True
    return report


def _restore(gm: fx.GraphModule, kept: fx.GraphModule) -> None:
    """Give a captured graph, and the regions it calls, the nodes of a kept one."""
    # The inputs keep what this process knows of them, such as where Dynamo found each.
    fresh, old = gm.graph.find_nodes(op="placeholder"), kept.graph.find_nodes(op="placeholder")
    assert [n.name for n in fresh] == [n.name for n in old], "equal keys, different inputs"
    for new_node, old_node in zip(fresh, old, strict=True):
        old_node.__dict__.update({k: v for k, v in new_node.__dict__.items() if k == "_dynamo_source"})
        old_node.meta = new_node.meta
    for node in kept.graph.find_nodes(op="get_attr"):
        held = getattr(kept, node.target)
        if isinstance(held, fx.GraphModule):
            _restore(getattr(gm, node.target), held)
        else:
            setattr(gm, node.target, held)
    gm.graph = kept.graph
    gm.recompile()


def store(gm: fx.GraphModule, key: str, report: Report) -> None:
    """Keep a result. Graphs that still hold a scan are not kept: their declines shall be seen at every start."""
    if find_scans(gm):
        return
    try:
        data = GraphPickler.dumps(_stripped(gm), PicklerOptions(ops_filter=None))
    except Exception as error:  # a user's object in the graph that cannot be pickled
        log.info("the result cannot be kept (%s); the passes will run again at the next start", error)
        return
    text = json.dumps(report.to_dict()).encode()
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written whole under another name and renamed, so that no reader meets half a file.
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(text + b"\n" + data)
    os.replace(file.name, path)


def _stripped(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph and the regions it calls, without what belongs to this process."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        node.meta = {k: copy.copy(v) for k, v in node.meta.items() if k in KEPT_META}
    stripped = fx.GraphModule(gm, graph)
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(region := getattr(gm, node.target), fx.GraphModule):
            setattr(stripped, node.target, _stripped(region))
    return stripped


def _path(key: str) -> Path:
    return Path(cache_dir()) / "nsa_compile" / key[:2] / key
