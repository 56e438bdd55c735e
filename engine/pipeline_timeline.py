"""When each stage of a pipelined target computed which step: the latest ones, for whoever draws them."""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Final

KEPT_STEPS: Final = 4096


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One step, in seconds on the machine's clock, which the stages share.

    `first_…`: when the first stage computed; it sent the step on when it ended. `last_…`: when the last stage had it
    and when it answered. `answered_s`: when the first stage had read the answer. `void`: nobody wanted the step any
    more, and the last stage did not compute it.
    """

    number: int
    rows: int
    void: bool
    first_began_s: float
    first_ended_s: float
    last_began_s: float
    last_ended_s: float
    answered_s: float


class Timeline:
    """Steps as they are answered. One thread."""

    def __init__(self, kept_steps: int = KEPT_STEPS) -> None:
        self._steps: deque[StepTimes] = deque(maxlen=kept_steps)

    def note(self, step: StepTimes) -> None:
        """The latest one; the oldest gives way."""
        self._steps.append(step)

    def steps(self) -> list[dict[str, int | float]]:
        """Plain data, the oldest first."""
        return [asdict(step) for step in self._steps]
