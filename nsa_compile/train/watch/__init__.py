"""The watch over a run: what a rank tells, what is wrong with it and what is done."""
