"""Text to token ids away from the event loop: a few threads, so that megabytes of text stall nobody (CASES B57)."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from core.errors import InvalidArgument
from router.views import ChatTurn, PromptInput

Result = TypeVar("Result")

_THREADS = 2
_CLASSIFIED_TOKENS = 1024


class PromptTokenizer(Protocol):
    """What the router needs of `core.tokenizer.Tokenizer`; called from threads."""

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`."""
        ...

    def apply_chat_template(self, messages: Sequence[ChatTurn]) -> str:
        """The prompt of a chat, as text. Raises InvalidArgument where the template refuses the messages."""
        ...


class TokenisingPool:
    """Tokenises for the router. How much waits here is bounded by admission, which comes first."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenise")

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer of this model."""
        return tuple(self._tokenizer.eos_token_ids)

    async def prompt_ids(self, prompt: PromptInput) -> tuple[int, ...]:
        """The prompt's ids. A chat goes through the chat template, which writes the model's special tokens itself; to a
        text the tokenizer adds those that the model expects around any text (a begin-of-sequence token, for some).

        Raises InvalidArgument naming `text` or `chat`.
        """
        if prompt.token_ids is not None:
            return prompt.token_ids
        if prompt.chat is not None:
            turns = prompt.chat
            return tuple(
                await self._run(lambda: self._tokenizer.encode(self._tokenizer.apply_chat_template(turns)))
            )
        text = prompt.text or ""
        return tuple(await self._run(lambda: self._tokenizer.encode(text, add_special=True)))

    async def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's ids as written and behind a space, since a tokenizer tells the two apart; no id list twice."""
        if not words:
            return ()

        def encode_all() -> tuple[tuple[int, ...], ...]:
            found: dict[tuple[int, ...], None] = {}
            for index, word in enumerate(words):
                for spelling in (word, " " + word.lstrip(" ")):
                    ids = tuple(self._tokenizer.encode(spelling))
                    if not ids:
                        raise InvalidArgument(f"sampling.bad_words[{index}]", "has no tokens")
                    found[ids] = None
            return tuple(found)

        return await self._run(encode_all)

    async def classified_text(self, prompt: PromptInput) -> str:
        """The text that the class is judged by: the text, the last message of a user, or the ids' beginning and end."""
        if prompt.text is not None:
            return prompt.text
        if prompt.chat is not None:
            by_user = [turn.content for turn in prompt.chat if turn.role == "user"]
            return by_user[-1] if by_user else prompt.chat[-1].content
        ids = prompt.token_ids or ()
        if len(ids) > 2 * _CLASSIFIED_TOKENS:
            ids = ids[:_CLASSIFIED_TOKENS] + ids[-_CLASSIFIED_TOKENS:]
        return await self._run(lambda: self._tokenizer.decode(ids))

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Ends the threads once what runs has run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
