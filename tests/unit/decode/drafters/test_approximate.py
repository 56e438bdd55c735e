"""BiLD ends its drafts where the small model is unsure; a cascade gives an answer up once it is hard."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from core.drafter_settings import BildSettings, CascadeSettings, DraftersSettings, DraftModelSettings
from core.errors import InvalidArgument
from core.records import APPROXIMATE_DRAFTERS, SamplingParams
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.draft import NO_DRAFT
from decode.drafters.bild import BildDrafter, confidences
from decode.drafters.cascade import CascadeDrafter
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from decode.drafters.registry import build_drafters
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.support.tiny_model import make_tiny_model

ENGINE = EngineSettings(dtype="float32", num_threads=1, num_blocks=64)
KEYS = itertools.count(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose confidences differ from place to place."""
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=300, logit_scale=0.1)


@pytest.fixture
def draft(model: Path) -> DraftModelDrafter:
    target = Engine.load(model, ENGINE)
    settings = DraftModelSettings(model=str(model))
    return DraftModelDrafter.load(settings, target, Tokenizer.from_directory(model))


def request_of(token_ids: Sequence[int], temperature: float = 0.0) -> DraftRequest:
    return DraftRequest(
        key=next(KEYS),
        history=TokenHistory(token_ids),
        sampling=SamplingParams(temperature=temperature, seed=1),
        seed=1,
        choice=0,
        verification="invariant",
        hidden=lambda start, end: torch.empty(0),
        draft_width=1,
        table=BlockTable,
    )


def propose(drafter: DraftModelDrafter, request: DraftRequest, depth: int) -> tuple[int, ...]:
    return drafter.propose([DraftBudget(request, depth, depth)])[0].token_ids


def started(drafter: DraftModelDrafter, token_ids: Sequence[int], temperature: float = 0.0) -> DraftRequest:
    request = request_of(token_ids, temperature)
    drafter.start(request)
    while drafter.prefill(64):
        pass
    return request


def seen_confidences(draft: DraftModelDrafter, token_ids: Sequence[int], depth: int) -> list[float]:
    """Of the draft model behind each token that it drafts greedily, the whole text computed again for each."""
    request = started(draft, token_ids)
    chain = propose(draft, request, depth)
    draft.finish(request)
    engine, found = draft._engine, []
    for length in range(depth):
        text = [*token_ids, *chain[:length]]
        table = engine.kv.open()
        engine.kv.reserve(table, len(text))
        found += confidences(engine.step([SequenceStep(table, 0, text, logit_rows="last")]).logits)
        engine.kv.close(table)
    return found


def test_bild_ends_its_draft_before_the_first_token_that_the_small_model_is_unsure_of(
    draft: DraftModelDrafter,
) -> None:
    ends = set()
    for start in range(1, 12):
        text = list(range(start, start + 20))
        confidence = seen_confidences(draft, text, 6)
        for threshold in (0.0, sorted(confidence)[1], sorted(confidence)[3], 1.0):
            drafter = BildDrafter(
                draft, BildSettings(fallback_threshold=threshold - 1e-5 if threshold else 0)
            )
            request = started(drafter, text)
            below = [depth for depth, value in enumerate(confidence) if value < threshold - 1e-5]
            expected = below[0] if below else 6
            assert len(propose(drafter, request, 6)) == expected
            ends.add(expected)
            drafter.finish(request)
            drafter.check()
    assert len(ends) > 2


def test_an_easy_answer_is_drafted_whole_and_a_hard_one_no_more(draft: DraftModelDrafter) -> None:
    for threshold, easy in ((0.0, True), (1.0, False)):
        drafter = CascadeDrafter(draft, CascadeSettings(confidence_threshold=threshold, first_tokens=3))
        request = started(drafter, range(1, 30))
        token_ids = propose(drafter, request, 8)
        assert len(token_ids) == (8 if easy else 2)
        request.history.extend([*token_ids, 7])
        found = drafter.propose([DraftBudget(request, 8, 8)])
        assert (found == [NO_DRAFT]) != easy
        drafter.observe([Observation(request, found[0], (), (7,))])
        assert drafter.is_easy(request) == easy
        assert bool(draft._kv.stats().used) == easy
        assert (drafter.propose([DraftBudget(request, 8, 8)]) == [NO_DRAFT]) != easy
        drafter.finish(request)
        drafter.finish(request)
        drafter.check()


def test_choices_of_a_cascade_are_judged_one_by_one(draft: DraftModelDrafter) -> None:
    texts = [list(range(start, start + 20)) for start in range(1, 9)]
    means = [sum(seen_confidences(draft, text, 4)) / 4 for text in texts]
    threshold = sum(sorted(means)[3:5]) / 2
    settings = CascadeSettings(confidence_threshold=threshold, first_tokens=4)
    drafter = CascadeDrafter(draft, settings)
    requests = [started(drafter, text) for text in texts]
    drafts = drafter.propose([DraftBudget(request, 4, 4) for request in requests])
    for request, found, mean in zip(requests, drafts, means, strict=True):
        assert len(found.token_ids) == (4 if mean >= threshold else 3)
        request.history.extend([*found.token_ids, 7])
    drafter.observe([Observation(request, NO_DRAFT, (), (7,)) for request in requests])
    assert [drafter.is_easy(request) for request in requests] == [mean >= threshold for mean in means]
    for request in requests:
        drafter.finish(request)
    drafter.check()


def test_every_drafter_that_relaxes_acceptance_is_known_to_be_approximate(model: Path) -> None:
    settings = DraftersSettings(
        draft_model=DraftModelSettings(model=str(model)), bild=BildSettings(), cascade=CascadeSettings()
    )
    drafters = build_drafters(settings, Engine.load(model, ENGINE), Tokenizer.from_directory(model))
    relaxed = {name for name, drafter in drafters.items() if drafter.needs.rollback_threshold is not None}
    assert relaxed == APPROXIMATE_DRAFTERS
    with pytest.raises(InvalidArgument, match="draft_model"):
        build_drafters(
            DraftersSettings(bild=BildSettings()), Engine.load(model, ENGINE), Tokenizer.from_directory(model)
        )
