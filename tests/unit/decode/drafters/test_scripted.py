"""The scripted drafters repeat themselves, and read their script again when it changes."""

import json
from pathlib import Path

import pytest
import torch

from core.drafter_settings import ScriptedSettings
from core.prefix_hash import prompt_digest
from core.records import SamplingParams
from decode.draft import Draft
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from decode.drafters.scripted import (
    HiddenDrafter,
    RightDrafter,
    Script,
    ScriptedDrafter,
    TreeDrafter,
    WrongDrafter,
)
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable

PROMPT = [5, 6, 7]
ANSWER = list(range(100, 140))
VOCAB = 300


def write(path: Path, answer: list[int]) -> None:
    entry = {"prompt_digest": prompt_digest(PROMPT).hex(), "seed": 3, "temperature": 0.8, "answer": answer}
    path.write_text(json.dumps(entry) + "\n")


def make(kind: type[ScriptedDrafter], path: Path) -> ScriptedDrafter:
    settings = ScriptedSettings(script=str(path))
    return kind(settings, Script(path), VOCAB)  # type: ignore[call-arg]


def request_of(output: list[int], seed: int = 3, width: int = 3) -> DraftRequest:
    return DraftRequest(
        key=1,
        history=TokenHistory(PROMPT, output),
        sampling=SamplingParams(temperature=0.8),
        seed=seed,
        choice=0,
        verification="invariant",
        hidden=lambda start, end: torch.zeros(2, end - start, 4),
        draft_width=width,
        table=BlockTable,
    )


def propose(drafter: ScriptedDrafter, request: DraftRequest, depth: int = 5, nodes: int = 20) -> Draft:
    drafter.start(request)
    draft = drafter.propose([DraftBudget(request, depth, nodes)])[0]
    drafter.finish(request)
    drafter.check()
    return draft


def test_the_right_one_continues_the_recorded_answer(tmp_path: Path) -> None:
    write(tmp_path / "s", ANSWER)
    drafter = make(RightDrafter, tmp_path / "s")
    assert propose(drafter, request_of(ANSWER[:4])).token_ids == tuple(ANSWER[4:9])
    assert propose(drafter, request_of(ANSWER[:38])).token_ids == tuple(ANSWER[38:])
    assert propose(drafter, request_of(ANSWER[:4], seed=4)).token_ids == ()


def test_the_script_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    drafter = make(RightDrafter, path)
    assert propose(drafter, request_of([])).token_ids == ()
    write(path, ANSWER)
    assert propose(drafter, request_of([])).token_ids == tuple(ANSWER[:5])
    write(path, [9, *ANSWER])
    assert propose(drafter, request_of([])).token_ids == (9, *ANSWER[:4])


def test_the_wrong_one_leaves_the_answer_after_at_most_two_tokens(tmp_path: Path) -> None:
    write(tmp_path / "s", ANSWER)
    drafter = make(WrongDrafter, tmp_path / "s")
    for done in range(30):
        draft = propose(drafter, request_of(ANSWER[:done]))
        right = [token == ANSWER[done + n] for n, token in enumerate(draft.token_ids)]
        assert len(right) == 5
        assert not any(right[2:])


def test_trees_are_trees_within_their_limits_and_repeat(tmp_path: Path) -> None:
    write(tmp_path / "s", ANSWER)
    drafter = make(TreeDrafter, tmp_path / "s")
    shapes = set()
    on_path = 0
    for done in range(30):
        draft = propose(drafter, request_of(ANSWER[:done]), nodes=12)
        assert draft == propose(drafter, request_of(ANSWER[:done]), nodes=12)
        assert 1 <= len(draft.token_ids) <= 12
        assert max(draft.depths()) <= 5
        assert all(0 <= parent <= node for node, parent in enumerate(draft.parents))
        shapes.add(draft.parents)
        on_path += ANSWER[done] in draft.token_ids
    assert len(shapes) > 10
    assert 5 < on_path < 30


def test_the_hidden_one_raises_where_planes_are_not_the_pools(tmp_path: Path) -> None:
    write(tmp_path / "s", ANSWER)
    drafter = make(HiddenDrafter, tmp_path / "s")
    request = request_of(ANSWER[:4])
    drafter.start(request)
    draft = Draft((104,), (0,))
    request.history.extend([104, 105])
    drafter.observe([Observation(request, draft, (1,), (104, 105), hidden_rows=torch.zeros(2, 2, 4))])
    with pytest.raises(AssertionError, match="accepted path"):
        drafter.observe([Observation(request, draft, (1,), (104, 105), hidden_rows=torch.ones(2, 2, 4))])
    with pytest.raises(AssertionError, match="missing"):
        drafter.observe([Observation(request, draft, (1,), (104, 105))])
