"""A stand-in for the engine: exact arithmetic over real paged KV, and a place to inject faults.

The state after a token depends on every token before it, and is read back from the KV of the token before:
wrong, missing or foreign KV gives wrong planes and wrong logits.
"""

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from core.numerics import NumericsClass
from engine.core_turns import NoTurns
from engine.kv_cache import KvCache, KvLayout, PlaneKind
from engine.model_config import ModelConfig, RopeScaling
from engine.step_batch import SequenceStep, StepResult

VOCAB = 97
_MODULUS = 32749
HIDDEN_LAYERS = (1,)


def toy_config(num_layers: int = 2) -> ModelConfig:
    return ModelConfig(
        num_layers=num_layers,
        hidden_dim=6,
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        intermediate_dim=8,
        vocab_size=VOCAB,
        max_context=4096,
        norm_epsilon=1e-5,
        rope_theta=10000.0,
        rope_scaling=RopeScaling(),
        tied_embeddings=True,
    )


def toy_states(token_ids: Sequence[int]) -> list[int]:
    """The state after each token: what the toy's planes and logits are made of."""
    states = []
    state = 1
    for token_id in token_ids:
        state = (state * 31 + token_id + 7) % _MODULUS
        states.append(state)
    return states


def toy_logits(state: int) -> Tensor:
    """The row of logits at a token: Tensor  # [VOCAB] float32."""
    return (torch.arange(VOCAB, dtype=torch.float32) * 13 + state) % VOCAB


class ToyEngine:
    """Has what `prefill.runner.ForwardEngine` asks for. `before_step` runs on the engine thread, and may block
    or raise; `num_rows` counts the rows computed."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        hidden_layers: tuple[int, ...] = (),
        model_revision: str = "toy-1",
        dtype: torch.dtype = torch.float32,
        num_layers: int = 2,
    ) -> None:
        config = toy_config(num_layers)
        self.config = config
        self.max_context = config.max_context
        self.before_step: Callable[[Sequence[SequenceStep]], None] = lambda sequences: None
        self.num_rows = 0
        self.turns = NoTurns()
        self.kv = KvCache(
            KvLayout(
                config.num_layers,
                config.num_kv_heads,
                config.head_dim,
                config.hidden_dim,
                hidden_layers,
                block_size,
                dtype,
            ),
            num_blocks,
        )
        name = str(dtype).removeprefix("torch.")
        self.numerics = NumericsClass(model_revision, name, name, "cpu", "toy", "toy", "pad=1")

    def step(self, sequences: Sequence[SequenceStep]) -> StepResult:
        self.before_step(sequences)
        rows: list[Tensor] = []
        starts: list[int] = []
        for sequence in sequences:
            starts.append(len(rows))
            states = self._write(sequence)
            wanted = {"all": states, "last": states[-1:], "none": []}[sequence.logit_rows]
            rows += [toy_logits(state) for state in wanted]
            self.num_rows += len(states)
        logits = torch.stack(rows) if rows else torch.empty(0, VOCAB)
        return StepResult(logits, tuple(starts))

    def _write(self, sequence: SequenceStep) -> list[int]:
        state = 1
        if sequence.start:
            before = self.kv.slots(sequence.table, sequence.start - 1, sequence.start)
            state = int(self.kv.read_plane(PlaneKind.KEY, 0, before)[0, 0, 0])
        states = []
        for token_id in sequence.token_ids:
            state = (state * 31 + token_id + 7) % _MODULUS
            states.append(state)
        slots = self.kv.slots(sequence.table, sequence.start, sequence.start + len(states))
        for (kind, layer), values in toy_planes(self.kv.layout, states).items():
            self.kv.write_plane(kind, layer, slots, values)
        return states


def toy_planes(layout: KvLayout, states: Sequence[int]) -> dict[tuple[PlaneKind, int], Tensor]:
    """Every plane over these states: Tensor  # [states, heads, head_dim], hidden: [states, hidden_dim]."""
    base = torch.tensor(states, dtype=torch.float32)
    heads = torch.arange(layout.num_kv_heads * layout.head_dim, dtype=torch.float32)
    head_shape = (len(states), layout.num_kv_heads, layout.head_dim)
    planes: dict[tuple[PlaneKind, int], Tensor] = {}
    for layer in range(layout.num_layers):
        keys = base[:, None] + heads * (layer + 1)
        planes[PlaneKind.KEY, layer] = keys.view(head_shape).to(layout.dtype)
        planes[PlaneKind.VALUE, layer] = (keys + 0.5).view(head_shape).to(layout.dtype)
    for layer in layout.hidden_layers:
        hidden = base[:, None] - torch.arange(layout.hidden_dim, dtype=torch.float32) - layer
        planes[PlaneKind.HIDDEN, layer] = hidden.to(layout.dtype)
    return planes


class StepGate:
    """A `before_step` that lets the engine thread through one step at a time, and says when it waits."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self, sequences: Sequence[SequenceStep]) -> None:
        self.entered.release()
        if not self._open.is_set():
            assert self._permits.acquire(timeout=20), "the gate was never opened"

    def allow(self, num_steps: int = 1) -> None:
        """Let so many steps through."""
        self._permits.release(num_steps)

    def open(self) -> None:
        """Let everything through from now on."""
        self._open.set()
        self._permits.release()
