"""Workarounds for defects of torch, each with its cause, its scope and the versions it is for."""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.overrides import TorchFunctionMode


def cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    """`torch.cosine_similarity` without a write.

    A length counts as `eps` at least, which its gradient does not know: torch writes it where autograd is off (torch
    2.13).
    """
    rank, dtype = max(x1.dim(), x2.dim()), torch.promote_types(x1.dtype, x2.dtype)
    x1, x2 = x1.to(dtype), x2.to(dtype)
    dim = dim % max(1, rank) - rank  # counted from behind, it is one of both
    if min(x1.dim(), x2.dim()) < -dim or x1.shape[dim] != x2.shape[dim]:
        x1, x2 = torch.broadcast_tensors(x1, x2)
    directions = []
    for x in (x1, x2):
        length = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        directions.append(x / (length + (eps - length.detach()).clamp_min(0)))
    return (directions[0] * directions[1]).sum(dim)


class HonestFunctions(TorchFunctionMode):
    """Functions of torch by operators that say what they write, and write nothing that autograd does not see.

    `native_batch_norm` and its kin update the running statistics, and their schemas do not say so (torch 2.13).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cosine_similarity:
            return cosine_similarity(*args, **(kwargs or {}))
        if (names := self._ARGUMENTS.get(func)) is not None:
            given = {"momentum": 0.1, "eps": 1e-5, **dict(zip(names, args, strict=False)), **(kwargs or {})}
            inputs: list[Any] = [given.get(name) for name in ("input", "weight", "bias", "running_mean", "running_var")]
            empty = inputs[0].numel() == 0  # changes no statistics, and the operator refuses it
            if given.get("training") and inputs[3] is not None and inputs[4] is not None and not empty:
                numbers = (True, given["momentum"], given["eps"])
                results = torch.ops.aten._native_batch_norm_legit.default(*inputs, *numbers)
                return results if func is torch.native_batch_norm else results[0]
        return func(*args, **(kwargs or {}))

    _ARGUMENTS: ClassVar[dict[Any, tuple[str, ...]]] = {
        F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
        torch.native_batch_norm: (
            "input",
            "weight",
            "bias",
            "running_mean",
            "running_var",
            "training",
            "momentum",
            "eps",
        ),
    }


# `x.data` in a captured graph. Traced as it is, it leaves no node behind, and gradients flow through (torch 2.13).
DATA = torch._C._autograd._get_data_attr  # pyrefly: ignore[missing-attribute]


# Held by whoever traces: torch's tracers patch the whole process, and two threads would take back the patches of one
# another (torch 2.13).
TRACING = threading.RLock()


def blank(like: Tensor, shape: Sequence[int] | None = None, **kind: Any) -> Tensor:
    """A tensor that holds no numbers, as another one of a shape; a stand-in for another stand-in, mostly.

    A stand-in of a few numbers that are known has a `constant`, and `new_empty` and `empty_like` make another constant
    of it, with whatever lies in memory (torch 2.13).
    """
    made = torch.empty_like(like, **kind) if shape is None else like.new_empty(shape, **kind)
    if isinstance(made, FakeTensor):
        made.constant = None
    return made


@contextlib.contextmanager
def without_logged_errors() -> Iterator[None]:
    """Let no traceback be logged of an operator that raises on tensors that hold no numbers: the error itself is told.

    torch 2.13 logs it before it knows whether anybody catches the error.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def as_function(graph: fx.GraphModule) -> Callable[..., Any]:
    """A graph to be called. As a module, it would be shown to the hooks that somebody registered for all modules."""
    _LazyGraphModule.force_recompile(graph)  # else its `forward` calls the module (torch 2.13)
    run: Callable[..., Any] = graph.forward
    return run


def mend_inductor() -> None:
    """All that follows about Inductor."""
    let_inductor_read_what_was_written()
    let_inductor_write_apart()
    let_inductor_keep_what_was_before()
    let_inductor_copy_what_is_shifted()
    let_inductor_fuse_what_reads_an_older_buffer()


