"""The tokens that penalties, bad words, minimum length and grammar look at."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class TokenConstraint(Protocol):
    """What the whole answer must follow, such as a grammar, at the end of a history."""

    @property
    def fault(self) -> str:
        """Why nothing may come next, where nothing may."""
        ...

    def mask(self, path: Sequence[int]) -> Tensor | None:
        """[vocabulary] bool: what may come behind the draft tokens `path`, min_tokens heeded; not to be changed.

        None: `path` itself is not allowed, or too costly to look behind; never for the empty path.
        """
        ...


class TokenHistory:
    """Prompt and output of one choice; grows at commit, never holds unverified tokens.

    The draft path to a node is passed beside it, so rejected drafts leave no trace here. `grammar`: what the answer
    must follow; whoever draws with this history heeds it (`decode/sampling/masking.py`).
    """

    __slots__ = ("_prompt_set", "grammar", "output_counts", "prompt_ids", "token_ids")

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids = list(prompt_ids)
        self.output_counts: dict[int, int] = {}
        self.grammar: TokenConstraint | None = None
        self._prompt_set: tuple[int, ...] | None = None
        self.extend(output_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append emitted tokens."""
        self.token_ids.extend(token_ids)
        for token_id in token_ids:
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    @property
    def output_ids(self) -> Sequence[int]:
        """The answer so far."""
        return self.token_ids[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        """Length of the answer so far."""
        return len(self.token_ids) - len(self.prompt_ids)

    @property
    def distinct_prompt_ids(self) -> tuple[int, ...]:
        """Each prompt token once; computed at first use."""
        if self._prompt_set is None:
            self._prompt_set = tuple(dict.fromkeys(self.prompt_ids))
        return self._prompt_set
