"""Serve an exported model by `transformers serve`, and ask it eight things at once with OpenAI's client.

    pip install 'nsa-compile[hf]' 'transformers[serving]'
    nsa-compile export runs/NAME --to hf --out shakespeare
    python examples/serve.py shakespeare --continuous-batching --compile

Words after the folder are options of `transformers serve`.
"""

import asyncio
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

from openai import AsyncOpenAI

PROMPTS = [
    "ROMEO:",
    "To be, or",
    "O",
    "My lord,",
    "First Citizen:\n",
    "The king is",
    "Farewell",
    "What say you to this,",
]
SERVE = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"]


@contextmanager
def served(folder, *options):
    """The address of a server on this machine, which ends with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [folder, "--trust-remote-code", "--host", "127.0.0.1", "--port", port, *options]
    server = subprocess.Popen([*SERVE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        while not answers(f"{address}/health"):
            if server.poll() is not None:
                sys.exit(f"transformers serve {' '.join(words)} ended with exit code {server.returncode}")
            time.sleep(0.2)
        yield f"{address}/v1"
    finally:
        server.terminate()
        server.wait()


def answers(url):
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except (urllib.error.URLError, TimeoutError):
        return False


async def text(client, folder, request):
    """What the server goes on with, put together from its stream."""
    stream = await client.completions.create(model=folder, max_tokens=40, stream=True, **request)
    return "".join([part.choices[0].text async for part in stream])


async def ask(folder, address, requests):
    """Each request alone, then all at once; the texts and the seconds of both."""
    async with AsyncOpenAI(base_url=address, api_key="none", timeout=600) as client:
        await asyncio.gather(*(text(client, folder, request) for request in requests))  # so that all is compiled
        begun = time.perf_counter()
        alone = [await text(client, folder, request) for request in requests]
        between = time.perf_counter()
        at_once = await asyncio.gather(*(text(client, folder, request) for request in requests))
        return alone, at_once, between - begun, time.perf_counter() - between


def main(folder, *options):
    ways = {"greedy": [{"prompt": prompt, "temperature": 0} for prompt in PROMPTS]}
    if "--continuous-batching" in options:
        # Otherwise all texts are drawn by one generator, which the last seed that arrives sets anew.
        ways["sampled"] = [{"prompt": prompt, "seed": n} for n, prompt in enumerate(PROMPTS)]
    for way, requests in ways.items():
        with served(folder, *options) as address:
            alone, at_once, seconds, seconds_at_once = asyncio.run(ask(folder, address, requests))
        same = sum(a == b for a, b in zip(alone, at_once, strict=True))
        print(f"{way}: {same} of {len(PROMPTS)} texts are those alone; {len(set(at_once))} are different")
        print(f"{way}: {seconds:.2f} s one after the other, {seconds_at_once:.2f} s at once")


if __name__ == "__main__":
    main(*sys.argv[1:])
