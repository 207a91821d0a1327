"""NSA models for Hugging Face's `transformers` (extra `[hf]`).

Importing this package tells `AutoConfig` and `AutoModelForCausalLM` of them.
"""

from transformers import AutoConfig, AutoModelForCausalLM

from nsa_compile.hf.cache import NSACache
from nsa_compile.hf.configuration import NSAConfig
from nsa_compile.hf.modeling import NSAForCausalLM

__all__ = ["NSACache", "NSAConfig", "NSAForCausalLM"]

AutoConfig.register(NSAConfig.model_type, NSAConfig)
AutoModelForCausalLM.register(NSAConfig, NSAForCausalLM)
