"""`auto` from the front door: one drafter where the policy leaves one, else what the worker says that it chose."""

from pathlib import Path

import pytest

from core.settings import RouterSettings
from outrider.v1 import inference_pb2
from tests.support.router_stand import FAST, Stand, collect, request, router_stand

pytestmark = pytest.mark.timeout(30)


def asked(drafter: str = "auto") -> inference_pb2.GenerateRequest:
    message = request()
    message.speculation.drafter = drafter
    return message


async def hosting(stand: Stand, *drafters: str) -> None:
    """Its worker hosts these from now on, and the router knows."""
    stand.workers[0].drafters = ("none", *drafters)
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
