"""Attention of one query in plain torch, on any device: dense, as one query's scores are few."""

from nsa_compile.ops.step.reference import forward

__all__ = ["forward"]
