"""Two processes train one model under DDP, with compiled blocks.

    torchrun --nproc-per-node 2 examples/two_processes.py

The blocks are compiled first and the model is wrapped in DDP afterwards, so gradients are sent block by block while the
backward pass goes on. `nsa-compile train --nproc 2` does the same with everything a real run needs.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import nsa_compile
from nsa_compile.models import NSAConfig, NSATransformer, SparsePattern


def main(nested: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights in both processes
    pattern = SparsePattern(compress_block=8, compress_stride=4, select_block=8, num_selected=3, window=8)
    config = NSAConfig(vocab_size=256, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, pattern=pattern)
    model = NSATransformer(config)
    nsa_compile.compile_blocks(model, nested=nested)
    wrapped = DistributedDataParallel(model)

    generator = torch.Generator().manual_seed(dist.get_rank())  # other data in each
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    for _ in range(3):
        tokens = torch.randint(256, (2, 33), generator=generator)
        loss = F.cross_entropy(wrapped(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    others = mine.clone()
    dist.broadcast(others, src=0)
    print(f"rank {dist.get_rank()}: loss {loss.item():.3f}, weights as on rank 0: {torch.equal(mine, others)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(nested=sys.argv[1] if len(sys.argv) > 1 else "inductor")
