"""The early exit drafts what naive decoding with the first layers would, and leaves the target's KV as it was."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.drafter_settings import LayerSkipSettings
from core.errors import FailedPrecondition, InvalidArgument
from core.records import SamplingParams, VerificationMode
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.draft import Draft
from decode.drafters.artifact import read_manifest, write_artifact
from decode.drafters.exit_adapter import ExitAdapter, ExitShape
from decode.drafters.head_drafter import NOT_FINITE
from decode.drafters.layerskip import LayerSkipDrafter
from decode.drafters.protocol import DraftBudget, DraftRequest
from decode.drafters.reduced_head import is_plain_argmax
from decode.sampling.draft_noise import DraftDraw, draw_draft
from decode.sampling.history import TokenHistory
from engine.engine import Engine
from engine.kv_cache import PlaneKind
from engine.step_batch import SequenceStep
from tests.support.exit_artifact import make_exit_artifact, make_exit_tensors
from tests.support.tiny_model import make_tiny_model

ENGINE = EngineSettings(dtype="float32", num_threads=1, num_blocks=64)
VOCAB = 300
MARK = 777.0
KEYS = itertools.count(1)
GREEDY = SamplingParams(seed=1)
HOT = SamplingParams(temperature=12.0, seed=1)
SHAPE = ExitShape(hidden_dim=64, exit_layer=2, width=32, draft_vocab=200, norm_epsilon=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), vocab=VOCAB)


@pytest.fixture(scope="module")
def first_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of `model`, whose weights are drawn in order."""
    return make_tiny_model(tmp_path_factory.mktemp("cut"), layers=2, vocab=VOCAB)


@pytest.fixture(scope="module")
def artifact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_exit_artifact(model, tmp_path_factory.mktemp("exit"))


def load(model: Path, artifact: Path | None, **engine: object) -> tuple[LayerSkipDrafter, Engine]:
    target = Engine.load(model, ENGINE.model_copy(update=engine))
    settings = LayerSkipSettings(
        artifact=None if artifact is None else str(artifact), exit_layer=2, max_draft_length=8
    )
    return LayerSkipDrafter.load(settings, target, Tokenizer.from_directory(model)), target


def request_of(
    engine: Engine,
    token_ids: Sequence[int],
    sampling: SamplingParams = GREEDY,
    verification: VerificationMode = "invariant",
) -> DraftRequest:
    """A choice whose tokens but the last are committed in the target's KV."""
    kv, table = engine.kv, engine.kv.open()
    if len(token_ids) > 1:
        kv.reserve(table, len(token_ids) - 1)
        engine.step([SequenceStep(table, 0, token_ids[:-1], logit_rows="none")])
        kv.commit(table, len(token_ids) - 1)
    return DraftRequest(
        key=next(KEYS),
        history=TokenHistory(token_ids),
        sampling=sampling,
        seed=1,
        choice=0,
        verification=verification,
        hidden=lambda start, end: torch.empty(0),
        draft_width=1,
        table=lambda: table,
    )


def adapted(tensors: dict[str, Tensor], embedding: Tensor, hidden: Tensor) -> Tensor:
    """Draft logits over the target's ids, in plain torch."""
    gate, up = hidden @ tensors["gate.weight"].T, hidden @ tensors["up.weight"].T
    state = hidden + (functional.silu(gate) * up) @ tensors["down.weight"].T
    wide = torch.full((len(hidden), VOCAB), -torch.inf)
    wide[:, tensors["token_ids"]] = state @ embedding[tensors["token_ids"]].T
    return wide


