"""A target whose layers are split over two processes, behind the interface of `Engine`.

The first stage owns all tables; it sends index arrays, slot copies and the residual stream, and gets logits and the
last stage's hidden planes back, which are kept beside its own. `step` waits for the answer; `launch` and `answer` let
the caller go on meanwhile: at most `MOST_IN_FLIGHT` steps, answered in order. Bits are those of the unsplit target.
"""

from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from core.clock import Clock
from core.settings import EngineSettings
from engine.core_turns import NoTurns, Turns
from engine.engine import Engine, context_limit, numerics_class
from engine.pipeline_messages import (
    Channel,
    PipelineBroken,
    StepMessage,
    StepReply,
    receive_reply,
    receive_step,
    send_close,
    send_reply,
    send_step,
)
from engine.pipeline_timeline import StepTimes, Timeline
from engine.plane_store import Slots
from engine.stage import Stage, split_layers
from engine.step_batch import SequenceStep, StepResult
from engine.step_rows import StepRows, build_rows, check_step
from engine.weights import open_model

MOST_IN_FLIGHT: Final = 2
_NOTHING: Final = torch.empty(0, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on its way. `began_s`, `ended_s`: when the first stage computed, on the machine's clock."""

    number: int
    rows: StepRows
    began_s: float
    ended_s: float


class PipelinedEngine(Engine):
    """The first stage, and the way to the last one. Made by `load`."""

    def __init__(
        self,
        stage: Stage,
        settings: EngineSettings,
        revision: str,
        model: Path,
        channel: Channel,
        epoch: int,
        clock: Clock,
    ) -> None:
        """`epoch`: of this worker's life; answers of another one are refused. `timeline`: set where it is wanted."""
        self.config = stage.config
        self.settings = settings
        self.max_context = context_limit(stage.config, settings)
        self.kv = stage.kv
        self.weights = stage.weights
        self.turns: Turns = NoTurns()
        self._stage = stage
        self._channel = channel
        self._epoch = epoch
        self._clock = clock
        self._device = torch.device("cpu")
        self._model = model
        self._thread_id = 0
        self._number = 0
        self.timeline: Timeline | None = None
        self._in_flight: deque[Flight] = deque()
        self._copies: list[tuple[Slots, Slots]] = []
        self.kv.on_copy = lambda source, target: self._copies.append((source.copy(), target.copy()))
        split = split_layers(stage.config.num_layers, 2)
        self._last_hidden = [layer for layer in self.kv.layout.hidden_layers if layer in split[1]]
        self.numerics = numerics_class(
            settings,
            revision,
            str(stage.weights.row_plan),
            stage.attention_name,
            self._device,
            pipeline_split="+".join(str(len(layers)) for layers in split),
        )

    @classmethod
    def load_first(
        cls, model: Path, settings: EngineSettings, channel: Channel, epoch: int, clock: Clock
    ) -> "PipelinedEngine":
        """The first of two stages; the last one is to be served at the channel's other end."""
        stage = load_first_stage(model, settings)
        return cls(stage, settings, open_model(model).revision(), model, channel, epoch, clock)

    def step(
        self,
        sequences: Sequence[SequenceStep],
        *,
        want_last_hidden: bool = False,
        exit_layer: int | None = None,
    ) -> StepResult:
        """As `Engine.step`, through both stages. Exits and final states are not to be had: raises ValueError."""
        if want_last_hidden or exit_layer is not None:
            raise ValueError("a pipelined target gives no exits and no final states")
        if self._in_flight:
            raise PipelineBroken("a step is on its way; answer it first")
        flight = self.launch(sequences)
        reply = self.answer(flight)
        return StepResult(reply.logits, flight.rows.logits_start)

    def launch(self, sequences: Sequence[SequenceStep], verify: Tensor = _NOTHING) -> Flight:
        """Run the first stage and send the rest on its way. `verify`: see `StepMessage`."""
        check_step(
            sequences,
            block_size=self.kv.layout.block_size,
            max_context=self.max_context,
            vocab_size=self.config.vocab_size,
        )
        if len(self._in_flight) >= MOST_IN_FLIGHT:
            raise PipelineBroken(f"{MOST_IN_FLIGHT} steps are on their way already")
        self._own_thread()
        rows = build_rows(sequences, self.kv.layout.block_size)
        began_s = self._clock.now_s()
        residual = self._stage.forward(rows)
        ended_s = self._clock.now_s()
        self._number += 1
        message = StepMessage(self._number, self._epoch, rows, residual, self._take_copies(), verify)
        send_step(self._channel, message)
        flight = Flight(self._number, rows, began_s, ended_s)
        self._in_flight.append(flight)
        return flight

    def answer(self, flight: Flight, void: Collection[int] = ()) -> StepReply:
        """Wait for the answer to the oldest step; the last stage's hidden planes are in place then.

        `void`: sequences of the step whose planes nobody wants; their slots may be somebody else's by now.
        """
        if not self._in_flight or self._in_flight[0] is not flight:
            raise PipelineBroken("steps are answered in the order in which they were launched")
        dtype = self.kv.layout.dtype
        reply = receive_reply(self._channel, self.config.vocab_size, self.config.hidden_dim, dtype)
        self._in_flight.popleft()
        if (reply.number, reply.epoch) != (flight.number, self._epoch):
            raise PipelineBroken(
                f"step {flight.number} was asked, {reply.number} of epoch {reply.epoch} answered"
            )
        if len(reply.planes) and reply.planes.shape[1]:
            self._keep_planes(flight.rows, reply.planes, void)
        if self.timeline is not None:
            self.timeline.note(self._times(flight, reply))
        return reply

    def _keep_planes(self, rows: StepRows, planes: Tensor, void: Collection[int]) -> None:
        """`planes` [last stage's hidden layers, rows, hidden_dim] to the slots of the rows, but for those of `void`."""
        assert self.kv.hidden is not None, "planes came that are not kept"
        slots = torch.from_numpy(rows.write_slots).long()
        if void:
            wanted = torch.ones(rows.num_rows, dtype=torch.bool)
            for sequence in void:
                wanted[rows.row_begin[sequence] : rows.row_begin[sequence + 1]] = False
            slots, planes = slots[wanted], planes[:, wanted]
        for layer, plane in zip(self._last_hidden, planes, strict=True):
            self.kv.hidden[self.kv.layout.hidden_layers.index(layer)].index_copy_(0, slots, plane)

    def close(self) -> None:
        """Say good-bye to the last stage and let go of everything."""
        with suppress(PipelineBroken):
            send_close(self._channel)
        self._channel.close()
        del self._stage, self.weights

    @property
    def attention_name(self) -> str:
        """Which attention runs, with its version."""
        return self._stage.attention_name

    def _times(self, flight: Flight, reply: StepReply) -> StepTimes:
        last_began_s, last_ended_s = reply.times.tolist()
        wanted = flight.rows.wanted_rows is None or len(flight.rows.wanted_rows) > 0
        return StepTimes(
            number=flight.number,
            rows=flight.rows.num_rows,
            void=wanted and not len(reply.logits) and not len(reply.verdicts),
            first_began_s=flight.began_s,
            first_ended_s=flight.ended_s,
            last_began_s=last_began_s,
            last_ended_s=last_ended_s,
            answered_s=self._clock.now_s(),
        )

    def _take_copies(self) -> Tensor:
        """[2, n] int32: slot copies since the last message, in order."""
        copies, self._copies = self._copies, []
        if not copies:
            return torch.empty((2, 0), dtype=torch.int32)
        return torch.from_numpy(np.concatenate([np.stack(pair) for pair in copies], axis=1, dtype=np.int32))


def load_first_stage(model: Path, settings: EngineSettings) -> Stage:
    """The first of two stages, with room for the hidden planes of both."""
    layers = split_layers(open_model(model).config.num_layers, 2)[0]
    return Stage.load(model, settings, layers, hold_all_hidden=True)


class LastWord(Protocol):
    """What the last stage does with logits instead of sending them back."""

    def is_void(self, verify: Tensor) -> bool:
        """Whether nobody will want the step, as everything that it was guessed on has failed."""
        ...

    def verdicts(self, verify: Tensor, logits: Tensor) -> Tensor:
        """What was drawn: Tensor  # [words] int64"""
        ...


def serve_last_stage(stage: Stage, channel: Channel, last_word: LastWord, clock: Clock) -> None:
    """Answers steps until the first stage says good-bye. Raises PipelineBroken where it is gone."""
    config, dtype = stage.config, stage.kv.layout.dtype
    while (message := receive_step(channel, config.hidden_dim, dtype)) is not None:
        began_s = clock.now_s()
        for source, target in message.copies.T.tolist():
            stage.kv.copy_slots(np.array([source], dtype=np.int32), np.array([target], dtype=np.int32))
        logits = torch.empty((0, config.vocab_size))
        verdicts = torch.empty(0, dtype=torch.int64)
        planes = torch.empty((0, 0, config.hidden_dim), dtype=dtype)
        if not (len(message.verify) and last_word.is_void(message.verify)):
            residual = stage.forward(message.rows, message.residual)
            found = stage.logits(message.rows, residual)
            if len(message.verify):
                verdicts = last_word.verdicts(message.verify, found)
            else:
                logits = found
            if stage.kv.hidden is not None:
                slots = torch.from_numpy(message.rows.write_slots).long()
                planes = stage.kv.hidden.index_select(1, slots)
        times = torch.tensor([began_s, clock.now_s()], dtype=torch.float64)
        send_reply(channel, StepReply(message.number, message.epoch, logits, verdicts, planes, times))
