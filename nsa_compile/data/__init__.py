"""Token streams to train on: the packaged plays, a local text file, or uniform random bytes under that very name."""

from nsa_compile.data.corpus import Corpus, load_corpus
from nsa_compile.data.sampling import BatchSampler, evenly_spaced_batches

__all__ = ["BatchSampler", "Corpus", "evenly_spaced_batches", "load_corpus"]