def naive(
    cut: Engine,
    tensors: dict[str, Tensor] | None,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    depth: int,
) -> list[int]:
    """Token by token through the first layers alone, the whole text again for each."""
    drafted: list[int] = []
    history = TokenHistory(token_ids)
    for _ in range(depth):
        table = cut.kv.open()
        text = [*token_ids, *drafted]
        cut.kv.reserve(table, len(text))
        result = cut.step([SequenceStep(table, 0, text, logit_rows="last")], want_last_hidden=True)
        cut.kv.close(table)
        logits = result.logits
        if tensors is not None:
            assert result.last_hidden is not None
            logits = adapted(tensors, cut.weights.embedding, result.last_hidden[-1:])
        draw = DraftDraw(sampling, 1, 0, len(text), "invariant", history, tuple(drafted))
        (drawn,) = draw_draft([draw], logits)
        assert drawn is not None
        drafted.append(drawn.token_id)
    return drafted


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, HOT, replace(GREEDY, repetition_penalty=1.5)])
def test_it_drafts_what_naive_decoding_with_the_first_layers_gives(
    model: Path, first_layers: Path, artifact: Path, sampling: SamplingParams, trained: bool
) -> None:
    drafter, engine = load(model, artifact if trained else None)
    cut = Engine.load(first_layers, ENGINE)
    tensors = make_exit_tensors(SHAPE, VOCAB) if trained else None
    for length in (1, 2, 17, 40):
        token_ids = [(7 * number + length) % 250 + 1 for number in range(length)]
        request = request_of(engine, token_ids, sampling)
        (draft,) = drafter.propose([DraftBudget(request, 6, 64)])
        assert list(draft.token_ids) == naive(cut, tensors, token_ids, sampling, 6)
        assert draft.is_chain
        engine.kv.close(request.table())
    engine.kv.check()
    assert engine.kv.stats().used == 0


def test_the_adapter_is_what_its_formula_says(model: Path, artifact: Path) -> None:
    engine = Engine.load(model, ENGINE)
    tensors = make_exit_tensors(SHAPE, VOCAB)
    adapter = ExitAdapter(SHAPE, tensors, engine)
    hidden = torch.randn(37, 64, generator=torch.Generator().manual_seed(2))
    expected = adapted(tensors, engine.weights.embedding, hidden)[:, tensors["token_ids"]]
    torch.testing.assert_close(adapter.logits(hidden), expected, atol=1e-4, rtol=1e-4)


def test_requests_of_one_batch_equal_themselves_alone_in_any_mixture(model: Path, artifact: Path) -> None:
    drafter, engine = load(model, artifact)
    biased = replace(GREEDY, logit_bias={5: 1000.0})
    kinds: list[tuple[SamplingParams, VerificationMode]] = [
        (GREEDY, "invariant"), (HOT, "invariant"), (HOT, "rejection"), (biased, "invariant"), (GREEDY, "rejection"),
    ]  # fmt: skip
    texts = [list(range(number + 1, 20 * number + 25)) for number in range(len(kinds))]
    depths = (1, 4, 3, 5, 2)
    requests = [request_of(engine, text, *kind) for text, kind in zip(texts, kinds, strict=True)]
    together = drafter.propose([DraftBudget(r, depth, 8) for r, depth in zip(requests, depths, strict=True)])
    assert [len(draft.token_ids) for draft in together] == list(depths)
    for text, kind, draft, depth in zip(texts, kinds, together, depths, strict=True):
        (alone,) = drafter.propose([DraftBudget(request_of(engine, text, *kind), depth, 8)])
        assert alone.token_ids == draft.token_ids
        assert (draft.draft_probs is not None) == (kind == (HOT, "rejection"))
    probs = together[2].draft_probs
    assert probs is not None
    assert probs.shape == (3, VOCAB)
    assert torch.allclose(probs.sum(1), torch.ones(3), atol=1e-5)
    outside = sorted({*range(VOCAB)} - {*make_exit_tensors(SHAPE, VOCAB)["token_ids"].tolist()})
    assert not probs[:, outside].any()
    assert 5 in together[3].token_ids or 5 in outside


@pytest.mark.parametrize("drafted", [1, 4, 8])
def test_after_a_step_keys_values_and_planes_are_those_of_plain_decoding(
    model: Path, artifact: Path, drafted: int
) -> None:
    drafter, engine = load(model, artifact, hidden_layers=(0, 1, 2))
    token_ids = list(range(3, 33))
    plain, request = request_of(engine, token_ids), request_of(engine, token_ids)
    committed, table = planes(engine, request, 0, 29), request.table()
    mark(engine, request, 29, 29 + drafted)
    (draft,) = drafter.propose([DraftBudget(request, drafted, 8)])
    assert len(draft.token_ids) == drafted
    assert table.num_tokens == 29
    written = [bool((plane != MARK).all()) for plane in planes(engine, request, 29, 29 + drafted)]
    assert written == [True, True, False] * 3
    assert all(torch.equal(*pair) for pair in zip(planes(engine, request, 0, 29), committed, strict=True))
    text = (token_ids[-1], *draft.token_ids)
    engine.kv.reserve(table, 29 + len(text))
    logits = engine.step([SequenceStep(table, 29, text)]).logits
    engine.kv.commit(table, 29 + len(text))
    single = []
    for place, token_id in enumerate(text):
        engine.kv.reserve(plain.table(), 30 + place)
        single.append(engine.step([SequenceStep(plain.table(), 29 + place, (token_id,))]).logits)
        engine.kv.commit(plain.table(), 30 + place)
    assert torch.equal(logits, torch.cat(single))
    ours, theirs = (planes(engine, each, 0, 29 + len(text)) for each in (request, plain))
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def planes(engine: Engine, request: DraftRequest, start: int, end: int) -> list[Tensor]:
    slots = engine.kv.slots(request.table(), start, end)
    return [
        engine.kv.read_plane(kind, layer, slots)
        for kind in (PlaneKind.KEY, PlaneKind.VALUE, PlaneKind.HIDDEN)
        for layer in range(3)
    ]


