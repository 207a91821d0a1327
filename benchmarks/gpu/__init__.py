"""NSA on a GPU, side by side with dense attention and the public NSA kernels; `__main__.py` says how to run it."""

from benchmarks.gpu.older_torch import fill_in

fill_in()
