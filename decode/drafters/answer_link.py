"""What the cache on the engine thread and the event loop hand each other: two bounded queues that never block."""

from collections import deque
from typing import Final

from decode.drafters.answer_record import AnswerRecord, RecordLimits

_MAX_OUTGOING: Final = 256
_MAX_INCOMING: Final = 128


class AnswerLink:
    """`secret` keys the owners' digests and must be the same in all workers that share.

    Each method and each count belongs to one side; a deque's ends may be moved by two threads. `num_lost`: answers
    that nobody took in time. `num_failed`: exchanges that found Redis away. `num_bad`: records that were none.
    """

    def __init__(self, secret: bytes, limits: RecordLimits) -> None:
        self.secret = secret
        self.limits = limits
        self.num_lost = 0
        self.num_failed = 0
        self.num_bad = 0
        self._outgoing: deque[AnswerRecord] = deque(maxlen=_MAX_OUTGOING)
        self._incoming: deque[AnswerRecord] = deque()

    def offer(self, record: AnswerRecord) -> None:
        """Engine thread: an answer for the others. Where nobody takes them the oldest one is lost."""
        if len(self._outgoing) == _MAX_OUTGOING:
            self.num_lost += 1
        self._outgoing.append(record)

    def receive(self, max_records: int) -> list[AnswerRecord]:
        """Engine thread: what others answered, in order."""
        records: list[AnswerRecord] = []
        while self._incoming and len(records) < max_records:
            records.append(self._incoming.popleft())
        return records

    def outgoing(self, max_records: int) -> list[AnswerRecord]:
        """Event loop: takes what is to be sent."""
        records: list[AnswerRecord] = []
        while self._outgoing and len(records) < max_records:
            records.append(self._outgoing.popleft())
        return records

    @property
    def has_incoming(self) -> bool:
        """Whether the engine thread has something to receive."""
        return bool(self._incoming)

    @property
    def room(self) -> int:
        """Event loop: how many records may be handed in now."""
        return _MAX_INCOMING - len(self._incoming)

    def hand_in(self, record: AnswerRecord) -> None:
        """Event loop: an answer of another worker. The caller keeps to `room`."""
        self._incoming.append(record)
