"""Values that functions read of modules and classes: a program that was traced with others is not used again."""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import gc
import importlib
import logging
import math
import sys
import threading
import types
import typing

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from nsa_compile import loop
from nsa_compile.loops.paths import Explorer

SOURCE = """
import sys
import torch

SCALE, TABLE, CALLS = 2.0, [1.0, 2.0], 0

class Settings:
    gain = 2.0

class Scaled:
    factor = 2.0
    def of(self, x):
        return x * self.factor

def scaled(x):
    return x * SCALE

def by_table(x):
    return x * TABLE[0]

MADE = None

def once(x):
    global MADE
    if MADE is None:
        MADE = [3.0]
    return x * MADE[0]

def with_or_without_numpy(x):
    return x * (2.0 if "numpy" in sys.modules else 3.0)

def counting(x):
    global CALLS
    CALLS += 1
    return x * CALLS
"""
LOCAL = 2.0


def topk():
    """Reads itself, and has the name of a method that a loop calls."""
    return topk


class Here:
    def of(self, x):
        return x * LOCAL


@pytest.fixture
def other(tmp_path, monkeypatch):
    """A module of somebody else."""
    (tmp_path / "somebody_elses.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("somebody_elses")
    del sys.modules["somebody_elses"]


def over_rows(function):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(function(x[t]))
        return torch.stack(rows)

    return run


def compare(run, *changes):
    """The loop as written and as compiled, before and after each change."""
    compiled = loop(run, nested="eager", cache=False, on_decline="error")
    for change in (lambda: None, *changes):
        change()
        x = torch.arange(8.0).view(4, 2)
        torch.testing.assert_close(compiled(x), run(x), rtol=0, atol=0)


@pytest.mark.deep
def test_variables_of_other_modules(other):
    compare(over_rows(other.scaled), lambda: setattr(other, "SCALE", 5.0), lambda: setattr(other, "SCALE", 2.0))
    compare(over_rows(other.by_table), lambda: other.TABLE.__setitem__(0, 5.0))


@pytest.mark.deep
def test_attributes_of_modules_and_classes(other):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(x[t] * other.SCALE * other.Settings.gain)
        return torch.stack(rows)

    compare(run, lambda: setattr(other, "SCALE", 5.0), lambda: setattr(other.Settings, "gain", 7.0))


@pytest.mark.deep
def test_zero_and_minus_zero_of_another_module(other):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(x[t] * math.copysign(1.0, other.SCALE))
        return torch.stack(rows)

    compare(run, lambda: setattr(other, "SCALE", 0.0), lambda: setattr(other, "SCALE", -0.0))


@pytest.mark.deep
def test_attributes_of_the_class_of_an_object(other):
    scaled = other.Scaled()

    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(scaled.of(x[t]))
        return torch.stack(rows)

    compare(
        run,
        lambda: setattr(other.Scaled, "factor", 5.0),
        lambda: setattr(scaled, "factor", 7.0),
        lambda: setattr(other.Scaled, "of", lambda self, x: x - 1),
    )


@pytest.mark.deep
def test_what_a_method_reads_of_the_loops_module(monkeypatch):
    here = Here()

    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(here.of(x[t]))
        return torch.stack(rows)

    compare(run, lambda: monkeypatch.setitem(globals(), "LOCAL", 5.0))


def test_an_import_elsewhere_compiles_nothing_again(other, monkeypatch):
    explored = []
    explore = Explorer.explore
    monkeypatch.setattr(Explorer, "explore", lambda self: explored.append(self) or explore(self))
    compare(
        over_rows(other.with_or_without_numpy),
        lambda: monkeypatch.setitem(sys.modules, "a_new_module", types.ModuleType("a_new_module")),
    )
    assert len(explored) == 1


def test_what_assigns_to_its_module_is_run_as_written(other, caplog):
    x = torch.ones(4, 2)
    assert loop(over_rows(other.counting), nested="eager", cache=False)(x)[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert other.CALLS == 4
    assert "counting assigns to CALLS, a variable of its module" in caplog.text


@pytest.mark.deep(but=["<lambda>0"])
@pytest.mark.parametrize(
    "step",
    [
        lambda x, t: x[: t + 1].reshape(-1)[:2],  # reads no row alone, and has no state
        lambda x, t: x[t] * x[t].sum().item(),
        lambda x, t: x[: t + 1].topk(min(2, t + 1), 0).values.sum(0),
    ],
)
def test_steps_that_ended_in_errors(step):
    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(step(x, t))
        return torch.stack(rows)

    x = torch.arange(8.0).view(4, 2)
    torch.testing.assert_close(loop(run, nested="eager", cache=False)(x), run(x), rtol=0, atol=0)


def test_what_assigns_to_its_module_once(other):
    """A table that is made when it is first asked for is there at the second step, and stays as it is."""

    def run(x):
        rows = []
        for t in range(len(x)):
            rows.append(other.once(x[t]))
        return torch.stack(rows)

    x = torch.ones(4, 2)
    expected = run(x)
    torch.testing.assert_close(loop(run, nested="eager", cache=False, on_decline="error")(x), expected)


@pytest.fixture
def layer():
    """An instance of a class that inherits a method and a variable."""

    class Base(torch.nn.Module):
        scale = 1.0

        def act(self, x):
            return x * self.scale

    class Layer(Base):
        def run(self, x):
            rows = []
            for t in range(len(x)):
                rows.append(self.act(x[t]) * getattr(self, "gain", 1.0) + callable(self.act))
            return torch.stack(rows)

    return Layer()


@pytest.mark.deep
@pytest.mark.parametrize(
    "change",
    [
        lambda kind: setattr(kind, "scale", 2.0),
        lambda kind: setattr(kind, "gain", 3.0),
        lambda kind: setattr(kind, "act", lambda self, x: x * 7),
        lambda kind: setattr(kind, "__getattr__", lambda self, name: 5.0),
        lambda kind: setattr(kind.__base__, "act", lambda self, x: x * 7),
        lambda kind: setattr(kind.__base__, "gain", 3.0),
    ],
)
def test_what_a_class_gets_between_two_calls(layer, change):
    compare(layer.run, lambda: change(type(layer)))


class Meta(type):
    k = 1.0


class Made(metaclass=Meta):
    w = 1.0

    def __call__(self, x):
        return x

    def __rmatmul__(self, x):
        return x * 2


class Other(metaclass=Meta):
    w = 3.0


class Heir(Made):
    pass


class Abstract(abc.ABC):  # noqa: B024
    pass


@typing.runtime_checkable
class Asks(typing.Protocol):
    asked: int


LOGGER = logging.getLogger("of a loop")
DEFAULTS = collections.defaultdict(lambda: 2.0)


def named():
    """Nothing but its name."""


def reads_by_another_way(monkeypatch):
    """What is read of a class, a module or a function, and how it may change."""
    made, module = Made(), types.ModuleType("somebody_elses")
    return {
        "its dict": (lambda x: x * Made.__dict__["w"], lambda: monkeypatch.setattr(Made, "w", 5.0)),
        "its metaclass": (lambda x: x * Made.k, lambda: monkeypatch.setattr(Meta, "k", 5.0)),
        "its subclasses": (lambda x: x * len(Made.__subclasses__()), lambda: keep(type("Heir", (Made,), {}))),
        "its names": (lambda x: x * len(dir(Made)), lambda: monkeypatch.setattr(Made, "more", 1, raising=False)),
        "what it can": (lambda x: x * callable(made), lambda: monkeypatch.delattr(Made, "__call__")),
        "an operator": (lambda x: x @ made, lambda: monkeypatch.setattr(Made, "__rmatmul__", lambda self, x: x * 3)),
        "all it has": (
            lambda x: x * sum(n for n in vars(Made).values() if isinstance(n, float)),
            lambda: monkeypatch.setattr(Made, "w", 5.0),
        ),
        "globals": (lambda x: x * ("NEW" in globals()), lambda: monkeypatch.setitem(globals(), "NEW", 1)),
        "a module": (lambda x: x * getattr(module, "y", 3.0), lambda: setattr(module, "y", 5.0)),
        "globals by name": (lambda x: x * globals()["LOCAL"], lambda: monkeypatch.setitem(globals(), "LOCAL", 5.0)),
        "its bases": (lambda x: x * Heir.w, lambda: setattr(Heir, "__bases__", (Other,))),
        "what an abstract class registers": (lambda x: x * isinstance(made, Abstract), lambda: Abstract.register(Made)),
        "what a protocol asks for": (
            lambda x: x * isinstance(made, Asks),
            lambda: monkeypatch.setattr(Made, "asked", 1, raising=False),
        ),
        "a module that is imported": (
            lambda x: x * ("imported_later" in sys.modules),
            lambda: monkeypatch.setitem(sys.modules, "imported_later", module),
        ),
        "a logger": (lambda x: x * LOGGER.isEnabledFor(10), lambda: monkeypatch.setattr(LOGGER, "level", 10)),
        "a default of a dict": (lambda x: x * DEFAULTS["missing"], lambda: DEFAULTS.__init__(lambda: 5.0)),
        "a limit of the system": (
            lambda x: x * sys.getrecursionlimit(),
            lambda: sys.setrecursionlimit(sys.getrecursionlimit() + 1),
        ),
        "its name": (lambda x: x * len(named.__name__), lambda: monkeypatch.setattr(named, "__name__", "longer")),
        "its text": (lambda x: x * len(named.__doc__), lambda: monkeypatch.setattr(named, "__doc__", "Longer.")),
    }


KEPT: list[object] = []
keep = KEPT.append


@pytest.mark.deep(but=["its text"])
@pytest.mark.parametrize("name", reads_by_another_way(None))
def test_what_is_read_by_another_way(name, monkeypatch):
    read, change = reads_by_another_way(monkeypatch)[name]
    compare(over_rows(read), change)


class PlusOne(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result + 1 if function in (torch.Tensor.mul, torch.Tensor.__mul__) else result


def in_both_orders(function, mode):
    """A loop as written and as compiled, first in a mode and without it after, and the other way round."""
    run, x = over_rows(function), torch.arange(8.0).view(4, 2)
    for modes in ((mode, contextlib.nullcontext), (contextlib.nullcontext, mode)):
        compiled = loop(run, nested="eager", cache=False)
        for inside in modes:
            with inside():
                expected, found = run(x), compiled(x)
            assert found.device == expected.device
            assert found.device.type == "meta" or found.equal(expected)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_of_torch():
    in_both_orders(lambda x: x * 2, PlusOne)
    in_both_orders(lambda x: torch.zeros(2), lambda: torch.device("meta"))
    in_both_orders(lambda x: x.cumsum(0) * 2, lambda: torch.device("meta"))
    in_both_orders(lambda x: x * (2 if torch.is_inference_mode_enabled() else 3), torch.inference_mode)
    in_both_orders(lambda x: x * (2 if torch.is_anomaly_enabled() else 3), torch.autograd.detect_anomaly)
    only_math = lambda: sdpa_kernel(SDPBackend.MATH)  # noqa: E731
    in_both_orders(lambda x: x * (2 if torch.backends.cuda.flash_sdp_enabled() else 3), only_math)


@pytest.mark.deep
def test_the_default_device():
    def run(x, where):
        with torch.device(where):
            rows = []
            for t in range(len(x)):
                rows.append(torch.zeros(2) + t)
        return torch.stack(rows)

    compiled = loop(run, nested="eager", cache=False, on_decline="error")
    for where in ("cpu", "meta", "cpu"):
        assert compiled(torch.ones(2, 2), where).device.type == where
    torch.set_default_device("meta")
    try:
        made = loop(over_rows(lambda x: torch.zeros(2)), nested="eager", cache=False, on_decline="error")
        assert made(torch.ones(2, 2, device="cpu")).device.type == "meta"
    finally:
        torch.set_default_device(None)
    assert made(torch.ones(2, 2)).device.type == "cpu"


@pytest.mark.deep
def test_settings_of_torch():
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        compare(over_rows(lambda x: x * torch.get_num_threads()), lambda: torch.set_num_threads(threads + 1))
        compare(
            over_rows(lambda x: x * len(torch.get_float32_matmul_precision())),
            lambda: torch.set_float32_matmul_precision("medium"),
        )
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)


@pytest.mark.deep
def test_forward_of_a_module_that_is_replaced():
    class Doubles(torch.nn.Module):
        def forward(self, x):
            return x * 2

    module = Doubles()
    compare(over_rows(lambda x: module(x)), lambda: setattr(Doubles, "forward", lambda self, x: x * 6))


class OfItsOwn:
    factor = 2.0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return args[0] * cls.factor


@pytest.mark.parametrize("make", [OfItsOwn, lambda: torch.ones(1)])
def test_keys_that_are_told_apart_by_their_addresses(make, caplog):
    held = types.SimpleNamespace(key=make())
    table = {held.key: 2.0}
    run = over_rows(lambda x: x * table.get(held.key, 9.0))
    compiled, x = loop(run, nested="eager", cache=False), torch.ones(4, 2)
    for _ in range(2):
        assert compiled(x).equal(run(x))
        held.key = make()
    assert "has keys that are told apart by their addresses" in caplog.text


def locked_after_use(x):
    with LOCK:
        x = x * 1
    return x * (2 if LOCK.locked() else 3)


LOCK, OF_ITS_OWN, OUTSIDE = threading.Lock(), OfItsOwn(), types.SimpleNamespace(x=None)


@pytest.mark.deep(but=["<lambda>-it asks whether a lock is held"])
@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda x: x * (id(LOCK) > 0), "it asks for the address of an object"),
        (lambda x: x * (2 if LOCK.locked() else 3), "it asks whether a lock is held"),
        (locked_after_use, "it asks whether a lock is held"),
        (lambda x: x * (2 if gc.isenabled() else 3), "it asks for the garbage collector"),
        (lambda x: torch.add(x, OF_ITS_OWN), "an object that has a __torch_function__ of its own"),
        (lambda x: x * (2 if OUTSIDE.x.grad_fn is None else 3), "it reads .grad_fn"),
        (lambda x: x * (2 if OUTSIDE.x._base is None else 3), "it reads ._base"),
        (lambda x: x * (2 if OUTSIDE.x._is_view() else 3), "it asks whether a tensor is a view"),
        (lambda x: x * (2 if OUTSIDE.x.is_inference() else 3), "it asks whether a tensor is one of inference mode"),
        (lambda x: x * OUTSIDE.x.untyped_storage().nbytes(), "it asks for the memory of a tensor"),
    ],
)
def test_what_is_asked_in_vain(read, why, caplog):
    OUTSIDE.x = torch.ones(9)[:2]
    run, x = over_rows(read), torch.ones(4, 2)
    assert loop(run, nested="eager", cache=False)(x).equal(run(x))
    assert why in caplog.text


