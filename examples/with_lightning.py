"""NSAttention under Lightning.

pip install lightning
python examples/with_lightning.py
"""

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nsa_compile
from nsa_compile.models import NSAttention, SparsePattern

PATTERN = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)


class Model(lightning.LightningModule):
    """Tokens `[B, S]` to logits `[B, S, 256]`."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, dim)
        self.norm = nn.LayerNorm(dim)
        self.attention = NSAttention(dim, n_heads=4, n_kv_heads=2, head_dim=dim // 4, pattern=PATTERN)
        self.head = nn.Linear(dim, 256)

    def configure_model(self) -> None:
        nsa_compile.compile_block(self.attention)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(self.norm(x)))

    def training_step(self, tokens: Tensor, index: int) -> Tensor:
        loss = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        if self.global_step % 10 == 0:
            print(f"step {self.global_step}: loss {loss.item():.3f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(b"to be, or not to be: that is the question. " * 20))
    loader = DataLoader(text.unfold(0, 49, 5), batch_size=4, shuffle=True, drop_last=True)
    trainer = lightning.Trainer(
        max_steps=31, accelerator="cpu", precision="bf16-mixed", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), loader)


if __name__ == "__main__":
    main()
