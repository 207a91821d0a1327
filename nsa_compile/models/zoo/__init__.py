"""Attentions of the field, a file a paper: its decode step beside its equations, and the layer around it.

What a configuration needs of each, its sizes and its useful work, lies in ``*_variants.py`` and imports no torch.
"""
