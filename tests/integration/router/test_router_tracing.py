"""The router's part of a request's one trace (CASES B55), and drafters of neighbours side by side (CASES B43)."""

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from core import telemetry_names as names
from outrider.v1 import common_pb2
from tests.support.router_stand import collect, request, router_stand
from tests.support.scripted_decode import Fault

pytestmark = pytest.mark.timeout(30)

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
TRACEPARENT = (("traceparent", f"00-{TRACE_ID}-{CLIENT_SPAN}-01"),)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    """Collects spans of the process's provider, which is set once and shared by all tests."""
    provider = trace.get_tracer_provider()
    if not isinstance(provider, TracerProvider):
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    collected = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(collected))
    yield collected
    collected.shutdown()


def ours(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    """Finished spans of the client's trace, by name."""
    found: dict[str, list[ReadableSpan]] = {}
    spans: Sequence[ReadableSpan] = exporter.get_finished_spans()
    for span in spans:
        if span.context is not None and format(span.context.trace_id, "032x") == TRACE_ID:
            found.setdefault(span.name, []).append(span)
    return found


async def test_client_router_classify_place_and_every_attempt_are_one_trace(
    exporter: InMemorySpanExporter,
) -> None:
    async with router_stand() as stand:
        stand.workers[0].faults.append(Fault("unavailable", 3))
        reply = await collect(stand.inference.Generate(request("hello"), metadata=TRACEPARENT))
        assert stand.workers[0].fired
        parents = [str(seen["traceparent"]) for seen in stand.workers[0].metadata]
    spans = ours(exporter)
    (router,) = spans[names.SPAN_ROUTER]
    assert router.context is not None
    assert router.parent is not None
    assert format(router.parent.span_id, "016x") == CLIENT_SPAN
    router_id = format(router.context.span_id, "016x")
    children = [*spans[names.SPAN_CLASSIFY], *spans[names.SPAN_PLACE]]
    assert len(children) == 3
    assert {format(span.parent.span_id, "016x") for span in children if span.parent} == {router_id}
    assert [parent.split("-")[1:3] for parent in parents] == [[TRACE_ID, router_id]] * 2
    assert router.attributes is not None
    assert router.attributes[names.REQUEST_CLASS] == "chat"
    assert "policy" in str(router.attributes[names.ROUTE_REASON])
    assert router.attributes[names.STATUS] == "OK"
    assert reply.started.trace_id == reply.finished.trace_id == TRACE_ID
    assert "hello" not in "".join(span.to_json() for found in spans.values() for span in found)


async def test_a_cancelled_request_ends_its_span_with_its_status(exporter: InMemorySpanExporter) -> None:
    async with router_stand() as stand:
        stand.workers[0].gate.clear()
        call = stand.inference.Generate(request(), metadata=TRACEPARENT)
        await call.read()
        call.cancel()
        await stand.idle()
    (router,) = ours(exporter)[names.SPAN_ROUTER]
    assert router.attributes is not None
    assert router.attributes[names.STATUS] == "CANCELLED"
    assert not router.status.is_ok


async def test_the_first_message_names_the_mode_and_says_when_it_is_approximate() -> None:
    asked = [
        common_pb2.SpeculationParams(verification=common_pb2.VERIFICATION_TYPICAL, allow_approximate=True),
        common_pb2.SpeculationParams(verification=common_pb2.VERIFICATION_BLOCK, allow_approximate=True),
        common_pb2.SpeculationParams(),
    ]
    seen = []
    async with router_stand() as stand:
        for speculation in asked:
            message = request("hello")
            message.speculation.CopyFrom(speculation)
            reply = await collect(stand.inference.Generate(message))
            seen.append((reply.started.verification, reply.started.approximate))
    assert seen == [
        (common_pb2.VERIFICATION_TYPICAL, True),
        (common_pb2.VERIFICATION_BLOCK, False),
        (common_pb2.VERIFICATION_INVARIANT, False),
    ]


async def test_neighbours_with_different_drafters_each_get_what_they_asked_for() -> None:
    asked = [
        common_pb2.SpeculationParams(drafter="none"),
        common_pb2.SpeculationParams(drafter="ngram", draft_length=1),
        common_pb2.SpeculationParams(drafter="ngram", draft_length=16, draft_width=3),
        common_pb2.SpeculationParams(),
    ]
    async with router_stand() as stand:
        messages = [request(f"prompt {index}", 6) for index in range(len(asked))]
        for message, speculation in zip(messages, asked, strict=True):
            message.speculation.CopyFrom(speculation)
        replies = await asyncio.gather(*(collect(stand.inference.Generate(message)) for message in messages))
        sent = {bytes(made.token_ids).decode(): made for made in stand.workers[0].requests}
    assert [reply.finished.speculation.drafter for reply in replies] == ["none", "ngram", "ngram", "ngram"]
    plans = [sent[f"prompt {index}"] for index in range(len(asked))]
    assert [plan.speculation.draft_length for plan in plans] == [0, 1, 16, 4]
    assert [plan.draft_length_fixed for plan in plans] == [False, True, True, False]
    assert plans[2].speculation.draft_width == 3
