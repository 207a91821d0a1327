"""Text from a trained model, one decode step a token."""

from __future__ import annotations

from collections.abc import Callable

import torch

from nsa_compile.models import NSATransformer
from nsa_compile.models.transformer import ModelState


@torch.no_grad()
def generate(
    model: NSATransformer,
    prompt: torch.Tensor,
    count: int,
    temperature: float,
    generator: torch.Generator,
    decode_step: Callable[..., tuple[ModelState, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Continue a prompt by sampling.

    Args:
        model: decoded sequentially, with the very step that training runs over whole sequences.
        prompt: token ids ``[P]`` int64, at least one.
        count: tokens to generate, at least one.
        temperature: divides the logits; greater is more random.
        generator: source of randomness, on the prompt's device.
        decode_step: the step, ``model.decode_step`` by default; ``nsa_compile.compile_decode_step(model)`` is the fast
            one for long texts, after a compilation for each length of the cache.

    Returns:
        The generated ids ``[count]``, without the prompt.
    """
    decode_step = decode_step or model.decode_step
    # The last generated token is never fed back.
    state = model.init_state(batch_size=1, max_len=len(prompt) + count - 1)
    for token in prompt.split(1):
        state, logits = decode_step(state, token)
    generated: list[torch.Tensor] = []
    while True:
        probabilities = (logits.float() / temperature).softmax(dim=-1)  # [1, V]
        token = torch.multinomial(probabilities, 1, generator=generator).flatten()  # [1]
        generated.append(token)
        if len(generated) == count:
            return torch.cat(generated)
        state, logits = decode_step(state, token)
