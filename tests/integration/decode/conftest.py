"""The tiny model and what the decode tests share."""

import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from core.drafter_settings import (
    DraftersSettings,
    DraftModelSettings,
    HeadSettings,
    MedusaSettings,
    NgramSettings,
    ScriptedSettings,
)
from core.settings import DecodeSettings
from core.tokenizer import Tokenizer
from decode.drafters.heads import KINDS
from decode.drafters.ngram import NgramDrafter
from decode.drafters.protocol import Drafter
from engine.engine import Engine
from tests.support.decode_stand import DecodeStand, decode_stand
from tests.support.loop_stand import LOOP_ENGINE, KnowingDrafter, LoopStand, SplitLoop, split_engine
from tests.support.tiny_heads import make_tiny_head
from tests.support.tiny_medusa import make_tiny_medusa
from tests.support.tiny_model import make_tiny_model

VOCAB = 300


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target: 256 bytes and 44 special tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("target"), vocab=VOCAB)


@pytest.fixture(scope="session")
def draft_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same tokenizer and other weights."""
    return make_tiny_model(tmp_path_factory.mktemp("draft"), layers=1, vocab=VOCAB, seed=5)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """What the scripted drafters read."""
    path = tmp_path / "script.jsonl"
    path.touch()
    return path


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, HeadSettings]:
    """A head for each drafter that runs one."""
    folder = tmp_path_factory.mktemp("heads")
    made = {kind: make_tiny_head(folder / kind, tiny_model, kind) for kind in ("eagle", "eagle3", "mtp")}
    return {name: HeadSettings(artifact=str(made[kind]), min_probability=0.0) for name, kind in KINDS.items()}


@pytest.fixture(scope="session")
def medusa(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> MedusaSettings:
    """Heads that are often right, with measured rates."""
    rates = [[0.6, 0.1, 0.05], [0.4, 0.1, 0.05], [0.3, 0.1, 0.05], [0.2, 0.1, 0.05]]
    artifact = make_tiny_medusa(tmp_path_factory.mktemp("medusa"), tiny_model, rates=rates)
    return MedusaSettings(artifact=str(artifact), min_probability=0.0)


@pytest.fixture
def all_drafters(
    script: Path, tiny_model: Path, heads: dict[str, HeadSettings], medusa: MedusaSettings
) -> DecodeSettings:
    """Every drafter; the draft model is the target itself, so that much is accepted."""
    return DecodeSettings(
        drafters=DraftersSettings(
            **heads,
            ngram=NgramSettings(min_match=1),
            draft_model=DraftModelSettings(model=str(tiny_model)),
            medusa=medusa,
            scripted=ScriptedSettings(script=str(script)),
        )
    )


@pytest.fixture
async def stand(tiny_model: Path, script: Path, all_drafters: DecodeSettings) -> AsyncIterator[DecodeStand]:
    """One decode worker with every drafter, one prefill worker; nothing may be left at the end."""
    async with decode_stand(tiny_model, script, decode=all_drafters) as running:
        yield running
        await running.idle()


@pytest.fixture
async def shared(stand: DecodeStand) -> DecodeStand:
    """The same as `stand`: a name for tests that only need a worker that is alive."""
    return stand


@pytest.fixture(scope="session")
def tokenizer(tiny_model: Path) -> Tokenizer:
    """The target's."""
    return Tokenizer.from_directory(tiny_model)


@pytest.fixture(scope="module")
def plain_loop(tiny_model: Path, tokenizer: Tokenizer) -> LoopStand:
    """The unsplit target, stepped plainly."""
    return LoopStand(Engine.load(tiny_model, LOOP_ENGINE), [], tokenizer)


@pytest.fixture
def split_loop(tiny_model: Path, tokenizer: Tokenizer) -> Iterator[SplitLoop]:
    """The target in two stages, with drafters `pass`, `ngram` and `other`; the first one knows what it is told."""
    with split_engine(tiny_model, LOOP_ENGINE) as (engine, last):
        drafter = KnowingDrafter()
        others: list[Drafter] = [NgramDrafter(NgramSettings(min_match=1)), KnowingDrafter("other")]
        yield SplitLoop(LoopStand(engine, [drafter, *others], tokenizer), last, drafter)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that repeat themselves now and then."""
    generator = random.Random(f"{seed}:{length}")
    phrase = [generator.randrange(1, 256) for _ in range(5)]
    ids: list[int] = []
    while len(ids) < length:
        ids += phrase if generator.random() < 0.6 else [generator.randrange(1, 256)]
    return ids[:length]
