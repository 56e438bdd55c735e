"""What a drafter proposes depends on the text alone: not on where the prompt's KV came from, nor on pauses at K = 0."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from core.records import SamplingParams, SpeculationParams
from core.settings import DecodeSettings
from decode.choice import Choice
from decode.draft import Draft
from decode.drafters.head_drafter import HeadDrafter
from decode.drafters.protocol import DraftBudget
from engine.kv_layout import PlaneKind
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import Answer, DecodeStand, decode_stand

SAMPLED = SamplingParams(temperature=12.0, max_tokens=40, seed=7)
BLOCK = 16
PROMPT = prompt_of(5 * BLOCK + 3)
STATEFUL = ("ngram", "draft_model", "medusa", "eagle", "eagle2", "eagle3", "mtp")
Proposed = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
"""Token ids and parents of each draft, by the number of tokens behind which it was made."""


class Watched:
    """Notes what one drafter of a stand proposes, and the states that it does so from."""

    def __init__(self, stand: DecodeStand, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.proposed: Proposed = {}
        self.planes: Tensor | None = None
        self.own: Tensor | None = None
        self._drafter = stand.worker.drafters[name]
        real: Callable[[Sequence[DraftBudget]], Sequence[Draft]] = self._drafter.propose

        def propose(budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
            drafts = real(budgets)
            for budget, draft in zip(budgets, drafts, strict=True):
                self._note(budget, draft)
            return drafts

        monkeypatch.setattr(self._drafter, "propose", propose)

    def take(self) -> tuple[Proposed, Tensor | None, Tensor | None]:
        """What was noted since the last time: drafts, hidden planes, the head's own K."""
        noted = self.proposed, self.planes, self.own
        self.proposed, self.planes, self.own = {}, None, None
        return noted

    def _note(self, budget: DraftBudget, draft: Draft) -> None:
        request = budget.request
        computed = len(request.history.token_ids) - 1
        self.proposed[computed] = draft.token_ids, draft.parents
        if self._drafter.needs.hidden_layers:
            self.planes = request.hidden(0, computed)
        if isinstance(self._drafter, HeadDrafter):
            kv = self._drafter._kv
            table = self._drafter._states[request.key].table
            self.own = kv.read_plane(PlaneKind.KEY, 0, kv.slots(table, 0, table.num_tokens))


def same(first: Tensor | None, second: Tensor | None) -> bool:
    """Bit for bit, or neither."""
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)


def cached(answer: Answer) -> int:
    assert answer.finished is not None
    return answer.finished.usage.cached_prompt_tokens


@pytest.mark.parametrize("name", STATEFUL)
async def test_a_prefix_hit_and_a_hand_off_give_the_drafter_the_state_that_it_has_without(
    stand: DecodeStand, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    watched = Watched(stand, name, monkeypatch)
    speculation = SpeculationParams(drafter=name, draft_length=4)
    arms = {}
    for arm, salt, peers in (
        ("cold", b"cold", []),
        ("prefix hit", b"cold", []),
        ("hand-off", b"two", stand.peers),
        ("hand-off behind a hit", b"part", stand.peers),
    ):
        if arm == "hand-off behind a hit":
            await stand.ask(PROMPT[: 2 * BLOCK], SAMPLED, salt=salt)
        answer = await stand.ask(PROMPT, SAMPLED, speculation, salt=salt, peers=peers)
        arms[arm] = answer, watched.take()
    cold, (proposed, planes, own) = arms.pop("cold")
    assert proposed
    assert (planes is not None) == bool(stand.worker.drafters[name].needs.hidden_layers)
    assert (own is not None) == isinstance(stand.worker.drafters[name], HeadDrafter)
    expected_cached = {"prefix hit": 5 * BLOCK, "hand-off": 0, "hand-off behind a hit": 2 * BLOCK}
    for arm, (answer, (again, planes_again, own_again)) in arms.items():
        assert cached(answer) == expected_cached[arm]
        assert answer.ids == cold.ids, arm
        assert again == proposed, arm
        assert same(planes_again, planes), arm
        assert same(own_again, own), arm
        assert answer.report == cold.report, arm


@pytest.mark.parametrize("name", STATEFUL)
async def test_state_stays_warm_while_nothing_is_drafted(
    tiny_model: Path,
    script: Path,
    all_drafters: DecodeSettings,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """A choice that drafts from its 21st token on proposes what one does that drafted from the beginning."""
    speculation = SpeculationParams(drafter=name, draft_length=4)
    async with decode_stand(tiny_model, script, decode=all_drafters) as stand:
        watched = Watched(stand, name, monkeypatch)
        at_once = await stand.ask(PROMPT, SAMPLED, speculation)
        drafted, _, _ = watched.take()
        pace = stand.worker._pace
        real = pace.lengths

        def paused(
            choices: Sequence[Choice], rooms: Sequence[tuple[int, int]], other_rows: int
        ) -> list[tuple[int, int]]:
            lengths = real(choices, rooms, other_rows)
            return [
                length if choice.emitted_tokens > 20 else (0, 0)
                for choice, length in zip(choices, lengths, strict=True)
            ]

        monkeypatch.setattr(pace, "lengths", paused)
        after = await stand.ask(PROMPT, SAMPLED, speculation)
        resumed, _, _ = watched.take()
        assert after.ids == at_once.ids
        assert after.report is not None
        assert after.report.steps > 20, "it paused"
        assert min(resumed) >= len(PROMPT) + 20
        both = resumed.keys() & drafted.keys()
        assert both
        assert {place: resumed[place] for place in both} == {place: drafted[place] for place in both}
        await stand.idle()
