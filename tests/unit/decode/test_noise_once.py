"""Under rejection and block verification no number of the noise decides two things, over a whole answer."""

from collections import Counter

import pytest
import torch

from core.records import SamplingParams, VerificationMode
from decode.draft import Draft, VerifyItem
from decode.sampling import sampler
from decode.sampling.arithmetic import Float64
from decode.sampling.draft_noise import DraftDraw, draw_children
from decode.sampling.history import TokenHistory
from decode.sampling.noise import uniform
from decode.verification import block, distributions
from decode.verification.verify import verify

TABLE = torch.randn(30, 30, generator=torch.Generator().manual_seed(6)).mul(1.5)
SAMPLING = SamplingParams(temperature=1.0)
SEED = 11
NUM_TOKENS = 60


class Taken:
    """Counts every (key, counter) that an accept decision reads, and every key that a draw reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: Counter[tuple[int, int]] = Counter()
        self.draws: Counter[int] = Counter()
        earliest = sampler.earliest

        def counted_uniform(key: int, trial: int = 0) -> float:
            self.numbers[key, trial] += 1
            return uniform(key, trial)

        def counted_earliest(weights: Float64, key: int, wanted: int = 1) -> list[int]:
            self.draws[key] += 1
            return earliest(weights, key, wanted)

        monkeypatch.setattr(distributions, "uniform", counted_uniform)
        monkeypatch.setattr(sampler, "earliest", counted_earliest)


@pytest.mark.parametrize(("mode", "width"), [("rejection", 1), ("rejection", 3), ("block", 1)])
def test_no_number_is_taken_twice_in_an_answer(
    mode: VerificationMode, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Taken(monkeypatch)
    write_answer(mode, width)
    assert max(taken.numbers.values()) == 1
    assert max(taken.draws.values()) == 1
    assert not {key for key, _ in taken.numbers} & set(taken.draws)


def test_a_coin_of_the_position_alone_would_be_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks judge positions that they then give up, so the next step judges them again."""
    taken = Taken(monkeypatch)

    def of_position_only(item: VerifyItem, position: int, trial: int) -> float:
        return distributions.accept_uniform(item, position, 0)

    monkeypatch.setattr(block, "accept_uniform", of_position_only)
    write_answer("block", 1)
    assert max(taken.numbers.values()) > 1


def write_answer(mode: VerificationMode, width: int) -> None:
    history = TokenHistory([1, 2])
    num_accepted = num_steps = 0
    while history.num_output < NUM_TOKENS:
        draft = grown(history, mode, width)
        item = VerifyItem(SAMPLING, SEED, 0, history, len(history.token_ids), 0, draft, mode)
        (verdict,) = verify([item], TABLE[[history.token_ids[-1], *draft.token_ids]])
        history.extend(verdict.token_ids)
        num_accepted += len(verdict.accepted_rows)
        num_steps += 1
    assert 0 < num_accepted < 3 * num_steps, "drafts were accepted and rejected"


def grown(history: TokenHistory, mode: VerificationMode, width: int) -> Draft:
    """A whole tree of three levels."""
    paths: list[tuple[int, ...]] = [()]
    token_ids: list[int] = []
    parents: list[int] = []
    rows: list[torch.Tensor] = []
    row = 0
    while row < len(paths):
        path = paths[row]
        if len(path) < 3:
            position = len(history.token_ids) + len(path)
            draw = DraftDraw(SAMPLING, SEED, 0, position, mode, history, path)
            last = path[-1] if path else history.token_ids[-1]
            (children,) = draw_children([draw], TABLE[[last]] * 0.6, [width])
            assert children is not None
            assert children.draft_probs is not None
            for token_id in children.token_ids:
                token_ids.append(token_id)
                parents.append(row)
                rows.append(children.draft_probs)
                paths.append((*path, token_id))
        row += 1
    return Draft(tuple(token_ids), tuple(parents), torch.stack(rows), without_replacement=True)
