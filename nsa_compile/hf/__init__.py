"""NSA models for Hugging Face's `transformers` (extra `[hf]`).

Importing this package tells `AutoConfig` and `AutoModelForCausalLM` of them.
"""

import sys

from nsa_compile.extras import no_messages

with no_messages():  # transformers imports torchao where it is installed
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    from nsa_compile.hf.cache import NSACache
    from nsa_compile.hf.configuration import NSAConfig
    from nsa_compile.hf.modeling import NSAForCausalLM

__all__ = ["NSACache", "NSAConfig", "NSAForCausalLM"]

AutoConfig.register(NSAConfig.model_type, NSAConfig)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM)
# `transformers serve` (5.24) takes the class that config.json names from its own `transformers`, though the model is
# registered. That need not be the module of this name: `transformers.processing_utils` makes a second one.
for _module in (transformers, getattr(sys.modules.get("transformers.cli.serving.model_manager"), "transformers", None)):
    if _module is not None:
        _module.NSAForCausalLM = NSAForCausalLM  # pyrefly: ignore[missing-attribute]
