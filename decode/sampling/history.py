"""The tokens that penalties, bad words and minimum length look at."""

from collections.abc import Sequence


class TokenHistory:
    """Prompt and output of one choice; grows at commit, never holds unverified tokens.

    The draft path to a node is passed beside it, so rejected drafts leave no trace here.
    """

    __slots__ = ("output_counts", "prompt_ids", "token_ids")

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self.token_ids = list(prompt_ids)
        self.output_counts: dict[int, int] = {}
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
