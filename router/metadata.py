"""Names of the call metadata that the router reads, and the limits on their values."""

from collections.abc import Iterable

from core.errors import InvalidArgument
from router.views import Caller

TENANT = "x-outrider-tenant"
IDEMPOTENCY_KEY = "x-outrider-idempotency-key"

MAX_TENANT_CHARACTERS = 128
MAX_KEY_CHARACTERS = 256


def caller_from_metadata(metadata: Iterable[tuple[str, str | bytes]], deadline_s: float | None) -> Caller:
    """The caller of a request. Raises InvalidArgument naming the metadata key."""
    pairs = tuple((key.lower(), value) for key, value in metadata)
    values = {key: value for key, value in pairs if isinstance(value, str)}
    tenant = values.get(TENANT, "")
    key = values.get(IDEMPOTENCY_KEY)
    if len(tenant) > MAX_TENANT_CHARACTERS:
        raise InvalidArgument(TENANT, f"longer than {MAX_TENANT_CHARACTERS} characters")
    if key is not None and not 1 <= len(key) <= MAX_KEY_CHARACTERS:
        raise InvalidArgument(IDEMPOTENCY_KEY, f"must have 1 to {MAX_KEY_CHARACTERS} characters")
    return Caller(tenant=tenant, idempotency_key=key, deadline_s=deadline_s, metadata=pairs)
