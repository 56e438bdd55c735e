"""What the fault tests share: prompts of the real model, and answers asked for in the background."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from core.tokenizer import Tokenizer
from outrider import Client, GenerateOptions, Result
from tests.bench.prompts import model_directory

PROSE = (
    "The night train from the capital to the coast leaves every evening and reaches the harbour in the morning. "
    "It stops in five towns, and in each of them somebody waits on the platform with a lamp and a list. "
)
Ask = Callable[[str, list[int], GenerateOptions], "Future[Result]"]


def asked_with(options: GenerateOptions, drafter: str, cache_salt: str = "") -> GenerateOptions:
    """The same request under another drafter and cache salt: its text must be the same."""
    return {**options, "drafter": drafter, "cache_salt": cache_salt}


@pytest.fixture(scope="session")
def long_prompt() -> list[int]:
    """About 1,200 tokens, so that its prefill takes seconds where chunks are small."""
    tokenizer = Tokenizer.from_directory(model_directory())
    return tokenizer.encode(" ".join(f"Part {number}. {PROSE}" for number in range(24)))


@pytest.fixture(scope="session")
def short_prompt() -> list[int]:
    """A prompt of a few blocks."""
    return Tokenizer.from_directory(model_directory()).encode(PROSE + "Then one evening")


@pytest.fixture
def ask() -> Iterator[Ask]:
    """Asks an address in the background; the future holds the result, or the error that ended it."""
    with ThreadPoolExecutor(8) as pool:

        def start(address: str, prompt: list[int], options: GenerateOptions) -> "Future[Result]":
            def call() -> Result:
                with Client(address, timeout_s=90.0) as client:
                    return client.generate(prompt, **options)

            return pool.submit(call)

        yield start
