"""parallelize_recurrences: carries that are computed from their own earlier values, for all steps together.

Before, a recurrent carry is known step after step alone. After, where its update is linear in it, the record holds a
form in which `batch_prefill` computes it without a loop:

    S = a * S + b                      a running sum with factors: the state after each step, by one operator
    S = max(S + a, b)                  a running maximum, minimum or log-sum-exp
    S = a * S + b * R + …;  R = …      the same of several carries, by a matrix or a complex number at each element
    S = a * S + k vᵀ;  y = qᵀ S        in chunks of steps, by products of matrices; no step's state is held
    S = a * S + k vᵀ - p (uᵀ S)        the same, with a triangular system for each chunk; p may be k

What is linear is followed operator by operator (`analyses/affine.py`), whatever the spelling. A carry whose update is
not keeps a loop over its part of the step, and the report names the operator that stands against it.
"""

from __future__ import annotations

import logging

from torch import fx

from nsa_compile.analyses.inner_loops import recurrent_groups
from nsa_compile.analyses.parallel_forms import find_parallel_form
from nsa_compile.analyses.writes import IsRecurrence
from nsa_compile.ir.scans import Declined, declined_if_it_fails, find_scans
from nsa_compile.passes.pipeline import PassContext, register

log = logging.getLogger("nsa_compile")


@register("parallelize_recurrences", requires=("carries",))
def parallelize_recurrences(gm: fx.GraphModule, context: PassContext) -> bool:
    """Find a parallel form for each carry that is computed from its own earlier values."""
    changed = False
    for site in find_scans(gm):
        record = site.record
        if record is None:
            continue
        for group in recurrent_groups(record):
            if not context.may_rewrite():
                continue
            try:
                with declined_if_it_fails("its recurrence cannot be followed", site.node):
                    form = find_parallel_form(site, record, group, context.options.max_guard_bytes)
            except Declined as why:
                if isinstance(record.why_loop(group), IsRecurrence):
                    why.reason = f"the recurrence has no parallel form: {why.reason}"
                    record.parallel[group] = why.afresh()
                    changed = True
                continue
            record.parallel[group] = form
            context.match(site.node.name, f"{site.name_of(group[0])}: {form.form}")
            changed = True
    return changed
