"""From a checked job to a request with its choices: which drafter, how deep, and why not."""

import hashlib
from collections.abc import Mapping

from core.errors import FailedPrecondition, InvalidArgument
from core.records import APPROXIMATE_DRAFTERS, NO_PIPELINE, PASS_DRAFTER, ChoiceFinish
from core.settings import DecodeSettings
from core.tokenizer import IncrementalDetokenizer, Tokenizer
from decode.beam_group import BeamGroup
from decode.choice import Choice, Listener, Request
from decode.control.drafter_choice import DrafterChoice
from decode.drafters.protocol import Drafter, DraftRequest
from decode.drafting import FALLBACK_POSITION, FALLBACK_SHORT
from decode.finisher import Finisher
from decode.job import DecodeJob, JobLimits
from decode.report import Tally
from decode.sampling.history import TokenHistory
from decode.thinking import ThinkingSpan
from engine.block_table import BlockTable
from engine.kv_cache import KvCache

AUTO = "auto"
_AUTO_DRAFTER = "ngram"
_CHOICE_KEYS = 2**20
_FAILURE_STEPS = 64.0
"""A drafter that failed an answer has, to what `auto` learns, cost so many steps and brought nothing for them."""


class RequestFactory:
    """Makes requests, and chooses the drafter of those that leave it open. Event loop only."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        settings: DecodeSettings,
        tokenizer: Tokenizer,
        kv: KvCache,
        limits: JobLimits,
    ) -> None:
        self._drafters = drafters
        self._settings = settings
        self._tokenizer = tokenizer
        self._kv = kv
        self._limits = limits
        self._drafter_choice = DrafterChoice()

    def make(
        self,
        key: int,
        job: DecodeJob,
        listener: Listener,
        hashes: list[bytes],
        company: Mapping[str, int] | None = None,
    ) -> Request:
        """The request of a job. Raises InvalidArgument for a drafter or draft length that this worker lacks.

        `company`: live requests by drafter. FailedPrecondition for `pass` where the target is not pipelined.
        """
        drafter, reason = self._choose(job, company)
        speculation = job.speculation
        requested = speculation.draft_length if job.draft_length_fixed else None
        tally = Tally(drafter.name, job.request_class, requested)
        if reason:
            tally.fall_back(reason)
            drafter = self._drafters["none"]
        request = Request(key, job, listener, tally, _not_admitted, hashes=hashes)
        for index in range(job.sampling.n):
            request.choices.append(self._choice(request, index, drafter))
        request.open_choices = sum(not choice.ended for choice in request.choices)
        return request

    def learn(self, request: Request) -> None:
        """A request is over, and the engine thread is done with it: what its drafter brought, where `auto` chose it."""
        job = request.job
        if not _is_measured(job):
            return
        report = request.tally.snapshot()
        if report.fallback_reason == FALLBACK_SHORT:
            return
        failed = report.fallback_reason not in ("", FALLBACK_POSITION)
        plain_steps = request.tally.plain_steps + (_FAILURE_STEPS if failed else 0.0)
        self._drafter_choice.learn(job.request_class, report.drafter, report.step_tokens, plain_steps)

    def _choose(self, job: DecodeJob, company: Mapping[str, int] | None) -> tuple[Drafter, str]:
        """The drafter asked for, and why it is not used ("": it is)."""
        if job.sampling.beam_width > 1:
            return self._drafters["none"], ""
        speculation = job.speculation
        short = job.sampling.max_tokens < self._settings.min_speculation_tokens
        name = speculation.drafter
        if name == AUTO:
            name = self._automatic(job, short, company)
        drafter = self._drafters.get(name)
        if drafter is None and name == PASS_DRAFTER:
            raise FailedPrecondition("speculation.drafter", NO_PIPELINE)
        if drafter is None:
            known = ", ".join(sorted(self._drafters))
            raise InvalidArgument("speculation.drafter", f"{name!r} is not hosted here; these are: {known}")
        _check_lengths(job, drafter)
        if short and not job.draft_length_fixed and name != "none":
            return drafter, FALLBACK_SHORT
        return drafter, ""

    def _automatic(self, job: DecodeJob, short: bool, company: Mapping[str, int] | None) -> str:
        """What `auto` is for this request; without candidates that could take it, what it is by default."""
        hosted = [name for name in job.auto_drafters if name in self._drafters]
        able = [
            name for name in hosted if name not in APPROXIMATE_DRAFTERS and _fits(job, self._drafters[name])
        ]
        if not able:
            return _AUTO_DRAFTER if _AUTO_DRAFTER in self._drafters else "none"
        if short or not _is_measured(job):
            return self._drafter_choice.best(job.request_class, able)
        return self._drafter_choice.choose(job.request_class, able, company)

    def _choice(self, request: Request, index: int, drafter: Drafter) -> Choice:
        job = request.job
        sampling, speculation = job.sampling, job.speculation
        committed = job.committed_ids(index)
        history = TokenHistory(job.prompt_ids, committed)
        limit = self._limits.token_limit(len(job.prompt_ids), sampling.max_tokens, sampling.beam_width)
        finisher = Finisher(sampling, limit, IncrementalDetokenizer(self._tokenizer))
        finish = _finish_so_far(finisher, committed, index)
        width = speculation.draft_width or drafter.needs.default_draft_width
        key = request.key * _CHOICE_KEYS + index
        draft_request = DraftRequest(
            key=key,
            history=history,
            sampling=sampling,
            seed=job.claims.seed,
            choice=index,
            verification=speculation.verification,
            hidden=lambda start, end: self._kv.read_hidden(_table_of(choice), start, end),
            draft_width=1 if speculation.verification == "block" else width,
            table=lambda: _table_of(choice),
            request_class=job.request_class,
            isolation=f"{job.claims.tenant}/{job.claims.cache_salt.hex()}",
        )
        if draft_request.is_weighed and drafter.needs.remembers_answers:
            draft_request.seed = _seed_of_attempt(job)
        choice = Choice(
            key=key,
            index=index,
            request=request,
            history=history,
            finisher=finisher,
            drafter=drafter,
            draft_length_fixed=speculation.draft_length if job.draft_length_fixed else None,
            draft_length_start=_start_length(job, drafter),
            thinking=self._thinking(job, drafter),
            draft_request=draft_request,
            beams=BeamGroup(sampling, history, finisher) if sampling.beam_width > 1 else None,
            ended=finish is not None or job.is_finished(index),
            finish=finish,
        )
        return choice

    def _thinking(self, job: DecodeJob, drafter: Drafter) -> ThinkingSpan | None:
        """None where K is fixed, nothing is drafted, or a marker has no tokens."""
        pace = job.thinking
        if pace is None or job.draft_length_fixed or drafter.name == "none":
            return None
        opening, closing = (tuple(self._tokenizer.encode(text)) for text in (pace.opening, pace.closing))
        if not opening or not closing:
            return None
        outside = _start_length(job, drafter)
        longest = drafter.needs.max_draft_length
        return ThinkingSpan(
            opening=opening,
            closing=closing,
            thinking_length=max(0, min(pace.draft_length, longest)),
            outside_length=drafter.needs.default_draft_length if outside is None else outside,
        )


def _is_measured(job: DecodeJob) -> bool:
    """Whether what becomes of it says something of a drafter that `auto` may choose: K is the controller's."""
    return job.speculation.drafter == AUTO and bool(job.auto_drafters) and not job.draft_length_fixed


