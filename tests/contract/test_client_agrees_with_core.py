"""The client repeats a few facts of the server, which it may not import; here they are compared."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_args

import grpc

import outrider
from core import errors, grpc_errors, grpc_options, records, settings, telemetry_names, wire
from outrider import channel, requests, results, tracing
from outrider import errors as client_errors
from router import metadata

OPTIONAL_PARTS_OF_GRPC = {
    "cython_runtime",
    "grpc_tools",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "grpc_channelz",
}
"""`import grpc` looks for each and goes on without."""

OF_OPENTELEMETRY = {"importlib_metadata", "zipp", "typing_extensions"}


def test_every_option_is_one_that_grpc_knows() -> None:
    """gRPC ignores unknown names in silence; its library holds those that it reads."""
    settings_of_both = settings.GrpcSettings()
    names = {
        name
        for options in (
            grpc_options.channel_options(settings_of_both),
            grpc_options.server_options(settings_of_both),
        )
        for name, _ in options
    }
    (path,) = (Path(grpc.__file__).parent / "_cython").glob("cygrpc*.so")
    library = path.read_bytes()
    assert {name for name in names if name.encode() not in library} == set()


def test_channel_options_are_those_of_our_own_channels() -> None:
    assert dict(channel.CHANNEL_OPTIONS) == dict(grpc_options.channel_options(settings.GrpcSettings()))


def test_a_server_with_default_settings_accepts_the_clients_pings_and_messages() -> None:
    server = dict(grpc_options.server_options(settings.GrpcSettings()))
    client = dict(channel.CHANNEL_OPTIONS)
    assert server["grpc.http2.min_ping_interval_without_data_ms"] <= client["grpc.keepalive_time_ms"]
    assert 0 < server["grpc.max_receive_message_length"] == client["grpc.max_send_message_length"]


def test_headers_and_trailers_have_one_spelling() -> None:
    assert (channel.FIELD_TRAILER, channel.RETRY_TRAILER) == (
        grpc_errors.FIELD_TRAILER,
        grpc_errors.RETRY_TRAILER,
    )
    assert (channel.TENANT_HEADER, channel.IDEMPOTENCY_HEADER) == (metadata.TENANT, metadata.IDEMPOTENCY_KEY)


def test_span_and_attribute_names_have_one_spelling() -> None:
    names = {name for name in vars(tracing) if name.isupper() and not name.startswith("_")}
    assert len(names) > 5
    assert {name: getattr(tracing, name) for name in names} == {
        name: getattr(telemetry_names, name) for name in names
    }


def test_verification_modes_have_one_spelling() -> None:
    assert {
        mode: wire.verification_to_wire(mode) for mode in get_args(records.VerificationMode)
    } == requests.VERIFICATIONS
    assert get_args(results.Verification) == get_args(records.VerificationMode)
    assert {wire.verification_from_wire(value) for value in requests.VERIFICATIONS.values()} == set(
        requests.VERIFICATIONS
    )


def test_every_error_of_the_server_has_one_of_the_client() -> None:
    assert set(client_errors.BY_STATUS) == set(errors.BY_STATUS)


def test_error_tree_in_the_docstring_is_the_tree() -> None:
    kinds = [
        kind
        for _, kind in inspect.getmembers(client_errors, inspect.isclass)
        if issubclass(kind, client_errors.OutriderError)
    ]
    assert all(kind.__name__ in (client_errors.__doc__ or "") for kind in kinds)
    assert {kind.__name__ for kind in kinds} <= set(outrider.__all__)


def test_exported_names_exist_and_are_sorted() -> None:
    assert outrider.__all__ == sorted(outrider.__all__)
    assert all(hasattr(outrider, name) for name in outrider.__all__)


def test_client_needs_only_grpc_protobuf_and_opentelemetry() -> None:
    script = (
        "import sys; before = set(sys.modules); import outrider; "
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    root = Path(outrider.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60, check=True
    )
    loaded = {name for name in done.stdout.split() if not name.startswith("_")} - set(sys.stdlib_module_names)
    assert loaded - OPTIONAL_PARTS_OF_GRPC <= {
        "outrider",
        "grpc",
        "google",
        "opentelemetry",
        *OF_OPENTELEMETRY,
    }
