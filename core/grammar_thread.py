"""Compiling grammars away from the event loop: one thread, with the deep stack that native recursion may need."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

_STACK_BYTES = 64 * 2**20
"""A JSON schema of 128 KiB, the most that settings allow, can nest 2,600 deep by references. Twice that still fits."""


class GrammarThread:
    """Started at its first use. What waits is bounded by the requests that are let in."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    async def run(self, work: Callable[[], Result]) -> Result:
        """`work` on the thread, in turn. Cancelling the wait does not end what runs already."""
        if self._executor is None:
            self._executor = _with_deep_stack()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """What waits is dropped; what runs ends by itself."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)


def _with_deep_stack() -> ThreadPoolExecutor:
    before = threading.stack_size(_STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        executor.submit(int).result()
    finally:
        threading.stack_size(before)
    return executor
