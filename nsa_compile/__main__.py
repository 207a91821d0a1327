"""``python -m nsa_compile`` is ``nsa-compile``, for launchers that start modules."""

from nsa_compile.cli import main

main()
