"""Controlled experiments: variants of a run trained in turns, compared in pairs, with a plain verdict."""
