"""A register of decode steps in the styles in which people write them, with their inputs.

A program is a function of its sizes and of tensors, which its parameters name: `def f(z, q, k)` gets `INPUTS["q"](z)`
and `INPUTS["k"](z)`. Programs of one group compute the same function in different spellings.
"""

import inspect
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import nsa_compile


@dataclass(frozen=True)
class Sizes:
    """Sizes of a program. `H` heads share `G` heads of keys; `N` is the state of a state-space model; `I` heads index.

    `block` keys make a block, `top` of which are selected; `tokens` are what a token-wise selection takes.
    """

    B: int = 2
    S: int = 24
    H: int = 4
    G: int = 2
    D: int = 8
    N: int = 4
    I: int = 2  # noqa: E741
    block: int = 4
    stride: int = 2
    top: int = 3
    tokens: int = 8
    window: int = 6
    sinks: int = 2


#: What the programs are timed at.
LONG = Sizes(B=1, S=2048, H=8, G=2, D=64, N=16, I=4, block=64, stride=32, top=8, tokens=512, window=512, sinks=4)


def _normal(*shape: str) -> Callable[[Sizes], torch.Tensor]:
    return lambda z: torch.randn([_size(z, name) for name in shape], dtype=torch.float64)


def _size(z: Sizes, name: str) -> int:
    return {"W": z.H * z.D, "R": z.D // 2, "L": 2 * z.D, "M": z.S // 2, "3": 3}.get(name) or getattr(z, name)


def _documents(z: Sizes) -> torch.Tensor:
    """Three documents of different lengths for each sequence, numbered from 1."""
    ends = torch.stack([torch.tensor([z.S // 3 + b, z.S // 3 + z.S // 4 + b]) for b in range(z.B)])
    return 1 + (torch.arange(z.S) >= ends[:, :, None]).sum(1)


def _real(z: Sizes) -> torch.Tensor:
    """False for left padding of another width in each sequence."""
    return torch.arange(z.S) >= torch.arange(1, z.B + 1)[:, None] * z.S // 8


#: name of a parameter -> its value, in float64 where it is a float.
INPUTS: dict[str, Callable[[Sizes], torch.Tensor]] = {
    "q": _normal("B", "S", "H", "D"),
    "k": _normal("B", "S", "H", "D"),
    "v": _normal("B", "S", "H", "D"),
    "kg": _normal("B", "S", "G", "D"),  # keys and values that heads share
    "vg": _normal("B", "S", "G", "D"),
    "q2": _normal("B", "S", "H", "D"),  # a second projection
    "k2": _normal("B", "S", "H", "D"),
    "v2": _normal("B", "S", "H", "D"),
    "q_rope": _normal("B", "S", "H", "R"),
    "k_rope": _normal("B", "S", "R"),
    "latent": _normal("B", "S", "L"),
    "w_key": lambda z: _normal("H", "D", "L")(z) / math.sqrt(2 * z.D),
    "w_value": lambda z: _normal("H", "D", "L")(z) / math.sqrt(2 * z.D),
    # Positive, so that no product is cut to zero by a ReLU: spellings differ in which of tied tokens they take.
    "q_index": lambda z: _normal("B", "S", "I", "R")(z).abs(),
    "k_index": lambda z: _normal("B", "S", "R")(z).abs(),
    "w_index": _normal("B", "S", "I"),
    "q_index_group": lambda z: _normal("B", "S", "G", "R")(z).abs(),
    "gates": lambda z: _normal("B", "S", "H", "3")(z).sigmoid(),
    "k_memory": _normal("B", "M", "H", "D"),
    "v_memory": _normal("B", "M", "H", "D"),
    "real_memory": lambda z: torch.arange(z.S // 2) < z.S // 2 - 1 - torch.arange(z.B)[:, None],
    "documents": _documents,
    "real": _real,
    "sink": _normal("H"),
    "temperature": lambda z: _normal("H")(z).exp(),
    "bias_table": _normal("H", "window"),  # one bias for each distance below `window`, the last for all beyond
    "bias_rows": _normal("H", "S", "S"),
    "mix": _normal("H", "H"),
    "decay": lambda z: (_normal("B", "S", "H")(z) + 3).sigmoid(),  # one number a head and step
    "log_decay": lambda z: F.logsigmoid(_normal("B", "S", "H")(z) + 3),
    "decays": lambda z: (_normal("B", "S", "H", "D")(z) + 3).sigmoid(),  # one a channel
    "beta": lambda z: _normal("B", "S", "H")(z).sigmoid(),
    "x": _normal("B", "S", "W"),
    "gate": lambda z: _normal("B", "S", "W")(z).sigmoid(),
    "delta": lambda z: F.softplus(_normal("B", "S", "W")(z)),
    "a_log": lambda z: _normal("W", "N")(z),
    "b_state": _normal("B", "S", "N"),
    "c_state": _normal("B", "S", "N"),
    "channel_decay": lambda z: _normal("W")(z).exp(),
    "channel_bonus": _normal("W"),
    "kernel": _normal("W", "3"),
    "w_hidden": lambda z: _normal("W", "W")(z) / math.sqrt(z.H * z.D),
    "w_input": lambda z: _normal("W", "W")(z) / math.sqrt(z.H * z.D),
    "tokens": lambda z: torch.randint(0, 5, (z.B, z.S)),
}


@dataclass(frozen=True)
class Program:
    """One decode step under `nsa_compile.scan`."""

    name: str
    group: str
    design: str
    spelling: str
    function: Callable[..., torch.Tensor]
    tolerance: float

    def inputs(self, z: Sizes, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        """Fresh tensors, the same for the same parameter of any program; floats ask for gradients."""
        values = []
        for name in list(inspect.signature(self.function).parameters)[1:]:
            torch.manual_seed(zlib.crc32(name.encode()))
            value = INPUTS[name](z)
            values.append(value.to(dtype).requires_grad_() if value.is_floating_point() else value)
        return values

    def at(self, z: Sizes) -> Callable[..., torch.Tensor]:
        """The program as a function of its tensors alone."""

        def run(*tensors):
            return self.function(z, *tensors)

        return run


PROGRAMS: dict[str, Program] = {}


def program(group: str, spelling: str, tolerance: float = 1e-9):
    """Register a function `(sizes, tensors…) -> tensor`; its module is its design."""

    def register(function):
        name = f"{group}/{function.__name__}"
        if name in PROGRAMS:
            raise ValueError(f"two programs are named {name}")
        design = function.__module__.rsplit(".", 1)[-1]
        PROGRAMS[name] = Program(name, group, design, spelling, function, tolerance)
        return function

    return register


#: What a program can become, and its rank. `operator`: attention that follows its mask. `parallel`: a recurrence in
#: parallel form. `dense`: batched, all keys read. `copies`: batched, a cache copied for each step. `crash`: an error
#: that no rule asks for.
CLASSES = {"operator": 0, "parallel": 0, "dense": 1, "copies": 2, "loop": 3, "one line": 4, "crash": 5}


def verdict(report) -> str:
    """What became of a program: its operators of attention, then `parallel`, `copies` and `loop`.

    `dense` is attention to all keys under a mask, `batched` torch's own operators, `parallel` a recurrence in parallel
    form. `copies` says that a cache is copied for each step: a guard is kept, or an attention has one query, step by
    step. `loop` is a recurrence without a parallel form, or a whole scan.
    """
    if report is None or report.left_alone is not None:
        return "left alone"
    batched = [choice for choice in report.attention if choice.operator != "a step of a loop"]
    parts = sorted({choice.operator for choice in batched})
    forms = [r.form for scan in report.scans for r in scan.recurrences]
    if any(form != "loop" for form in forms):
        parts.append("parallel")
    one_query = any(choice.what.startswith("attention of 1 queries") for choice in batched)
    if one_query or any(scan.batched and scan.guards_kept for scan in report.scans):
        parts.append("copies")
    if "loop" in forms or any(not scan.batched for scan in report.scans):
        parts.append("loop")
    return " + ".join(parts) or "batched"


def class_of(found: str) -> str:
    """The worst of CLASSES that a verdict holds."""
    words = {"batched": "dense", "left alone": "loop"}
    parts = (words.get(part, part) for part in found.split(" + "))
    return max((part if part in CLASSES else "operator" for part in parts), key=CLASSES.__getitem__)


def falls_short(today: str, owed: str) -> bool:
    """Whether a verdict is of a worse class than the one owed."""
    return CLASSES[class_of(today)] > CLASSES[owed] or (owed == "operator" and today == "parallel")


def write(cache, t, row):
    """Row t of `cache [..., S, D]` becomes `row [..., D]`."""
    at = torch.arange(cache.shape[-2]) == t
    return torch.where(at[:, None], row[..., None, :], cache)


def empty(z, x):
    """A cache `[B, H, S, D]` for rows `x [B, S, H, D]`."""
    return x.new_zeros(z.B, x.shape[2], z.S, x.shape[3])


def score(q, k):
    """Scaled products of `q [B, H, D]` with `k [B, H, S, D]`."""
    return torch.einsum("bhd,bhsd->bhs", q, k) * q.shape[-1] ** -0.5


def weigh(weights, v):
    """Sums of `v [B, H, S, D]` by `weights [B, H, S]`."""
    return torch.einsum("bhs,bhsd->bhd", weights, v)


def over_time(step, init, *xs):
    """Outputs `[B, S, ...]` of a scan over the second dimension of `xs`, each `[B, S, ...]`; a step gets t first."""
    rows = tuple(x.transpose(0, 1) for x in xs)
    _, y = nsa_compile.scan(step, init, (torch.arange(rows[0].shape[0]), *rows))
    return y.transpose(0, 1)


def over_cache(z, attend, q, k, v, *rows):
    """`attend(t, q, K, V, *rows)` for each token, where K and V `[B, H, S, D]` hold all rows written so far."""

    def step(cache, token):
        t, q, k, v, *row = token
        cache = write(cache[0], t, k), write(cache[1], t, v)
        return cache, attend(t, q, *cache, *row)

    return over_time(step, (empty(z, k), empty(z, v)), q, k, v, *rows)
