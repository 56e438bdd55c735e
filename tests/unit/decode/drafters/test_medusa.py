"""What is drafted is what the heads say, plainly computed; what does not fit is refused by file and field."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load as loads
from safetensors.torch import save_file
from torch import Tensor

from core.drafter_settings import MedusaSettings
from core.errors import FailedPrecondition, InvalidArgument
from core.records import SamplingParams
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.draft import Draft
from decode.drafters.head_drafter import NOT_FINITE
from decode.drafters.medusa import MedusaDrafter
from decode.drafters.product_tree import best_shape
from decode.drafters.protocol import DraftBudget, DraftRequest, Observation
from decode.sampling.history import TokenHistory
from decode.sampling.noise import gumbel
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.support.tiny_medusa import NUM_HEADS, make_tiny_medusa
from tests.support.tiny_model import make_tiny_model
from training.heads import read_head
from training.medusa import MedusaHeads

SEED = 3
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=12.0, top_p=0.9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), vocab=300)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    settings = EngineSettings(dtype="float32", num_blocks=64, num_threads=1, hidden_layers=(0, 2))
    engine = Engine.load(model, settings)
    yield engine
    engine.close()


class Computed:
    """A choice whose tokens the target has computed, all but the last."""

    def __init__(
        self, engine: Engine, token_ids: Sequence[int], sampling: SamplingParams, **others: Any
    ) -> None:
        self.engine = engine
        self.table: BlockTable = engine.kv.open()
        values: dict[str, Any] = {
            "key": 1,
            "choice": 0,
            "verification": "invariant",
            "draft_width": 1,
            **others,
        }
        self.request = DraftRequest(
            history=TokenHistory(token_ids),
            sampling=sampling,
            seed=SEED,
            hidden=lambda start, end: engine.kv.read_hidden(self.table, start, end),
            table=lambda: self.table,
            **values,
        )
        self.compute()

    def compute(self) -> Tensor:
        """The target's last states of tokens that were not computed yet: all but the last token."""
        start, token_ids = self.table.num_tokens, self.request.history.token_ids
        self.engine.kv.reserve(self.table, len(token_ids) - 1)
        rows = SequenceStep(self.table, start, token_ids[start:-1], logit_rows="none")
        final = self.engine.step([rows], want_last_hidden=True).last_hidden
        self.engine.kv.commit(self.table, len(token_ids) - 1)
        assert final is not None
        self.final = final[-1].clone()
        return final

    def take(self, token_ids: Sequence[int]) -> Observation:
        """A burst is emitted: its observation."""
        before = self.table.num_tokens
        self.request.history.extend(token_ids)
        self.compute()
        planes = self.request.hidden(before, self.table.num_tokens)
        accepted = tuple(range(1, len(token_ids)))
        return Observation(self.request, Draft(), accepted, tuple(token_ids), planes)

    def budget(self, depth: int, max_nodes: int = 32) -> DraftBudget:
        return DraftBudget(self.request, depth, max_nodes)


def loaded(engine: Engine, model: Path, folder: Path, rates: Any = None, **settings: Any) -> MedusaDrafter:
    artifact = make_tiny_medusa(folder, model, noise=0.3, rates=rates)
    chosen = MedusaSettings(artifact=str(artifact), **{"min_probability": 0.0, **settings})
    return MedusaDrafter.load(chosen, engine, Tokenizer.from_directory(model))


def naive_logits(folder: Path, engine: Engine, final: Tensor) -> Tensor:
    """What each head says behind a final hidden state, by the code that trains them: [heads, draft_vocab]."""
    heads, _ = read_head(folder)
    assert isinstance(heads, MedusaHeads)
    matrix = engine.output_rows(heads.target_ids)
    with torch.no_grad():
        return torch.stack([matrix @ heads.states(final, head) for head in range(NUM_HEADS)])


def chain_of(draft: Draft) -> tuple[int, ...]:
    assert draft.is_chain
    return draft.token_ids


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (length,), generator=generator).tolist()


