"""The ``nsa-compile`` command, which is also ``python -m nsa_compile``, for launchers that start modules."""

from __future__ import annotations

import sys

from nsa_compile.extras import missing_extra


def main() -> None:
    """Run the command line, or say in one line which extra it needs."""
    try:
        from nsa_compile.cli import main as run
    except ModuleNotFoundError as error:
        missing = missing_extra(error, next((word for word in sys.argv[1:2] if not word.startswith("-")), ""))
        if missing is None:
            raise
        print(f"error: {missing}", file=sys.stderr)
        sys.exit(missing.exit_code)
    run()


if __name__ == "__main__":
    main()
