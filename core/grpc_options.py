"""Channel and server options. Both ends take them from one `GrpcSettings`, so they cannot disagree.

A client pings each `keepalive_time_s`; a server refuses pings closer than `min_ping_interval_s`.
"""

from core.errors import InvalidArgument
from core.settings import GrpcSettings

Options = list[tuple[str, int]]


def _limits(settings: GrpcSettings) -> Options:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(settings: GrpcSettings) -> Options:
    """Options of every channel that we open."""
    _check(settings)
    return [*_limits(settings), ("grpc.enable_http_proxy", 0)]


def server_options(settings: GrpcSettings) -> Options:
    """Options of every server that we start."""
    _check(settings)
    return [
        *_limits(settings),
        ("grpc.http2.min_ping_interval_without_data_ms", int(settings.min_ping_interval_s * 1000)),
        ("grpc.http2.max_ping_strikes", 2),
        ("grpc.so_reuseport", 0),
    ]


def _check(settings: GrpcSettings) -> None:
    if settings.min_ping_interval_s > settings.keepalive_time_s:
        raise InvalidArgument(
            "grpc.min_ping_interval_s", "must not exceed grpc.keepalive_time_s, or our own pings are refused"
        )
