"""All programs of the catalogue: importing this registers them."""

from tests.catalogue import masks, recurrences, scores, selection, softmax
from tests.catalogue.catalogue import PROGRAMS

__all__ = ["PROGRAMS", "masks", "recurrences", "scores", "selection", "softmax"]
