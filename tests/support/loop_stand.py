"""A decode loop without sockets or threads of its own, driven turn by turn and checked after each."""

import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from core.clock import FakeClock, SystemClock
from core.errors import ServiceError
from core.metrics import Metrics
from core.prefix_hash import extend_block_hashes
from core.records import SamplingParams, SpeculationParams, SpeculationReport, TicketClaims, VerificationMode
from core.settings import DecodeSettings, EngineSettings
from core.tokenizer import Tokenizer
from decode.choice import Burst, Event, Request
from decode.draft import Draft
from decode.drafters.none import NoneDrafter
from decode.drafters.protocol import DraftBudget, Drafter, DrafterNeeds, DraftRequest
from decode.drafting import Drafting
from decode.intake import RequestFactory
from decode.job import CommittedChoice, DecodeJob, JobLimits
from decode.last_word import NativeLastWord
from decode.loop import DecodeLoop
from decode.pace import Pace
from decode.pass_step import PassStepper
from decode.step import Stepper
from decode.target import Target
from engine.engine import Engine
from engine.pipeline import LastWord, PipelinedEngine, serve_last_stage
from engine.pipeline_channel import QueueChannel
from engine.stage import Stage, split_layers
from engine.weights import open_model
from outrider.v1 import common_pb2

PREFIX_KEY = bytes(32)
LOOP_ENGINE = EngineSettings(
    dtype="float32", num_threads=1, block_size=16, num_blocks=128, hidden_layers=(0, 1, 2)
)
_EPOCH = 5
_MOST_TURNS = 4000


@contextmanager
def split_engine(
    model: Path, settings: EngineSettings, last_word: LastWord | None = None
) -> Iterator[tuple[PipelinedEngine, Stage]]:
    """The target in two stages, the last one on a thread: the engine, and that stage."""
    ours, theirs = QueueChannel.pair(timeout_s=30.0)
    layers = split_layers(open_model(model).config.num_layers, 2)
    last = Stage.load(model, settings, layers[1])
    served = (last, theirs, last_word or NativeLastWord(), SystemClock())
    thread = threading.Thread(target=serve_last_stage, args=served, daemon=True)
    thread.start()
    engine = PipelinedEngine.load_first(model, settings, ours, _EPOCH, SystemClock())
    try:
        yield engine, last
    finally:
        engine.close()
        thread.join(10)
    assert not thread.is_alive()


class Reader:
    """The listener of a request. Where it is `blocked`, the request is not scheduled."""

    blocked = False

    def take(self, event: Event) -> None:
        """Events come by `LoopStand` itself."""


@dataclass(slots=True)
class Asked:
    """A request and what came of it."""

    request: Request
    reader: Reader
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    report: SpeculationReport | None = None
    ended: bool = False
    error: ServiceError | None = None

    @property
    def ids(self) -> list[int]:
        """Of the first choice."""
        return self.token_ids.get(0, [])


class KnowingDrafter(NoneDrafter):
    """Knows whole texts, and proposes what comes next in one; where `is_wrong(place in the answer)`, another id."""

    needs = DrafterNeeds(max_draft_length=16, default_draft_length=4)

    def __init__(self, name: str = "pass") -> None:
        self.name = name
        self.answers: dict[tuple[tuple[int, ...], int, int], list[int]] = {}
        self.wrong_every = 0
        """Each so many tokens one is wrong; 0: none is."""

    def learn(self, asked: Asked) -> None:
        """Its answers will be known."""
        job = asked.request.job
        for index, token_ids in asked.token_ids.items():
            self.answers[job.prompt_ids, job.claims.seed, index] = token_ids

    def propose(self, budgets: Sequence[DraftBudget]) -> Sequence[Draft]:
        """Chains."""
        return [self._chain(budget.request, budget.draft_length) for budget in budgets]

    def _chain(self, request: DraftRequest, depth: int) -> Draft:
        answer = self.answers.get((request.history.prompt_ids, request.seed, request.choice), [])
        start = request.history.num_output
        chain = [
            (token_id + 1) % 256 if self.wrong_every and place % self.wrong_every == 0 else token_id
            for place, token_id in enumerate(answer[start : start + depth], start)
        ]
        return Draft(tuple(chain), tuple(range(len(chain))))


