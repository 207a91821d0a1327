"""The compiler: one pass a file, plus the pipeline that runs and checks them."""
