"""The engine: one loaded model, its paged KV, and `step`."""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from core.drafter_settings import Quantisation
from core.errors import InvalidArgument
from core.numerics import NumericsClass
from core.settings import EngineSettings
from engine.backends import make_backends
from engine.core_turns import CoreTurns, NoTurns, Turns, turn_of
from engine.huge_pages import advise_huge_pages
from engine.kv_cache import KvCache, KvLayout
from engine.linear import CANDIDATE_PLANS, RowPlan
from engine.llama import Llama, LlamaWeights, load_weights
from engine.model_config import ModelConfig
from engine.native import cpu_flags
from engine.step_batch import SequenceStep, StepResult
from engine.step_rows import StepRows, build_rows, check_step
from engine.weights import open_model

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Engine:
    """Made by `Engine.load`. `step` belongs to one thread; the attributes may be read by any."""

    def __init__(
        self,
        config: ModelConfig,
        settings: EngineSettings,
        weights: LlamaWeights,
        revision: str,
        device: torch.device,
        quantisation: Quantisation = "none",
    ) -> None:
        self.config = config
        self.settings = settings
        self.max_context = context_limit(config, settings)
        dtype = _DTYPES[settings.dtype]
        layout = KvLayout(
            config.num_layers,
            config.num_kv_heads,
            config.head_dim,
            config.hidden_dim,
            settings.hidden_layers,
            settings.block_size,
            dtype,
        )
        self.kv = KvCache(layout, settings.num_blocks, device)
        for plane in (self.kv.keys, self.kv.values):
            advise_huge_pages(plane)
        self._attention, pointwise = make_backends(config, settings, self.kv, self.max_context)
        self.weights = weights
        self._llama = Llama(weights, self._attention, pointwise)
        self._device = device
        self._model: Path | None = None
        self._thread_id = 0
        self.turns: Turns = NoTurns() if settings.core_turns is None else CoreTurns(settings.core_turns)
        self.numerics = numerics_class(
            settings, revision, str(weights.row_plan), self._attention.name, device, quantisation
        )

    @classmethod
    def load(
        cls,
        model: Path,
        settings: EngineSettings,
        device: torch.device | None = None,
        quantisation: Quantisation = "none",
        row_plans: Sequence[RowPlan] = CANDIDATE_PLANS,
    ) -> "Engine":
        """Read `model` (a directory, or a .gguf file) and allocate the KV pool. `quantisation`: of the products.

        `row_plans`: see `engine/linear.py`; the one found is of the numerics class.

        Raises InvalidArgument naming file and tensor, or the setting that does not fit the model.
        """
        device = device or torch.device("cpu")
        torch.set_num_threads(settings.num_threads)
        files = open_model(model)
        context_limit(files.config, settings)
        for layer in settings.hidden_layers:
            if not 0 <= layer < files.config.num_layers:
                raise InvalidArgument("engine.hidden_layers", f"layer {layer} of {files.config.num_layers}")
        with torch.inference_mode():
            weights = load_weights(files, _DTYPES[settings.dtype], device, quantisation, row_plans)
            engine = cls(files.config, settings, weights, files.revision(), device, quantisation)
        engine._model = model
        return engine

    def step(
        self,
        sequences: Sequence[SequenceStep],
        *,
        want_last_hidden: bool = False,
        exit_layer: int | None = None,
    ) -> StepResult:
        """One target forward over all rows; K, V and hidden planes are written for every row.

        `exit_layer` n runs the first n layers only, their output going through final norm and head
        (later layers' planes are left as they were). Raises StepRefused, touching nothing, when rows
        overrun table, context or vocabulary.
        """
        num_layers = self.config.num_layers if exit_layer is None else exit_layer
        if not 1 <= num_layers <= self.config.num_layers:
            raise ValueError(f"exit_layer {exit_layer} of {self.config.num_layers} layers")
        check_step(
            sequences,
            block_size=self.kv.layout.block_size,
            max_context=self.max_context,
            vocab_size=self.config.vocab_size,
        )
        self._own_thread()
        rows = build_rows(sequences, self.kv.layout.block_size)
        with torch.inference_mode(), turn_of(self.turns):
            self._attention.begin(rows)
            normed = self._forward(rows, num_layers)
            logits = self._logits(normed, rows)
        return StepResult(logits, rows.logits_start, normed if want_last_hidden else None)

    def output_rows(self, token_ids: Tensor) -> Tensor:
        """Rows of the output matrix, for drafters that speak a part of the vocabulary.

        token_ids [n] int64 → [n, hidden_dim] in the engine's dtype. An untied matrix is read from its file again.
        """
        if self.config.tied_embeddings:
            return self.weights.embedding.index_select(0, token_ids.to(self._device))
        assert self._model is not None, "an engine with an untied head comes from `load`"
        shape = (self.config.vocab_size, self.config.hidden_dim)
        matrix = open_model(self._model).take("lm_head.weight", shape)
        return matrix[token_ids].to(self._device, self.kv.layout.dtype)

    def warm_up(self) -> None:
        """One step over a scratch table, so that the first request pays for nothing lazy."""
        table = self.kv.open()
        try:
            self.kv.reserve(table, 4)
            self.step([SequenceStep(table=table, start=0, token_ids=(0, 0, 0, 0), logit_rows="last")])
        finally:
            self.kv.close(table)

    def memory_bytes(self) -> int:
        """Bytes of weights and of the KV pool once every block has been written."""
        config = self.config
        head = config.vocab_size * config.hidden_dim
        layer = config.hidden_dim * (
            2 * config.query_dim + 2 * config.kv_dim + 3 * config.intermediate_dim + 2
        )
        weights = (2 * head + config.num_layers * layer + config.hidden_dim) * self.kv.layout.dtype.itemsize
        return weights + self.kv.memory_bytes()

    def close(self) -> None:
        """Let go of the weights; the engine cannot step afterwards. Idempotent."""
        del self._llama, self.weights
        self.turns.close()
        self.turns = NoTurns()

    @property
    def row_plan(self) -> str:
        """The row plan found at load."""
        return str(self.weights.row_plan)

    @property
    def attention_name(self) -> str:
        """Which attention runs, with its version."""
        return self._attention.name

    def _forward(self, rows: StepRows, num_layers: int) -> Tensor:
        token_ids = torch.from_numpy(rows.token_ids).to(self._device)
        hidden = self.kv.hidden
        capture = self.kv.layout.hidden_layers
        if hidden is None:
            return self._llama.forward(token_ids, num_layers, (), _keep_nothing)
        slots = torch.from_numpy(rows.write_slots).to(self._device).long()
        planes = hidden

        def keep(layer: int, output: Tensor) -> None:
            planes[capture.index(layer)].index_copy_(0, slots, output)

        return self._llama.forward(token_ids, num_layers, capture, keep)

    def _logits(self, normed: Tensor, rows: StepRows) -> Tensor:
        if rows.wanted_rows is None:
            return self._llama.logits(normed)
        if not rows.wanted_rows:
            return normed.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        wanted = torch.tensor(rows.wanted_rows, device=self._device)
        return self._llama.logits(normed.index_select(0, wanted))

    def _own_thread(self) -> None:
        """OpenMP's thread count belongs to the calling thread: set it once in each."""
        if threading.get_ident() != self._thread_id:
            torch.set_num_threads(self.settings.num_threads)
            self._thread_id = threading.get_ident()


