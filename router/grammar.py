"""Grammars of requests, compiled once to see whether they are any: away from the event loop, and within a time."""

import asyncio
from collections import OrderedDict

from core.errors import InvalidArgument
from core.grammar import FIELD, check_grammar
from core.grammar_thread import GrammarThread
from core.records import Grammar

MAX_REMEMBERED = 1024


class GrammarGate:
    """One for the router; used by the event loop alone. What is wrong with a grammar is remembered by digest."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._thread = GrammarThread()
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, grammar: Grammar | None) -> None:
        """Raises InvalidArgument naming `sampling.grammar` for one that none could follow, or that takes too long."""
        if grammar is None:
            return
        digest = grammar.digest
        if digest not in self._faults:
            self._faults[digest] = await self._fault_of(grammar)
            if len(self._faults) > MAX_REMEMBERED:
                self._faults.popitem(last=False)
        self._faults.move_to_end(digest)
        if self._faults[digest]:
            raise InvalidArgument(FIELD, self._faults[digest])

    async def _fault_of(self, grammar: Grammar) -> str:
        """What is wrong with it; empty: nothing. How long it took may be another's fault: that is not remembered."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._thread.run(lambda: check_grammar(grammar))
        except TimeoutError:
            raise InvalidArgument(FIELD, f"is not compiled within {self._timeout_s:g} s") from None
        except InvalidArgument as error:
            return error.message.removeprefix(f"{FIELD}: ")
        return ""

    def close(self) -> None:
        """Ends the thread once what runs has run."""
        self._thread.close()
