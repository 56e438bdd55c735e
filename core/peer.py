"""What two workers must agree on before KV moves between them."""

from typing import Final

from core.errors import FailedPrecondition
from core.numerics import first_difference
from outrider.v1 import common_pb2

CACHE_FORMAT_VERSION: Final = 1
"""Changes with the meaning of a plane's bytes: layout of rows, rotary order, dtype names."""

GRPC_TRANSPORT: Final = "grpc"
TRANSPORTS: Final = (GRPC_TRANSPORT,)
"""Ways that plane bytes can travel, by name. The Fetch stream itself is always gRPC."""

_EQUAL_FIELDS: Final = (
    "cache_format_version",
    "model_revision",
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "hidden_dim",
    "hidden_layers",
    "kv_dtype",
    "block_size",
    "tensor_parallel",
)


def require_compatible(ours: common_pb2.PeerInfo, theirs: common_pb2.PeerInfo) -> None:
    """Raises FailedPrecondition naming the first field in which the peers differ."""
    for field in _EQUAL_FIELDS:
        own, other = getattr(ours, field), getattr(theirs, field)
        if own != other:
            _refuse(field, ours, theirs, str(own), str(other))
    if ours.numerics_class != theirs.numerics_class:
        name = first_difference(dict(ours.numerics_fields), dict(theirs.numerics_fields))
        own_value = ours.numerics_fields.get(name or "", ours.numerics_class)
        other_value = theirs.numerics_fields.get(name or "", theirs.numerics_class)
        field = f"numerics_class.{name}" if name else "numerics_class"
        _refuse(field, ours, theirs, own_value, other_value)
    if not set(ours.transports) & set(theirs.transports):
        _refuse("transports", ours, theirs, ",".join(ours.transports), ",".join(theirs.transports))


def _refuse(field: str, ours: common_pb2.PeerInfo, theirs: common_pb2.PeerInfo, own: str, other: str) -> None:
    raise FailedPrecondition(
        field, f"{ours.worker_id} has {own or 'none'}, {theirs.worker_id} has {other or 'none'}"
    )
