"""Brings a request's choices under its grammar before they join the batch. Event loop; compiling has its own thread."""

from core.clock import Clock
from core.grammar import CompiledGrammar, GrammarCompiler
from core.grammar_thread import GrammarThread
from core.tokenizer import Tokenizer
from decode.choice import Request
from decode.grammar_state import GrammarState


class GrammarIntake:
    """One a worker. `vocabulary`: width of the target's logits."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, clock: Clock) -> None:
        self._compiler = GrammarCompiler(tokenizer)
        self._vocabulary = vocabulary
        self._clock = clock
        self._thread = GrammarThread()

    async def constrain(self, request: Request) -> None:
        """Called once, before the request is queued. A request without a grammar passes through.

        Raises InvalidArgument for a bad grammar, or committed tokens that do not follow it; FailedPrecondition where
        this vocabulary cannot be held to any.
        """
        grammar = request.job.sampling.grammar
        if grammar is None:
            return
        states = await self._thread.run(lambda: self._states(self._compiler.compile(grammar), request))
        for choice, state in zip(request.choices, states, strict=True):
            choice.history.grammar = state

    def close(self) -> None:
        """Ends the thread once what runs has run."""
        self._thread.close()

    def _states(self, compiled: CompiledGrammar, request: Request) -> list[GrammarState | None]:
        """None for a choice that has ended."""
        sampling = request.job.sampling
        return [
            None
            if choice.ended
            else GrammarState(compiled, choice.history, sampling, self._vocabulary, self._clock)
            for choice in request.choices
        ]