def _keep_nothing(layer: int, output: Tensor) -> None:
    del layer, output


def context_limit(config: ModelConfig, settings: EngineSettings) -> int:
    """Positions that may be used. Raises InvalidArgument for more than the model's."""
    if settings.max_context is None:
        return config.max_context
    if settings.max_context > config.max_context:
        raise InvalidArgument(
            "engine.max_context", f"{settings.max_context} is more than the model's {config.max_context}"
        )
    return settings.max_context


def numerics_class(
    settings: EngineSettings,
    revision: str,
    row_plan: str,
    attention: str,
    device: torch.device,
    quantisation: Quantisation = "none",
    pipeline_split: str = "none",
) -> NumericsClass:
    """The class of logits computed so. `pipeline_split`: layers of each stage, such as `15+15`."""
    if device.type == "cuda":
        instructions = torch.cuda.get_device_name(device)
    else:
        flags = hashlib.sha256(cpu_flags().encode()).hexdigest()[:8]
        instructions = f"{torch.backends.cpu.get_cpu_capability()}-{flags}"
    return NumericsClass(
        model_revision=revision,
        dtype=settings.dtype,
        kv_dtype=settings.dtype,
        device=device.type,
        instruction_set=instructions,
        kernels=f"{attention},torch-{torch.__version__}",
        row_padding=row_plan,
        quantisation=quantisation,
        pipeline_split=pipeline_split,
    )
