"""The target as decoding sees it: one forward, and logits without the padding of its vocabulary."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.engine import Engine
from engine.step_batch import SequenceStep, StepResult


class Target:
    """`vocab_size`: ids that mean something; the model's head may be wider."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size
        self.kv = engine.kv

    def step(self, sequences: Sequence[SequenceStep]) -> StepResult:
        """As `Engine.step`."""
        result = self.engine.step(sequences)
        self.mask_padding(result.logits)
        return result

    def mask_padding(self, logits: Tensor) -> None:
        """In place, `logits` [..., width]: ids that no tokenizer knows cannot be drawn."""
        if logits.shape[-1] > self.vocab_size:
            with torch.inference_mode():
                logits[..., self.vocab_size :] = -torch.inf
