"""The machine: what it is, what it can run, and what a run needs of it."""
