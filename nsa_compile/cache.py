"""Results of the passes, kept across processes.

The key digests the captured graph, the layouts of its inputs, the tensors it holds, the sources of the passes, the
options, torch's version and what else the passes see of the process. So an equal program starts without running a pass,
and any change runs them again. Entries lie where only this user writes (`compiler_cache.py`), each sealed with a digest
of its own: what is not as it was written is never unpickled, and whatever is wrong with an entry, the passes run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import logging
import operator
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx._graph_pickler import GraphPickler
from torch.fx._graph_pickler import Options as PicklerOptions

from nsa_compile import compiler_cache
from nsa_compile.errors import UserError
from nsa_compile.files import read_sealed, write_sealed
from nsa_compile.ir.scans import CARRY_NAMES, VALUE, find_scans, subgraphs
from nsa_compile.passes.pipeline import Options, Uncacheable, pipeline_key
from nsa_compile.passes.report import Report

log = logging.getLogger("nsa_compile")

# What of a node's meta outlives the process: the user's source line, the tag of a checkpointed region, and the user's
# names.
KEPT_META = ("stack_trace", "recompute", "custom", CARRY_NAMES)


def cache_key(gm: fx.GraphModule, options: Options) -> str:
    """The digest under which the result for a captured graph is kept.

    Raises:
        Uncacheable: equal keys would not mean equal programs.
    """
    digest = hashlib.sha256(pipeline_key(options).encode())
    for line in _process_state():
        digest.update(f"{line}\n".encode())
    devices = set()
    bodies = [site.body for site in find_scans(gm)]
    for graph in [*subgraphs(gm), *bodies]:
        digest.update(b"graph\n")
        for node in graph.graph.nodes:
            value = node.meta.get("example_value")
            tags = {name: node.meta[name] for name in KEPT_META[1:] if name in node.meta}
            text = f"{node.op}|{node.name}|{_name(node.target)}|{node.args}|{node.kwargs}|{_layout(value)}|{tags}\n"
            if " at 0x" in text:  # an object without a name of its own: another process has another one there
                raise Uncacheable(f"the graph holds an object that has no name: {node.format_node()}")
            digest.update(text.encode())
            if VALUE in node.meta:
                _digest_held(digest, node.name, node.meta[VALUE])
            if node.op == "get_attr":
                _digest_held(digest, node.target, operator.attrgetter(node.target)(graph))
            devices |= {tensor.device for tensor in _tensors(value)}
    for device in sorted(devices, key=str):
        if device.type == "cuda":  # what is faster depends on it
            digest.update(f"{device} {torch.cuda.get_device_properties(device)}\n".encode())
    return digest.hexdigest()


def _process_state() -> Iterator[str]:
    """What of the process decides what operators return, and so what the passes may take for known."""
    yield f"dtype {torch.get_default_dtype()} device {torch.get_default_device()}"
    yield f"grad {torch.is_grad_enabled()} inference {torch.is_inference_mode_enabled()}"
    yield f"deterministic {torch.are_deterministic_algorithms_enabled()} {torch.get_float32_matmul_precision()}"
    for device in ("cpu", "cuda"):
        yield f"autocast {device} {torch.is_autocast_enabled(device)} {torch.get_autocast_dtype(device)}"


def _layout(value: Any) -> str:
    """What the passes see of an example value: numbers of sizes as well as their symbols."""
    if isinstance(value, Tensor):
        shape, stride = ([_number(size) for size in sizes] for sizes in (value.shape, value.stride()))
        return f"{type(value).__name__} {value.dtype}{shape}{stride}{value.device}{value.requires_grad}"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _number(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_layout, value))})"
    return type(value).__name__


def _number(value: Any) -> str:
    """A size; with a symbol also the number that it stands for now."""
    return f"{value}={value.node.hint}" if hasattr(value, "node") else str(value)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for part in value for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


def constants_digest(gm: fx.GraphModule) -> str:
    """A digest of all tensors that a graph and its subgraphs hold; a new one where one has bits that cannot be told."""
    digest = hashlib.sha256()
    try:
        for graph in gm.modules():
            for node in graph.graph.find_nodes(op="get_attr") if isinstance(graph, fx.GraphModule) else ():
                _digest_held(digest, node.target, operator.attrgetter(node.target)(graph))
    except Uncacheable:
        return uuid.uuid4().hex
    return digest.hexdigest()


def _digest_held(digest: Any, name: str, held: Any) -> None:
    """Put what a graph holds under a name into its digest: bit for bit, whatever the dtype.

    Raises:
        Uncacheable: it is neither a plain tensor nor a graph; those are put in by themselves.
    """
    if isinstance(held, fx.GraphModule):
        return
    plain = isinstance(held, Tensor) and type(held) in (Tensor, torch.nn.Parameter)
    if not plain or held.layout != torch.strided or held.is_quantized or held.is_meta:
        raise Uncacheable(f"the graph holds '{name}', a {type(held).__name__} whose bits cannot be told")
    digest.update(f"{_layout(held)}\n".encode())
    with unset_fake_temporarily():  # what is held is real
        content = held.detach().resolve_conj().resolve_neg().cpu()
        # A tensor of one element is contiguous whatever its strides, and only a stride of 1 can be read as bytes.
        content = content.new_empty(content.numel()).copy_(content.reshape(-1))
        digest.update(content.view(torch.uint8).numpy())


def _name(target: Any) -> str:
    """A name that is the same in every process; the repr of a built-in function holds an address."""
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}:{type(target).__name__}"


def load(gm: fx.GraphModule, key: str) -> Report | None:
    """Put the kept result into `gm` and return its report, marked as a hit; None where there is none to be used."""
    try:
        path = _path(key)
        text, _, data = read_sealed(path).partition(b"\n")
        report = Report.from_dict(json.loads(text))
        kept: Any = GraphPickler.loads(data, detect_fake_mode() or FakeTensorMode())
        _check_fits(gm, kept)
    except (FileNotFoundError, UserError):
        return None
    except Exception as error:  # whatever a damaged file, or somebody else's, makes of itself
        _warn(f"the kept result '{path}' cannot be used ({error}); the passes run again")
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    _restore(gm, kept)
    report.cache_hit = True
    return report


def _check_fits(gm: fx.GraphModule, kept: fx.GraphModule) -> None:
    """Raise a ValueError unless a kept graph takes the inputs of a captured one and calls regions that it has."""
    fresh, old = ([n.name for n in graph.graph.find_nodes(op="placeholder")] for graph in (gm, kept))
    if fresh != old:
        raise ValueError("equal keys, different inputs")
    for node in kept.graph.find_nodes(op="get_attr"):
        held = getattr(kept, node.target)
        if isinstance(held, fx.GraphModule):
            _check_fits(getattr(gm, node.target), held)


def _restore(gm: fx.GraphModule, kept: fx.GraphModule) -> None:
    """Give a captured graph, and the regions it calls, the nodes of a kept one."""
    # The inputs keep what this process knows of them, such as where Dynamo found each.
    fresh, old = gm.graph.find_nodes(op="placeholder"), kept.graph.find_nodes(op="placeholder")
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
    """Keep a result if that is possible; where it is not, a line of the log says why.

    Graphs that still hold a scan are not kept: their declines shall be seen at every start.
    """
    if find_scans(gm):
        return
    try:
        data = GraphPickler.dumps(_stripped(gm), PicklerOptions(ops_filter=None))
        text = json.dumps(report.to_dict()).encode()
    except Exception as error:  # a user's object in the graph that cannot be pickled
        log.info("the result cannot be kept (%s); the passes will run again at the next start", error)
        return
    try:
        path = _path(key)
        write_sealed(path, text + b"\n" + data)
    except UserError as error:
        _warn(f"results of the passes are not kept: {error}")
    except OSError as error:
        _warn(f"results of the passes cannot be kept in '{compiler_cache.directory()}': {error.strerror or error}")


@cache
def _warn(message: str) -> None:
    """Once a process: what goes wrong for one graph goes wrong for all."""
    log.warning(message)


def _stripped(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph and the regions it calls, without what belongs to this process."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in graph.nodes:
        names = (*KEPT_META, "example_value") if _has_a_method_called(node) else KEPT_META
        node.meta = {k: copy.copy(v) for k, v in node.meta.items() if k in names}
    stripped = fx.GraphModule(gm, graph)
    for node in graph.find_nodes(op="get_attr"):
        if isinstance(region := getattr(gm, node.target), fx.GraphModule):
            setattr(stripped, node.target, _stripped(region))
    return stripped


def _has_a_method_called(node: fx.Node) -> bool:
    """AOTAutograd takes a kept program only where it sees that methods are those of tensors (torch 2.13)."""
    return any(user.op == "call_method" and user.args[0] is node for user in node.users)


def _path(key: str) -> Path:
    return compiler_cache.directory() / "nsa_compile" / key[:2] / key