@pytest.mark.deep
def test_tensors_from_outside_are_asked_themselves():
    made = torch.ones(2, requires_grad=True)
    OUTSIDE.x = made

    def read(x):
        return x * (2 if OUTSIDE.x.is_leaf else 3) * (5 if OUTSIDE.x.requires_grad else 7) * OUTSIDE.x.stride()[0]

    compare(
        over_rows(read),
        lambda: setattr(OUTSIDE, "x", made * 1),
        lambda: setattr(OUTSIDE, "x", torch.ones(2)),
        lambda: setattr(OUTSIDE, "x", torch.ones(4)[::2]),
    )


@pytest.mark.deep
def test_a_table_that_is_kept_of_a_number():
    scale = functools.lru_cache(lambda n: n * KEPT_FACTOR[0])
    run = over_rows(lambda x: x * scale(3))

    def change():
        KEPT_FACTOR[0] = 3.0
        scale.cache_clear()

    compare(run, change)


KEPT_FACTOR = [2.0]


def import_in_a_helper(x):
    import somebody_elses

    return x * somebody_elses.SCALE


def import_of_a_name(x):
    from somebody_elses import SCALE

    return x * SCALE


@pytest.mark.deep
@pytest.mark.parametrize(
    "read",
    [
        import_in_a_helper,
        import_of_a_name,
        lambda x: x * importlib.import_module("somebody_elses").SCALE,
        lambda x: x * sys.modules["somebody_elses"].SCALE,
    ],
)
def test_a_module_that_a_step_imports(read, other):
    compare(over_rows(read), lambda: setattr(other, "SCALE", 5.0))


@pytest.mark.parametrize("held", [{"k": 2.0}, [2.0], types.SimpleNamespace(k=2.0)])
def test_what_is_kept_at_a_tensor(held, caplog):
    OUTSIDE.x = torch.ones(2)
    OUTSIDE.x.held = held
    run, x = over_rows(lambda x: x * OUTSIDE.x), torch.ones(4, 2)
    assert loop(run, nested="eager", cache=False)(x).equal(run(x))
    assert f"OUTSIDE.x.held is a {type(held).__name__} that is kept at a tensor" in caplog.text