class LoopStand:
    """One engine, its drafters, and the loop over them; `stepper` steps it.

    Its clock stands still unless a test moves it: drafts take no time, so whether drafting ahead pays never hangs on
    the machine.
    """

    def __init__(
        self,
        engine: Engine,
        drafters: Sequence[Drafter],
        tokenizer: Tokenizer,
        settings: DecodeSettings | None = None,
    ) -> None:
        settings = settings or DecodeSettings()
        self.clock = clock = FakeClock()
        self.engine = engine
        self.kv = engine.kv
        self.drafters: Mapping[str, Drafter] = {
            drafter.name: drafter for drafter in (NoneDrafter(), *drafters)
        }
        self.metrics = Metrics()
        limits = JobLimits(
            vocab_size=min(tokenizer.vocab_size, engine.config.vocab_size),
            max_context=engine.max_context,
            pool_tokens=engine.kv.stats().total * engine.kv.layout.block_size,
            block_size=engine.kv.layout.block_size,
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,
        )
        pace = Pace(settings.step_tokens)
        drafting = Drafting(self.drafters, pace, self.metrics, clock, settings, limits.vocab_size)
        target = Target(engine, limits.vocab_size)
        self.loop = DecodeLoop(
            target, settings, drafting, clock, self.metrics, self._deliver, lambda request: PREFIX_KEY
        )
        kind = PassStepper if isinstance(engine, PipelinedEngine) else Stepper
        self.stepper = kind(target, self.loop._lifecycle, drafting, settings.step_tokens, clock, self.metrics)
        self.loop._stepper = self.stepper
        self._factory = RequestFactory(self.drafters, settings, tokenizer, engine.kv, limits)
        self._keys = itertools.count(1)
        self._asked: dict[int, Asked] = {}

    def ask(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        drafter: str = "pass",
        draft_length: int | None = 4,
        committed: Mapping[int, Sequence[int]] | None = None,
        verification: VerificationMode = "invariant",
    ) -> Asked:
        """Queue a request."""
        claims = TicketClaims(
            request_id=f"request-{len(self._asked)}", attempt=1, tenant="test", prompt_digest=b"", model_revision="",
            adapter="", numerics_class="", seed=sampling.seed or 0, decode_worker_id="", decode_epoch="",
            prefill_worker_ids=(), expires_unix_ms=0, cache_salt=b"",
        )  # fmt: skip
        job = DecodeJob(
            claims=claims,
            ticket=common_pb2.Ticket(),
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            speculation=SpeculationParams(
                drafter=drafter, draft_length=draft_length, draft_width=1, verification=verification
            ),
            draft_length_fixed=draft_length is not None and drafter != "none",
            committed=tuple(
                CommittedChoice(index, tuple(ids), False) for index, ids in (committed or {}).items()
            ),
            peers=(),
            request_class="chat",
        )
        reader = Reader()
        hashes = extend_block_hashes([], job.prompt_ids, self.kv.layout.block_size, PREFIX_KEY)
        request = self._factory.make(next(self._keys), job, reader, hashes)
        request.on_admitted = lambda admitted: self.loop.prefill_here(admitted, _heard)
        self._asked[request.key] = asked = Asked(request, reader)
        self.loop.enqueue(request)
        return asked

    def turn(self) -> bool:
        """One turn of the loop, which may not fail, and a check of everything."""
        worked = self.loop.turn()
        assert self.loop.num_failed_steps == 0
        self.loop.check()
        return worked

    def run(self) -> None:
        """Turns until nothing is left to do, and nothing is held."""
        for _ in range(_MOST_TURNS):
            if not self.turn():
                break
        else:
            raise AssertionError("there is no end to it")
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is held for anybody, and nothing is on its way."""
        self.loop.check()
        assert self.loop.num_failed_checks == 0
        assert self.kv.stats().used == 0
        if isinstance(self.stepper, PassStepper):
            assert self.stepper.num_in_flight == 0

    def answer(self, *args: object, **others: object) -> Asked:
        """`ask`, and everything that is left to do."""
        asked = self.ask(*args, **others)  # type: ignore[arg-type]
        self.run()
        assert asked.ended
        assert asked.error is None
        return asked

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Burst):
                asked = self._asked[event.choice.request.key]
                asked.token_ids.setdefault(event.choice.index, []).extend(event.token_ids)
                asked.report = event.report
            else:
                asked = self._asked[event.request.key]
                asked.ended, asked.error = True, event.error


class SplitLoop:
    """A loop over a pipelined target, its last stage, and a drafter `pass` that is told the answers."""

    def __init__(self, stand: LoopStand, last: Stage, drafter: KnowingDrafter) -> None:
        self.stand = stand
        self.last = last
        self.drafter = drafter
        assert isinstance(stand.stepper, PassStepper)
        self.stepper = stand.stepper

    def learn(self, *known: Asked) -> None:
        """These answers are known from now on."""
        for asked in known:
            self.drafter.learn(asked)


def _heard(error: Exception | None) -> None:
    """The prompt is being computed, or the request is in the queue again."""
