"""What a program depends on, and Dynamo does not ask about before it runs it again (torch 2.13)."""

from __future__ import annotations

import math
from typing import Any, cast

from torch._dynamo.guards import GuardBuilder, get_verbose_code_parts
from torch._guards import Guard, TracingContext

__all__ = ["guard_what_dynamo_does_not"]


def guard_what_dynamo_does_not() -> None:
    """Guard the graph that is being compiled: that modules without hooks have none, and that a zero keeps its sign.

    Dynamo takes for granted that no hook comes after the first call, and compares a number with `==`.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    guards: Any = context.guards_context.dynamo_guards
    for guard in list(guards):
        kind, source = guard.create_fn_name(), cast(Any, guard.originating_source)
        if kind == "EMPTY_NN_MODULE_HOOKS_DICT":
            guards.add(source.make_guard(GuardBuilder.SEQUENCE_LENGTH))
        elif kind in ("CONSTANT_MATCH", "EQUALS_MATCH"):
            guards.add(source.make_guard(_same_sign))


def _same_sign(builder: GuardBuilder, guard: Guard) -> None:
    zero = builder.get(guard)
    if type(zero) is not float or zero != 0:
        return
    sign = math.copysign(1, zero)
    manager, said = builder.get_guard_manager(guard), f"math.copysign(1, {guard.name}) == {sign}"
    parts = get_verbose_code_parts(said, guard)
    manager.add_lambda_guard(lambda x: math.copysign(1, x) == sign, parts, guard.user_stack)
