"""A target and one head in this process, without a server: both distributions at every position of an answer."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from torch import Tensor

from core.errors import InvalidArgument
from core.records import SamplingParams
from core.settings import load_settings
from core.tokenizer import Tokenizer
from decode.draft import Draft, VerifyItem
from decode.drafters.head_drafter import HeadDrafter
from decode.drafters.heads import head_layers, head_settings, load_head
from decode.drafters.shipped_heads import with_shipped
from decode.replay import continue_prompt, drafts_along, request_over
from decode.sampling import sampler
from decode.sampling.arithmetic import Float64
from decode.sampling.history import TokenHistory
from decode.target import Target
from decode.verification.distributions import normalised, target_probs_at
from decode.verification.verify import verify
from engine.engine import Engine
from engine.weights import open_model
from tests.bench.coupling import Coupling, coupling_of
from tests.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class HeadAlone:
    """The engine with the planes that the head reads, and the head, which drafts everywhere."""

    target: Target
    drafter: HeadDrafter
    end_ids: frozenset[int]

    @classmethod
    def load(cls, model: Path, name: str, config: Path | None) -> Self:
        """With the settings of the server's TOML `config`. Raises InvalidArgument for a name that is no hosted head.

        `min_probability` is 0: where the head is unsure it would not draft under rejection, and say nothing of d.
        """
        settings = load_settings(config, {})
        hosted = with_shipped(settings.decode_worker.drafters, open_model(model).revision(), model=model)
        head = head_settings(hosted).get(name)
        if head is None:
            raise InvalidArgument("drafter", f"{name} is no head that is hosted for {model}")
        tokenizer = Tokenizer.from_directory(model)
        engine = Engine.load(model, settings.engine.model_copy(update={"hidden_layers": head_layers(head)}))
        drafter = load_head(name, head.model_copy(update={"min_probability": 0.0}), engine, tokenizer)
        vocab_size = min(tokenizer.vocab_size, engine.config.vocab_size)
        return cls(Target(engine, vocab_size), drafter, frozenset(tokenizer.eos_token_ids))

    def answer(self, prompt: Prompt, sampling: SamplingParams, seed: int) -> tuple[list[int], list[Coupling]]:
        """Plain decoding's answer, and a coupling for each of its tokens but the first, which is not drafted."""
        engine, num_prompt = self.target.engine, len(prompt.token_ids)
        plain = _PlainDraws(self.target, sampling, seed, TokenHistory(prompt.token_ids))
        table = engine.kv.open()
        try:
            token_ids = continue_prompt(
                engine, table, prompt.token_ids, plain.draw, sampling.max_tokens, self.end_ids
            )
            history = TokenHistory(prompt.token_ids, token_ids[num_prompt : num_prompt + 1])
            request = request_over(engine, table, history, sampling, seed, "rejection")
            with closing(drafts_along(self.drafter, request, token_ids)) as drafts:
                pairs = zip(plain.target_probs[1:], drafts, strict=True)
                found = [coupling_of(probs, _draft_probs(draft)) for probs, draft in pairs]
        finally:
            engine.kv.close(table)
        self.drafter.check()
        return token_ids[num_prompt:], found


class _PlainDraws:
    """What plain decoding draws, and the distributions [vocabulary] that it draws from, position by position."""

    def __init__(self, target: Target, sampling: SamplingParams, seed: int, history: TokenHistory) -> None:
        self.target_probs: list[Float64] = []
        self._target = target
        self._sampling = sampling
        self._seed = seed
        self._history = history

    def draw(self, logits: Tensor) -> int:
        """The next token, from raw logits [1, vocabulary]. Raises ValueError where nothing can be drawn."""
        self._target.mask_padding(logits)
        rows = sampler.as_rows(logits)
        position = len(self._history.token_ids)
        item = VerifyItem(self._sampling, self._seed, 0, self._history, position, 0)
        probs = target_probs_at(item, 0, (), rows)
        if isinstance(probs, str):
            raise ValueError(probs)
        self.target_probs.append(probs)
        (verdict,) = verify([item], rows)
        self._history.extend(verdict.token_ids)
        return verdict.token_ids[0]


def _draft_probs(draft: Draft) -> Float64:
    """d at the draft's only node, as verification by rejection weighs it. Raises ValueError where there is none."""
    probs = None if draft.draft_probs is None else normalised(draft.draft_probs[0].numpy())
    if probs is None:
        raise ValueError(f"there is no draft with its distribution: {draft.fault or 'the head had no room'}")
    return probs