def mark(engine: Engine, request: DraftRequest, start: int, end: int) -> None:
    """So that it shows what is written there."""
    engine.kv.reserve(request.table(), end)
    for kind in (PlaneKind.KEY, PlaneKind.VALUE, PlaneKind.HIDDEN):
        for layer in range(3):
            slots = engine.kv.slots(request.table(), start, end)
            marked = torch.full_like(engine.kv.read_plane(kind, layer, slots), MARK)
            engine.kv.write_plane(kind, layer, slots, marked)


def test_a_draft_does_not_touch_what_another_choice_shares(model: Path, artifact: Path) -> None:
    drafter, engine = load(model, artifact, hidden_layers=(0, 1, 2))
    first = request_of(engine, list(range(3, 24)))
    forked = engine.kv.fork(first.table())
    second = replace(first, key=next(KEYS), sampling=HOT, table=lambda: forked)
    before = planes(engine, first, 0, 20)
    drafter.propose([DraftBudget(first, 4, 8), DraftBudget(second, 4, 8)])
    for request in (first, second):
        assert all(torch.equal(*pair) for pair in zip(planes(engine, request, 0, 20), before, strict=True))
    engine.kv.check()


def test_where_blocks_are_short_drafts_are_shorter_and_reserved_ones_are_given_back(
    model: Path, artifact: Path
) -> None:
    drafter, engine = load(model, artifact, num_blocks=8, block_size=4)
    kv = engine.kv
    request = request_of(engine, range(1, 24))
    assert kv.stats().used == 6
    held = kv.open()
    kv.reserve(held, 4)
    (draft,) = drafter.propose([DraftBudget(request, 8, 8)])
    assert len(draft.token_ids) == 28 - 22 - 1
    kv.check()
    kv.commit(request.table(), 23)
    assert kv.stats().used == 7
    kv.reserve(held, 8)
    request.history.extend([9])
    assert len(drafter.propose([DraftBudget(request, 8, 8)])[0].token_ids) == 0
    kv.check()
    kv.close(held)
    kv.close(request.table())
    assert kv.stats().used == 0


def test_nothing_is_asked_nothing_is_drafted(model: Path, artifact: Path) -> None:
    drafter, engine = load(model, artifact)
    request = request_of(engine, range(1, 24))
    assert drafter.propose([]) == []
    for budget in (DraftBudget(request, 0, 8), DraftBudget(request, 8, 0)):
        assert drafter.propose([budget]) == [Draft()]
    drafter.finish(request)
    drafter.check()


def test_a_state_that_is_no_number_drafts_nothing_and_its_neighbours_do(model: Path) -> None:
    engine = Engine.load(model, ENGINE)
    adapter = ExitAdapter(SHAPE, make_exit_tensors(SHAPE, VOCAB), engine)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    hidden[1:3] = torch.nan
    history = TokenHistory([1, 2, 3])
    draws = [DraftDraw(sampling, 1, 0, 3, "invariant", history) for sampling in (GREEDY, GREEDY, HOT, HOT)]
    drawn = adapter.draw(draws, adapter.logits(hidden))
    assert [token is None for token in drawn] == [False, True, True, False]


