"""What tests change in the processes that they start. Python imports a module of this name at every start, so the
processes are those that users start, and nothing in the package knows of tests.

The machine's matrix products are measured for a moment instead of half a second, twice a run.

Garbage is collected seldom: going over the objects of torch's compiler took a fifth of the time of compiling.

Dynamo does not time its guards after flushing the processor's caches, and no `FakeTensorMode` keeps the stack that it
was made in: both serve logs that no test reads, and took a tenth of the time of compiling.

Torch traces nothing. pytest hands its handlers to every logger that does not propagate (since 9.2), torch's trace among
them, and torch takes any handler of that for a wish to write out each graph.

``FAULT=<what>@<rank>:<step>`` plants a fault, while the file ``FAULT_ONCE`` exists. It is removed when the fault
strikes, so that the run goes on without it. The rank ``LINGER`` takes three seconds to leave.
"""

import gc
import os
import signal
import sys
import time
import traceback
import types
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder


def nan(loss):
    return loss * float("nan")


def kill(loss):
    os.kill(os.getpid(), signal.SIGKILL)


def term(loss):
    os.kill(os.getpid(), signal.SIGTERM)
    return loss


def hup(loss):
    os.kill(os.getpid(), signal.SIGHUP)
    return loss


def crash(loss):
    raise ValueError("a planted fault")


def hang(loss):
    time.sleep(3600)


def stall_in_data():
    time.sleep(3600)


def strikes(rank, step, seen):
    seen.append(None)
    return os.environ.get("RANK", "0") == rank and len(seen) == int(step) and os.path.exists(os.environ["FAULT_ONCE"])


def plant(module):
    what, _, where = os.environ["FAULT"].partition("@")
    rank, _, step = where.partition(":")
    seen = []
    if what == "early":  # a signal that comes while things are imported, before there is a step
        if module.__name__ == "nsa_compile.data.sampling" and strikes(rank, step, seen):
            os.unlink(os.environ["FAULT_ONCE"])
            os.kill(os.getpid(), signal.SIGTERM)
        return
    if what == "stall" and module.__name__ == "nsa_compile.data.sampling":
        sequences = module.BatchSampler.sequences

        def slow(self, indices):
            if strikes(rank, step, seen):
                os.unlink(os.environ["FAULT_ONCE"])
                stall_in_data()
            return sequences(self, indices)

        module.BatchSampler.sequences = slow
    if what != "stall" and module.__name__ == "nsa_compile.train.steps":
        compute = module.logits_and_loss

        def faulty(*arguments):
            logits, loss = compute(*arguments)
            if strikes(rank, step, seen):
                if what != "crash":  # a mistake in the code does not go away
                    os.unlink(os.environ["FAULT_ONCE"])
                if what == "hook":  # within the collective of the gradients
                    loss.register_hook(lambda gradient: hang(gradient))
                else:
                    loss = globals()[what](loss)
            return logits, loss

        module.logits_and_loss = faulty
    if module.__name__ == "nsa_compile.train.watch.heartbeat" and "LINGER" in os.environ:
        leave = module.Heartbeat.__exit__

        def slow_exit(self, *error):
            if os.environ.get("RANK") == os.environ["LINGER"]:
                time.sleep(3)
            leave(self, *error)

        module.Heartbeat.__exit__ = slow_exit


def measure_briefly(module):
    dtypes, _, processes = module.measure_matmul.__defaults__
    module.measure_matmul.__defaults__ = (dtypes, 0.02, processes)


def time_no_guards(module):
    module.profile_guard_manager = lambda *arguments: 0.0


def keep_no_stacks(module):
    class Traceback(types.ModuleType):
        """`traceback`, with an empty stack."""

        extract_stack = staticmethod(list)

        def __getattr__(self, name):
            return getattr(traceback, name)

    module.traceback = Traceback("traceback")


def trace_nothing(module):
    start = module._init_logs

    def start_without_trace(*arguments):
        start(*arguments)
        module.trace_log.propagate = True
        module.trace_log.handlers.clear()

    module._init_logs = start_without_trace


CHANGES = {
    "nsa_compile.machine.matmul_rate": measure_briefly,
    "torch._dynamo.guards": time_no_guards,
    "torch._subclasses.fake_tensor": keep_no_stacks,
    "torch._logging._internal": trace_nothing,
}
if "FAULT" in os.environ:
    FAULTY = ("nsa_compile.train.steps", "nsa_compile.data.sampling", "nsa_compile.train.watch.heartbeat")
    CHANGES |= dict.fromkeys(FAULTY, plant)


class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in CHANGES:
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


gc.set_threshold(300_000)
sys.meta_path.insert(0, Finder())
for name in CHANGES.keys() & sys.modules.keys():  # of a process that was forked
    CHANGES[name](sys.modules[name])
