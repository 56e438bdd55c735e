"""A client to be killed: `python -m tests.bench.soak_client HOST:PORT`, one JSON line of options on standard input.

Prints `streaming` once the first tokens are there, then reads on to the end.
"""

import json
import sys

from outrider import Client


def main(address: str) -> None:
    """Streams one answer."""
    options = json.loads(sys.stdin.readline())
    prompt = options.pop("prompt")
    with Client(address) as client:
        for number, _ in enumerate(client.stream(prompt, **options)):
            if number == 0:
                print("streaming", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
