"""The hypotheses of one beam search and their blocks: forked copy-on-write, stepped as one row each. Engine thread."""

from collections.abc import Sequence

from torch import Tensor

from core.records import SamplingParams, TokenLogprobs
from decode.beam_search import BeamSearch, Candidate, Finished, Hypothesis
from decode.finisher import Finisher
from decode.sampling import sampler
from decode.sampling.history import TokenHistory
from decode.sampling.pipeline import NOT_FINITE
from decode.sampling.sampler import LogprobRequest
from decode.sampling.step_items import DrawItem
from engine.block_table import BlockTable
from engine.kv_cache import KvCache
from engine.kv_layout import KvLayout
from engine.step_batch import SequenceStep


class BeamGroup:
    """The search behind one choice. `history` is its prompt, `finisher` its own: both are only read.

    Holds a table for each running hypothesis, with K and V of all its tokens but the last; before the first token
    that is the prompt's. Preempted, it gives them all back and begins again from the prompt: the search
    is a function of the prompt, so the answer is the same.
    """

    def __init__(self, sampling: SamplingParams, history: TokenHistory, finisher: Finisher) -> None:
        self.width = sampling.beam_width
        self._sampling = sampling
        self._history = history
        self._finisher = finisher
        self._search = BeamSearch(sampling, finisher)
        self._tables: list[BlockTable] = []
        self._longest_length = 0
        stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else sampling.eos_token_ids)}
        self._num_children = self.width * (2 if sampling.stop else 1) + len(stop_ids)
        """Children of a hypothesis that are looked at: stop strings may end any of them, ids each one."""

    @property
    def length(self) -> int:
        """Tokens of each hypothesis so far."""
        return self._search.length

    @property
    def num_rows(self) -> int:
        """Rows of the next step."""
        return len(self._search.running)

    @property
    def holds_blocks(self) -> bool:
        """Whether closing it gives anything back."""
        return bool(self._tables)

    @property
    def best(self) -> Finished | None:
        """The answer; None while it is searched for."""
        return self._search.finished[0] if self._search.over and self._search.finished else None

    def num_blocks(self, layout: KvLayout) -> int:
        """Blocks to get as far as it was, and one token further, if hypotheses share full blocks of the prompt only."""
        prompt_tokens = len(self._history.token_ids)
        shared = prompt_tokens // layout.block_size
        return shared + self.width * (layout.blocks_for(prompt_tokens + self._longest_length + 1) - shared)

    def start(self, table: BlockTable) -> None:
        """Takes over the table of the prompt, K and V of its last token there or still to be computed."""
        assert not self._tables, "a search is started once"
        self._tables = [table]

    def reserve(self, kv: KvCache) -> None:
        """One slot more in each table. Raises OutOfBlocks; then some have it, and it may be asked again."""
        for table in self._tables:
            kv.reserve(table, table.num_tokens + 1)

    def sequences(self) -> list[SequenceStep]:
        """The rows of the next step: the last token of each hypothesis."""
        prompt_end = self._history.token_ids[-1]
        return [
            SequenceStep(
                table, table.num_tokens, (hypothesis.token_ids[-1] if hypothesis.token_ids else prompt_end,)
            )
            for table, hypothesis in zip(self._tables, self._search.running, strict=True)
        ]

    def commit(self, kv: KvCache) -> None:
        """The rows of `sequences` have been computed."""
        for table in self._tables:
            kv.commit(table, table.num_tokens + 1)

    def advance(self, kv: KvCache, logits: Tensor) -> str | None:
        """Choose the next tokens by `logits` [hypotheses, vocabulary], raw; what left none to choose, if that is so.

        Tables follow their hypotheses: one that goes on in several ways is forked, one that does not is closed.
        """
        rows = sampler.as_rows(logits)
        draws = [self._draw(row, hypothesis) for row, hypothesis in enumerate(self._search.running)]
        children = sampler.children(draws, [self._num_children] * len(draws), rows)
        candidates: list[Candidate] = []
        errors: list[str] = []
        for beam, (hypothesis, found) in enumerate(zip(self._search.running, children, strict=True)):
            if found is None:
                errors.append(str(sampler.probs(draws[beam], rows)))
                continue
            candidates += [
                Candidate(beam, token_id, hypothesis.log_prob + score)
                for token_id, score in zip(found.token_ids, found.scores, strict=True)
            ]
        if NOT_FINITE in errors:
            return NOT_FINITE
        self._search.advance(candidates, lambda candidate: self._extended(candidate, rows))
        self._longest_length = max(self._longest_length, self._search.length)
        self._follow(kv)
        return errors[0] if self._search.over and not self._search.finished else None

    def close(self, kv: KvCache) -> None:
        """Give all blocks back; the search is at its beginning again. Idempotent."""
        for table in self._tables:
            kv.close(table)
        self._tables = []
        self._search = BeamSearch(self._sampling, self._finisher)

    def _draw(self, row: int, hypothesis: Hypothesis) -> DrawItem:
        """The pipeline past the hypothesis' own tokens; nothing is drawn, so no noise is named."""
        return DrawItem(
            sampling=self._sampling,
            seed=0,
            choice=0,
            position=len(self._history.token_ids) + len(hypothesis.token_ids),
            history=self._history,
            logits_row=row,
            path=hypothesis.token_ids,
        )

    def _extended(self, candidate: Candidate, rows: Tensor) -> Hypothesis:
        parent = self._search.running[candidate.beam]
        finisher = parent.finisher.fork()
        cut = finisher.push((candidate.token_id,))
        return Hypothesis(
            token_ids=(*parent.token_ids, candidate.token_id),
            log_prob=candidate.log_prob,
            beam=candidate.beam,
            ended=cut.finish is not None,
            finisher=finisher,
            logprobs=(*parent.logprobs, *self._logprobs(candidate, rows)),
        )

    def _logprobs(self, candidate: Candidate, rows: Tensor) -> Sequence[TokenLogprobs]:
        """Of the candidate's token, before any processing; none where not asked for."""
        wanted = self._sampling.logprobs
        if wanted is None:
            return ()
        (entries,) = sampler.logprobs([LogprobRequest(candidate.beam, candidate.token_id, wanted)], rows)
        (token_id, logprob), *top = entries
        return (TokenLogprobs(token_id, logprob, tuple(top)),)

    def _follow(self, kv: KvCache) -> None:
        tables, self._tables = self._tables, []
        taken: set[int] = set()
        for hypothesis in () if self._search.over else self._search.running:
            table = tables[hypothesis.beam]
            self._tables.append(kv.fork(table) if hypothesis.beam in taken else table)
            taken.add(hypothesis.beam)
        for beam, table in enumerate(tables):
            if beam not in taken:
                kv.close(table)
