"""Drafting with a head equals the head as it is trained, position by position; its cache follows what was accepted."""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from core.drafter_settings import DraftQuantisation, HeadSettings
from core.errors import FailedPrecondition, InvalidArgument
from core.records import SamplingParams
from core.settings import EngineSettings
from core.tokenizer import Tokenizer
from decode.draft import NO_DRAFT, Draft
from decode.drafters.head_drafter import CATCH_UP_ROWS, NOT_FINITE, HeadDrafter
from decode.drafters.heads import KINDS, load_head
from decode.drafters.protocol import DraftBudget, DraftRequest
from decode.sampling.history import TokenHistory
from engine.block_table import BlockTable
from engine.engine import Engine
from engine.step_batch import SequenceStep
from tests.support.tiny_heads import make_tiny_head
from tests.support.tiny_model import make_tiny_model
from training.eagle3 import Eagle3Head
from training.recurrent import HeadShape

SEED = 3
SETTINGS = EngineSettings(dtype="float32", num_blocks=64, num_threads=1, hidden_layers=(0, 1, 2))
SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), vocab=300)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = Engine.load(model, SETTINGS)
    yield engine
    engine.close()


class Computed:
    """A choice whose tokens the target has computed, all but the last."""

    def __init__(self, engine: Engine, token_ids: Sequence[int], key: int = 1, width: int = 1) -> None:
        self.engine = engine
        self.table: BlockTable = engine.kv.open()
        self.request = DraftRequest(
            key=key,
            history=TokenHistory(token_ids),
            sampling=SamplingParams(),
            seed=SEED,
            choice=0,
            verification="invariant",
            hidden=lambda start, end: engine.kv.read_hidden(self.table, start, end),
            draft_width=width,
            table=lambda: self.table,
        )
        self.compute()

    def compute(self) -> None:
        """The target's states of all tokens but the last."""
        start, token_ids = self.table.num_tokens, self.request.history.token_ids
        if start == len(token_ids) - 1:
            return
        self.engine.kv.reserve(self.table, len(token_ids) - 1)
        self.engine.step([SequenceStep(self.table, start, token_ids[start:-1], logit_rows="none")])
        self.engine.kv.commit(self.table, len(token_ids) - 1)

    def grow(self, token_ids: Sequence[int]) -> None:
        """A burst is emitted."""
        self.request.history.extend(token_ids)
        self.compute()

    def budget(self, depth: int, max_nodes: int = 32) -> DraftBudget:
        return DraftBudget(self.request, depth, max_nodes)


def loaded(name: str, model: Path, engine: Engine, folder: Path, **settings: float) -> HeadDrafter:
    artifact = make_tiny_head(folder / name, model, KINDS[name], seed=SEED)
    head = HeadSettings(artifact=str(artifact), min_probability=0.0, **settings)
    return load_head(name, head, engine, Tokenizer.from_directory(model))


def trained_like(folder: Path, engine: Engine) -> Eagle3Head:
    tensors = load((folder / "eagle3" / "model.safetensors").read_bytes())
    head = Eagle3Head(HeadShape.of(engine.config, 3, len(tensors["d2t"])), range(len(tensors["d2t"])), 4)
    head.load_state_dict(tensors)
    return head


@torch.no_grad()
def naive_logits(head: Eagle3Head, sequence: Computed, path: Sequence[int]) -> Tensor:
    """What the head says behind the history and `path`, by its training code."""
    history = sequence.request.history.token_ids
    known = len(history) - 1
    planes = torch.zeros(known + len(path), 3 * 64)
    planes[:known] = sequence.request.hidden(0, known).transpose(0, 1).flatten(1)
    words = sequence.engine.weights.embedding[torch.tensor([*history[1:], *path])]
    frequencies = torch.from_numpy(sequence.engine.config.inverse_frequencies())
    unrolled = head.unroll(planes[None], words[None].float(), len(path) + 1, frequencies)
    return cast(Tensor, head.lm_head(head.norm(unrolled[len(path)][0, known - 1 + len(path)])))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 256, (length,), generator=generator).tolist()


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*paths[parent], token_id))
    return paths[1:]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_chain_is_what_the_trained_head_says_step_by_step(
    model: Path, scaled: bool, tmp_path: Path
) -> None:
    model = shutil.copytree(model, tmp_path / "model")
    if scaled:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rope_scaling": SCALING}))
    engine = Engine.load(model, SETTINGS)
    drafter = loaded("eagle3", model, engine, tmp_path)
    head = trained_like(tmp_path, engine)
    sequences = [Computed(engine, prompt_of(length, length), key=length) for length in (2, 9, 40)]
    for sequence in sequences:
        drafter.start(sequence.request)
    for burst in ([7], [8, 9, 10], [11, 12]):
        drafts = drafter.propose([sequence.budget(4) for sequence in sequences])
        for sequence, draft in zip(sequences, drafts, strict=True):
            path: list[int] = []
            for _ in range(4):
                path.append(int(naive_logits(head, sequence, path).argmax()))
            assert draft.token_ids == tuple(path)
            assert draft.is_chain
            sequence.grow(burst)
    for sequence in sequences:
        drafter.finish(sequence.request)
    drafter.check()


