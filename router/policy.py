"""What `auto` means: a class of requests → a drafter and a starting K. A file of the operator's may change it.

File (TOML); a class or a key that is missing keeps the default below:
    [class.code]
    drafter = ["eagle3", "ngram"]    # of those hosted the worker takes what it measured to be fastest; or one name
    draft_length = 8
    thinking_draft_length = 12                  # K of `auto` while the model thinks aloud, between these:
    thinking_markers = ["<think>", "</think>"]
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from core.errors import InvalidArgument
from core.records import (
    APPROXIMATE_DRAFTERS,
    REQUEST_CLASSES,
    RequestClass,
    SpeculationParams,
    ThinkingPace,
)
from core.settings import ClassPolicy
from router.validate import AUTO, CLASS_SPELLINGS, NO_DRAFTER

_REPEATS = ("specinfer", "ngram", "eagle3", "mtp", "medusa")
"""First guesses where the answer repeats what was seen."""
_SAYS_NEW = ("specinfer", "eagle3", "mtp", "medusa", "ngram")
"""First guesses where it does not."""

DEFAULT_POLICIES: Mapping[RequestClass, ClassPolicy] = {
    "structured": ClassPolicy(drafter=_REPEATS, draft_length=7),
    "code": ClassPolicy(drafter=_REPEATS, draft_length=8),
    "chat": ClassPolicy(drafter=_SAYS_NEW, draft_length=4),
    "reasoning": ClassPolicy(drafter=_SAYS_NEW, draft_length=3),
    "creative": ClassPolicy(drafter=_SAYS_NEW, draft_length=3),
    "translation": ClassPolicy(drafter=_REPEATS, draft_length=5),
    "summarisation": ClassPolicy(drafter=_REPEATS, draft_length=5),
    "batch": ClassPolicy(drafter=_REPEATS, draft_length=8),
}
_FIELD = "router.policy_file"


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """How one attempt drafts on one worker. `fixed`: K was given by the client, the controller leaves it alone.

    `fallback` names why the wanted drafter was not taken; empty: it was. `thinking`: another K while the model thinks.
    `candidates`: what the worker chooses from, where the drafter is still `auto`; the first guess first.
    """

    speculation: SpeculationParams
    fixed: bool
    reason: str
    fallback: str = ""
    thinking: ThinkingPace | None = None
    candidates: tuple[str, ...] = ()


def parse_policies(text: str) -> Mapping[RequestClass, ClassPolicy]:
    """The whole table, defaults included. Raises InvalidArgument naming the key; nothing is taken from a bad file."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(_FIELD, f"not TOML: {error}") from error
    unknown = sorted(document.keys() - {"class"})
    if unknown:
        raise InvalidArgument(f"{_FIELD}:{unknown[0]}", "is not a key; [class.NAME] sections are")
    sections = document.get("class", {})
    if not isinstance(sections, dict):
        raise InvalidArgument(f"{_FIELD}:class", "must hold [class.NAME] sections")
    table = dict(DEFAULT_POLICIES)
    for name, section in sections.items():
        request_class = CLASS_SPELLINGS.get(name)
        if request_class is None:
            raise InvalidArgument(f"{_FIELD}:class.{name}", f"is not one of {', '.join(REQUEST_CLASSES)}")
        table[request_class] = _parse_section(name, request_class, section)
    return table


def _parse_section(name: str, request_class: RequestClass, section: object) -> ClassPolicy:
    try:
        default = DEFAULT_POLICIES[request_class].model_dump()
        policy = ClassPolicy.model_validate({**default, **section} if isinstance(section, dict) else section)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join([f"class.{name}", *(str(part) for part in first["loc"])])
        raise InvalidArgument(f"{_FIELD}:{path}", first["msg"]) from error
    if not policy.preference or {"", AUTO} & {*policy.preference}:
        raise InvalidArgument(f"{_FIELD}:class.{name}.drafter", "must name drafters")
    return policy