def test_logits_are_those_of_the_training_code_at_start_and_after_every_burst(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    drafter = loaded(engine, model, tmp_path)
    sequence = Computed(engine, prompt_of(20), GREEDY)
    drafter.start(sequence.request)
    bursts: tuple[tuple[int, ...], ...] = ((), (5,), (6, 7, 8), (9, 9))
    for burst in bursts:
        if burst:
            drafter.observe([sequence.take(burst)])
        expected = naive_logits(tmp_path, engine, sequence.final)
        torch.testing.assert_close(drafter.logits([sequence.request], 4)[0], expected, atol=1e-4, rtol=1e-4)
        draft = drafter.propose([sequence.budget(4)])[0]
        assert chain_of(draft) == tuple(expected.argmax(-1).tolist())
        again = Computed(engine, sequence.request.history.token_ids, GREEDY, key=2)
        drafter.rebuild(again.request)
        assert drafter.propose([again.budget(4)]) == [draft]
        drafter.finish(again.request)
    drafter.finish(sequence.request)
    drafter.check()


def test_a_greedy_tree_is_the_likeliest_paths_of_the_heads(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    drafter = loaded(engine, model, tmp_path)
    sequence = Computed(engine, prompt_of(20), GREEDY, draft_width=3)
    drafter.start(sequence.request)
    scores, best = torch.log_softmax(naive_logits(tmp_path, engine, sequence.final), -1).topk(3)
    shape = best_shape(scores.tolist(), 10, -math.inf)
    draft = drafter.propose([sequence.budget(4, 10)])[0]
    assert draft.parents == shape.parents
    expected = [int(best[depth, rank]) for depth, rank in zip(shape.depths, shape.ranks, strict=True)]
    assert list(draft.token_ids) == expected
    assert draft.draft_probs is None


def test_a_measured_tree_has_the_shape_of_the_measured_rates(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    rates = [[0.6, 0.2, 0.1], [0.5, 0.2, 0.05], [0.4, 0.1, 0.1], [0.3, 0.1, 0.0]]
    drafter = loaded(engine, model, tmp_path, rates=rates)
    scores = [[math.log(max(rate, 1e-6)) for rate in row] for row in rates]
    shape = best_shape(scores, 9, -math.inf)
    for seed in (0, 1):
        sequence = Computed(engine, prompt_of(20, seed), GREEDY, draft_width=3, key=seed)
        drafter.start(sequence.request)
        draft = drafter.propose([sequence.budget(4, 9)])[0]
        assert draft.parents == shape.parents
        best = naive_logits(tmp_path, engine, sequence.final).topk(3).indices
        expected = [int(best[depth, rank]) for depth, rank in zip(shape.depths, shape.ranks, strict=True)]
        assert list(draft.token_ids) == expected
    free = loaded(engine, model, tmp_path, rates=rates, tree="confident")
    free.start(sequence.request)
    assert free.propose([sequence.budget(4, 9)])[0].parents != shape.parents


def naive_ranking(logits: Tensor, sampling: SamplingParams, position: int) -> list[int]:
    """Ids of one head by log d + gumbel, best first: temperature and top-p written out."""
    probs = torch.softmax(logits.double() / sampling.temperature, -1)
    order = probs.argsort(descending=True)
    inside = probs[order].cumsum(0) - probs[order] < sampling.top_p
    kept = order[inside].sort().values
    noise = torch.from_numpy(gumbel(SEED, 0, position, kept.numpy().astype(np.int64)))
    return [int(token_id) for token_id in kept[(probs[kept].log() + noise).argsort(descending=True)]]


def test_sampled_drafts_are_ranked_with_the_noise_of_their_positions(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    drafter = loaded(engine, model, tmp_path)
    sequence = Computed(engine, prompt_of(20), SAMPLED, draft_width=4)
    drafter.start(sequence.request)
    logits = naive_logits(tmp_path, engine, sequence.final)
    ranked = [naive_ranking(logits[depth], SAMPLED, 20 + depth) for depth in range(NUM_HEADS)]
    draft = drafter.propose([sequence.budget(4, 30)])[0]
    seen: dict[int, list[int]] = {}
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        seen.setdefault(parent, []).append(token_id)
    depths = dict(enumerate(draft.depths(), start=1)) | {0: 0}
    assert len(draft.token_ids) == 30
    for parent, children in seen.items():
        assert children == ranked[depths[parent]][: len(children)]
    sequence.request.draft_width = 1
    assert chain_of(drafter.propose([sequence.budget(4)])[0]) == tuple(row[0] for row in ranked)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_under_rejection_drafts_are_deterministic_whatever_the_temperature(
    engine: Engine, model: Path, tmp_path: Path, verification: str
) -> None:
    drafter = loaded(engine, model, tmp_path)
    greedy = Computed(engine, prompt_of(20), GREEDY, draft_width=2)
    sampled = Computed(engine, prompt_of(20), SAMPLED, draft_width=2, key=2, verification=verification)
    for sequence in (greedy, sampled):
        drafter.start(sequence.request)
    drafts = drafter.propose([greedy.budget(4), sampled.budget(4)])
    assert drafts[0] == drafts[1]
    assert drafts[1].draft_probs is None


def test_penalties_and_bans_are_applied_at_every_depth(engine: Engine, model: Path, tmp_path: Path) -> None:
    drafter = loaded(engine, model, tmp_path)
    free = Computed(engine, prompt_of(20), GREEDY)
    drafter.start(free.request)
    chain = chain_of(drafter.propose([free.budget(4)])[0])
    banned = replace(GREEDY, logit_bias=dict.fromkeys(chain, -1000.0))
    for number, sampling in enumerate((banned, replace(banned, temperature=12.0)), start=2):
        sequence = Computed(engine, prompt_of(20), sampling, key=number, draft_width=4)
        drafter.start(sequence.request)
        drafted = drafter.propose([sequence.budget(4, 12)])[0].token_ids
        assert len(drafted) == 12
        assert not set(chain) & set(drafted)
    only = tuple((token_id,) for token_id in range(300))
    sequence = Computed(engine, prompt_of(20), replace(GREEDY, bad_word_ids=only), key=9)
    drafter.start(sequence.request)
    assert drafter.propose([sequence.budget(4)])[0] == Draft()


def test_requests_of_one_batch_equal_themselves_alone(engine: Engine, model: Path, tmp_path: Path) -> None:
    drafter = loaded(engine, model, tmp_path)
    penalised = replace(GREEDY, repetition_penalty=1.5)
    samplings = (GREEDY, SAMPLED, penalised, GREEDY, SAMPLED)
    sequences = [
        Computed(engine, prompt_of(9 + key, key), sampling, key=key, draft_width=1 + key)
        for key, sampling in enumerate(samplings)
    ]
    for sequence in sequences:
        drafter.start(sequence.request)
    budgets = [sequence.budget(depth, 7) for sequence, depth in zip(sequences, (4, 1, 3, 9, 0), strict=True)]
    together = drafter.propose(budgets)
    assert together[4] == Draft()
    assert [max(draft.depths()) for draft in together[:4]] == [4, 1, 3, 4]
    assert all(1 <= len(draft.token_ids) <= 7 for draft in together[:4])
    for budget, draft in zip(budgets, together, strict=True):
        assert drafter.propose([budget]) == [draft]


def test_states_that_are_no_numbers_give_no_draft_and_do_not_touch_others(
    engine: Engine, model: Path, tmp_path: Path
) -> None:
    drafter = loaded(engine, model, tmp_path)
    sequences = [
        Computed(engine, prompt_of(12, key), sampling, key=key)
        for key, sampling in enumerate((GREEDY, SAMPLED, GREEDY))
    ]
    for sequence in sequences:
        drafter.start(sequence.request)
    budgets = [sequence.budget(3) for sequence in sequences]
    sound = drafter.propose(budgets)
    for sequence in sequences[:2]:
        planes = torch.full((2, 1, 64), torch.nan)
        drafter.observe([Observation(sequence.request, Draft(), (), (1,), planes)])
    assert drafter.propose(budgets) == [Draft(fault=NOT_FINITE), Draft(fault=NOT_FINITE), sound[2]]


def test_a_state_that_is_left_is_found(engine: Engine, model: Path, tmp_path: Path) -> None:
    drafter = loaded(engine, model, tmp_path)
    sequence = Computed(engine, prompt_of(8), GREEDY)
    drafter.start(sequence.request)
    with pytest.raises(AssertionError, match="medusa keeps 1"):
        drafter.check()
    drafter.finish(sequence.request)
    drafter.finish(sequence.request)
    drafter.check()


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        ({"kind": "eagle3"}, InvalidArgument, "drafters.medusa.artifact: .* of kind eagle3"),
        ({"target_revision": "x"}, FailedPrecondition, "artifact.target_revision: .*manifest.json"),
        ({"tokenizer": "x"}, FailedPrecondition, "artifact.tokenizer: .*manifest.json"),
        ({"hidden_layers": [1]}, InvalidArgument, r"artifact.hidden_layers: .*reads \(2,\)"),
        ({"shape": {"hidden_dim": 64}}, InvalidArgument, "artifact.shape: .*num_heads"),
        (
            {"shape": {"hidden_dim": 32, "num_heads": 4, "draft_vocab": 256}},
            FailedPrecondition,
            "artifact.shape.hidden_dim: .*32, the target has 64",
        ),
        (
            {"shape": {"hidden_dim": 64, "num_heads": 4, "draft_vocab": 999}},
            InvalidArgument,
            "artifact.shape: .*draft_vocab",
        ),
        (
            {"shape": {"hidden_dim": 64, "num_heads": 3, "draft_vocab": 256}},
            InvalidArgument,
            r"model.safetensors: weight is \(4, 64, 64\), not \(3, 64, 64\)",
        ),
        ({"rank_acceptance": [[0.5]]}, InvalidArgument, "artifact.rank_acceptance"),
        ({"rank_acceptance": [["x"]] * 4}, InvalidArgument, "artifact.rank_acceptance"),
        ({"rank_acceptance": 7}, InvalidArgument, "artifact.rank_acceptance"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused_by_file_and_field(
    engine: Engine, model: Path, tmp_path: Path, changes: dict[str, Any], kind: type[Exception], told: str
) -> None:
    make_tiny_medusa(tmp_path, model)
    values = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**values, **changes}))
    with pytest.raises(kind, match=told):
        load(engine, model, tmp_path)


def test_damaged_weights_are_refused_by_file_and_tensor(engine: Engine, model: Path, tmp_path: Path) -> None:
    make_tiny_medusa(tmp_path, model)
    path = tmp_path / "model.safetensors"
    whole, tensors = path.read_bytes(), loads(path.read_bytes())
    for damage in (whole[:-3], b"\x80\x04\x95pickle", b""):
        path.write_bytes(damage)
        with pytest.raises(InvalidArgument, match=r"artifact: .*model\.safetensors cannot be read"):
            load(engine, model, tmp_path)
    for changed, told in (
        ({name: tensor for name, tensor in tensors.items() if name != "bias"}, "bias is missing"),
        ({**tensors, "more": torch.zeros(1)}, "more belongs to nothing"),
        ({**tensors, "d2t": torch.full((256,), 290)}, "artifact.d2t"),
    ):
        save_file(changed, path)
        with pytest.raises(InvalidArgument, match=told):
            load(engine, model, tmp_path)


def load(engine: Engine, model: Path, folder: Path) -> MedusaDrafter:
    return MedusaDrafter.load(MedusaSettings(artifact=str(folder)), engine, Tokenizer.from_directory(model))
