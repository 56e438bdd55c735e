"""The settings of drafters, each a section of `decode_worker.drafters`; read by `core/settings.py`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from core.section import Section

Quantisation = Literal["none", "int8", "int4"]
DraftQuantisation = Quantisation | None
"""None: what multiplies a few rows fastest where it runs, `none` or `int4`."""
PassDrafterName = Literal["ngram", "draft_model", "eagle", "eagle3"]
_HEADS: tuple[PassDrafterName, ...] = ("eagle", "eagle3")


class NgramSettings(Section):
    """Prompt lookup over prompt and answer."""

    min_match: int = Field(2, ge=1, description="Fewest tokens that have to agree.")
    max_match: int = Field(8, ge=1, description="Most tokens compared.")
    draft_length: int = Field(8, ge=1, le=64, description="Default K.")
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(16, ge=1, le=64, description="Largest K.")


class BildSettings(Section):
    """Big Little Decoder with the draft model (`draft_model` must be set); approximate."""

    fallback_threshold: float = Field(
        0.5, ge=0, le=1, description="The draft stops where its largest probability is below."
    )
    rollback_threshold: float = Field(
        2.0, ge=0, description="-log of the target's probability up to which a draft token is kept."
    )
    draft_length: int = Field(8, ge=1, le=64, description="Default K.")
    max_draft_length: int = Field(16, ge=1, le=64, description="Largest K.")


class CascadeSettings(Section):
    """Easy answers by the draft model (`draft_model` must be set), hard ones by the target; approximate."""

    confidence_threshold: float = Field(
        0.6, ge=0, le=1, description="Mean of the draft's largest probabilities from which an answer is easy."
    )
    first_tokens: int = Field(4, ge=1, description="Tokens before an answer may become hard.")
    draft_length: int = Field(16, ge=1, le=64, description="Default K.")
    max_draft_length: int = Field(16, ge=1, le=64, description="Largest K.")


class RestSettings(Section):
    """Retrieval from a corpus that `outrider corpus build` made."""

    corpus: str = Field(description="Folder of the corpus.")
    min_match: int = Field(2, ge=1, le=8, description="Fewest tokens that have to agree.")
    max_match: int = Field(8, ge=1, le=8, description="Most tokens compared.")
    max_candidates: int = Field(64, ge=1, le=1024, description="Occurrences looked at in one draft.")
    draft_length: int = Field(6, ge=1, le=64, description="Default K.")
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(16, ge=1, le=64, description="Largest K.")


class LookaheadSettings(Section):
    """Jacobi iteration in a window of W columns and N - 1 levels: W · (N - 1) - 1 rows beside the nodes of a step.

    They are evaluated only where they fit into `max_tree_nodes` beside the nodes.
    """

    window: int = Field(4, ge=1, le=32, description="Columns of the window (W).")
    ngram: int = Field(3, ge=3, le=16, description="Tokens of an n-gram (N); the longest draft has N - 1.")
    guesses: int = Field(
        3, ge=1, le=16, description="n-grams kept for each first token (G); also the default width."
    )
    draft_length: int | None = Field(None, ge=1, description="Default K; None: the longest.")

    @model_validator(mode="after")
    def _draft_within_ngram(self) -> Self:
        if self.draft_length is not None and self.draft_length >= self.ngram:
            raise ValueError(f"draft_length must be less than ngram, which is {self.ngram}")
        return self


class CacheSettings(Section):
    """Earlier answers of the same tenant and cache salt."""

    max_tokens: int = Field(
        262_144, ge=4096, description="Tokens held by a worker at most, some 250 bytes of memory each."
    )
    tenant_share: float = Field(
        0.25,
        gt=0,
        le=1,
        description="Part of them that others cannot push out; what is beyond it goes first.",
    )
    min_match: int = Field(3, ge=1, le=64, description="Fewest tokens that have to agree.")
    max_match: int = Field(24, ge=1, le=64, description="Tokens of a prompt's end kept with its answer, too.")
    max_candidates: int = Field(
        16, ge=1, le=64, description="Earlier answers that a draft is made of at most."
    )
    min_answer_tokens: int = Field(8, ge=1, description="Shorter answers are not kept.")
    max_answer_tokens: int = Field(
        2048, ge=8, le=4032, description="Of a longer answer the beginning is kept."
    )
    draft_length: int = Field(8, ge=1, le=64, description="Default K.")
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(16, ge=1, le=64, description="Largest K.")
    share: bool = Field(
        False,
        description="Keep the token ids of answers and of the ends of prompts in Redis, for all workers of the model "
        "and beyond their restarts. Whoever reads that Redis can read them: an operator's decision.",
    )
    shared_answers: int = Field(4096, ge=8, description="Answers in Redis at most, about.")
    shared_for_s: float = Field(
        7 * 86400.0, ge=1, description="They are gone so long after the last of their shard was added."
    )


class DraftModelSettings(Section):
    """A second model with the target's tokenizer."""

    model: str = Field(description="Model directory, alias or GGUF file.")
    draft_length: int = Field(4, ge=1, le=64, description="Default K.")
    draft_width: int = Field(1, ge=1, le=8, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(8, ge=1, le=64, description="Largest K.")
    num_blocks: int | None = Field(None, description="None: as many as the target's.")
    quantisation: Quantisation = Field(
        "none", description="Of the draft's weights, for up to three rows at once; the target keeps its own."
    )


class HeadSettings(Section):
    """A trained head on the target's hidden states."""

    artifact: str | None = Field(
        None,
        description="Folder of the head, as `outrider train` writes it. None: the one that ships for the target.",
    )
    draft_length: int = Field(4, ge=1, le=16, description="Default K.")
    draft_width: int = Field(3, ge=1, le=16, description="Default width; 1 is a chain.")
    max_draft_length: int = Field(8, ge=1, le=16, description="Largest K.")
    min_probability: float = Field(
        0.05, ge=0.0, lt=1.0, description="A path that the head thinks less likely is drafted no further."
    )
    quantisation: DraftQuantisation = Field(
        None,
        description="Of the head's weights. None: what is fastest, `int4` for bfloat16 on CPUs with AVX-512.",
    )


class MedusaSettings(HeadSettings):
    """Heads that each say one of the next tokens, as `outrider train medusa` writes them."""

    draft_width: int = Field(4, ge=1, le=16, description="Default width; 1 is a chain.")
    min_probability: float = Field(0.02, ge=0.0, lt=1.0, description="Less likely nodes are not drafted.")
    tree: Literal["measured", "confident"] = Field(
        "measured",
        description="Nodes of a greedy draft: by the acceptance that the artifact measured, or by each draft's own "
        "probabilities. Sampled drafts take the latter.",
    )


class SequoiaSettings(Section):
    """Trees of the shape that pays best, drafted by another drafter."""

    base: str = Field("draft_model", description="Hosted drafter that can draft a tree of a given shape.")
    plan: str | None = Field(
        None, description="JSON measurements (`outrider plan-tree --help`). None: learnt from live traffic."
    )
    draft_length: int = Field(6, ge=1, le=64, description="Default K.")
    draft_width: int = Field(4, ge=1, le=8, description="Default width: most children of a node.")
    max_draft_length: int = Field(8, ge=1, le=64, description="Largest K.")
    replan_steps: int = Field(64, ge=1, description="Steps between two plans.")
    decay: float = Field(0.99, gt=0, lt=1, description="What a trial of a rank leaves of its earlier ones.")


class SpecInferSettings(Section):
    """The drafts of several hosted drafters, merged into one tree."""

    members: tuple[str, ...] = Field(min_length=2, description="Names of hosted drafters.")


class RecursiveSettings(Section):
    """The draft model's own drafts in fewer of its forwards, where n-grams guess them."""

    guess_length: int = Field(4, ge=1, le=64, description="Tokens guessed at most.")
    ngram: NgramSettings = NgramSettings()


class LayerSkipSettings(Section):
    """The target's first layers as a draft, behind which a trained adapter speaks."""

    artifact: str | None = Field(
        None,
        description="Folder of a trained exit. None: untrained, through the whole head; slow, seldom right.",
    )
    exit_layer: int | None = Field(
        None, ge=1, description="Layers that a draft runs. None: the artifact's, or half of them without one."
    )
    draft_length: int = Field(3, ge=1, le=64, description="Default K.")
    max_draft_length: int = Field(8, ge=1, le=64, description="Largest K.")
    quantisation: Quantisation = Field("none", description="Of the adapter's weights and its output rows.")


class ScriptedSettings(Section):
    """The test drafter: proposes what a file says, right or wrong, in any tree. Never for production."""

    script: str = Field(
        description="JSON lines: {prompt_digest, seed, answer} or {mode}; see decode/drafters/scripted.py."
    )
    max_draft_length: int = Field(16, ge=1, le=64, description="Largest K.")


class DraftersSettings(Section):
    """Which drafters a decode worker hosts; `none` is always there."""

    ngram: NgramSettings | None = NgramSettings()
    draft_model: DraftModelSettings | None = None
    sequoia: SequoiaSettings | None = None
    recursive: RecursiveSettings | None = None
    specinfer: SpecInferSettings | None = None
    rest: RestSettings | None = None
    eagle: HeadSettings | None = None
    eagle2: HeadSettings | None = None
    eagle3: HeadSettings | None = None
    mtp: HeadSettings | None = None
    medusa: MedusaSettings | None = None
    versions: dict[str, HeadSettings] = Field(
        {}, description="Further heads by the name that requests give: NAME@VERSION, such as eagle3@next."
    )
    shipped: bool = Field(True, description="Host the heads that ship for the target, where there are any.")
    lookahead: LookaheadSettings | None = LookaheadSettings()
    cache: CacheSettings | None = CacheSettings()
    layerskip: LayerSkipSettings | None = None
    bild: BildSettings | None = None
    cascade: CascadeSettings | None = None
    scripted: ScriptedSettings | None = None
    pass_drafter: PassDrafterName = Field(
        "ngram", description="What `pass` drafts with, as chains; where engine.pipeline_stages is 2."
    )

    @property
    def without_pass_drafter(self) -> str:
        """What is missing for `pass_drafter`, and how to mend it; "": it is there, or may ship with the target."""
        name = self.pass_drafter
        if getattr(self, name) is not None or (name in _HEADS and self.shipped):
            return ""
        return f"{name} is not configured; set decode_worker.drafters.{name}, or name one that is"