@pytest.mark.parametrize("quantisation", ["int8", "int4", None])
def test_a_quantised_head_mostly_drafts_what_the_whole_one_does(
    quantisation: DraftQuantisation, model: Path, tmp_path: Path
) -> None:
    engine = Engine.load(model, SETTINGS.model_copy(update={"dtype": "bfloat16", "num_blocks": 256}))
    artifact = str(make_tiny_head(tmp_path / "head", model, "eagle3", seed=SEED))
    tokenizer = Tokenizer.from_directory(model)
    firsts: list[list[int]] = []
    for kind in ("none", quantisation):
        drafter = load_head("eagle3", HeadSettings(artifact=artifact, quantisation=kind), engine, tokenizer)
        firsts.append([])
        for seed in range(40):
            sequence = Computed(engine, prompt_of(20, seed), key=seed)
            drafter.start(sequence.request)
            firsts[-1].append(drafter.propose([sequence.budget(1)])[0].token_ids[0])
            drafter.finish(sequence.request)
            engine.kv.close(sequence.table)
        drafter.check()
    assert sum(whole == rounded for whole, rounded in zip(*firsts, strict=True)) >= 30


def test_each_node_of_a_tree_is_among_the_best_behind_its_parent(
    model: Path, engine: Engine, tmp_path: Path
) -> None:
    drafter = loaded("eagle3", model, engine, tmp_path)
    head = trained_like(tmp_path, engine)
    sequence = Computed(engine, prompt_of(20), width=3)
    drafter.start(sequence.request)
    for _ in range(3):
        (draft,) = drafter.propose([sequence.budget(3, max_nodes=12)])
        paths = paths_of(draft)
        assert len(set(paths)) == len(paths) == 12
        for path in paths:
            best = naive_logits(head, sequence, path[:-1]).topk(3).indices.tolist()
            assert path[-1] in best
        sequence.grow([5, 6])
    drafter.finish(sequence.request)
    drafter.check()


@pytest.mark.parametrize("name", ["eagle", "eagle2", "mtp"])
def test_heads_that_repeat_the_last_token_do(name: str, model: Path, engine: Engine, tmp_path: Path) -> None:
    drafter = loaded(name, model, engine, tmp_path)
    sequence = Computed(engine, prompt_of(12))
    drafter.start(sequence.request)
    (draft,) = drafter.propose([sequence.budget(3)])
    last = sequence.request.history.token_ids[-1]
    assert draft.token_ids[0] == last
    drafter.finish(sequence.request)
    drafter.check()


def test_a_long_prompt_is_computed_inside_the_budget_before_it_drafts(
    model: Path, engine: Engine, tmp_path: Path
) -> None:
    drafter = loaded("eagle3", model, engine, tmp_path)
    head = trained_like(tmp_path, engine)
    sequence = Computed(engine, prompt_of(CATCH_UP_ROWS + 40))
    drafter.start(sequence.request)
    assert drafter.propose([sequence.budget(2)]) == [NO_DRAFT]
    rows = 0
    while done := drafter.prefill(16):
        assert done <= 16
        rows += done
    assert rows >= 39
    (draft,) = drafter.propose([sequence.budget(1)])
    assert draft.token_ids == (int(naive_logits(head, sequence, ()).argmax()),)
    assert drafter.cached_tokens(sequence.request) == CATCH_UP_ROWS + 39
    drafter.finish(sequence.request)
    drafter.check()


def test_without_blocks_it_drafts_nothing_and_goes_on(model: Path, engine: Engine, tmp_path: Path) -> None:
    drafter = loaded("eagle3", model, engine, tmp_path)
    sequence = Computed(engine, prompt_of(12))
    drafter.start(sequence.request)
    kv = drafter._kv
    hoard = kv.open()
    kv.reserve(hoard, kv.stats().free * kv.layout.block_size)
    assert drafter.propose([sequence.budget(2)]) == [NO_DRAFT]
    kv.close(hoard)
    assert drafter.propose([sequence.budget(2)])[0].token_ids
    drafter.finish(sequence.request)
    drafter.check()


