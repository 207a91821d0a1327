"""The trainer: the loop and the parts of a step.

Its packages know nothing of the loop: ``records`` (what a run writes), ``checkpoints``, ``watch``, ``distributed`` (the
processes that train together) and ``report`` (a run read back).
"""
