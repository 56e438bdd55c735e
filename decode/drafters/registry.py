"""Which drafters a worker hosts, by name."""

from collections.abc import Callable
from pathlib import Path

from core.clock import Clock, SystemClock
from core.drafter_settings import DraftersSettings
from core.errors import InvalidArgument
from core.tokenizer import Tokenizer
from decode.drafters.bild import BildDrafter
from decode.drafters.cache import CacheDrafter
from decode.drafters.cascade import CascadeDrafter
from decode.drafters.composition import add_composed, add_pass
from decode.drafters.draft_model import DraftModelDrafter
from decode.drafters.heads import head_layers, head_settings, load_head
from decode.drafters.layerskip import LayerSkipDrafter
from decode.drafters.lookahead import LookaheadDrafter
from decode.drafters.medusa import MedusaDrafter
from decode.drafters.medusa_artifact import medusa_layers
from decode.drafters.ngram import NgramDrafter
from decode.drafters.none import NoneDrafter
from decode.drafters.protocol import Drafter
from decode.drafters.rest import RestDrafter
from decode.drafters.scripted import (
    HIDDEN_LAYERS,
    HiddenDrafter,
    RightDrafter,
    Script,
    TreeDrafter,
    WrongDrafter,
)
from engine.engine import Engine
from engine.pipeline import PipelinedEngine


def required_hidden_layers(settings: DraftersSettings) -> tuple[int, ...]:
    """The layers whose planes the configured drafters need, ascending; known before the engine is loaded.

    Raises InvalidArgument where a head's manifest cannot be read.
    """
    layers = set(HIDDEN_LAYERS if settings.scripted is not None else ())
    for head in head_settings(settings).values():
        layers.update(head_layers(head))
    if settings.medusa is not None:
        layers.update(medusa_layers(settings.medusa))
    return tuple(sorted(layers))


def build_drafters(
    settings: DraftersSettings,
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    clock: Clock | None = None,
    step_seconds: Callable[[int], float] = lambda rows: 0.0,
) -> dict[str, Drafter]:
    """All configured drafters; `none` is always there, `pass` where the target is pipelined.

    Loads the draft model, which takes seconds.
    `step_seconds(rows)`: measured seconds of a target step, 0.0 where nothing is known.
    """
    drafters: list[Drafter] = [NoneDrafter()]
    if settings.ngram is not None:
        drafters.append(NgramDrafter(settings.ngram))
    if settings.draft_model is not None:
        draft = DraftModelDrafter.load(settings.draft_model, engine, tokenizer)
        drafters += [draft, *_approximate(settings, draft)]
    elif settings.bild is not None or settings.cascade is not None:
        raise InvalidArgument(
            "decode_worker.drafters.draft_model", "bild and cascade draft with it: it must be set"
        )
    if settings.rest is not None:
        drafters.append(RestDrafter.load(settings.rest, tokenizer, engine.config.vocab_size))
    for name, head in head_settings(settings).items():
        drafters.append(load_head(name, head, engine, tokenizer))
    if settings.lookahead is not None:
        drafters.append(LookaheadDrafter(settings.lookahead, engine.max_context))
    if settings.cache is not None:
        vocab_size = min(tokenizer.vocab_size, engine.config.vocab_size)
        drafters.append(CacheDrafter(settings.cache, vocab_size))
    if settings.medusa is not None:
        drafters.append(MedusaDrafter.load(settings.medusa, engine, tokenizer))
    if settings.layerskip is not None:
        drafters.append(LayerSkipDrafter.load(settings.layerskip, engine, tokenizer))
    if settings.scripted is not None:
        script = Script(Path(settings.scripted.script))
        vocab_size = min(tokenizer.vocab_size, engine.config.vocab_size)
        for kind in (RightDrafter, WrongDrafter, TreeDrafter, HiddenDrafter):
            drafters.append(kind(settings.scripted, script, vocab_size))
    hosted = {drafter.name: drafter for drafter in drafters}
    add_composed(hosted, settings, clock or SystemClock(), step_seconds)
    if isinstance(engine, PipelinedEngine):
        add_pass(hosted, settings)
    return hosted


def _approximate(settings: DraftersSettings, draft: DraftModelDrafter) -> list[Drafter]:
    """Those that change the distribution; they share the draft model."""
    drafters: list[Drafter] = []
    if settings.bild is not None:
        drafters.append(BildDrafter(draft, settings.bild))
    if settings.cascade is not None:
        drafters.append(CascadeDrafter(draft, settings.cascade))
    return drafters
