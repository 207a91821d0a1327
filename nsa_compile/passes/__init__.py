"""The compiler: one pass a file, plus the pipeline that runs and checks them."""

# The passes in the order they run, each the file of its name. Here and not in the pipeline, because whoever only wants
# the names shall not have to import torch.
ORDER = (
    "sink_tables",
    "resolve_carries",
    "unroll_buffers",
    "eliminate_guards",
    "raise_attention",
    "fuse_selection_scatter",
    "index_cache",
    "parallelize_recurrences",
    "batch_prefill",
    "lower_attention",
    "annotate_ranges",
    "skinny_products",
)
