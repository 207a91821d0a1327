"""A run read back from its files: ``nsa-compile report``, and the closing words in the terminal."""
