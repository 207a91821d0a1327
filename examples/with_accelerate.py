"""NSAttention under Hugging Face's accelerate, on texts of unequal length that are filled up at the left.

pip install accelerate
python examples/with_accelerate.py
accelerate launch examples/with_accelerate.py
"""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nsa_compile
from nsa_compile.models import NSAttention, SparsePattern

PATTERN = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)
TEXTS = ["to be, or not to be: that is the question. ", "the rest is silence. ", "words, words, words. "] * 8


class Model(nn.Module):
    """Tokens `[B, S]` to logits `[B, S, 256]`."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.norm = nn.LayerNorm(dim)
        self.attention = NSAttention(dim, n_heads=4, n_kv_heads=2, head_dim=dim // 4, pattern=PATTERN)
        self.head = nn.Linear(dim, 256)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(self.norm(x), attention_mask))


def collate(texts: list[str]) -> tuple[Tensor, Tensor]:
    """Tokens and mask `[B, S]`, S the longest of the batch."""
    size = max(len(text) for text in texts)
    tokens = torch.tensor([list(text.rjust(size, chr(0)).encode()) for text in texts])
    return tokens, tokens != 0


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    model = Model()
    nsa_compile.compile_block(model.attention)
    loader = DataLoader(TEXTS, batch_size=6, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)

    for epoch in range(6):
        for tokens, mask in loader:
            with accelerator.accumulate(model):
                logits = model(tokens, mask)
                following = tokens[:, 1:].masked_fill(~mask[:, :-1], -100)
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), following.flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
