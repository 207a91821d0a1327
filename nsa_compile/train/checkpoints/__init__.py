"""Checkpoints: whole or absent, checked, found again, pruned."""