def load_policies(policy_file: str | None) -> Mapping[RequestClass, ClassPolicy]:
    """The table of the operator's file, or the defaults without one. Blocks on the disk. Raises InvalidArgument."""
    if policy_file is None:
        return DEFAULT_POLICIES
    try:
        text = Path(policy_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(_FIELD, f"{policy_file}: {error}") from error
    return parse_policies(text)


def _candidates(requested: SpeculationParams, policy: ClassPolicy, hosted: frozenset[str]) -> tuple[str, ...]:
    """The policy's drafters that are hosted, as far as `none`, behind which none comes; the first where none is.

    Only those that keep the answer as it is, but for a single one that the request allows; `none` where none is left.
    """
    names = policy.preference
    if len(names) > 1 or not (requested.allow_approximate and requested.verification == "invariant"):
        names = tuple(name for name in names if name not in APPROXIMATE_DRAFTERS)
    known = [name for name in dict.fromkeys(names) if name == NO_DRAFTER or name in hosted]
    drafting = known[: known.index(NO_DRAFTER)] if NO_DRAFTER in known else known
    return tuple(drafting) or (*known, *names, NO_DRAFTER)[:1]


NO_DRAFTING = DraftPlan(SpeculationParams(NO_DRAFTER), False, "beam search drafts nothing")
"""Of a request that is searched for."""


def choose_drafting(
    requested: SpeculationParams, policy: ClassPolicy, hosted: frozenset[str], max_draft_length: int
) -> DraftPlan:
    """The drafter and K for a worker that hosts `hosted`.

    `auto` becomes one drafter here where the policy leaves one; among several the worker chooses, which measured them.
    What the client named is used as given. What the worker lacks becomes `none`, with the reason: for `auto` at any
    time, for a named drafter only when an attempt had to move (placement otherwise keeps to workers that host it).
    """
    automatic = requested.drafter == AUTO
    candidates = _candidates(requested, policy, hosted) if automatic else (requested.drafter,)
    drafter = candidates[0] if len(candidates) == 1 else AUTO
    fixed = requested.draft_length is not None
    length = requested.draft_length if fixed or not automatic else policy.draft_length
    reason = "auto: policy" if automatic else "drafter given"
    fallback = ""
    if drafter == AUTO:
        reason = f"auto: the fastest of {', '.join(candidates)}"
    elif drafter != NO_DRAFTER and drafter not in hosted:
        reason, fallback = f"{reason}; {drafter} is not hosted, so none", "drafter_not_hosted"
        drafter = NO_DRAFTER
    if drafter == NO_DRAFTER:
        length = 0 if fixed else None
    elif length is not None:
        length = min(length, max_draft_length)
    chosen = SpeculationParams(
        drafter=drafter,
        draft_length=length,
        draft_width=requested.draft_width,
        verification=requested.verification,
        allow_approximate=requested.allow_approximate,
    )
    thinking = None
    if policy.thinking_draft_length is not None and not fixed and drafter != NO_DRAFTER:
        thinking_length = min(policy.thinking_draft_length, max_draft_length)
        thinking = ThinkingPace(thinking_length, *policy.thinking_markers)
    return DraftPlan(chosen, fixed, reason, fallback, thinking, candidates if drafter == AUTO else ())


def keep_drafter(plan: DraftPlan, drafter: str, hosted: frozenset[str]) -> DraftPlan:
    """`plan` of a later attempt at an answer that began with `drafter`: no worker chooses another one, but for `none`.

    A plan that leaves nothing to choose stays as it is, but for one that a changed policy made approximate meanwhile.
    """
    if drafter == AUTO:
        return plan
    if plan.speculation.drafter in APPROXIMATE_DRAFTERS and drafter not in APPROXIMATE_DRAFTERS:
        return _plainly(plan, "auto: the answer began as an exact one, so none", "")
    if not plan.candidates:
        return plan
    reason = f"auto: {drafter}, as before"
    if drafter != NO_DRAFTER and drafter in hosted:
        return replace(plan, reason=reason, candidates=(drafter,))
    return _plainly(plan, reason, "" if drafter == NO_DRAFTER else "drafter_not_hosted")


def without_drafter(plan: DraftPlan) -> DraftPlan:
    """`plan` of an answer under which several workers were lost: its drafter may be what hangs or kills them."""
    if plan.speculation.drafter == NO_DRAFTER:
        return plan
    return _plainly(plan, f"{plan.reason}; workers were lost, so none", "workers_lost")


def _plainly(plan: DraftPlan, reason: str, fallback: str) -> DraftPlan:
    chosen = replace(plan.speculation, drafter=NO_DRAFTER, draft_length=0 if plan.fixed else None)
    return replace(plan, speculation=chosen, reason=reason, fallback=fallback, thinking=None, candidates=())
