"""K turns with the markers of thinking, and the text does not."""

import pytest

from core.records import SamplingParams, SpeculationParams, ThinkingPace
from core.wire import thinking_to_wire
from tests.integration.decode.conftest import prompt_of
from tests.support.decode_stand import DecodeStand

SAMPLED = SamplingParams(temperature=12.0, max_tokens=40, seed=7)
RIGHT = SpeculationParams(drafter="scripted-right", draft_length=4)
PACE = ThinkingPace(0, "<t>", "</t>")


@pytest.mark.parametrize(
    ("markers", "fixed", "bursts"),
    [
        (b"<t>", False, [1, 1, 1, 1]),
        (b"<t>", True, [1, 5, 5, 5]),
        (b"<t>x</t>", False, [1, 5, 5, 5]),
        (b"", False, [1, 5, 5, 5]),
    ],
    ids=["thinking", "thinking, fixed K", "has thought", "no markers"],
)
async def test_k_follows_the_markers_only_where_the_controller_moves_it(
    stand: DecodeStand, markers: bytes, fixed: bool, bursts: list[int]
) -> None:
    prompt = [*prompt_of(30), *markers]
    plain = await stand.ask(prompt, SAMPLED)
    stand.record(prompt, SAMPLED, plain)
    request = stand.request(prompt, SAMPLED, RIGHT, fixed=fixed)
    request.thinking.CopyFrom(thinking_to_wire(PACE))
    answer = await stand.answer(request)
    assert (answer.ids, answer.text) == (plain.ids, plain.text)
    assert answer.bursts[:4] == bursts