def test_numbers_that_are_none_end_the_draft_and_say_so(model: Path, engine: Engine, tmp_path: Path) -> None:
    artifact = make_tiny_head(tmp_path / "eagle3", model, "eagle3", seed=SEED)
    tensors = load((artifact / "model.safetensors").read_bytes())
    tensors["norm.weight"][:] = torch.finfo(torch.float32).max  # finite, what it is multiplied with is not
    save_file(tensors, artifact / "model.safetensors")
    head = HeadSettings(artifact=str(artifact))
    drafter = load_head("eagle3", head, engine, Tokenizer.from_directory(model))
    sequence = Computed(engine, prompt_of(12))
    drafter.start(sequence.request)
    (draft,) = drafter.propose([sequence.budget(3)])
    assert draft == Draft(fault=NOT_FINITE)
    drafter.finish(sequence.request)
    drafter.check()


def test_what_is_left_is_found(model: Path, engine: Engine, tmp_path: Path) -> None:
    drafter = loaded("eagle3", model, engine, tmp_path)
    sequence = Computed(engine, prompt_of(12))
    drafter.start(sequence.request)
    with pytest.raises(AssertionError, match="1 caches"):
        drafter.check()


BROKEN = {
    "another kind": ("kind", lambda tensors: None),
    "a missing tensor": ("fc.weight is missing", lambda tensors: tensors.pop("fc.weight")),
    "another shape": (
        "norm.weight is",
        lambda tensors: tensors.update({"norm.weight": torch.ones(3)}),
    ),
    "a tensor too many": ("belongs to nothing", lambda tensors: tensors.update({"scale": torch.ones(1)})),
    "an id twice": ("occurs twice", lambda tensors: tensors["d2t"].__setitem__(1, -1)),
    "an id beyond": ("of 300", lambda tensors: tensors["d2t"].__setitem__(255, 45)),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_artifact_that_does_not_fit_is_refused_by_file_and_field(
    case: str, model: Path, engine: Engine, tmp_path: Path
) -> None:
    said, damage = BROKEN[case]
    artifact = make_tiny_head(tmp_path / "head", model, "eagle3", seed=SEED)
    tensors = load((artifact / "model.safetensors").read_bytes())
    damage(tensors)  # type: ignore[no-untyped-call]
    save_file(tensors, artifact / "model.safetensors")
    name = "mtp" if case == "another kind" else "eagle3"
    with pytest.raises(InvalidArgument, match=said) as refused:
        load_head(name, HeadSettings(artifact=str(artifact)), engine, Tokenizer.from_directory(model))
    assert str(artifact) in refused.value.message


@pytest.mark.parametrize(
    ("name", "size"),
    [("num_kv_heads", 0), ("num_heads", math.inf), ("hidden_dim", -64), ("norm_epsilon", math.nan)],
)
def test_sizes_that_are_none_are_refused_by_name(
    name: str, size: float, model: Path, engine: Engine, tmp_path: Path
) -> None:
    artifact = make_tiny_head(tmp_path / "head", model, "eagle3", seed=SEED)
    manifest = json.loads((artifact / "manifest.json").read_text())
    manifest["shape"][name] = size
    (artifact / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidArgument, match="shape") as refused:
        load_head("eagle3", HeadSettings(artifact=str(artifact)), engine, Tokenizer.from_directory(model))
    assert str(artifact) in refused.value.message


def test_a_head_of_another_target_is_refused(engine: Engine, model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", vocab=300, seed=9)
    artifact = make_tiny_head(tmp_path / "head", other, "eagle3")
    with pytest.raises(FailedPrecondition, match="another target"):
        load_head("eagle3", HeadSettings(artifact=str(artifact)), engine, Tokenizer.from_directory(model))


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_asked_again_before_anything_was_observed_it_says_the_same_and_goes_on(
    name: str, model: Path, engine: Engine, tmp_path: Path
) -> None:
    drafter, fresh = (loaded(name, model, engine, tmp_path / folder) for folder in ("one", "other"))
    sequence = Computed(engine, prompt_of(20))
    for one in (drafter, fresh):
        one.start(sequence.request)
    for burst in ([7], [8, 9, 10], [11]):
        (first,) = drafter.propose([sequence.budget(3)])
        (second,) = drafter.propose([sequence.budget(7)])
        (wanted,) = fresh.propose([sequence.budget(7)])
        assert len(first.token_ids) == 3
        assert second.token_ids == wanted.token_ids
        assert second.token_ids[:3] == first.token_ids
        sequence.grow(burst)
    for one in (drafter, fresh):
        one.finish(sequence.request)
        one.check()
