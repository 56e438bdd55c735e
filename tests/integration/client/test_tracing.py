"""One trace from the client on, with and without an OpenTelemetry SDK."""

import json
import re
import subprocess
import sys

import pytest

from outrider import Client
from tests.integration.client.scripted_server import ScriptedServer

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-0[13]")  # sampled, perhaps random

WITH_SDK = """
import json, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from outrider import Client, OutriderError

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
with Client(sys.argv[1]) as client:
    with trace.get_tracer("caller").start_as_current_span("caller"):
        trace_id = client.generate("answer").trace_id
    try:
        client.generate("fail:UNAVAILABLE")
    except OutriderError:
        pass
    for _ in client.stream("hang"):
        break
spans = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
print(json.dumps({"trace_id": trace_id, "spans": spans}))
"""


def test_without_an_sdk_a_trace_context_is_made_and_sent(server: ScriptedServer) -> None:
    with Client(server.address) as client:
        results = [client.generate("answer") for _ in range(2)]
    sent = [TRACEPARENT.fullmatch(metadata["traceparent"]) for metadata in server.router.metadata]
    assert [match and match.group(1) for match in sent] == [result.trace_id for result in results]
    assert results[0].trace_id != results[1].trace_id


@pytest.fixture
def exported(server: ScriptedServer) -> dict[str, object]:
    """What a caller with an SDK exports. In a process of its own: a tracer provider cannot be replaced."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_SDK, server.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    values: dict[str, object] = json.loads(done.stdout)
    return values


def test_with_an_sdk_the_client_span_is_in_the_callers_trace_and_states_its_outcome(
    server: ScriptedServer, exported: dict[str, object]
) -> None:
    spans = exported["spans"]
    assert isinstance(spans, list)
    calls = [span for span in spans if span["name"] == "outrider.client.generate"]
    assert [span["attributes"]["outrider.status"] for span in calls] == ["OK", "UNAVAILABLE", "CANCELLED"]
    assert {span["kind"] for span in calls} == {"SpanKind.CLIENT"}
    (caller,) = (span for span in spans if span["name"] == "caller")
    assert caller["context"]["trace_id"] == calls[0]["context"]["trace_id"] == f"0x{exported['trace_id']}"
    assert calls[0]["attributes"]["gen_ai.usage.output_tokens"] == 7
    sent = TRACEPARENT.fullmatch(server.router.metadata[0]["traceparent"])
    assert sent is not None
    assert sent.group(2) == calls[0]["context"]["span_id"].removeprefix("0x")


def test_no_prompt_and_no_answer_are_on_the_span(exported: dict[str, object]) -> None:
    assert "answer" not in json.dumps(exported["spans"])
    assert "Hel" not in json.dumps(exported["spans"])
