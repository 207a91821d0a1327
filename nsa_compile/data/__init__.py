"""Token streams to train on: the packaged plays, synthetic tasks, local files, or random bytes, by name."""

from nsa_compile.data.corpus import Corpus, load_corpus
from nsa_compile.data.sampling import BatchSampler, Resumable, evenly_spaced_batches
from nsa_compile.data.synthetic import answer_accuracy

__all__ = ["BatchSampler", "Corpus", "Resumable", "answer_accuracy", "evenly_spaced_batches", "load_corpus"]
