"""One stage of a pipeline-parallel target: some consecutive layers with their K, V and hidden planes.

The first stage embeds tokens, the last one has final norm and head. A stage keeps no tables: it runs the index arrays
of a step (`step_rows.py`), which whoever owns the tables made. What passes between stages is the residual stream in the
model's dtype; every stage's bits are those of the unsplit model's layers.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from core.errors import InvalidArgument
from core.settings import EngineSettings
from engine.attention import Attention
from engine.backends import make_backends
from engine.huge_pages import advise_huge_pages
from engine.kv_cache import KvCache, KvLayout
from engine.llama import Llama, LlamaWeights, load_weights
from engine.model_config import ModelConfig
from engine.pointwise import Pointwise
from engine.step_rows import StepRows
from engine.weights import open_model

Backends: TypeAlias = tuple[Attention, Pointwise]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def split_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Consecutive layers of each stage, the earlier ones the larger. Raises InvalidArgument for too many stages."""
    if not 1 <= num_stages <= num_layers:
        raise InvalidArgument("pipeline_stages", f"{num_stages} stages of {num_layers} layers")
    size, larger = divmod(num_layers, num_stages)
    ends = [0]
    for stage in range(num_stages):
        ends.append(ends[-1] + size + (stage < larger))
    return tuple(range(start, end) for start, end in pairwise(ends))


class Stage:
    """Made by `load`. Belongs to one thread. `layers`: those of the model that it runs."""

    def __init__(
        self, config: ModelConfig, layers: range, kv: KvCache, weights: LlamaWeights, backends: Backends
    ) -> None:
        self.config = config
        self.layers = layers
        self.kv = kv
        self.weights = weights
        self._attention, pointwise = backends
        self._llama = Llama(weights, self._attention, pointwise)

    @classmethod
    def load(
        cls, model: Path, settings: EngineSettings, layers: range, *, hold_all_hidden: bool = False
    ) -> "Stage":
        """Read what these layers need of `model`; of `settings.hidden_layers` its own are kept.

        `hold_all_hidden`: there is room for the other stages' planes as well, which somebody else fills.
        """
        torch.set_num_threads(settings.num_threads)
        files = open_model(model)
        config = files.config
        dtype = _DTYPES[settings.dtype]
        own = tuple(layer for layer in settings.hidden_layers if hold_all_hidden or layer in layers)
        layout = KvLayout(
            len(layers),
            config.num_kv_heads,
            config.head_dim,
            config.hidden_dim,
            own,
            settings.block_size,
            dtype,
        )
        kv = KvCache(layout, settings.num_blocks)
        for plane in (kv.keys, kv.values):
            advise_huge_pages(plane)
        max_context = settings.max_context or config.max_context
        part = replace(config, num_layers=len(layers))
        with torch.inference_mode():
            weights = load_weights(files, dtype, torch.device("cpu"), layers=layers)
        return cls(config, layers, kv, weights, make_backends(part, settings, kv, max_context))

    @property
    def attention_name(self) -> str:
        """Which attention runs, with its version."""
        return self._attention.name

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.layers.stop == self.config.num_layers

    def forward(self, rows: StepRows, residual: Tensor | None = None) -> Tensor:
        """The residual behind its layers: [rows, hidden_dim]. `residual` is overwritten; None for the first stage."""
        with torch.inference_mode():
            if residual is None:
                residual = self._llama.embed(torch.from_numpy(rows.token_ids))
            self._attention.begin(rows)
            planes, kept = self.kv.hidden, self.kv.layout.hidden_layers
            slots = torch.from_numpy(rows.write_slots).long()

            def keep(index: int, output: Tensor) -> None:
                assert planes is not None
                planes[kept.index(self.layers.start + index)].index_copy_(0, slots, output)

            capture = [layer - self.layers.start for layer in kept if layer in self.layers]
            return self._llama.through(residual, capture, keep)

    def logits(self, rows: StepRows, residual: Tensor) -> Tensor:
        """Of the wanted rows: [wanted rows, vocabulary] float32. Last stage only."""
        with torch.inference_mode():
            if rows.wanted_rows is not None:
                residual = residual.index_select(0, torch.tensor(rows.wanted_rows, dtype=torch.int64))
            if not len(residual):
                return residual.new_empty((0, self.config.vocab_size), dtype=torch.float32)
            return self._llama.logits(self._llama.normed(residual))
