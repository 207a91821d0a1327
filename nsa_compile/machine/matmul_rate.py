"""How fast the machine multiplies matrices: the peak that a model's use of the machine (MFU) is a fraction of.

A peak that is measured once, with one size, is beaten: small products are faster than large ones on some machines and
slower on others, and a busy neighbour halves whatever is measured beside it. So several sizes are measured, and on the
CPU those of one thread as well. Such a product takes less than a millisecond, which a busy machine grants, too, and
all threads together are no faster than each of them alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from nsa_compile.machine import cores
from nsa_compile.machine.environment import synchronize

# Rows and columns; a CPU is full with small ones, a GPU is not.
SIZES = {"cpu": (256, 512, 1024, 2048, 4096), "cuda": (1024, 2048, 4096, 8192)}
# What an idle machine usually does is this much of its best, whenever it is measured, and of its peak: one thread alone
# is clocked higher than all together, and two may share a core.
IDLE, LEAST_OF_PEAK = 0.6, 1 / 3

# FLOP/s of each repeated product, by size.
Rates = dict[int, list[float]]


@dataclass(frozen=True)
class MatmulRate:
    """How fast square matrix products are, in FLOP/s.

    Attributes:
        peak: what none is faster than: the best of all, or on the CPU the best of one thread times the threads.
        best: the best on all threads.
        usual: on all threads, with the time that others took: the best times the share of the time that products would
            have taken had each been as fast as the best of its size. It is far below the peak on a busy machine.
        threads: of the CPU, of all processes together; 0 on a GPU.
    """

    peak: float
    best: float
    usual: float
    threads: int = 0


def measure_matmul(
    device: torch.device,
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    seconds: float = 0.5,
    processes: int = 1,
) -> MatmulRate:
    """The rate of square matrix products, the best of several sizes and of `dtypes`, measured for about `seconds`.

    Args:
        dtypes: element types that are multiplied; also int8 and float8_e4m3fn.
        processes: that measure at the same time on the cores of this machine, each its share; on a GPU of no effect.
    """
    share = seconds / len(dtypes)
    found = [_measure(device, dtype, share) for dtype in dtypes]
    best = max(found, key=lambda rate: rate.peak)
    if device.type == "cuda":
        return best
    # More threads than cores are no faster than the cores.
    fraction = min(1.0, cores() / (torch.get_num_threads() * processes))
    return MatmulRate(best.peak * fraction, best.best * fraction, best.usual * fraction, best.threads)


def multiplied_dtypes(dtype: str, matmul: str = "native") -> tuple[torch.dtype, ...]:
    """Element types of the products of a run with this `train.dtype` and `train.matmul`.

    Operators of attention multiply in float32 on some machines, and layers that are not converted as they were.
    """
    used = {"float32": (), "bf16": (torch.bfloat16,)}[dtype]
    low = {"native": (), "int8": (torch.int8,), "float8": (torch.float8_e4m3fn,)}[matmul]
    return (torch.float32, *used, *low)


def _measure(device: torch.device, dtype: torch.dtype, seconds: float) -> MatmulRate:
    sizes = SIZES[device.type]
    threads = torch.get_num_threads()
    if device.type == "cuda" or threads == 1:
        rates = _rates(device, dtype, sizes, seconds)
        return MatmulRate(_best(rates), _best(rates), _usual(rates), threads if device.type == "cpu" else 0)
    together = _rates(device, dtype, sizes, seconds * 0.6)
    torch.set_num_threads(1)
    try:
        alone = _rates(device, dtype, sizes[:2], seconds * 0.4)
    finally:
        torch.set_num_threads(threads)
    best = _best(together)
    return MatmulRate(max(best, threads * _best(alone)), best, _usual(together), threads)


def _best(rates: Rates) -> float:
    return max(max(of_size) for of_size in rates.values())


def _usual(rates: Rates) -> float:
    # The median would miss a neighbour: a scheduler interrupts few of the short products, for long.
    needed = sum(len(of_size) * _seconds_at(max(of_size), side) for side, of_size in rates.items())
    taken = sum(_seconds_at(rate, side) for side, of_size in rates.items() for rate in of_size)
    return _best(rates) * needed / taken


def _seconds_at(rate: float, side: int) -> float:
    return 2 * side**3 / rate


def _rates(device: torch.device, dtype: torch.dtype, sizes: Sequence[int], seconds: float) -> Rates:
    """FLOP/s of repeated products, for each of the sizes that the time allows; at least for one."""
    rates: Rates = {}
    fastest = 0.0
    for side in sizes:
        if 8 * fastest > seconds / 2:
            break  # a product of the next size takes eight times as long
        multiply = _product(side, device, dtype)
        multiply()
        times: list[float] = []
        end = time.perf_counter() + seconds / len(sizes)
        while not times or time.perf_counter() < end:
            synchronize(device)
            start = time.perf_counter()
            multiply()
            synchronize(device)
            times.append(time.perf_counter() - start)
        fastest = min(times)
        rates[side] = [2 * side**3 / t for t in times]
    return rates


def _product(side: int, device: torch.device, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """A product of two square matrices, as the run's own linear layers multiply in this element type."""
    if dtype == torch.int8:
        a, b = (torch.randint(-9, 9, (side, side), dtype=dtype, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)
    return lambda: torch.mm(a, b)


def total(rates: Sequence[MatmulRate]) -> MatmulRate:
    """Of several processes that measured at the same time, together."""
    return MatmulRate(*(sum(getattr(rate, name) for rate in rates) for name in ("peak", "best", "usual", "threads")))


def best_of(rates: Sequence[MatmulRate]) -> float:
    """The peak by several measurements of one machine."""
    return max(rate.peak for rate in rates)


def busy(rates: Sequence[MatmulRate]) -> str | None:
    """One line if several measurements of one machine differ so much that it had other work; None if they agree."""
    usual = [rate.usual for rate in rates]
    if min(usual) >= max(IDLE * max(rate.best for rate in rates), LEAST_OF_PEAK * best_of(rates)):
        return None
    shown = ", then ".join(f"{rate / 1e9:,.0f}" for rate in usual)
    return (
        f"the machine was busy with something else: its matrix products usually made {shown} GFLOP/s, of "
        f"{best_of(rates) / 1e9:,.0f} that they can make; times, tokens/s and MFU are those of a busy machine"
    )


def impossible(mfu: float | None) -> str | None:
    """Why a fraction of the peak is impossible, on one line; None if it is possible."""
    if mfu is None or mfu <= 1:
        return None
    return f"MFU {mfu:.1%} is impossible: the machine's peak was mis-measured, and nothing can be concluded from it"
