"""How the client's channels are set up. `tests/contract` proves that the server's settings agree."""

from typing import Final

MAX_MESSAGE_BYTES: Final = 8 * 2**20
KEEPALIVE_TIME_S: Final = 10.0
KEEPALIVE_TIMEOUT_S: Final = 5.0

CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", int(KEEPALIVE_TIME_S * 1000)),
    ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
)

FIELD_TRAILER: Final = "outrider-error-field"
RETRY_TRAILER: Final = "outrider-retry-after-ms"
TENANT_HEADER: Final = "x-outrider-tenant"
IDEMPOTENCY_HEADER: Final = "x-outrider-idempotency-key"
AUTHORIZATION_HEADER: Final = "authorization"