def test_an_adapter_that_overflows_drafts_nothing_and_says_so(model: Path) -> None:
    engine = Engine.load(model, ENGINE)
    tensors = make_exit_tensors(SHAPE, VOCAB)
    broken = ExitAdapter(SHAPE, tensors | {"down.weight": tensors["down.weight"] * torch.inf}, engine)
    drafter = LayerSkipDrafter(engine, LayerSkipSettings(), 2, broken, VOCAB)
    requests = [request_of(engine, range(1, 24), sampling) for sampling in (GREEDY, HOT)]
    drafts = drafter.propose([DraftBudget(request, 4, 8) for request in requests])
    assert drafts == [Draft(fault=NOT_FINITE)] * 2


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"kind": "eagle3"}, r"artifact\.kind"),
        ({"shape": {"width": 32}}, r"artifact\.shape"),
        ({"shape": asdict(replace(SHAPE, hidden_dim=32))}, r"artifact\.shape\.hidden_dim"),
        ({"shape": asdict(replace(SHAPE, norm_epsilon=1e-6))}, r"artifact\.shape\.norm_epsilon"),
        ({"shape": asdict(replace(SHAPE, draft_vocab=301))}, r"artifact\.shape\.draft_vocab"),
        ({"shape": asdict(SHAPE) | {"width": 32.5}}, r"artifact\.shape"),
        *[
            ({"shape": asdict(SHAPE) | {"norm_epsilon": wrong}}, r"artifact\.shape.*norm_epsilon")
            for wrong in (None, "x", [1e-5], 0)
        ],
        ({"acceptance": {"all": [10**400]}}, r"artifact.*acceptance is"),
        ({"shape": asdict(replace(SHAPE, exit_layer=3))}, r"artifact\.shape\.exit_layer"),
        ({"shape": asdict(replace(SHAPE, width=16))}, r"gate\.weight|up\.weight|down\.weight"),
        ({"target_revision": "other"}, r"artifact\.target_revision"),
        ({"tokenizer": "other"}, r"artifact\.tokenizer"),
    ],
)
def test_an_artifact_that_does_not_fit_is_refused_by_file_and_field(
    model: Path, tmp_path: Path, changed: dict[str, object], told: str
) -> None:
    folder = make_exit_artifact(model, tmp_path / "exit")
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises((InvalidArgument, FailedPrecondition), match=told) as refused:
        load(model, folder)
    assert str(folder) in str(refused.value)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("gate.weight", torch.full((32, 64), torch.nan)),
        ("gate.weight", torch.full((32, 64), 1e300, dtype=torch.float64)),
        ("gate.weight", torch.zeros(32, 64, dtype=torch.int64)),
        ("token_ids", torch.arange(200).flip(0)),
        ("token_ids", torch.arange(150, 350)),
        ("token_ids", torch.arange(200.0)),
    ],
)
def test_tensors_that_mean_nothing_are_refused_by_name(
    model: Path, tmp_path: Path, name: str, tensor: Tensor
) -> None:
    folder = make_exit_artifact(model, tmp_path / "exit")
    write_artifact(folder, read_manifest(folder), make_exit_tensors(SHAPE, VOCAB) | {name: tensor})
    with pytest.raises(InvalidArgument, match=name.replace(".", r"\.")):
        load(model, folder)


def test_another_exit_than_the_trained_one_is_refused(model: Path, artifact: Path) -> None:
    engine, tokenizer = Engine.load(model, ENGINE), Tokenizer.from_directory(model)
    settings = LayerSkipSettings(artifact=str(artifact), exit_layer=1)
    with pytest.raises(InvalidArgument, match="trained behind 2 layers"):
        LayerSkipDrafter.load(settings, engine, tokenizer)
    with pytest.raises(InvalidArgument, match="4 of 3 layers"):
        LayerSkipDrafter.load(LayerSkipSettings(exit_layer=4), engine, tokenizer)


@pytest.mark.parametrize(
    ("changed", "plain"),
    [
        ({}, True),
        ({"temperature": 1e-3}, True),
        ({"temperature": 0.5}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"logit_bias": {3: 1.0}}, False),
        ({"bad_word_ids": ((3, 4),)}, False),
        ({"min_tokens": 2}, True),
        ({"min_tokens": 3}, False),
    ],
)
def test_the_largest_logit_is_taken_as_it_is_only_where_nothing_changes_logits(
    changed: dict[str, object], plain: bool
) -> None:
    sampling = SamplingParams(**changed)  # type: ignore[arg-type]
    draw = DraftDraw(sampling, 1, 0, 5, "invariant", TokenHistory([1, 2, 3], [4]), (5,))
    assert is_plain_argmax(draw) == plain
