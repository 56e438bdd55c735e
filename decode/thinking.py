"""Whether an answer thinks aloud now, by the markers around it, and the K that goes with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class ThinkingSpan:
    """Of one choice. `opening`, `closing`: token ids of the markers, at least one each.

    A marker is found where its tokens stand as the tokenizer writes it alone, as special tokens do.
    """

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    thinking_length: int
    outside_length: int
    thinking: bool = field(default=False, init=False)
    _seen: int = field(default=0, init=False)

    def turn(self, token_ids: Sequence[int]) -> int | None:
        """K from now on, where a marker behind the tokens seen before changes it. `token_ids`: prompt and answer."""
        longest = max(len(self.opening), len(self.closing))
        fresh = tuple(token_ids[max(0, self._seen - longest + 1) :])
        self._seen = len(token_ids)
        opened, closed = _last_end(fresh, self.opening), _last_end(fresh, self.closing)
        if opened == closed or (opened > closed) == self.thinking:
            return None
        self.thinking = not self.thinking
        return self.thinking_length if self.thinking else self.outside_length


def _last_end(token_ids: tuple[int, ...], marker: tuple[int, ...]) -> int:
    """Where the last `marker` ends; 0: nowhere."""
    for end in range(len(token_ids), len(marker) - 1, -1):
        if token_ids[end - len(marker) : end] == marker:
            return end
    return 0
