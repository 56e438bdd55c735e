"""Blocks and places: who waits for them, who gets them, who gives them back. Engine thread only."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from core.prefix_hash import extend_block_hashes
from decode.choice import Choice, Request
from decode.scheduler import VictimView, WaitingView, admit, choose_victim
from engine.kv_cache import KvCache, OutOfBlocks

_LOOK_AHEAD = 64
"""Waiting entries that are looked at in one turn."""


class Requeued(Exception):
    """A request that waited for blocks was put back into the queue, its cached prefix given up."""


@dataclass(slots=True, eq=False)
class _Waiting:
    entry: Request | Choice
    overtaken: int = 0


@dataclass(slots=True, eq=False)
class _Reserving:
    request: Request
    num_tokens: int
    answer: Callable[[Exception | None], None]


class Room:
    """The waiting queue, the blocks promised to requests that were admitted, and reservations that must wait."""

    def __init__(self, kv: KvCache, max_running: int, prefix_key: Callable[[Request], bytes]) -> None:
        self._kv = kv
        self._max_running = max_running
        self._prefix_key = prefix_key
        self._waiting: list[_Waiting] = []
        self._reserving: list[_Reserving] = []
        self._promised: dict[int, int] = {}

    @property
    def num_waiting(self) -> int:
        """Requests and preempted choices in the queue."""
        return len(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Nobody waits and nothing is promised."""
        return not (self._waiting or self._reserving or self._promised)

    def enqueue(self, entry: Request | Choice, front: bool = False) -> None:
        """Wait for admission; a preempted choice goes to the front."""
        self._waiting.insert(0 if front else len(self._waiting), _Waiting(entry))

    def withdraw(self, request: Request) -> None:
        """Forget a request and its choices, wherever they wait."""
        self._waiting = [item for item in self._waiting if _request_of(item.entry) is not request]
        self._reserving = [item for item in self._reserving if item.request is not request]
        self._promised.pop(request.key, None)

    def admit(self, occupied: int) -> list[Request | Choice]:
        """Open the tables of those that may join now. `occupied`: choices that have a place."""
        if not self._waiting or occupied >= self._max_running:
            return []
        stats = self._kv.stats()
        free_blocks = stats.free + stats.cached - sum(self._promised.values())
        views = [self._view(index, item) for index, item in enumerate(self._waiting[:_LOOK_AHEAD])]
        decision = admit(views, free_blocks, self._max_running - occupied)
        for index in decision.overtaken:
            self._waiting[index].overtaken += 1
        admitted = [self._waiting[index].entry for index in decision.admitted]
        taken = set(decision.admitted)
        self._waiting = [item for index, item in enumerate(self._waiting) if index not in taken]
        for entry in admitted:
            self._open(entry)
        return admitted

    def reserve(self, request: Request, num_tokens: int, answer: Callable[[Exception | None], None]) -> None:
        """Reserve the prompt table up to `num_tokens`, now or when blocks are given back, then `answer(None)`.

        `answer(Requeued())`: the request is in the queue again. One that holds the blocks already (a hand-off
        that broke) waits behind nobody: the others may wait for what it holds.
        """
        table = request.prompt_table
        assert table is not None
        holds_all = len(table.block_ids) >= self._kv.layout.blocks_for(num_tokens)
        place = 0 if holds_all else len(self._reserving)
        self._reserving.insert(place, _Reserving(request, num_tokens, answer))
        self.retry_reservations(alone=False)

    def retry_reservations(self, alone: bool) -> None:
        """Called each turn. `alone`: nobody else will give blocks back, so waiters must not wait for each other."""
        while self._reserving:
            first = self._reserving[0]
            table = first.request.prompt_table
            assert table is not None
            try:
                self._kv.reserve(table, first.num_tokens)
            except OutOfBlocks:
                if not alone or len(self._reserving) < 2:
                    return
                self._give_up(self._reserving.pop())
                continue
            self._reserving.pop(0)
            self._promised.pop(first.request.key, None)
            first.answer(None)

    @property
    def num_reserving(self) -> int:
        """Requests that wait for blocks of their prompt."""
        return len(self._reserving)

    def victim(self, holders: Iterable[Choice]) -> Choice | None:
        """The choice that gives its blocks back when one cannot get its next."""
        by_key = {choice.key: choice for choice in holders if choice.holds_blocks}
        views = [VictimView(key, choice.emitted_tokens, choice.joined) for key, choice in by_key.items()]
        key = choose_victim(views)
        return None if key is None else by_key[key]

    def publish(self, choice: Choice) -> None:
        """Enter the choice's committed full blocks in the prefix cache."""
        table = choice.table
        assert table is not None
        request = choice.request
        committed = choice.history.token_ids[: table.num_tokens]
        hashes = extend_block_hashes(
            request.hashes, committed, self._kv.layout.block_size, self._prefix_key(request)
        )
        self._kv.publish(table, hashes)

    def _give_up(self, item: _Reserving) -> None:
        request = item.request
        if request.prompt_table is not None:
            self._kv.close(request.prompt_table)
            request.prompt_table = None
        self._promised.pop(request.key, None)
        self.enqueue(request, front=True)
        item.answer(Requeued())

    def _view(self, index: int, item: _Waiting) -> WaitingView:
        entry = item.entry
        layout = self._kv.layout
        capacity = self._kv.stats().total
        if isinstance(entry, Choice):
            blocks = layout.blocks_for(len(entry.history.token_ids) + 1)
            if entry.beams is not None:
                blocks = entry.beams.num_blocks(layout)
            return WaitingView(index, min(blocks, capacity), entry.places, item.overtaken)
        longest = max(len(choice.history.token_ids) for choice in entry.choices)
        held = self._kv.match(entry.hashes[: (entry.prompt_tokens - 1) // layout.block_size])
        places = entry.open_places
        blocks = min(layout.blocks_for(longest + 1) + places - 1, capacity)
        return WaitingView(index, max(1, blocks - held), places, item.overtaken)

    def _open(self, entry: Request | Choice) -> None:
        layout = self._kv.layout
        if isinstance(entry, Choice):
            request = entry.request
            computed = len(entry.history.token_ids) - 1
            hashes = extend_block_hashes(
                request.hashes,
                entry.history.token_ids[:computed],
                layout.block_size,
                self._prefix_key(request),
            )
            entry.table = self._kv.open(hashes, computed)
            return
        table = self._kv.open(entry.hashes, entry.prompt_tokens - 1)
        entry.prompt_table = table
        entry.cached_tokens = table.num_tokens
        self._promised[entry.key] = layout.blocks_for(entry.prompt_tokens) - len(table.block_ids)


def _request_of(entry: Request | Choice) -> Request:
    return entry if isinstance(entry, Request) else entry.request