def _fits(job: DecodeJob, drafter: Drafter) -> bool:
    """Whether the drafter can draft as deep and wide as was asked for."""
    try:
        _check_lengths(job, drafter)
    except InvalidArgument:
        return False
    return True


def _check_lengths(job: DecodeJob, drafter: Drafter) -> None:
    needs = drafter.needs
    length, width = job.speculation.draft_length, job.speculation.draft_width
    if drafter.name == "none":
        return
    if job.draft_length_fixed and length is not None and not 0 <= length <= needs.max_draft_length:
        raise InvalidArgument(
            "speculation.draft_length", f"{drafter.name} drafts 0 to {needs.max_draft_length} tokens"
        )
    if width is not None and width < 1:
        raise InvalidArgument("speculation.draft_width", "must be at least 1")
    if width is not None and width > needs.max_draft_width:
        raise InvalidArgument(
            "speculation.draft_width", f"{drafter.name} drafts 1 to {needs.max_draft_width} wide"
        )


def _seed_of_attempt(job: DecodeJob) -> int:
    """Of noise that no two attempts share, where only the distribution is promised and drafts are of earlier answers.

    One of these may be of the same prompt and seed: made with the very noise that would judge it.
    """
    attempt = f"{job.claims.seed}/{job.claims.request_id}/{job.claims.attempt}"
    return int.from_bytes(hashlib.blake2b(attempt.encode(), digest_size=8).digest(), "little")


def _start_length(job: DecodeJob, drafter: Drafter) -> int | None:
    length = job.speculation.draft_length
    return None if length is None else max(0, min(length, drafter.needs.max_draft_length))


def _finish_so_far(finisher: Finisher, committed: tuple[int, ...], index: int) -> ChoiceFinish | None:
    """Take in what the client has, text included; how the answer ended, if that was all of it."""
    if not committed:
        return None
    cut = finisher.push(committed)
    if cut.text is None:
        finisher.text_of(committed[: cut.num_text_tokens], finished=False)
    return cut.finish_of(index)


def _table_of(choice: Choice) -> BlockTable:
    assert choice.table is not None, "a choice without a table is asked about its KV"
    return choice.table


def _not_admitted(_: Request) -> None:
    raise AssertionError("a request was admitted before it was queued")