@cache
def let_inductor_read_what_was_written() -> None:
    """Keep the order of a write and its reader where Inductor lays out the reader's loops anew to fuse them on the CPU.

    It takes down what the reader reads again, by the name that the tensor had before it was written to, unless the
    reader is tied to another kernel as well. The reader may then run first: the gradient of rows taken from a
    concatenation by `index_select` came out without what the rows add to it (torch 2.13).
    """
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    def recompute(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute


@cache
def let_inductor_write_apart() -> None:
    """Give what a masked write yields a box of its own, where Inductor does such a write in place.

    It puts the new tensor into the box of the old one. An operator that it does not compile, and that was given a view
    of the old one before, reads through that box: it found what was written after it (torch 2.13, `mutate_to`).
    """
    from torch._inductor import ir, lowering

    original = lowering.index_put_as_masked_fill

    def write(x: Any, *args: Any) -> Any:
        box = x.data if isinstance(x, ir.TensorBox) else None
        if isinstance(box, ir.StorageBox) and not (box.is_input_buffer() or box.is_module_buffer()):
            x = ir.TensorBox(ir.StorageBox(box.data))
        return original(x, *args)

    lowering.index_put_as_masked_fill = write  # pyrefly: ignore[bad-assignment]


@cache
def let_inductor_keep_what_was_before() -> None:
    """Keep the copy of an input that is written to another input, as where two of them are swapped, and the copy that
    is returned of an input that is written to in part, and then as a whole.

    Inductor takes such a copy for needless, and reads the input when it has been written to (torch 2.13,
    `remove_noop_ops`). Between two outputs it leaves a copy alone.
    """
    from torch._inductor.fx_passes import post_grad

    original = post_grad.remove_noop_ops
    aten = torch.ops.aten
    source = {aten.clone.default: 0, aten.alias.default: 0, aten.copy.default: 1}

    def copied(value: Any) -> Any:
        while isinstance(value, fx.Node) and value.target in source:
            value = value.args[source[value.target]]
        return value

    def remove(graph: fx.Graph) -> None:
        written: list[Any] = [n.args for n in graph.find_nodes(op="call_function", target=aten.copy_.default)]
        output = graph.output_node()
        results: Any = output.args[0]
        if not written or not isinstance(results, tuple | list):
            original(graph)
            return
        inputs = {post_grad.get_node_storage(n) for n in graph.find_nodes(op="placeholder")}
        kept = [x.args[0] for x in results if isinstance(x, fx.Node) and x.target is aten.clone.default]
        for dst, value, *_ in written:
            what = copied(value)
            if isinstance(what, fx.Node) and what is not dst and post_grad.get_node_storage(what) in inputs:
                kept.append(value)
        output.args = ((*results, *kept),)
        original(graph)
        remaining: Any = output.args[0]
        output.args = (type(results)(remaining[: len(results)]),)

    post_grad.remove_noop_ops = remove


@cache
def let_inductor_copy_what_is_shifted() -> None:
    """Do not write to a tensor in place what is read from other elements of it, as where rows are shifted by one.

    Inductor writes `a[1:] = a[:-1].clone()` in place, without the copy: the first row came out everywhere (torch 2.13,
    `reinplace_inplaceable_ops` asks only whether the tensor is read later).
    """
    from torch._inductor.fx_passes import post_grad, reinplace

    def checked(rule: Any) -> Any:
        def extra_check(node: fx.Node) -> bool:
            targets = [x for i in rule.mutated_args if isinstance(x := node.args[i], fx.Node)]
            written = {post_grad.get_node_storage(x) for x in targets}
            others = (x for x in node.all_input_nodes if x not in targets)
            return all(post_grad.get_node_storage(x) not in written for x in others) and rule.extra_check(node)

        return replace(rule, extra_check=extra_check)

    for target, rule in reinplace.inplaceable_ops.items():
        reinplace.inplaceable_ops[target] = checked(rule)


@cache
def let_inductor_fuse_what_reads_an_older_buffer() -> None:
    """Take a buffer that a loop does not read under its own name for one that is not read from end to end.

    Inductor looks for the name to fuse loops, and failed where an input that the loop writes to had taken its place
    (torch 2.13: `KeyError: 'buf7'`).
    """
    from torch._inductor.loop_body import LoopBody

    original = LoopBody.get_read_expr

    def get_read_expr(self: Any, buffer_name: str) -> Any:
        try:
            return original(self, buffer_name)
        except KeyError:
            return None

    LoopBody.get_read_expr = get_read_expr


@contextlib.contextmanager
def inputs_saved_themselves() -> Iterator[None]:
    """Within this context Inductor's programs save inputs for the backward pass, and no views of them.

    Its views are tensors of their own to autograd, which did not see that the input was written to before the backward
    pass: `x += f(x)` had wrong gradients (torch 2.13; `recompute_views`, which leaves out some views).
    """
    _let_all_views_be_computed_again()
    with torch._functorch.config.patch(recompute_views=True):
        yield


@cache
def _let_all_views_be_computed_again() -> None:
    from torch._functorch.partitioners import OpTypes

    def is_view(_: OpTypes, node: fx.Node) -> bool:
        while node.target is operator.getitem and isinstance(source := node.args[0], fx.Node):
            node = source
        return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view

    OpTypes.is_view = is_view  # pyrefly: ignore[bad-assignment]


@cache
def let_views_of_outputs_keep_their_bases() -> None:
    """Keep what an output is a view of, where it is another output and inputs that share memory are written to.

    AOTAutograd makes one input of those, and numbers anew the inputs that outputs are views of. It does so to the
    numbers of outputs and of intermediate tensors too: the view came out as one of another output, or the number was
    out of range (torch 2.13, `create_synthetic_base_metadata`).
    """
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._functorch._aot_autograd.schemas import OutputType

    original = runtime_wrappers.create_synthetic_base_metadata

    def create(meta: Any, *args: Any, **kwargs: Any) -> Any:
        others = {
            i: info.base_idx
            for i, info in enumerate(meta.output_info)
            if info.output_type not in (OutputType.alias_of_input, OutputType.is_input)
        }
        of_inputs = copy.copy(meta)
        of_inputs.output_info = [
            replace(info, base_idx=None) if i in others else info for i, info in enumerate(meta.output_info)
        ]
        renumbered, moved = original(of_inputs, *args, **kwargs)
        for i, base in others.items():
            renumbered.output_info[i] = replace(renumbered.output_info[i], base_idx=base)
        return renumbered, moved

    runtime_wrappers.create_synthetic_base_metadata = create
