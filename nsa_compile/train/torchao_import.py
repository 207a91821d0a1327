"""Importing torchao, which is optional, takes seconds and talks."""

from __future__ import annotations

import importlib
import logging
import warnings
from typing import Any


def import_torchao(name: str) -> Any:
    """Import a module of torchao, or one of ours that imports it, without its messages.

    They are about libraries for hardware that is not here.
    """
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        module = importlib.import_module(name)
    finally:
        logging.disable(disabled)
    # Said once for each kind of state when an optimizer's first step is compiled; it concerns a cache only.
    warnings.filterwarnings("ignore", message="OptimState.*_stable_hash_for_caching")
    return module
