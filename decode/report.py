"""Counts what became of the drafts of one request, and cuts the counts where the answer was cut."""

from collections.abc import Sequence

from core.records import SpeculationReport


class Tally:
    """The running counts of one attempt of a request, over all its choices. Engine thread only."""

    __slots__ = (
        "_accepted_tokens", "_draft_length_requested", "_draft_length_sum", "_drafter", "_fallback_reason",
        "_position_accepted", "_position_offered", "_proposed_nodes", "_request_class", "_step_tokens", "_steps",
        "plain_steps",
    )  # fmt: skip

    def __init__(self, drafter: str, request_class: str, draft_length_requested: int | None) -> None:
        self._drafter = drafter
        self._request_class = request_class
        self._draft_length_requested = draft_length_requested
        self._steps = 0
        self._proposed_nodes = 0
        self._accepted_tokens = 0
        self._step_tokens = 0
        self._draft_length_sum = 0
        self._position_offered: list[int] = []
        self._position_accepted: list[int] = []
        self._fallback_reason = ""
        self.plain_steps = 0.0
        """Steps of plain decoding that the counted steps took the time of; see `decode/draft_costs.py`."""

    def fall_back(self, reason: str) -> bool:
        """Note why (part of) the request was served without its drafter; the first reason stays. Whether it is new."""
        if self._fallback_reason:
            return False
        self._fallback_reason = reason
        return True

    def add_step(self, depths: Sequence[int], num_accepted: int, num_emitted: int, finished: bool) -> None:
        """Count one step of one choice whose draft has nodes of `depths`.

        A tree counts once a depth. Where the answer ended inside the burst, deeper nodes were never judged:
        they count as proposed nodes only.
        """
        self._steps += 1
        self._step_tokens += num_emitted
        if not depths:
            return
        depth = max(depths)
        self._proposed_nodes += len(depths)
        self._draft_length_sum += depth
        accepted = min(num_accepted, num_emitted)
        self._accepted_tokens += accepted
        judged = min(depth, num_emitted) if finished else depth
        offered = self._position_offered
        while len(offered) < judged:
            offered.append(0)
            self._position_accepted.append(0)
        for position in range(judged):
            offered[position] += 1
        for position in range(accepted):
            self._position_accepted[position] += 1

    def add_cost(self, plain_steps: float) -> None:
        """Count what one step of one choice cost."""
        self.plain_steps += plain_steps

    def snapshot(self) -> SpeculationReport:
        """The report so far."""
        return SpeculationReport(
            drafter=self._drafter,
            request_class=self._request_class,
            draft_length_requested=self._draft_length_requested,
            steps=self._steps,
            proposed_nodes=self._proposed_nodes,
            accepted_tokens=self._accepted_tokens,
            step_tokens=self._step_tokens,
            draft_length_sum=self._draft_length_sum,
            position_offered=tuple(self._position_offered),
            position_accepted=tuple(self._position_accepted),
            fallback_reason=self._fallback_reason,
        )
