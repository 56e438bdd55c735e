"""Idempotency, drain and Admin over real sockets."""

import asyncio
from pathlib import Path

import grpc
import pytest

from core.settings import RouterSettings
from outrider.v1 import admin_pb2
from router.metadata import IDEMPOTENCY_KEY, TENANT
from tests.support.router_stand import collect, request, router_stand

pytestmark = pytest.mark.timeout(30)

KEY = ((TENANT, "acme"), (IDEMPOTENCY_KEY, "order-17"))


async def test_a_repeat_under_one_key_gives_the_same_seed_and_text() -> None:
    async with router_stand() as stand:
        message = request(seed=None)
        first = await collect(stand.inference.Generate(message, metadata=KEY))
        second = await collect(stand.inference.Generate(message, metadata=KEY))
        other = await collect(
            stand.inference.Generate(message, metadata=((TENANT, "acm"), (IDEMPOTENCY_KEY, "eorder-17")))
        )
    assert first.started.seed == second.started.seed
    assert first.text == second.text
    assert other.started.seed != first.started.seed


async def test_a_repeat_supersedes_the_running_call_which_ends_cancelled_with_the_reason() -> None:
    async with router_stand() as stand:
        stand.workers[0].gate.clear()
        older = stand.inference.Generate(request(), metadata=KEY)
        await older.read()
        newer = asyncio.create_task(collect(stand.inference.Generate(request(), metadata=KEY)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await older.read()
        stand.workers[0].gate.set()
        reply = await newer
        await stand.idle()
        assert stand.router.status().counters["idempotency_keys"] == 0
        assert stand.workers[0].cancelled == 1
    assert caught.value.code() is grpc.StatusCode.CANCELLED
    assert "superseded" in str(caught.value.details())
    assert reply.finished.usage.completion_tokens == 30


async def test_another_body_under_a_live_key_is_refused_and_the_running_call_goes_on() -> None:
    async with router_stand() as stand:
        stand.workers[0].gate.clear()
        older = stand.inference.Generate(request("one"), metadata=KEY)
        running = asyncio.create_task(collect(older))
        await stand.workers_running(1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request("two"), metadata=KEY))
        stand.workers[0].gate.set()
        await running
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_workers_and_drafters_are_listed_as_they_answer_now() -> None:
    async with router_stand(num_workers=2) as stand:
        await stand.workers[1].stop()
        workers = (await stand.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
        drafters = (await stand.admin.ListDrafters(admin_pb2.ListDraftersRequest())).drafters
    assert [(worker.worker_id, worker.ready) for worker in workers] == [
        ("router-0", True),
        ("decode-0", True),
        ("decode-1", False),
    ]
    assert [(drafter.name, drafter.max_draft_length) for drafter in drafters] == [("ngram", 16), ("none", 0)]


async def test_drain_of_a_worker_is_passed_on_and_of_an_unknown_one_refused() -> None:
    async with router_stand() as stand:
        await stand.admin.Drain(admin_pb2.DrainRequest(worker_id="decode-0", grace_s=1.5))
        assert stand.workers[0].drained_s == [1.5]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stand.admin.Drain(admin_pb2.DrainRequest(worker_id="decode-9"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_draining_router_finishes_what_runs_and_refuses_what_comes() -> None:
    async with router_stand() as stand:
        stand.workers[0].gate.clear()
        running = asyncio.create_task(collect(stand.inference.Generate(request())))
        await stand.workers_running(1)
        draining = stand.admin.Drain(admin_pb2.DrainRequest(grace_s=10))
        while not stand.router.status().draining:
            await stand.router.directory.changed(1.0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(stand.inference.Generate(request()))
        stand.workers[0].gate.set()
        await running
        assert (await draining).remaining == 0
        assert not stand.router.status().ready
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_policies_are_reloaded_whole_or_not_at_all(tmp_path: Path) -> None:
    policy_file = tmp_path / "policies.toml"
    policy_file.write_text('[class.chat]\ndrafter = "none"\n')
    settings = RouterSettings(registry_poll_s=0.05, policy_file=str(policy_file))
    async with router_stand(settings=settings) as stand:
        assert (await collect(stand.inference.Generate(request()))).started.drafter == "none"
        policy_file.write_text('[class.chat]\ndrafter = "ngram"\n[class.code]\ndraft_lenght = 3\n')
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stand.admin.ReloadPolicies(admin_pb2.ReloadPoliciesRequest())
        assert (await collect(stand.inference.Generate(request()))).started.drafter == "none"
        policy_file.write_text('[class.chat]\ndrafter = "oracle"\n')
        await stand.admin.ReloadPolicies(admin_pb2.ReloadPoliciesRequest())
        fallen = await collect(stand.inference.Generate(request()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "class.code.draft_lenght" in str(caught.value.details())
    assert fallen.started.drafter == "none"
    assert "oracle is not hosted" in fallen.started.route_reason
    assert fallen.finished.speculation.fallback_reason == "drafter_not_hosted"


async def test_answers_go_on_and_requests_are_served_while_the_registry_is_gone_or_emptied() -> None:
    async with router_stand() as stand:
        known = dict(stand.registry.workers)
        stand.registry.workers.clear()
        await stand.router.directory.changed(1.0)
        await collect(stand.inference.Generate(request()))
        stand.registry.workers.update(known)
        stand.registry.failing = True
        await stand.router.directory.refresh()
        assert stand.router.status().counters["registry_reachable"] == 0
        await collect(stand.inference.Generate(request()))
