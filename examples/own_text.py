"""Train the packaged configuration on a text of your own.

    python examples/own_text.py my_text.txt
    python examples/own_text.py my_text.txt --set train.steps=50 --set model.n_layers=2

This is `nsa-compile train --set data.name=my_text.txt`, from Python.
"""

import sys

from nsa_compile.cli import main

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/own_text.py TEXT [--set KEY=VALUE]...")
    main(["train", "--set", f"data.name={sys.argv[1]}", *sys.argv[2:]])
