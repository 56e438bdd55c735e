"""`auto` from the front door: one drafter where the policy leaves one, else what the worker says that it chose."""

from collections import deque
from pathlib import Path

import pytest

from core.records import SpeculationParams
from core.settings import ClassPolicy, RouterSettings
from outrider.v1 import inference_pb2
from router.policy import choose_drafting, keep_drafter
from tests.support.router_stand import FAST, Stand, collect, request, router_stand
from tests.support.scripted_decode import Fault

pytestmark = pytest.mark.timeout(30)


def asked(drafter: str = "auto") -> inference_pb2.GenerateRequest:
    message = request()
    message.speculation.drafter = drafter
    return message


async def hosting(stand: Stand, *drafters: str) -> None:
    """Its workers host these from now on, and the router knows."""
    for worker in stand.workers:
        worker.drafters = ("none", *drafters)
    while set(drafters) - stand.router.directory.offer().drafters:
        await stand.router.directory.changed(1.0)


async def test_the_worker_is_told_what_it_may_choose_from_and_tells_what_it_chose() -> None:
    async with router_stand() as stand:
        await hosting(stand, "medusa", "ngram")
        reply = await collect(stand.inference.Generate(asked()))
        (seen,) = stand.workers[0].requests
        assert (seen.speculation.drafter, list(seen.auto_drafters)) == ("auto", ["medusa", "ngram"])
        assert not seen.draft_length_fixed
        assert reply.started.drafter == reply.finished.speculation.drafter == "ngram"
        assert "medusa, ngram" in reply.started.route_reason


async def test_an_answer_that_moves_keeps_the_drafter_that_it_began_with() -> None:
    async with router_stand(num_workers=2) as stand:
        await hosting(stand, "medusa", "ngram")
        once = deque([Fault("unavailable", 3)])
        for worker in stand.workers:
            worker.faults = once
        message = asked()
        message.sampling.max_tokens = 20
        reply = await collect(stand.inference.Generate(message))
        assert sum(len(worker.fired) for worker in stand.workers) == 1
        seen = sorted(list(made.auto_drafters) for worker in stand.workers for made in worker.requests)
        assert seen == [["medusa", "ngram"], ["ngram"]]
        assert reply.started.drafter == reply.finished.speculation.drafter == "ngram"


@pytest.mark.parametrize(("taken", "fallback"), [("none", ""), ("ngram", "drafter_not_hosted")])
def test_an_answer_goes_on_without_a_drafter_that_it_did_not_take_or_that_is_not_there(
    taken: str, fallback: str
) -> None:
    hosted = frozenset({"none", "medusa", "eagle3"})
    policy = ClassPolicy(drafter=("medusa", "eagle3"), draft_length=4)
    plan = choose_drafting(SpeculationParams(), policy, hosted, 16)
    kept = keep_drafter(plan, taken, hosted)
    assert (kept.speculation.drafter, kept.speculation.draft_length) == ("none", None)
    assert (kept.candidates, kept.fallback) == ((), fallback)
    assert keep_drafter(kept, "medusa", hosted) == kept


def test_an_answer_that_began_exact_stays_exact_whatever_the_policy_says_meanwhile() -> None:
    hosted = frozenset({"none", "medusa", "cascade"})
    asked = SpeculationParams(allow_approximate=True)
    plan = choose_drafting(asked, ClassPolicy(drafter="cascade"), hosted, 16)
    assert plan.speculation.drafter == "cascade"
    assert keep_drafter(plan, "medusa", hosted).speculation.drafter == "none"
    assert keep_drafter(plan, "cascade", hosted) == plan
    typical = SpeculationParams("medusa", verification="typical", allow_approximate=True)
    named = choose_drafting(typical, ClassPolicy(drafter="cascade"), hosted, 16)
    assert keep_drafter(named, "medusa", hosted) == named, "a mode is no drafter"


async def test_a_drafter_given_by_client_or_policy_is_no_choice(tmp_path: Path) -> None:
    policies = tmp_path / "policies.toml"
    policies.write_text('[class.chat]\ndrafter = "medusa"\n')
    settings = RouterSettings.model_validate({**FAST.model_dump(), "policy_file": str(policies)})
    async with router_stand(settings=settings) as stand:
        await hosting(stand, "medusa", "ngram")
        for message in (asked("medusa"), asked("auto")):
            reply = await collect(stand.inference.Generate(message))
            seen = stand.workers[0].requests[-1]
            assert (seen.speculation.drafter, list(seen.auto_drafters)) == ("medusa", [])
            assert reply.started.drafter == "medusa"
