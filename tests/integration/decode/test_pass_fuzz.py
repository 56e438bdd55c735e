"""Drafting ahead, any mix of requests, a small pool: texts and cached planes are those of plain decoding."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from core.drafter_settings import NgramSettings
from core.prefix_hash import extend_block_hashes
from core.records import SamplingParams
from core.settings import DecodeSettings
from core.tokenizer import Tokenizer
from decode.draft import Draft
from decode.drafters.ngram import NgramDrafter
from decode.drafters.protocol import DraftRequest, Observation
from engine.engine import Engine
from engine.kv_cache import KvCache
from tests.support.loop_stand import (
    LOOP_ENGINE,
    PREFIX_KEY,
    Asked,
    KnowingDrafter,
    LoopStand,
    SplitLoop,
    split_engine,
)

NUM_PLAIN_BLOCKS = 400
MOST_TURNS = 6000


class ErraticDrafter(KnowingDrafter):
    """Right, wrong, too short or silent by chance; looks after its states and the planes as a real one must."""

    def __init__(self, name: str, chance: random.Random, noise: float) -> None:
        super().__init__(name)
        self._chance = chance
        self._noise = noise
        self._keys: set[int] = set()

    def start(self, request: DraftRequest) -> None:
        assert request.key not in self._keys
        assert request.table().num_tokens == len(request.history.token_ids) - 1
        self._keys.add(request.key)

    rebuild = start

    def observe(self, observations: Sequence[Observation]) -> None:
        assert {observation.request.key for observation in observations} <= self._keys

    def finish(self, request: DraftRequest) -> None:
        self._keys.remove(request.key)

    def check(self) -> None:
        assert not self._keys

    def _chain(self, request: DraftRequest, depth: int) -> Draft:
        assert request.key in self._keys
        chain = list(super()._chain(request, depth).token_ids)
        if chain and self._chance.random() < self._noise:
            place = self._chance.randrange(len(chain))
            cut = self._chance.random() < 0.5
            chain = chain[:place] if cut else [*chain[:place], chain[place] ^ 1, *chain[place + 1 :]]
        return Draft(tuple(chain), tuple(range(len(chain))))


@dataclass(slots=True)
class Trial:
    """A request, what came of it in the plain loop, and the tokens of it that were sent before."""

    plain: Asked
    asked: Asked
    sent: dict[int, list[int]]
    dropped: bool = False

    def check(self) -> None:
        """Right to the end, or as far as it came."""
        assert self.dropped or (self.asked.error is None) == (self.plain.error is None)
        for index, token_ids in self.asked.token_ids.items():
            whole = self.plain.token_ids[index][len(self.sent.get(index, ())) :]
            stopped = self.dropped or self.asked.error is not None
            assert token_ids == (whole[: len(token_ids)] if stopped else whole)


def sampling_of(chance: random.Random) -> SamplingParams:
    """Anything that the last stage can draw for, and now and then what it cannot."""
    max_tokens = chance.choice((1, 12, 40, 60, 60))
    usual = SamplingParams(
        temperature=chance.choice((0.0, 3.0, 12.0, 12.0)),
        top_p=chance.choice((1.0, 0.95)),
        top_k=chance.choice((0, 0, 3)),
        max_tokens=max_tokens,
        min_tokens=chance.choice((0, 0, max_tokens // 2, max_tokens)),
        seed=chance.randrange(1000),
        n=chance.choice((1, 1, 1, 2, 4)),
        repetition_penalty=chance.choice((1.0, 1.0, 0.7, 1.5)),
        frequency_penalty=chance.choice((0.0, 0.0, 0.5, -0.5)),
        presence_penalty=chance.choice((0.0, 0.0, 2.0)),
        logit_bias={}
        if chance.random() < 0.7
        else {chance.randrange(256): 20.0, chance.randrange(256): -50.0},
        eos_token_ids=tuple(chance.sample(range(256), chance.choice((0, 0, 1, 8)))),
        stop=() if chance.random() < 0.7 else tuple(chr(chance.randrange(33, 127)) for _ in range(4)),
        bad_word_ids=()
        if chance.random() < 0.7
        else tuple(tuple(chance.sample(range(256), chance.choice((1, 2, 3)))) for _ in range(60)),
    )
    unusual = chance.random()
    if unusual < 0.02:
        return SamplingParams(max_tokens=min(max_tokens, 12), seed=usual.seed, beam_width=2)
    return replace(usual, logprobs=1) if unusual < 0.04 else usual


def requests_of(chance: random.Random, num_blocks: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that share beginnings, with answers that have room in the pool alone."""
    text = [chance.randrange(1, 256) for _ in range(60)]
    asked: list[tuple[list[int], SamplingParams]] = []
    for _ in range(chance.randint(4, 10)):
        length = chance.randint(1, 60)
        shared = chance.randint(0, length)
        prompt = text[:shared] + [chance.randrange(1, 256) for _ in range(length - shared)]
        sampling = sampling_of(chance)
        full = length // 16
        room = (full + (num_blocks - full) // sampling.beam_width) * 16 - length
        max_tokens = min(sampling.max_tokens, room)
        asked.append(
            (
                prompt,
                replace(sampling, max_tokens=max_tokens, min_tokens=min(max_tokens, sampling.min_tokens)),
            )
        )
    return asked


def run_all(
    stand: LoopStand,
    known: Sequence[Asked],
    chance: random.Random,
) -> list[Trial]:
    """Asks again for all that is known, a few at a time, some resumed; readers fall behind, callers go away."""
    waiting = [plain for plain in known for _ in range(chance.choice((1, 1, 2)))]
    chance.shuffle(waiting)
    rate = chance.choice((0.05, 0.3, 1.0))
    trials: list[Trial] = []
    for _ in range(MOST_TURNS):
        live = [trial for trial in trials if not trial.asked.ended and not trial.dropped]
        while waiting and (not live or chance.random() < rate):
            trials.append(ask_again(stand, waiting.pop(), chance))
            live.append(trials[-1])
        worked = stand.turn()
        if not worked and not waiting and all(trial.asked.ended for trial in live):
            return trials
        assert worked or any(t.asked.reader.blocked or t.asked.ended for t in live), "nobody moves"
        for trial in live:
            reader = trial.asked.reader
            reader.blocked = chance.random() < 0.7 and worked if reader.blocked else chance.random() < 0.01
            if chance.random() < 0.003:
                stand.loop.drop(trial.asked.request)
                trial.dropped = True
    raise AssertionError("there is no end to it")


def ask_again(stand: LoopStand, plain: Asked, chance: random.Random) -> Trial:
    """The same request, by some drafter."""
    job = plain.request.job
    if job.sampling.beam_width > 1:
        return Trial(plain, stand.ask(job.prompt_ids, job.sampling, "none", None), {})
    sent: dict[int, list[int]] = {}
    if chance.random() < 0.15:
        sent = {index: ids[: chance.randrange(len(ids))] for index, ids in plain.token_ids.items() if ids}
        sent = {index: ids for index, ids in sent.items() if ids}
    name = chance.choice(("pass", "pass", "pass", "pass", "pass", "none", "ngram", "other"))
    length = chance.choice((None, 1, 2, 5, 8))
    return Trial(plain, stand.ask(job.prompt_ids, job.sampling, name, length, sent), sent)


def planes(kv: KvCache, hashes: Sequence[bytes]) -> list[torch.Tensor]:
    """K, V and hidden planes of cached blocks."""
    table = kv.open(hashes)
    slots = kv.slots(table, 0, table.num_tokens).long()
    kv.close(table)
    assert kv.hidden is not None
    return [kv.keys[:, slots], kv.values[:, slots], kv.hidden[:, slots]]


def compare_cached(split: SplitLoop, plain: LoopStand, trial: Trial) -> int:
    """Blocks of its answers that are cached in both loops; the planes of which are the same."""
    compared = 0
    for token_ids in trial.plain.token_ids.values():
        text = [*trial.plain.request.job.prompt_ids, *token_ids[:-1]]
        hashes = extend_block_hashes([], text, LOOP_ENGINE.block_size, PREFIX_KEY)
        hashes = hashes[: min(split.stand.kv.match(hashes), plain.kv.match(hashes))]
        if hashes:
            ours, theirs = planes(split.stand.kv, hashes), planes(plain.kv, hashes)
            assert torch.equal(ours[2], theirs[2])
            for first, whole in zip(ours[:2], theirs[:2], strict=True):
                assert torch.equal(first, whole[: len(first)])
            compared += len(hashes)
    return compared


@pytest.mark.parametrize("seed", [6, 8, 13, 14, 17, 24, 26, 36])
def test_whatever_is_asked_and_happens_the_texts_and_the_cache_are_those_of_plain_decoding(
    tiny_model: Path, tokenizer: Tokenizer, seed: int
) -> None:
    chance = random.Random(seed)
    num_blocks = chance.choice((8, 10, 16, 40))
    plain = LoopStand(
        Engine.load(tiny_model, LOOP_ENGINE.model_copy(update={"num_blocks": NUM_PLAIN_BLOCKS})),
        [],
        tokenizer,
    )
    known = [plain.ask(prompt, sampling, "none") for prompt, sampling in requests_of(chance, num_blocks)]
    plain.run()
    settings = DecodeSettings(step_tokens=chance.choice((8, 32, 256)), max_running=chance.choice((4, 16)))
    with split_engine(tiny_model, LOOP_ENGINE.model_copy(update={"num_blocks": num_blocks})) as (
        engine,
        last,
    ):
        ahead = ErraticDrafter("pass", chance, chance.choice((0.0, 0.1, 0.4)))
        ahead.wrong_every = chance.choice((0, 0, 7, 11))
        other = ErraticDrafter("other", chance, 0.3)
        ngram = NgramDrafter(NgramSettings(min_match=1, draft_width=chance.choice((1, 3))))
        stand = LoopStand(engine, [ahead, other, ngram], tokenizer, settings)
        for asked in known:
            ahead.learn(asked)
            other.learn(asked)
        trials = run_all(stand, known, chance)
        while stand.turn():
            pass
        stand.check_idle()
        split = SplitLoop(stand, last, ahead)
        assert split.stepper.guesses.held > 5
        assert sum(compare_cached(split, plain, trial) for trial in trials) > 0
    for trial in trials:
        trial.check()
