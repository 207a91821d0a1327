"""What a run needs, before it starts: ``nsa-compile estimate``."""
