"""Looking at the compiler: its passes, and what they did to a model.

`bisect` finds the pass, and the single rewrite of it, that makes a check of yours fail.
"""

from typing import Any

__all__ = ["Blame", "bisect"]


def __getattr__(name: str) -> Any:
    # On use: commands of this package answer a wrong option without importing torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nsa_compile.profiles import blame

    return getattr(blame, name)
